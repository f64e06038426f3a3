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

}  // namespace

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
  tensor_core_read_times_.clear();
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
    fault(text("shared_address of byte %lld; the launch requested %d bytes",
               static_cast<long long>(offset), bytes_));
  }
  return static_cast<uint32_t>(offset) + kFirstAddress;
}

SharedMemory::HalfWords SharedMemory::checked(uint32_t address, int bytes, const char* what) const {
  const int64_t offset = static_cast<int64_t>(address) - kFirstAddress;
  if (offset < 0 || offset + bytes > bytes_) {
    fault(text("%s of %d bytes at byte %lld of shared memory; the launch requested %d bytes", what,
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
    states_[i] = kWritten;  // written through a plain pointer in code without instrumentation
  }
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
  return read(address, bytes, what, m, static_cast<uint16_t>(kLanesOfWarp + m.thread / kLanes));
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
    fault(text("%s of %d bytes at byte %lld of shared memory; the launch requested %d bytes", what,
               bytes, static_cast<long long>(offset), bytes_));
  }
  if (offset % kChunkBytes != 0 || bytes % kChunkBytes != 0) {
    fault(text("%s of %d bytes at byte %lld of shared memory: not in units of 16 bytes", what,
               bytes, static_cast<long long>(offset)));
  }
  return {static_cast<uint32_t>(offset) / 2, static_cast<uint32_t>(offset + bytes) / 2};
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
  const uint32_t begin = (address - kFirstAddress) / 2;  // checked when it started
  const int count = bytes / 2;
  std::fill_n(states_.begin() + begin, count, uint8_t{kWritten | kCopied});
  std::fill_n(write_times_.begin() + begin, count, time);
  std::fill_n(writers_.begin() + begin, count, static_cast<uint16_t>(copier));
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
  async_read_times_[chunk * kMaxWarps + static_cast<uint32_t>(m.thread / kLanes)] = m.now;
}

void SharedMemory::read_by_tensor_core(uint32_t address, const char* what, int tensor_core,
                                       const Moment& m) {
  start_async_read(address, kChunkBytes, what, m);
  end_use(address, kChunkBytes);  // the tensor core's clock says when the read is done
  if (tensor_core_read_times_.empty()) {
    tensor_core_read_times_.resize(kRegionBytes / kChunkBytes);
  }
  tensor_core_read_times_[(address - kFirstAddress) / kChunkBytes] = m.now;
  tensor_core_ = tensor_core;
}

void SharedMemory::claim_barrier(uint32_t address, const Moment& m) {
  const HalfWords range = checked(address, 8, "mbarrier_init");
  check_landed(range, "mbarrier_init");
  check_write_race(range, "mbarrier_init", m, nullptr);
  note_write(range, m);
  std::fill_n(states_.begin() + range.begin, 4, uint8_t{kBarrier});
}

// States are kept per half-word, so an access to one byte of a half-word counts as an access to
// both.
SharedMemory::HalfWords SharedMemory::checked_plain(const void* p, int64_t bytes,
                                                    const char* what) const {
  const auto offset = static_cast<const char*>(p) - data_;
  if (offset < 0 || offset + bytes > bytes_) {
    fault(text("%s of %lld bytes at byte %lld of shared memory; the launch requested %d bytes",
               what, static_cast<long long>(bytes), static_cast<long long>(offset), bytes_));
  }
  return {static_cast<uint32_t>(offset / 2), static_cast<uint32_t>((offset + bytes + 1) / 2)};
}

void SharedMemory::plain_read(const void* p, int64_t bytes, const Moment& m) {
  const char* what = "read through a pointer";
  const HalfWords range = checked_plain(p, bytes, what);
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
  const HalfWords range = checked_plain(p, bytes, what);
  check_landed(range, what);
  if (bytes > 1) check_write_race(range, what, m, nullptr);
  note_write(range, m);
}

}  // namespace tilewise::cuda::emulator
