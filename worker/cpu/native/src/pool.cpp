#include "pool.h"

#include <immintrin.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>

namespace signalbox {

namespace {

static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t), "a futex is a plain 32-bit word");

void futex(std::atomic<uint32_t>& word, int operation, uint32_t value) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, nullptr, nullptr, 0);
}

}  // namespace

void relax() { _mm_pause(); }

void Signal::wake() {
  if (sleepers_.load(std::memory_order_seq_cst) != 0) futex(value_, FUTEX_WAKE_PRIVATE, INT_MAX);
}

void Signal::sleep(uint32_t seen) { futex(value_, FUTEX_WAIT_PRIVATE, seen); }

Pool::Pool(int threads) : seats_(new Seat[threads]) {
  for (int thread = 1; thread < threads; ++thread) threads_.emplace_back([this, thread] { serve(thread); });
}

Pool::~Pool() {
  stopping_ = true;
  for (size_t thread = 1; thread <= threads_.size(); ++thread) call(static_cast<int>(thread));
  for (std::thread& thread : threads_) thread.join();
}

void Pool::run(int count, const std::function<void(int)>& job) {
  job_ = &job;
  helpers_ = static_cast<uint32_t>(count - 1);
  ended_.set(0);
  for (int thread = 1; thread < count; ++thread) call(thread);
  job(0);
  ended_.wait([this](uint32_t ended) { return ended == helpers_; });
}

void Pool::call(int thread) {
  seats_[thread].started.add(1);
  seats_[thread].started.wake();
}

void Pool::serve(int thread) {
  for (uint32_t jobs = 0;; ++jobs) {
    seats_[thread].started.wait([jobs](uint32_t started) { return started != jobs; });
    if (stopping_) return;
    const uint32_t helpers = helpers_;  // read before the last `add`: after it the next run may change it
    (*job_)(thread);
    if (ended_.add(1) == helpers) ended_.wake();
  }
}

}  // namespace signalbox
