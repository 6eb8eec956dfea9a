#include "kv_memory.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>

namespace signalbox {

namespace {

// Of Linux 5.14: older headers do not name it, and older kernels refuse it.
constexpr int POPULATE_WRITE = 23;

size_t block_bytes(const Model& model) {
  return static_cast<size_t>(model.block_numbers) * (model.kv_format == F32 ? 4 : 2);
}

}  // namespace

KVMemory::KVMemory(const Model& model)
    : begin_(reinterpret_cast<uintptr_t>(model.kv)),
      block_bytes_(block_bytes(model)),
      size_(model.num_blocks * block_bytes_) {
  if (!model.kv) return;
  expect(-1);
  thread_ = std::thread([this] { serve(); });
}

KVMemory::~KVMemory() {
  if (!thread_.joinable()) return;
  stopping_ = true;
  wanted_.add(1);
  wanted_.wake();
  thread_.join();
}

void KVMemory::expect(int block) {
  const size_t bytes = std::min((block + size_t{1}) * block_bytes_ + AHEAD, size_);
  const uint32_t wanted = static_cast<uint32_t>((bytes + AT_ONCE - 1) / AT_ONCE), before = wanted_.value();
  if (wanted <= before) return;
  wanted_.add(wanted - before);
  wanted_.wake();
}

void KVMemory::serve() {
  setpriority(PRIO_PROCESS, 0, 19);  // on Linux, of this thread
  const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  for (size_t at = 0; at < size_; at += AT_ONCE) {
    wanted_.wait([&](uint32_t wanted) { return wanted > at / AT_ONCE; });
    if (stopping_) return;
    const uintptr_t from = (begin_ + at) / page * page, to = begin_ + std::min(at + AT_ONCE, size_);
    // No such call, or no memory: a block is then populated when it is written.
    if (madvise(reinterpret_cast<void*>(from), to - from, POPULATE_WRITE) != 0) return;
  }
}

}  // namespace signalbox
