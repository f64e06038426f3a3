// The launches of a forward before and after its main kernel.
#include "cuda/common/kernels.h"
#include "cuda/index_errors.h"
#include "cuda/launch.h"
#include "cuda/plan_shape.h"

namespace tilewise::cuda {
namespace {

ForwardParams main_params(const Problem& p, const Plan& plan, const ForwardWorkspace& regions,
                          void* workspace) {
  ForwardParams params{};
  params.problem = p;
  params.order = plan.order;
  params.order.table = regions.table.in<TileOrder::Entry>(workspace);
  params.packing = {plan.pack};
  params.group = static_cast<int32_t>(group_size(p));
  if (p.block_table != nullptr)
    params.page_size = static_cast<int32_t>(min<int64_t>(p.page_size, INT32_MAX));
  params.pack_reciprocal = static_cast<uint32_t>(ceil_div(int64_t{1} << 31, plan.pack));
  params.row_tile = plan.tile_q;
  params.key_tile = plan.tile_k;
  params.flags = {regions.flags.in<uint8_t>(workspace), plan.order.splits, plan.tiles};
  params.split_rule = plan.split_rule;
  params.chunks = plan.chunks;
  params.max_keys = static_cast<int32_t>(min<int64_t>(max_keys(p), INT32_MAX));
  params.placement = plan.placement;
  params.stream_k = plan.stream_k;
  params.arrivals = regions.arrivals.in<ChunkArrivals>(workspace);
  if (params.arrivals != nullptr) params.launch_id = ChunkArrivals::of_launch(next_launch_id());
  params.packed_rows = static_cast<int32_t>(packed_rows(p, plan));
  params.partial_stride = plan.partial_stride;
  params.has_uniform_sequences = has_uniform_sequences(p);
  params.cluster_combines = plan.cluster_size > 1;
  params.pdl_trigger = plan.pdl_trigger;
  params.partial_out = regions.partial_out.in<float>(workspace);
  params.partial_lse = regions.partial_lse.in<float>(workspace);
  params.mask = mask_of(p);
  return params;
}

// Computes the flagged tiles again, each with all of its keys.
template <class Params>
void recompute(const Kernel<Params>& kernel, const ForwardLaunch& forward, const Params& params) {
  const Tile& tile = forward.plan.nan_recompute->forward_tile;
  launch(kernel, recompute_blocks(params.flags, tile, forward.problem.device_index),
         forward.problem.stream, params, Start::dependent);
}

}  // namespace

ForwardLaunch::ForwardLaunch(const Problem& p, const Plan& a_plan, void* workspace)
    : ForwardLaunch(p, a_plan, workspace, common::prepare_forward(p)) {}

ForwardLaunch::ForwardLaunch(const Problem& p, const Plan& a_plan, void* workspace,
                             common::PrepareParams prepared)
    : scope(p.device_index), problem(p), plan(a_plan), regions(forward_workspace(p, a_plan)) {
  if (p.check != 0) check_entries(p, regions.report.in<void>(workspace));
  if (regions.table.bytes > 0) {
    prepared.order = {regions.table.in<TileOrder::Entry>(workspace),
                      common::OrderTask::Counts::rows, plan.tile_q, plan.pack};
  }
  IndexRecord* const record = has_uniform_sequences(p) ? nullptr : index_record(p.device_index);
  common::set_index_copies(
      prepared, common::IndexCopies::forward(p, regions.index_copies.in<int32_t>(workspace)),
      record);
  prepared.fills[0] = {regions.tile_counter.in<void>(workspace), regions.tile_counter.bytes};
  // After a prepare kernel the main kernel starts in order: beside the CTAs of the former, those of
  // a decode would spread unevenly over the SMs (choose_pdl_trigger).
  start = prepare(prepared, p.stream) ? Start::in_order : Start::dependent;
  params = main_params(prepared.checked_problem, plan, regions, workspace);
  params.index_record = record;
}

void ForwardLaunch::finish() {
  if (needs_combine_kernel(plan)) {
    params.pdl_trigger = plan.combine_pdl_trigger;
    const auto kernel = common::tensor_kernels(dtypes_of(problem).out).combine(params);
    launch(kernel, common::combine_blocks(params), problem.stream, params, Start::dependent);
  }
  if (plan.nan_recompute == nullptr) return;
  params.order.splits = 1;
  params.split_rule = {};
  recompute(plan.nan_recompute->form(Form::general).forward, *this, params);
}

void launch_jvp(const Request& request, const Plan& plan, void* workspace) {
  const Problem& p = request.problem;
  const ForwardLaunch jvp(p, plan, workspace, common::prepare_jvp(p, request.tangents));
  const JvpParams params{jvp.params, request.tangents};
  launch(jvp.kernels().jvp, plan.blocks, p.stream, params, jvp.start);
  if (plan.nan_recompute != nullptr)
    recompute(plan.nan_recompute->form(Form::general).jvp, jvp, params);
}

}  // namespace tilewise::cuda
