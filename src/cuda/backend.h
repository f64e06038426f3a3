// The CUDA backend as the planner and the C ABI see it.
#pragma once

#include "attention/index_fault.h"
#include "attention/problem.h"
#include "attention/schedule.h"
#include "cuda/cta_placement.h"
#include "cuda/form.h"
#include "cuda/pdl_trigger.h"
#include "cuda/runtime.h"
#include "cuda/stream_k_tail.h"
#include "cuda/tile_order.h"

namespace tilewise::cuda {

enum class Family : int32_t { simt, mma_sync, wgmma };

struct KernelSet;
struct Registry;

// How a problem is cut into tiles and CTAs and which kernels run. A pure function of the problem,
// the family and the described GPU.
struct Plan {
  static constexpr int64_t kMaxBlocks = INT32_MAX;  // per grid

  Family family = Family::simt;
  Form form = Form::plain;
  int32_t architecture = 0;  // the tile table used: 75, 80, 86, 90, 120, 901; simt has none
  int32_t head_dim = 0;      // the head-dim tile
  int32_t tile_q = 0;
  int32_t tile_k = 0;
  int32_t pack = 1;  // query heads in one tile

  // How the keys of a tile are divided among CTAs and warps.
  int64_t splits = 1;            // the most that `split_rule` gives a sequence
  SplitRule split_rule;          // splits per sequence
  ChunkSchedule chunks;          // instead of splits: equal chunks of a varlen batch
  StreamKTail stream_k;          // wgmma: the last wave is shared by all CTAs
  int32_t cluster_size = 1;      // CTAs of a cluster that combine their splits themselves
  int32_t max_cluster_size = 0;  // varlen: CTAs of the cluster of a tile; 0: `cluster_size` counts
  bool last_cta_combines = false;  // the CTA that finishes a tile last; else a combine kernel does
  int32_t partial_stride = 0;      // rows per sequence of partial results (params.h)

  // How decoding fills an SM.
  bool one_cta_per_sm = false;
  int32_t warps_per_tile = 1;  // warps of a CTA that share the keys of its tile
  int32_t stages = 0;          // of each warp's pipeline; 0: all that fit
  CtaPlacement placement;      // of chunks over the grid

  PdlTrigger pdl_trigger = PdlTrigger::at_exit;          // of the main kernel
  PdlTrigger combine_pdl_trigger = PdlTrigger::at_exit;  // of the combine kernel
  int64_t workspace_bytes = 0;

  const KernelSet* kernel_set = nullptr;     // null: no kernel serves the problem
  const KernelSet* nan_recompute = nullptr;  // simt kernels of the second pass; null: not needed
  TileOrder order{};                         // without its table
  int32_t tiles = 0;                         // rows x heads
  int64_t blocks = 0;                        // CTAs of the main kernel
  int64_t grid = 0;                          // CTAs of the largest kernel
  bool dynamic_scheduling = false;           // TmaForwardParams::tile_counter

  // When this is false, only the kernels of the plan are set.
  bool can_be_launched() const { return grid <= kMaxBlocks; }
};

// Whether this build has a kernel of the family for the problem on the described GPU.
bool has_forward(const Problem& problem, Family family, const Gpu& gpu);
bool has_backward(const Problem& problem, const Gradients& gradients, Family family,
                  const Gpu& gpu);

Plan plan_forward(const Problem& problem, Family family, const Gpu& gpu);
Plan plan_backward(const Problem& problem, const Gradients& gradients, Family family,
                   const Gpu& gpu);

// What `check` refuses: an entry of an index array, or that it is asked for at all.
struct InvalidArgument : Error {
  using Error::Error;
};

// The problem has been validated; the workspace is in the memory of the GPU and at least
// plan.workspace_bytes, 64-byte aligned. Runs on problem.stream of GPU problem.device_index.
void forward(const Problem& problem, const Plan& plan, void* workspace);
void backward(const Problem& problem, const Gradients& gradients, const Plan& plan,
              void* workspace);
void append_kv(const tilewise_kv_append& append);

// What is said of a fault of an index array.
struct IndexError {
  std::string array;
  std::string sentence;
};

// Waits for the GPU. The first fault of an index array that its kernels have met since the last
// call: none, and then nothing is said.
IndexError last_index_error(int32_t device_index, IndexFault* fault);

// For `check`: copies an index array to the host, when what is on the stream is done.
void read_entries(int32_t* to, const int32_t* from, int64_t count, int32_t device_index,
                  void* stream);

}  // namespace tilewise::cuda
