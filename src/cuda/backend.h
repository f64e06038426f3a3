// The CUDA backend as the planner and the C ABI see it.
#pragma once

#include "attention/index_fault.h"
#include "attention/request.h"
#include "attention/schedule.h"
#include "cuda/cta_placement.h"
#include "cuda/form.h"
#include "cuda/pdl_trigger.h"
#include "cuda/runtime.h"
#include "cuda/stream_k_tail.h"
#include "cuda/tile_order.h"

namespace tilewise::cuda {

struct FamilyRow;
struct KernelSet;
struct Registry;

// How a problem is cut into tiles and CTAs, and which kernels run: a pure function of the problem,
// the family and the described GPU.
struct Plan {
  static constexpr int64_t kMaxBlocks = INT32_MAX;  // per grid

  Form form = Form::plain;
  int32_t architecture = 0;  // tile table; 0 in a family without tables
  int32_t head_dim = 0;      // of the kernels; at least that of the problem
  int32_t tile_q = 0;
  int32_t tile_k = 0;
  int32_t pack = 1;  // query heads packed into one tile (pack_gqa)

  // How the keys of a tile are divided among CTAs.
  int64_t splits = 1;            // the maximum of `split_rule` over the sequences
  SplitRule split_rule;          // splits per sequence
  ChunkSchedule chunks;          // equal chunks of a varlen batch, instead of splits
  StreamKTail stream_k;          // all CTAs share the tiles of the last wave
  int32_t cluster_size = 1;      // CTAs that combine the splits of a tile in a cluster; 1: none do
  int32_t max_cluster_size = 0;  // if not 0: a cluster combines, and `splits` is at most this
  bool last_cta_combines = false;  // a tile's last CTA, not a kernel, combines its chunks
  int32_t partial_stride = 0;      // rows per sequence of partial results (params.h)

  // How decoding fills an SM.
  bool one_cta_per_sm = false;
  int32_t warps_per_tile = 1;  // warps of a CTA that share the keys of its tile
  int32_t stages = 0;          // of each warp's pipeline; 0: as many as fit
  CtaPlacement placement;      // which CTAs of the grid have a chunk

  PdlTrigger pdl_trigger = PdlTrigger::at_exit;          // of the main kernel
  PdlTrigger combine_pdl_trigger = PdlTrigger::at_exit;  // of the combine kernel
  int64_t workspace_bytes = 0;

  const KernelSet* kernel_set = nullptr;     // null: no kernel serves the problem
  const KernelSet* nan_recompute = nullptr;  // of another family; null: not needed
  TileOrder order{};                         // its table is set at launch
  int32_t tiles = 0;                         // over rows, heads and sequences
  int64_t blocks = 0;                        // CTAs of the main kernel
  int64_t grid = 0;                          // CTAs of the largest kernel
  bool dynamic_scheduling = false;           // TmaForwardParams::tile_counter
  int32_t rows_per_recompute = 0;  // per entry of TmaForwardParams::recompute_list; 0: no list
  int64_t value_bytes = 0;         // of transposed values; 0: the kernel reads v

  // If this is false, the plan has kernels and a grid, but no workspace.
  bool can_be_launched() const { return grid <= kMaxBlocks; }
};

// Thrown when `check` finds an entry of an index array that is not allowed, or when the stream is
// being captured, so that the check cannot wait for its result.
struct InvalidArgument : Error {
  using Error::Error;
};

void append_kv(const tilewise_kv_append& append);

// Launches the kernel that writes q and the factors of k of `wide`, which is
// WidenedQueries(p).problem(memory) (attention/widened_queries.h).
void widen_queries(const Problem& p, const Problem& wide);

// A fault of an index array in words.
struct IndexError {
  std::string array;  // its name
  std::string sentence;
};

// Waits for the GPU and returns the first index fault that its kernels recorded since the last
// call; both strings are empty when there is none.
IndexError last_index_error(int32_t device_index, IndexFault* fault);

// For `check`: copies `count` entries of an index array to the host once the stream's work is done.
void read_entries(int32_t* to, const int32_t* from, int64_t count, int32_t device_index,
                  void* stream);

}  // namespace tilewise::cuda
