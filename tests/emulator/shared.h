// The shared memory of the block: its bytes, and what is known about each of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "emulator/clocks.h"

namespace tilewise::cuda::emulator {

// The thread that does something, and what is certain to have happened before. Times count
// barriers: everything before `block_barrier` is done for the whole block, everything before
// `warp_barrier` is done for the warp; `clocks` knows about other barriers.
struct Moment {
  int thread;
  uint32_t now;
  uint32_t block_barrier;
  uint32_t warp_barrier;
  const Clocks* clocks;
};

// Whether what `actor` (a thread or Clocks::copier) did at `time` is ordered before the thread's
// access.
bool ordered(const Moment& moment, int actor, uint32_t time);

class SharedMemory {
 public:
  static constexpr uint32_t kFirstAddress = 1024;
  static constexpr int kMaxBytes = 227 * 1024;
  // A NaN in fp32, fp16 and bf16. A half-word that still holds it, and that no checked access has
  // written, has not been written through a plain pointer either.
  static constexpr uint16_t kPoison = 0x7fb5;

  SharedMemory();
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  // A block starts: fills `bytes` with poison, directly before an inaccessible page.
  void start(int bytes, bool check_races);
  // Restarts times from 0.
  void forget_times();
  // The first byte past the end that was written through a plain pointer, or -1.
  int first_overrun() const;

  char* data() const { return data_; }
  int bytes() const { return bytes_; }
  uint32_t address_of(const void* p) const;

  // Every access is checked: it must be in bounds, aligned to its size, not during an asynchronous
  // copy and not in a race; a read must be of written bytes. `what` names the instruction.
  const char* read(uint32_t address, int bytes, const char* what, const Moment& moment);
  void write(uint32_t address, const void* from, int bytes, const char* what, const Moment& moment);
  // A read by all lanes of the warp together.
  const char* read_by_warp(uint32_t address, int bytes, const char* what, const Moment& moment);

  // An asynchronous copy writes the bytes at some moment between these two calls.
  void start_copy(uint32_t address, int bytes, const Moment& moment);
  char* finish_copy(uint32_t address, int bytes, const Moment& moment);
  // Accesses through the asynchronous proxy, in units of 16 bytes: no thread may access the bytes
  // between start and end of a write, or write them between start and end of a read. Earlier
  // generic writes need a fence. wgmma reads as a warp, bulk copies read as the thread that starts
  // them.
  void start_async_write(uint32_t address, int bytes, const char* what, const Moment& moment);
  void finish_async_write(uint32_t address, int bytes, int copier, uint32_t time);
  void start_async_read(uint32_t address, int bytes, const char* what, const Moment& moment);
  void finish_async_read(uint32_t address, int bytes, const char* what, const Moment& moment);
  // Ends an asynchronous read whose end no thread of this block waits for, so no later write is
  // ordered against it.
  void end_use(uint32_t address, int bytes);
  // A product of the block's tensor core, issued now, reads 16 bytes.
  void read_by_tensor_core(uint32_t address, const char* what, int tensor_core, const Moment& m);
  void finish_async_read_by_warp(uint32_t address, const Moment& moment);
  // From here on the 8 bytes are an mbarrier.
  void claim_barrier(uint32_t address, const Moment& moment);
  char* at(uint32_t address) const { return data_ + (address - kFirstAddress); }

  // Accesses through plain pointers, where the compiler instruments them (pointers.cpp). `contains`
  // also covers the guard area around the bytes of the launch.
  bool contains(const void* p) const {
    return static_cast<uintptr_t>(static_cast<const char*>(p) - region_) <
           kRegionBytes + kGuardBytes;
  }
  void plain_read(const void* p, int64_t bytes, const Moment& moment);
  void plain_write(const void* p, int64_t bytes, const Moment& moment);

 private:
  static constexpr size_t kRegionBytes = 228 * 1024;
  static constexpr size_t kGuardBytes = 64 * 1024;
  static constexpr int kMaxWarps = 32;
  static constexpr int kMaxThreads = 32 * kMaxWarps;
  static constexpr int kChunkBytes = 16;
  static constexpr uint32_t kChunk = kChunkBytes / 2;  // half-words
  enum : uint8_t { kUnknown = 0, kWritten = 1, kInFlight = 2, kBarrier = 4, kCopied = 8 };
  // Values in `readers_`: a thread, the lanes of a warp (plus its index), or several readers. In
  // the last case `many_reads_` has the time per thread, when clocks are active.
  static constexpr uint16_t kLanesOfWarp = 1024;
  static constexpr uint16_t kMany = 0xffff;

  struct HalfWords {
    uint32_t begin;
    uint32_t end;
  };

  HalfWords checked(uint32_t address, int bytes, const char* what) const;
  HalfWords checked_plain(const void* p, int64_t bytes, const char* what) const;
  const char* read(uint32_t address, int bytes, const char* what, const Moment& m, uint16_t reader);
  void check_written(HalfWords range, const char* what, const Moment& m);
  void check_landed(HalfWords range, const char* what) const;
  template <int kCount>
  bool note_usual_read(uint32_t begin, const Moment& m, uint16_t reader);
  void note_read(HalfWords range, const char* what, const Moment& m, uint16_t reader);
  void check_read_race(uint32_t i, const char* what, const Moment& m, uint16_t reader) const;
  void check_write_race(HalfWords range, const char* what, const Moment& m, const char* from) const;
  void check_read_before_write(uint32_t i, const char* what, const Moment& m) const;
  void note_write(HalfWords range, const Moment& m);
  uint32_t* times_of_readers(uint32_t i);
  void note_many(uint32_t i, const Moment& m, uint16_t reader);
  HalfWords checked_chunks(uint32_t address, int bytes, const char* what) const;
  void check_unused(HalfWords range, const char* what, const Moment& m) const;
  void check_read_by_tensor_core(uint32_t chunk, const char* what, const Moment& m) const;
  void check_fenced(HalfWords range, const char* what, const Moment& m) const;
  void check_fenced(uint32_t i, const char* what, const Moment& m) const;
  void check_copied(uint32_t i, const char* what, const Moment& m) const;
  [[noreturn]] void fail_many_readers(uint32_t i, const char* what) const;

  char* region_ = nullptr;
  char* data_ = nullptr;
  int bytes_ = 0;
  bool check_races_ = true;
  // Per half-word: no access is smaller, except to single bytes.
  std::vector<uint8_t> states_;
  std::vector<uint32_t> write_times_;
  std::vector<uint32_t> read_times_;
  std::vector<uint16_t> writers_;
  std::vector<uint16_t> readers_;
  // For half-words with several readers: a row with a time per thread.
  std::vector<uint32_t> many_reads_;
  std::vector<uint32_t> many_reads_of_;  // the row's start; 0: none
  // Per 16 bytes: unfinished reads, and the time when each warp's wgmma last finished one.
  std::vector<uint16_t> uses_;
  std::vector<uint32_t> last_async_reads_;
  std::vector<uint32_t> async_read_times_;
  // Per 16 bytes, once a tensor core has read: when it was last given a product that reads them.
  std::vector<uint32_t> tensor_core_read_times_;
  int tensor_core_ = 0;
};

}  // namespace tilewise::cuda::emulator
