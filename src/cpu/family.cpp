#include "cpu/family.h"

namespace tilewise::cpu {
namespace {

template <Isa kIsa>
WhyNot why_not(const Request&, const Machine& machine);

template <Isa kIsa>
Plan plan_for(const Request& request, const Machine& machine) {
  return plan(request, kIsa, machine.threads);
}

template <Isa kIsa>
constexpr FamilyRow row(const char* name, DtypeSet gains, const char* requires_) {
  return {.facts = {.name = name,
                    .requires_ = requires_,
                    .dtypes = kFloatDtypes,
                    .passes = PassSet::of(Pass::forward, Pass::backward, Pass::jvp, Pass::second),
                    .max_head_dim = static_cast<int32_t>(kMaxHeadDim)},
          .isa = kIsa,
          .gains = gains,
          .why_not = why_not<kIsa>,
          .plan = plan_for<kIsa>,
          .launch = launch};
}

constexpr FamilyRow kFamilies[] = {
    row<Isa::portable>("cpu.portable", kFloatDtypes, "nothing: runs anywhere"),
    row<Isa::neon>("cpu.neon", kFloatDtypes, "NEON"),
    row<Isa::neon_bf16>("cpu.neon_bf16", DtypeSet::of(TILEWISE_BFLOAT16), "NEON with BF16"),
    row<Isa::avx2>("cpu.avx2", kFloatDtypes, "AVX2, FMA and F16C"),
    row<Isa::avx512>("cpu.avx512", kFloatDtypes, "AVX-512 F, BW, DQ and VL"),
    row<Isa::avx512_bf16>("cpu.avx512_bf16", DtypeSet::of(TILEWISE_BFLOAT16), "AVX512-BF16"),
    row<Isa::amx>("cpu.amx", kHalfDtypes, "AMX-TILE and AMX-BF16"),
};

static_assert([] {
  for (std::size_t i = 0; i < std::size(kFamilies); ++i) {
    if (kFamilies[i].isa != static_cast<Isa>(i)) return false;
  }
  return std::size(kFamilies) == kIsaNames.size();
}());

template <Isa kIsa>
WhyNot why_not(const Request&, const Machine& machine) {
  constexpr auto kIndex = static_cast<std::size_t>(kIsa);
  if (!machine.compiled.contains(kIsa))
    return {.text = "this build has no ", .detail = kIsaNames[kIndex]};
  if (!machine.runnable.contains(kIsa))
    return {.text = "this machine lacks ", .detail = kFamilies[kIndex].facts.requires_};
  return {};
}

}  // namespace

std::span<const FamilyRow> families() { return kFamilies; }

Machine this_machine() {
  Machine machine;
  for (std::size_t i = 0; i < kIsaNames.size(); ++i) {
    const auto isa = static_cast<Isa>(i);
    if (compiled(isa)) machine.compiled = machine.compiled.with(isa);
    if (available(isa)) machine.runnable = machine.runnable.with(isa);
  }
  // best_available skips AVX512-BF16 on cores where its dot product is slow.
  machine.slow_bf16_dot = usable(machine, Isa::avx512_bf16) && best_available() < Isa::avx512_bf16;
  return machine;
}

bool usable(const Machine& machine, Isa isa) {
  return machine.compiled.contains(isa) && machine.runnable.contains(isa);
}

bool worth_using(const Machine& machine, Isa isa) {
  return usable(machine, isa) && !(machine.slow_bf16_dot && isa == Isa::avx512_bf16);
}

Isa instruction_set(const Machine& machine) {
  if (machine.forced) return *machine.forced;
  for (std::size_t i = kIsaNames.size(); i-- > 0;) {
    if (worth_using(machine, static_cast<Isa>(i))) return static_cast<Isa>(i);
  }
  return Isa::portable;
}

}  // namespace tilewise::cpu
