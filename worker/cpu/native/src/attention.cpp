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
// Rows of one register tile.
constexpr int ROWS = 6;
constexpr float MINUS_INFINITY = -std::numeric_limits<float>::infinity();

int heads_per_key(const Model& model) { return model.heads / model.kv_heads; }

int tokens_per_item(const Model& model) { return std::max(1, QUERY_ROWS / heads_per_key(model)); }

int rows_per_item(const Model& model) { return tokens_per_item(model) * heads_per_key(model); }

// Groups of 16 keys, or of 16 dimensions, in one register tile: twelve sums keep the multipliers busy.
constexpr int width_of(int rows) { return rows <= ROWS / 2 ? 2 : 1; }

// scores[r][16 w ..] = queries[r] · keys[w], one chain over the dimensions. keys[w]: [dim][16].
template <int R, int W>
inline void score_tile(const float* queries, int dim, const float* const (&keys)[W], float* scores) {
  __m256 low[R][W], high[R][W];
  for (int r = 0; r < R; ++r)
    for (int w = 0; w < W; ++w) low[r][w] = high[r][w] = _mm256_setzero_ps();
  for (int d = 0; d < dim; ++d) {
    __m256 first[W], second[W];
    for (int w = 0; w < W; ++w) {
      first[w] = _mm256_loadu_ps(keys[w] + d * KEY_LANES);
      second[w] = _mm256_loadu_ps(keys[w] + d * KEY_LANES + LANES);
    }
    for (int r = 0; r < R; ++r) {
      const __m256 q = _mm256_broadcast_ss(queries + r * dim + d);
      for (int w = 0; w < W; ++w) {
        low[r][w] = _mm256_fmadd_ps(first[w], q, low[r][w]);
        high[r][w] = _mm256_fmadd_ps(second[w], q, high[r][w]);
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int w = 0; w < W; ++w) {
      _mm256_storeu_ps(scores + r * TILE_KEYS + w * KEY_LANES, low[r][w]);
      _mm256_storeu_ps(scores + r * TILE_KEYS + w * KEY_LANES + LANES, high[r][w]);
    }
  }
}

// sums[r][0..16 W] += sum over keys of weights[r][key] · values[key], one chain over the keys.
template <int R, int W>
inline void mix_tile(const float* weights, int keys, const float* values, int stride, float* sums) {
  __m256 sum[R][2 * W];
  for (int r = 0; r < R; ++r)
    for (int w = 0; w < 2 * W; ++w) sum[r][w] = _mm256_loadu_ps(sums + r * stride + w * LANES);
  for (int key = 0; key < keys; ++key, values += stride) {
    __m256 value[2 * W];
    for (int w = 0; w < 2 * W; ++w) value[w] = _mm256_loadu_ps(values + w * LANES);
    for (int r = 0; r < R; ++r) {
      const __m256 weight = _mm256_broadcast_ss(weights + r * TILE_KEYS + key);
      for (int w = 0; w < 2 * W; ++w) sum[r][w] = _mm256_fmadd_ps(value[w], weight, sum[r][w]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int w = 0; w < 2 * W; ++w) _mm256_storeu_ps(sums + r * stride + w * LANES, sum[r][w]);
}

// Asks for the first lines of memory that is read soon; the processor goes on by itself.
inline void expect(const float* at) {
  for (int line = 0; line < 8; ++line) _mm_prefetch(reinterpret_cast<const char*>(at + line * 16), _MM_HINT_T0);
}

// Calls body with the number of rows as a compile-time constant, for `count` rows in groups of up to six.
template <typename Body>
inline void by_rows(int count, const Body& body) {
  int row = 0;
  for (; row + ROWS <= count; row += ROWS) body(std::integral_constant<int, ROWS>(), row);
  switch (count - row) {
    case 1:
      return body(std::integral_constant<int, 1>(), row);
    case 2:
      return body(std::integral_constant<int, 2>(), row);
    case 3:
      return body(std::integral_constant<int, 3>(), row);
    case 4:
      return body(std::integral_constant<int, 4>(), row);
    case 5:
      return body(std::integral_constant<int, 5>(), row);
  }
}

inline void scale_line(float* line, int count, float factor) {
  if (factor == 1.0f) return;
  for (int i = 0; i < count; ++i) line[i] *= factor;
}

// Attention of one item. Query row r belongs to token r / group and query head r % group.
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

  const float* keys_of(int key) const { return op.keys + KVSlot(model, slot_of(key)).key(item.head); }

  const float* values_of(int key) const { return op.values + KVSlot(model, slot_of(key)).value(item.head); }

  // Scores of all keys of [from, to), and of some beside them that nobody sees.
  void compute_scores(int from, int to) const {
    const float* keys[TILE_KEYS / KEY_LANES];
    int groups = 0;
    const int start = from / KEY_LANES * KEY_LANES;
    for (int key = start; key < to; key += KEY_LANES) keys[groups++] = keys_of(key);
    if (to < end) expect(keys_of(to));
    by_rows(rows, [&](auto count, int row) {
      const float* queries = s.queries + row * dim;
      float* scores = s.scores + row * TILE_KEYS + start % TILE_KEYS;
      int group = 0;
      for (; width_of(count) == 2 && group + 2 <= groups; group += 2) {
        const float* pair[2] = {keys[group], keys[group + 1]};
        score_tile<count, width_of(count)>(queries, dim, reinterpret_cast<const float* const(&)[width_of(count)]>(pair),
                                           scores + group * KEY_LANES);
      }
      for (; group < groups; ++group) {
        const float* one[1] = {keys[group]};
        score_tile<count, 1>(queries, dim, one, scores + group * KEY_LANES);
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

  void soften_line(float* line, int low, int high, int r) const {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    __m256 v[TILE_KEYS / LANES], peaks = _mm256_set1_ps(MINUS_INFINITY);
    for (int i = 0; i < TILE_KEYS / LANES; ++i) {
      const __m256i key = _mm256_add_epi32(lane, _mm256_set1_epi32(i * LANES));
      const __m256i seen = _mm256_and_si256(_mm256_cmpgt_epi32(key, _mm256_set1_epi32(low - 1)),
                                            _mm256_cmpgt_epi32(_mm256_set1_epi32(high), key));
      v[i] = _mm256_blendv_ps(_mm256_set1_ps(MINUS_INFINITY), _mm256_loadu_ps(line + i * LANES),
                              _mm256_castsi256_ps(seen));
      peaks = _mm256_max_ps(peaks, v[i]);
    }
    const float peak = std::max(s.part_peak[r], max_lanes(peaks));
    const __m256 subtract = _mm256_set1_ps(peak);
    __m256 sum = _mm256_setzero_ps();
    for (int i = 0; i < TILE_KEYS / LANES; ++i) {
      const __m256 weight = exp8(_mm256_sub_ps(v[i], subtract));
      _mm256_storeu_ps(line + i * LANES, weight);
      sum = _mm256_add_ps(sum, weight);
    }
    const float fade = exp1(s.part_peak[r] - peak);
    s.part_sum[r] = s.part_sum[r] * fade + sum_lanes(sum);
    scale_line(s.part + r * padded, padded, fade);
    s.part_peak[r] = peak;
  }

  void mix_values(int tile, int from, int to) const {
    for (int key = from; key < to;) {
      const int next = std::min((key / model.block_size + 1) * model.block_size, to);
      const float* values = values_of(key);
      if (next < end) expect(values_of(next));
      by_rows(rows, [&](auto count, int row) {
        const float* weights = s.scores + row * TILE_KEYS + key - tile;
        float* sums = s.part + row * padded;
        int d = 0;
        for (constexpr int step = width_of(count) * KEY_LANES; d + step <= padded; d += step)
          mix_tile<count, width_of(count)>(weights, next - key, values + d, padded, sums + d);
        for (; d < padded; d += KEY_LANES) mix_tile<count, 1>(weights, next - key, values + d, padded, sums + d);
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
  Task{op, model, step, item, scratch}.run();
}

}  // namespace signalbox
