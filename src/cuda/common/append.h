// Launch geometry of tilewise_append_kv on a GPU, which writes new keys and values into a cache,
// and applies rotary embedding to the new keys and to q.
#pragma once

#include "attention/index_fault.h"
#include "base/math.h"
#include "tilewise/tilewise.h"

namespace tilewise::cuda::common {

inline constexpr int kAppendThreads = 128;
inline constexpr int kAppendSharedBytes = 0;
inline constexpr int kAppendHeads = 4;  // per warp, of one row of q, k_new or v_new

struct AppendParams {
  tilewise_kv_append append{};          // validated; head_dim_v and kv_batch are set
  IndexRecord* index_record = nullptr;  // receives the first invalid index entry
};

TILEWISE_FN int64_t rotated_rows(const tilewise_kv_append& a) {
  if (a.q.data == nullptr || a.q_out.data == nullptr) return 0;
  return a.cu_seqlens_q != nullptr ? a.seqlen_q : a.batch * a.seqlen_q;
}
TILEWISE_FN int64_t appended_rows(const tilewise_kv_append& a) {
  if (a.k_new.data == nullptr) return 0;
  return a.cu_seqlens_new != nullptr ? a.seqlen_new : a.batch * a.seqlen_new;
}

// CTAs of the launch; 0: there is nothing to do.
inline int64_t append_blocks(const tilewise_kv_append& a) {
  const int64_t warps = rotated_rows(a) * ceil_div(a.heads_q, kAppendHeads) +
                        2 * appended_rows(a) * ceil_div(a.heads_kv, kAppendHeads);
  return ceil_div(warps, kAppendThreads / 32);
}

// append.cuh: template <class Element> append(AppendParams)

}  // namespace tilewise::cuda::common
