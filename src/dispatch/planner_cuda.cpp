// Chooses the CUDA family that serves a problem on a described GPU, and explains the choice.
#include <algorithm>

#include "cuda/arch/hopper.h"
#include "cuda/arch/limits.h"
#include "cuda/plan.h"
#include "dispatch/planner.h"

namespace tilewise::dispatch {
namespace {

std::string sm_text(const Device& device) { return "sm_" + std::to_string(device.gpu.sm); }

// Why wgmma does not serve a problem on a GPU that has it; empty if the problem is not the reason.
std::string why_not_wgmma(const Request& request, const Device& device) {
  if (device.gpu.table != 0) return "a tile table is forced";
  const char* why = cuda::why_not_wgmma(request);
  return why != nullptr ? why : "";
}

// Why the next faster family that this GPU has does not serve the problem; empty if there is none.
std::string why_not_faster(const Family& chosen, const Request& request, const Device& device) {
  const Problem& p = request.problem;
  const Family* faster = &chosen + 1;
  if (faster == kManifest.data() + kManifest.size() || faster->device != TILEWISE_CUDA) return {};
  const std::string name = std::string(faster->name) + " would be faster, but ";
  const bool specific = faster->cuda == cuda::Family::wgmma;
  if (device.gpu.sm > faster->sm.last || (specific && device.gpu.sm < faster->sm.first)) return {};
  if (specific && !faster->dtypes.contains(p.dtype)) return {};
  if (device.gpu.sm < faster->sm.first) return name + "it needs " + faster->requires_;
  if (specific && request.is(Pass::forward) && cuda::is_decode(p))
    return std::string(faster->name) + " needs more rows: its tiles have 64";
  const std::string why = specific ? why_not_wgmma(request, device) : "";
  if (!why.empty()) return name + why;
  const int64_t head_dim = max(p.head_dim, p.head_dim_v);
  if (head_dim > faster->max_head_dim)
    return name + "its largest head_dim is " + std::to_string(faster->max_head_dim);
  const int32_t table = specific ? cuda::arch::Sm90a::kTable : tile_table(device);
  if (table == 75 && p.dtype != TILEWISE_FLOAT16 && p.kv_float8 == 0)
    return name + "the tensor cores of sm_75 compute no " + short_dtype(p.dtype);
  if (!registry_of(device).runs(table, device.gpu.sm)) {
    return name + "this build has no code of it for " + sm_text(device) + " (the build has " +
           code_text(registry_of(device)) + ")";
  }
  return name + "it has no tile of head_dim " + std::to_string(head_dim) + " for the " +
         std::to_string(device.gpu.shared_bytes / cuda::arch::kKilobyte) +
         " KB of shared memory of this GPU, or not in this build";
}

// "sm_80", "sm_90a".
std::string table_name(int32_t table) {
  if (table != cuda::arch::Sm90a::kTable) return "sm_" + std::to_string(table);
  return "sm_" + std::to_string(table / 10) + "a";
}

const char* form_name(cuda::Form form) {
  switch (form) {
    case cuda::Form::plain:
      return "plain";
    case cuda::Form::general:
      return "general";
    case cuda::Form::paged:
      return "paged";
    case cuda::Form::tma:
      return "TMA";
    case cuda::Form::tma_paged:
      return "paged TMA";
  }
  return "";
}

std::string tile_text(const cuda::Plan& plan, const Device& device) {
  std::string text = "tile " + std::to_string(plan.tile_q) + "x" + std::to_string(plan.tile_k) +
                     " for head_dim " + std::to_string(plan.head_dim);
  if (plan.architecture != 0) {
    text += " of table " + table_name(plan.architecture);
    const bool specific = plan.family == cuda::Family::wgmma;
    if (device.gpu.table != 0) {
      text += " (forced)";
    } else if (!specific && plan.architecture != cuda::arch::limits_of(device.gpu.sm).table) {
      text += " (its own is not in this build)";
    }
    if (plan.kernel_set->tf32) text += ", TF32";
    text += std::string(", ") + form_name(plan.form) + " form";
  }
  if (plan.pack > 1) text += ", " + std::to_string(plan.pack) + " heads per tile";
  if (plan.splits > 1) text += ", " + std::to_string(plan.splits) + " key splits";
  if (plan.cluster_size > 1) text += " combined in a cluster";
  if (plan.stream_k.any())
    text += ", Stream-K over the last " + std::to_string(plan.stream_k.tiles) + " tiles";
  if (plan.chunks.any())
    text += ", keys of the batch in " + std::to_string(plan.chunks.max_chunks) + " chunks";
  if (plan.last_cta_combines) text += ", combined by the last CTA of a tile";
  if (plan.warps_per_tile > 1) text += ", two warps per tile";
  if (plan.stages > 0) text += ", " + std::to_string(plan.stages) + " stages per warp";
  return text;
}

}  // namespace

Decision plan_cuda(const Request& request, const Device& device) {
  Decision decision;
  // On each device, slower families come first, so search from the end.
  for (auto row = kManifest.rbegin(); row != kManifest.rend(); ++row) {
    const int32_t sm = device.gpu.sm;
    if (row->device != TILEWISE_CUDA || sm < row->sm.first || sm > row->sm.last ||
        !serves(*row, request))
      continue;
    decision.cuda = cuda::plan(request, row->cuda, device.gpu, registry_of(device));
    if (decision.cuda.kernel_set == nullptr) continue;  // none in this build, or none that fits
    decision.family = &*row;
    decision.status = TILEWISE_OK;
    break;
  }
  return decision;
}

std::string explain_cuda(const Decision& decision, const Request& request, const Device& device) {
  const std::string slower = why_not_faster(*decision.family, request, device);
  return std::string(short_dtype(request.problem.dtype)) + " on " + sm_text(device) + ", " +
         tile_text(decision.cuda, device) + ": " +
         (slower.empty() ? "no family of the library is faster here" : slower);
}

std::string refuse_cuda(const Request& request, const Device& device) {
  const std::string sm = device.gpu.sm > 0 ? " (" + sm_text(device) + ")" : "";
  return "device is CUDA" + sm + ": this build has no CUDA kernel for a " + request_text(request) +
         "; it has " + code_text(registry_of(device)) +
         "; tensors in the memory of the CPU are allowed";
}

}  // namespace tilewise::dispatch
