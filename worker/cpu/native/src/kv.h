// Where keys and values lie: block after block, each with the keys and then the values of every layer, so that a pool
// takes memory only as far as it is used.
//
// One layer's keys, or values, of a block: for each KV head, block_size positions. Keys stand in groups of 16 positions, [dim][16], so that a
// vector holds one dimension of many positions and a score needs no sum over lanes. Values are [position][padded_dim].
// Numbers are float32, float16 or bfloat16; every product with them is float32.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "simd.h"
#include "types.h"

namespace signalbox {

constexpr int KEY_LANES = 16;

// Numbers of one head's part of a block.
inline size_t head_numbers(const Model& model) { return static_cast<size_t>(model.block_size) * model.padded_dim; }

struct Half {
  uint16_t bits;
};
struct BFloat {
  uint16_t bits;
};

inline Floats load_numbers(const float* at) { return load_floats(at); }
inline Floats load_numbers(const Half* at) { return load_halves(at); }
inline Floats load_numbers(const BFloat* at) { return load_bfloats(at); }

// To the nearest number, ties to even. Beyond the range of float16 lies its largest number; NaN stays NaN.
inline void store_number(float x, float* at) { *at = x; }
inline void store_number(float x, Half* at) {
  const __m128 bounded = _mm_min_ss(_mm_set_ss(65504.0f), _mm_max_ss(_mm_set_ss(-65504.0f), _mm_set_ss(x)));
  at->bits = static_cast<uint16_t>(_mm_cvtsi128_si32(_mm_cvtps_ph(bounded, _MM_FROUND_TO_NEAREST_INT)));
}
inline void store_number(float x, BFloat* at) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const bool nan = (bits & 0x7FFFFFFF) > 0x7F800000;
  at->bits = static_cast<uint16_t>(nan ? bits >> 16 | 0x40 : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

struct KVSlot {
  const Model& model;
  size_t block, offset;

  KVSlot(const Model& m, int slot) : model(m), block(slot / m.block_size), offset(slot % m.block_size) {}

  size_t part(int head) const { return block * model.block_numbers + head * head_numbers(model); }
  // The first dimension; the next one stands KEY_LANES numbers further.
  size_t key(int head) const {
    return part(head) + offset / KEY_LANES * KEY_LANES * model.padded_dim + offset % KEY_LANES;
  }
  size_t value(int head) const { return part(head) + offset * model.padded_dim; }
};

}  // namespace signalbox
