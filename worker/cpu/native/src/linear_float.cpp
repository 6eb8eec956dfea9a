// Linear maps with float32, float16 and bfloat16 weights; activations are float32.
#include <algorithm>

#include "formats.h"
#include "linear.h"
#include "simd.h"

namespace signalbox {

namespace {

// Tokens of one register tile, and panels beside each other in it: their sums take 12 of 16, or of AVX-512's 32 registers
// 28, so that a broadcast value of the input serves two multiply-adds.
constexpr int TILE = HALVES == 1 ? 14 : 6;
constexpr int PANELS = HALVES == 1 ? 2 : 1;
// Most columns of a run, whose weights (16 KB) stay in the first cache while all tokens of a block pass by.
constexpr int COLUMNS = 256 / PANELS;
// Tokens of a block: their activations stay in the second cache.
constexpr int TOKENS = 96;
// How far ahead a single tile asks for its weights, in bytes of a panel.
constexpr int AHEAD = 4096;

constexpr size_t column_bytes(int format) { return PANEL * (format == F32 ? 4 : 2); }

// What a tile asks memory for, into the second cache: with each of its columns `step` bytes, from `at` on and from as far
// into the panel beside it. Tiles that go over the same weights ask for the next ones between them, so that memory is busy
// all the time.
struct Ahead {
  const uint8_t* at;
  size_t step;
};

// One column of a half of the panel's rows.
template <int FORMAT>
inline Floats load_column(const uint8_t* panel, int column, int half) {
  const size_t at = static_cast<size_t>(column) * PANEL + half * WIDTH;
  if (FORMAT == F32) return load_floats(reinterpret_cast<const float*>(panel) + at);
  return FORMAT == F16 ? load_halves(panel + 2 * at) : load_bfloats(panel + 2 * at);
}

// Columns [begin, end) of `R` tokens and `P` panels on top of the sums, which are [panel][TOKENS][16].
template <int FORMAT, int R, int P>
inline void tile(const uint8_t* panel, size_t bytes, const float* in, int stride, int begin, int end, float* sums,
                 Ahead ahead) {
  constexpr int V = P * HALVES;
  const auto at = [sums](int r, int v) { return sums + (v / HALVES * TOKENS + r) * PANEL + v % HALVES * WIDTH; };
  Floats sum[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) sum[r][v] = load_floats(at(r, v));
  for (int column = begin; column < end; ++column, ahead.at += ahead.step) {
    Floats weights[V];
    if constexpr (R > 1 || FORMAT != F32)  // one token's floats: the processor sees that they are read from end to end
      for (int p = 0; p < P; ++p) expect(ahead.at + p * bytes);
    for (int v = 0; v < V; ++v) weights[v] = load_column<FORMAT>(panel + v / HALVES * bytes, column, v % HALVES);
    for (int r = 0; r < R; ++r) {
      const Floats value = all_of(in[static_cast<size_t>(r) * stride + column]);
      for (int v = 0; v < V; ++v) sum[r][v] = multiply_add(weights[v], value, sum[r][v]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) store_floats(at(r, v), sum[r][v]);
}

// `count` tokens, at most R.
template <int FORMAT, int R, int P>
inline void tile_of(int count, const uint8_t* panel, size_t bytes, const float* in, int stride, int begin, int end,
                    float* sums, Ahead ahead) {
  if constexpr (R > 1) {
    if (count < R) return tile_of<FORMAT, R - 1, P>(count, panel, bytes, in, stride, begin, end, sums, ahead);
  }
  tile<FORMAT, R, P>(panel, bytes, in, stride, begin, end, sums, ahead);
}

// All tokens of a block, in tiles of nearly one size: a small one would leave the multipliers waiting for its sums.
template <int FORMAT, int P>
void tiles(const uint8_t* panel, size_t bytes, const float* in, int stride, int tokens, int begin, int end,
           const uint8_t* next_columns, float* sums) {
  const int count = (tokens + TILE - 1) / TILE;
  const size_t step = column_bytes(FORMAT) / count;
  for (int i = 0, token = 0; i < count; ++i) {
    const int next = tokens * (i + 1) / count;
    const Ahead ahead{next_columns + i * step * (end - begin), step};
    const float* from = in + static_cast<size_t>(token) * stride;
    tile_of<FORMAT, TILE, P>(next - token, panel, bytes, from, stride, begin, end, sums + token * PANEL, ahead);
    token = next;
  }
}

// `P` panels of up to TOKENS tokens.
template <int FORMAT, int P>
void block(const Op& op, const float* in, int tokens, int panel, float* out) {
  alignas(64) float sums[P * TOKENS * PANEL];
  const size_t bytes = panel_bytes(FORMAT, op.k);
  const uint8_t* weights = static_cast<const uint8_t*>(op.weights) + panel * bytes;
  // The outputs' lines come while the sums are computed.
  for (int token = 0; token < tokens; ++token)
    for (int p = 0; p < P; ++p) expect(out + static_cast<size_t>(token) * op.out_stride + (panel + p) * PANEL);
  for (int p = 0; p < P; ++p) std::fill_n(sums + p * TOKENS * PANEL, tokens * PANEL, 0.0f);
  const int runs = tokens > TILE ? (op.k + COLUMNS - 1) / COLUMNS : 1, step = (op.k + runs - 1) / runs;
  for (int column = 0; column < op.k; column += step) {
    const int end = std::min(column + step, op.k);
    const uint8_t* next = weights + (step == op.k ? AHEAD : end < op.k ? end * column_bytes(FORMAT) : P * bytes);
    tiles<FORMAT, P>(weights, bytes, in, op.in_stride, tokens, column, end, next, sums);
  }
  for (int p = 0; p < P; ++p)
    for (int token = 0; token < tokens; ++token)
      finish(op, sums + (p * TOKENS + token) * PANEL, PANEL, (panel + p) * PANEL,
             out + static_cast<size_t>(token) * op.out_stride);
}

template <int FORMAT>
void run(const Op& op, int tokens, int first, int last) {
  for (int start = 0; start < tokens; start += TOKENS) {
    const int count = std::min(TOKENS, tokens - start);
    const float* in = op.in + static_cast<size_t>(start) * op.in_stride;
    float* out = op.out + static_cast<size_t>(start) * op.out_stride;
    int panel = first;
    for (; panel + PANELS <= last; panel += PANELS) block<FORMAT, PANELS>(op, in, count, panel, out);
    for (; panel < last; ++panel) block<FORMAT, 1>(op, in, count, panel, out);
  }
}

}  // namespace

void linear_float(const Op& op, int tokens, int first, int last) {
  switch (op.format) {
    case F32:
      return run<F32>(op, tokens, first, last);
    case F16:
      return run<F16>(op, tokens, first, last);
    default:
      return run<BF16>(op, tokens, first, last);
  }
}

}  // namespace signalbox
