#include "plans.h"

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "described_cuda.h"
#include "dispatch/planner.h"

namespace fuzz {
namespace {

// GPUs that this machine need not have: one for each tile table but that of sm_86, and a small
// partition of a Hopper GPU.
const std::vector<tilewise::dispatch::Device>& gpus() {
  static const std::vector<tilewise::dispatch::Device> all = [] {
    std::vector<tilewise::dispatch::Device> gpus;
    for (const int32_t sm : {75, 80, 90, 120}) gpus.push_back(tilewise::gpu_with(sm));
    gpus.push_back(tilewise::gpu_with(90));
    gpus.back().gpu.sm_count = 16;
    gpus.back().gpu.memory_speed = 1000;
    return gpus;
  }();
  return all;
}

// Expects a consistent plan, or none, on each of the GPUs for a call that has been validated.
void plan_for_gpus(tilewise::Problem p, const tilewise_gradients* g) {
  using tilewise::Request;
  p.device = TILEWISE_CUDA;
  if (p.head_dim_v == 0) p.head_dim_v = p.head_dim;
  if (p.kv_batch == 0) p.kv_batch = p.batch;
  const Request request = g != nullptr ? Request(p, *g) : Request(p);
  for (const tilewise::dispatch::Device& gpu : gpus()) {
    const tilewise::dispatch::Decision decision = tilewise::dispatch::plan(request, gpu);
    if (decision.status != TILEWISE_OK) continue;
    const tilewise::cuda::Plan& gpu_plan = decision.cuda;
    expect(gpu_plan.workspace_bytes >= 0 && gpu_plan.blocks >= 0, "a plan of a negative size");
    expect(gpu_plan.splits >= 1 && gpu_plan.pack >= 1, "a plan without a split or a head");
  }
}

}  // namespace

void expect(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "%s; last error: \"%s\"\n", what, tilewise_last_error());
  std::abort();
}

void check_message(tilewise_status status) {
  expect((status == TILEWISE_OK) == (*tilewise_last_error() == '\0'),
         "the status and the error message contradict each other");
  expect(status != TILEWISE_INTERNAL && status != TILEWISE_WORKSPACE_TOO_SMALL,
         "a status that no input may cause here");
}

tilewise_status plan(const tilewise_attention& a, const tilewise_gradients* g,
                     tilewise_plan_info* info) {
  *info = {};
  info->struct_size = sizeof(*info);
  const tilewise_status status = tilewise_plan(&a, g, g != nullptr ? 1 : 0, info);
  check_message(status);
  if (status != TILEWISE_OK) return status;
  expect(info->workspace_bytes >= 0, "a negative workspace");
  plan_for_gpus(a, g);
  return status;
}

}  // namespace fuzz
