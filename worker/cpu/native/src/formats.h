// Weights as they are packed for the kernels, and their sizes.
//
// Panels of 16 rows, whose bytes are read from the first to the last. Rows beyond the last are zeros.
// Float formats: [column][16].
// Quantised formats, for each block of 32 columns: its scales, then the values' low bits [groups of 4 columns][16 rows]
// [4 columns], one byte each (Q8_0), or groups g and g + 4 as low and high halves of the same bytes, then the upper bits.
//   Q8_0, Q4_0  scales f16 [16]
//   Q4_1        scales f16 [16], minima f16 [16]
//   Q4_K, Q5_K  scales u8 [16], minima u8 [16]; before every 8 blocks their factors f16 [16] and f16 [16].
//               Q5_K: upper bits [16 rows][4 columns], group g in bit g
//   Q6_K        scales i8 [16] of the first and of the last 16 columns; before every 8 blocks their factors f16 [16].
//               Upper bits [2][16 rows][4 columns], group g in byte line g / 4 at bit 2 (g mod 4)
#pragma once

#include <cstddef>
#include <cstdint>

#include "types.h"

namespace signalbox {

constexpr int PANEL = 16;

inline int num_panels(int rows) { return (rows + PANEL - 1) / PANEL; }

// Bytes of a quantised panel's parts. `head` stands once for `columns` columns, the others for every block.
struct BlockLayout {
  int columns, head, scales, values;
};

constexpr BlockLayout block_layout(int format) {
  switch (format) {
    case Q8_0:
      return {BLOCK, 0, 32, 512};
    case Q4_0:
      return {BLOCK, 0, 32, 256};
    case Q4_1:
      return {BLOCK, 0, 64, 256};
    case Q4_K:
      return {SUPER_BLOCK, 64, 32, 256};
    case Q5_K:
      return {SUPER_BLOCK, 64, 32, 256 + 64};
    default:
      return {SUPER_BLOCK, 32, 32, 256 + 128};
  }
}

inline size_t panel_bytes(int format, int columns) {
  if (!is_quantised(format)) return static_cast<size_t>(columns) * PANEL * (format == F32 ? 4 : 2);
  const BlockLayout layout = block_layout(format);
  const size_t blocks = columns / BLOCK, heads = columns / layout.columns;
  return heads * layout.head + blocks * (layout.scales + layout.values);
}

// Bytes of `columns` columns of one row as stored.
inline size_t stored_row_bytes(int format, int columns) {
  const size_t count = columns;
  switch (format) {
    case F32:
      return count * 4;
    case F16:
    case BF16:
      return count * 2;
    case Q8_0:
      return count / BLOCK * 34;
    case Q4_0:
      return count / BLOCK * 18;
    case Q4_1:
      return count / BLOCK * 20;
    case Q4_K:
      return count / SUPER_BLOCK * 144;
    case Q5_K:
      return count / SUPER_BLOCK * 176;
    default:
      return count / SUPER_BLOCK * 210;
  }
}

// One stored row to floats.
void decode_row(int format, const uint8_t* stored, int columns, float* out);

}  // namespace signalbox
