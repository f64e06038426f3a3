// The launches of a forward: [index check] [prepare] main [combine] [second pass].
#include <numeric>

#include "cuda/common/kernels.h"
#include "cuda/index_errors.h"
#include "cuda/launch.h"
#include "cuda/plan.h"
#include "cuda/plan_shape.h"

namespace tilewise::cuda {
namespace {

ForwardParams main_params(const Problem& p, const Plan& plan, const ForwardPieces& pieces,
                          void* workspace) {
  ForwardParams params{};
  params.problem = p;
  params.order = plan.order;
  params.order.table = pieces.table.in<TileOrder::Entry>(workspace);
  params.packing = {plan.pack};
  params.group = static_cast<int32_t>(group_size(p));
  if (p.block_table != nullptr)
    params.page_size = static_cast<int32_t>(min<int64_t>(p.page_size, INT32_MAX));
  params.pack_reciprocal = static_cast<uint32_t>(ceil_div(int64_t{1} << 31, plan.pack));
  params.row_tile = plan.tile_q;
  params.key_tile = plan.tile_k;
  params.flags = {pieces.flags.in<uint8_t>(workspace), plan.order.splits, plan.tiles};
  params.rule = plan.rule;
  params.parts = plan.parts;
  params.most_keys = static_cast<int32_t>(min<int64_t>(most_keys(p), INT32_MAX));
  params.spread = plan.spread;
  params.shares = plan.shares;
  params.arrivals = pieces.arrivals.in<PartArrivals>(workspace);
  if (params.arrivals != nullptr) params.launch = PartArrivals::of_launch(number_of_launch());
  params.packed_rows = static_cast<int32_t>(packed_rows(p, plan));
  params.pitch = plan.pitch;
  params.shape_says_all = shape_says_all(p);
  params.merges_splits = plan.cluster > 1;
  params.next = plan.next;
  params.partial_out = pieces.partial_out.in<float>(workspace);
  params.partial_lse = pieces.partial_lse.in<float>(workspace);
  return params;
}

// A grid of as many blocks as the GPU runs at once, which share the work.
void launch_persistent(const Problem& p, const Plan& plan, const ForwardParams& main,
                       int32_t* counter, int32_t* before) {
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
  params.work = static_cast<int32_t>(plan.shares.any() ? plan.shares.first : plan.blocks);
  params.counter = counter;
  params.before = before;
  params.may_spoil = may_spoil(p);
  const int64_t all = gpu(p.device_index).multiprocessors;
  const int64_t grid = plan.shares.any() ? all : min(plan.blocks, all);
  launch(plan.unit->form(plan.form).tma_forward, grid, p.stream, params,
         counter != nullptr ? Start::dependent : Start::in_order);
}

// A block for each work, with maps of K and V.
void launch_boxes(const Problem& p, const Plan& plan, const ForwardParams& main, Start start) {
  TmaForwardParams params;
  static_cast<ForwardParams&>(params) = main;
  const bool paged = plan.form == Form::paged_boxes;
  const auto box_rows =
      static_cast<int32_t>(paged ? min<int64_t>(p.page_size, plan.tile_k) : plan.tile_k);
  const auto map = paged ? map_of_pages : map_of_keys;
  params.k = map(p, p.k, p.head_dim, box_rows);
  params.v = map(p, p.v, p.head_dim_v, box_rows);
  params.slots = plan.slots;
  params.k_end = map(p, p.k, p.head_dim, kRowsOfEndBox);
  params.v_end = map(p, p.v, p.head_dim_v, kRowsOfEndBox);
  const UnitKernels& kernels = plan.unit->form(plan.form);
  launch(plan.readers > 1 ? kernels.tma_forward_of_readers : kernels.tma_forward, plan.blocks,
         p.stream, params, start, plan.cluster);
}

}  // namespace

void forward(const Problem& p, const Plan& plan, void* workspace) {
  const DeviceScope scope(p.device_index);
  const ForwardPieces pieces = forward_pieces(p, plan);
  if (p.check != 0) check_entries(p, nullptr, pieces.report.in<void>(workspace));

  common::PrepareParams before = common::prepare_forward(p);
  if (pieces.table.bytes > 0) {
    before.order = {pieces.table.in<TileOrder::Entry>(workspace), common::OrderTask::Of::rows,
                    plan.tile_q, plan.pack};
  }
  IndexRecord* const record = shape_says_all(p) ? nullptr : index_record(p.device_index);
  common::fit(before, common::FitTask::forward(p, pieces.fit.in<int32_t>(workspace)), record);
  before.fills[0] = {pieces.counter.in<void>(workspace), pieces.counter.bytes};
  // Beside its blocks those of decoding would be spread unevenly: see next_start.
  const Start start = prepare(before, p.stream) ? Start::in_order : Start::dependent;

  ForwardParams params = main_params(before.fitted, plan, pieces, workspace);
  params.record = record;
  const UnitKernels& kernels = plan.unit->form(plan.form);
  if (plan.family == Family::wgmma)
    launch_persistent(p, plan, params, pieces.counter.in<int32_t>(workspace),
                      pieces.before.in<int32_t>(workspace));
  else if (kernels.tma_forward.function != nullptr)
    launch_boxes(p, plan, params, start);
  else
    launch(plan.readers > 1 ? kernels.forward_of_readers : kernels.forward, plan.blocks, p.stream,
           params, start, plan.cluster);
  if (leaves_results(plan)) {
    params.next = plan.next_of_merge;
    const auto kernel = common::tensor_kernels(p.dtype).combine(params);
    launch(kernel, common::combine_blocks(params), p.stream, params, Start::dependent);
  }
  if (plan.second == nullptr) return;
  // The same tiles, each with all of its keys.
  params.order.splits = 1;
  params.rule = {};
  launch(plan.second->form(Form::general).forward,
         second_blocks(params.flags, plan.second->forward_tile, p.device_index), p.stream, params,
         Start::dependent);
}

}  // namespace tilewise::cuda
