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

Pool::Pool(int threads) {
  for (int thread = 1; thread < threads; ++thread) threads_.emplace_back([this, thread] { serve(thread); });
}

Pool::~Pool() {
  stopping_ = true;
  started_.add(1);
  started_.wake();
  for (std::thread& thread : threads_) thread.join();
}

void Pool::run(const std::function<void(int)>& job) {
  const uint32_t others = static_cast<uint32_t>(threads_.size());
  job_ = &job;
  ended_.set(0);
  started_.add(1);
  started_.wake();
  job(0);
  ended_.wait([others](uint32_t ended) { return ended == others; });
}

void Pool::serve(int thread) {
  for (uint32_t jobs = 0;; ++jobs) {
    started_.wait([jobs](uint32_t started) { return started != jobs; });
    if (stopping_) return;
    (*job_)(thread);
    if (ended_.add(1) == threads_.size()) ended_.wake();
  }
}

}  // namespace signalbox
