// The launches of a forward, optional ones in brackets: [index check] [prepare] main [combine] [NaN
// recompute].
#include <numeric>

#include "cuda/common/kernels.h"
#include "cuda/index_errors.h"
#include "cuda/launch.h"
#include "cuda/plan.h"
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
  return params;
}

// Launches a persistent wgmma kernel: one CTA per SM, which computes many tiles.
void launch_persistent(const Problem& p, const Plan& plan, const ForwardParams& main,
                       int32_t* counter, int32_t* recompute_list) {
  constexpr int32_t kRowsOfWarpgroup = 64;
  TmaForwardParams params;
  static_cast<ForwardParams&>(params) = main;
  params.q = map_of_rows(p, p.q, p.head_dim, kRowsOfWarpgroup);
  int32_t box_rows = plan.tile_k;
  if (p.block_table != nullptr)
    params.page_box_rows = box_rows =
        static_cast<int32_t>(std::gcd(p.page_size, int64_t{plan.tile_k}));
  const auto map = p.block_table != nullptr ? map_of_pages : map_of_keys;
  params.k = map(p, p.k, p.head_dim, box_rows);
  params.v = map(p, p.v, p.head_dim_v, box_rows);
  params.num_tiles = static_cast<int32_t>(plan.stream_k.any() ? plan.stream_k.first : plan.blocks);
  params.tile_counter = counter;
  params.recompute_list = recompute_list;
  params.nan_may_leak = nan_may_leak(p);
  const int64_t sms = gpu(p.device_index).sm_count;
  const int64_t grid = plan.stream_k.any() ? sms : min(plan.blocks, sms);
  launch(plan.kernel_set->form(plan.form).tma_forward, grid, p.stream, params,
         counter != nullptr ? Start::dependent : Start::in_order);
}

// Launches a decode kernel that loads K and V by TMA, with one CTA per tile and split or chunk.
void launch_tma_decode(const Problem& p, const Plan& plan, const ForwardParams& main, Start start) {
  TmaForwardParams params;
  static_cast<ForwardParams&>(params) = main;
  const bool paged = plan.form == Form::tma_paged;
  const auto box_rows =
      static_cast<int32_t>(paged ? min<int64_t>(p.page_size, plan.tile_k) : plan.tile_k);
  const auto map = paged ? map_of_pages : map_of_keys;
  params.k = map(p, p.k, p.head_dim, box_rows);
  params.v = map(p, p.v, p.head_dim_v, box_rows);
  params.stages = plan.stages;
  params.k_tail = map(p, p.k, p.head_dim, kTailBoxRows);
  params.v_tail = map(p, p.v, p.head_dim_v, kTailBoxRows);
  const FormKernels& kernels = plan.kernel_set->form(plan.form);
  launch(plan.warps_per_tile > 1 ? kernels.tma_forward_warp_split : kernels.tma_forward,
         plan.blocks, p.stream, params, start, plan.cluster_size);
}

}  // namespace

void launch_forward(const Problem& p, const Plan& plan, void* workspace) {
  const ForwardWorkspace regions = forward_workspace(p, plan);
  if (p.check != 0) check_entries(p, regions.report.in<void>(workspace));

  common::PrepareParams prepared = common::prepare_forward(p);
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
  const Start start = prepare(prepared, p.stream) ? Start::in_order : Start::dependent;

  ForwardParams params = main_params(prepared.checked_problem, plan, regions, workspace);
  params.index_record = record;
  const FormKernels& kernels = plan.kernel_set->form(plan.form);
  if (plan.family == Family::wgmma)
    launch_persistent(p, plan, params, regions.tile_counter.in<int32_t>(workspace),
                      regions.recompute_list.in<int32_t>(workspace));
  else if (kernels.tma_forward.function != nullptr)
    launch_tma_decode(p, plan, params, start);
  else
    launch(plan.warps_per_tile > 1 ? kernels.forward_warp_split : kernels.forward, plan.blocks,
           p.stream, params, start, plan.cluster_size);
  if (needs_combine_kernel(plan)) {
    params.pdl_trigger = plan.combine_pdl_trigger;
    const auto kernel = common::tensor_kernels(p.dtype).combine(params);
    launch(kernel, common::combine_blocks(params), p.stream, params, Start::dependent);
  }
  if (plan.nan_recompute == nullptr) return;
  // The recompute has the same tiles, each with all of its keys.
  params.order.splits = 1;
  params.split_rule = {};
  launch(plan.nan_recompute->form(Form::general).forward,
         recompute_blocks(params.flags, plan.nan_recompute->forward_tile, p.device_index), p.stream,
         params, Start::dependent);
}

}  // namespace tilewise::cuda
