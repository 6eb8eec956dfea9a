// Linear maps with float32, float16 and bfloat16 weights; activations are float32.
#include <algorithm>

#include "formats.h"
#include "linear.h"
#include "simd.h"

namespace signalbox {

namespace {

// Tokens of one register tile: their sums take 12 of 16, or of AVX-512's 32 registers.
constexpr int TILE = 12 / HALVES;
// Columns whose weights (16 KB) stay in the first cache while all tokens of a block pass by.
constexpr int COLUMNS = 256;
// Tokens of a block: their activations stay in the second cache.
constexpr int TOKENS = 96;

// One column of a half of the panel's rows.
template <int FORMAT>
inline Floats load_column(const uint8_t* panel, int column, int half) {
  const size_t at = static_cast<size_t>(column) * PANEL + half * WIDTH;
  if (FORMAT == F32) return load_floats(reinterpret_cast<const float*>(panel) + at);
  return FORMAT == F16 ? load_halves(panel + 2 * at) : load_bfloats(panel + 2 * at);
}

// Columns [begin, end) of `R` tokens on top of the sums, which are [token][16].
template <int FORMAT, int R>
inline void tile(const uint8_t* panel, const float* in, int stride, int begin, int end, float* sums) {
  Floats sum[R][HALVES];
  for (int r = 0; r < R; ++r)
    for (int h = 0; h < HALVES; ++h) sum[r][h] = load_floats(sums + r * PANEL + h * WIDTH);
  for (int column = begin; column < end; ++column) {
    Floats weights[HALVES];
    for (int h = 0; h < HALVES; ++h) weights[h] = load_column<FORMAT>(panel, column, h);
    for (int r = 0; r < R; ++r) {
      const Floats value = all_of(in[static_cast<size_t>(r) * stride + column]);
      for (int h = 0; h < HALVES; ++h) sum[r][h] = multiply_add(weights[h], value, sum[r][h]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int h = 0; h < HALVES; ++h) store_floats(sums + r * PANEL + h * WIDTH, sum[r][h]);
}

// `count` tokens, at most R.
template <int FORMAT, int R>
inline void tile_of(int count, const uint8_t* panel, const float* in, int stride, int begin, int end, float* sums) {
  if constexpr (R > 1) {
    if (count < R) return tile_of<FORMAT, R - 1>(count, panel, in, stride, begin, end, sums);
  }
  tile<FORMAT, R>(panel, in, stride, begin, end, sums);
}

template <int FORMAT>
void tiles(const uint8_t* panel, const float* in, int stride, int tokens, int begin, int end, float* sums) {
  for (int token = 0; token < tokens; token += TILE) {
    const float* from = in + static_cast<size_t>(token) * stride;
    tile_of<FORMAT, TILE>(std::min(TILE, tokens - token), panel, from, stride, begin, end, sums + token * PANEL);
  }
}

void finish(const Op& op, const float* sums, int tokens, int row, float* out) {
  const int count = std::min(PANEL, op.n - row);
  for (int token = 0; token < tokens; ++token, sums += PANEL, out += op.out_stride) {
    for (int i = 0; i < count; ++i) {
      float value = sums[i];
      if (op.vector) value += op.vector[row + i];
      if (op.flags & ADD) value += out[row + i];
      out[row + i] = value;
    }
  }
}

template <int FORMAT>
void run(const Op& op, int tokens, int first, int last) {
  alignas(32) float sums[TOKENS * PANEL];
  const size_t bytes = panel_bytes(FORMAT, op.k);
  for (int start = 0; start < tokens; start += TOKENS) {
    const int count = std::min(TOKENS, tokens - start);
    const float* in = op.in + static_cast<size_t>(start) * op.in_stride;
    for (int panel = first; panel < last; ++panel) {
      const uint8_t* weights = static_cast<const uint8_t*>(op.weights) + panel * bytes;
      std::fill(sums, sums + count * PANEL, 0.0f);
      const int step = count > TILE ? COLUMNS : op.k;
      for (int column = 0; column < op.k; column += step)
        tiles<FORMAT>(weights, in, op.in_stride, count, column, std::min(column + step, op.k), sums);
      finish(op, sums, count, panel * PANEL, op.out + static_cast<size_t>(start) * op.out_stride);
    }
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
