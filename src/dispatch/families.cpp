#include "dispatch/families.h"

#include "cuda/mma_sync/family.h"
#include "cuda/simt/family.h"
#include "cuda/tcgen05/family.h"
#include "cuda/wgmma/family.h"

namespace tilewise::dispatch {
namespace {

constexpr const cuda::FamilyRow* kCudaFamilies[] = {
    &cuda::simt::kFamily,
    &cuda::mma_sync::kFamily,
    &cuda::wgmma::kFamily,
    &cuda::tcgen05::kFamily,
};

}  // namespace

const Families& families() {
  static const Families all = {.cpu = cpu::families(), .cuda = kCudaFamilies};
  return all;
}

}  // namespace tilewise::dispatch
