// Threads that run one job together: they spin briefly between operations and then sleep in the kernel.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace signalbox {

// A number that threads wait on until it changes.
class Signal {
 public:
  uint32_t value() const { return value_.load(std::memory_order_acquire); }
  void advance();
  void wait_beyond(uint32_t seen);

 private:
  alignas(64) std::atomic<uint32_t> value_{0};
  std::atomic<uint32_t> sleepers_{0};
};

class Pool {
 public:
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int size() const { return size_; }
  // Runs job(thread) on all threads; the caller is thread 0.
  void run(const std::function<void(int)>& job);
  // Inside a job: returns when all threads have come here.
  void barrier();

 private:
  void serve(int thread);

  const int size_;
  const std::function<void(int)>* job_ = nullptr;
  bool stopping_ = false;
  Signal started_;
  Signal passed_;
  alignas(64) std::atomic<int> arrived_{0};
  std::vector<std::thread> threads_;
};

}  // namespace signalbox
