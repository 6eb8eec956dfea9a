#include "elementwise.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "activations.h"
#include "formats.h"
#include "kv.h"
#include "simd.h"

namespace signalbox {

namespace {

constexpr float NOT_A_NUMBER = std::numeric_limits<float>::quiet_NaN();

// Sum of squares: lanes first, then over the lanes, then what is left over.
float squares(const float* x, int count) {
  __m256 sum = _mm256_setzero_ps();
  int i = 0;
  for (; i + LANES <= count; i += LANES) {
    const __m256 v = _mm256_loadu_ps(x + i);
    sum = _mm256_fmadd_ps(v, v, sum);
  }
  float total = sum_lanes(sum);
  for (; i < count; ++i) total += x[i] * x[i];
  return total;
}

void normalise(const float* x, const float* weight, int count, float epsilon, float* out) {
  const float scale = 1.0f / std::sqrt(squares(x, count) / static_cast<float>(count) + epsilon);
  for (int i = 0; i < count; ++i) out[i] = x[i] * scale * weight[i];
}

#ifdef __AVX512F__

// The largest size among 32 values; NaN when one of them is NaN or infinite.
float largest_of(const float* x) {
  const Floats a = _mm512_abs_ps(load_floats(x)), b = _mm512_abs_ps(load_floats(x + WIDTH));
  const Floats limit = all_of(FLT_MAX);
  if (_mm512_cmp_ps_mask(a, limit, _CMP_NLE_UQ) | _mm512_cmp_ps_mask(b, limit, _CMP_NLE_UQ)) return NOT_A_NUMBER;
  return max_all(_mm512_max_ps(a, b));
}

// 32 values in steps of 1 / inverse; the sums of the first and of the last 16 bytes. A peak so small that 127 / peak is
// infinite makes infinities of them; the bounds hold the bytes.
std::pair<int32_t, int32_t> to_bytes(const float* x, float inverse, int8_t* values) {
  int32_t sums[2];
  for (int i = 0; i < 2; ++i) {
    const Floats scaled = multiply(load_floats(x + i * WIDTH), all_of(inverse));
    const Ints q = _mm512_cvtps_epi32(_mm512_max_ps(all_of(-127.0f), _mm512_min_ps(all_of(127.0f), scaled)));
    sums[i] = sum_lanes(_mm256_add_epi32(_mm512_castsi512_si256(q), _mm512_extracti64x4_epi64(q, 1)));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(values + i * WIDTH), _mm512_cvtepi32_epi8(q));
  }
  return {sums[0], sums[1]};
}

#else

// See above.
float largest_of(const float* x) {
  __m256 largest = _mm256_setzero_ps(), bad = _mm256_setzero_ps();
  for (int i = 0; i < BLOCK; i += LANES) {
    const __m256 v = _mm256_loadu_ps(x + i);
    largest = _mm256_max_ps(largest, absolute(v));
    bad = _mm256_or_ps(bad, not_finite(v));
  }
  return _mm256_movemask_ps(bad) ? NOT_A_NUMBER : max_lanes(largest);
}

std::pair<int32_t, int32_t> to_bytes(const float* x, float inverse, int8_t* values) {
  __m256i q[4];
  for (int i = 0; i < 4; ++i) {
    const __m256 scaled = _mm256_mul_ps(_mm256_loadu_ps(x + LANES * i), _mm256_set1_ps(inverse));
    q[i] = _mm256_cvtps_epi32(_mm256_max_ps(_mm256_set1_ps(-127.0f), _mm256_min_ps(_mm256_set1_ps(127.0f), scaled)));
  }
  // Packing works within 128-bit halves; the permutation puts the groups of four back in order.
  const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(values), _mm256_permutevar8x32_epi32(bytes, order));
  return {sum_lanes(_mm256_add_epi32(q[0], q[1])), sum_lanes(_mm256_add_epi32(q[2], q[3]))};
}

#endif

// 32 values. A block that holds NaN or infinity gets a scale of NaN, so that no output of it is finite.
void quantise_block(const float* x, int8_t* values, float& scale, float& sum, int32_t* starts) {
  const float peak = largest_of(x);
  const auto [first, last] = to_bytes(x, peak > 0.0f ? 127.0f / peak : 0.0f, values);
  starts[0] = -128 * (first + last);
  starts[1] = -8 * (first + last);
  starts[2] = -32 * first;
  starts[3] = -32 * last;
  scale = peak / 127.0f;
  sum = scale * static_cast<float>(first + last);
}

