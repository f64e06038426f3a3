#include "emulator/shared.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>

#include "emulator/block.h"

namespace tilewise::cuda::emulator {
namespace {

constexpr int kAlignment = 1024;

constexpr int rounded(int bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

uint16_t half_word(const char* p) {
  uint16_t x;
  std::memcpy(&x, p, 2);
  return x;
}

constexpr int warp_of(int thread) { return thread / kLanes; }

bool same_warp(int thread, int actor) {
  return actor < Clocks::kFirstCopier && warp_of(actor) == warp_of(thread);
}

std::string actor_name(int actor) {
  return actor < Clocks::kFirstCopier ? text("thread %d", actor) : "an asynchronous copy";
}

// What would have ordered the two.
const char* missing(int thread, int actor) {
  if (actor >= Clocks::kFirstCopier) return "wait for its mbarrier";
  return same_warp(thread, actor) ? "sync_warp" : "sync_block";
}

}  // namespace

bool ordered(const Moment& m, int actor, uint32_t time) {
  // A barrier of threads says nothing about copies that none of them has waited for.
  if (actor >= Clocks::kFirstCopier) {
    return time < m.clocks->start_time() || m.clocks->knows(m.thread, actor, time);
  }
  if (actor == m.thread || time < m.block_barrier) return true;
  if (same_warp(m.thread, actor) && time < m.warp_barrier) return true;
  return m.clocks->knows(m.thread, actor, time);
}

SharedMemory::SharedMemory()
    : states_(kRegionBytes / 2),
      write_times_(kRegionBytes / 2),
      read_times_(kRegionBytes / 2),
      writers_(kRegionBytes / 2),
      readers_(kRegionBytes / 2),
      uses_(kRegionBytes / kChunkBytes),
      last_async_reads_(kRegionBytes / kChunkBytes) {
  void* region = mmap(nullptr, kRegionBytes + kGuardBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (region == MAP_FAILED) throw std::bad_alloc();
  region_ = static_cast<char*>(region);
  mprotect(region_ + kRegionBytes, kGuardBytes, PROT_NONE);
  data_ = region_ + kRegionBytes;
}

SharedMemory::~SharedMemory() { munmap(region_, kRegionBytes + kGuardBytes); }

void SharedMemory::start(int bytes, bool check_races) {
  bytes_ = bytes;
  check_races_ = check_races;
  data_ = region_ + kRegionBytes - rounded(bytes);
  std::fill_n(reinterpret_cast<uint16_t*>(data_), rounded(bytes) / 2, kPoison);
  std::fill_n(states_.begin(), rounded(bytes) / 2, uint8_t{kUnknown});
  std::fill_n(uses_.begin(), rounded(bytes) / kChunkBytes, uint16_t{0});
}

void SharedMemory::forget_times() {
  std::fill(write_times_.begin(), write_times_.end(), 0);
  std::fill(read_times_.begin(), read_times_.end(), 0);
  std::fill(many_reads_.begin(), many_reads_.end(), 0);
  std::fill(last_async_reads_.begin(), last_async_reads_.end(), 0);
  std::fill(async_read_times_.begin(), async_read_times_.end(), 0);
}

int SharedMemory::first_overrun() const {
  for (int i = (bytes_ + 1) / 2 * 2; i < rounded(bytes_); i += 2) {
    if (half_word(data_ + i) != kPoison) return i;
  }
  return -1;
}

uint32_t SharedMemory::address_of(const void* p) const {
  const auto offset = static_cast<const char*>(p) - data_;
  if (offset < 0 || offset > bytes_) {
    fault(text("shared_address of byte %lld, the launch gave %d bytes",
               static_cast<long long>(offset), bytes_));
  }
  return static_cast<uint32_t>(offset) + kFirstAddress;
}

SharedMemory::HalfWords SharedMemory::checked(uint32_t address, int bytes, const char* what) const {
  const int64_t offset = static_cast<int64_t>(address) - kFirstAddress;
  if (offset < 0 || offset + bytes > bytes_) {
    fault(text("%s of %d bytes at byte %lld of shared memory, the launch gave %d bytes", what,
               bytes, static_cast<long long>(offset), bytes_));
  }
  if (offset % bytes != 0) {
    fault(text("%s of %d bytes at byte %lld of shared memory: not aligned to its size", what, bytes,
               static_cast<long long>(offset)));
  }
  return {static_cast<uint32_t>(offset) / 2, static_cast<uint32_t>(offset + bytes) / 2};
}

void SharedMemory::check_landed(HalfWords range, const char* what) const {
  if (range.end - range.begin == 8) {
    uint64_t states;
    std::memcpy(&states, states_.data() + range.begin, 8);
    if ((states & 0x0101010101010101u * (kInFlight | kBarrier)) == 0) return;
  }
  for (uint32_t i = range.begin; i < range.end; ++i) {
    if (states_[i] & kInFlight) {
      fault(text("%s of byte %u of shared memory, where an asynchronous copy is in flight", what,
                 2 * i));
    }
    if (states_[i] & kBarrier) {
      fault(text("%s of byte %u of shared memory, where an mbarrier is", what, 2 * i));
    }
  }
}

void SharedMemory::check_written(HalfWords range, const char* what, const Moment& m) {
  if (range.end - range.begin == 8) {
    uint64_t states;
    std::memcpy(&states, states_.data() + range.begin, 8);
    if (states == 0x0101010101010101u * kWritten) return;
  }
  for (uint32_t i = range.begin; i < range.end; ++i) {
    if (states_[i] == kWritten) continue;
    if (states_[i] == (kWritten | kCopied)) {
      if (check_races_) check_copied(i, what, m);
      continue;
    }
    check_landed({i, i + 1}, what);
    if (half_word(data_ + 2 * i) == kPoison) {
      fault(text("%s of byte %u of shared memory, which was not written", what, 2 * i));
    }
    states_[i] = kWritten;  // through a plain pointer that nobody announced
  }
}

// --- races ---------------------------------------------------------------------------------------
// Two accesses by different threads, one of them a write, without a barrier between: of the block,
// or of the warp when both are in it.

void SharedMemory::check_read_race(uint32_t i, const char* what, const Moment& m,
                                   uint16_t reader) const {
  const int writer = writers_[i];
  const uint32_t time = write_times_[i];
  if (writer == reader) return;
  // The lane that wrote may be the one that reads for the whole warp.
  const bool own = writer == m.thread && time >= m.warp_barrier;
  if (own ? m.clocks->knows(m.thread, writer, time) : ordered(m, writer, time)) return;
  fault(text("race: %s of byte %u of shared memory, which %s wrote with no %s between", what, 2 * i,
             actor_name(writer).c_str(), missing(m.thread, writer)));
}

// The bytes of a copy are there for those who know that its mbarrier ended the phase.
void SharedMemory::check_copied(uint32_t i, const char* what, const Moment& m) const {
  if (ordered(m, writers_[i], write_times_[i])) return;
  fault(
      text("race: %s of byte %u of shared memory, which an asynchronous copy wrote whose mbarrier "
           "the thread has not waited for",
           what, 2 * i));
}

// Nearly every read: written before the last barrier; since then read by nobody, or by the same
// one, or by many warps.
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
      const uint16_t before = readers_[i];
      const bool own_warp =
          before == lanes || (before < kLanesOfWarp && warp_of(before) == warp_of(m.thread));
      const uint32_t since = own_warp ? m.warp_barrier : m.block_barrier;
      if (before == reader || read_times_[i] < since) {
        readers_[i] = reader;
      } else if (m.clocks->active()) {
        note_many(i, m, reader);
      } else {
        readers_[i] = own_warp ? lanes : kMany;
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
                 2 * i, actor_name(writers_[i]).c_str(), missing(m.thread, writers_[i])));
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
                 what, 2 * i, thread, missing(m.thread, thread)));
    }
    return;
  }
  const bool one = reader < kLanesOfWarp;
  const int warp = one ? warp_of(reader) : reader - kLanesOfWarp;
  const bool own_warp = warp == warp_of(m.thread);
  if (own_warp && time < m.warp_barrier) return;
  if (one ? ordered(m, reader, time) : m.clocks->knows_any_lane(m.thread, warp, time)) return;
  fault(text("race: %s of byte %u of shared memory, which %s %d read with no %s between", what,
             2 * i, one ? "thread" : "warp", one ? reader : warp,
             own_warp ? "sync_warp" : "sync_block"));
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
    many_reads_.resize(kMaxThreads);  // row 0 is none
  }
  if (many_reads_of_[i] == 0) {
    many_reads_of_[i] = static_cast<uint32_t>(many_reads_.size());
    many_reads_.resize(many_reads_.size() + kMaxThreads);
  }
  return many_reads_.data() + many_reads_of_[i];
}

