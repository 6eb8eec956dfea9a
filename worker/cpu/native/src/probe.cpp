// What this machine can do at best: the limits that `signalbox bench kernels` compares with.
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>

#include "pool.h"
#include "simd.h"

namespace signalbox {

namespace {

volatile float sink;

// Reads all lines of [at, end) once.
float read_all(const float* at, const float* end) {
  __m256 sums[8];
  for (__m256& sum : sums) sum = _mm256_setzero_ps();
  for (; at + 8 * LANES <= end; at += 8 * LANES)
    for (int i = 0; i < 8; ++i) sums[i] = _mm256_or_ps(sums[i], _mm256_loadu_ps(at + i * LANES));
  float total = 0.0f;
  for (const __m256& sum : sums) total += sum_lanes(sum);
  return total;
}

constexpr int CHAINS = 12;

// Rounds of independent multiply-adds.
float multiply_all(int64_t rounds) {
  const Floats factor = all_of(0.25f);
  Floats sums[CHAINS];
#pragma GCC unroll 12
  for (int chain = 0; chain < CHAINS; ++chain) sums[chain] = all_of(0.5f);
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 12
    for (int chain = 0; chain < CHAINS; ++chain) {
      sums[chain] = multiply_add(sums[chain], factor, factor);
      settle(sums[chain]);
    }
  }
  alignas(64) float lanes[WIDTH];
#pragma GCC unroll 12
  for (int chain = 1; chain < CHAINS; ++chain) sums[0] = add(sums[0], sums[chain]);
  store_floats(lanes, sums[0]);
  return lanes[0];
}

// Rounds of independent sums of four products of bytes, as src/dot.h does them for weights of 8 bits.
int32_t dot_all(int64_t rounds) {
  Ints codes = all_of(0x01020304), values = all_of(0x04030201);
  Ints sums[CHAINS];
#pragma GCC unroll 12
  for (int chain = 0; chain < CHAINS; ++chain) sums[chain] = all_of(chain);
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 12
    for (int chain = 0; chain < CHAINS; ++chain) {
      settle(codes);  // so that nothing is computed once for all rounds
#ifdef __AVX512F__
      sums[chain] = _mm512_dpbusd_epi32(sums[chain], codes, values);
#else
      sums[chain] = add(sums[chain], _mm256_madd_epi16(_mm256_maddubs_epi16(codes, values), _mm256_set1_epi16(1)));
#endif
      settle(sums[chain]);
    }
  }
  alignas(64) float lanes[WIDTH];
#pragma GCC unroll 12
  for (int chain = 1; chain < CHAINS; ++chain) sums[0] = add(sums[0], sums[chain]);
  store_floats(lanes, to_floats(sums[0]));
  return static_cast<int32_t>(lanes[0]);
}

}  // namespace

extern "C" {

// Seconds of the quickest of `runs` runs of each: every thread reads its share of `count` floats; does `rounds` rounds
// of multiply-adds; does so many of sums of products of bytes. operations: of the last two, on all threads.
void sb_probe_limits(int threads, const float* data, int64_t count, int64_t rounds, int runs, double* seconds,
                     double* operations) {
  Pool pool(threads);
  const auto best = [&](auto work) {
    double least = 1e30;
    for (int run = 0; run < runs; ++run) {
      const auto began = std::chrono::steady_clock::now();
      pool.run(threads, work);
      least = std::min(least, std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count());
    }
    return least;
  };
  seconds[0] = best([&](int thread) {
    sink = read_all(data + count * thread / threads, data + count * (thread + 1) / threads);
  });
  seconds[1] = best([&](int) { sink = multiply_all(rounds); });
  seconds[2] = best([&](int) { sink = static_cast<float>(dot_all(rounds)); });
  operations[0] = 2.0 * CHAINS * WIDTH * rounds * threads;
  operations[1] = 8.0 * CHAINS * WIDTH * rounds * threads;
}

}  // extern "C"

}  // namespace signalbox
