// The block, or the cluster of blocks, that runs on this host thread: its fibers, their scheduling
// and their barriers.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "emulator/banks.h"
#include "emulator/barriers.h"
#include "emulator/bulk.h"
#include "emulator/clocks.h"
#include "emulator/fiber.h"
#include "emulator/grid.h"
#include "emulator/options.h"
#include "emulator/shared.h"
#include "emulator/tcgen05.h"
#include "emulator/tensor_memory.h"
#include "emulator/wgmma.h"

namespace tilewise::cuda::emulator {

inline constexpr int kLanes = 32;
inline constexpr uint32_t kAllLanes = 0xffffffffu;
inline constexpr int kMaxThreads = 1024;  // per block and per cluster
inline constexpr int kMaxCluster = 16;

// Operations that all lanes of a warp perform together.
enum class Collective : uint8_t {
  none,
  sync_warp,
  shuffle_xor,
  shuffle,
  any,
  ldmatrix_x4,
  ldmatrix_x4_trans,
  stmatrix_x4,
  stmatrix_x4_trans,
  mma_m16n8k16_f16,
  mma_m16n8k16_bf16,
  mma_m16n8k8_f16,
  mma_m16n8k8_tf32,
  wgmma_wait_group,
  setmaxnreg_inc,
  setmaxnreg_dec,
  tcgen05_alloc,
  tcgen05_dealloc,
  tcgen05_relinquish_alloc_permit,
  tcgen05_ld,
  tcgen05_st,
  tcgen05_wait_ld,
  tcgen05_wait_st,
};

// The event that a thread waits for, which wakes it alone and not its whole warp or block.
struct Wait {
  enum Kind : uint8_t { mbarrier, named_barrier, registers };
  Kind kind;
  int which;  // the barrier, or the number of registers
  int parity;
};

struct Copy {
  uint32_t to;
  const void* source;
  int bytes;
  int bytes_read;
};

// The asynchronous copies of a thread, in the order in which they started.
struct Copies {
  std::deque<Copy> in_flight;
  std::deque<int> groups;  // how many copies each committed group has
  int open = 0;            // not yet in a group
};

// A lane is in exactly one of the masks; the running lane is in `runnable`.
struct Warp {
  uint32_t runnable = 0;
  uint32_t in_collective = 0;
  uint32_t at_barrier = 0;
  uint32_t at_cluster = 0;
  uint32_t waiting = 0;  // described by `waits_`
  uint32_t polling = 0;  // reading a flag in a loop: all other threads run first
  uint32_t exited = 0;
  Collective collective = Collective::none;
  uint32_t barrier_time = 0;          // time of the last barrier of the warp or the block
  std::array<void*, kLanes> calls{};  // arguments of the lanes in `in_collective`
};

// The state that each block of a cluster has for itself.
struct BlockState {
  SharedMemory shared;
  MemoryBarriers barriers;
  NamedBarriers named_barriers;
  Registers registers;
  TensorMemory tensor_memory;
  TensorCore tensor_core;
  int at_barrier = 0;
  uint32_t barrier_time = 1;  // time of its last barrier
};

// Threads are numbered across all blocks of a cluster; those of rank r start at r * threads.
class Block {
 public:
  Block()
      : stacks_(kMaxThreads),
        copies_(kMaxThreads),
        bulk_copies_(kMaxThreads),
        waits_(kMaxThreads) {}

  void run_grid(const detail::Launch& launch);

  int thread() const { return thread_; }
  int rank() const { return rank_of_warp_[static_cast<size_t>(thread_ / kLanes)]; }
  int thread_of_block() const { return thread_ - rank() * launch_->threads; }
  int warp_of_block() const { return thread_of_block() / kLanes; }
  int64_t index() const { return index_ * launch_->cluster + rank(); }
  const detail::Launch& launch() const { return *launch_; }
  const Options& options() const { return options_; }
  BlockState& state() { return *states_[static_cast<size_t>(rank())]; }
  // The state of block `rank` of the cluster; a fault if there is no such block.
  BlockState& state_of(int rank);
  SharedMemory& shared() { return state().shared; }
  Copies& copies() { return copies_[static_cast<size_t>(thread_)]; }
  BulkCopies& bulk_copies() { return bulk_copies_[static_cast<size_t>(thread_)]; }
  MemoryBarriers& barriers() { return state().barriers; }
  NamedBarriers& named_barriers() { return state().named_barriers; }
  Registers& registers() { return state().registers; }
  TensorMemory& tensor_memory() { return state().tensor_memory; }
  TensorCore& tensor_core() { return state().tensor_core; }
  Products& products() { return products(thread_ / kLanes); }
  Products& products(int warp) { return products_[static_cast<size_t>(warp)]; }
  Clocks& clocks() { return clocks_; }
  Statistics& counts() { return statistics_; }

