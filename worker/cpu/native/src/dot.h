// Integer products of one block of a quantised panel (formats.h) with the activations of some tokens.
//
// A block has one or two units, columns with one scale. total[h][r] = sum over a unit's columns of weight value in steps
// of its scale · activation, exact, for token r and the 16 rows, or with AVX2 half h, of panel v.
#pragma once

#include <cstring>

#include "formats.h"
#include "simd.h"

namespace signalbox {

// Columns come in eight groups of four, since the machine sums four products of bytes at a time.
constexpr int GROUPS = BLOCK / 4;

template <int FORMAT>
constexpr int UNITS = FORMAT == Q6_K ? 2 : 1;

// Codes without a sign count from below zero: which of a block's starts (types.h) takes that off; none: -1.
template <int FORMAT>
constexpr int start_of(int unit) {
  return FORMAT == Q8_0 ? 0 : FORMAT == Q4_0 ? 1 : FORMAT == Q6_K ? 2 + unit : -1;
}

// Where the values of a block stand in panels beside each other.
template <int P>
using Panels = const uint8_t* [P];

// Four columns of one token, for all rows.
inline Ints broadcast(const int8_t* values) {
  int word;
  std::memcpy(&word, values, 4);
  return all_of(word);
}

#if defined(__AVX512F__)

inline Ints byte_mask(int value) { return _mm512_set1_epi8(static_cast<char>(value)); }
inline Ints both(Ints a, Ints b) { return _mm512_and_si512(a, b); }
inline Ints either(Ints a, Ints b) { return _mm512_or_si512(a, b); }
template <int BITS>
inline Ints shift_left(Ints v) {
  return BITS >= 0 ? _mm512_slli_epi16(v, BITS & 15) : _mm512_srli_epi16(v, -BITS & 15);
}

#else

inline Ints byte_mask(int value) { return _mm256_set1_epi8(static_cast<char>(value)); }
inline Ints both(Ints a, Ints b) { return _mm256_and_si256(a, b); }
inline Ints either(Ints a, Ints b) { return _mm256_or_si256(a, b); }
template <int BITS>
inline Ints shift_left(Ints v) {
  return BITS >= 0 ? _mm256_slli_epi16(v, BITS & 15) : _mm256_srli_epi16(v, -BITS & 15);
}

#endif

// Codes of group G in bytes [row][4], without a sign but for Q8_0.
template <int FORMAT, int G>
inline Ints codes(const uint8_t* values, int half) {
  const uint8_t* at = values + half * WIDTH * 4;
  if constexpr (FORMAT == Q8_0) {
    return load_ints(at + G * 64);
  } else {
    const Ints low = both(shift_left<(G < 4 ? 0 : -4)>(load_ints(at + G % 4 * 64)), byte_mask(15));
    if constexpr (FORMAT == Q5_K) return either(low, both(shift_left<4 - G>(load_ints(at + 256)), byte_mask(16)));
    if constexpr (FORMAT == Q6_K)
      return either(low, both(shift_left<4 - G % 4 * 2>(load_ints(at + 256 + G / 4 * 64)), byte_mask(48)));
    return low;
  }
}

#if defined(__AVX512F__)

// Codes of group G that count from zero: those of Q8_0 from -128.
template <int FORMAT, int G>
inline Ints unsigned_codes(const uint8_t* values) {
  const Ints found = codes<FORMAT, G>(values, 0);
  return FORMAT == Q8_0 ? _mm512_xor_si512(found, byte_mask(-128)) : found;
}

// Groups [G, LAST) of P panels on top of the totals.
template <int FORMAT, int R, int P, int G, int LAST>
inline void multiply_groups(const Panels<P>& panels, const int8_t* in, Ints (&total)[P][R]) {
  Ints weights[P];
#pragma GCC unroll 2
  for (int p = 0; p < P; ++p) weights[p] = unsigned_codes<FORMAT, G>(panels[p]);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const Ints value = broadcast(in + r * BLOCK + 4 * G);
#pragma GCC unroll 2
    for (int p = 0; p < P; ++p) {
      total[p][r] = _mm512_dpbusd_epi32(total[p][r], weights[p], value);
      settle(total[p][r]);
    }
  }
  if constexpr (G + 1 < LAST) multiply_groups<FORMAT, R, P, G + 1, LAST>(panels, in, total);
}

