// Populates KV memory ahead of its use. A page that is touched for the first time is made by the kernel, and on a virtual
// machine by its host too: some 2 to 6 ms for a large page, and a step in which all rows begin a block meets several.
#pragma once

#include <atomic>
#include <thread>

#include "pool.h"
#include "types.h"

namespace signalbox {

// A thread of the lowest priority keeps AHEAD bytes populated beyond the highest block used so far: the scheduler gives out
// low ids first, so a pool that is never filled never takes its memory.
class KVMemory {
 public:
  static constexpr size_t AHEAD = size_t{64} << 20;
  static constexpr size_t AT_ONCE = size_t{2} << 20;

  explicit KVMemory(const Model& model);
  ~KVMemory();
  KVMemory(const KVMemory&) = delete;
  KVMemory& operator=(const KVMemory&) = delete;

  // A step is about to write to blocks up to this one.
  void expect(int block);

 private:
  void serve();

  const uintptr_t begin_;
  const size_t block_bytes_, size_;
  std::atomic<bool> stopping_{false};
  alignas(64) Signal wanted_;  // units of AT_ONCE from the beginning that shall be populated
  std::thread thread_;
};

}  // namespace signalbox
