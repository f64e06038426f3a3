// Vector clocks of the threads of a block: what each knows to have happened before, through
// mbarriers, named barriers, and fences between the generic and the asynchronous proxy. The orders
// that barriers of the whole block or of a warp imply are kept elsewhere (Moment).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tilewise::cuda::emulator {

// A time per actor: everything that the actor did before it is known to be done.
using Clock = std::vector<uint32_t>;

// Actors are the threads, the asynchronous copies that an mbarrier counts, and the tensor core of
// each block.
class Clocks {
 public:
  static constexpr int kFirstCopier = 1024;

  // A block starts. Until `activate`, threads only know what barriers of the block and the warp
  // imply.
  void start(int threads, uint32_t now);
  bool active() const { return active_; }
  void activate();
  uint32_t start_time() const { return start_time_; }
  Clock nothing() const { return Clock(static_cast<size_t>(width())); }
  static int copier(int rank, int barrier) {
    return kFirstCopier + (rank * kCopiers / 2 + barrier) % kCopiers;
  }

  static int tensor_core(int rank) { return kFirstCopier + kCopiers + rank; }
  static bool is_tensor_core(int actor) { return actor >= kFirstCopier + kCopiers; }

  // Release: `thread` adds to `to` what it did before `now` and everything it knows. Acquire:
  // `thread` learns everything in `from`.
  void release(int thread, uint32_t now, uint32_t warp_barrier, Clock& to) const;
  void acquire(int thread, const Clock& from);
  // Adds to `clock` that what `actor` did before `now` is done.
  void note(Clock& clock, int actor, uint32_t now) const;
  // Whether what `actor` did at `time` is known to `clock`.
  bool includes(const Clock& clock, int actor, uint32_t time) const {
    return time < clock[static_cast<size_t>(column(actor))];
  }
  // Each of the threads begin to end - 1 (a warp or the block) learns what any of them knows.
  void join(int begin, int end);

  bool knows(int thread, int actor, uint32_t time) const {
    return active_ && time < of(thread)[column(actor)];
  }
  // The warp acted together: knowing about one lane is enough.
  bool knows_any_lane(int thread, int warp, uint32_t time) const;

  void fence(int thread, uint32_t now) { fences_[static_cast<size_t>(thread)].push_back(now); }
  // The time of the first fence of `thread` after `time`, or 0.
  uint32_t fence_after(int thread, uint32_t time) const;

 private:
  // With more barriers, several share a copier, and races may be missed.
  static constexpr int kCopiers = 128;

  static constexpr int kTensorCores = 16;  // the blocks of a cluster

  int width() const { return threads_ + kCopiers + kTensorCores; }
  int column(int actor) const {
    return actor < kFirstCopier ? actor : threads_ + actor - kFirstCopier;
  }
  const uint32_t* of(int thread) const {
    return known_.data() + static_cast<size_t>(thread) * static_cast<size_t>(width());
  }
  uint32_t* of(int thread) {
    return known_.data() + static_cast<size_t>(thread) * static_cast<size_t>(width());
  }

  bool active_ = false;
  int threads_ = 0;
  uint32_t start_time_ = 0;
  std::vector<uint32_t> known_;  // a clock per thread
  std::vector<std::vector<uint32_t>> fences_;
};

}  // namespace tilewise::cuda::emulator
