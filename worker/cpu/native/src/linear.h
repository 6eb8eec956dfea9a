// out[t] (+)= weights · in[t] + bias, for every token t.
//
// Batch invariance: an output is one chain of multiply-adds over the columns (float formats) or the blocks (quantised
// formats), in ascending order. How many tokens stand beside it, and which thread works, changes nothing.
#pragma once

#include "types.h"

namespace signalbox {

// Panels [first, last) of the map.
void linear_float(const Op& op, int tokens, int first, int last);
void linear_quantised(const Op& op, const Activations& in, int tokens, int first, int last);

// The sums of `count` rows from `row` on, whole panels, become outputs of one token, whose first is `out`.
void finish(const Op& op, const float* sums, int count, int row, float* out);

}  // namespace signalbox