// Half-word `i` has more than one reader, the last of them `reader`.
void SharedMemory::note_many(uint32_t i, const Moment& m, uint16_t reader) {
  uint32_t* times = times_of_readers(i);
  const auto note = [times](int who, uint32_t time) {
    if (who < kLanesOfWarp) {
      times[who] = time;
    } else {
      std::fill_n(times + (who - kLanesOfWarp) * kLanes, kLanes, time);
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

// --- accesses ------------------------------------------------------------------------------------

const char* SharedMemory::read(uint32_t address, int bytes, const char* what, const Moment& m,
                               uint16_t reader) {
  const HalfWords range = checked(address, bytes, what);
  check_written(range, what, m);
  note_read(range, what, m, reader);
  return data_ + 2 * range.begin;
}

const char* SharedMemory::read(uint32_t address, int bytes, const char* what, const Moment& m) {
  return read(address, bytes, what, m, static_cast<uint16_t>(m.thread));
}

const char* SharedMemory::read_by_warp(uint32_t address, int bytes, const char* what,
                                       const Moment& m) {
  return read(address, bytes, what, m, static_cast<uint16_t>(kLanesOfWarp + warp_of(m.thread)));
}

void SharedMemory::write(uint32_t address, const void* from, int bytes, const char* what,
                         const Moment& m) {
  const HalfWords range = checked(address, bytes, what);
  check_landed(range, what);
  check_write_race(range, what, m, static_cast<const char*>(from));
  note_write(range, m);
  std::memcpy(data_ + 2 * range.begin, from, static_cast<size_t>(bytes));
}

void SharedMemory::start_copy(uint32_t address, int bytes, const Moment& m) {
  const HalfWords range = checked(address, bytes, "cp.async");
  check_landed(range, "cp.async");
  check_write_race(range, "cp.async", m, nullptr);
  for (uint32_t i = range.begin; i < range.end; ++i) states_[i] |= kInFlight;
}

char* SharedMemory::finish_copy(uint32_t address, int bytes, const Moment& m) {
  note_write(checked(address, bytes, "cp.async"), m);
  return at(address);
}

// --- asynchronous accesses -----------------------------------------------------------------------

SharedMemory::HalfWords SharedMemory::checked_chunks(uint32_t address, int bytes,
                                                     const char* what) const {
  const int64_t offset = static_cast<int64_t>(address) - kFirstAddress;
  if (offset < 0 || offset + bytes > bytes_) {
    fault(text("%s of %d bytes at byte %lld of shared memory, the launch gave %d bytes", what,
               bytes, static_cast<long long>(offset), bytes_));
  }
  if (offset % kChunkBytes != 0 || bytes % kChunkBytes != 0) {
    fault(text("%s of %d bytes at byte %lld of shared memory: not in units of 16 bytes", what,
               bytes, static_cast<long long>(offset)));
  }
  return {static_cast<uint32_t>(offset) / 2, static_cast<uint32_t>(offset + bytes) / 2};
}

// Nobody reads asynchronously what is written now.
void SharedMemory::check_unused(HalfWords range, const char* what, const Moment& m) const {
  for (uint32_t chunk = range.begin / kChunk; chunk * kChunk < range.end; ++chunk) {
    if (uses_[chunk] != 0) {
      fault(
          text("%s of byte %u of shared memory, which a wgmma or a bulk copy reads that nobody "
               "has waited for",
               what, chunk * kChunkBytes));
    }
    if (!check_races_ || last_async_reads_[chunk] < m.block_barrier) continue;
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

void SharedMemory::check_fenced(uint32_t i, const char* what, const Moment& m) const {
  const int writer = writers_[i];
  const uint32_t time = write_times_[i];
  if (time < m.clocks->start_time()) return;  // nobody in this block, but through a pointer
  if (!ordered(m, writer, time)) {
    fault(text("race: %s of byte %u of shared memory, which %s wrote with no %s between", what,
               2 * i, actor_name(writer).c_str(), missing(m.thread, writer)));
  }
  if (writer >= Clocks::kFirstCopier) return;
  const uint32_t fence = m.clocks->fence_after(writer, time);
  if (fence != 0 && ordered(m, writer, fence)) return;
  fault(
      text("%s of byte %u of shared memory, which thread %d wrote with no fence_proxy_async "
           "before the barrier between",
           what, 2 * i, writer));
}

// Asynchronous accesses after generic writes. Most chunks were written as the one before.
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

void SharedMemory::start_async_write(uint32_t address, int bytes, const char* what,
                                     const Moment& m) {
  const HalfWords range = checked_chunks(address, bytes, what);
  for (uint32_t i = range.begin; i < range.end; i += kChunk) check_landed({i, i + kChunk}, what);
  check_unused(range, what, m);
  check_fenced(range, what, m);
  if (check_races_) {
    for (uint32_t i = range.begin; i < range.end; ++i) check_read_before_write(i, what, m);
  }
  std::fill(states_.begin() + range.begin, states_.begin() + range.end, uint8_t{kInFlight});
  std::fill_n(reinterpret_cast<uint16_t*>(at(address)), bytes / 2, kPoison);
}

void SharedMemory::finish_async_write(uint32_t address, int bytes, int copier, uint32_t time) {
  const HalfWords range = checked_chunks(address, bytes, "a bulk copy");
  const uint32_t count = range.end - range.begin;
  std::fill_n(states_.begin() + range.begin, count, uint8_t{kWritten | kCopied});
  std::fill_n(write_times_.begin() + range.begin, count, time);
  std::fill_n(writers_.begin() + range.begin, count, static_cast<uint16_t>(copier));
}

void SharedMemory::start_async_read(uint32_t address, int bytes, const char* what,
                                    const Moment& m) {
  const HalfWords range = checked_chunks(address, bytes, what);
  check_fenced(range, what, m);
  for (uint32_t i = range.begin; i < range.end; i += kChunk) {
    uint64_t states;
    std::memcpy(&states, states_.data() + i, 8);
    const bool copied = states == 0x0101010101010101u * (kWritten | kCopied);
    if (!copied) check_written({i, i + kChunk}, what, m);
    ++uses_[i / kChunk];
  }
}

void SharedMemory::finish_async_read(uint32_t address, int bytes, const char* what,
                                     const Moment& m) {
  end_use(address, bytes);
  note_read(checked_chunks(address, bytes, what), what, m, static_cast<uint16_t>(m.thread));
}

void SharedMemory::end_use(uint32_t address, int bytes) {
  const uint32_t first = (address - kFirstAddress) / kChunkBytes;
  for (int i = 0; i < bytes / kChunkBytes; ++i) --uses_[first + static_cast<uint32_t>(i)];
}

void SharedMemory::finish_async_read_by_warp(uint32_t address, const Moment& m) {
  if (async_read_times_.empty()) async_read_times_.resize(kRegionBytes / kChunkBytes * kMaxWarps);
  const uint32_t chunk = (address - kFirstAddress) / kChunkBytes;
  --uses_[chunk];
  last_async_reads_[chunk] = m.now;
  async_read_times_[chunk * kMaxWarps + static_cast<uint32_t>(warp_of(m.thread))] = m.now;
}

void SharedMemory::claim_barrier(uint32_t address, const Moment& m) {
  const HalfWords range = checked(address, 8, "mbarrier_init");
  check_landed(range, "mbarrier_init");
  check_write_race(range, "mbarrier_init", m, nullptr);
  note_write(range, m);
  std::fill_n(states_.begin() + range.begin, 4, uint8_t{kBarrier});
}

// Bytes beside those accessed, in the first and the last half-word, count as accessed.
SharedMemory::HalfWords SharedMemory::plain(const void* p, int64_t bytes, const char* what) const {
  const auto offset = static_cast<const char*>(p) - data_;
  if (offset < 0 || offset + bytes > bytes_) {
    fault(text("%s of %lld bytes at byte %lld of shared memory, the launch gave %d bytes", what,
               static_cast<long long>(bytes), static_cast<long long>(offset), bytes_));
  }
  return {static_cast<uint32_t>(offset / 2), static_cast<uint32_t>((offset + bytes + 1) / 2)};
}

void SharedMemory::plain_read(const void* p, int64_t bytes, const Moment& m) {
  const char* what = "read through a pointer";
  const HalfWords range = plain(p, bytes, what);
  check_landed(range, what);
  if (check_races_) {
    for (uint32_t i = range.begin; i < range.end; ++i) {
      if ((states_[i] & kCopied) != 0) check_copied(i, what, m);
    }
  }
  if (bytes > 1) note_read(range, what, m, static_cast<uint16_t>(m.thread));
}

void SharedMemory::plain_write(const void* p, int64_t bytes, const Moment& m) {
  const char* what = "write through a pointer";
  const HalfWords range = plain(p, bytes, what);
  check_landed(range, what);
  if (bytes > 1) check_write_race(range, what, m, nullptr);
  note_write(range, m);
}

}  // namespace tilewise::cuda::emulator
