// From rows as stored (worker/loader/tensors.py describes the bytes) to panels, once for each model.
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

// One stored block of 32 values: value = scale * (code - zero) + minimum, the first 16 with scales[0], the rest with
// scales[1]. The codes of Q8_0 are signed.
struct Block {
  uint8_t codes[BLOCK];
  float scales[2];
  float zero, minimum;
};

// The 6-bit scale and minimum of sub-block j of Q4_K and Q5_K, packed in 12 bytes.
struct ScaleAndMinimum {
  uint8_t scale, minimum;
};

ScaleAndMinimum scale_and_minimum(const uint8_t* packed, int j) {
  const auto byte = [packed](int i) { return static_cast<unsigned>(packed[i]); };
  if (j < 4) return {static_cast<uint8_t>(byte(j) & 63), static_cast<uint8_t>(byte(j + 4) & 63)};
  return {static_cast<uint8_t>((byte(j + 4) & 15) | byte(j - 4) >> 6 << 4),
          static_cast<uint8_t>(byte(j + 4) >> 4 | byte(j) >> 6 << 4)};
}

// Low and high halves of the bytes are the first and the last 16 codes.
void read_nibbles(const uint8_t* bytes, uint8_t* codes) {
  for (int c = 0; c < BLOCK / 2; ++c) {
    codes[c] = bytes[c] & 15;
    codes[c + BLOCK / 2] = bytes[c] >> 4;
  }
}

// Codes of sub-block j of a super-block, whose pairs of sub-blocks share 32 bytes as low and high halves.
void read_pairs(const uint8_t* bytes, int j, uint8_t* codes) {
  for (int c = 0; c < BLOCK; ++c) codes[c] = (bytes[j / 2 * BLOCK + c] >> (j % 2 * 4)) & 15;
}

void read_q6(const uint8_t* stored, int j, uint8_t* codes) {
  const uint8_t *low = stored + j / 4 * 64 + j % 2 * BLOCK, *high = stored + 128 + j / 4 * BLOCK;
  for (int c = 0; c < BLOCK; ++c)
    codes[c] = ((low[c] >> (j % 4 / 2 * 4)) & 15) | ((high[c] >> (j % 4 * 2)) & 3) << 4;
}

// Block `block` of a row.
Block read_block(int format, const uint8_t* row, int block) {
  const bool super = block_layout(format).columns == SUPER_BLOCK;
  const int j = super ? block % (SUPER_BLOCK / BLOCK) : 0;
  const uint8_t* stored = row + (super ? block / 8 * stored_row_bytes(format, SUPER_BLOCK)
                                       : block * stored_row_bytes(format, BLOCK));
  Block found{};
  const float factor = half_to_float(load16(stored));
  found.scales[0] = found.scales[1] = factor;
  switch (format) {
    case Q8_0:
      std::memcpy(found.codes, stored + 2, BLOCK);
      break;
    case Q4_0:
      read_nibbles(stored + 2, found.codes);
      found.zero = 8.0f;
      break;
    case Q4_1:
      read_nibbles(stored + 4, found.codes);
      found.minimum = half_to_float(load16(stored + 2));
      break;
    case Q4_K:
    case Q5_K: {
      const ScaleAndMinimum both = scale_and_minimum(stored + 4, j);
      found.scales[0] = found.scales[1] = factor * both.scale;
      found.minimum = -half_to_float(load16(stored + 2)) * both.minimum;
      read_pairs(stored + (format == Q5_K ? 48 : 16), j, found.codes);
      for (int c = 0; format == Q5_K && c < BLOCK; ++c) found.codes[c] |= ((stored[16 + c] >> j) & 1) << 4;
      break;
    }
    default:
      read_q6(stored, j, found.codes);
      for (int half = 0; half < 2; ++half)
        found.scales[half] = half_to_float(load16(stored + 208)) * static_cast<int8_t>(stored[192 + 2 * j + half]);
      found.zero = 32.0f;
  }
  return found;
}

