// Planning of the backward: order of the key tiles, and workspace.
#include "cuda/common/check.h"
#include "cuda/common/dbias.h"
#include "cuda/common/prepare.h"
#include "cuda/common/scalar_gradients.h"
#include "cuda/plan.h"
#include "cuda/plan_shape.h"
#include "cuda/workspace.h"

namespace tilewise::cuda {
namespace {

// Part of L2 for Q, dO and the dQ sums of interleaved heads: 40 of the 50 MB of an H200 measured
// best.
constexpr double kBackwardL2Fraction = 0.8;

// The key tile that most rows attend to: the first one where the last row attends to most keys, and
// vice versa. In semaphore order (deterministic) a key tile waits for the one before it, which
// therefore has to start first.
LongestTile longest_key_tile(const Problem& p) {
  switch (longest_row_tile(p)) {
    case LongestTile::last:
      return LongestTile::first;
    case LongestTile::first:
      return p.deterministic == 0 ? LongestTile::last : LongestTile::none;
    case LongestTile::none:
      break;
  }
  return LongestTile::none;
}

}  // namespace

int64_t heads_in_l2(const Problem& p, const Plan& plan, const Gpu& gpu) {
  const int64_t bytes = element_bytes(dtypes_of(p).q);
  const int64_t rows = is_varlen_q(p) && p.max_seqlen_q == 0 && p.batch > 0
                           ? ceil_div(p.seqlen_q, p.batch)
                           : max_rows(p);
  const int64_t row_bytes = (p.head_dim + p.head_dim_v) * bytes + plan.head_dim * 8;
  const auto budget = static_cast<int64_t>(gpu.l2_bytes * kBackwardL2Fraction);
  return heads_within_budget(rows * row_bytes, budget);
}

Plan plan_backward_tiles(const Request& request, const KernelSet& kernel_set) {
  const Problem& p = request.problem;
  Plan plan;
  plan.kernel_set = &kernel_set;
  plan.form = backward_form(request, kernel_set);
  plan.architecture = kernel_set.architecture;
  plan.head_dim = kernel_set.head_dim;
  plan.tile_q = kernel_set.backward_tile.rows;
  plan.tile_k = kernel_set.backward_tile.keys;
  plan.order.tiles = static_cast<int32_t>(ceil_div(max_keys(p), plan.tile_k));
  plan.order.heads = static_cast<int32_t>(p.heads_kv);
  plan.order.sequences = static_cast<int32_t>(p.batch);
  plan.order.longest_tile = longest_key_tile(p);
  const Size tiles = max_tiles(is_varlen_k(p), p.seqlen_k, max_keys(p), p.batch, plan.tile_k);
  plan.blocks = (tiles * p.heads_kv).value();
  return plan;
}

void plan_backward_grid(Plan& plan, const Request& request) {
  const Problem& p = request.problem;
  plan.grid =
      max(max(plan.blocks, row_blocks(p, plan)), common::dbias_blocks(p, request.gradients));
}

void interleave_backward_heads(Plan& plan, const Problem& p, const Gpu& gpu) {
  // 8 heads reach 0.87 to 1.00 of the speed of 16.
  constexpr int64_t kMinBackwardHeadGroup = 16;
  if (plan.order.longest_tile != LongestTile::none)
    plan.order.interleave_heads(max(heads_in_l2(p, plan, gpu), kMinBackwardHeadGroup));
}

int64_t row_blocks(const Problem& p, const Plan& plan) {
  return p.batch == 0 ? 0 : p.heads_q * (PaddedRows{plan.tile_q}.count(p) / plan.tile_q);
}

FarRowRegions take_far_rows(Workspace& workspace, int64_t rows) {
  FarRowRegions regions;
  regions.flag = workspace.take<uint64_t>(1);
  regions.row_origin = workspace.take<float>(rows);
  regions.row_origin_low = workspace.take<float>(rows);
  return regions;
}

void take_shared_regions(BackwardWorkspace& regions, Workspace& workspace, const Request& request,
                         const Plan& plan) {
  const Problem& p = request.problem;
  const Gradients& g = request.gradients;
  const int64_t row_tiles = row_blocks(p, plan);
  if (p.check != 0) regions.report = workspace.take<IndexFault>(1);
  regions.index_copies = workspace.take<int32_t>(common::IndexCopies::entries_of_backward(p));
  if (is_varlen_k(p)) regions.table = workspace.take<TileOrder::Entry>(p.batch + 1);
  if (plan.nan_recompute != nullptr) {
    regions.key_flags = workspace.take<uint8_t>(plan.blocks);
    regions.row_flags = workspace.take<uint8_t>(row_tiles);
  }
  regions.row_delta = workspace.take<float>(row_tiles * plan.tile_q);
  if (g.dscale != nullptr) regions.dscale_partials = workspace.take<float>(row_tiles);
  if (g.dsinks != nullptr)
    regions.dsinks_partials =
        workspace.take<double>(Size(p.heads_q) * common::dsinks_row_blocks(p));
  regions.bytes = workspace.bytes();
}

}  // namespace tilewise::cuda
