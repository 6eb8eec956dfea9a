// Linear maps with quantised weights (formats.h); activations are quantised in blocks of 32.
//
// Within a block the products are summed as integers, exactly. Over the blocks each output is one float chain:
//   sum += integer · (weight scale · activation scale), and then for the formats with an offset
//   sum += offset · (activation scale · sum of the block's activations).
// So AVX2 and AVX-512 give the same bits.
#include <algorithm>
#include <cstring>

#include "dot.h"
#include "formats.h"
#include "linear.h"
#include "simd.h"

namespace signalbox {

namespace {

// Tokens whose activations stay in the second cache while all panels pass by.
constexpr int PASS = 256;
// How far ahead weights that are read for the first time are asked for, into the second cache. Not for one token: the
// processor sees by itself that they are read from end to end.
constexpr int AHEAD = 4096;

inline void finish(const Op& op, Floats sum, int row, float* out) {
  out += row;
  if (row + WIDTH <= op.n) {
    if (op.vector) sum = add(sum, load_floats(op.vector + row));
    if (op.flags & ADD) sum = add(sum, load_floats(out));
    store_floats(out, sum);
    return;
  }
  alignas(64) float lanes[WIDTH];
  store_floats(lanes, sum);
  for (int i = 0; row + i < op.n; ++i) {
    if (op.vector) lanes[i] += op.vector[row + i];
    if (op.flags & ADD) lanes[i] += out[i];
    out[i] = lanes[i];
  }
}

// The float side of one block of a panel.
struct Scales {
  Floats scale[HALVES], offset[HALVES];
};

// What the blocks of a super-block share.
struct Factors {
  Floats scale[HALVES], minimum[HALVES];
};

template <int FORMAT>
inline Factors load_factors(const uint8_t* at) {
  Factors found;
  for (int h = 0; h < HALVES; ++h) {
    found.scale[h] = load_halves(at + h * WIDTH * 2);
    if (FORMAT != Q6_K) found.minimum[h] = multiply(load_halves(at + 32 + h * WIDTH * 2), all_of(-1.0f));
  }
  return found;
}

template <int FORMAT>
inline Scales load_scales(const uint8_t* at, const Factors& factors) {
  Scales found;
  for (int h = 0; h < HALVES; ++h) {
    if (FORMAT == Q6_K) {
      found.scale[h] = factors.scale[h];  // the blocks' own scales are integers and stand in the sums
    } else if (FORMAT == Q4_K || FORMAT == Q5_K) {
      found.scale[h] = multiply(factors.scale[h], to_floats(widen_unsigned(at + h * WIDTH)));
      found.offset[h] = multiply(factors.minimum[h], to_floats(widen_unsigned(at + 16 + h * WIDTH)));
    } else {
      found.scale[h] = load_halves(at + h * WIDTH * 2);
      if (FORMAT == Q4_0) found.offset[h] = multiply(found.scale[h], all_of(-8.0f));
      if (FORMAT == Q4_1) found.offset[h] = load_halves(at + 32 + h * WIDTH * 2);
    }
  }
  return found;
}

template <int FORMAT>
constexpr bool HAS_OFFSET = FORMAT == Q4_0 || FORMAT == Q4_1 || FORMAT == Q4_K || FORMAT == Q5_K;

// One panel by tokens [token, token + R) of `tokens`. stream: the panel is read for the first time.
template <int FORMAT, int R>
void tile(const Op& op, const Activations& in, int tokens, int panel, int token, bool stream) {
  constexpr BlockLayout LAYOUT = block_layout(FORMAT);
  constexpr int BYTES = LAYOUT.scales + LAYOUT.values;
  const uint8_t* weights = static_cast<const uint8_t*>(op.weights) + panel * panel_bytes(FORMAT, op.k);
  Floats sums[HALVES][R];
  for (int h = 0; h < HALVES; ++h)
    for (int r = 0; r < R; ++r) sums[h][r] = zero_floats();
  Factors factors;
  for (int block = 0; block < op.k / BLOCK; ++block, weights += BYTES) {
    if (LAYOUT.head && block % (LAYOUT.columns / BLOCK) == 0) {
      factors = load_factors<FORMAT>(weights);
      weights += LAYOUT.head;
    }
    for (int line = 0; R > 1 && stream && line < BYTES; line += 64)
      _mm_prefetch(reinterpret_cast<const char*>(weights + AHEAD + line), _MM_HINT_T1);
    const size_t at = static_cast<size_t>(block) * tokens + token;
    Ints total[HALVES][R];
    dot_blocks<FORMAT, R>(weights, weights + LAYOUT.scales, in.values + at * BLOCK, in.halves + at * 2, total);
    const Scales scales = load_scales<FORMAT>(weights, factors);
    for (int r = 0; r < R; ++r) {
      const Floats scale = all_of(in.scales[at + r]), sum = all_of(in.sums[at + r]);
      for (int h = 0; h < HALVES; ++h) {
        sums[h][r] = multiply_add(to_floats(total[h][r]), multiply(scales.scale[h], scale), sums[h][r]);
        if (HAS_OFFSET<FORMAT>) sums[h][r] = multiply_add(scales.offset[h], sum, sums[h][r]);
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int h = 0; h < HALVES; ++h)
      finish(op, sums[h][r], panel * PANEL + h * WIDTH, op.out + static_cast<size_t>(token + r) * op.out_stride);
}

// `count` tokens, at most R.
template <int FORMAT, int R>
void tile_of(const Op& op, const Activations& in, int tokens, int panel, int token, int count, bool stream) {
  if constexpr (R > 1) {
    if (count < R) return tile_of<FORMAT, R - 1>(op, in, tokens, panel, token, count, stream);
  }
  tile<FORMAT, R>(op, in, tokens, panel, token, stream);
}

template <int FORMAT>
void run(const Op& op, const Activations& in, int tokens, int first, int last) {
  for (int pass = 0; pass < tokens; pass += PASS) {
    const int end = std::min(pass + PASS, tokens);
    for (int panel = first; panel < last; ++panel)
      for (int token = pass; token < end; token += DOT_TOKENS)
        tile_of<FORMAT, DOT_TOKENS>(op, in, tokens, panel, token, std::min(DOT_TOKENS, end - token), token == pass);
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