void store_codes(int format, const uint8_t* codes, int row, uint8_t* values) {
  for (int c = 0; c < BLOCK; ++c) {
    const int group = c / 4, place = row * 4 + c % 4;
    const unsigned code = codes[c];
    if (format == Q8_0) {
      values[group * 64 + place] = codes[c];
      continue;
    }
    values[group % 4 * 64 + place] |= (code & 15) << (group / 4 * 4);
    if (format == Q5_K) values[256 + place] |= (code >> 4) << group;
    if (format == Q6_K) values[256 + group / 4 * 64 + place] |= (code >> 4) << (group % 4 * 2);
  }
}

// A super-block's factors to `head`, or a block's own scales to `scales`.
void store_scales(int format, const uint8_t* row_bytes, int block, int row, uint8_t* head, uint8_t* scales) {
  const auto put16 = [row](uint8_t* line, const uint8_t* from) { std::memcpy(line + 2 * row, from, 2); };
  const int j = block % (SUPER_BLOCK / BLOCK);
  const uint8_t* super = row_bytes + block / (SUPER_BLOCK / BLOCK) * stored_row_bytes(format, SUPER_BLOCK);
  switch (format) {
    case Q4_K:
    case Q5_K: {
      if (j == 0) put16(head, super), put16(head + 32, super + 2);
      const ScaleAndMinimum both = scale_and_minimum(super + 4, j);
      scales[row] = both.scale;
      scales[PANEL + row] = both.minimum;
      return;
    }
    case Q6_K:
      if (j == 0) put16(head, super + 208);
      scales[row] = super[192 + 2 * j];
      scales[PANEL + row] = super[192 + 2 * j + 1];
      return;
    default: {
      const uint8_t* stored = row_bytes + block * stored_row_bytes(format, BLOCK);
      put16(scales, stored);
      if (format == Q4_1) put16(scales + 32, stored + 2);
    }
  }
}

void pack_block_panel(int format, const uint8_t* stored, int rows, int columns, uint8_t* panel) {
  const BlockLayout layout = block_layout(format);
  const size_t stride = stored_row_bytes(format, columns);
  for (int block = 0; block < columns / BLOCK; ++block) {
    uint8_t* head = panel;
    if (block % (layout.columns / BLOCK) == 0) panel += layout.head;
    for (int row = 0; row < rows; ++row) {
      const uint8_t* source = stored + row * stride;
      store_scales(format, source, block, row, head, panel);
      store_codes(format, read_block(format, source, block).codes, row, panel + layout.scales);
    }
    panel += layout.scales + layout.values;
  }
}

void pack_float_panel(int format, const uint8_t* stored, int rows, int columns, uint8_t* panel) {
  const size_t stride = stored_row_bytes(format, columns), width = format == F32 ? 4 : 2;
  for (int row = 0; row < rows; ++row) {
    for (int column = 0; column < columns; ++column) {
      std::memcpy(panel + (static_cast<size_t>(column) * PANEL + row) * width, stored + row * stride + column * width,
                  width);
    }
  }
}

// The order of operations is that of worker/loader/tensors.py, so that both give the same floats.
void decode_block(int format, const uint8_t* row, int block, float* out) {
  const Block found = read_block(format, row, block);
  for (int c = 0; c < BLOCK; ++c) {
    const float scale = found.scales[c / (BLOCK / 2)];
    const float code = format == Q8_0 ? static_cast<int8_t>(found.codes[c]) : found.codes[c];
    out[c] = (code - found.zero) * scale + found.minimum;
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
    default:
      for (int block = 0; block < columns / BLOCK; ++block) decode_block(format, stored, block, out + block * BLOCK);
  }
}

extern "C" int64_t sb_packed_bytes(int format, int rows, int columns) {
  return static_cast<int64_t>(num_panels(rows) * panel_bytes(format, columns));
}

// stored: rows without a gap. packed: zeros.
extern "C" void sb_pack(int format, const uint8_t* stored, int rows, int columns, uint8_t* packed) {
  for (int panel = 0; panel < num_panels(rows); ++panel) {
    const int first = panel * PANEL, count = rows - first < PANEL ? rows - first : PANEL;
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
