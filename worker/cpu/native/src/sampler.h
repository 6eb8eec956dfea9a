// From logits to tokens and log-probabilities, one row at a time; the rules are those of worker/sampler.py and
// worker/ranking.py.
#pragma once

#include <vector>

#include "types.h"

namespace signalbox {

// One thread's working memory.
struct SamplerScratch {
  struct Candidate {
    float value;
    int32_t id;
  };
  std::vector<float> adjusted;
  std::vector<uint8_t> allowed;
  std::vector<Candidate> candidates;
  std::vector<uint8_t> kept;  // of the candidates, by the last row that was narrowed
  std::vector<float> drawn;
};

// Finishes row `row` of the S + P: samples from the first S, scores the others, and sets its finite flag.
void finish_row(const Model& model, const Step& step, int row, const float* logits, SamplerScratch& scratch);

}  // namespace signalbox
