// The launches of a backward before and after its main kernels.
#include "cuda/common/kernels.h"
#include "cuda/index_errors.h"
#include "cuda/launch.h"
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
  params.row_delta = regions.row_delta.in<float>(workspace);
  params.dq_semaphores = regions.dq_semaphores.in<int32_t>(workspace);
  params.dscale_partials = regions.dscale_partials.in<float>(workspace);
  params.num_tiles = static_cast<int32_t>(plan.blocks);
  params.mask = mask_of(p);
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

// Launches the kernels that recompute flagged tiles, if the plan has any: those of the keys and
// those of the rows.
template <class Params>
void recompute_flagged(const BackwardLaunch& backward, Kernel<Params> FormKernels::* keys,
                       Kernel<Params> FormKernels::* rows, const Params& params) {
  const KernelSet* const kernel_set = backward.plan.nan_recompute;
  if (kernel_set == nullptr) return;
  const Problem& p = backward.problem;
  const FormKernels& recompute = kernel_set->form(Form::general);
  const auto blocks = [&](const Flags& flags) {
    return recompute_blocks(flags, kernel_set->backward_tile, p.device_index);
  };
  if (backward.keys())
    launch(recompute.*keys, blocks(params.key_flags), p.stream, params, Start::dependent);
  if (backward.rows())
    launch(recompute.*rows, blocks(params.row_flags), p.stream, params, Start::dependent);
}

}  // namespace

BackwardLaunch::BackwardLaunch(const Request& request, const Plan& a_plan,
                               const BackwardWorkspace& a_regions, void* a_workspace)
    : scope(request.problem.device_index),
      plan(a_plan),
      regions(a_regions),
      tangents(request.tangents),
      workspace(a_workspace) {
  if (request.problem.check != 0) check_entries(request, regions.report.in<void>(workspace));
  problem = prepare_all(request.problem, request.gradients, plan, regions, workspace);
  params = main_params(problem, request.gradients, plan, regions, workspace);
}

void set_far_rows(BackwardParams& params, const FarRowRegions& regions, void* workspace) {
  params.row_origin = regions.row_origin.in<float>(workspace);
  params.row_origin_low = regions.row_origin_low.in<float>(workspace);
  params.far_rows = regions.flag.in<uint64_t>(workspace);
  params.launch_id = next_launch_id();
}

void BackwardLaunch::finish() {
  const Problem& p = problem;
  const Gradients& g = params.gradients;
  recompute_flagged(*this, &FormKernels::backward, &FormKernels::finish, params);
  if (g.dbias != nullptr) {
    launch(common::tensor_kernels(dtypes_of(p).q).dbias, common::dbias_blocks(p, g), p.stream,
           common::DbiasParams{p, g, params.mask});
  }
  scalar_gradients();
}

void BackwardLaunch::launch_second(const SecondParams& second) const {
  const int64_t row_tiles = row_blocks(problem, plan);
  launch(kernels().second_prepare, row_tiles, problem.stream, second);
  if (keys()) launch(kernels().second, plan.blocks, problem.stream, second);
  if (rows()) launch(kernels().second_finish, row_tiles, problem.stream, second);
  recompute_flagged(*this, &FormKernels::second, &FormKernels::second_finish, second);
  const int64_t dbias_blocks = common::dbias_blocks(problem, params.gradients);
  if (dbias_blocks > 0) launch(kernels().second_dbias, dbias_blocks, problem.stream, second);
  scalar_gradients();
}

void BackwardLaunch::scalar_gradients() const {
  const Problem& p = problem;
  const Gradients& g = params.gradients;
  if (g.dsinks == nullptr && g.dscale == nullptr) return;
  common::ReduceParams sums;
  sums.dsinks = g.dsinks;
  sums.dscale = g.dscale;
  if (g.dsinks != nullptr) {
    common::DsinksParams partials;
    partials.problem = p;
    partials.gradients = g;
    partials.tangents = tangents;
    partials.partials = regions.dsinks_partials.in<double>(workspace);
    partials.row_blocks = common::dsinks_row_blocks(p);
    launch(common::tensor_kernels(dtypes_of(p).q).dsinks, common::dsinks_blocks(p), p.stream,
           partials);
    sums.dsinks_partials = partials.partials;
    sums.heads = p.heads_q;
    sums.row_blocks = partials.row_blocks;
  }
  sums.dscale_partials = regions.dscale_partials.in<float>(workspace);
  sums.dscale_count = regions.dscale_partials.bytes / static_cast<int64_t>(sizeof(float));
  launch(common::reduce_kernel(), common::reduce_blocks(sums), p.stream, sums);
}

}  // namespace tilewise::cuda
