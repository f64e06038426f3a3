// Races: two accesses by different threads, at least one of them a write, that nothing orders. Also
// the order of generic and asynchronous accesses.
#include <algorithm>
#include <cstring>

#include "emulator/block.h"
#include "emulator/shared.h"

namespace tilewise::cuda::emulator {
namespace {

constexpr int warp_of(int thread) { return thread / kLanes; }

bool same_warp(int thread, int actor) {
  return actor < Clocks::kFirstCopier && warp_of(actor) == warp_of(thread);
}

std::string actor_name(int actor) {
  return actor < Clocks::kFirstCopier ? text("thread %d", actor) : "an asynchronous copy";
}

// The instruction that would have ordered the accesses of `thread` and `actor`.
const char* ordering_instruction(int thread, int actor) {
  if (actor >= Clocks::kFirstCopier) return "wait for its mbarrier";
  return same_warp(thread, actor) ? "sync_warp" : "sync_block";
}

}  // namespace

bool ordered(const Moment& m, int actor, uint32_t time) {
  // A barrier between threads does not order copies that no thread has waited for.
  if (actor >= Clocks::kFirstCopier) {
    return time < m.clocks->start_time() || m.clocks->knows(m.thread, actor, time);
  }
  if (actor == m.thread || time < m.block_barrier) return true;
  if (same_warp(m.thread, actor) && time < m.warp_barrier) return true;
  return m.clocks->knows(m.thread, actor, time);
}

void SharedMemory::check_read_race(uint32_t i, const char* what, const Moment& m,
                                   uint16_t reader) const {
  const int writer = writers_[i];
  const uint32_t time = write_times_[i];
  if (writer == reader) return;
  // The writing lane may be the one that reads for the whole warp.
  const bool by_this_thread = writer == m.thread && time >= m.warp_barrier;
  if (by_this_thread ? m.clocks->knows(m.thread, writer, time) : ordered(m, writer, time)) return;
  fault(text("race: %s of byte %u of shared memory, which %s wrote with no %s between", what, 2 * i,
             actor_name(writer).c_str(), ordering_instruction(m.thread, writer)));
}

// The bytes of a copy are visible to threads that know that the phase of its mbarrier ended.
void SharedMemory::check_copied(uint32_t i, const char* what, const Moment& m) const {
  if (ordered(m, writers_[i], write_times_[i])) return;
  fault(
      text("race: %s of byte %u of shared memory, which an asynchronous copy wrote whose mbarrier "
           "the thread has not waited for",
           what, 2 * i));
}

// The most frequent reads: of bytes written before the last barrier and read since then by no
// thread, by the same reader, or by several warps.
template <int kCount>
bool SharedMemory::note_usual_read(uint32_t begin, const Moment& m, uint16_t reader) {
  uint32_t last_write = 0;
  uint32_t first_read = m.now;
  uint32_t last_read = 0;
  bool known_reader = true;
  for (int i = 0; i < kCount; ++i) last_write = std::max(last_write, write_times_[begin + i]);
  for (int i = 0; i < kCount; ++i) first_read = std::min(first_read, read_times_[begin + i]);
  for (int i = 0; i < kCount; ++i) last_read = std::max(last_read, read_times_[begin + i]);
  for (int i = 0; i < kCount; ++i) {
    known_reader &=
        readers_[begin + i] == reader || (readers_[begin + i] == kMany && !m.clocks->active());
  }
  if (last_write >= m.block_barrier) return false;
  if (last_read < m.block_barrier) {
    for (int i = 0; i < kCount; ++i) readers_[begin + i] = reader;
  } else if (first_read < m.block_barrier || !known_reader) {
    return false;
  }
  for (int i = 0; i < kCount; ++i) read_times_[begin + i] = m.now;
  return true;
}

void SharedMemory::note_read(HalfWords range, const char* what, const Moment& m, uint16_t reader) {
  if (!check_races_) return;
  const uint32_t count = range.end - range.begin;
  if (count == 8 && note_usual_read<8>(range.begin, m, reader)) return;
  if (count == 2 && note_usual_read<2>(range.begin, m, reader)) return;
  uint32_t last_write = 0;
  uint32_t last_read = 0;
  for (uint32_t i = range.begin; i < range.end; ++i) {
    last_write = std::max(last_write, write_times_[i]);
    last_read = std::max(last_read, read_times_[i]);
  }
  if (last_write >= m.block_barrier) {
    for (uint32_t i = range.begin; i < range.end; ++i) {
      if (write_times_[i] >= m.block_barrier) check_read_race(i, what, m, reader);
    }
  }
  if (last_read < m.block_barrier) {
    std::fill_n(readers_.begin() + range.begin, count, reader);
  } else {
    const auto lanes = static_cast<uint16_t>(kLanesOfWarp + warp_of(m.thread));
    for (uint32_t i = range.begin; i < range.end; ++i) {
      const uint16_t previous = readers_[i];
      const bool in_this_warp =
          previous == lanes || (previous < kLanesOfWarp && warp_of(previous) == warp_of(m.thread));
      const uint32_t last_barrier = in_this_warp ? m.warp_barrier : m.block_barrier;
      if (previous == reader || read_times_[i] < last_barrier) {
        readers_[i] = reader;
      } else if (m.clocks->active()) {
        note_many(i, m, reader);
      } else {
        readers_[i] = in_this_warp ? lanes : kMany;
      }
    }
  }
  std::fill_n(read_times_.begin() + range.begin, count, m.now);
}

void SharedMemory::check_write_race(HalfWords range, const char* what, const Moment& m,
                                    const char* from) const {
  check_unused(range, what, m);
  if (!check_races_) return;
  for (uint32_t i = range.begin; i < range.end; ++i) {
    const bool same_value =
        from != nullptr && std::memcmp(from + 2 * (i - range.begin), data_ + 2 * i, 2) == 0;
    if (!same_value && !ordered(m, writers_[i], write_times_[i])) {
      fault(text("race: %s of byte %u of shared memory, which %s wrote with no %s between", what,
                 2 * i, actor_name(writers_[i]).c_str(),
                 ordering_instruction(m.thread, writers_[i])));
    }
    check_read_before_write(i, what, m);
  }
}

void SharedMemory::check_read_before_write(uint32_t i, const char* what, const Moment& m) const {
  const int reader = readers_[i];
  const uint32_t time = read_times_[i];
  if (time < m.block_barrier || reader == m.thread) return;
  if (reader == kMany) {
    if (!m.clocks->active()) fail_many_readers(i, what);
    const uint32_t* times = many_reads_.data() + many_reads_of_[i];
    for (int thread = 0; thread < kMaxThreads; ++thread) {
      if (times[thread] < m.block_barrier || ordered(m, thread, times[thread])) continue;
      fault(text("race: %s of byte %u of shared memory, which thread %d read with no %s between",
                 what, 2 * i, thread, ordering_instruction(m.thread, thread)));
    }
    return;
  }
  const bool is_thread = reader < kLanesOfWarp;
  const int warp = is_thread ? warp_of(reader) : reader - kLanesOfWarp;
  const bool in_this_warp = warp == warp_of(m.thread);
  if (in_this_warp && time < m.warp_barrier) return;
  if (is_thread ? ordered(m, reader, time) : m.clocks->knows_any_lane(m.thread, warp, time)) return;
  fault(text("race: %s of byte %u of shared memory, which %s %d read with no %s between", what,
             2 * i, is_thread ? "thread" : "warp", is_thread ? reader : warp,
             in_this_warp ? "sync_warp" : "sync_block"));
}

void SharedMemory::fail_many_readers(uint32_t i, const char* what) const {
  fault(
      text("race: %s of byte %u of shared memory, which several warps read with no sync_block "
           "between",
           what, 2 * i));
}

uint32_t* SharedMemory::times_of_readers(uint32_t i) {
  if (many_reads_of_.empty()) {
    many_reads_of_.resize(kRegionBytes / 2);
    many_reads_.resize(kMaxThreads);  // row 0 stands for none
  }
  if (many_reads_of_[i] == 0) {
    many_reads_of_[i] = static_cast<uint32_t>(many_reads_.size());
    many_reads_.resize(many_reads_.size() + kMaxThreads);
  }
  return many_reads_.data() + many_reads_of_[i];
}

// Notes that half-word `i` has several readers, the last of which is `reader`.
void SharedMemory::note_many(uint32_t i, const Moment& m, uint16_t reader) {
  uint32_t* times = times_of_readers(i);
  const auto note = [times](int from, uint32_t time) {
    if (from < kLanesOfWarp) {
      times[from] = time;
    } else {
      std::fill_n(times + (from - kLanesOfWarp) * kLanes, kLanes, time);
    }
  };
  if (readers_[i] != kMany) note(readers_[i], read_times_[i]);
  note(reader, m.now);
  readers_[i] = kMany;
}

void SharedMemory::note_write(HalfWords range, const Moment& m) {
  const uint32_t count = range.end - range.begin;
  std::fill_n(states_.begin() + range.begin, count, uint8_t{kWritten});
  if (!check_races_) return;
  std::fill_n(write_times_.begin() + range.begin, count, m.now);
  std::fill_n(writers_.begin() + range.begin, count, static_cast<uint16_t>(m.thread));
}

// --- the asynchronous proxy ---------------------------------------------------------------------

// Checks that no unfinished or unordered asynchronous read uses bytes that are now written.
void SharedMemory::check_unused(HalfWords range, const char* what, const Moment& m) const {
  for (uint32_t chunk = range.begin / kChunk; chunk * kChunk < range.end; ++chunk) {
    if (uses_[chunk] != 0) {
      fault(text("%s of byte %u of shared memory, which an unfinished wgmma or bulk copy reads",
                 what, chunk * kChunkBytes));
    }
    if (!check_races_) continue;
    check_read_by_tensor_core(chunk, what, m);
    if (last_async_reads_[chunk] < m.block_barrier) continue;
    const uint32_t* times = async_read_times_.data() + static_cast<size_t>(chunk) * kMaxWarps;
    for (int warp = 0; warp < kMaxWarps; ++warp) {
      if (times[warp] < m.block_barrier || warp == warp_of(m.thread) ||
          m.clocks->knows_any_lane(m.thread, warp, times[warp])) {
        continue;
      }
      fault(
          text("race: %s of byte %u of shared memory, which a wgmma of warp %d read with no "
               "barrier after its wgmma_wait_group",
               what, chunk * kChunkBytes, warp));
    }
  }
}

void SharedMemory::check_read_by_tensor_core(uint32_t chunk, const char* what,
                                             const Moment& m) const {
  if (tensor_core_read_times_.empty()) return;
  const uint32_t time = tensor_core_read_times_[chunk];
  if (time < m.clocks->start_time() || m.clocks->knows(m.thread, tensor_core_, time)) return;
  fault(
      text("race: %s of byte %u of shared memory, which a tcgen05.mma reads whose tcgen05.commit "
           "the thread has not waited for",
           what, chunk * kChunkBytes));
}

void SharedMemory::check_fenced(uint32_t i, const char* what, const Moment& m) const {
  const int writer = writers_[i];
  const uint32_t time = write_times_[i];
  if (time < m.clocks->start_time()) return;  // written, if at all, through a plain pointer
  if (!ordered(m, writer, time)) {
    fault(text("race: %s of byte %u of shared memory, which %s wrote with no %s between", what,
               2 * i, actor_name(writer).c_str(), ordering_instruction(m.thread, writer)));
  }
  if (writer >= Clocks::kFirstCopier) return;
  const uint32_t fence = m.clocks->fence_after(writer, time);
  if (fence != 0 && ordered(m, writer, fence)) return;
  fault(
      text("%s of byte %u of shared memory, which thread %d wrote with no fence_proxy_async "
           "before the barrier between",
           what, 2 * i, writer));
}

// Checks that a fence and a barrier order the generic writes of these bytes before an asynchronous
// access. Neighbouring half-words mostly come from the same write.
void SharedMemory::check_fenced(HalfWords range, const char* what, const Moment& m) const {
  if (!check_races_) return;
  for (uint32_t i = range.begin; i < range.end; ++i) {
    if (i > range.begin && writers_[i] == writers_[i - 1] &&
        write_times_[i] == write_times_[i - 1]) {
      continue;
    }
    check_fenced(i, what, m);
  }
}

}  // namespace tilewise::cuda::emulator