// Blocks [first, last) of a token that has `blocks`; x begins with the first of them.
void quantise_blocks(const float* x, int first, int last, int blocks, const Activations& out, int tokens, int token) {
  const Tiles tiles(tokens);
  const size_t start = tiles.index(token, 0, blocks), step = tiles.size(tiles.of(token));
  for (int block = first; block < last; ++block, x += BLOCK) {
    const size_t at = start + block * step;
    quantise_block(x, out.values + at * BLOCK, out.scales[at], out.sums[at], out.starts + 4 * at);
  }
}

// keys: those of all KV heads, and after them the values.
template <typename Number>
void write_slot(const Op& op, const Model& model, const KVSlot& slot, const float* keys) {
  const int dim = model.head_dim;
  const float* values = keys + model.kv_heads * dim;
  for (int head = 0; head < model.kv_heads; ++head, keys += dim, values += dim) {
    Number* key = static_cast<Number*>(op.keys) + slot.key(head);
    Number* value = static_cast<Number*>(op.values) + slot.value(head);
    for (int i = 0; i < dim; ++i) store_number(keys[i], key + i * KEY_LANES);
    for (int i = 0; i < dim; ++i) store_number(values[i], value + i);
  }
}

}  // namespace

void quantise_row(const float* x, int k, const Activations& out, int tokens, int token) {
  quantise_blocks(x, 0, k / BLOCK, k / BLOCK, out, tokens, token);
}

void embed(const Op& op, const Step& step, int token) {
  const size_t row = static_cast<size_t>(step.ids[token]) * stored_row_bytes(op.format, op.n);
  decode_row(op.format, static_cast<const uint8_t*>(op.weights) + row, op.n,
             op.out + static_cast<size_t>(token) * op.out_stride);
}

void norm(const Op& op, const Activations& blocks, int tokens, int token, int source) {
  const float* x = op.in + static_cast<size_t>(source) * op.in_stride;
  float* out = op.out + static_cast<size_t>(token) * op.out_stride;
  normalise(x, op.vector, op.k, op.epsilon, out);
  if (op.flags & TO_BLOCKS) quantise_row(out, op.k, blocks, tokens, token);
}

void gate(const Op& op, const Activations& blocks, int tokens, int token, int first, int last) {
  const float* gates = op.in + static_cast<size_t>(token) * op.in_stride;
  const float* ups = gates + op.k;
  alignas(64) float columns[GATE_COLUMNS];
  const bool to_blocks = op.flags & TO_BLOCKS;
  float* out = to_blocks ? columns : op.out + static_cast<size_t>(token) * op.out_stride + first;
  int i = first;
  for (; i + WIDTH <= last; i += WIDTH, out += WIDTH) {
    const Floats x = load_floats(gates + i);
    const Floats decay = exponential(subtract(zero_floats(), x));
    const Floats silu = divide(x, add(all_of(1.0f), decay));
    store_floats(out, multiply(silu, load_floats(ups + i)));
  }
  for (; i < last; ++i) *out++ = gates[i] / (1.0f + exp1(-gates[i])) * ups[i];
  if (to_blocks) quantise_blocks(columns, first / BLOCK, last / BLOCK, op.k / BLOCK, blocks, tokens, token);
}

void rope(const Op& op, const Model& model, const Step& step, int token) {
  const int dim = model.head_dim, half = dim / 2, heads = model.heads, kv_heads = model.kv_heads;
  const size_t position = step.positions[token];
  const float *cosine = model.cosines + position * half, *sine = model.sines + position * half;
  float* line = op.out + static_cast<size_t>(token) * op.out_stride;
  const KVSlot slot(model, step.slots[token]);
  for (int head = 0; head < heads + kv_heads; ++head) {
    float* x = line + head * dim;
    const float* weight = head < heads ? op.vector : op.vector_2;
    if (weight) normalise(x, weight, dim, op.epsilon, x);
    for (int i = 0; i < half; ++i) {
      const float a = x[i], b = x[i + half];
      x[i] = a * cosine[i] - b * sine[i];
      x[i + half] = b * cosine[i] + a * sine[i];
    }
  }
  const float* keys = line + heads * dim;
  switch (model.kv_format) {
    case F32:
      return write_slot<float>(op, model, slot, keys);
    case F16:
      return write_slot<Half>(op, model, slot, keys);
    default:
      return write_slot<BFloat>(op, model, slot, keys);
  }
}

bool all_finite(const float* x, int count) {
  __m256 bad = _mm256_setzero_ps();
  int i = 0;
  for (; i + LANES <= count; i += LANES) bad = _mm256_or_ps(bad, not_finite(_mm256_loadu_ps(x + i)));
  bool good = _mm256_movemask_ps(bad) == 0;
  for (; i < count; ++i) good = good && std::isfinite(x[i]);
  return good;
}

}  // namespace signalbox
