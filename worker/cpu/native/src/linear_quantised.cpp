// Linear maps with Q8_0, Q4_0 and Q4_1 weights; activations are quantised in blocks of 32.
//
// Within a block the products are summed as integers, exactly. Over the blocks each output is one float chain:
//   sum += integer · (weight scale · activation scale), and then for the formats with an offset
//   sum += offset · (activation scale · sum of the block's activations).
#include <algorithm>
#include <cstring>

#include "formats.h"
#include "linear.h"
#include "simd.h"

namespace signalbox {

namespace {

// Tokens that are worked on with one block's weights in registers, sums in the first cache.
constexpr int TOKENS = 64;
// Tokens whose activations stay in the second cache while all panels pass by.
constexpr int PASS = 256;
// Up to so many tokens the sums stay in registers, and weights stream from memory.
constexpr int FEW = 4;

inline __m256i load(const void* at) { return _mm256_loadu_si256(static_cast<const __m256i*>(at)); }

inline __m256i broadcast4(const int8_t* values) {
  int word;
  std::memcpy(&word, values, 4);
  return _mm256_set1_epi32(word);
}

inline __m256 halves(const uint16_t* at) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
}

// One block of a panel: 8 rows x 32 columns, ready to be multiplied.
template <int FORMAT>
struct Weights;

template <>
struct Weights<Q8_0> {
  static constexpr int BYTES = 256;
  __m256i sizes[8];
  const uint8_t* signs;
  __m256 scale;

  inline Weights(const uint8_t* panel, int, int block, const uint8_t* values) {
    scale = halves(reinterpret_cast<const uint16_t*>(panel) + block * BLOCK_PANEL);
    signs = values + static_cast<size_t>(block) * BYTES;
    for (int g = 0; g < 8; ++g) sizes[g] = _mm256_abs_epi8(load(signs + 32 * g));
  }

  // Signs move to the activations: multiply-add of bytes wants one unsigned operand. A pair of products is at most
  // 2 · 128 · 127 and fits 16 bits; two pairs do not, so each is widened by itself.
  inline __m256 add(__m256 sum, const int8_t* values, float scale_in, float) const {
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i total = _mm256_setzero_si256();
    for (int g = 0; g < 8; ++g) {
      const __m256i in = _mm256_sign_epi8(broadcast4(values + 4 * g), load(signs + 32 * g));
      total = _mm256_add_epi32(total, _mm256_madd_epi16(_mm256_maddubs_epi16(sizes[g], in), ones));
    }
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(total), _mm256_mul_ps(scale, _mm256_set1_ps(scale_in)), sum);
  }
};

// Weights of 4 bits are 0 to 15: a whole block's products sum up to 8 · 2 · 15 · 127 = 30480 in each 16-bit lane.
struct Nibbles {
  static constexpr int BYTES = 128;
  __m256i values[8];
  __m256 scale, offset;

  inline void load_values(const uint8_t* at) {
    const __m256i mask = _mm256_set1_epi8(15);
    for (int g = 0; g < 4; ++g) {
      const __m256i bytes = load(at + 32 * g);
      values[g] = _mm256_and_si256(bytes, mask);
      values[g + 4] = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), mask);
    }
  }

  inline __m256 add(__m256 sum, const int8_t* in, float scale_in, float sum_in) const {
    __m256i even = _mm256_maddubs_epi16(values[0], broadcast4(in));
    __m256i odd = _mm256_maddubs_epi16(values[1], broadcast4(in + 4));
    for (int g = 2; g < 8; g += 2) {
      even = _mm256_add_epi16(even, _mm256_maddubs_epi16(values[g], broadcast4(in + 4 * g)));
      odd = _mm256_add_epi16(odd, _mm256_maddubs_epi16(values[g + 1], broadcast4(in + 4 * g + 4)));
    }
    const __m256i total = _mm256_madd_epi16(_mm256_add_epi16(even, odd), _mm256_set1_epi16(1));
    sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(total), _mm256_mul_ps(scale, _mm256_set1_ps(scale_in)), sum);
    return _mm256_fmadd_ps(offset, _mm256_set1_ps(sum_in), sum);
  }
};

template <>
struct Weights<Q4_0> : Nibbles {
  inline Weights(const uint8_t* panel, int, int block, const uint8_t* at) {
    scale = halves(reinterpret_cast<const uint16_t*>(panel) + block * BLOCK_PANEL);
    offset = _mm256_mul_ps(scale, _mm256_set1_ps(-8.0f));
    load_values(at + static_cast<size_t>(block) * BYTES);
  }
};

