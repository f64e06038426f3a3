// The facts of a kernel family: a set of kernels for one kind of instruction. Every family exports
// a row from its folder, and src/dispatch/families.cpp lists the rows.
#pragma once

#include "attention/request.h"

namespace tilewise {

// A set of small numbers (dtypes, passes), one bit each.
template <class T>
class BitSet {
 public:
  template <class... Each>
  static constexpr BitSet of(Each... each) {
    return BitSet((0u | ... | (1u << static_cast<uint32_t>(each))));
  }
  constexpr bool contains(T value) const {
    const auto bit = static_cast<uint32_t>(value);
    return bit < 32 && ((bits_ >> bit) & 1u) != 0;
  }

 private:
  explicit constexpr BitSet(uint32_t bits) : bits_(bits) {}
  uint32_t bits_;
};
using DtypeSet = BitSet<int32_t>;
using PassSet = BitSet<Pass>;

inline constexpr DtypeSet kHalfDtypes = DtypeSet::of(TILEWISE_FLOAT16, TILEWISE_BFLOAT16);
inline constexpr DtypeSet kFloatDtypes =
    DtypeSet::of(TILEWISE_FLOAT32, TILEWISE_FLOAT16, TILEWISE_BFLOAT16);

// A row of the support matrix. Rows of CPU families (cpu/family.h) and of GPU families
// (cuda/family.h) add what their devices need.
struct FamilyFacts {
  const char* name;       // kernel names start with it
  const char* requires_;  // the hardware that it needs
  DtypeSet dtypes;        // of q
  PassSet passes;
  DtypeSet tangent_dtypes = kFloatDtypes;  // those of `dtypes` for Pass::jvp and Pass::second
  int32_t max_head_dim;                    // of q and k, and of v
  int32_t max_forward_head_dim = 0;        // if larger: of a forward with q of 16 bits
  int32_t max_backward_head_dim = 0;       // if larger: of a backward with q of 16 bits
  int32_t max_float8_head_dim = 0;         // of q of float8, which has only forwards

  constexpr bool has(Pass pass, int32_t dtype) const {
    const bool has_tangents = pass == Pass::jvp || pass == Pass::second;
    return dtypes.contains(dtype) && passes.contains(pass) &&
           (pass == Pass::forward || dtype != TILEWISE_FLOAT8_E4M3) &&
           (!has_tangents || tangent_dtypes.contains(dtype));
  }
  constexpr int32_t max_head_dim_of(Pass pass, int32_t dtype) const {
    if (dtype == TILEWISE_FLOAT8_E4M3) return max_float8_head_dim;
    if (!kHalfDtypes.contains(dtype)) return max_head_dim;
    if (pass == Pass::forward) return max(max_head_dim, max_forward_head_dim);
    if (pass == Pass::backward) return max(max_head_dim, max_backward_head_dim);
    return max_head_dim;
  }
  constexpr bool computes(const Request& request) const {
    const Problem& p = request.problem;
    return has(request.pass, request.dtypes.q) &&
           max(p.head_dim, p.head_dim_v) <= max_head_dim_of(request.pass, request.dtypes.q);
  }
};

// Why a family does not serve a request: `text`, continued by `detail`. These are literals, because
// the plan of a launch allocates nothing.
struct WhyNot {
  const char* text = nullptr;  // null: it serves the request
  const char* detail = "";
  bool would_be_faster = true;  // if it served the request

  constexpr explicit operator bool() const { return text != nullptr; }
};

}  // namespace tilewise
