// The records that Python fills in: they mirror worker/cpu/native/records.py field by field.
#pragma once

#include <cstdint>

namespace signalbox {

// How weights are stored (worker/loader/tensors.py describes the bytes).
enum Format : int32_t { F32 = 0, F16 = 1, BF16 = 2, Q8_0 = 3, Q4_0 = 4, Q4_1 = 5, Q4_K = 6, Q5_K = 7, Q6_K = 8 };

// Values of one quantised block, of weights and of activations.
constexpr int BLOCK = 32;
// Values of a super-block: the K-quants store one float scale for so many.
constexpr int SUPER_BLOCK = 256;

inline bool is_quantised(int format) { return format >= Q8_0; }

enum Kind : int32_t { EMBED = 0, NORM = 1, LINEAR = 2, ROPE = 3, ATTENTION = 4, GATE = 5, QUANTISE = 6 };

// Parts of a step.
enum Part : int32_t { FORWARD = 1, HEAD = 2 };

// Flags of an operation.
enum Flag : int32_t {
  WAIT = 1,      // all operations before this one must be complete
  ADD = 2,       // a linear map adds to `out` instead of overwriting it
  TO_BLOCKS = 4  // writes quantised activations too
};

// One operation of a program. Buffers hold one line of `*_stride` floats for each token.
struct Op {
  int32_t kind;
  int32_t flags;
  int32_t format;  // of `weights`
  int32_t n;       // features out
  int32_t k;       // features in
  int32_t in_stride;
  int32_t out_stride;
  float epsilon;
  const void* weights;    // packed (linear), stored rows (embed)
  const float* vector;    // norm weights; bias of a linear map or null; query norm or null
  const float* vector_2;  // key norm or null
  const float* in;
  float* out;
  void* keys;  // this layer's KV blocks
  void* values;
};

// Quantised activations, block by block; activations.h says in which order.
struct Activations {
  int8_t* values;  // 32 each
  float* scales;
  float* sums;      // scale times the sum of the 32 values
  int32_t* starts;  // four each, what codes that count from -128, -8 and -32 add too much: -128 and -8 times the sum of
                    // the values, -32 times that of the first and of the last 16
};

struct Model {
  int32_t heads;
  int32_t kv_heads;
  int32_t head_dim;
  int32_t padded_dim;  // head_dim rounded up to a multiple of 16
  int32_t block_size;  // a multiple of 16
  int32_t window;      // positions that a query sees, 0 for all
  int32_t hidden;
  int32_t vocab;
  int32_t head_rows;  // rows of the logits buffer
  int32_t threads;
  int32_t kv_format;  // F32, F16 or BF16
  int32_t num_blocks;
  int32_t block_numbers;  // of KV, from a block to the next one
  void* kv;               // all blocks, or null when nothing of them is to be populated ahead
  const float* cosines;  // [positions, head_dim / 2]
  const float* sines;
  Activations activations;
  const float* hidden_states;  // [T, hidden], what the forward part leaves
  float* logits;               // [head_rows, vocab]
};

// Changes to one sampled row's logits; spans are [begin, end) of the flat id columns.
struct Adjustment {
  int32_t bias_begin, bias_end;
  int32_t allowed_begin, allowed_end;
  int32_t banned_begin, banned_end;
  int32_t known_begin, known_end;
  int32_t output_begin, output_end;
  const uint32_t* bits;  // vocab / 32 words, rounded up: bit id % 32 of word id / 32 is for id; null for none
  float repetition, presence, frequency;
};

// One step: A rows with T tokens, of which S are sampled from and P are scored.
struct Step {
  int32_t tokens;
  int32_t rows;
  int32_t samples;
  int32_t scores;
  int32_t table_width;
  int32_t num_top;           // alternatives for each scored or sampled token
  int32_t threads;           // that take part
  int32_t* ids;              // [T]
  const int32_t* owners;     // [T] batch row whose last sampled token this is, or -1 where ids has it
  const int32_t* positions;  // [T]
  const int32_t* slots;      // [T]
  const int32_t* offsets;    // [A + 1]
  const int32_t* tables;     // [A, table_width]
  const int32_t* sources;    // [S + P] flat token whose logits count
  const int32_t* targets;    // [P]
  // Sampling columns, [S].
  const int32_t* sample_rows;  // batch row
  const uint64_t* seeds;
  const int32_t* sample_positions;
  const float* temperatures;
  const int32_t* top_k;
  const double* top_p;
  const double* min_p;
  const int32_t* wants_score;  // 0: no, 1: of the logits, 2: of the distribution that is drawn from
  const int32_t* adjustment_of;  // [S], -1 for none
  const Adjustment* adjustments;
  const int32_t* bias_ids;
  const float* bias_values;
  const int32_t* allowed_ids;
  const int32_t* banned_ids;
  const int32_t* known_ids;
  const int32_t* output_ids;
  const int32_t* output_counts;
  int32_t* last_tokens;  // of each batch row, what it sampled last; from one step to the next
  // Results.
  uint8_t* token_finite;   // [T]
  uint8_t* logits_finite;  // [S + P]
  int32_t* sampled;        // [S]
  float* score_values;     // [S + P]
  int32_t* score_ranks;    // [S + P]
  int32_t* top_ids;        // [S + P, num_top]
  float* top_values;       // [S + P, num_top]
  double* seconds;         // [2] of both parts, and when the last one ended, by a clock of this machine
};

}  // namespace signalbox
