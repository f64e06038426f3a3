#include "cpu/widen.h"

#include <array>

#include "attention/widened_queries.h"
#include "base/float8.h"
#include "cpu/work_items.h"

namespace tilewise::cpu {
namespace {

// The bits of all numbers of float8_e4m3 in a 16-bit type.
using Table = std::array<uint16_t, 256>;
template <class T>
Table table_of() {
  Table table{};
  for (std::size_t i = 0; i < table.size(); ++i)
    table[i] = from_float<T>(to_float(Float8{static_cast<uint8_t>(i)})).bits;
  return table;
}

}  // namespace

void widen_queries(const Problem& p, const Problem& wide, const Parallel& parallel) {
  const Table table = wide.dtype == TILEWISE_FLOAT16 ? table_of<Half>() : table_of<BFloat16>();
  const int64_t rows = total_rows(p);
  const int64_t row_size = p.heads_q * p.head_dim;
  run_items(parallel, rows, saturating_work(rows, row_size, 1), [&](int64_t, int64_t i) {
    const bool varlen = p.cu_seqlens_q != nullptr;
    const int64_t batch = varlen ? 0 : i / p.seqlen_q;
    const int64_t row = varlen ? i : i % p.seqlen_q;
    for (int64_t head = 0; head < p.heads_q; ++head) {
      const auto* const from = static_cast<const uint8_t*>(p.q.data) + batch * p.q.stride_batch +
                               row * p.q.stride_row + head * p.q.stride_head;
      auto* const to =
          static_cast<uint16_t*>(wide.q.data) + i * wide.q.stride_row + head * wide.q.stride_head;
      for (int64_t c = 0; c < p.head_dim; ++c) to[c] = table[from[c]];
    }
  });
  if (p.q_descale == nullptr) return;
  auto* const factors = const_cast<float*>(wide.k_descale);
  for (int64_t b = 0; b < p.batch; ++b)
    for (int64_t head = 0; head < p.heads_kv; ++head)
      factors[b * p.heads_kv + head] = score_descale(p, b, head);
}

}  // namespace tilewise::cpu
