// Paged attention with an online softmax (arXiv 1805.02867) over tiles of keys.
//
// Batch invariance: tiles of 64 keys and parts of 512 keys begin at fixed absolute positions. Within a tile a query's
// keys are added in order, tiles within a part in order, then parts in order: a query's result depends on its own
// position alone, whether it is computed as a decode, in a prefill or in a chunk of one.
#pragma once

#include <vector>

#include "types.h"

namespace signalbox {

// Queries of one row and one KV head that one thread computes together: flat tokens [first, first + count).
struct AttentionItem {
  int32_t row, head, first, count;
};

// A step's work, the most expensive first.
std::vector<AttentionItem> attention_items(const Model& model, const Step& step);

// One thread's working memory.
class AttentionScratch {
 public:
  explicit AttentionScratch(const Model& model);
  float *queries, *scores, *part, *total;          // [rows][dim], [rows][tile], [rows][padded_dim] twice
  float *part_peak, *part_sum, *total_peak, *total_sum;  // [rows]

 private:
  std::vector<float> memory_;
};

void attend(const Op& op, const Model& model, const Step& step, const AttentionItem& item, AttentionScratch& scratch);

}  // namespace signalbox