  // All 32 lanes call this with their arguments. The last lane to arrive does the work for all of
  // them with `perform(calls)`, where calls[lane] points to the lane's arguments.
  template <class Call, class Perform>
  void meet(Collective collective, Call& call, Perform perform) {
    Warp& w = warp();
    if (w.exited != 0 || (w.in_collective != 0 && w.collective != collective)) {
      fail_to_meet(w, collective);
    }
    w.collective = collective;
    w.calls[static_cast<size_t>(thread_ % kLanes)] = &call;
    w.in_collective |= lane_bit();
    w.runnable &= ~lane_bit();
    if (w.in_collective != kAllLanes) return run_another();
    count_conflicts(thread_ / kLanes);
    std::array<Call*, kLanes> calls;
    for (int i = 0; i < kLanes; ++i) calls[i] = static_cast<Call*>(w.calls[i]);
    perform(calls);
    w.in_collective = 0;
    w.runnable = kAllLanes;
    idle_polls_ = 0;
  }
  void sync_block();
  void sync_cluster();
  void poll();
  // Blocks this thread until another one wakes it.
  void wait(const Wait& why);
  void wake(int thread);
  // Logs an access to shared memory, to count bank conflicts.
  void note_access(const void* place, uint32_t offset, int bytes) {
    if (!options_.count_banks) return;
    logs_[static_cast<size_t>(thread_ / kLanes)].note(thread_ % kLanes, {place, offset, bytes});
  }
  void note_warp_barrier() {
    warp().barrier_time = ++clock_;
    const int first = thread_ / kLanes * kLanes;
    clocks_.join(first, first + kLanes);
  }
  // Everything done from here on has a later time.
  uint32_t tick() { return ++clock_; }
  Moment moment() { return {thread_, clock_, state().barrier_time, warp().barrier_time, &clocks_}; }
  // The moment of an access to shared memory of block `other` of the cluster.
  Moment moment_at(int other) {
    if (other == rank()) return moment();
    return {thread_, clock_, cluster_barrier_time_, 0, &clocks_};
  }

  // Leaves the grid permanently: run_grid throws `message` with the place where it happened.
  [[noreturn]] void fail(const std::string& message);
  bool running() const { return launch_ != nullptr; }

 private:
  static void enter();
  void count_conflicts(int warp) {
    AccessLog& log = logs_[static_cast<size_t>(warp)];
    if (!log.empty()) statistics_.shared_conflicts += log.take_conflicts();
  }
  void run_block();
  void note_block_barrier(int rank);
  void note_cluster_barrier();
  void end_cluster_barrier();
  bool land();
  // This thread waits: the next runnable lane of its warp continues, or else another warp.
  void run_another() {
    const uint32_t runnable = warp().runnable;
    if (runnable == 0) return run_another_warp();
    const uint32_t later = runnable & ~(2 * lane_bit() - 1);
    switch_to(thread_ / kLanes * kLanes + __builtin_ctz(later != 0 ? later : runnable));
  }
  void switch_to(int thread) {
    const int from = thread_;
    thread_ = thread;
    ++statistics_.switches;
    switch_context(contexts_[static_cast<size_t>(from)], contexts_[static_cast<size_t>(thread)]);
  }
  void report(const detail::Launch& launch) const;
  void run_another_warp();
  bool next_thread(int* thread);
  void exit_thread();
  [[noreturn]] void fail_to_meet(const Warp& w, Collective collective);
  Warp& warp() { return warps_[static_cast<size_t>(thread_ / kLanes)]; }
  uint32_t lane_bit() const { return 1u << (thread_ % kLanes); }
  void check_none_exited(const Warp& w, const char* what);
  std::string where(int thread) const;
  std::string waiting() const;
  std::string reason(const Wait& wait, int rank) const;
  std::string unfinished_work() const;

  const detail::Launch* launch_ = nullptr;
  Options options_;
  int64_t index_ = 0;
  int thread_ = 0;
  int warp_count_ = 0;  // in all blocks of the cluster
  int exited_ = 0;
  int at_cluster_ = 0;
  std::array<uint8_t, kMaxThreads / kLanes> rank_of_warp_{};
  int idle_polls_ = 0;  // rounds of polling in which nothing else happened
  uint32_t clock_ = 1;  // advances with every event that orders accesses
  uint32_t cluster_barrier_time_ = 1;
  std::array<Warp, kMaxThreads / kLanes> warps_;
  std::array<int, kMaxThreads / kLanes> warp_order_{};     // the order in which warps run
  std::array<int, kMaxThreads / kLanes> warp_position_{};  // the inverse
  Stacks stacks_;
  std::array<Context, kMaxThreads> contexts_;
  Context host_;
  std::vector<Copies> copies_;
  std::vector<BulkCopies> bulk_copies_;
  std::vector<Wait> waits_;
  std::vector<std::unique_ptr<BlockState>> states_;
  std::array<Products, kMaxThreads / kLanes> products_;
  Clocks clocks_;
  std::array<AccessLog, kMaxThreads / kLanes> logs_;
  Statistics statistics_;
  std::string failure_;
  std::vector<uintptr_t> failure_stack_;
};

// The block or cluster that runs on this host thread.
Block& block();
// Null between launches.
Block* running_block();

// Runs a grid to its end while the calling thread of another grid waits.
void run_nested(const std::function<void()>& grid);

[[noreturn]] void fault(const std::string& message);
// Formats like printf.
std::string text(const char* format, ...) __attribute__((format(printf, 1, 2)));
const char* name(Collective collective);
// Lanes of a mask as text: "0-3,7".
std::string lanes_of(uint32_t mask);
// The launched kernel as the compiler names it.
std::string kernel_name(const detail::Launch& launch);

}  // namespace tilewise::cuda::emulator
