// Vectors of eight floats, and of as many as the machine's widest register holds. Every function has one fixed order
// of operations, whoever calls it, and at every width.
#pragma once

#include <immintrin.h>

#include <cfloat>
#include <cstdint>
#include <initializer_list>

namespace signalbox {

constexpr int LANES = 8;

inline float sum_lanes(__m256 v) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

inline int32_t sum_lanes(__m256i v) {
  __m128i half = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4E));
  return _mm_cvtsi128_si32(_mm_add_epi32(half, _mm_shuffle_epi32(half, 0xB1)));
}

inline float max_lanes(__m256 v) {
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}

inline __m256 absolute(__m256 v) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), v); }

// All ones in lanes that hold NaN or infinity.
inline __m256 not_finite(__m256 v) { return _mm256_cmp_ps(absolute(v), _mm256_set1_ps(FLT_MAX), _CMP_NLE_UQ); }

// Ones in the first `count` lanes.
inline __m256i first_lanes(int count) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

// e^x within 2 units in the last place up to x = 88; 0 below -87.3; NaN stays NaN. A range reduction by ln 2 and a
// polynomial of degree 6 (Taylor with the remainder spread by Chebyshev).
inline __m256 exp8(__m256 x) {
  const __m256 lowest = _mm256_set1_ps(-87.3f);
  const __m256 bounded = _mm256_min_ps(_mm256_set1_ps(88.0f), _mm256_max_ps(lowest, x));
  const __m256 n = _mm256_round_ps(_mm256_mul_ps(bounded, _mm256_set1_ps(1.44269504f)),
                                   _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), bounded);
  r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
  __m256 p = _mm256_set1_ps(1.0f / 720);
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 120));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 24));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 6));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0.5f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
  const __m256i power = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
  const __m256 scaled = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), power));
  return _mm256_andnot_ps(_mm256_cmp_ps(x, lowest, _CMP_LT_OQ), scaled);
}

inline float exp1(float x) { return _mm256_cvtss_f32(exp8(_mm256_set1_ps(x))); }

// Sixteen rows or positions stand beside each other wherever order does not matter. They are worked on as HALVES
// vectors: two of eight lanes, or with AVX-512 one of sixteen.
#ifdef __AVX512F__
constexpr int HALVES = 1;
using Floats = __m512;
using Ints = __m512i;
inline Floats load_floats(const float* at) { return _mm512_loadu_ps(at); }
inline void store_floats(float* at, Floats v) { _mm512_storeu_ps(at, v); }
inline Floats all_of(float x) { return _mm512_set1_ps(x); }
inline Floats zero_floats() { return _mm512_setzero_ps(); }
inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats subtract(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
inline Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats divide(Floats a, Floats b) { return _mm512_div_ps(a, b); }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats to_floats(Ints v) { return _mm512_cvtepi32_ps(v); }
inline Floats load_halves(const void* at) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(at)));
}
inline Floats load_bfloats(const void* at) {
  const __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(at)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
}
inline Ints widen_unsigned(const void* bytes) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(bytes)));
}
inline Ints widen_signed(const void* bytes) {
  return _mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(bytes)));
}
inline Ints load_ints(const void* at) { return _mm512_loadu_si512(at); }
inline Ints all_of(int x) { return _mm512_set1_epi32(x); }
inline Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
// exp8 on sixteen lanes, operation by operation.
inline Floats exponential(Floats x) {
  const Floats lowest = all_of(-87.3f);
  const Floats bounded = _mm512_min_ps(all_of(88.0f), _mm512_max_ps(lowest, x));
  const Floats n = _mm512_roundscale_ps(multiply(bounded, all_of(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  Floats r = _mm512_fnmadd_ps(n, all_of(0.693359375f), bounded);
  r = _mm512_fnmadd_ps(n, all_of(-2.12194440e-4f), r);
  Floats p = all_of(1.0f / 720);
  for (const float factor : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = multiply_add(p, r, all_of(factor));
  const Ints power = _mm512_slli_epi32(_mm512_cvtps_epi32(n), 23);
  const Floats scaled = _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p), power));
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, lowest, _CMP_NLT_UQ), scaled);
}
inline Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }
// Lanes [low, high) of v, `other` in the others.
inline Floats only_lanes(Floats v, int low, int high, float other) {
  const auto first = [](int count) { return count <= 0 ? 0u : count >= 16 ? 0xFFFFu : (1u << count) - 1; };
  return _mm512_mask_blend_ps(static_cast<__mmask16>(first(high) & ~first(low)), all_of(other), v);
}
// Over the lanes in one fixed order: the upper eight onto the lower eight first.
inline float sum_all(Floats v) { return sum_lanes(_mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1))); }
inline float max_all(Floats v) { return max_lanes(_mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1))); }
#else
constexpr int HALVES = 2;
using Floats = __m256;
using Ints = __m256i;
inline Floats load_floats(const float* at) { return _mm256_loadu_ps(at); }
inline void store_floats(float* at, Floats v) { _mm256_storeu_ps(at, v); }
inline Floats all_of(float x) { return _mm256_set1_ps(x); }
inline Floats zero_floats() { return _mm256_setzero_ps(); }
inline Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
inline Floats subtract(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
inline Floats multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
inline Floats divide(Floats a, Floats b) { return _mm256_div_ps(a, b); }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Floats to_floats(Ints v) { return _mm256_cvtepi32_ps(v); }
inline Floats load_halves(const void* at) { return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(at))); }
inline Floats load_bfloats(const void* at) {
  const __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(at)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
}
inline Ints widen_unsigned(const void* bytes) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(bytes)));
}
inline Ints widen_signed(const void* bytes) {
  return _mm256_cvtepi8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(bytes)));
}
inline Ints load_ints(const void* at) { return _mm256_loadu_si256(static_cast<const __m256i*>(at)); }
inline Ints all_of(int x) { return _mm256_set1_epi32(x); }
inline Ints add(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
inline Floats exponential(Floats x) { return exp8(x); }
inline Floats larger(Floats a, Floats b) { return _mm256_max_ps(a, b); }
// Lanes [low, high) of v, `other` in the others.
inline Floats only_lanes(Floats v, int low, int high, float other) {
  const Ints seen = _mm256_andnot_si256(first_lanes(low), first_lanes(high));
  return _mm256_blendv_ps(all_of(other), v, _mm256_castsi256_ps(seen));
}
inline float sum_all(Floats v) { return sum_lanes(v); }
inline float max_all(Floats v) { return max_lanes(v); }
#endif
constexpr int WIDTH = 16 / HALVES;

// Keeps the compiler from rearranging sums into trees, for which there are not enough registers.
template <typename V>
inline void settle(V& value) {
#ifdef __AVX512F__
  asm("" : "+v"(value));
#else
  asm("" : "+x"(value));
#endif
}

// Asks for the line that holds `at`, into the second cache: the first one has room for few requests. One for each few
// products keeps memory busy all the time; many at once would hold up the products until the first ones are there.
inline void expect(const void* at) { _mm_prefetch(static_cast<const char*>(at), _MM_HINT_T1); }

inline float half_to_float(uint16_t bits) { return _cvtsh_ss(bits); }

inline float bfloat_to_float(uint16_t bits) {
  return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(static_cast<int>(bits) << 16)));
}

}  // namespace signalbox
