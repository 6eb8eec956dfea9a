// Operations on each token by itself.
#pragma once

#include "types.h"

namespace signalbox {

// x [k] to blocks; token `token` of `tokens`.
void quantise_row(const float* x, int k, const Activations& out, int tokens, int token);

void embed(const Op& op, const Step& step, int token);
// RMS norm (arXiv 1910.07467) of line `source` of `in`, written as line `token` of `tokens`.
void norm(const Op& op, const Activations& blocks, int tokens, int token, int source);
// Columns of one piece of a gate at most: whole blocks.
constexpr int GATE_COLUMNS = 256;
// silu(gate) · up for columns [first, last) of the k outputs; whole blocks. They become floats, or blocks where the map
// that reads them wants those.
void gate(const Op& op, const Activations& blocks, int tokens, int token, int first, int last);
// Norm of each query and key head where the model has it, RoPE (arXiv 2104.09864), and the write of keys and values.
void rope(const Op& op, const Model& model, const Step& step, int token);

bool all_finite(const float* x, int count);

}  // namespace signalbox
