// Runs recorded programs. A step has two parts: the forward part over all tokens, then for the tokens whose logits count
// the head part, a few rows at a time, each followed by sampling. Parts are handed over one by one and run in that order.
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <vector>

#include "activations.h"
#include "attention.h"
#include "elementwise.h"
#include "formats.h"
#include "kv_memory.h"
#include "launcher.h"
#include "linear.h"
#include "pool.h"
#include "sampler.h"

namespace signalbox {

namespace {

// Pieces of a linear map for each thread.
constexpr int PIECES = 4;
// Up to so many tokens, each is a piece of its own; more go by tiles, which lie together in memory (activations.h).
constexpr int SINGLE_TOKENS = 8;
// Up to so many tokens, operations take microseconds, and helpers offer their cores between them. Where the kernel takes
// a core in the middle of a piece instead, for one of the processes that carry the tokens on, all threads wait for that.
constexpr int POLITE_TOKENS = 8;

}  // namespace

class Engine {
 public:
  Engine(const Model& model, const Op* forward, int forward_count, const Op* head, int head_count)
      : model_(model),
        forward_(forward, forward + forward_count),
        head_(head, head + head_count),
        samplers_(model.threads),
        kv_(model),
        pool_(model.threads) {
    for (int thread = 0; thread < model.threads; ++thread) attentions_.emplace_back(model);
  }

  // The number to wait for. The records that `step` points to must live until then.
  uint32_t enqueue(const Step& step, int part) {
    return launcher_.enqueue([this, step, part] { run(step, part); });
  }

  void wait(uint32_t number) { launcher_.wait(number); }

  void linear_only(const Op& op, int tokens) {
    reserve(1);
    works_[0].reset(pieces(op, tokens, model_.threads));
    pool_.run(model_.threads, [&](int) { linear(op, tokens, model_.threads, works_[0]); });
  }

 private:
  void run(const Step& step, int part) {
    const auto began = std::chrono::steady_clock::now();
    const int rows = part == HEAD ? step.samples + step.scores : 0;
    const size_t rounds = (rows + model_.head_rows - 1) / model_.head_rows;
    reserve(forward_.size() + 1 + rounds * (head_.size() + 1));
    Work* work = works_.get();
    if (part == FORWARD) {
      step.seconds[0] = 0;
      take_last_tokens(step);
      if (model_.kv) kv_.expect(*std::max_element(step.slots, step.slots + step.tokens) / model_.block_size);
      items_ = attention_items(model_, step);
      work = prepare(work, forward_, step.tokens, step.threads);
      (work++)->reset(token_pieces(step.tokens));
    }
    for (int first = 0; first < rows; first += model_.head_rows) {
      const int count = std::min(model_.head_rows, rows - first);
      work = prepare(work, head_, count, step.threads);
      (work++)->reset(count);
    }
    pool_.run(step.threads, [&](int thread) { take_part(step, part == FORWARD, rows, thread); });
    if (part == HEAD) keep_last_tokens(step);
    const auto ended = std::chrono::steady_clock::now();
    step.seconds[0] += std::chrono::duration<double>(ended - began).count();
    step.seconds[1] = std::chrono::duration<double>(ended.time_since_epoch()).count();
  }

  static void take_last_tokens(const Step& step) {
    for (int token = 0; token < step.tokens; ++token) {
      // A row for which nothing was left to sample goes on with any token, until its host knows.
      if (step.owners[token] >= 0) step.ids[token] = std::max(step.last_tokens[step.owners[token]], 0);
    }
  }

  static void keep_last_tokens(const Step& step) {
    for (int i = 0; i < step.samples; ++i) step.last_tokens[step.sample_rows[i]] = step.sampled[i];
  }

  void reserve(size_t count) {
    if (count <= reserved_) return;
    works_.reset(new Work[count]);
    reserved_ = count;
  }

  Work* prepare(Work* work, const std::vector<Op>& ops, int tokens, int threads) const {
    for (const Op& op : ops) (work++)->reset(pieces(op, tokens, threads));
    return work;
  }

  int pieces(const Op& op, int tokens, int threads) const {
    switch (op.kind) {
      case LINEAR:
        return std::min(num_pairs(op.n), PIECES * threads);
      case ATTENTION:
        return static_cast<int>(items_.size());
      case GATE:
        return token_pieces(tokens) * gate_pieces(op);
      default:
        return token_pieces(tokens);
    }
  }

  static int token_pieces(int tokens) { return tokens <= SINGLE_TOKENS ? tokens : Tiles(tokens).count; }

  // Calls body(token) for the tokens of piece `piece` of all.
  template <typename Body>
  static void each_token(int tokens, int piece, const Body& body) {
    const int pieces = token_pieces(tokens);
    for (int token = tokens * piece / pieces; token < tokens * (piece + 1) / pieces; ++token) body(token);
  }

  template <typename Body>
  static void by_tokens(int tokens, Work& work, const Body& body) {
    work.share([&](int piece) { each_token(tokens, piece, body); });
  }

