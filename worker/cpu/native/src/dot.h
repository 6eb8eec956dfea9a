// Integer products of one block of a quantised panel (formats.h) with the activations of some tokens.
//
// total[h][r] = sum over the block's 32 columns of weight code · activation, exact, for half h of the panel's 16 rows
// and token r; for Q6_K each half block is taken by its own integer scale.
#pragma once

#include <cstring>

#include "formats.h"
#include "simd.h"

namespace signalbox {

// Columns come in eight groups of four, since the machine sums four products of bytes at a time.
constexpr int GROUPS = BLOCK / 4;

// Four columns of one token, for all rows.
inline Ints broadcast(const int8_t* values) {
  int word;
  std::memcpy(&word, values, 4);
  return all_of(word);
}

#if defined(__AVX512F__)

constexpr int DOT_TOKENS = 8;

inline Ints byte_mask(int value) { return _mm512_set1_epi8(static_cast<char>(value)); }
inline Ints both(Ints a, Ints b) { return _mm512_and_si512(a, b); }
inline Ints either(Ints a, Ints b) { return _mm512_or_si512(a, b); }
template <int BITS>
inline Ints shift_left(Ints v) {
  return BITS >= 0 ? _mm512_slli_epi16(v, BITS & 15) : _mm512_srli_epi16(v, -BITS & 15);
}

#else

constexpr int DOT_TOKENS = 4;

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

// Groups [G, LAST) on top of the totals. Q8_0 counts its codes from -128, for which the totals begin lower.
template <int FORMAT, int R, int G, int LAST>
inline void multiply_groups(const uint8_t* values, const int8_t* in, Ints (&total)[HALVES][R]) {
  Ints weights = codes<FORMAT, G>(values, 0);
  if constexpr (FORMAT == Q8_0) weights = _mm512_xor_si512(weights, byte_mask(-128));
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    total[0][r] = _mm512_dpbusd_epi32(total[0][r], weights, broadcast(in + r * BLOCK + 4 * G));
    settle(total[0][r]);
  }
  if constexpr (G + 1 < LAST) multiply_groups<FORMAT, R, G + 1, LAST>(values, in, total);
}

template <int FORMAT, int R>
inline void begin(const int32_t* halves, Ints (&total)[HALVES][R]) {
  for (int r = 0; r < R; ++r)
    total[0][r] = FORMAT == Q8_0 ? all_of(4 * (halves[2 * r] + halves[2 * r + 1])) : all_of(0);
}

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

template <int FORMAT, int R, int G, int LAST>
inline void multiply_groups(const uint8_t* values, const int8_t* in, Ints (&total)[HALVES][R]) {
  constexpr int END = G + CHAIN<FORMAT> < LAST ? G + CHAIN<FORMAT> : LAST;
  Ints pairs[HALVES][R];
  for (int h = 0; h < HALVES; ++h)
    for (int r = 0; r < R; ++r) pairs[h][r] = all_of(0);
  multiply_chain<FORMAT, R, G, END>(values, in, pairs);
  for (int h = 0; h < HALVES; ++h) {
    for (int r = 0; r < R; ++r) {
      total[h][r] = add(total[h][r], _mm256_madd_epi16(pairs[h][r], _mm256_set1_epi16(1)));
      settle(total[h][r]);
    }
  }
  if constexpr (END < LAST) multiply_groups<FORMAT, R, END, LAST>(values, in, total);
}

template <int FORMAT, int R>
inline void begin(const int32_t*, Ints (&total)[HALVES][R]) {
  for (int h = 0; h < HALVES; ++h)
    for (int r = 0; r < R; ++r) total[h][r] = all_of(0);
}

#endif

// Q6_K counts its codes from -32, for which the sums of each half block begin lower.
template <int R>
inline void begin_half(const int32_t* halves, Ints (&total)[HALVES][R]) {
  for (int h = 0; h < HALVES; ++h)
    for (int r = 0; r < R; ++r) total[h][r] = all_of(halves[2 * r]);
}

// halves: of each token's block, -32 times the sum of its first and of its last 16 activations.
template <int FORMAT, int R>
inline void dot_blocks(const uint8_t* scales, const uint8_t* values, const int8_t* in, const int32_t* halves,
                       Ints (&total)[HALVES][R]) {
  if constexpr (FORMAT == Q6_K) {
    Ints second[HALVES][R];
    begin_half<R>(halves, total);
    multiply_groups<FORMAT, R, 0, GROUPS / 2>(values, in, total);
    begin_half<R>(halves + 1, second);
    multiply_groups<FORMAT, R, GROUPS / 2, GROUPS>(values, in, second);
    for (int h = 0; h < HALVES; ++h) {
      const Ints of_first = widen_signed(scales + h * WIDTH), of_second = widen_signed(scales + PANEL + h * WIDTH);
      for (int r = 0; r < R; ++r)
        total[h][r] = add(multiply(total[h][r], of_first), multiply(second[h][r], of_second));
    }
  } else {
    begin<FORMAT, R>(halves, total);
    multiply_groups<FORMAT, R, 0, GROUPS>(values, in, total);
  }
}

}  // namespace signalbox
