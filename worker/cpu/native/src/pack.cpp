// From rows as stored to panels, once for each model.
#include <cstring>

#include "formats.h"
#include "simd.h"

namespace signalbox {

namespace {

uint16_t load16(const uint8_t* bytes) {
  uint16_t value;
  std::memcpy(&value, bytes, 2);
  return value;
}


void pack_float_panel(int format, const uint8_t* stored, int rows, int columns, uint8_t* panel) {
  const size_t stride = stored_row_bytes(format, columns), width = format == F32 ? 4 : 2;
  for (int row = 0; row < rows; ++row) {
    const int place = format == BF16 ? (row % 8) * 2 + row / 8 : row;
    for (int column = 0; column < columns; ++column) {
      std::memcpy(panel + (static_cast<size_t>(column) * FLOAT_PANEL + place) * width,
                  stored + row * stride + column * width, width);
    }
  }
}

// Byte of the value at column `c` of a panel's row, within one block's bytes.
int place_of(int row, int c) { return (c / 4) * 32 + row * 4 + c % 4; }

void pack_block_panel(int format, const uint8_t* stored, int rows, int columns, uint8_t* panel) {
  const int blocks = columns / BLOCK, block_bytes = format == Q8_0 ? 34 : format == Q4_0 ? 18 : 20;
  const int packed = format == Q8_0 ? 256 : 128, header = format == Q4_1 ? 4 : 2;
  uint16_t* scales = reinterpret_cast<uint16_t*>(panel);
  uint16_t* minima = scales + blocks * BLOCK_PANEL;
  uint8_t* values = panel + scale_bytes(format, columns);
  for (int row = 0; row < rows; ++row) {
    const uint8_t* source = stored + row * stored_row_bytes(format, columns);
    for (int block = 0; block < blocks; ++block, source += block_bytes) {
      uint8_t* target = values + static_cast<size_t>(block) * packed;
      scales[block * BLOCK_PANEL + row] = load16(source);
      if (format == Q4_1) minima[block * BLOCK_PANEL + row] = load16(source + 2);
      for (int c = 0; c < BLOCK; ++c) {
        if (format == Q8_0) {
          target[place_of(row, c)] = source[header + c];
        } else {  // columns c and c + 16 share a byte in the file and here
          if (c < BLOCK / 2) target[place_of(row, c)] = source[header + c];
        }
      }
    }
  }
}

void decode_block(int format, const uint8_t* source, float* out) {
  const float scale = half_to_float(load16(source));
  if (format == Q8_0) {
    for (int c = 0; c < BLOCK; ++c) out[c] = static_cast<int8_t>(source[2 + c]) * scale;
    return;
  }
  const float minimum = format == Q4_1 ? half_to_float(load16(source + 2)) : -8.0f * scale;
  const uint8_t* nibbles = source + (format == Q4_1 ? 4 : 2);
  for (int c = 0; c < BLOCK / 2; ++c) {
    out[c] = (nibbles[c] & 15) * scale + minimum;
    out[c + BLOCK / 2] = (nibbles[c] >> 4) * scale + minimum;
  }
}

}  // namespace

void decode_row(int format, const uint8_t* stored, int columns, float* out) {
  switch (format) {
    case F32:
      std::memcpy(out, stored, static_cast<size_t>(columns) * 4);
      return;
    case F16:
      for (int c = 0; c < columns; ++c) out[c] = half_to_float(load16(stored + 2 * c));
      return;
    case BF16:
      for (int c = 0; c < columns; ++c) out[c] = bfloat_to_float(load16(stored + 2 * c));
      return;
    default: {
      const size_t block_bytes = stored_row_bytes(format, BLOCK);
      for (int block = 0; block < columns / BLOCK; ++block)
        decode_block(format, stored + block * block_bytes, out + block * BLOCK);
    }
  }
}

extern "C" int64_t sb_packed_bytes(int format, int rows, int columns) {
  return static_cast<int64_t>(num_panels(format, rows) * panel_bytes(format, columns));
}

// stored: rows without a gap. packed: zeros.
extern "C" void sb_pack(int format, const uint8_t* stored, int rows, int columns, uint8_t* packed) {
  const int height = panel_rows(format);
  for (int panel = 0; panel < num_panels(format, rows); ++panel) {
    const int first = panel * height, count = rows - first < height ? rows - first : height;
    const uint8_t* source = stored + first * stored_row_bytes(format, columns);
    uint8_t* target = packed + panel * panel_bytes(format, columns);
    if (is_quantised(format)) {
      pack_block_panel(format, source, count, columns, target);
    } else {
      pack_float_panel(format, source, count, columns, target);
    }
  }
}

}  // namespace signalbox
