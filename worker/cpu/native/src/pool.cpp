#include "pool.h"

#include <immintrin.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>

namespace signalbox {

namespace {

// About 50 microseconds: longer than an operation's imbalance, shorter than anybody would notice on an idle engine.
constexpr int SPINS = 2000;

static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t), "a futex is a plain 32-bit word");

void futex(std::atomic<uint32_t>& word, int operation, uint32_t value) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, nullptr, nullptr, 0);
}

}  // namespace

void Signal::advance() {
  value_.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) != 0) futex(value_, FUTEX_WAKE_PRIVATE, INT_MAX);
}

void Signal::wait_beyond(uint32_t seen) {
  for (int spin = 0; spin < SPINS; ++spin) {
    if (value() != seen) return;
    _mm_pause();
  }
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  // The kernel compares again, so an advance between our look and our sleep is not missed.
  while (value_.load(std::memory_order_seq_cst) == seen) futex(value_, FUTEX_WAIT_PRIVATE, seen);
  sleepers_.fetch_sub(1, std::memory_order_seq_cst);
}

Pool::Pool(int threads) : size_(threads) {
  for (int thread = 1; thread < size_; ++thread) threads_.emplace_back([this, thread] { serve(thread); });
}

Pool::~Pool() {
  stopping_ = true;
  started_.advance();
  for (std::thread& thread : threads_) thread.join();
}

void Pool::run(const std::function<void(int)>& job) {
  job_ = &job;
  if (size_ > 1) started_.advance();
  job(0);
  barrier();
}

void Pool::barrier() {
  if (size_ == 1) return;
  const uint32_t seen = passed_.value();
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
    arrived_.store(0, std::memory_order_relaxed);
    passed_.advance();
  } else {
    passed_.wait_beyond(seen);
  }
}

void Pool::serve(int thread) {
  for (uint32_t jobs = 0;; ++jobs) {
    started_.wait_beyond(jobs);
    if (stopping_) return;
    (*job_)(thread);
    barrier();
  }
}

}  // namespace signalbox
