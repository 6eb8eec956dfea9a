#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "elementwise.h"
#include "philox.h"
#include "simd.h"

namespace signalbox {

namespace {

using Candidate = SamplerScratch::Candidate;

constexpr float MINUS_INFINITY = -std::numeric_limits<float>::infinity();
// Below this temperature the most likely token is taken.
constexpr float GREEDY_BELOW = 1e-5f;
constexpr int NO_TOKEN = -1;
// In wants_score: of the distribution that the token is drawn from.
constexpr int AS_DRAWN = 2;
// Candidates that are put in order before the whole vocabulary is.
constexpr size_t SHORTLIST = 1024;
// Candidates of the first look: within this distance of the best value.
constexpr float NEAR = 12.0f;

// By value, and among equal values by the lowest id.
bool before(const Candidate& a, const Candidate& b) { return a.value > b.value || (a.value == b.value && a.id < b.id); }

float largest(const float* x, int count) {
  __m256 peak = _mm256_set1_ps(MINUS_INFINITY);
  int i = 0;
  for (; i + LANES <= count; i += LANES) peak = _mm256_max_ps(peak, _mm256_loadu_ps(x + i));
  float best = max_lanes(peak);
  for (; i < count; ++i) best = std::max(best, x[i]);
  return best;
}

int first_of(const float* x, int count, float value) {
  const __m256 wanted = _mm256_set1_ps(value);
  int i = 0;
  for (; i + LANES <= count; i += LANES) {
    const int found = _mm256_movemask_ps(_mm256_cmp_ps(_mm256_loadu_ps(x + i), wanted, _CMP_EQ_OQ));
    if (found) return i + __builtin_ctz(found);
  }
  for (; i < count; ++i)
    if (x[i] == value) return i;
  return 0;
}

// Sum over e^((x - best) / heat); lanes of doubles, then what is left over.
double sum_of_weights(const float* x, int count, float best, float heat) {
  __m256d low = _mm256_setzero_pd(), high = _mm256_setzero_pd();
  const __m256 top = _mm256_set1_ps(best), divisor = _mm256_set1_ps(heat);
  int i = 0;
  for (; i + LANES <= count; i += LANES) {
    const __m256 e = exp8(_mm256_div_ps(_mm256_sub_ps(_mm256_loadu_ps(x + i), top), divisor));
    low = _mm256_add_pd(low, _mm256_cvtps_pd(_mm256_castps256_ps128(e)));
    high = _mm256_add_pd(high, _mm256_cvtps_pd(_mm256_extractf128_ps(e, 1)));
  }
  alignas(32) double lanes[4];
  _mm256_store_pd(lanes, _mm256_add_pd(low, high));
  double sum = (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
  for (; i < count; ++i) sum += exp1((x[i] - best) / heat);
  return sum;
}

// Puts out every id whose bit is not set.
void keep_bits(const uint32_t* bits, int vocab, float* x) {
  const __m256i place = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256 out = _mm256_set1_ps(MINUS_INFINITY);
  int id = 0;
  for (; id + LANES <= vocab; id += LANES) {
    const int eight = static_cast<int>(bits[id / 32] >> (id % 32)) & 0xff;
    const __m256i set = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(eight), place), place);
    _mm256_storeu_ps(x + id, _mm256_blendv_ps(out, _mm256_loadu_ps(x + id), _mm256_castsi256_ps(set)));
  }
  for (; id < vocab; ++id)
    if (!(bits[id / 32] >> (id % 32) & 1)) x[id] = MINUS_INFINITY;
}

// Changes a copy of the row, in the order of worker.sampling.Adjustment.
void adjust(const Step& step, const Adjustment& rule, int vocab, SamplerScratch& scratch) {
  float* x = scratch.adjusted.data();
  for (int i = rule.bias_begin; i < rule.bias_end; ++i) x[step.bias_ids[i]] += step.bias_values[i];
  if (rule.allowed_begin < rule.allowed_end) {
    scratch.allowed.assign(vocab, 0);
    for (int i = rule.allowed_begin; i < rule.allowed_end; ++i) scratch.allowed[step.allowed_ids[i]] = 1;
    for (int id = 0; id < vocab; ++id)
      if (!scratch.allowed[id]) x[id] = MINUS_INFINITY;
  }
  if (rule.bits) keep_bits(rule.bits, vocab, x);
  for (int i = rule.banned_begin; i < rule.banned_end; ++i) x[step.banned_ids[i]] = MINUS_INFINITY;
  for (int i = rule.known_begin; i < rule.known_end; ++i) {
    float& value = x[step.known_ids[i]];
    value = value > 0.0f ? value / rule.repetition : value * rule.repetition;
  }
  for (int i = rule.output_begin; i < rule.output_end; ++i)
    x[step.output_ids[i]] -= rule.frequency * static_cast<float>(step.output_counts[i]) + rule.presence;
}

// The largest of value plus noise over all tokens. A token can win only if its uniform number u is near enough to 1:
// -ln(u) <= e^(value - best so far), and 1 - u is never more than -ln(u). So a cheap look at 1 - u spares nearly all
// logarithms, and changes no result.
int draw(const float* x, int vocab, float best, float heat, const PhiloxKey& key) {
  int chosen = NO_TOKEN;
  double so_far = -std::numeric_limits<double>::infinity();
  const auto consider = [&](int id, uint32_t word) {
    const double value = gumbel(word) + static_cast<double>((x[id] - best) / heat);
    if (value > so_far || (value == so_far && id < chosen)) {
      so_far = value;
      chosen = id;
    }
  };
  const int likely = first_of(x, vocab, best);
  consider(likely, philox(key, likely));
  const __m256 top = _mm256_set1_ps(best), divisor = _mm256_set1_ps(heat);
  int i = 0;
  for (; i + LANES <= vocab; i += LANES) {
    const __m256 value = _mm256_div_ps(_mm256_sub_ps(_mm256_loadu_ps(x + i), top), divisor);
    const int allowed = _mm256_movemask_ps(_mm256_cmp_ps(value, _mm256_set1_ps(MINUS_INFINITY), _CMP_GT_OQ));
    if (!allowed) continue;
    const __m256i word = philox8(key, i);
    const __m256 limit = exp8(_mm256_sub_ps(value, _mm256_set1_ps(static_cast<float>(so_far) - 1e-3f)));
    // 1 - u to 23 bits, rounded down: its upper 23 bits as a fraction.
    const __m256i rest = _mm256_srli_epi32(_mm256_xor_si256(word, _mm256_set1_epi32(-1)), 9);
    const __m256 distance = _mm256_mul_ps(_mm256_cvtepi32_ps(rest), _mm256_set1_ps(0x1p-23f));
    int near = _mm256_movemask_ps(_mm256_cmp_ps(distance, limit, _CMP_LE_OQ)) & allowed;
    if (!near) continue;
    alignas(32) uint32_t words[LANES];
    _mm256_store_si256(reinterpret_cast<__m256i*>(words), word);
    for (; near; near &= near - 1) consider(i + __builtin_ctz(near), words[__builtin_ctz(near)]);
  }
  for (; i < vocab; ++i)
    if (x[i] > MINUS_INFINITY) consider(i, philox(key, i));
  return chosen;
}

void collect(const float* x, int vocab, float best, float heat, float nearest, std::vector<Candidate>& out) {
  out.clear();
  const __m256 top = _mm256_set1_ps(best), divisor = _mm256_set1_ps(heat), bound = _mm256_set1_ps(nearest);
  int i = 0;
  for (; i + LANES <= vocab; i += LANES) {
    const __m256 value = _mm256_div_ps(_mm256_sub_ps(_mm256_loadu_ps(x + i), top), divisor);
    int near = _mm256_movemask_ps(_mm256_cmp_ps(value, bound, _CMP_GE_OQ));
    for (; near; near &= near - 1) {
      const int id = i + __builtin_ctz(near);
      out.push_back({(x[id] - best) / heat, id});
    }
  }
  for (; i < vocab; ++i) {
    const float value = (x[i] - best) / heat;
    if (value >= nearest) out.push_back({value, i});
  }
}

struct Limits {
  int top_k;
  double top_p, min_p;
};

// Marks which of the first `count` candidates top-k, top-p and min-p leave. False: there are more candidates than
// these, and the last of these is left or top-k takes more, so that more of them must be put in order.
bool narrow(const std::vector<Candidate>& ordered, size_t count, const Limits& limits, double whole, bool complete,
            std::vector<uint8_t>& kept) {
  double first_k = 0.0;
  const bool inside = limits.top_k > 0 && static_cast<size_t>(limits.top_k) <= count;
  for (size_t i = 0; inside && i < static_cast<size_t>(limits.top_k); ++i) first_k += std::exp(double{ordered[i].value});
  // top-p is a share of what top-k left: of the whole row unless the k first are all here.
  const double bound = limits.top_p * (inside ? first_k : whole);
  double sum = 0.0;
  kept.assign(count, 0);
  for (size_t i = 0; i < count; ++i) {
    const double weight = std::exp(double{ordered[i].value});
    const bool in_k = limits.top_k <= 0 || i < static_cast<size_t>(limits.top_k);
    const bool in_p = limits.top_p >= 1.0 || i == 0 || sum < bound;
    kept[i] = in_k && in_p && weight >= limits.min_p;
    sum += weight;
  }
  return complete || (count > 0 && !kept[count - 1] && limits.top_k <= static_cast<int64_t>(count));
}

int draw_narrowed(const float* x, int vocab, float best, float heat, const Limits& limits, const PhiloxKey& key,
                  SamplerScratch& scratch) {
  std::vector<Candidate>& candidates = scratch.candidates;
  const bool shares = limits.top_p < 1.0;
  const double whole = shares ? sum_of_weights(x, vocab, best, heat) : 0.0;
  size_t count = 0;
  for (const float nearest : {-NEAR, MINUS_INFINITY}) {
    collect(x, vocab, best, heat, nearest, candidates);
    const bool all = nearest == MINUS_INFINITY;
    count = std::min(candidates.size(), SHORTLIST);
    std::partial_sort(candidates.begin(), candidates.begin() + count, candidates.end(), before);
    if (narrow(candidates, count, limits, whole, all && count == candidates.size(), scratch.kept)) break;
    count = candidates.size();
    std::sort(candidates.begin(), candidates.end(), before);
    if (narrow(candidates, count, limits, whole, all, scratch.kept)) break;
  }
  int chosen = NO_TOKEN;
  double so_far = -std::numeric_limits<double>::infinity();
  for (size_t i = 0; i < count; ++i) {
    if (!scratch.kept[i]) continue;
    const double value = gumbel(philox(key, candidates[i].id)) + static_cast<double>(candidates[i].value);
    if (value > so_far) {
      so_far = value;
      chosen = candidates[i].id;
    }
  }
  return chosen;
}

int sample(const Model& model, const Step& step, int row, const float* logits, SamplerScratch& scratch) {
  const int vocab = model.vocab;
  const float* x = logits;
  if (step.adjustment_of[row] >= 0) {
    scratch.adjusted.assign(logits, logits + vocab);
    adjust(step, step.adjustments[step.adjustment_of[row]], vocab, scratch);
    x = scratch.adjusted.data();
  }
  const float best = largest(x, vocab), heat = step.temperatures[row];
  if (best == MINUS_INFINITY) return NO_TOKEN;
  if (heat < GREEDY_BELOW) return first_of(x, vocab, best);
  const PhiloxKey key{static_cast<uint32_t>(step.sample_positions[row]), step.seeds[row]};
  const Limits limits{step.top_k[row], step.top_p[row], step.min_p[row]};
  if (limits.top_k <= 0 && limits.top_p >= 1.0 && limits.min_p <= 0.0) return draw(x, vocab, best, heat, key);
  return draw_narrowed(x, vocab, best, heat, limits, key, scratch);
}

// The logits of the distribution that `sample` has just drawn from, over the temperature; minus infinity for what was
// ruled out. A greedy row has the temperature 1, and nothing narrows it.
const float* drawn_from(const Model& model, const Step& step, int row, const float* logits, SamplerScratch& scratch) {
  const int vocab = model.vocab;
  const float* x = step.adjustment_of[row] >= 0 ? scratch.adjusted.data() : logits;
  const bool greedy = step.temperatures[row] < GREEDY_BELOW;
  std::vector<float>& drawn = scratch.drawn;
  if (!greedy && (step.top_k[row] > 0 || step.top_p[row] < 1.0 || step.min_p[row] > 0.0)) {
    drawn.assign(vocab, MINUS_INFINITY);
    for (size_t i = 0; i < scratch.kept.size(); ++i)
      if (scratch.kept[i]) drawn[scratch.candidates[i].id] = scratch.candidates[i].value;
    return drawn.data();
  }
  const float best = largest(x, vocab), heat = greedy ? 1.0f : step.temperatures[row];
  drawn.resize(vocab);
  for (int id = 0; id < vocab; ++id) drawn[id] = (x[id] - best) / heat;
  return drawn.data();
}

// Value and rank of `target`, and the most likely tokens in order.
void score(const Model& model, const Step& step, int row, const float* logits, int target) {
  const int vocab = model.vocab;
  const float best = largest(logits, vocab);
  const float total = static_cast<float>(std::log(sum_of_weights(logits, vocab, best, 1.0f)));
  const auto logprob = [&](int id) { return (logits[id] - best) - total; };
  const float value = logprob(target);
  const __m256 top = _mm256_set1_ps(best), rest = _mm256_set1_ps(total), own = _mm256_set1_ps(value);
  int rank = 1, i = 0;
  for (; i + LANES <= vocab; i += LANES) {
    const __m256 other = _mm256_sub_ps(_mm256_sub_ps(_mm256_loadu_ps(logits + i), top), rest);
    rank += __builtin_popcount(_mm256_movemask_ps(_mm256_cmp_ps(other, own, _CMP_GT_OQ)));
  }
  for (; i < vocab; ++i) rank += logprob(i) > value;
  step.score_values[row] = value;
  step.score_ranks[row] = rank;
  int32_t* ids = step.top_ids + static_cast<size_t>(row) * step.num_top;
  float* values = step.top_values + static_cast<size_t>(row) * step.num_top;
  int held = 0;
  for (int id = 0; id < vocab && step.num_top; ++id) {
    const float here = logprob(id);
    if (held == step.num_top && !(here > values[held - 1])) continue;
    if (held < step.num_top) ++held;
    int place = held - 1;
    for (; place > 0 && here > values[place - 1]; --place) {
      values[place] = values[place - 1];
      ids[place] = ids[place - 1];
    }
    values[place] = here;
    ids[place] = id;
  }
}

}  // namespace

void finish_row(const Model& model, const Step& step, int row, const float* logits, SamplerScratch& scratch) {
  const bool finite = all_finite(logits, model.vocab);
  step.logits_finite[row] = finite;
  if (row >= step.samples) {
    score(model, step, row, logits, step.targets[row - step.samples]);
    return;
  }
  const int token = finite ? sample(model, step, row, logits, scratch) : 0;
  step.sampled[row] = token;
  if (!step.wants_score[row]) return;
  const bool as_drawn = step.wants_score[row] == AS_DRAWN && finite && token != NO_TOKEN;
  score(model, step, row, as_drawn ? drawn_from(model, step, row, logits, scratch) : logits, std::max(token, 0));
}

}  // namespace signalbox
