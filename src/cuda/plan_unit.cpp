// Which unit and which form serve a problem.
#include "cuda/arch/limits.h"
#include "cuda/plan.h"
#include "cuda/plan_shape.h"

namespace tilewise::cuda {
namespace {

constexpr int64_t kAlignment = 16;

bool fits(const Kernel<ForwardParams>& kernel, const Gpu& gpu) {
  return kernel.shared_bytes <= gpu.shared_bytes;
}
bool fits(const Kernel<BackwardParams>& kernel, const Gpu& gpu) {
  return kernel.shared_bytes <= gpu.shared_bytes;
}

bool serves_forward(const UnitTable& unit, const Gpu& gpu) {
  return unit.has_forward() && fits(unit.plain.forward, gpu) && fits(unit.general.forward, gpu);
}

bool serves_backward(const UnitTable& unit, const Gpu& gpu) {
  for (const UnitKernels* form : {&unit.plain, &unit.general}) {
    if (!fits(form->prepare, gpu) || !fits(form->backward, gpu) || !fits(form->finish, gpu))
      return false;
  }
  return unit.has_backward();
}

using Serves = bool (*)(const UnitTable&, const Gpu&);

// The smallest head-dim tile of a tile table that holds the problem.
const UnitTable* smallest(const Problem& p, Family family, int32_t architecture, bool tf32,
                          const Gpu& gpu, const Inventory& inside, Serves serves) {
  const UnitTable* best = nullptr;
  for (const UnitTable* unit : inside.units) {
    if (unit->family != family || unit->architecture != architecture || unit->dtype != p.dtype ||
        unit->tf32 != tf32)
      continue;
    if (unit->head_dim < max(p.head_dim, p.head_dim_v) || !serves(*unit, gpu)) continue;
    if (best == nullptr || unit->head_dim < best->head_dim) best = unit;
  }
  return best;
}

const UnitTable* of_table(const Problem& p, int32_t architecture, const Gpu& gpu,
                          const Inventory& inside, Serves serves) {
  if (!inside.runs(architecture, gpu.sm)) return nullptr;
  if (p.tf32 != 0) {
    const UnitTable* unit = smallest(p, Family::mma_sync, architecture, true, gpu, inside, serves);
    if (unit != nullptr) return unit;
  }
  return smallest(p, Family::mma_sync, architecture, false, gpu, inside, serves);
}

const UnitTable* find(const Problem& p, Family family, const Gpu& gpu, const Inventory& inside,
                      Serves serves) {
  if (family == Family::simt) {
    if (!inside.runs(0, gpu.sm)) return nullptr;
    return smallest(p, Family::simt, 0, false, gpu, inside, serves);
  }
  if (gpu.table != 0) return of_table(p, gpu.table, gpu, inside, serves);
  const int32_t own = arch::limits_of(gpu.sm).table;
  const UnitTable* unit = of_table(p, own, gpu, inside, serves);
  if (inside.runs(own, gpu.sm)) return unit;
  for (auto row = arch::kLimits.rbegin(); unit == nullptr && row != arch::kLimits.rend(); ++row) {
    if (row->table == row->sm && row->table < own)
      unit = of_table(p, row->table, gpu, inside, serves);
  }
  return unit;
}

// One dimension of a view: a stride of a dimension that has one entry is never used.
bool aligned(int64_t size, int64_t stride, int64_t element_bytes) {
  return size <= 1 || stride * element_bytes % kAlignment == 0;
}

struct Shape {
  int64_t batch;
  int64_t rows;
  int64_t heads;
};

bool aligned(const tilewise_tensor& view, const Shape& shape, int64_t element_bytes) {
  return reinterpret_cast<uintptr_t>(view.data) % kAlignment == 0 &&
         aligned(shape.batch, view.stride_batch, element_bytes) &&
         aligned(shape.rows, view.stride_row, element_bytes) &&
         aligned(shape.heads, view.stride_head, element_bytes);
}

}  // namespace

const UnitTable* find_forward(const Problem& p, Family family, const Gpu& gpu,
                              const Inventory& inside) {
  const UnitTable* unit = find(p, family, gpu, inside, serves_forward);
  if (unit == nullptr || family == Family::simt || !needs_second_pass(p)) return unit;
  return find_forward(p, Family::simt, gpu, inside) != nullptr ? unit : nullptr;
}

const UnitTable* find_backward(const Problem& p, Family family, const Gpu& gpu,
                               const Inventory& inside) {
  const UnitTable* unit = find(p, family, gpu, inside, serves_backward);
  if (unit == nullptr || family == Family::simt || !needs_second_pass(p)) return unit;
  return find_backward(p, Family::simt, gpu, inside) != nullptr ? unit : nullptr;
}

bool fits_plain(const Problem& p, const Gradients* g) {
  const int64_t bytes = p.dtype == TILEWISE_FLOAT32 ? 4 : 2;
  if (is_general(p) || p.block_table != nullptr) return false;
  if (p.head_dim * bytes % kAlignment != 0 || p.head_dim_v * bytes % kAlignment != 0) return false;
  const Shape rows = {p.cu_seqlens_q != nullptr ? 1 : p.batch, p.seqlen_q, p.heads_q};
  const Shape keys = {p.cu_seqlens_k != nullptr ? 1 : p.kv_batch, p.seqlen_k, p.heads_kv};
  bool plain = aligned(p.q, rows, bytes) && aligned(p.out, rows, bytes) &&
               aligned(p.k, keys, bytes) && aligned(p.v, keys, bytes);
  if (g == nullptr) return plain;
  const Shape gradients = {p.kv_batch_idx != nullptr ? p.batch : keys.batch, keys.rows, keys.heads};
  plain = plain && aligned(g->dout, rows, bytes);
  plain = plain && (g->dq.data == nullptr || aligned(g->dq, rows, bytes));
  plain = plain && (g->dk.data == nullptr || aligned(g->dk, gradients, bytes));
  return plain && (g->dv.data == nullptr || aligned(g->dv, gradients, bytes));
}

bool needs_second_pass(const Problem& p) {
  // The last row sees the first key, and the first row the last key, from these limits on.
  const bool left = p.window_left >= 0 && p.window_left < most_keys(p) - 1;
  const bool right = p.window_right >= 0 && p.window_right < most_rows(p) - 1;
  return left || right;
}

bool has_forward(const Problem& p, Family family, const Gpu& gpu) {
  return find_forward(p, family, gpu, inventory()) != nullptr;
}

bool has_backward(const Problem& p, Family family, const Gpu& gpu) {
  return find_backward(p, family, gpu, inventory()) != nullptr;
}

}  // namespace tilewise::cuda
