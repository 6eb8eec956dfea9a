// Linear maps with float32, float16 and bfloat16 weights; activations are float32.
#include <algorithm>

#include "formats.h"
#include "linear.h"
#include "simd.h"

namespace signalbox {

namespace {

// Tokens of one register tile: 6 x 16 outputs are 12 of the 16 registers.
constexpr int TILE = 6;
// Columns whose weights (16 KB) stay in the first cache while all tokens of a block pass by.
constexpr int COLUMNS = 256;
// Tokens of a block: their activations stay in the second cache.
constexpr int TOKENS = 96;

struct Pair {
  __m256 low, high;  // rows 0-7 and 8-15 of one column
};

template <int FORMAT>
inline Pair load_column(const uint8_t* panel, int column);

template <>
inline Pair load_column<F32>(const uint8_t* panel, int column) {
  const float* at = reinterpret_cast<const float*>(panel) + static_cast<size_t>(column) * FLOAT_PANEL;
  return {_mm256_loadu_ps(at), _mm256_loadu_ps(at + LANES)};
}

template <>
inline Pair load_column<F16>(const uint8_t* panel, int column) {
  const __m128i* at = reinterpret_cast<const __m128i*>(panel) + static_cast<size_t>(column) * 2;
  return {_mm256_cvtph_ps(_mm_loadu_si128(at)), _mm256_cvtph_ps(_mm_loadu_si128(at + 1))};
}

template <>
inline Pair load_column<BF16>(const uint8_t* panel, int column) {
  const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(panel) + column);
  return {_mm256_castsi256_ps(_mm256_slli_epi32(words, 16)),
          _mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32(static_cast<int>(0xFFFF0000))))};
}

// Columns [begin, end) of `R` tokens on top of the sums, which are [token][16].
template <int FORMAT, int R>
inline void tile(const uint8_t* panel, const float* in, int stride, int begin, int end, float* sums) {
  __m256 low[R], high[R];
  for (int r = 0; r < R; ++r) {
    low[r] = _mm256_loadu_ps(sums + r * FLOAT_PANEL);
    high[r] = _mm256_loadu_ps(sums + r * FLOAT_PANEL + LANES);
  }
  for (int column = begin; column < end; ++column) {
    const Pair weights = load_column<FORMAT>(panel, column);
    for (int r = 0; r < R; ++r) {
      const __m256 value = _mm256_broadcast_ss(in + static_cast<size_t>(r) * stride + column);
      low[r] = _mm256_fmadd_ps(weights.low, value, low[r]);
      high[r] = _mm256_fmadd_ps(weights.high, value, high[r]);
    }
  }
  for (int r = 0; r < R; ++r) {
    _mm256_storeu_ps(sums + r * FLOAT_PANEL, low[r]);
    _mm256_storeu_ps(sums + r * FLOAT_PANEL + LANES, high[r]);
  }
}

template <int FORMAT>
void tiles(const uint8_t* panel, const float* in, int stride, int tokens, int begin, int end, float* sums) {
  int token = 0;
  for (; token + TILE <= tokens; token += TILE)
    tile<FORMAT, TILE>(panel, in + static_cast<size_t>(token) * stride, stride, begin, end, sums + token * FLOAT_PANEL);
  in += static_cast<size_t>(token) * stride;
  sums += token * FLOAT_PANEL;
  switch (tokens - token) {
    case 1:
      return tile<FORMAT, 1>(panel, in, stride, begin, end, sums);
    case 2:
      return tile<FORMAT, 2>(panel, in, stride, begin, end, sums);
    case 3:
      return tile<FORMAT, 3>(panel, in, stride, begin, end, sums);
    case 4:
      return tile<FORMAT, 4>(panel, in, stride, begin, end, sums);
    case 5:
      return tile<FORMAT, 5>(panel, in, stride, begin, end, sums);
  }
}

void finish(const Op& op, const float* sums, int tokens, int row, float* out) {
  const int count = std::min(FLOAT_PANEL, op.n - row);
  for (int token = 0; token < tokens; ++token, sums += FLOAT_PANEL, out += op.out_stride) {
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
  alignas(32) float sums[TOKENS * FLOAT_PANEL];
  const size_t bytes = panel_bytes(FORMAT, op.k);
  for (int start = 0; start < tokens; start += TOKENS) {
    const int count = std::min(TOKENS, tokens - start);
    const float* in = op.in + static_cast<size_t>(start) * op.in_stride;
    for (int panel = first; panel < last; ++panel) {
      const uint8_t* weights = static_cast<const uint8_t*>(op.weights) + panel * bytes;
      std::fill(sums, sums + count * FLOAT_PANEL, 0.0f);
      const int step = count > TILE ? COLUMNS : op.k;
      for (int column = 0; column < op.k; column += step)
        tiles<FORMAT>(weights, in, op.in_stride, count, column, std::min(column + step, op.k), sums);
      finish(op, sums, count, panel * FLOAT_PANEL, op.out + static_cast<size_t>(start) * op.out_stride);
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
