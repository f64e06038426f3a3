// The texts of a block: its faults, what its threads wait for, its statistics.
#include <array>
#include <cstdarg>
#include <cstdio>
#include <map>

#include "emulator/block.h"
#include "emulator/call_stack.h"

namespace tilewise::cuda::emulator {
namespace {

constexpr std::array kCollectiveNames = {
    "none",
    "sync_warp",
    "shuffle_xor",
    "shuffle",
    "any",
    "ldmatrix_x4",
    "ldmatrix_x4_trans",
    "stmatrix_x4",
    "stmatrix_x4_trans",
    "mma_m16n8k16_f16",
    "mma_m16n8k16_bf16",
    "mma_m16n8k8_f16",
    "mma_m16n8k8_tf32",
    "wgmma_wait_group",
    "setmaxnreg_inc",
    "setmaxnreg_dec",
    "tcgen05_alloc",
    "tcgen05_dealloc",
    "tcgen05_relinquish_alloc_permit",
    "tcgen05_ld",
    "tcgen05_st",
    "tcgen05_wait_ld",
    "tcgen05_wait_st",
};

}  // namespace

const char* name(Collective collective) {
  return kCollectiveNames[static_cast<size_t>(collective)];
}

std::string lanes_of(uint32_t mask) {
  std::string lanes;
  for (int i = 0; i < kLanes; ++i) {
    if ((mask >> i & 1) == 0) continue;
    int end = i;
    while (end + 1 < kLanes && (mask >> (end + 1) & 1) != 0) ++end;
    if (!lanes.empty()) lanes += ",";
    lanes += std::to_string(i);
    if (end > i) lanes.append("-").append(std::to_string(end));
    i = end;
  }
  return lanes;
}

// The launched kernel as the compiler names it: "Body = X" in the name of run_grid.
std::string kernel_name(const detail::Launch& launch) {
  std::string name = launch.kernel;
  const size_t begin = name.find("Body = ");
  if (begin != std::string::npos) name.erase(0, begin + 7);
  return name.substr(0, name.find_last_of(name.find("; int64_t") != std::string::npos ? ';' : ']'));
}

std::string text(const char* format, ...) {
  char buffer[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(buffer, sizeof(buffer), format, arguments);
  va_end(arguments);
  return buffer;
}

void Block::report(const detail::Launch& launch) const {
  std::string line = "emulator: " + kernel_name(launch) + ":";
  const auto add = [&line](int64_t count, const char* what) {
    line.append(" ").append(std::to_string(count)).append(" ").append(what).append(",");
  };
  const Statistics& s = statistics_;
  add(s.blocks, "blocks");
  add(launch.threads, "threads");
  add(launch.shared_bytes, "bytes shared");
  add(s.switches, "switches");
  add(s.block_barriers, "barriers");
  add(s.shuffles, "shuffles");
  add(s.matrix_products, "mma");
  add(s.copied_bytes, "bytes by cp.async");
  add(s.bulk_bytes, "bytes by bulk copies");
  add(s.warpgroup_products, "wgmma");
  add(s.tensor_products, "tcgen05.mma");
  add(s.tensor_products_by_issue, "of these ordered by their issue alone");
  add(s.tensor_loads, "columns by tcgen05.ld");
  add(s.tensor_stores, "columns by tcgen05.st");
  add(s.matrix_loads, "matrices loaded");
  add(s.matrix_load_conflicts, "bank conflicts of ldmatrix");
  add(s.shared_accesses, "accesses to shared memory");
  add(s.shared_conflicts,
      options_.count_banks ? "bank conflicts of these" : "bank conflicts (not counted)");
  line.back() = '\n';
  std::fputs(line.c_str(), stderr);
}

// Describes what is wrong in a block whose threads have all exited; "" if nothing is.
std::string Block::unfinished_work() const {
  for (int rank = 0; rank < launch_->cluster; ++rank) {
    const BlockState& state = *states_[static_cast<size_t>(rank)];
    const int overrun = state.shared.first_overrun();
    if (overrun >= 0) {
      return text("byte %d of shared memory was written; the launch requested %d bytes", overrun,
                  launch_->shared_bytes);
    }
    const std::string unfinished = state.barriers.unfinished();
    if (!unfinished.empty()) return unfinished;
    const std::string disagreement = state.registers.disagreement();
    if (!disagreement.empty()) return disagreement;
    const std::string tensor = state.tensor_core.unfinished() + state.tensor_memory.unfinished();
    if (!tensor.empty()) return tensor;
  }
  constexpr int kGroupWarps = 4;
  const int warps = launch_->threads / kLanes;
  for (int i = 0; i < warp_count_; ++i) {
    const int first = i - i % warps % kGroupWarps;
    if (products_[i].count() != products_[first].count()) {
      return text("warp %d started %d wgmmas, warp %d of its warpgroup %d", first % warps,
                  static_cast<int>(products_[first].count()), i % warps,
                  static_cast<int>(products_[i].count()));
    }
  }
  return "";
}

void Block::check_none_exited(const Warp& w, const char* what) {
  if (w.exited == 0) return;
  fail(text("%s needs all threads, but lanes %s of warp %d have exited", what,
            lanes_of(w.exited).c_str(), static_cast<int>(&w - warps_.data())));
}

void Block::fail_to_meet(const Warp& w, Collective collective) {
  check_none_exited(w, name(collective));
  fail(text("lanes of a warp meet in different instructions: this one in %s, lanes %s in %s",
            name(collective), lanes_of(w.in_collective).c_str(), name(w.collective)));
}

std::string Block::reason(const Wait& wait, int rank) const {
  const BlockState& state = *states_[static_cast<size_t>(rank)];
  switch (wait.kind) {
    case Wait::mbarrier:
      return text("parity %d of the ", wait.parity) + state.barriers.describe(wait.which);
    case Wait::named_barrier:
      return state.named_barriers.describe(wait.which);
    case Wait::registers:
      return state.registers.describe(wait.which);
  }
  return "";
}

std::string Block::where(int thread) const {
  const int rank = thread / launch_->threads;
  const int thread_of_block = thread % launch_->threads;
  return text("block %lld of %lld, thread %d (warp %d, lane %d)",
              static_cast<long long>(index_ * launch_->cluster + rank),
              static_cast<long long>(launch_->blocks), thread_of_block, thread_of_block / kLanes,
              thread_of_block % kLanes);
}

std::string Block::waiting() const {
  const int warps = launch_->threads / kLanes;
  std::string report;
  for (int i = 0; i < warp_count_; ++i) {
    const Warp& w = warps_[i];
    std::string line;
    const auto add = [&](uint32_t mask, const char* what) {
      if (mask == 0) return;
      line.append(line.empty() ? "lanes " : "; lanes ").append(lanes_of(mask)).append(" ");
      line.append(what);
    };
    add(w.in_collective, name(w.collective));
    add(w.at_barrier, "sync_block");
    add(w.at_cluster, "sync_cluster");
    add(w.polling, "ld_acquire");
    std::map<std::string, uint32_t> reasons;
    for (int lane = 0; lane < kLanes; ++lane) {
      if ((w.waiting >> lane & 1) != 0) {
        reasons[reason(waits_[static_cast<size_t>(i * kLanes + lane)], i / warps)] |= 1u << lane;
      }
    }
    for (const auto& [why, lanes] : reasons) add(lanes, why.c_str());
    add(w.exited, "exited");
    const std::string prefix =
        launch_->cluster > 1 ? text("block %d of the cluster, ", i / warps) : "";
    report.append("\n  " + prefix + text("warp %d: ", i % warps)).append(line);
  }
  return report;
}

void Block::fail(const std::string& message) {
  failure_ = message + "\n  in " + where(thread_) + "\n  of " + kernel_name(*launch_);
  failure_stack_ = call_stack();
  switch_context(contexts_[thread_], host_);
  __builtin_unreachable();
}

}  // namespace tilewise::cuda::emulator
