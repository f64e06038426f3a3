// Selection of the kernel set and the kernel form for a problem.
#include "cuda/arch/hopper.h"
#include "cuda/arch/limits.h"
#include "cuda/common/prepare.h"
#include "cuda/plan.h"
#include "cuda/plan_shape.h"

namespace tilewise::cuda {
namespace {

constexpr int64_t kAlignment = 16;

template <class... Params>
bool fit(const Gpu& gpu, const Kernel<Params>&... kernels) {
  return (... && (kernels.shared_bytes <= gpu.shared_bytes));
}

bool serves_forward(const KernelSet& kernel_set, const Gpu& gpu) {
  for (const FormKernels* form : {&kernel_set.plain, &kernel_set.general, &kernel_set.paged,
                                  &kernel_set.tma, &kernel_set.tma_paged}) {
    if (!fit(gpu, form->forward, form->tma_forward)) return false;
  }
  return kernel_set.has_forward();
}

bool serves_backward(const KernelSet& kernel_set, const Gpu& gpu) {
  for (const FormKernels* form : {&kernel_set.plain, &kernel_set.general}) {
    if (!fit(gpu, form->prepare, form->backward, form->tma_backward, form->finish)) return false;
  }
  return kernel_set.has_backward();
}

using Serves = bool (*)(const KernelSet&, const Gpu&);

// The kernel set of a tile table with the smallest head dimensions that hold the problem's.
const KernelSet* find_smallest(const Problem& p, Family family, int32_t architecture, bool tf32,
                               const Gpu& gpu, const Registry& registry, Serves serves) {
  // simt is compiled per element type of q; mma_sync per element type of the keys, where those for
  // float8 serve both 16-bit types of q.
  const int32_t dtype = family == Family::simt ? p.dtype : key_dtype(p);
  const KernelSet* best = nullptr;
  for (const KernelSet* kernel_set : registry.kernel_sets) {
    if (kernel_set->family != family || kernel_set->architecture != architecture ||
        kernel_set->dtype != dtype || kernel_set->tf32 != tf32)
      continue;
    if (kernel_set->head_dim < p.head_dim || kernel_set->head_dim_v < p.head_dim_v ||
        !serves(*kernel_set, gpu))
      continue;
    const auto columns = [](const KernelSet& set) { return set.head_dim + set.head_dim_v; };
    if (best == nullptr || columns(*kernel_set) < columns(*best)) best = kernel_set;
  }
  return best;
}

const KernelSet* find_in_table(const Problem& p, int32_t architecture, const Gpu& gpu,
                               const Registry& registry, Serves serves) {
  if (!registry.runs(architecture, gpu.sm)) return nullptr;
  if (p.tf32 != 0) {
    const KernelSet* kernel_set =
        find_smallest(p, Family::mma_sync, architecture, true, gpu, registry, serves);
    if (kernel_set != nullptr) return kernel_set;
  }
  return find_smallest(p, Family::mma_sync, architecture, false, gpu, registry, serves);
}

const KernelSet* find(const Problem& p, Family family, const Gpu& gpu, const Registry& registry,
                      Serves serves) {
  if (family == Family::simt) {
    if (!registry.runs(0, gpu.sm)) return nullptr;
    return find_smallest(p, Family::simt, 0, false, gpu, registry, serves);
  }
  if (family == Family::wgmma) {
    // A forced table is a table of mma_sync.
    constexpr int32_t kTable = arch::Sm90a::kTable;
    if (gpu.table != 0 || !registry.runs(kTable, gpu.sm)) return nullptr;
    return find_smallest(p, family, kTable, false, gpu, registry, serves);
  }
  if (gpu.table != 0) return find_in_table(p, gpu.table, gpu, registry, serves);
  const int32_t table = arch::limits_of(gpu.sm).table;
  const KernelSet* kernel_set = find_in_table(p, table, gpu, registry, serves);
  if (registry.runs(table, gpu.sm)) return kernel_set;
  for (auto row = arch::kLimits.rbegin(); kernel_set == nullptr && row != arch::kLimits.rend();
       ++row) {
    if (row->table == row->sm && row->table < table)
      kernel_set = find_in_table(p, row->table, gpu, registry, serves);
  }
  return kernel_set;
}

// Whether the stride of one dimension of a view is a multiple of 16 bytes. The stride of a
// dimension with one entry is never used.
bool aligned(int64_t size, int64_t stride, int64_t element_bytes) {
  return size <= 1 || stride % (kAlignment / element_bytes) == 0;
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

namespace {

const KernelSet* find_forward(const Problem& p, Family family, const Gpu& gpu,
                              const Registry& registry) {
  if (family == Family::wgmma && why_not_wgmma(p) != nullptr) return nullptr;
  const KernelSet* kernel_set = find(p, family, gpu, registry, serves_forward);
  if (kernel_set == nullptr || family == Family::simt) return kernel_set;
  if (family == Family::mma_sync && nan_may_leak(p) &&
      find_forward(p, Family::simt, gpu, registry) == nullptr)
    return nullptr;
  const int64_t rows = selection_rows(p);
  const bool few_rows = family == Family::wgmma
                            ? arch::Sm90a::prefers_small_forward(rows, nan_may_leak(p))
                            : rows * group_size(p) <= kDecodeRows;
  if (!few_rows || kernel_set->few_rows == nullptr || !serves_forward(*kernel_set->few_rows, gpu))
    return kernel_set;
  return kernel_set->few_rows;
}

const KernelSet* find_backward(const Request& request, Family family, const Gpu& gpu,
                               const Registry& registry) {
  const Problem& p = request.problem;
  if (family == Family::wgmma && why_not_wgmma(request) != nullptr) return nullptr;
  const KernelSet* kernel_set = find(p, family, gpu, registry, serves_backward);
  if (kernel_set == nullptr || family == Family::simt) return kernel_set;
  if (nan_may_leak(p) && find_backward(request, Family::simt, gpu, registry) == nullptr)
    return nullptr;
  const bool few_rows = arch::Sm90a::prefers_small_backward(kernel_set->head_dim, selection_rows(p),
                                                            nan_may_leak(p), !fits_plain(request));
  if (!few_rows || kernel_set->few_rows == nullptr || !serves_backward(*kernel_set->few_rows, gpu))
    return kernel_set;
  return kernel_set->few_rows;
}

// Whether every row that is read or written, also inside pages, starts at a multiple of 16 bytes.
bool rows_are_aligned(const Request& request) {
  const Problem& p = request.problem;
  const Gradients& g = request.gradients;
  const int64_t bytes = element_bytes(p);
  const int64_t bytes_of_key = key_bytes(p);
  if (p.head_dim * bytes_of_key % kAlignment != 0 || p.head_dim_v * bytes_of_key % kAlignment != 0)
    return false;
  const bool paged = p.block_table != nullptr;
  const Shape rows = {p.cu_seqlens_q != nullptr ? 1 : p.batch, p.seqlen_q, p.heads_q};
  const Shape keys = {paged                       ? p.pages
                      : p.cu_seqlens_k != nullptr ? 1
                                                  : p.kv_batch,
                      paged ? p.page_size : p.seqlen_k, p.heads_kv};
  const bool inputs = aligned(p.q, rows, bytes) && aligned(p.out, rows, bytes) &&
                      aligned(p.k, keys, bytes_of_key) && aligned(p.v, keys, bytes_of_key);
  if (request.is(Pass::forward) || !inputs) return inputs;
  const Shape gradients =
      common::keys_per_sequence(p) ? Shape{p.batch, key_capacity(p), p.heads_kv} : keys;
  const auto aligned_if_given = [&](const tilewise_tensor& view, const Shape& shape) {
    return view.data == nullptr || aligned(view, shape, bytes);
  };
  return aligned(g.dout, rows, bytes) && aligned_if_given(g.dq, rows) &&
         aligned_if_given(g.dk, gradients) && aligned_if_given(g.dv, gradients);
}

// The paged forms count the rows of a sequence in 32 bits.
constexpr int64_t kMaxCount = int64_t{1} << 30;

bool rows_fit_32_bits(const Problem& p) {
  return key_capacity(p) <= kMaxCount && p.page_size <= kMaxCount;
}

// Form::paged also counts the 16-byte chunks of a cache in 32 bits.
bool pages_fit_32_bits(const Problem& p) {
  const auto fits = [&](const tilewise_tensor& view) {
    const auto bytes = [&](int64_t size, int64_t stride) {
      return static_cast<double>(size) * static_cast<double>(stride < 0 ? -stride : stride) *
             static_cast<double>(key_bytes(p));
    };
    return bytes(p.pages, view.stride_batch) + bytes(p.page_size, view.stride_row) <=
           static_cast<double>(kMaxCount * kAlignment);
  };
  return rows_fit_32_bits(p) && fits(p.k) && fits(p.v);
}

// Whether TMA can read a view: strides are 0 (an expanded dimension) or positive and below 2^40
// bytes, and row numbers fit in 32 bits.
bool is_mappable(const tilewise_tensor& view, const Shape& shape) {
  constexpr int64_t kMaxElements = int64_t{1} << 38;
  const auto fits = [](int64_t size, int64_t stride) {
    return size <= 1 || (stride >= 0 && stride < kMaxElements);
  };
  return fits(shape.batch, view.stride_batch) && fits(shape.rows, view.stride_row) &&
         fits(shape.heads, view.stride_head) && shape.rows < INT32_MAX;
}

bool keys_are_mappable(const Problem& p) {
  const Shape keys = {p.cu_seqlens_k != nullptr ? 1 : p.kv_batch, p.seqlen_k, p.heads_kv};
  return is_mappable(p.k, keys) && is_mappable(p.v, keys);
}

// A TMA box lies inside one page and starts at a multiple of its number of rows. Left padding would
// shift that start.
bool pages_are_mappable(const Problem& p) {
  const Shape pages = {p.pages, p.page_size, p.heads_kv};
  return p.leftpad_k == nullptr && rows_fit_32_bits(p) && is_mappable(p.k, pages) &&
         is_mappable(p.v, pages);
}

// Whether each TMA box is a whole page or a tile of `keys` keys.
bool pages_fit_boxes(const Problem& p, int64_t keys) {
  const bool pages_divide_tile = p.page_size >= kMinTmaPageRows && keys % p.page_size == 0;
  return (pages_divide_tile || p.page_size % keys == 0) && pages_are_mappable(p);
}

}  // namespace

const KernelSet* find_kernels(const Request& request, Family family, const Gpu& gpu,
                              const Registry& registry) {
  switch (request.pass) {
    case Pass::forward:
      return find_forward(request.problem, family, gpu, registry);
    case Pass::backward:
      return find_backward(request, family, gpu, registry);
  }
  return nullptr;
}

bool fits_plain(const Request& request) {
  const Problem& p = request.problem;
  return !is_general(p) && p.block_table == nullptr && rows_are_aligned(request);
}

Form forward_form(const Problem& p, const KernelSet& kernel_set) {
  if (fits_plain(p)) {
    if (kernel_set.tma.tma_forward.function != nullptr)
      return keys_are_mappable(p) ? Form::tma : Form::general;
    return kernel_set.dtype == TILEWISE_FLOAT8_E4M3 ? Form::general : Form::plain;
  }
  const bool paged = !is_general(p) && p.block_table != nullptr && rows_are_aligned(p);
  if (!paged) return Form::general;
  if (kernel_set.tma_paged.tma_forward.function != nullptr &&
      pages_fit_boxes(p, kernel_set.forward_tile.keys))
    return Form::tma_paged;
  const bool built = kernel_set.paged.forward.function != nullptr;
  return built && pages_fit_32_bits(p) ? Form::paged : Form::general;
}

bool is_decode(const Problem& p) {
  constexpr int64_t kMaxDecodeRows = 64;
  return selection_rows(p) * group_size(p) <= kMaxDecodeRows;
}

const char* why_not_wgmma(const Request& request) {
  const Problem& p = request.problem;
  const bool forward = request.is(Pass::forward);
  if (p.dtype == TILEWISE_FLOAT32) return "it computes only float16 and bfloat16";
  if (p.kv_float8 != 0) return "TMA does not convert float8";
  if (forward && p.batch_invariant != 0) return "batch_invariant needs one kernel for all lengths";
  if (forward && is_decode(p)) return "its tiles have 64 rows, and the problem has fewer";
  if (!rows_are_aligned(request))
    return "TMA needs rows that start at multiples of 16 bytes and head dims that are multiples of "
           "8";
  // kMinTmaPageRows divides every key tile; a box has the largest number of rows that divides both
  // the tile and the page.
  const bool paged = p.block_table != nullptr;
  if (forward && paged && p.page_size % kMinTmaPageRows != 0)
    return "TMA needs pages of a multiple of 16 keys";
  if (forward && paged && !pages_are_mappable(p))
    return "TMA needs pages with strides below 2^40 bytes and without left padding";
  const Shape rows = {p.cu_seqlens_q != nullptr ? 1 : p.batch, p.seqlen_q, p.heads_q};
  const bool mappable = is_mappable(p.q, rows) &&
                        (forward || is_mappable(request.gradients.dout, rows)) &&
                        (paged || keys_are_mappable(p));
  return mappable ? nullptr : "TMA needs strides that are not negative and below 2^40 bytes";
}

bool nan_may_leak(const Problem& p) {
  // With larger limits the last row attends to the first key, and the first row to the last key.
  const bool aligned = p.diagonal == nullptr;
  const bool left = p.window_left >= 0 && !(aligned && p.window_left >= max_keys(p) - 1);
  const bool right = p.window_right >= 0 && !(aligned && p.window_right >= max_rows(p) - 1);
  return left || right;
}

}  // namespace tilewise::cuda
