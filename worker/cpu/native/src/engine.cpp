// Runs recorded programs. A step is one call: the forward part over all tokens, then for the tokens whose logits count
// the head part, a few rows at a time, each followed by sampling.
#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "attention.h"
#include "elementwise.h"
#include "formats.h"
#include "linear.h"
#include "pool.h"
#include "sampler.h"

namespace signalbox {

namespace {

// Pieces of work for each thread and operation: threads take them as they come, since cores may be shared.
constexpr int PIECES = 4;
// Columns of one piece of a gate: whole blocks.
constexpr int GATE_COLUMNS = 256;

struct alignas(64) Counter {
  std::atomic<int> next{0};
};

}  // namespace

class Engine {
 public:
  Engine(const Model& model, const Op* forward, int forward_count, const Op* head, int head_count)
      : model_(model),
        forward_(forward, forward + forward_count),
        head_(head, head + head_count),
        counters_(new Counter[forward_count + head_count + 2]),
        samplers_(model.threads),
        pool_(model.threads) {
    for (int thread = 0; thread < model.threads; ++thread) attentions_.emplace_back(model);
  }

  void run(const Step& step) {
    items_ = attention_items(model_, step);
    reset(0, forward_.size() + 1);
    pool_.run([&](int thread) { work(step, thread); });
  }

  void linear_only(const Op& op, int tokens) {
    reset(0, 1);
    pool_.run([&](int) { linear(op, tokens, counters_[0]); });
  }

 private:
  void reset(size_t first, size_t last) {
    for (size_t i = first; i < last; ++i) counters_[i].next.store(0, std::memory_order_relaxed);
  }

  void work(const Step& step, int thread) {
    for (size_t i = 0; i < forward_.size(); ++i) {
      if (forward_[i].flags & WAIT) pool_.barrier();
      execute(forward_[i], step, step.tokens, nullptr, counters_[i], thread);
    }
    pool_.barrier();
    share(counters_[forward_.size()], step.tokens, [&](int token) {
      const float* state = model_.hidden_states + static_cast<size_t>(token) * model_.hidden;
      step.token_finite[token] = all_finite(state, model_.hidden);
    });
    const size_t base = forward_.size() + 1;
    const int rows = step.samples + step.scores;
    for (int first = 0; first < rows; first += model_.head_rows) {
      const int count = std::min(model_.head_rows, rows - first);
      pool_.barrier();
      if (thread == 0) reset(base, base + head_.size() + 1);
      pool_.barrier();
      for (size_t i = 0; i < head_.size(); ++i) {
        if (head_[i].flags & WAIT) pool_.barrier();
        execute(head_[i], step, count, step.sources + first, counters_[base + i], thread);
      }
      pool_.barrier();
      share(counters_[base + head_.size()], count, [&](int row) {
        finish_row(model_, step, first + row, model_.logits + static_cast<size_t>(row) * model_.vocab,
                   samplers_[thread]);
      });
    }
  }

  // Calls body for each index below `count` that this thread gets.
  template <typename Body>
  static void share(Counter& counter, int count, const Body& body) {
    for (int i; (i = counter.next.fetch_add(1, std::memory_order_relaxed)) < count;) body(i);
  }

  // sources: for a norm of chosen tokens, which; null for all tokens in order.
  void execute(const Op& op, const Step& step, int tokens, const int32_t* sources, Counter& counter, int thread) {
    switch (op.kind) {
      case EMBED:
        return share(counter, tokens, [&](int token) { embed(op, step, token); });
      case NORM:
        return share(counter, tokens, [&](int token) {
          norm(op, model_.activations, tokens, token, sources ? sources[token] : token);
        });
      case LINEAR:
        return linear(op, tokens, counter);
      case ROPE:
        return share(counter, tokens, [&](int token) { rope(op, model_, step, token); });
      case ATTENTION:
        return share(counter, static_cast<int>(items_.size()),
                     [&](int i) { attend(op, model_, step, items_[i], attentions_[thread]); });
      case GATE: {
        const int pieces = (op.k + GATE_COLUMNS - 1) / GATE_COLUMNS;
        return share(counter, tokens * pieces, [&](int i) {
          const int first = i % pieces * GATE_COLUMNS;
          gate(op, model_.activations, tokens, i / pieces, first, std::min(first + GATE_COLUMNS, op.k));
        });
      }
      case QUANTISE:
        return share(counter, tokens, [&](int token) {
          quantise_row(op.in + static_cast<size_t>(token) * op.in_stride, op.k, model_.activations, tokens, token);
        });
    }
  }

  void linear(const Op& op, int tokens, Counter& counter) {
    const int panels = num_panels(op.format, op.n);
    const int pieces = std::min(panels, PIECES * model_.threads);
    share(counter, pieces, [&](int i) {
      const int first = static_cast<int>(static_cast<int64_t>(panels) * i / pieces);
      const int last = static_cast<int>(static_cast<int64_t>(panels) * (i + 1) / pieces);
      if (is_quantised(op.format)) {
        linear_quantised(op, model_.activations, tokens, first, last);
      } else {
        linear_float(op, tokens, first, last);
      }
    });
  }

  const Model model_;
  const std::vector<Op> forward_, head_;
  std::unique_ptr<Counter[]> counters_;
  std::vector<AttentionScratch> attentions_;
  std::vector<SamplerScratch> samplers_;
  std::vector<AttentionItem> items_;
  Pool pool_;
};

extern "C" {

Engine* sb_open(const Model* model, const Op* forward, int forward_count, const Op* head, int head_count) {
  return new Engine(*model, forward, forward_count, head, head_count);
}

void sb_close(Engine* engine) { delete engine; }

void sb_run(Engine* engine, const Step* step) { engine->run(*step); }

// For tests and benchmarks: one linear map over activations that are quantised already.
void sb_linear(Engine* engine, const Op* op, int tokens) { engine->linear_only(*op, tokens); }

void sb_quantise(const float* x, int tokens, int k, const Activations* out) {
  for (int token = 0; token < tokens; ++token) quantise_row(x + static_cast<size_t>(token) * k, k, *out, tokens, token);
}

}  // extern "C"

}  // namespace signalbox