  // Pieces of a linear map are cut between pairs of panels, which the float kernels take together.
  static int num_pairs(int rows) { return (num_panels(rows) + 1) / 2; }

  static int gate_pieces(const Op& op) { return (op.k + GATE_COLUMNS - 1) / GATE_COLUMNS; }

  // One thread's way through a call, `rows` of which get logits: it helps with every operation that is not complete.
  void take_part(const Step& step, bool forward, int rows, int thread) {
    Work* work = works_.get();
    Work* waited = work;  // all before it are complete
    const auto settle = [&] {
      for (; waited != work; ++waited) waited->wait();
    };
    const auto play = [&](const std::vector<Op>& ops, int tokens, const int32_t* sources) {
      for (const Op& op : ops) {
        if (op.flags & WAIT) settle();
        if (thread != 0 && op.kind == LINEAR && tokens <= POLITE_TOKENS) sched_yield();
        execute(op, step, tokens, sources, *work++, thread);
      }
      settle();
    };
    if (forward) {
      play(forward_, step.tokens, nullptr);
      by_tokens(step.tokens, *work++, [&](int token) {
        const float* state = model_.hidden_states + static_cast<size_t>(token) * model_.hidden;
        step.token_finite[token] = all_finite(state, model_.hidden);
      });
    }
    for (int first = 0; first < rows; first += model_.head_rows) {
      settle();
      const int count = std::min(model_.head_rows, rows - first);
      play(head_, count, step.sources + first);
      (work++)->share([&](int row) {
        finish_row(model_, step, first + row, model_.logits + static_cast<size_t>(row) * model_.vocab,
                   samplers_[thread]);
      });
    }
    settle();
  }

  // sources: for a norm of chosen tokens, which; null for all tokens in order.
  void execute(const Op& op, const Step& step, int tokens, const int32_t* sources, Work& work, int thread) {
    switch (op.kind) {
      case EMBED:
        return by_tokens(tokens, work, [&](int token) { embed(op, step, token); });
      case NORM:
        return by_tokens(tokens, work, [&](int token) {
          norm(op, model_.activations, tokens, token, sources ? sources[token] : token);
        });
      case LINEAR:
        return linear(op, tokens, step.threads, work);
      case ROPE:
        return by_tokens(tokens, work, [&](int token) { rope(op, model_, step, token); });
      case ATTENTION:
        return work.share([&](int i) { attend(op, model_, step, items_[i], attentions_[thread]); });
      case GATE: {
        const int parts = gate_pieces(op);
        return work.share([&](int i) {
          const int first = i % parts * GATE_COLUMNS, last = std::min(first + GATE_COLUMNS, op.k);
          each_token(tokens, i / parts, [&](int token) { gate(op, model_.activations, tokens, token, first, last); });
        });
      }
      case QUANTISE:
        return by_tokens(tokens, work, [&](int token) {
          quantise_row(op.in + static_cast<size_t>(token) * op.in_stride, op.k, model_.activations, tokens, token);
        });
    }
  }

  void linear(const Op& op, int tokens, int threads, Work& work) {
    const int panels = num_panels(op.n), parts = pieces(op, tokens, threads);
    const int64_t pairs = num_pairs(op.n);
    work.share([&](int i) {
      const int first = static_cast<int>(pairs * i / parts * 2);
      const int last = std::min(static_cast<int>(pairs * (i + 1) / parts * 2), panels);
      if (is_quantised(op.format)) {
        linear_quantised(op, model_.activations, tokens, first, last);
      } else {
        linear_float(op, tokens, first, last);
      }
    });
  }

  const Model model_;
  const std::vector<Op> forward_, head_;
  std::unique_ptr<Work[]> works_;
  size_t reserved_ = 0;
  std::vector<AttentionScratch> attentions_;
  std::vector<SamplerScratch> samplers_;
  std::vector<AttentionItem> items_;
  KVMemory kv_;
  Pool pool_;
  Launcher launcher_;  // ends first: what it runs needs all of the above
};

extern "C" {

Engine* sb_open(const Model* model, const Op* forward, int forward_count, const Op* head, int head_count) {
  return new Engine(*model, forward, forward_count, head, head_count);
}

void sb_close(Engine* engine) { delete engine; }

// part: FORWARD, or HEAD, which follows the forward part of the same step.
uint32_t sb_enqueue(Engine* engine, const Step* step, int part) { return engine->enqueue(*step, part); }

void sb_wait(Engine* engine, uint32_t number) { engine->wait(number); }

// For tests and benchmarks: one linear map over activations that are quantised already.
void sb_linear(Engine* engine, const Op* op, int tokens) { engine->linear_only(*op, tokens); }

void sb_quantise(const float* x, int tokens, int k, const Activations* out) {
  for (int token = 0; token < tokens; ++token) quantise_row(x + static_cast<size_t>(token) * k, k, *out, tokens, token);
}

}  // extern "C"

}  // namespace signalbox
