// Threads that run one job together: they wait a little while by spinning and then sleep in the kernel.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

namespace signalbox {

// A word that threads wait on.
class Signal {
 public:
  uint32_t value() const { return value_.load(std::memory_order_acquire); }
  void set(uint32_t value) { value_.store(value, std::memory_order_relaxed); }
  // Adds without waking anybody, or with it; the new value.
  uint32_t add(uint32_t amount) { return value_.fetch_add(amount, std::memory_order_seq_cst) + amount; }
  void wake();
  // Returns once done(value) holds; whoever makes it hold must wake.
  template <typename Done>
  void wait(const Done& done);

 private:
  void sleep(uint32_t seen);

  std::atomic<uint32_t> value_{0};
  std::atomic<uint32_t> sleepers_{0};
};

// The pieces of one operation. Threads take them as they come, and the operation is complete when all pieces are: a
// thread that the kernel has taken off its core holds up the others only while it has a piece.
class Work {
 public:
  void reset(int count) {
    count_ = count;
    next_.store(0, std::memory_order_relaxed);
    done_.set(0);
  }
  // Calls body(piece) for each piece that this thread gets.
  template <typename Body>
  void share(const Body& body) {
    uint32_t finished = 0;
    for (int piece; (piece = next_.fetch_add(1, std::memory_order_relaxed)) < count_; ++finished) body(piece);
    if (finished && done_.add(finished) == static_cast<uint32_t>(count_)) done_.wake();
  }
  void wait() {
    done_.wait([this](uint32_t done) { return done == static_cast<uint32_t>(count_); });
  }

 private:
  alignas(64) std::atomic<int> next_{0};
  alignas(64) Signal done_;
  int count_ = 0;
};

class Pool {
 public:
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // Runs job(thread) on the first `count` threads, one at least, and returns when all of these have; the caller is
  // thread 0. The others sleep on.
  void run(int count, const std::function<void(int)>& job);

 private:
  struct alignas(64) Seat {
    Signal started;  // how many jobs its thread was called to
  };

  void serve(int thread);
  void call(int thread);

  const std::function<void(int)>* job_ = nullptr;
  uint32_t helpers_ = 0;  // that take part in the job
  bool stopping_ = false;
  alignas(64) Signal ended_;
  std::unique_ptr<Seat[]> seats_;
  std::vector<std::thread> threads_;
};

// About 20 microseconds: longer than most operations' imbalance, short enough to leave a busy machine its cores.
constexpr int SPINS = 1000;

void relax();

template <typename Done>
void Signal::wait(const Done& done) {
  for (int spin = 0; spin < SPINS; ++spin) {
    if (done(value())) return;
    relax();
  }
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  // The kernel compares the value again, so that a change between our look and our sleep is not missed.
  for (uint32_t seen; !done(seen = value_.load(std::memory_order_seq_cst));) sleep(seen);
  sleepers_.fetch_sub(1, std::memory_order_seq_cst);
}

}  // namespace signalbox
