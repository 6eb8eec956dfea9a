// Where quantised activations lie. A step's tokens are cut into tiles of nearly one size, since a small one leaves the
// multipliers waiting for its sums; a tile stands in one piece, [block][token], in the order in which it is read.
#pragma once

#include <cstddef>

#include "simd.h"

namespace signalbox {

// Tokens of a tile at most: as many as two panels (AVX2: one) have registers for.
constexpr int TILE_TOKENS = HALVES == 1 ? 6 : 4;

struct Tiles {
  int tokens, count;

  explicit Tiles(int of_tokens) : tokens(of_tokens), count((of_tokens + TILE_TOKENS - 1) / TILE_TOKENS) {}

  // The first token of a tile, or of one beyond the last.
  int begin(int tile) const { return tokens * tile / count; }
  int size(int tile) const { return begin(tile + 1) - begin(tile); }
  int of(int token) const { return ((token + 1) * count - 1) / tokens; }
  // Index of the token's block among all, where a token has `blocks` of them.
  size_t index(int token, int block, int blocks) const {
    const int tile = of(token), first = begin(tile);
    return static_cast<size_t>(first) * blocks + static_cast<size_t>(block) * size(tile) + (token - first);
  }
};

}  // namespace signalbox
