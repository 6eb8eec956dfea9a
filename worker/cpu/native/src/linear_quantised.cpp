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

// One register tile: two panels of weights by four tokens.
constexpr int PANELS = 2;
constexpr int TILE = 4;
// Tokens whose activations stay in the second cache while all panels pass by.
constexpr int PASS = 256;

inline __m256i load(const void* at) { return _mm256_loadu_si256(static_cast<const __m256i*>(at)); }

// Four columns of one token, for all eight rows.
inline __m256i broadcast(const int8_t* values) {
  int word;
  std::memcpy(&word, values, 4);
  return _mm256_set1_epi32(word);
}

inline __m256 halves(const uint8_t* at) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))); }

// Keeps the compiler from rearranging sums of integers into trees, for which there are not enough registers.
inline void settle(__m256i& value) { asm("" : "+x"(value)); }

// Weights of 8 bits. Signs move to the activations, since a multiply-add of bytes wants one unsigned operand. A pair of
// products is at most 2 · 128 · 127 and fits 16 bits; two pairs do not, so each is widened by itself.
template <int P, int R>
inline void multiply_bytes(const uint8_t* const (&weights)[P], const int8_t* in, __m256i (&total)[P][R]) {
  const __m256i ones = _mm256_set1_epi16(1);
  for (int p = 0; p < P; ++p)
    for (int r = 0; r < R; ++r) total[p][r] = _mm256_setzero_si256();
#pragma GCC unroll 8
  for (int g = 0; g < 8; ++g) {
    __m256i signs[P], sizes[P];
    for (int p = 0; p < P; ++p) {
      signs[p] = load(weights[p] + 32 * g);
      sizes[p] = _mm256_abs_epi8(signs[p]);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const __m256i x = broadcast(in + r * BLOCK + 4 * g);
      for (int p = 0; p < P; ++p) {
        const __m256i pairs = _mm256_maddubs_epi16(sizes[p], _mm256_sign_epi8(x, signs[p]));
        total[p][r] = _mm256_add_epi32(total[p][r], _mm256_madd_epi16(pairs, ones));
        settle(total[p][r]);
      }
    }
  }
}

// Weights of 4 bits, 0 to 15: a whole block's products sum up to 8 · 2 · 15 · 127 = 30480 in each 16-bit lane.
template <int P, int R>
inline void multiply_nibbles(const uint8_t* const (&weights)[P], const int8_t* in, __m256i (&total)[P][R]) {
  const __m256i mask = _mm256_set1_epi8(15);
  for (int p = 0; p < P; ++p)
    for (int r = 0; r < R; ++r) total[p][r] = _mm256_setzero_si256();
#pragma GCC unroll 4
  for (int g = 0; g < 4; ++g) {
    __m256i bytes[P], nibbles[P];
    for (int p = 0; p < P; ++p) bytes[p] = load(weights[p] + 32 * g);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      for (int p = 0; p < P; ++p)
        nibbles[p] = _mm256_and_si256(half ? _mm256_srli_epi16(bytes[p], 4) : bytes[p], mask);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const __m256i x = broadcast(in + r * BLOCK + 16 * half + 4 * g);
        for (int p = 0; p < P; ++p) {
          total[p][r] = _mm256_add_epi16(total[p][r], _mm256_maddubs_epi16(nibbles[p], x));
          settle(total[p][r]);
        }
      }
    }
  }
  for (int p = 0; p < P; ++p)
    for (int r = 0; r < R; ++r) total[p][r] = _mm256_madd_epi16(total[p][r], _mm256_set1_epi16(1));
}

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

// Asks for the lines of [at, at + bytes); what lies beyond the last panel is asked for in vain.
inline void expect(const uint8_t* at, size_t bytes) {
  for (size_t line = 0; line < bytes; line += 64) _mm_prefetch(reinterpret_cast<const char*>(at + line), _MM_HINT_T0);
}

