// How a launch is divided into work items: a pure function of the request, the instruction set and
// the number of threads.
#include "attention/schedule.h"
#include "cpu/backend.h"
#include "cpu/layout.h"
#include "cpu/scratch.h"

namespace tilewise::cpu {
namespace {

// Enough items for machines with many cores; a constant, because results must not depend on the
// number of threads. Prefill wants fewer: combining its splits costs a third of the time on a
// machine that has only 32 cores (bf16, N = 1024), while splits of a cache are nearly free.
constexpr int64_t kWantedItems = 64;
constexpr int64_t kWantedTiles = 32;
constexpr int64_t kMinSplitKeys = 512;

int64_t longest_keys(const Problem& p) {
  if (p.cu_seqlens_k == nullptr || p.block_table != nullptr) return key_capacity(p);
  return p.max_seqlen_k > 0 ? min(p.max_seqlen_k, p.seqlen_k) : p.seqlen_k;
}

int64_t forward_splits(const Problem& p, const Shape& shape, bool decoding) {
  const int64_t keys = longest_keys(p);
  const int64_t max_splits = max(int64_t{1}, ceil_div(keys, shape.tile_k));
  if (p.num_splits > 0) return min<int64_t>(p.num_splits, max_splits);
  const int64_t items = max(int64_t{1}, query_tiles(p, shape.tile_q) * p.heads_kv);
  const int64_t splits = decoding ? ceil_div(kWantedItems, items) : kWantedTiles / items;
  return clamp(splits, 1, max(int64_t{1}, keys / kMinSplitKeys));
}

// Batch-invariant: every sequence gets the splits that it would get alone.
SplitRule forward_rule(const Problem& p, const Shape& shape, bool decoding) {
  if (p.batch_invariant == 0) return {0, forward_splits(p, shape, decoding), INT64_MAX};
  return {kMinSplitKeys, ceil_div(kWantedItems, p.heads_kv), shape.tile_q / group_size(p)};
}

// The number of splits of the sequence that has the most.
int64_t most_splits(const Problem& p, const SplitRule& rule) {
  const bool uniform = p.cu_seqlens_q == nullptr && p.seqused_q == nullptr;
  return rule.splits(uniform ? p.seqlen_q : 0, longest_keys(p));
}

// Decisions that do not change results may depend on the number of threads: each thread should get
// at least this many items.
constexpr int64_t kMinItemsPerThread = 4;

// Every work item reads all packed keys and values, or packs them: 5 to 15 % of the time with AMX,
// so large items are used where there are enough of them.
int32_t rows_of_item(const Problem& p, const Shape& shape, const Plan& plan) {
  const int64_t items = query_tiles(p, shape.large_tile_q) * p.heads_kv * plan.splits;
  return items >= kMinItemsPerThread * plan.threads ? shape.large_tile_q : shape.tile_q;
}

// Decoding reads the rows of neighbouring heads, which lie side by side, in memory order: 28
// instead of 24 GB/s of the 36 that a thread reaches.
int64_t heads_of_item(const Problem& p, const Plan& plan) {
  if (!is_decoding(p, plan.isa) || !heads_side_by_side(p)) return 1;
  const int64_t items = query_tiles(p, plan.tile_q) * p.heads_kv * plan.splits;
  return clamp(items / (kMinItemsPerThread * plan.threads), 1, p.heads_kv);
}

Plan plan_forward(const Problem& problem, Isa isa, int32_t threads) {
  const Shape shape = forward_shape(problem, isa);
  Plan plan{};
  plan.isa = isa;
  plan.threads = threads;
  plan.tile_k = shape.tile_k;
  plan.rule = forward_rule(problem, shape, is_decoding(problem, isa));
  plan.splits = most_splits(problem, plan.rule);
  plan.tile_q = rows_of_item(problem, shape, plan);
  plan.heads = heads_of_item(problem, plan);
  plan.engine = shape.engine;
  Arena arena;
  ForwardLayout(problem, shape, plan, arena);
  plan.workspace_bytes = arena.used;
  return plan;
}

// The plan of Pass::backward or, with tangents, of Pass::second.
Plan plan_backward(const Problem& problem, const Gradients& gradients, const Tangents* tangents,
                   Isa isa, int32_t threads) {
  const Shape shape = shape_of(isa, dtypes_of(problem).q);
  Plan plan{};
  plan.isa = isa;
  plan.threads = threads;
  plan.tile_q = shape.back_q;
  plan.tile_k = kBackTileK;
  plan.splits = max(int64_t{1}, ceil_div(longest_keys(problem), back_chunk(shape, problem)));
  plan.engine = shape.engine;
  Arena arena;
  BackwardLayout(problem, gradients, tangents, shape, plan, arena);
  plan.workspace_bytes = arena.used;
  return plan;
}

Plan plan_jvp(const Problem& problem, const Tangents& tangents, Isa isa, int32_t threads) {
  const Shape shape = shape_of(isa, dtypes_of(problem).q);
  Plan plan{};
  plan.isa = isa;
  plan.threads = threads;
  plan.tile_q = shape.tile_q;
  plan.tile_k = shape.strip;
  plan.splits = 1;
  plan.engine = shape.engine;
  Arena arena;
  JvpLayout(problem, tangents, shape, plan, arena);
  plan.workspace_bytes = arena.used;
  return plan;
}

}  // namespace

Plan plan(const Request& request, Isa isa, int32_t threads) {
  switch (request.pass) {
    case Pass::forward:
      return plan_forward(request.problem, isa, threads);
    case Pass::backward:
      return plan_backward(request.problem, request.gradients, nullptr, isa, threads);
    case Pass::jvp:
      return plan_jvp(request.problem, request.tangents, isa, threads);
    case Pass::second:
      return plan_backward(request.problem, request.gradients, &request.tangents, isa, threads);
  }
  return {};
}

}  // namespace tilewise::cpu
