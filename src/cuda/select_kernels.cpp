// Selection of the kernel set and the kernel form for a request.
#include "cuda/layout.h"
#include "cuda/plan.h"
#include "cuda/plan_shape.h"

namespace tilewise::cuda {
namespace {

template <class... Params>
bool fit(const Gpu& gpu, const Kernel<Params>&... kernels) {
  return (... && (kernels.shared_bytes <= gpu.shared_bytes));
}

bool serves_forward(const KernelSet& kernel_set, const Gpu& gpu) {
  for (const FormKernels* form : {&kernel_set.plain, &kernel_set.general, &kernel_set.masked,
                                  &kernel_set.paged, &kernel_set.tma, &kernel_set.tma_paged}) {
    if (!fit(gpu, form->forward, form->tma_forward)) return false;
  }
  return kernel_set.has_forward();
}

bool serves_backward(const KernelSet& kernel_set, const Gpu& gpu) {
  for (const FormKernels* form : {&kernel_set.plain, &kernel_set.general, &kernel_set.masked}) {
    if (!fit(gpu, form->prepare, form->backward, form->tma_backward, form->finish)) return false;
  }
  return kernel_set.has_backward();
}

bool serves_jvp(const KernelSet& kernel_set, const Gpu& gpu) {
  return kernel_set.has_jvp() &&
         fit(gpu, kernel_set.of_tangents().plain.jvp, kernel_set.of_tangents().general.jvp);
}

bool serves_second(const KernelSet& kernel_set, const Gpu& gpu) {
  const KernelSet& set = kernel_set.of_tangents();
  for (const FormKernels* form : {&set.plain, &set.general}) {
    if (!fit(gpu, form->second_prepare, form->second, form->second_finish, form->second_dbias))
      return false;
  }
  return kernel_set.has_second();
}

// Whether a problem is a latent cache with more columns of keys than the kernel set has of values.
// Narrower ones have kernels with all forms.
bool is_latent(const Problem& p, const KernelSet& kernel_set) {
  return values_are_in_keys(p) && p.head_dim > kernel_set.head_dim_v;
}

// Whether the request has an option of the general form.
bool needs_general(const Request& request) {
  return is_general(request.problem) || request.dtypes.out != request.dtypes.widened_q();
}

// Whether a kernel set has the kernels of a pass, and these fit the GPU's shared memory.
bool serves(const KernelSet& kernel_set, Pass pass, const Gpu& gpu) {
  switch (pass) {
    case Pass::forward:
      return serves_forward(kernel_set, gpu);
    case Pass::backward:
      return serves_backward(kernel_set, gpu);
    case Pass::jvp:
      return serves_jvp(kernel_set, gpu);
    case Pass::second:
      return serves_second(kernel_set, gpu);
  }
  return false;
}

}  // namespace

const KernelSet* find_kernels(const Request& request, const KernelQuery& query,
                              const Target& target) {
  const Problem& p = request.problem;
  if (!target.registry.runs(query.table, target.gpu.sm)) return nullptr;
  const KernelSet* best = nullptr;
  for (const KernelSet* kernel_set : target.registry.kernel_sets) {
    if (kernel_set->family != query.family || kernel_set->architecture != query.table ||
        kernel_set->dtype != query.dtype || kernel_set->tf32 != query.tf32)
      continue;
    if (kernel_set->head_dim < p.head_dim || kernel_set->head_dim_v < p.head_dim_v ||
        !serves(*kernel_set, request.pass, target.gpu))
      continue;
    if (kernel_set->values == ValuesIn::key_columns && !is_latent(p, *kernel_set)) continue;
    const auto columns = [](const KernelSet& set) { return set.head_dim + set.head_dim_v; };
    if (best == nullptr || columns(*kernel_set) < columns(*best)) best = kernel_set;
  }
  return best;
}

const KernelSet* with_few_rows(const KernelSet& kernel_set, const Request& request,
                               const Gpu& gpu) {
  const KernelSet* few_rows = kernel_set.few_rows;
  return few_rows != nullptr && serves(*few_rows, request.pass, gpu) ? few_rows : &kernel_set;
}

const KernelSet* find_recompute_kernels(const Request& request, const Target& target) {
  return target.recomputes != nullptr ? target.recomputes->recompute_kernels(request, target)
                                      : nullptr;
}

bool fits_plain(const Request& request) {
  return !needs_general(request) && request.problem.block_table == nullptr &&
         rows_are_aligned(request);
}

Form forward_form(const Problem& p, const KernelSet& kernel_set) {
  if (p.mask != nullptr && kernel_set.reads_mask_forward()) return Form::masked;
  if (fits_plain(p)) {
    if (kernel_set.tma.tma_forward.function != nullptr)
      return keys_are_mappable(p) ? Form::tma : Form::general;
    const bool float8 = kernel_set.dtype == TILEWISE_FLOAT8_E4M3;
    return float8 && !kernel_set.has_plain_forward() ? Form::general : Form::plain;
  }
  const bool paged = !needs_general(p) && p.block_table != nullptr && rows_are_aligned(p);
  if (!paged) return Form::general;
  if (kernel_set.tma_paged.tma_forward.function != nullptr &&
      pages_fit_boxes(p, kernel_set.forward_tile.keys))
    return Form::tma_paged;
  const bool built = kernel_set.paged.forward.function != nullptr;
  return built && pages_fit_32_bits(p) ? Form::paged : Form::general;
}

Form backward_form(const Request& request, const KernelSet& kernel_set) {
  if (request.problem.mask != nullptr && kernel_set.reads_mask_backward()) return Form::masked;
  return fits_plain(request) ? Form::plain : Form::general;
}

bool nan_may_leak(const Problem& p) {
  if (p.mask != nullptr) return true;
  // With larger limits the last row attends to the first key, and the first row to the last key.
  const bool aligned = p.diagonal == nullptr;
  const bool left = p.window_left >= 0 && !(aligned && p.window_left >= max_keys(p) - 1);
  const bool right = p.window_right >= 0 && !(aligned && p.window_right >= max_rows(p) - 1);
  return left || right;
}

}  // namespace tilewise::cuda
