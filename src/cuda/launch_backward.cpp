// The launches of a backward, optional ones in brackets: [index check] [prepare] row statistics,
// keys (dK, dV), rows (dQ) [NaN recompute] [dbias] [dsinks] [sums of dsinks and dscale].
#include "cuda/common/kernels.h"
#include "cuda/index_errors.h"
#include "cuda/launch.h"
#include "cuda/plan.h"
#include "cuda/plan_shape.h"

namespace tilewise::cuda {
namespace {

BackwardParams main_params(const Problem& p, const Gradients& g, const Plan& plan,
                           const BackwardWorkspace& regions, void* workspace) {
  BackwardParams params{};
  params.problem = p;
  params.gradients = g;
  params.order = plan.order;
  params.order.table = regions.table.in<TileOrder::Entry>(workspace);
  params.key_tile = plan.tile_k;
  params.rows = {plan.tile_q};
  params.key_flags = {regions.key_flags.in<uint8_t>(workspace), 1,
                      static_cast<int32_t>(plan.blocks)};
  params.row_flags = {regions.row_flags.in<uint8_t>(workspace), 1,
                      static_cast<int32_t>(row_blocks(p, plan))};
  params.row_lse = regions.row_lse.in<float>(workspace);
  params.row_delta = regions.row_delta.in<float>(workspace);
  params.row_origin = regions.row_origin.in<float>(workspace);
  params.row_origin_low = regions.row_origin_low.in<float>(workspace);
  params.far_rows = regions.far_rows.in<uint64_t>(workspace);
  params.launch_id = next_launch_id();
  params.dq_sum = regions.dq_sum.in<float>(workspace);
  params.dq_semaphores = regions.dq_semaphores.in<int32_t>(workspace);
  params.dscale_partials = regions.dscale_partials.in<float>(workspace);
  params.descriptors = regions.descriptors.in<TileDescriptor>(workspace);
  params.num_tiles = static_cast<int32_t>(plan.blocks);
  params.tile_counter = regions.tile_counter.in<int32_t>(workspace);
  return params;
}

// Launches the prepare kernel. Returns the problem for the kernels that follow.
Problem prepare_all(const Problem& p, const Gradients& g, const Plan& plan,
                    const BackwardWorkspace& regions, void* workspace) {
  common::PrepareParams prepared = common::prepare_backward(p, g);
  if (is_varlen_k(p)) {
    prepared.order = {regions.table.in<TileOrder::Entry>(workspace),
                      common::OrderTask::Counts::keys, plan.tile_k, 1};
  }
  common::set_index_copies(
      prepared, common::IndexCopies::backward(p, regions.index_copies.in<int32_t>(workspace)),
      has_uniform_sequences(p) ? nullptr : index_record(p.device_index));
  prepared.fills[0] = {regions.dq_semaphores.in<void>(workspace), regions.dq_semaphores.bytes};
  prepare(prepared, p.stream);
  return prepared.checked_problem;
}

// Launches a kernel for tile descriptors and row statistics, and one for dK, dV and the dQ sums.
void launch_wgmma(const Problem& p, const Gradients& g, const Plan& plan,
                  const BackwardParams& main) {
  const int32_t cluster = plan.kernel_set->backward_tile.cluster_size;
  TmaBackwardParams params;
  static_cast<BackwardParams&>(params) = main;
  params.q = map_of_rows(p, p.q, p.head_dim, plan.tile_q);
  params.dout = map_of_rows(p, g.dout, p.head_dim_v, plan.tile_q);
  params.k = map_of_keys(p, p.k, p.head_dim, plan.tile_k / cluster);
  params.v = map_of_keys(p, p.v, p.head_dim_v, plan.tile_k / cluster);
  const FormKernels& kernels = plan.kernel_set->form(plan.form);
  const int64_t descriptor_ctas = ceil_div(plan.blocks * cluster, kernels.prepare.threads);
  launch(kernels.prepare, descriptor_ctas + row_blocks(p, plan) * plan.kernel_set->prepare_splits,
         p.stream, main);
  const int64_t grid = params.tile_counter == nullptr
                           ? plan.blocks * cluster
                           : min<int64_t>(plan.blocks, gpu(p.device_index).sm_count);
  launch(kernels.tma_backward, grid, p.stream, params, Start::dependent);
}

// Computes dK, dV and dQ.
void main_gradients(const Problem& p, const Gradients& g, const Plan& plan,
                    const BackwardParams& params) {
  const bool keys = g.dk.data != nullptr || g.dv.data != nullptr;
  const bool rows = g.dq.data != nullptr || g.dscale != nullptr;
  const int64_t row_tiles = row_blocks(p, plan);
  const FormKernels& kernels = plan.kernel_set->form(plan.form);
  // dQ is accumulated by the kernel of the keys, except in simt, whose passes are separate.
  const bool separate_passes = plan.family == Family::simt;
  if (!keys && !rows) return;
  if (plan.family == Family::wgmma) {
    launch_wgmma(p, g, plan, params);
  } else if (keys || !separate_passes) {
    launch(kernels.prepare, row_tiles, p.stream, params);
    launch(kernels.backward, plan.blocks, p.stream, params);
  }
  const bool dependent = plan.family == Family::wgmma;
  if (rows) {
    launch(kernels.finish, row_tiles, p.stream, params,
           dependent ? Start::dependent : Start::in_order);
  }
  if (plan.nan_recompute == nullptr) return;
  const FormKernels& recompute = plan.nan_recompute->form(Form::general);
  const auto blocks = [&](const Flags& flags) {
    return recompute_blocks(flags, plan.nan_recompute->backward_tile, p.device_index);
  };
  if (keys) {
    launch(recompute.backward, blocks(params.key_flags), p.stream, params, Start::dependent);
  }
  if (rows) launch(recompute.finish, blocks(params.row_flags), p.stream, params, Start::dependent);
}

// Computes dsinks and dscale.
void scalar_gradients(const Problem& p, const Gradients& g, const BackwardWorkspace& regions,
                      void* workspace) {
  common::ReduceParams params;
  params.dsinks = g.dsinks;
  params.dscale = g.dscale;
  if (g.dsinks != nullptr) {
    common::DsinksParams partials;
    partials.problem = p;
    partials.gradients = g;
    partials.partials = regions.dsinks_partials.in<double>(workspace);
    partials.row_blocks = common::dsinks_row_blocks(p);
    launch(common::tensor_kernels(p.dtype).dsinks, common::dsinks_blocks(p), p.stream, partials);
    params.dsinks_partials = partials.partials;
    params.heads = p.heads_q;
    params.row_blocks = partials.row_blocks;
  }
  params.dscale_partials = regions.dscale_partials.in<float>(workspace);
  params.dscale_count = regions.dscale_partials.bytes / static_cast<int64_t>(sizeof(float));
  launch(common::reduce_kernel(), common::reduce_blocks(params), p.stream, params);
}

}  // namespace

void launch_backward(const Request& request, const Plan& plan, void* workspace) {
  const Problem& given = request.problem;
  const Gradients& g = request.gradients;
  const BackwardWorkspace regions = backward_workspace(given, g, plan);
  if (given.check != 0) check_entries(request, regions.report.in<void>(workspace));
  const Problem p = prepare_all(given, g, plan, regions, workspace);
  main_gradients(p, g, plan, main_params(p, g, plan, regions, workspace));
  if (g.dbias != nullptr) {
    launch(common::tensor_kernels(p.dtype).dbias, common::dbias_blocks(p, g), p.stream,
           common::DbiasParams{p, g});
  }
  if (g.dsinks != nullptr || g.dscale != nullptr) scalar_gradients(p, g, regions, workspace);
}

}  // namespace tilewise::cuda
