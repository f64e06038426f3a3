// The shared memory of the block: its bytes, and what is known of each of them.
#pragma once

#include <cstdint>
#include <vector>

namespace tilewise::cuda::emulator {

class SharedMemory {
 public:
  static constexpr uint32_t kFirstAddress = 1024;
  static constexpr int kMaxBytes = 227 * 1024;
  // Not a number as fp32, as fp16 and as bf16. A half-word that still holds it, and that no
  // wrapper has written, has not been written through a plain pointer either.
  static constexpr uint16_t kPoison = 0x7fb5;

  SharedMemory();
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  // A block starts: `bytes` of poison, the last of them before a page without access.
  void start(int bytes);
  // The first byte behind the end that a plain pointer has written, or -1.
  int first_overrun() const;

  char* data() const { return data_; }
  int bytes() const { return bytes_; }
  uint32_t address_of(const void* p) const;

  // Every access is checked: inside, aligned to its size, not amid an asynchronous copy; and when
  // it reads, written before. `what` names the instruction.
  const char* read(uint32_t address, int bytes, const char* what);
  char* write(uint32_t address, int bytes, const char* what);

  // An asynchronous copy writes the bytes at some moment between the two calls.
  char* start_copy(uint32_t address, int bytes);
  void finish_copy(uint32_t address, int bytes);

 private:
  enum : uint8_t { kUnknown = 0, kWritten = 1, kInFlight = 2 };

  uint32_t checked_offset(uint32_t address, int bytes, const char* what) const;
  void check_readable(uint32_t offset, int bytes, const char* what);
  void check_landed(uint32_t offset, int bytes, const char* what) const;

  char* region_ = nullptr;
  char* data_ = nullptr;
  int bytes_ = 0;
  std::vector<uint8_t> states_;  // per half-word, the smallest access there is
};

}  // namespace tilewise::cuda::emulator
