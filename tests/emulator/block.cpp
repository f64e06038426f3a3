#include "emulator/block.h"

#include <algorithm>
#include <memory>
#include <numeric>
#include <random>

#include "emulator/call_stack.h"
#include "emulator/device.h"

namespace tilewise::cuda::emulator {
namespace {

// A thread may poll a flag once per step of a long loop. Only when nothing else happens for this
// many rounds is it considered deadlocked.
constexpr int kMaxIdlePolls = 10000;

// The library with this variable may be loaded at run time, but one pointer fits into the TLS space
// that loaders reserve; reading it through the dynamic model would cost a call.
__attribute__((tls_model("initial-exec"))) thread_local Block* active = nullptr;

template <class T>
void arrange(T* values, int64_t count, Order order, std::mt19937_64& random) {
  std::iota(values, values + count, T{0});
  if (order == Order::reverse) std::reverse(values, values + count);
  if (order == Order::shuffled) std::shuffle(values, values + count, random);
}

}  // namespace

Block& block() { return *active; }

Block* running_block() { return active != nullptr && active->running() ? active : nullptr; }

void fault(const std::string& message) {
  if (active == nullptr || !active->running()) throw Fault(message);
  active->fail(message);
}

const Statistics& statistics() {
  static const Statistics none;
  return active == nullptr ? none : active->counts();
}

// 1 while a grid runs for which a thread of another grid waits.
static thread_local int depth = 0;

void detail::run(const Launch& launch) {
  // Blocks keep their stacks for the next launch.
  static thread_local std::array<std::unique_ptr<Block>, 2> blocks;
  if (active != nullptr && active->running()) fault("a kernel launches a kernel");
  std::unique_ptr<Block>& block = blocks.at(static_cast<size_t>(depth));
  if (block == nullptr) block = std::make_unique<Block>();
  active = block.get();
  active->run_grid(launch);
}

void run_nested(const std::function<void()>& grid) {
  const auto leave = [outer = active] {
    active = outer;
    --depth;
  };
  active = nullptr;
  ++depth;
  try {
    grid();
  } catch (...) {
    leave();
    throw;
  }
  leave();
}

void Block::run_grid(const detail::Launch& launch) {
  if (launch.blocks < 0 || launch.blocks > INT32_MAX || launch.threads <= 0 ||
      launch.threads > kMaxThreads || launch.threads % kLanes != 0 || launch.shared_bytes < 0 ||
      launch.shared_bytes > SharedMemory::kMaxBytes || launch.cluster < 1 ||
      launch.cluster > kMaxCluster || launch.blocks % launch.cluster != 0 ||
      launch.cluster * launch.threads > kMaxThreads) {
    throw Fault(text("launch of %lld blocks of %d threads with %d bytes of shared memory, %d in a "
                     "cluster: not whole warps or clusters, or more than a GPU (for clusters: the "
                     "emulator) has; ",
                     static_cast<long long>(launch.blocks), launch.threads, launch.shared_bytes,
                     launch.cluster) +
                kernel_name(launch));
  }
  options_ = read_options();
  statistics_ = {};
  statistics_.blocks = launch.blocks;
  warp_count_ = launch.cluster * launch.threads / kLanes;
  while (static_cast<int>(states_.size()) < launch.cluster) {
    states_.push_back(std::make_unique<BlockState>());
  }
  for (int i = 0; i < warp_count_; ++i) {
    rank_of_warp_[i] = static_cast<uint8_t>(i * kLanes / launch.threads);
  }
  std::mt19937_64 random(options_.seed);
  std::vector<int64_t> order(static_cast<size_t>(launch.blocks / launch.cluster));
  const bool warps = options_.order == Order::warps;
  arrange(order.data(), launch.blocks / launch.cluster, warps ? Order::forward : options_.order,
          random);
  failure_.clear();
  failure_stack_.clear();
  if (clock_ > UINT32_MAX / 2) {
    for (const auto& state : states_) state->shared.forget_times();
    clock_ = 0;
  }
  launch_ = &launch;
  for (size_t i = 0; i < order.size() && failure_.empty(); ++i) {
    index_ = order[i];
    arrange(warp_order_.data(), warp_count_, warps ? Order::shuffled : options_.order, random);
    for (int turn = 0; turn < warp_count_; ++turn) warp_position_[warp_order_[turn]] = turn;
    run_block();
  }
  launch_ = nullptr;
  if (!failure_.empty()) throw Fault(failure_ + describe(failure_stack_));
  if (options_.report) report(launch);
}

void Block::run_block() {
  const int threads = launch_->cluster * launch_->threads;
  exited_ = 0;
  at_cluster_ = 0;
  idle_polls_ = 0;
  for (int i = 0; i < warp_count_; ++i) warps_[i] = Warp{.runnable = kAllLanes};
  clocks_.start(threads, clock_ + 1);
  for (int rank = 0; rank < launch_->cluster; ++rank) {
    BlockState& state = *states_[static_cast<size_t>(rank)];
    state.shared.start(launch_->shared_bytes, options_.check_races);
    state.barriers.start(state.shared, rank);
    state.named_barriers.start();
    state.registers.start(launch_->threads);
    state.tensor_memory.start(rank);
    state.tensor_core.start(rank);
    state.at_barrier = 0;
  }
  for (int i = 0; i < warp_count_; ++i) products_[i].start();
  note_cluster_barrier();
  for (int i = 0; i < threads; ++i) {
    make_context(contexts_[i], stacks_.begin(i), stacks_.end(i), &Block::enter);
    copies_[i] = {};
    bulk_copies_[i] = {};
  }
  thread_ = warp_order_[0] * kLanes;
  switch_context(host_, contexts_[thread_]);
  for (int i = 0; i < warp_count_; ++i) count_conflicts(i);
  if (!failure_.empty()) return;
  failure_ = unfinished_work();
  if (failure_.empty()) return;
  failure_ +=
      text("\n  in block %lld of %lld\n  of ", static_cast<long long>(index_ * launch_->cluster),
           static_cast<long long>(launch_->blocks)) +
      kernel_name(*launch_);
}

// The entry function of every fiber.
void Block::enter() {
  Block& b = *active;
  b.launch_->invoke(b.launch_->body);
  b.exit_thread();
}

void Block::exit_thread() {
  products().check_exit();
  bulk_copies().check_exit();
  tensor_memory().check_exit();
  Warp& w = warp();
  w.runnable &= ~lane_bit();
  w.exited |= lane_bit();
  if (w.in_collective != 0) {
    fail(text("the thread exits while lanes %s of its warp wait in %s",
              lanes_of(w.in_collective).c_str(), name(w.collective)));
  }
  if (state().at_barrier != 0) fail("the thread exits while others wait in sync_block");
  idle_polls_ = 0;
  if (++exited_ == launch_->cluster * launch_->threads) switch_context(contexts_[thread_], host_);
  end_cluster_barrier();
  run_another();
}

// Finds the first runnable lane of the next warp that has one.
bool Block::next_thread(int* thread) {
  const int turn = warp_position_[thread_ / kLanes];
  for (int i = 1; i <= warp_count_; ++i) {
    const int index = warp_order_[(turn + i) % warp_count_];
    if (warps_[index].runnable == 0) continue;
    *thread = index * kLanes + __builtin_ctz(warps_[index].runnable);
    return true;
  }
  return false;
}

void Block::run_another_warp() {
  int thread = thread_;
  if (next_thread(&thread)) return switch_to(thread);
  // Asynchronous copies land as late as possible. An arrival that no thread waits for lets none
  // continue.
  while (land()) {
    if (!next_thread(&thread)) continue;
    if (thread != thread_) switch_to(thread);
    return;
  }
  uint32_t polling = 0;
  for (int i = 0; i < warp_count_; ++i) {
    polling |= warps_[i].polling;
    warps_[i].runnable |= warps_[i].polling;
    warps_[i].polling = 0;
  }
  if (polling == 0) fail("deadlock: no thread can go on" + waiting());
  if (++idle_polls_ > kMaxIdlePolls) {
    for (int i = 0; i < warp_count_; ++i) std::swap(warps_[i].polling, warps_[i].runnable);
    fail(
        "deadlock: a thread waits for a flag that no running thread will write (blocks run one "
        "after another: a block may only wait for one that runs before it)" +
        waiting());
  }
  next_thread(&thread);
  if (thread != thread_) switch_to(thread);
}

bool Block::land() {
  for (int rank = 0; rank < launch_->cluster; ++rank) {
    BlockState& state = *states_[static_cast<size_t>(rank)];
    if (state.barriers.land() || state.tensor_core.land()) return true;
  }
  return false;
}

void Block::sync_block() {
  const int warps = launch_->threads / kLanes;
  const int first = rank() * warps;
  for (int i = first; i < first + warps; ++i) check_none_exited(warps_[i], "sync_block");
  Warp& w = warp();
  w.at_barrier |= lane_bit();
  w.runnable &= ~lane_bit();
  if (++state().at_barrier < launch_->threads) return run_another();
  state().at_barrier = 0;
  idle_polls_ = 0;
  ++statistics_.block_barriers;
  for (int i = first; i < first + warps; ++i) {
    count_conflicts(i);
    warps_[i].at_barrier = 0;
    warps_[i].runnable = kAllLanes;
  }
  note_block_barrier(rank());
}

void Block::note_block_barrier(int rank) {
  states_[static_cast<size_t>(rank)]->barrier_time = ++clock_;
  const int first = rank * launch_->threads;
  clocks_.join(first, first + launch_->threads);
  for (int i = 0; i < launch_->threads / kLanes; ++i) {
    warps_[first / kLanes + i].barrier_time = clock_;
  }
}

// Threads that have exited count as arrived.
void Block::sync_cluster() {
  Warp& w = warp();
  w.at_cluster |= lane_bit();
  w.runnable &= ~lane_bit();
  ++at_cluster_;
  end_cluster_barrier();
  if ((w.at_cluster & lane_bit()) != 0) run_another();
}

void Block::end_cluster_barrier() {
  if (at_cluster_ == 0 || at_cluster_ + exited_ < launch_->cluster * launch_->threads) return;
  at_cluster_ = 0;
  idle_polls_ = 0;
  for (int i = 0; i < warp_count_; ++i) {
    count_conflicts(i);
    warps_[i].runnable |= warps_[i].at_cluster;
    warps_[i].at_cluster = 0;
  }
  note_cluster_barrier();
}

void Block::note_cluster_barrier() {
  for (int rank = 0; rank < launch_->cluster; ++rank) note_block_barrier(rank);
  cluster_barrier_time_ = ++clock_;
  clocks_.join(0, launch_->cluster * launch_->threads);
}

BlockState& Block::state_of(int rank) {
  if (rank < 0 || rank >= launch_->cluster) {
    fail(text("block %d of a cluster of %d", rank, launch_->cluster));
  }
  return *states_[static_cast<size_t>(rank)];
}

void Block::poll() {
  warp().polling |= lane_bit();
  warp().runnable &= ~lane_bit();
  run_another();
}

void Block::wait(const Wait& why) {
  waits_[static_cast<size_t>(thread_)] = why;
  warp().waiting |= lane_bit();
  warp().runnable &= ~lane_bit();
  run_another();
}

void Block::wake(int thread) {
  Warp& w = warps_[static_cast<size_t>(thread / kLanes)];
  w.waiting &= ~(1u << (thread % kLanes));
  w.runnable |= 1u << (thread % kLanes);
  idle_polls_ = 0;
}

int thread_index() { return active->thread_of_block(); }
int block_threads() { return active->launch().threads; }
int64_t block_index() { return active->index(); }
int64_t grid_blocks() { return active->launch().blocks; }
char* shared_memory() { return active->shared().data(); }
uint32_t shared_address(const void* p) { return active->shared().address_of(p); }
void sync_block() { active->sync_block(); }
void sync_cluster() { active->sync_cluster(); }

}  // namespace tilewise::cuda::emulator
