// Linear maps with quantised weights (formats.h); activations are quantised in blocks of 32.
//
// Within a unit of columns with one scale (dot.h) the products are summed as integers, exactly. Over the units each
// output is one float chain:
//   sum += integer · (weight scale · activation scale), and then for the formats with an offset
//   sum += offset · (activation scale · sum of the block's activations).
// So AVX2 and AVX-512 give the same bits.
#include <algorithm>

#include "activations.h"
#include "linear.h"
#include "quantised.h"

namespace signalbox {

namespace {

// Tiles whose activations stay in the second cache while all panels pass by.
constexpr int PASS = 256 / TILE_TOKENS;
// Panels beside each other in a tile, so that a broadcast activation serves both.
constexpr int PAIR = HALVES == 1 ? 2 : 1;
// Up to so many tokens memory sets the pace, and panels one by one are read faster.
constexpr int FEW = 4;
// How far ahead a tile that is alone asks for its panel.
constexpr int AHEAD = 8192;

// What a tile asks memory for, into the second cache: with each of its blocks `step` bytes, from `at` on, and as many from
// the same place of the panel beside it.
struct Ahead {
  const uint8_t* at;
  size_t step;
};

// The products of one block of P panels, units [UNIT, ..).
template <int FORMAT, int R, int P, int UNIT = 0>
inline void add_units(const Panels<P>& panels, const Activations& in, size_t at, const Scales<FORMAT> (&scales)[P],
                      Floats (&sums)[P * HALVES][R]) {
  Ints total[P * HALVES][R];
  dot_unit<FORMAT, R, P, UNIT>(panels, in.values + at * BLOCK, in.starts + at * 4, total);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const Floats scale = all_of(in.scales[at + r]);
#pragma GCC unroll 2
    for (int v = 0; v < P * HALVES; ++v) {
      const Floats both = multiply(scales[v / HALVES].scale[UNIT][v % HALVES], scale);
      sums[v][r] = multiply_add(to_floats(total[v][r]), both, sums[v][r]);
    }
  }
  if constexpr (UNIT + 1 < UNITS<FORMAT>) add_units<FORMAT, R, P, UNIT + 1>(panels, in, at, scales, sums);
}

template <int FORMAT, int R, int P>
inline void add_offsets(const float* token_sums, const Scales<FORMAT> (&scales)[P], Floats (&sums)[P * HALVES][R]) {
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const Floats sum = all_of(token_sums[r]);
#pragma GCC unroll 2
    for (int v = 0; v < P * HALVES; ++v)
      sums[v][r] = multiply_add(scales[v / HALVES].offset[v % HALVES], sum, sums[v][r]);
  }
}

// P panels from `panel` on by a tile of R tokens, the first of which is `token`.
template <int FORMAT, int R, int P>
void tile(const Op& op, const Activations& in, int panel, int token, Ahead ahead) {
  constexpr BlockLayout LAYOUT = block_layout(FORMAT);
  const int blocks = op.k / BLOCK;
  const size_t bytes = panel_bytes(FORMAT, op.k);
  const uint8_t* weights = static_cast<const uint8_t*>(op.weights) + panel * bytes;
  Floats sums[P * HALVES][R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < P * HALVES; ++v) sums[v][r] = zero_floats();
  Factors factors[P];
  size_t at = static_cast<size_t>(token) * blocks, asked = 0, due = 0;
  for (int block = 0; block < blocks; ++block, weights += LAYOUT.scales + LAYOUT.values, at += R) {
    if (LAYOUT.head && block % (LAYOUT.columns / BLOCK) == 0) {
      for (int p = 0; p < P; ++p) factors[p] = load_factors<FORMAT>(weights + p * bytes);
      weights += LAYOUT.head;
    }
    for (due += ahead.step; asked < due; asked += 64)
      for (int p = 0; p < P; ++p) expect(ahead.at + p * bytes + asked);
    Scales<FORMAT> scales[P];
    const uint8_t* values[P];
#pragma GCC unroll 2
    for (int p = 0; p < P; ++p) {
      scales[p] = load_scales<FORMAT>(weights + p * bytes, factors[p]);
      values[p] = weights + p * bytes + LAYOUT.scales;
    }
    add_units<FORMAT, R, P>(values, in, at, scales, sums);
    if constexpr (HAS_OFFSET<FORMAT>) add_offsets<FORMAT, R, P>(in.sums + at, scales, sums);
  }
  alignas(64) float lines[R][P * PANEL];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < P * HALVES; ++v) store_floats(lines[r] + v * WIDTH, sums[v][r]);
  for (int r = 0; r < R; ++r)
    finish(op, lines[r], P * PANEL, panel * PANEL, op.out + static_cast<size_t>(token + r) * op.out_stride);
}

// A tile of `count` tokens, at most R.
template <int FORMAT, int R, int P>
void tile_of(const Op& op, const Activations& in, int panel, int token, int count, Ahead ahead) {
  if constexpr (R > 1) {
    if (count < R) return tile_of<FORMAT, R - 1, P>(op, in, panel, token, count, ahead);
  }
  tile<FORMAT, R, P>(op, in, panel, token, ahead);
}

// P panels by tiles [begin, end). Several tiles ask for the next panels between them, a single one for what comes next of
// its own. Not where one token reads Q8_0: the processor sees by itself that it is read from end to end.
template <int FORMAT, int P>
void tiles_of(const Op& op, const Activations& in, const Tiles& tiles, int begin, int end, int panel) {
  const size_t bytes = panel_bytes(FORMAT, op.k), share = bytes / (end - begin);
  const uint8_t* weights = static_cast<const uint8_t*>(op.weights) + panel * bytes;
  const uint8_t* next = weights + (P == 1 && end - begin == 1 ? AHEAD : P * bytes);
  const size_t step = FORMAT == Q8_0 && tiles.tokens == 1 ? 0 : share / (op.k / BLOCK);
  for (int i = begin; i < end; ++i) {
    const Ahead ahead{next + share * (i - begin), step};
    tile_of<FORMAT, TILE_TOKENS, P>(op, in, panel, tiles.begin(i), tiles.size(i), ahead);
  }
}

template <int FORMAT>
void run(const Op& op, const Activations& in, int tokens, int first, int last) {
  const Tiles tiles(tokens);
  for (int pass = 0; pass < tiles.count; pass += PASS) {
    const int end = std::min(pass + PASS, tiles.count);
    int panel = first;
    for (; tokens > FEW && panel + PAIR <= last; panel += PAIR) tiles_of<FORMAT, PAIR>(op, in, tiles, pass, end, panel);
    for (; panel < last; ++panel) tiles_of<FORMAT, 1>(op, in, tiles, pass, end, panel);
  }
}

}  // namespace

void linear_quantised(const Op& op, const Activations& in, int tokens, int first, int last) {
  switch (op.format) {
    case Q8_0:
      return run<Q8_0>(op, in, tokens, first, last);
    case Q4_0:
      return run<Q4_0>(op, in, tokens, first, last);
    case Q4_1:
      return run<Q4_1>(op, in, tokens, first, last);
    case Q4_K:
      return run<Q4_K>(op, in, tokens, first, last);
    case Q5_K:
      return run<Q5_K>(op, in, tokens, first, last);
    default:
      return run<Q6_K>(op, in, tokens, first, last);
  }
}

}  // namespace signalbox
