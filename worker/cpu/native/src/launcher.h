// A thread that makes calls in the order in which they were handed over, so that the host can prepare a step while
// another computes.
#pragma once

#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "pool.h"

namespace signalbox {

class Launcher {
 public:
  Launcher();
  // Makes all calls that were handed over, first.
  ~Launcher();
  Launcher(const Launcher&) = delete;
  Launcher& operator=(const Launcher&) = delete;

  // The call's number: calls count from 1, and go round after 2^32.
  uint32_t enqueue(std::function<void()> call);
  // Returns once this call and all before it are done. Any thread may wait.
  void wait(uint32_t number);

 private:
  void serve();

  std::mutex mutex_;  // of calls_
  std::deque<std::function<void()>> calls_;
  alignas(64) Signal enqueued_;
  alignas(64) Signal done_;
  std::thread thread_;
};

}  // namespace signalbox