// The codes of Q8_0 keep their sign with AVX2.
template <int FORMAT>
constexpr bool STARTS = start_of<FORMAT>(0) >= 0;

#else

// Groups whose products fit one 16-bit sum: of nibbles 8 · 2 · 15 · 127 = 30480.
template <int FORMAT>
constexpr int CHAIN = FORMAT == Q8_0 ? 1 : FORMAT == Q6_K ? 2 : FORMAT == Q5_K ? 4 : GROUPS;

// Pairs of products of group G as 16-bit integers. Signs of Q8_0 move to the activations, since a multiply-add of bytes
// wants one unsigned operand.
template <int FORMAT>
inline Ints multiply_pairs(Ints weights, Ints x) {
  if constexpr (FORMAT == Q8_0) return _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(x, weights));
  return _mm256_maddubs_epi16(weights, x);
}

template <int FORMAT, int R, int G, int LAST>
inline void multiply_chain(const uint8_t* values, const int8_t* in, Ints (&pairs)[HALVES][R]) {
  Ints weights[HALVES];
  for (int h = 0; h < HALVES; ++h) weights[h] = codes<FORMAT, G>(values, h);
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    const Ints x = broadcast(in + r * BLOCK + 4 * G);
    for (int h = 0; h < HALVES; ++h) {
      pairs[h][r] = _mm256_add_epi16(pairs[h][r], multiply_pairs<FORMAT>(weights[h], x));
      settle(pairs[h][r]);
    }
  }
  if constexpr (G + 1 < LAST) multiply_chain<FORMAT, R, G + 1, LAST>(values, in, pairs);
}

template <int FORMAT, int R, int P, int G, int LAST>
inline void multiply_groups(const Panels<P>& panels, const int8_t* in, Ints (&total)[HALVES][R]) {
  constexpr int END = G + CHAIN<FORMAT> < LAST ? G + CHAIN<FORMAT> : LAST;
  Ints pairs[HALVES][R];
  for (int h = 0; h < HALVES; ++h)
    for (int r = 0; r < R; ++r) pairs[h][r] = all_of(0);
  multiply_chain<FORMAT, R, G, END>(panels[0], in, pairs);
  for (int h = 0; h < HALVES; ++h) {
    for (int r = 0; r < R; ++r) {
      total[h][r] = add(total[h][r], _mm256_madd_epi16(pairs[h][r], _mm256_set1_epi16(1)));
      settle(total[h][r]);
    }
  }
  if constexpr (END < LAST) multiply_groups<FORMAT, R, P, END, LAST>(panels, in, total);
}

template <int FORMAT>
constexpr bool STARTS = FORMAT != Q8_0 && start_of<FORMAT>(0) >= 0;

#endif

// starts: four of each token's block.
template <int FORMAT, int R, int P, int UNIT>
inline void dot_unit(const Panels<P>& panels, const int8_t* in, const int32_t* starts, Ints (&total)[P * HALVES][R]) {
  constexpr int COUNT = GROUPS / UNITS<FORMAT>;
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const Ints start = all_of(STARTS<FORMAT> ? starts[4 * r + start_of<FORMAT>(UNIT)] : 0);
#pragma GCC unroll 2
    for (int v = 0; v < P * HALVES; ++v) total[v][r] = start;
  }
  multiply_groups<FORMAT, R, P, UNIT * COUNT, (UNIT + 1) * COUNT>(panels, in, total);
}

}  // namespace signalbox
