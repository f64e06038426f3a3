// The launches around the main kernels of a family, and helpers of the launchers.
#pragma once

#include <type_traits>

#include "cuda/backend.h"
#include "cuda/common/prepare.h"
#include "cuda/kernel_set.h"
#include "cuda/plan.h"

namespace tilewise::cuda {

// The launches of a forward, optional ones in brackets: [index check] [prepare] main [combine] [NaN
// recompute]. The constructor makes those before the main kernel and `finish` those after it; the
// family launches the main kernel in between.
class ForwardLaunch {
 public:
  ForwardLaunch(const Problem& problem, const Plan& plan, void* workspace);
  // For launch_jvp, which makes the launches after the main kernel itself.
  ForwardLaunch(const Problem& problem, const Plan& plan, void* workspace,
                common::PrepareParams prepared);
  void finish();

  const DeviceScope scope;
  const Problem& problem;
  const Plan& plan;
  const ForwardWorkspace regions;
  Start start;           // of the main kernel
  ForwardParams params;  // of the main kernel

  const FormKernels& kernels() const { return plan.kernel_set->form(plan.form); }
};

// Pass::jvp: [index check] [prepare] main [NaN recompute].
void launch_jvp(const Request& request, const Plan& plan, void* workspace);

// The launches of a backward: [index check] [prepare] main kernels [NaN recompute] [dbias] [dsinks]
// [sums of dsinks and dscale].
class BackwardLaunch {
 public:
  BackwardLaunch(const Request& request, const Plan& plan, const BackwardWorkspace& regions,
                 void* workspace);
  void finish();
  // Pass::second: all launches from the kernel that prepares the main kernels on.
  void launch_second(const SecondParams& second) const;

  const DeviceScope scope;
  const Plan& plan;
  const BackwardWorkspace regions;
  const Tangents& tangents;  // of Pass::second; otherwise all are 0
  void* const workspace;
  Problem problem;        // with checked copies of the index arrays
  BackwardParams params;  // of the main kernels

  // Whether the main kernels are launched for dK and dV, and for dQ or dscale.
  bool keys() const {
    return params.gradients.dk.data != nullptr || params.gradients.dv.data != nullptr;
  }
  bool rows() const {
    return params.gradients.dq.data != nullptr || params.gradients.dscale != nullptr;
  }
  const FormKernels& kernels() const { return plan.kernel_set->form(plan.form); }

 private:
  void scalar_gradients() const;
};

// FamilyRow::launch of a family that launches a forward with kForward(problem, plan, workspace) and
// each other pass that it has with a function of (request, plan, workspace).
template <auto kForward, auto kBackward, auto kJvp = nullptr, auto kSecond = nullptr>
void launch_pass(const Request& request, const Plan& plan, void* workspace) {
  switch (request.pass) {
    case Pass::forward:
      return kForward(request.problem, plan, workspace);
    case Pass::backward:
      return kBackward(request, plan, workspace);
    case Pass::jvp:
      if constexpr (!std::is_null_pointer_v<decltype(kJvp)>) kJvp(request, plan, workspace);
      return;
    case Pass::second:
      if constexpr (!std::is_null_pointer_v<decltype(kSecond)>) kSecond(request, plan, workspace);
      return;
  }
}

// The parameters of kernels that compute far rows.
void set_far_rows(BackwardParams& params, const FarRowRegions& regions, void* workspace);

// Checks the index arrays on the GPU and waits for the result; throws InvalidArgument for a fault.
// `report` is an IndexFault in the workspace.
void check_entries(const Request& request, void* report);

// Returns an id that is unique within the process. Ids count up from a random number, so that
// uninitialised memory is unlikely to hold one.
uint64_t next_launch_id();

// Launches the prepare kernel if there is anything to prepare, and returns whether there was.
bool prepare(common::PrepareParams& params, Stream stream);

// Tensor maps of q or dout, of contiguous k or v (an empty map if they are paged), and of k or v in
// pages, whose size `box_rows` divides.
TensorMap map_of_rows(const Problem& p, const tilewise_tensor& view, int64_t columns,
                      int32_t box_rows);
TensorMap map_of_keys(const Problem& p, const tilewise_tensor& view, int64_t columns,
                      int32_t box_rows);
TensorMap map_of_pages(const Problem& p, const tilewise_tensor& view, int64_t columns,
                       int32_t box_rows);
// A tensor map of transposed values (wgmma/transposed_values.h), [batches, heads_kv, head_dim_v,
// columns].
TensorMap map_of_transposed_values(const Problem& p, void* values, int64_t batches, int64_t columns,
                                   int32_t box_rows);

// Number of CTAs for the NaN recompute of flagged tiles: one wave. The number is odd, because
// flagged tiles are often a power of two apart, and with an even number few CTAs would get all of
// them.
int64_t recompute_blocks(const Flags& flags, const Tile& tile, int32_t device_index);

}  // namespace tilewise::cuda
