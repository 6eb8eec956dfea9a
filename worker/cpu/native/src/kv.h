// Where keys and values lie: one allocation for each layer's keys and one for its values.
//
// A block holds, for each KV head, block_size positions. Keys stand in groups of 16 positions, [dim][16], so that a
// vector holds one dimension of eight positions and a score needs no sum over lanes. Values are [position][padded_dim].
#pragma once

#include <cstddef>

#include "types.h"

namespace signalbox {

constexpr int KEY_LANES = 16;

// Floats of one head's part of a block.
inline size_t head_floats(const Model& model) { return static_cast<size_t>(model.block_size) * model.padded_dim; }

struct KVSlot {
  const Model& model;
  size_t block, offset;

  KVSlot(const Model& m, int slot) : model(m), block(slot / m.block_size), offset(slot % m.block_size) {}

  size_t part(int head) const { return (block * model.kv_heads + head) * head_floats(model); }
  // The first dimension; the next one stands KEY_LANES floats further.
  size_t key(int head) const {
    return part(head) + offset / KEY_LANES * KEY_LANES * model.padded_dim + offset % KEY_LANES;
  }
  size_t value(int head) const { return part(head) + offset * model.padded_dim; }
};

}  // namespace signalbox
