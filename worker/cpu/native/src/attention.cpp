#include "attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "elementwise.h"
#include "kv.h"
#include "simd.h"

namespace signalbox {

namespace {

constexpr int TILE_KEYS = 64;
constexpr int PART_KEYS = 512;
// Query rows (tokens x heads of one KV head) of one item; more only where one token has more heads.
constexpr int QUERY_ROWS = 48;
// Rows of one register tile, and groups of 16 keys, or of 16 dimensions, in it: some twelve sums keep the multipliers
// busy.
constexpr int ROWS = HALVES == 1 ? 8 : 6;
constexpr int width_of(int rows) { return HALVES == 1 || rows <= ROWS / 2 ? 2 : 1; }
constexpr float MINUS_INFINITY = -std::numeric_limits<float>::infinity();

int heads_per_key(const Model& model) { return model.heads / model.kv_heads; }

int tokens_per_item(const Model& model) { return std::max(1, QUERY_ROWS / heads_per_key(model)); }

int rows_per_item(const Model& model) { return tokens_per_item(model) * heads_per_key(model); }

// scores[r][16 w ..] = queries[r] · keys[w], one chain over the dimensions. keys[w]: [dim][16]; as much memory is asked
// for from next[w] on.
template <int R, int W, typename Number>
inline void score_tile(const float* queries, int dim, const Number* const* keys, const Number* const* next,
                       float* scores) {
  Floats sum[R][W * HALVES];
  for (int r = 0; r < R; ++r)
    for (int w = 0; w < W * HALVES; ++w) sum[r][w] = zero_floats();
  for (int d = 0; d < dim; ++d) {
    Floats key[W * HALVES];
    for (int w = 0; w < W * HALVES; ++w) key[w] = load_numbers(keys[w / HALVES] + d * KEY_LANES + w % HALVES * WIDTH);
    for (int w = 0; w < W; ++w) expect(next[w] + d * KEY_LANES);
    for (int r = 0; r < R; ++r) {
      const Floats q = all_of(queries[r * dim + d]);
      for (int w = 0; w < W * HALVES; ++w) sum[r][w] = multiply_add(key[w], q, sum[r][w]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int w = 0; w < W * HALVES; ++w) store_floats(scores + r * TILE_KEYS + w * WIDTH, sum[r][w]);
}

// sums[r][0..16 W] += sum over keys of weights[r][key] · values[key], one chain over the keys; as much memory is asked
// for from `next` on.
template <int R, int W, typename Number>
inline void mix_tile(const float* weights, int keys, const Number* values, const Number* next, int stride,
                     float* sums) {
  Floats sum[R][W * HALVES];
  for (int r = 0; r < R; ++r)
    for (int w = 0; w < W * HALVES; ++w) sum[r][w] = load_floats(sums + r * stride + w * WIDTH);
  for (int key = 0; key < keys; ++key, values += stride, next += stride) {
    Floats value[W * HALVES];
    for (int w = 0; w < W; ++w) expect(next + w * KEY_LANES);
    for (int w = 0; w < W * HALVES; ++w) value[w] = load_numbers(values + w * WIDTH);
    for (int r = 0; r < R; ++r) {
      const Floats weight = all_of(weights[r * TILE_KEYS + key]);
      for (int w = 0; w < W * HALVES; ++w) sum[r][w] = multiply_add(value[w], weight, sum[r][w]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int w = 0; w < W * HALVES; ++w) store_floats(sums + r * stride + w * WIDTH, sum[r][w]);
}

template <int R, typename Body>
inline void last_rows(int count, int row, const Body& body) {
  if constexpr (R > 0) {
    if (count < R) return last_rows<R - 1>(count, row, body);
    body(std::integral_constant<int, R>(), row);
  }
}

// Calls body with the number of rows as a compile-time constant, for `count` rows in groups of up to ROWS.
template <typename Body>
inline void by_rows(int count, const Body& body) {
  int row = 0;
  for (; row + ROWS <= count; row += ROWS) body(std::integral_constant<int, ROWS>(), row);
  last_rows<ROWS - 1>(count - row, row, body);
}

inline void scale_line(float* line, int count, float factor) {
  if (factor == 1.0f) return;
  for (int i = 0; i < count; ++i) line[i] *= factor;
}

// Attention of one item over keys and values in Numbers. Query row r belongs to token r / group and query head r % group.
template <typename Number>
struct Task {
  const Op& op;
  const Model& model;
  const Step& step;
  const AttentionItem& item;
  AttentionScratch& s;
  const int dim = model.head_dim, padded = model.padded_dim, group = heads_per_key(model);
  const int rows = item.count * group;
  const int start = step.positions[item.first], end = start + item.count;  // positions of the queries

  int first_seen(int position) const { return model.window ? std::max(0, position - model.window + 1) : 0; }

  size_t slot_of(int position) const {
    const int block = step.tables[static_cast<size_t>(item.row) * step.table_width + position / model.block_size];
    return static_cast<size_t>(block) * model.block_size + position % model.block_size;
  }

  void load_queries() const {
    const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
    for (int r = 0; r < rows; ++r) {
      const size_t token = item.first + r / group;
      const float* q = op.in + token * op.in_stride + (item.head * group + r % group) * dim;
      for (int d = 0; d < dim; ++d) s.queries[r * dim + d] = q[d] * scale;
    }
  }

  const Number* keys_of(int key) const {
    return static_cast<const Number*>(op.keys) + KVSlot(model, slot_of(key)).key(item.head);
  }

  const Number* values_of(int key) const {
    return static_cast<const Number*>(op.values) + KVSlot(model, slot_of(key)).value(item.head);
  }

  // Scores of all keys of [from, to), and of some beside them that nobody sees.
  void compute_scores(int from, int to) const {
    // The values of these keys come next.
    const Number *keys[TILE_KEYS / KEY_LANES], *values[TILE_KEYS / KEY_LANES];
    int groups = 0;
    const int start = from / KEY_LANES * KEY_LANES;
    for (int key = start; key < to; key += KEY_LANES, ++groups) {
      keys[groups] = keys_of(key);
      values[groups] = values_of(key);
    }
    by_rows(rows, [&](auto count, int row) {
      constexpr int W = width_of(count);
      const float* queries = s.queries + row * dim;
      float* scores = s.scores + row * TILE_KEYS + start % TILE_KEYS;
      for (int group = 0; group < groups;) {
        const int taken = group + W <= groups ? W : 1;
        if (taken == W) {
          score_tile<count, W>(queries, dim, keys + group, values + group, scores + group * KEY_LANES);
        } else {
          score_tile<count, 1>(queries, dim, keys + group, values + group, scores + group * KEY_LANES);
        }
        group += taken;
      }
    });
  }

  // Scores of keys [tile, tile + 64) become weights; lanes that a query does not see are selected away.
  void soften(int tile, int to) const {
    for (int r = 0; r < rows; ++r) {
      const int position = start + r / group;
      const int low = std::max(first_seen(position) - tile, 0), high = std::min(position + 1, to) - tile;
      float* line = s.scores + r * TILE_KEYS;
      if (low >= high) {
        std::fill(line, line + TILE_KEYS, 0.0f);
        continue;
      }
      soften_line(line, low, high, r);
    }
  }

  // Sixteen lanes at a time: the sums of the upper and of the lower eight come together at the end, on every level.
  void soften_line(float* line, int low, int high, int r) const {
    constexpr int COUNT = TILE_KEYS / WIDTH;
    Floats v[COUNT], peaks = all_of(MINUS_INFINITY);
#pragma GCC unroll 8
    for (int i = 0; i < COUNT; ++i) {
      v[i] = only_lanes(load_floats(line + i * WIDTH), low - i * WIDTH, high - i * WIDTH, MINUS_INFINITY);
      peaks = larger(peaks, v[i]);
    }
    const float peak = std::max(s.part_peak[r], max_all(peaks));
    const Floats highest = all_of(peak);
    Floats sums[HALVES];
    for (Floats& sum : sums) sum = zero_floats();
#pragma GCC unroll 8
    for (int i = 0; i < COUNT; ++i) {
      const Floats weight = exponential(subtract(v[i], highest));
      store_floats(line + i * WIDTH, weight);
      sums[i % HALVES] = add(sums[i % HALVES], weight);
    }
    const float fade = exp1(s.part_peak[r] - peak);
    s.part_sum[r] = s.part_sum[r] * fade + sum_all(HALVES == 1 ? sums[0] : add(sums[0], sums[HALVES - 1]));
    scale_line(s.part + r * padded, padded, fade);
    s.part_peak[r] = peak;
  }

  void mix_values(int tile, int from, int to) const {
    for (int key = from; key < to;) {
      const int next = std::min((key / KEY_LANES + 1) * KEY_LANES, to);
      const Number* values = values_of(key);
      const int later = key / KEY_LANES * KEY_LANES + TILE_KEYS;  // among the keys of the next tile, if there is one
      const Number* expected = later < end ? keys_of(later) : values;
      by_rows(rows, [&](auto count, int row) {
        constexpr int W = width_of(count);
        const float* weights = s.scores + row * TILE_KEYS + key - tile;
        float* sums = s.part + row * padded;
        int d = 0;
        for (; d + W * KEY_LANES <= padded; d += W * KEY_LANES)
          mix_tile<count, W>(weights, next - key, values + d, expected + d, padded, sums + d);
        for (; d < padded; d += KEY_LANES) mix_tile<count, 1>(weights, next - key, values + d, expected + d, padded, sums + d);
      });
      key = next;
    }
  }

  // Takes the part's result into the total; `first`: there is none yet.
  void fold(bool first) const {
    for (int r = 0; r < rows; ++r) {
      float *part = s.part + r * padded, *total = s.total + r * padded;
      if (first || s.total_peak[r] == MINUS_INFINITY) {
        std::copy(part, part + padded, total);
        s.total_peak[r] = s.part_peak[r];
        s.total_sum[r] = s.part_sum[r];
        continue;
      }
      if (s.part_peak[r] == MINUS_INFINITY) continue;
      const float peak = std::max(s.total_peak[r], s.part_peak[r]);
      const float fade = exp1(s.total_peak[r] - peak), weight = exp1(s.part_peak[r] - peak);
      for (int i = 0; i < padded; ++i) total[i] = total[i] * fade + part[i] * weight;
      s.total_sum[r] = s.total_sum[r] * fade + s.part_sum[r] * weight;
      s.total_peak[r] = peak;
    }
  }

  void write() const {
    for (int r = 0; r < rows; ++r) {
      const size_t token = item.first + r / group;
      const int column = (item.head * group + r % group) * dim;
      float* out = op.out + token * op.out_stride + column;
      for (int d = 0; d < dim; ++d) out[d] = s.total[r * padded + d] / s.total_sum[r];
    }
  }

  void run() const {
    load_queries();
    const int begin = first_seen(start);
    for (int part = begin / PART_KEYS * PART_KEYS; part < end; part += PART_KEYS) {
      std::fill(s.part, s.part + rows * padded, 0.0f);
      std::fill(s.part_peak, s.part_peak + rows, MINUS_INFINITY);
      std::fill(s.part_sum, s.part_sum + rows, 0.0f);
      const int part_begin = std::max(part, begin / TILE_KEYS * TILE_KEYS), part_end = std::min(part + PART_KEYS, end);
      for (int tile = part_begin; tile < part_end; tile += TILE_KEYS) {
        const int from = std::max(tile, begin), to = std::min(tile + TILE_KEYS, end);
        compute_scores(from, to);
        soften(tile, to);
        mix_values(tile, from, to);
      }
      fold(part == begin / PART_KEYS * PART_KEYS);
    }
    write();
  }
};

}  // namespace

AttentionScratch::AttentionScratch(const Model& model) {
  const size_t rows = rows_per_item(model), lines = rows * model.padded_dim;
  memory_.resize(rows * TILE_KEYS + 3 * lines + 4 * rows);
  float* at = memory_.data();
  const auto take = [&at](size_t count) {
    float* taken = at;
    at += count;
    return taken;
  };
  scores = take(rows * TILE_KEYS);
  queries = take(lines);
  part = take(lines);
  total = take(lines);
  part_peak = take(rows);
  part_sum = take(rows);
  total_peak = take(rows);
  total_sum = take(rows);
}

std::vector<AttentionItem> attention_items(const Model& model, const Step& step) {
  std::vector<AttentionItem> items;
  const int most = tokens_per_item(model);
  for (int row = 0; row < step.rows; ++row) {
    for (int first = step.offsets[row]; first < step.offsets[row + 1]; first += most) {
      const int count = std::min(most, step.offsets[row + 1] - first);
      for (int head = 0; head < model.kv_heads; ++head) items.push_back({row, head, first, count});
    }
  }
  const auto cost = [&step](const AttentionItem& item) {
    return static_cast<int64_t>(item.count) * (step.positions[item.first] + item.count);
  };
  std::stable_sort(items.begin(), items.end(),
                   [&](const AttentionItem& a, const AttentionItem& b) { return cost(a) > cost(b); });
  return items;
}

void attend(const Op& op, const Model& model, const Step& step, const AttentionItem& item, AttentionScratch& scratch) {
  switch (model.kv_format) {
    case F32:
      return Task<float>{op, model, step, item, scratch}.run();
    case F16:
      return Task<Half>{op, model, step, item, scratch}.run();
    default:
      return Task<BFloat>{op, model, step, item, scratch}.run();
  }
}

}  // namespace signalbox
