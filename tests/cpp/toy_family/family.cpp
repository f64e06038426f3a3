#include "toy_family/family.h"

#include "cuda/plan.h"

namespace tilewise::cuda::toy {
namespace {

constexpr int32_t kTable = 1001;

int32_t table(const Gpu&) { return kTable; }

WhyNot why_not(const Request& request, const Gpu&) {
  if (request.problem.dropout_p > 0) return {.text = "it has no ", .detail = "dropout"};
  return {};
}

Plan plan(const Request& request, const Target& target) {
  const Problem& p = request.problem;
  const KernelSet* kernel_set =
      find_kernels(request, {.family = &kFamily, .table = kTable, .dtype = p.dtype}, target);
  if (kernel_set == nullptr) return {};
  Plan plan = plan_forward_tiles(p, *kernel_set, target.gpu);
  if (!plan.can_be_launched()) return plan;
  plan_forward_grid(plan, p, target.gpu);
  if (nan_may_leak(p)) plan.nan_recompute = find_recompute_kernels(request, target);
  finish_forward_plan(plan, p, target.gpu);
  return plan;
}

void launch(const Request& request, const Plan&, void* workspace) {
  last_launch = {.batch = request.problem.batch, .workspace = workspace};
}

}  // namespace

Launched last_launch;

constexpr FamilyRow kFamily = {
    .facts = {.name = "cuda.toy",
              .requires_ = "a toy GPU, sm_100",
              .dtypes = DtypeSet::of(TILEWISE_BFLOAT16),
              .passes = PassSet::of(Pass::forward),
              .max_head_dim = 64},
    .sm = {.first = 100, .last = 109},
    .table = table,
    .why_not = why_not,
    .plan = plan,
    .launch = launch,
};

constexpr KernelSet kKernels = {.family = &kFamily,
                                .architecture = kTable,
                                .dtype = TILEWISE_BFLOAT16,
                                .head_dim = 64,
                                .head_dim_v = 64,
                                .forward_tile = {.rows = 128, .keys = 128},
                                .backward_tile = {},
                                .plain = {},
                                .general = {}};

}  // namespace tilewise::cuda::toy
