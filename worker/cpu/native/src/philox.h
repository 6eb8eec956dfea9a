// Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011), first word only,
// and the Gumbel noise of worker/philox.py: the counter is (position, purpose, token, 0), the key the 64-bit seed.
#pragma once

#include <cmath>
#include <cstdint>

#include "simd.h"

namespace signalbox {

struct PhiloxKey {
  uint32_t position;
  uint64_t seed;
};

constexpr uint32_t PHILOX_MULTIPLIERS[2] = {0xD2511F53u, 0xCD9E8D57u};
constexpr uint32_t PHILOX_STEPS[2] = {0x9E3779B9u, 0xBB67AE85u};
constexpr uint32_t PURPOSE_SAMPLE = 0;

inline uint32_t philox(const PhiloxKey& key, uint32_t token) {
  uint32_t c0 = key.position, c1 = PURPOSE_SAMPLE, c2 = token, c3 = 0;
  uint32_t k0 = static_cast<uint32_t>(key.seed), k1 = static_cast<uint32_t>(key.seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t first = static_cast<uint64_t>(c0) * PHILOX_MULTIPLIERS[0];
    const uint64_t second = static_cast<uint64_t>(c2) * PHILOX_MULTIPLIERS[1];
    c0 = static_cast<uint32_t>(second >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(second);
    c2 = static_cast<uint32_t>(first >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(first);
    k0 += PHILOX_STEPS[0];
    k1 += PHILOX_STEPS[1];
  }
  return c0;
}

// High and low words of eight products with one factor.
inline void multiply8(__m256i a, uint32_t factor, __m256i& high, __m256i& low) {
  const __m256i f = _mm256_set1_epi32(static_cast<int>(factor));
  const __m256i even = _mm256_mul_epu32(a, f), odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), f);
  high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
  low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
}

// The words of eight tokens that follow each other.
inline __m256i philox8(const PhiloxKey& key, uint32_t first_token) {
  __m256i c0 = _mm256_set1_epi32(static_cast<int>(key.position)), c1 = _mm256_set1_epi32(PURPOSE_SAMPLE);
  __m256i c2 = _mm256_add_epi32(_mm256_set1_epi32(static_cast<int>(first_token)),
                                _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  __m256i c3 = _mm256_setzero_si256();
  uint32_t k0 = static_cast<uint32_t>(key.seed), k1 = static_cast<uint32_t>(key.seed >> 32);
  for (int round = 0; round < 10; ++round) {
    __m256i first_high, first_low, second_high, second_low;
    multiply8(c0, PHILOX_MULTIPLIERS[0], first_high, first_low);
    multiply8(c2, PHILOX_MULTIPLIERS[1], second_high, second_low);
    c0 = _mm256_xor_si256(_mm256_xor_si256(second_high, c1), _mm256_set1_epi32(static_cast<int>(k0)));
    c2 = _mm256_xor_si256(_mm256_xor_si256(first_high, c3), _mm256_set1_epi32(static_cast<int>(k1)));
    c1 = second_low;
    c3 = first_low;
    k0 += PHILOX_STEPS[0];
    k1 += PHILOX_STEPS[1];
  }
  return c0;
}

inline double gumbel(uint32_t word) {
  const double uniform = (static_cast<double>(word) + 0.5) * 0x1p-32;  // within (0, 1), never at an end
  return -std::log(-std::log(uniform));
}

}  // namespace signalbox
