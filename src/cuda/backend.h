// The CUDA backend as the planner and the C ABI see it.
#pragma once

#include "attention/index_fault.h"
#include "attention/problem.h"
#include "attention/schedule.h"
#include "cuda/form.h"
#include "cuda/next_start.h"
#include "cuda/order.h"
#include "cuda/runtime.h"
#include "cuda/shares.h"
#include "cuda/spread.h"

namespace tilewise::cuda {

enum class Family : int32_t { simt, mma_sync, wgmma };

struct UnitTable;
struct Inventory;

// How a launch is cut. A pure function of the problem, the family and the described GPU.
struct Plan {
  static constexpr int64_t kMostBlocks = INT32_MAX;  // of a grid

  Family family = Family::simt;
  Form form = Form::plain;
  int32_t architecture = 0;  // the tile table used: 75, 80, 86, 90, 120, 901; simt has none
  int32_t head_dim = 0;      // the head-dim tile
  int32_t tile_q = 0;
  int32_t tile_k = 0;
  int32_t pack = 1;    // query heads in one tile
  int64_t splits = 1;  // the most that a sequence has by `rule`
  SplitRule rule;
  EqualParts parts;           // of a batch, instead of splits
  Shares shares;              // works of the last round
  bool merges_parts = false;  // the main kernel does; else a second one
  int32_t cluster = 1;        // blocks of the main kernel that merge their splits themselves
  bool alone = false;         // a block on its multiprocessor
  int32_t clusters = 0;       // blocks of a cluster for each tile, at most; 0: see `cluster`
  int32_t readers = 1;        // warps of a block that share the keys of its tile
  int32_t slots = 0;          // of the ring of each warp that decodes; 0: all
  Spread spread;              // of the blocks of parts
  int32_t pitch = 0;          // of the results of splits (params.h)
  NextStart next = NextStart::at_end;           // the launch after the main kernel
  NextStart next_of_merge = NextStart::at_end;  // after the one that merges its results
  int64_t workspace_bytes = 0;

  const UnitTable* unit = nullptr;    // the kernels; null: no kernel serves the problem
  const UnitTable* second = nullptr;  // simt kernels of the second pass; null: none is needed
  TileOrder order{};                  // without its table
  int32_t tiles = 0;                  // of rows and heads
  int64_t blocks = 0;                 // of the main kernel
  int64_t grid = 0;                   // blocks of the largest kernel
  bool counts_works = false;          // TmaForwardParams::counter

  // Otherwise nothing else of the plan but the kernels is set.
  bool can_be_launched() const { return grid <= kMostBlocks; }
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
