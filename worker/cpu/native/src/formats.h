// Weights as they are packed for the kernels, and their sizes.
//
// Float formats: panels of 16 rows, [k][16], so that a vector holds one column of eight rows. A panel of BF16 keeps
// rows 0 to 7 in the low and rows 8 to 15 in the high halves of 32-bit words.
// Quantised formats: panels of 8 rows. First the scales [block][8] as f16, for Q4_1 then the minima likewise, then from
// the next multiple of 64 bytes the values: [block][8 groups of 4 columns][8 rows][4 columns], one byte each (Q8_0), or
// groups g and g + 4 as low and high halves of the same bytes (Q4_0, Q4_1).
// Rows beyond the last are zeros.
#pragma once

#include <cstddef>
#include <cstdint>

#include "types.h"

namespace signalbox {

constexpr int FLOAT_PANEL = 16;
constexpr int BLOCK_PANEL = 8;

inline int panel_rows(int format) { return is_quantised(format) ? BLOCK_PANEL : FLOAT_PANEL; }

inline int num_panels(int format, int rows) { return (rows + panel_rows(format) - 1) / panel_rows(format); }

inline size_t scale_bytes(int format, int columns) {
  const size_t planes = format == Q4_1 ? 2 : 1;
  return (planes * (columns / BLOCK) * BLOCK_PANEL * 2 + 63) / 64 * 64;
}

inline size_t panel_bytes(int format, int columns) {
  switch (format) {
    case F32:
      return static_cast<size_t>(columns) * FLOAT_PANEL * 4;
    case F16:
    case BF16:
      return static_cast<size_t>(columns) * FLOAT_PANEL * 2;
    case Q8_0:
      return scale_bytes(format, columns) + static_cast<size_t>(columns) * BLOCK_PANEL;
    default:
      return scale_bytes(format, columns) + static_cast<size_t>(columns) * BLOCK_PANEL / 2;
  }
}

// Bytes of one row as stored.
inline size_t stored_row_bytes(int format, int columns) {
  switch (format) {
    case F32:
      return static_cast<size_t>(columns) * 4;
    case F16:
    case BF16:
      return static_cast<size_t>(columns) * 2;
    case Q8_0:
      return static_cast<size_t>(columns) / BLOCK * 34;
    case Q4_0:
      return static_cast<size_t>(columns) / BLOCK * 18;
    default:
      return static_cast<size_t>(columns) / BLOCK * 20;
  }
}

// One stored row to floats.
void decode_row(int format, const uint8_t* stored, int columns, float* out);

}  // namespace signalbox
