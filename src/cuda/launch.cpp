// Launches and checks that forward, backward and cache share.
#include "cuda/launch.h"

#include <atomic>
#include <random>

#include "cuda/common/kernels.h"
#include "cuda/index_errors.h"

namespace tilewise::cuda {
namespace {

// Called before the check launches anything, which would become part of the captured graph.
void refuse_capture(Stream stream) {
  if (!is_captured(stream)) return;
  throw InvalidArgument(
      "check is 1 while the stream is being captured: it waits for the GPU, so it must be 0");
}

}  // namespace

void check_entries(const Request& request, void* report) {
  const Problem& p = request.problem;
  refuse_capture(p.stream);
  common::CheckParams params;
  params.problem = p;
  params.gradients = request.gradients;
  params.report = static_cast<IndexFault*>(report);
  launch(common::check_kernel(), common::kCheckBlocks, p.stream, params);
  IndexFault found{};
  read_back(&found, report, sizeof(found), p.stream);
  if (found.any()) throw InvalidArgument(sentence(found));
}

uint64_t next_launch_id() {
  static std::atomic<uint64_t> next{std::random_device{}() * uint64_t{0x9e3779b97f4a7c15}};
  return next.fetch_add(1, std::memory_order_relaxed);
}

bool prepare(common::PrepareParams& params, Stream stream) {
  const int64_t blocks = common::set_grid(params);
  launch(common::prepare_kernel(), blocks, stream, params);
  return blocks > 0;
}

int64_t recompute_blocks(const Flags& flags, const Tile& tile, int32_t device_index) {
  const int64_t at_once = int64_t{gpu(device_index).sm_count} * tile.blocks_per_sm;
  return min<int64_t>(flags.tiles, (at_once - 1) | 1);
}

void read_entries(int32_t* to, const int32_t* from, int64_t count, int32_t device_index,
                  void* stream) {
  const DeviceScope scope(device_index);
  refuse_capture(stream);
  read_back(to, from, count * static_cast<int64_t>(sizeof(int32_t)), stream);
}

void append_kv(const tilewise_kv_append& append) {
  const DeviceScope scope(append.device_index);
  common::AppendParams params;
  params.append = append;
  params.index_record = index_record(append.device_index);
  launch(common::tensor_kernels(append.dtype).append, common::append_blocks(append), append.stream,
         params);
}

void widen_queries(const Problem& p, const Problem& wide) {
  const DeviceScope scope(p.device_index);
  const common::WidenParams params = {.problem = p, .wide = wide};
  launch(common::widen_kernel(), common::widen_blocks(p), p.stream, params);
}

}  // namespace tilewise::cuda