// Panels [panel, panel + P) by tokens [token, token + R) of `tokens`. STREAM: the panels are read for the first time, so
// the next ones are asked for meanwhile, piece by piece: the processor itself loses track at each panel's end.
template <int FORMAT, int P, int R, bool STREAM>
void tile(const Op& op, const Activations& in, int tokens, int panel, int token) {
  constexpr int BYTES = FORMAT == Q8_0 ? 256 : 128;
  const int blocks = op.k / BLOCK;
  const size_t size = panel_bytes(FORMAT, op.k), header = scale_bytes(FORMAT, op.k);
  const uint8_t* base = static_cast<const uint8_t*>(op.weights) + panel * size;
  __m256 sums[P][R];
  for (int p = 0; p < P; ++p)
    for (int r = 0; r < R; ++r) sums[p][r] = _mm256_setzero_ps();
  const size_t piece = P * size / blocks;
  for (int block = 0; block < blocks; ++block) {
    if (STREAM) expect(base + P * size + block * piece, piece);
    const uint8_t* weights[P];
    __m256 scales[P], offsets[P];
    for (int p = 0; p < P; ++p) {
      const uint8_t* halves_at = base + p * size + block * BLOCK_PANEL * 2;
      weights[p] = base + p * size + header + block * BYTES;
      scales[p] = halves(halves_at);
      if (FORMAT == Q4_1) offsets[p] = halves(halves_at + blocks * BLOCK_PANEL * 2);
      if (FORMAT == Q4_0) offsets[p] = _mm256_mul_ps(scales[p], _mm256_set1_ps(-8.0f));
    }
    const size_t at = static_cast<size_t>(block) * tokens + token;
    __m256i total[P][R];
    if (FORMAT == Q8_0) {
      multiply_bytes<P, R>(weights, in.values + at * BLOCK, total);
    } else {
      multiply_nibbles<P, R>(weights, in.values + at * BLOCK, total);
    }
    for (int r = 0; r < R; ++r) {
      const __m256 scale = _mm256_set1_ps(in.scales[at + r]), sum = _mm256_set1_ps(in.sums[at + r]);
      for (int p = 0; p < P; ++p) {
        sums[p][r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(total[p][r]), _mm256_mul_ps(scales[p], scale), sums[p][r]);
        if (FORMAT != Q8_0) sums[p][r] = _mm256_fmadd_ps(offsets[p], sum, sums[p][r]);
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < P; ++p)
      finish(op, sums[p][r], (panel + p) * BLOCK_PANEL, op.out + static_cast<size_t>(token + r) * op.out_stride);
}

template <int FORMAT, int P, bool STREAM>
void tile_of(const Op& op, const Activations& in, int tokens, int panel, int token, int count) {
  static_assert(TILE == 4, "the cases below");
  switch (count) {
    case 1:
      return tile<FORMAT, P, 1, STREAM>(op, in, tokens, panel, token);
    case 2:
      return tile<FORMAT, P, 2, STREAM>(op, in, tokens, panel, token);
    case 3:
      return tile<FORMAT, P, 3, STREAM>(op, in, tokens, panel, token);
    default:
      return tile<FORMAT, P, 4, STREAM>(op, in, tokens, panel, token);
  }
}

template <int FORMAT, int P>
void tiles(const Op& op, const Activations& in, int tokens, int panel, int first, int last) {
  for (int token = first; token < last; token += TILE) {
    const int count = std::min(TILE, last - token);
    // A last panel by itself is seldom: it does not need code of its own.
    if (P < PANELS || token == first) {
      tile_of<FORMAT, P, true>(op, in, tokens, panel, token, count);
    } else {
      tile_of<FORMAT, P, (P < PANELS)>(op, in, tokens, panel, token, count);
    }
  }
}

template <int FORMAT>
void run(const Op& op, const Activations& in, int tokens, int first, int last) {
  for (int pass = 0; pass < tokens; pass += PASS) {
    const int pass_end = std::min(pass + PASS, tokens);
    int panel = first;
    for (; panel + PANELS <= last; panel += PANELS) tiles<FORMAT, PANELS>(op, in, tokens, panel, pass, pass_end);
    for (; panel < last; ++panel) tiles<FORMAT, 1>(op, in, tokens, panel, pass, pass_end);
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
