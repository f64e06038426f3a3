// The kernels that this build registers for the host.
#include <gtest/gtest.h>

#include <set>
#include <tuple>

#include "cuda/arch/limits.h"
#include "cuda/kernel_set.h"
#include "described_cuda.h"

namespace tilewise::cuda {
namespace {

// The smallest shared memory of the GPUs that use a tile table. simt runs on any GPU, so it may use
// only the 48 KB that need no opt-in.
int32_t min_shared_bytes(int32_t architecture) {
  int32_t smallest = architecture == 0 ? 48 * arch::kKilobyte : INT32_MAX;
  for (const arch::Limits& row : arch::kLimits) {
    const bool specific =
        arch::is_architecture_specific(architecture) && row.sm == architecture / 10;
    if (row.table == architecture || specific) smallest = min(smallest, row.shared_bytes);
  }
  return smallest;
}

template <class Params>
void expect_kernel(const Kernel<Params>& kernel, bool expected, int32_t max_shared) {
  EXPECT_EQ(kernel.function != nullptr, expected);
  if (!expected) return;
  EXPECT_GE(kernel.threads, 32);
  EXPECT_LE(kernel.threads, 1024);
  EXPECT_EQ(kernel.threads % 32, 0);
  EXPECT_GE(kernel.shared_bytes, 0);
  EXPECT_LE(kernel.shared_bytes, max_shared);
}

TEST(CudaRegistry, KernelSetsHoldTheKernelsOfTheirTiles) {
  if (registry().kernel_sets.empty()) GTEST_SKIP() << "this build has no CUDA kernels";
  for (const KernelSet* kernel_set : registry().kernel_sets) {
    SCOPED_TRACE(testing::Message()
                 << "table " << kernel_set->architecture << " dtype " << kernel_set->dtype
                 << " tf32 " << kernel_set->tf32 << " head_dim " << kernel_set->head_dim);
    constexpr int32_t kReserved = 1024;  // per block except the first
    const int32_t max_shared = min_shared_bytes(kernel_set->architecture);
    EXPECT_TRUE(kernel_set->has_forward() || kernel_set->has_backward());
    for (const KernelSet* set : {kernel_set, kernel_set->few_rows}) {
      if (set == nullptr) continue;
      const bool float8 = kernel_set->dtype == TILEWISE_FLOAT8_E4M3;
      const bool of_wgmma = kernel_set->family == &wgmma::kFamily;
      const bool plain_only = kernel_set->family == &tcgen05::kFamily || (of_wgmma && float8);
      const bool tma = of_wgmma || plain_only;
      expect_kernel(set->plain.transpose_values, set->has_forward() && of_wgmma && float8,
                    max_shared);
      for (const FormKernels* form : {&set->plain, &set->general}) {
        if (plain_only && form == &set->general) continue;
        const bool is_decode = set->tma.tma_forward.function != nullptr;
        const bool built = !tma && !((float8 || is_decode) && form == &set->plain);
        expect_kernel(form->forward, set->has_forward() && built, max_shared);
        expect_kernel(form->tma_forward, set->has_forward() && tma, max_shared);
        // The general backward of wgmma has the small tile alone at D96 and D128.
        const bool small_alone = tma && form == &set->general && set == kernel_set &&
                                 (set->head_dim == 96 || set->head_dim == 128);
        const bool has_backward = set->has_backward() && !small_alone;
        expect_kernel(form->prepare, has_backward, max_shared);
        expect_kernel(form->backward, has_backward && !tma, max_shared);
        expect_kernel(form->tma_backward, has_backward && tma, max_shared);
        expect_kernel(form->finish, has_backward, max_shared);
      }
      const bool on_tensor_cores = kernel_set->family == &mma_sync::kFamily && set == kernel_set &&
                                   kernel_set->architecture >= 80 &&
                                   kernel_set->dtype != TILEWISE_FLOAT32 && !float8 &&
                                   (set->head_dim == 64 || set->head_dim == 128);
      const bool has_tangents = on_tensor_cores || kernel_set->family == &simt::kFamily;
      const FormKernels& tangents = set->of_tangents().plain;
      expect_kernel(tangents.jvp, has_tangents, max_shared);
      const int32_t of_second = on_tensor_cores ? max_shared : 64 * 1024;  // simt needs sm_75
      expect_kernel(tangents.second_prepare, has_tangents, of_second);
      expect_kernel(tangents.second, has_tangents, of_second);
      expect_kernel(tangents.second_finish, has_tangents, of_second);
      const bool paged = kernel_set->family == &mma_sync::kFamily &&
                         kernel_set->dtype != TILEWISE_FLOAT32 && !float8;
      expect_kernel(set->paged.forward, set->has_forward() && paged, max_shared);
      const bool warp_pipelines = paged && set->tma.tma_forward.function != nullptr;
      const bool paged_warp_split = warp_pipelines && has_warp_split(set->head_dim, 2);
      expect_kernel(set->paged.forward_warp_split, paged_warp_split, (max_shared - kReserved) / 2);
      for (const FormKernels* form : {&set->tma, &set->tma_paged}) {
        const bool built = form->tma_forward.function != nullptr;
        const bool warp_split = built && has_warp_split(set->head_dim, float8 ? 1 : 2);
        expect_kernel(form->tma_forward, built, max_shared);
        expect_kernel(form->tma_forward_warp_split, warp_split, (max_shared - kReserved) / 2);
        EXPECT_EQ(form->tma_forward_warp_split.threads,
                  warp_split ? kMaxWarpsPerTile * form->tma_forward.threads : 0);
      }
    }
  }
}

TEST(CudaRegistry, EveryKernelSetIsListedAndItsCodeIsKnown) {
  if (registry().kernel_sets.empty()) GTEST_SKIP() << "this build has no CUDA kernels";
  int32_t instances = 0;
  for_each_instance([&](const FamilyRow&, const KernelInstance&) { ++instances; });
  EXPECT_LE(registry().kernel_sets.size(), static_cast<std::size_t>(instances));
  std::set<std::tuple<int32_t, int32_t, bool, int32_t, int32_t>> seen;
  for (const KernelSet* kernel_set : registry().kernel_sets) {
    EXPECT_EQ(kernel_set->family == &simt::kFamily, kernel_set->architecture == 0);
    EXPECT_TRUE(seen.insert({kernel_set->architecture, kernel_set->dtype, kernel_set->tf32,
                             kernel_set->head_dim, kernel_set->head_dim_v})
                    .second);
    bool known = false;
    for (const Code& code : registry().code) {
      if (code.architecture != kernel_set->architecture) continue;
      known = registry().emulated || !code.sass.empty() || !code.ptx.empty();
    }
    EXPECT_TRUE(known) << kernel_set->architecture;
  }
}

// SASS runs on GPUs of its own major version from its own minor version on, PTX on everything
// newer.
TEST(CudaRegistry, CodeRunsWhereTheDriverCanLoadIt) {
  static constexpr int32_t kSass[] = {80, 90};
  static constexpr int32_t kPtx[] = {100};
  const Code code = {.architecture = 0, .sass = kSass, .ptx = kPtx};
  for (int32_t sm : {80, 86, 87, 89, 90, 100, 103, 110, 120}) EXPECT_TRUE(runs_on(code, sm)) << sm;
  for (int32_t sm : {60, 70, 75}) EXPECT_FALSE(runs_on(code, sm)) << sm;
  EXPECT_FALSE(runs_on({.architecture = 0, .sass = kSass, .ptx = {}}, 100));
}

}  // namespace
}  // namespace tilewise::cuda
