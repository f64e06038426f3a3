// Detects the instruction sets that this build has and this machine can run. On x86-64 it uses
// CPUID and XGETBV directly: compilers' built-in checks do not know all of these (Clang 14 rejects
// "amx-bf16"), and none requests the AMX tile state from Linux.
#include "cpu/backend.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace tilewise::cpu {
namespace {

#if defined(__x86_64__)

struct Cpuid {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Cpuid cpuid(uint32_t leaf, uint32_t subleaf) {
  Cpuid r;
  __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
  return r;
}

bool is_vendor(uint32_t ebx, uint32_t edx) {
  const Cpuid vendor = cpuid(0, 0);
  return vendor.ebx == ebx && vendor.edx == edx;
}
bool is_intel() { return is_vendor(0x756e6547, 0x49656e69); }  // "GenuineI"
bool is_amd() { return is_vendor(0x68747541, 0x69746e65); }    // "Authenti"

// AMD's family: 0x17 Zen and Zen 2, 0x19 Zen 3 and Zen 4, 0x1a Zen 5.
uint32_t family() {
  const uint32_t eax = cpuid(1, 0).eax;
  const uint32_t base = eax >> 8 & 0xf;
  return base == 0xf ? base + (eax >> 20 & 0xff) : base;
}

constexpr bool bit(uint64_t word, int index) { return (word >> index & 1) != 0; }

// Register state that the operating system saves: bit 1 SSE, 2 AVX, 5-7 AVX-512, 17-18 AMX.
__attribute__((target("xsave"))) uint64_t saved_state() {
  return bit(cpuid(1, 0).ecx, 27) ? _xgetbv(0) : 0;
}

// Linux grants the 8 KB tile state to processes that request it (since 5.16).
bool request_tiles() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023;
  constexpr long kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

bool detect(Isa isa) {
  constexpr uint64_t kAvxState = 0x6;
  constexpr uint64_t kAvx512State = 0xe6;
  constexpr uint64_t kTileState = 0x60000;
  const Cpuid one = cpuid(1, 0);
  const Cpuid seven = cpuid(7, 0);
  const uint64_t state = saved_state();
  const bool avx2 = (state & kAvxState) == kAvxState && bit(one.ecx, 12) && bit(one.ecx, 28) &&
                    bit(one.ecx, 29) && bit(seven.ebx, 5);
  const bool avx512 = avx2 && (state & kAvx512State) == kAvx512State && bit(seven.ebx, 16) &&
                      bit(seven.ebx, 17) && bit(seven.ebx, 30) && bit(seven.ebx, 31);
  const bool avx512_bf16 = avx512 && bit(cpuid(7, 1).eax, 5);
  switch (isa) {
    case Isa::portable:
      return true;
    case Isa::neon:
    case Isa::neon_bf16:
      return false;
    case Isa::avx2:
      return avx2;
    case Isa::avx512:
      return avx512;
    case Isa::avx512_bf16:
      return avx512_bf16;
    case Isa::amx:
#if defined(TILEWISE_AMX_EMULATOR)
      return avx512_bf16;
#endif
      return avx512_bf16 && (state & kTileState) == kTileState && bit(seven.edx, 22) &&
             bit(seven.edx, 24) && request_tiles();
  }
  return false;
}

#elif defined(__aarch64__)

// Every 64-bit Arm processor that runs a general operating system has NEON.
bool detect(Isa isa) {
  if (isa == Isa::portable || isa == Isa::neon) return true;
#if defined(__linux__)
  constexpr unsigned long kBf16 = 1u << 14;  // HWCAP2_BF16, which older headers lack
  if (isa == Isa::neon_bf16) return (getauxval(AT_HWCAP2) & kBf16) != 0;
#endif
  return false;
}

#else

bool detect(Isa isa) { return isa == Isa::portable; }

#endif

}  // namespace

bool compiled(Isa isa) {
  switch (isa) {
#if defined(TILEWISE_ISA_NEON)
    case Isa::neon:
#endif
#if defined(TILEWISE_ISA_NEON_BF16)
    case Isa::neon_bf16:
#endif
#if defined(TILEWISE_ISA_AVX2)
    case Isa::avx2:
#endif
#if defined(TILEWISE_ISA_AVX512)
    case Isa::avx512:
#endif
#if defined(TILEWISE_ISA_AVX512_BF16)
    case Isa::avx512_bf16:
#endif
#if defined(TILEWISE_ISA_AMX)
    case Isa::amx:
#endif
    case Isa::portable:
      return true;
    default:
      return false;
  }
}

bool available(Isa isa) {
  static const std::array<bool, kIsaNames.size()> known = [] {
    std::array<bool, kIsaNames.size()> result{};
    for (size_t i = 0; i < result.size(); ++i) result[i] = detect(static_cast<Isa>(i));
    return result;
  }();
  return known[static_cast<size_t>(isa)];
}

Isa best_available() {
#if defined(__x86_64__)
  // On Intel's cores vdpbf16ps runs at half the FMA rate (32 instead of 64 flop per cycle), so
  // without AMX bf16 is faster via fp32 there.
  if (available(Isa::amx)) return Isa::amx;
  if (available(Isa::avx512_bf16) && !is_intel()) return Isa::avx512_bf16;
  if (available(Isa::avx512)) return Isa::avx512;
  if (available(Isa::avx2)) return Isa::avx2;
#endif
  if (available(Isa::neon_bf16)) return Isa::neon_bf16;
  if (available(Isa::neon)) return Isa::neon;
  return Isa::portable;
}

Core core() {
#if defined(__x86_64__)
  constexpr uint32_t kZen5 = 0x1a;
  static const Core known = !is_amd() ? Core::usual : family() < kZen5 ? Core::zen : Core::zen5;
  return known;
#else
  return Core::usual;
#endif
}

}  // namespace tilewise::cpu
