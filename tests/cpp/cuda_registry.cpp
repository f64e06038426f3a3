// The kernels that this build registers for the host.
#include <gtest/gtest.h>

#include <set>
#include <tuple>

#include "cuda/arch/hopper.h"
#include "cuda/arch/limits.h"
#include "cuda/kernel_set.h"
#include "cuda/manifest.h"

namespace tilewise::cuda {
namespace {

// The smallest shared memory of the GPUs that use a tile table. simt runs on any GPU, so it may use
// only the 48 KB that need no opt-in.
int32_t least_shared_bytes(int32_t architecture) {
  int32_t least = architecture == 0 ? 48 * arch::kKilobyte : INT32_MAX;
  for (const arch::Limits& row : arch::kLimits) {
    const bool specific = architecture == arch::Sm90a::kTable && row.sm == architecture / 10;
    if (row.table == architecture || specific) least = min(least, row.shared_bytes);
  }
  return least;
}

template <class Params>
void expect_kernel(const Kernel<Params>& kernel, bool wanted, int32_t most_shared) {
  EXPECT_EQ(kernel.function != nullptr, wanted);
  if (!wanted) return;
  EXPECT_GE(kernel.threads, 32);
  EXPECT_LE(kernel.threads, 1024);
  EXPECT_EQ(kernel.threads % 32, 0);
  EXPECT_GE(kernel.shared_bytes, 0);
  EXPECT_LE(kernel.shared_bytes, most_shared);
}

TEST(CudaRegistry, KernelSetsHoldTheKernelsOfTheirTiles) {
  if (registry().kernel_sets.empty()) GTEST_SKIP() << "this build has no CUDA kernels";
  for (const KernelSet* kernel_set : registry().kernel_sets) {
    SCOPED_TRACE(testing::Message()
                 << "table " << kernel_set->architecture << " dtype " << kernel_set->dtype
                 << " tf32 " << kernel_set->tf32 << " head_dim " << kernel_set->head_dim);
    constexpr int32_t kReserved = 1024;  // per block except the first
    const int32_t most = least_shared_bytes(kernel_set->architecture);
    EXPECT_TRUE(kernel_set->has_forward() || kernel_set->has_backward());
    for (const KernelSet* cut : {kernel_set, kernel_set->few_rows}) {
      if (cut == nullptr) continue;
      const bool tma = kernel_set->family == Family::wgmma;
      const bool float8 = kernel_set->dtype == TILEWISE_FLOAT8_E4M3;
      for (const FormKernels* form : {&cut->plain, &cut->general}) {
        const bool decodes = cut->tma.tma_forward.function != nullptr;
        const bool built = !tma && !((float8 || decodes) && form == &cut->plain);
        expect_kernel(form->forward, cut->has_forward() && built, most);
        expect_kernel(form->tma_forward, cut->has_forward() && tma, most);
        expect_kernel(form->prepare, cut->has_backward(), most);
        expect_kernel(form->backward, cut->has_backward() && !tma, most);
        expect_kernel(form->tma_backward, cut->has_backward() && tma, most);
        expect_kernel(form->finish, cut->has_backward(), most);
      }
      const bool paged = kernel_set->family == Family::mma_sync &&
                         kernel_set->dtype != TILEWISE_FLOAT32 && !float8;
      expect_kernel(cut->paged.forward, cut->has_forward() && paged, most);
      const bool rings = paged && cut->tma.tma_forward.function != nullptr;
      const bool pages_have_readers = rings && has_warp_split(cut->head_dim, 2);
      expect_kernel(cut->paged.forward_warp_split, pages_have_readers, (most - kReserved) / 2);
      for (const FormKernels* form : {&cut->tma, &cut->tma_paged}) {
        const bool built = form->tma_forward.function != nullptr;
        const bool readers = built && has_warp_split(cut->head_dim, float8 ? 1 : 2);
        expect_kernel(form->tma_forward, built, most);
        expect_kernel(form->tma_forward_warp_split, readers, (most - kReserved) / 2);
        EXPECT_EQ(form->tma_forward_warp_split.threads,
                  readers ? kMaxWarpsPerTile * form->tma_forward.threads : 0);
      }
    }
  }
}

TEST(CudaRegistry, EveryKernelSetIsInTheManifestAndItsCodeIsKnown) {
  if (registry().kernel_sets.empty()) GTEST_SKIP() << "this build has no CUDA kernels";
  int32_t of_manifest = 0;
  for_each_instance([&](const KernelInstance&) { ++of_manifest; });
  EXPECT_LE(registry().kernel_sets.size(), static_cast<std::size_t>(of_manifest));
  std::set<std::tuple<int32_t, int32_t, bool, int32_t, int32_t>> seen;
  for (const KernelSet* kernel_set : registry().kernel_sets) {
    EXPECT_EQ(kernel_set->family == Family::simt, kernel_set->architecture == 0);
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
  const Code code = {0, kSass, kPtx};
  for (int32_t sm : {80, 86, 87, 89, 90, 100, 103, 110, 120}) EXPECT_TRUE(runs_on(code, sm)) << sm;
  for (int32_t sm : {60, 70, 75}) EXPECT_FALSE(runs_on(code, sm)) << sm;
  EXPECT_FALSE(runs_on({0, kSass, {}}, 100));
}

}  // namespace
}  // namespace tilewise::cuda