template <>
struct Weights<Q4_1> : Nibbles {
  inline Weights(const uint8_t* panel, int blocks, int block, const uint8_t* at) {
    scale = halves(reinterpret_cast<const uint16_t*>(panel) + block * BLOCK_PANEL);
    offset = halves(reinterpret_cast<const uint16_t*>(panel) + (blocks + block) * BLOCK_PANEL);
    load_values(at + static_cast<size_t>(block) * BYTES);
  }
};

inline void finish(const Op& op, __m256 sum, int row, float* out) {
  out += row;
  if (row + BLOCK_PANEL <= op.n) {
    if (op.vector) sum = _mm256_add_ps(sum, _mm256_loadu_ps(op.vector + row));
    if (op.flags & ADD) sum = _mm256_add_ps(sum, _mm256_loadu_ps(out));
    _mm256_storeu_ps(out, sum);
    return;
  }
  const __m256i mask = first_lanes(op.n - row);
  if (op.vector) sum = _mm256_add_ps(sum, _mm256_maskload_ps(op.vector + row, mask));
  if (op.flags & ADD) sum = _mm256_add_ps(sum, _mm256_maskload_ps(out, mask));
  _mm256_maskstore_ps(out, mask, sum);
}

template <int FORMAT, int M>
void few_tokens(const Op& op, const Activations& in, int first, int last) {
  const int blocks = op.k / BLOCK;
  const size_t bytes = panel_bytes(FORMAT, op.k), header = scale_bytes(FORMAT, op.k);
  for (int p = first; p < last; ++p) {
    const uint8_t* panel = static_cast<const uint8_t*>(op.weights) + p * bytes;
    __m256 sums[M];
    for (int m = 0; m < M; ++m) sums[m] = _mm256_setzero_ps();
    for (int block = 0; block < blocks; ++block) {
      const Weights<FORMAT> weights(panel, blocks, block, panel + header);
      for (int m = 0; m < M; ++m) {
        const int at = block * M + m;
        sums[m] = weights.add(sums[m], in.values + at * BLOCK, in.scales[at], in.sums[at]);
      }
    }
    for (int m = 0; m < M; ++m) finish(op, sums[m], p * BLOCK_PANEL, op.out + static_cast<size_t>(m) * op.out_stride);
  }
}

template <int FORMAT>
void many_tokens(const Op& op, const Activations& in, int tokens, int first, int last) {
  const int blocks = op.k / BLOCK;
  const size_t bytes = panel_bytes(FORMAT, op.k), header = scale_bytes(FORMAT, op.k);
  alignas(32) float sums[TOKENS * LANES];
  for (int pass = 0; pass < tokens; pass += PASS) {
    const int pass_end = std::min(pass + PASS, tokens);
    for (int p = first; p < last; ++p) {
      const uint8_t* panel = static_cast<const uint8_t*>(op.weights) + p * bytes;
      for (int start = pass; start < pass_end; start += TOKENS) {
        const int count = std::min(TOKENS, pass_end - start);
        std::fill(sums, sums + count * LANES, 0.0f);
        for (int block = 0; block < blocks; ++block) {
          const Weights<FORMAT> weights(panel, blocks, block, panel + header);
          const size_t at = static_cast<size_t>(block) * tokens + start;
          const int8_t* values = in.values + at * BLOCK;
          for (int m = 0; m < count; ++m) {
            float* sum = sums + m * LANES;
            const __m256 before = _mm256_load_ps(sum);
            _mm256_store_ps(sum, weights.add(before, values + m * BLOCK, in.scales[at + m], in.sums[at + m]));
          }
        }
        for (int m = 0; m < count; ++m)
          finish(op, _mm256_load_ps(sums + m * LANES), p * BLOCK_PANEL,
                 op.out + static_cast<size_t>(start + m) * op.out_stride);
      }
    }
  }
}

template <int FORMAT>
void run(const Op& op, const Activations& in, int tokens, int first, int last) {
  static_assert(FEW == 4, "the cases below");
  switch (tokens) {
    case 1:
      return few_tokens<FORMAT, 1>(op, in, first, last);
    case 2:
      return few_tokens<FORMAT, 2>(op, in, first, last);
    case 3:
      return few_tokens<FORMAT, 3>(op, in, first, last);
    case 4:
      return few_tokens<FORMAT, 4>(op, in, first, last);
    default:
      return many_tokens<FORMAT>(op, in, tokens, first, last);
  }
}

}  // namespace

void linear_quantised(const Op& op, const Activations& in, int tokens, int first, int last) {
  switch (op.format) {
    case Q8_0:
      return run<Q8_0>(op, in, tokens, first, last);
    case Q4_0:
      return run<Q4_0>(op, in, tokens, first, last);
    default:
      return run<Q4_1>(op, in, tokens, first, last);
  }
}

}  // namespace signalbox
