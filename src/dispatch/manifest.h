// The support matrix: every kernel family of the library, one row each. The planner, the C ABI, the
// Python package, the documentation and the tests take it from here.
#pragma once

#include <array>
#include <cstdint>

#include "attention/problem.h"
#include "cpu/backend.h"
#include "cuda/backend.h"
#include "cuda/manifest.h"
#include "tilewise/tilewise.h"

namespace tilewise::dispatch {

// A set of dtypes, one bit each.
class Dtypes {
 public:
  template <class... Each>
  static constexpr Dtypes of(Each... each) {
    return Dtypes((0u | ... | (1u << static_cast<uint32_t>(each))));
  }
  constexpr bool contains(int32_t dtype) const {
    return dtype >= 0 && dtype < 32 && ((bits_ >> dtype) & 1u) != 0;
  }

 private:
  explicit constexpr Dtypes(uint32_t bits) : bits_(bits) {}
  uint32_t bits_;
};

// Compute capabilities of a CUDA family as major * 10 + minor, both ends included.
struct SmRange {
  int32_t first = 0;
  int32_t last = 0;
};

struct Family {
  const char* name;
  tilewise_device device;
  cpu::Isa isa;  // CPU families only
  SmRange sm;    // CUDA families only
  cuda::Family cuda;
  Dtypes dtypes;  // dtypes that it computes
  Dtypes gains;   // dtypes for which it is faster than the previous family on the same device
  bool forward;
  bool backward;
  int32_t max_head_dim;  // of q and k, and of v
  const char* requires_;
};

inline constexpr Dtypes kHalfDtypes = Dtypes::of(TILEWISE_FLOAT16, TILEWISE_BFLOAT16);
inline constexpr Dtypes kCpuDtypes =
    Dtypes::of(TILEWISE_FLOAT32, TILEWISE_FLOAT16, TILEWISE_BFLOAT16);

constexpr Family cpu_family(const char* name, cpu::Isa isa, Dtypes gains, const char* requires_) {
  return {name,       TILEWISE_CPU, isa,  {},   {},
          kCpuDtypes, gains,        true, true, static_cast<int32_t>(kMaxHeadDim),
          requires_};
}

// The problems that a CUDA family can run also depend on the tile tables (cuda/arch) and on the
// kernels in the build, which the planner looks up.
constexpr Family cuda_family(const char* name, cuda::Family family, int32_t first_sm,
                             int32_t max_head_dim, const char* requires_) {
  constexpr int32_t kAnyLater = 999;
  return {name,   TILEWISE_CUDA, cpu::Isa::portable, {first_sm, kAnyLater},
          family, kCpuDtypes,    kCpuDtypes,         true,
          true,   max_head_dim,  requires_};
}

constexpr Family wgmma_family() {
  Family family = cuda_family("cuda.wgmma", cuda::Family::wgmma, 90, cuda::kWgmmaHeadDims.back().qk,
                              "Hopper, sm_90");
  family.sm.last = 90;
  family.dtypes = family.gains = kHalfDtypes;
  return family;
}

// On each device, slower families come first.
inline constexpr std::array kManifest = {
    cpu_family("cpu.portable", cpu::Isa::portable, kCpuDtypes, "nothing: runs anywhere"),
    cpu_family("cpu.avx2", cpu::Isa::avx2, kCpuDtypes, "AVX2, FMA and F16C"),
    cpu_family("cpu.avx512", cpu::Isa::avx512, kCpuDtypes, "AVX-512 F, BW, DQ and VL"),
    cpu_family("cpu.avx512_bf16", cpu::Isa::avx512_bf16, Dtypes::of(TILEWISE_BFLOAT16),
               "AVX512-BF16"),
    cpu_family("cpu.amx", cpu::Isa::amx, kHalfDtypes, "AMX-TILE and AMX-BF16"),
    cuda_family("cuda.simt", cuda::Family::simt, 60, cuda::kSimtHeadDims.back(),
                "an NVIDIA GPU, sm_60"),
    cuda_family("cuda.mma_sync", cuda::Family::mma_sync, 75, cuda::kHalfHeadDims.back(),
                "tensor cores: sm_75 for float16, sm_80 for bfloat16 and float32"),
    wgmma_family(),
};

// The row of a CPU family; the manifest lists them in the order of the enumeration.
constexpr const Family& cpu_row(cpu::Isa isa) { return kManifest[static_cast<std::size_t>(isa)]; }

static_assert([] {
  for (std::size_t i = 0; i < cpu::kIsaNames.size(); ++i) {
    if (kManifest[i].device != TILEWISE_CPU || kManifest[i].isa != static_cast<cpu::Isa>(i))
      return false;
  }
  return true;
}());

}  // namespace tilewise::dispatch
