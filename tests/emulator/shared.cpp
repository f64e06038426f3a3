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

}  // namespace

SharedMemory::SharedMemory()
    : states_(kRegionBytes / 2),
      write_times_(kRegionBytes / 2),
      read_times_(kRegionBytes / 2),
      writers_(kRegionBytes / 2),
      readers_(kRegionBytes / 2) {
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
}

void SharedMemory::forget_times() {
  std::fill(write_times_.begin(), write_times_.end(), 0);
  std::fill(read_times_.begin(), read_times_.end(), 0);
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
    if ((states & 0x0101010101010101u * kInFlight) == 0) return;
  }
  for (uint32_t i = range.begin; i < range.end; ++i) {
    if (states_[i] & kInFlight) {
      fault(text("%s of byte %u of shared memory, where an asynchronous copy is in flight", what,
                 2 * i));
    }
  }
}

void SharedMemory::check_written(HalfWords range, const char* what) {
  if (range.end - range.begin == 8) {
    uint64_t states;
    std::memcpy(&states, states_.data() + range.begin, 8);
    if (states == 0x0101010101010101u * kWritten) return;
  }
  for (uint32_t i = range.begin; i < range.end; ++i) {
    if (states_[i] == kWritten) continue;
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
  if (writer == reader) return;
  const bool same_warp = warp_of(writer) == warp_of(m.thread);
  if (same_warp && write_times_[i] < m.warp_barrier) return;
  fault(text("race: %s of byte %u of shared memory, which thread %d wrote with no %s between", what,
             2 * i, writer, same_warp ? "sync_warp" : "sync_block"));
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
    known_reader &= readers_[begin + i] == reader || readers_[begin + i] == kManyWarps;
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
      } else {
        readers_[i] = own_warp ? lanes : kManyWarps;
      }
    }
  }
  std::fill_n(read_times_.begin() + range.begin, count, m.now);
}

void SharedMemory::check_write_race(HalfWords range, const char* what, const Moment& m,
                                    const char* from) const {
  if (!check_races_) return;
  for (uint32_t i = range.begin; i < range.end; ++i) {
    const bool same_value =
        from != nullptr && std::memcmp(from + 2 * (i - range.begin), data_ + 2 * i, 2) == 0;
    if (write_times_[i] >= m.block_barrier && writers_[i] != m.thread && !same_value) {
      const bool same_warp = warp_of(writers_[i]) == warp_of(m.thread);
      if (!same_warp || write_times_[i] >= m.warp_barrier) {
        fault(text("race: %s of byte %u of shared memory, which thread %d wrote with no %s between",
                   what, 2 * i, writers_[i], same_warp ? "sync_warp" : "sync_block"));
      }
    }
    if (read_times_[i] < m.block_barrier || readers_[i] == m.thread) continue;
    const int reader = readers_[i];
    const bool same_warp = reader < kLanesOfWarp ? warp_of(reader) == warp_of(m.thread)
                                                 : reader == kLanesOfWarp + warp_of(m.thread);
    if (same_warp && read_times_[i] < m.warp_barrier) continue;
    fault(text("race: %s of byte %u of shared memory, which %s %d read with no %s between", what,
               2 * i, reader < kLanesOfWarp ? "thread" : (reader == kManyWarps ? "many:" : "warp"),
               reader < kLanesOfWarp ? reader : reader % kLanesOfWarp,
               same_warp ? "sync_warp" : "sync_block"));
  }
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
  check_written(range, what);
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
