#include "emulator/shared.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>

#include "emulator/block.h"

namespace tilewise::cuda::emulator {
namespace {

constexpr size_t kGuardBytes = 64 * 1024;
constexpr uint32_t kAlignment = 1024;

constexpr int rounded(int bytes) {
  return (bytes + static_cast<int>(kAlignment) - 1) / static_cast<int>(kAlignment) *
         static_cast<int>(kAlignment);
}

constexpr size_t kRegionBytes = 228 * 1024;

uint16_t half_word(const char* p) {
  uint16_t x;
  std::memcpy(&x, p, 2);
  return x;
}

}  // namespace

SharedMemory::SharedMemory() : states_(kRegionBytes / 2) {
  void* region = mmap(nullptr, kRegionBytes + kGuardBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (region == MAP_FAILED) throw std::bad_alloc();
  region_ = static_cast<char*>(region);
  mprotect(region_ + kRegionBytes, kGuardBytes, PROT_NONE);
  data_ = region_ + kRegionBytes;
}

SharedMemory::~SharedMemory() { munmap(region_, kRegionBytes + kGuardBytes); }

void SharedMemory::start(int bytes) {
  bytes_ = bytes;
  data_ = region_ + kRegionBytes - rounded(bytes);
  for (char* p = data_; p < region_ + kRegionBytes; p += 2) std::memcpy(p, &kPoison, 2);
  std::fill_n(states_.begin(), rounded(bytes) / 2, uint8_t{kUnknown});
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

uint32_t SharedMemory::checked_offset(uint32_t address, int bytes, const char* what) const {
  const int64_t offset = static_cast<int64_t>(address) - kFirstAddress;
  if (offset < 0 || offset + bytes > bytes_) {
    fault(text("%s of %d bytes at byte %lld of shared memory, the launch gave %d bytes", what,
               bytes, static_cast<long long>(offset), bytes_));
  }
  if (offset % bytes != 0) {
    fault(text("%s of %d bytes at byte %lld of shared memory: not aligned to its size", what, bytes,
               static_cast<long long>(offset)));
  }
  return static_cast<uint32_t>(offset);
}

void SharedMemory::check_landed(uint32_t offset, int bytes, const char* what) const {
  for (uint32_t i = offset / 2; i < (offset + static_cast<uint32_t>(bytes)) / 2; ++i) {
    if (states_[i] & kInFlight) {
      fault(text("%s of byte %u of shared memory, where an asynchronous copy is in flight", what,
                 2 * i));
    }
  }
}

void SharedMemory::check_readable(uint32_t offset, int bytes, const char* what) {
  for (uint32_t i = offset / 2; i < (offset + static_cast<uint32_t>(bytes)) / 2; ++i) {
    if (states_[i] == kWritten) continue;
    if (states_[i] & kInFlight) check_landed(2 * i, 2, what);
    if (half_word(data_ + 2 * i) == kPoison) {
      fault(text("%s of byte %u of shared memory, which was not written", what, 2 * i));
    }
    states_[i] = kWritten;  // through a plain pointer
  }
}

const char* SharedMemory::read(uint32_t address, int bytes, const char* what) {
  const uint32_t offset = checked_offset(address, bytes, what);
  check_readable(offset, bytes, what);
  return data_ + offset;
}

char* SharedMemory::write(uint32_t address, int bytes, const char* what) {
  const uint32_t offset = checked_offset(address, bytes, what);
  check_landed(offset, bytes, what);
  std::fill_n(states_.begin() + offset / 2, bytes / 2, uint8_t{kWritten});
  return data_ + offset;
}

char* SharedMemory::start_copy(uint32_t address, int bytes) {
  const uint32_t offset = checked_offset(address, bytes, "cp.async");
  check_landed(offset, bytes, "cp.async");
  for (uint32_t i = 0; i < static_cast<uint32_t>(bytes) / 2; ++i) {
    states_[offset / 2 + i] |= kInFlight;
  }
  return data_ + offset;
}

void SharedMemory::finish_copy(uint32_t address, int bytes) {
  std::fill_n(states_.begin() + (address - kFirstAddress) / 2, bytes / 2, uint8_t{kWritten});
}

}  // namespace tilewise::cuda::emulator
