// Chooses the CUDA family that serves a problem on a described GPU, and explains the choice.
#include <algorithm>

#include "cuda/arch/limits.h"
#include "cuda/kernel_set.h"
#include "dispatch/planner.h"

namespace tilewise::dispatch {
namespace {

std::string sm_text(const Device& device) { return "sm_" + std::to_string(device.gpu.sm); }

// The family whose kernels recompute flagged tiles of other families.
const cuda::FamilyRow* recomputing_family(const Device& device) {
  for (const cuda::FamilyRow* row : families_of(device).cuda) {
    if (row->recompute_kernels != nullptr) return row;
  }
  return nullptr;
}

cuda::Target target_of(const Device& device) {
  return {
      .gpu = device.gpu, .registry = registry_of(device), .recomputes = recomputing_family(device)};
}

// The next faster family that an explanation mentions; null if there is none. A family of one
// generation of GPUs is mentioned on these alone, and for its dtypes alone. One that is not proved
// is mentioned if there is no other.
const cuda::FamilyRow* faster_than(const cuda::FamilyRow& chosen, const Request& request,
                                   const Device& device) {
  const auto& rows = families_of(device).cuda;
  const int32_t sm = device.gpu.sm;
  const auto mentioned = [&](const cuda::FamilyRow* row) {
    return sm <= row->sm.last &&
           (!row->is_of_one_generation() ||
            (sm >= row->sm.first && row->facts.dtypes.contains(request.dtypes.q)));
  };
  const auto next = std::find(rows.begin(), rows.end(), &chosen) + 1;
  auto found = std::find_if(next, rows.end(), [&](const cuda::FamilyRow* row) {
    return row->serves_on(device.gpu) && mentioned(row);
  });
  if (found == rows.end()) found = std::find_if(next, rows.end(), mentioned);
  return found != rows.end() ? *found : nullptr;
}

// Why the next faster family that this GPU has does not serve the request, which differs from the
// one that was `asked` where q has been widened; empty if there is none.
std::string why_not_faster(const cuda::FamilyRow& chosen, const Request& widened,
                           const Request& asked, const Device& device) {
  const int32_t sm = device.gpu.sm;
  const cuda::FamilyRow* faster = faster_than(chosen, widened, device);
  if (faster == nullptr) return {};
  const FamilyFacts& facts = faster->facts;
  const Request& request = facts.dtypes.contains(asked.dtypes.q) ? asked : widened;
  const Problem& p = request.problem;
  if (sm >= faster->sm.first && !faster->serves_on(device.gpu))
    return std::string(facts.name) + " is in the library, but not proved on this GPU " +
           "(see tilewise doctor --prove)";
  const std::string name =  // nothing is known about the speed of a family that is not proved
      std::string(facts.name) + (faster->proved ? " would be faster, but " : " is allowed, but ");
  if (sm < faster->sm.first) return name + "it needs " + facts.requires_;
  if (!facts.passes.contains(request.pass)) return name + "it has no " + pass_name(request.pass);
  const int64_t head_dim = max(p.head_dim, p.head_dim_v);
  const int32_t largest = facts.max_head_dim_of(request.pass, request.dtypes.q);
  if (head_dim > largest) return name + "its largest head_dim is " + std::to_string(largest);
  const WhyNot why = faster->why_not(request, device.gpu);
  if (why && !why.would_be_faster) return std::string(facts.name) + " " + why.text + why.detail;
  if (why) return name + why.text + why.detail;
  if (!registry_of(device).runs(faster->table(device.gpu), sm)) {
    return name + "this build has no code of it for " + sm_text(device) + " (the build has " +
           code_text(registry_of(device)) + ")";
  }
  const cuda::Plan plan = faster->plan(request, target_of(device));
  if (plan.kernel_set != nullptr && !faster->serves_tile_on(plan.head_dim, device.gpu))
    return std::string(facts.name) + " was not faster on this GPU for head_dim " +
           std::to_string(plan.head_dim) + " (tilewise doctor --prove)";
  return name + "it has no tile of head_dim " + std::to_string(head_dim) + " for the " +
         std::to_string(device.gpu.shared_bytes / cuda::arch::kKilobyte) +
         " KB of shared memory of this GPU, or not in this build";
}

// "sm_80", "sm_90a".
std::string table_name(int32_t table) {
  if (!cuda::arch::is_architecture_specific(table)) return "sm_" + std::to_string(table);
  return "sm_" + std::to_string(table / 10) + "a";
}

const char* form_name(cuda::Form form) {
  switch (form) {
    case cuda::Form::plain:
      return "plain";
    case cuda::Form::general:
      return "general";
    case cuda::Form::masked:
      return "masked";
    case cuda::Form::paged:
      return "paged";
    case cuda::Form::tma:
      return "TMA";
    case cuda::Form::tma_paged:
      return "paged TMA";
  }
  return "";
}

std::string tile_text(const Decision& decision, const Device& device) {
  const cuda::Plan& plan = decision.cuda;
  std::string text = "tile " + std::to_string(plan.tile_q) + "x" + std::to_string(plan.tile_k) +
                     " for head_dim " + std::to_string(plan.head_dim);
  if (plan.architecture != 0) {
    text += " of table " + table_name(plan.architecture);
    if (device.gpu.table != 0) {
      text += " (forced)";
    } else if (plan.architecture != decision.cuda_row->table(device.gpu)) {
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
  const cuda::Target target = target_of(device);
  // Slower families come first, so search from the end.
  const auto& rows = families_of(device).cuda;
  for (auto it = rows.rbegin(); it != rows.rend(); ++it) {
    const cuda::FamilyRow& row = **it;
    if (!row.sm.contains(device.gpu.sm) || !row.serves_on(device.gpu) ||
        !row.facts.computes(request) || row.why_not(request, device.gpu))
      continue;
    decision.cuda = row.plan(request, target);
    if (decision.cuda.kernel_set == nullptr) continue;  // none in this build, or none that fits
    if (!row.serves_tile_on(decision.cuda.head_dim, device.gpu)) continue;
    decision.family = &row.facts;
    decision.cuda_row = &row;
    decision.status = TILEWISE_OK;
    break;
  }
  return decision;
}

std::string explain_cuda(const Decision& decision, const Request& request, const Request& asked,
                         const Device& device) {
  std::string reason = why_not_faster(*decision.cuda_row, request, asked, device);
  if (reason.empty()) reason = "no family of the library is faster here";
  if (!decision.cuda_row->proved) {
    reason = device.gpu.proof_of(decision.family->name) != nullptr
                 ? "it has proved itself on this GPU and was faster (tilewise doctor --prove)"
                 : "it is not proved on this GPU, but TILEWISE_UNPROVED is 1";
  }
  return std::string(short_dtype(request.dtypes.q)) + " on " + sm_text(device) + ", " +
         tile_text(decision, device) + ": " + reason;
}

std::string refuse_cuda(const Request& request, const Device& device) {
  const std::string sm = device.gpu.sm > 0 ? " (" + sm_text(device) + ")" : "";
  const auto& rows = families_of(device).cuda;
  const auto has_pass = [&](const cuda::FamilyRow* row) {
    return row->facts.passes.contains(request.pass);
  };
  if (std::none_of(rows.begin(), rows.end(), has_pass)) {
    return "device is CUDA" + sm + ": no CUDA family has the pass " + pass_name(request.pass) +
           "; tensors in the memory of the CPU are allowed, and on a GPU the MATH backend of "
           "PyTorch's scaled_dot_product_attention has the derivatives of every pass";
  }
  int32_t largest = 0;
  for (const cuda::FamilyRow* row : rows) {
    largest = max(largest, row->facts.max_head_dim_of(request.pass, request.dtypes.q));
  }
  if (max(request.problem.head_dim, request.problem.head_dim_v) > largest) {
    return "device is CUDA" + sm + ": no CUDA family has a kernel for a " + request_text(request) +
           " and head_dim_v " + std::to_string(request.problem.head_dim_v) +
           "; head dimensions up to " + std::to_string(largest) +
           " are allowed, and on a CPU up to " + std::to_string(kMaxHeadDim);
  }
  const auto slowest = std::find_if(rows.begin(), rows.end(), [&](const cuda::FamilyRow* row) {
    return row->sm.contains(device.gpu.sm) && row->facts.computes(request);
  });
  const WhyNot why = slowest != rows.end() ? (*slowest)->why_not(request, device.gpu) : WhyNot{};
  if (why) return "device is CUDA" + sm + ": " + why.text + why.detail;
  return "device is CUDA" + sm + ": this build has no CUDA kernel for a " + request_text(request) +
         "; it has " + code_text(registry_of(device)) +
         "; tensors in the memory of the CPU are allowed";
}

}  // namespace tilewise::dispatch
