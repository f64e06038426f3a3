// Queries of float8_e4m3, as the kernels for 16-bit queries and float8 keys read them: a copy of q
// in a 16-bit type, which holds every number of float8_e4m3, and q_descale times k_descale as the
// factors of k. So only a kernel that gains by it has to read float8 queries, and the copy rounds
// nothing.
#pragma once

#include "attention/problem.h"
#include "attention/request.h"
#include "base/size.h"

namespace tilewise {

class WidenedQueries {
 public:
  // Whether a request has float8 queries. It is a forward: validation refuses the other passes.
  static bool possible(const Request& request) { return request.dtypes.q == TILEWISE_FLOAT8_E4M3; }

  explicit WidenedQueries(const Problem& p) : p_(p) {}

  // The size of the copies, a multiple of the alignment of a workspace.
  int64_t bytes() const {
    const int64_t factors = p_.q_descale != nullptr ? p_.batch * p_.heads_kv : 0;
    return round_up((factors_at() + factors * int64_t{sizeof(float)}).value(), kAlignment);
  }

  // The problem with the copies in place of q, q_descale and k_descale. They lie in `memory`, which
  // the backends fill (cpu/widen.h, cuda/common/widen.h); for planning it may be null.
  Problem problem(void* memory) const {
    const Dtypes dtypes = dtypes_of(p_);
    Problem wide = p_;
    wide.dtype = dtypes.widened_q();
    wide.out_dtype = dtypes.out == TILEWISE_FLOAT32 ? TILEWISE_OUT_FLOAT32 : TILEWISE_OUT_DEFAULT;
    wide.kv_float8 = 1;
    wide.q = {memory, p_.seqlen_q * p_.heads_q * columns(), p_.heads_q * columns(), columns()};
    if (p_.q_descale == nullptr) return wide;
    const auto factors =
        reinterpret_cast<uintptr_t>(memory) + static_cast<uintptr_t>(factors_at().value());
    wide.k_descale = reinterpret_cast<const float*>(factors);
    wide.k_descale_stride_batch = p_.heads_kv;
    wide.k_descale_stride_head = 1;
    wide.q_descale = nullptr;
    return wide;
  }

 private:
  static constexpr int64_t kAlignment = 64;

  // Rows of the copy start at multiples of 16 bytes: the fast forms of the CUDA kernels need that.
  int64_t columns() const { return round_up(p_.head_dim, 8); }
  Size factors_at() const {
    const Size rows = Size(total_rows(p_)) * p_.heads_q * columns() * int64_t{sizeof(uint16_t)};
    return round_up(rows.value(), kAlignment);
  }

  const Problem& p_;
};

}  // namespace tilewise
