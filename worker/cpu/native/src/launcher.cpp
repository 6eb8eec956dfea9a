#include "launcher.h"

#include <utility>

namespace signalbox {

Launcher::Launcher() : thread_([this] { serve(); }) {}

Launcher::~Launcher() {
  enqueued_.add(1);  // without a call
  enqueued_.wake();
  thread_.join();
}

uint32_t Launcher::enqueue(std::function<void()> call) {
  uint32_t number;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    calls_.push_back(std::move(call));
    number = enqueued_.add(1);
  }
  enqueued_.wake();
  return number;
}

void Launcher::wait(uint32_t number) {
  done_.wait([number](uint32_t done) { return static_cast<int32_t>(done - number) >= 0; });
}

void Launcher::serve() {
  for (uint32_t number = 0;; ++number) {
    enqueued_.wait([number](uint32_t enqueued) { return enqueued != number; });
    std::function<void()> call;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (calls_.empty()) return;  // the destructor's
      call = std::move(calls_.front());
      calls_.pop_front();
    }
    call();
    done_.add(1);
    done_.wake();
  }
}

}  // namespace signalbox
