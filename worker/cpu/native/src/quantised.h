// The float side of a quantised panel's blocks (formats.h).
#pragma once

#include "dot.h"
#include "formats.h"
#include "simd.h"

namespace signalbox {

template <int FORMAT>
constexpr bool HAS_OFFSET = FORMAT == Q4_1 || FORMAT == Q4_K || FORMAT == Q5_K;

// One block: value = scale · code + offset, with a scale for each unit.
template <int FORMAT>
struct Scales {
  Floats scale[UNITS<FORMAT>][HALVES], offset[HALVES];
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
inline Scales<FORMAT> load_scales(const uint8_t* at, const Factors& factors) {
  Scales<FORMAT> found;
  for (int h = 0; h < HALVES; ++h) {
    if constexpr (FORMAT == Q6_K) {
      for (int unit = 0; unit < 2; ++unit)
        found.scale[unit][h] = multiply(factors.scale[h], to_floats(widen_signed(at + unit * PANEL + h * WIDTH)));
    } else if constexpr (FORMAT == Q4_K || FORMAT == Q5_K) {
      found.scale[0][h] = multiply(factors.scale[h], to_floats(widen_unsigned(at + h * WIDTH)));
      found.offset[h] = multiply(factors.minimum[h], to_floats(widen_unsigned(at + PANEL + h * WIDTH)));
    } else {
      found.scale[0][h] = load_halves(at + h * WIDTH * 2);
      if (FORMAT == Q4_1) found.offset[h] = load_halves(at + 32 + h * WIDTH * 2);
    }
  }
  return found;
}

}  // namespace signalbox
