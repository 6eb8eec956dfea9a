// What this machine can do at best: the limits that `signalbox bench kernels` compares with.
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
  Floats sums[CHAINS];
  for (Floats& sum : sums) sum = all_of(0.5f);
  const Floats factor = all_of(0.25f);
  for (int64_t round = 0; round < rounds; ++round) {
    for (Floats& sum : sums) {
      sum = multiply_add(sum, factor, factor);
      settle(sum);
    }
  }
  alignas(64) float lanes[WIDTH];
  for (int chain = 1; chain < CHAINS; ++chain) sums[0] = add(sums[0], sums[chain]);
  store_floats(lanes, sums[0]);
  return lanes[0];
}

}  // namespace

extern "C" {

// Every thread reads its share of `count` floats.
void sb_probe_read(int threads, const float* data, int64_t count) {
  Pool pool(threads);
  pool.run([&](int thread) { sink = read_all(data + count * thread / threads, data + count * (thread + 1) / threads); });
}

// Every thread does `rounds` rounds; the floating-point operations of one round.
int64_t sb_probe_multiply(int threads, int64_t rounds) {
  Pool pool(threads);
  pool.run([&](int) { sink = multiply_all(rounds); });
  return CHAINS * WIDTH * 2;
}

}  // extern "C"

}  // namespace signalbox
