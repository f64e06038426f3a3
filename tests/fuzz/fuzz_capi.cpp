// libFuzzer target: a call is either rejected with an error message before anything is written, or
// served in full within the memory that its struct describes. The planner must also have a
// consistent plan for it on any GPU.
#include <cstdlib>
#include <memory>
#include <new>

#include "call.h"
#include "plans.h"

namespace {

using fuzz::check_message;
using fuzz::expect;
using fuzz::Writer;

struct Free {
  void operator()(void* memory) const { ::operator delete(memory, std::align_val_t{64}); }
};
using Workspace = std::unique_ptr<void, Free>;

// A workspace with exactly the planned number of bytes.
Workspace workspace(int64_t bytes) {
  return Workspace(::operator new(static_cast<std::size_t>(bytes), std::align_val_t{64}));
}

constexpr int64_t kWorkspaceLimit = 1 << 27;

// Returns whether the call was served. `check_outputs` is false for a backward that reads an `out`
// which no forward has written: it computes with poison, which its outputs may then contain.
bool run(fuzz::AttentionCall& call, bool backward, bool check_outputs) {
  tilewise_plan_info info;
  const tilewise_status planned = fuzz::plan(call.a, backward ? &call.g : nullptr, &info);
  if (!call.runnable() || info.workspace_bytes > kWorkspaceLimit) return false;
  const Workspace memory = workspace(info.workspace_bytes);
  const tilewise_status status =
      backward ? tilewise_backward(&call.a, &call.g, memory.get(), info.workspace_bytes)
               : tilewise_forward(&call.a, memory.get(), info.workspace_bytes);
  check_message(status);
  expect(planned == TILEWISE_OK || status != TILEWISE_OK,
         "a call was served although the planner rejects it");
  const Writer writer = backward ? Writer::backward : Writer::forward;
  if (status != TILEWISE_OK) {
    expect(call.memory.untouched(writer), "a refused launch has written");
  } else if (check_outputs && !call.memory.wild()) {
    const bool complete = call.memory.complete(writer);
    if (!complete) call.print();
    expect(complete, "elements are missing, or others were written");
  }
  return status == TILEWISE_OK;
}

void run(fuzz::AppendCall& call) {
  if (!call.runnable()) return;
  const tilewise_status status = tilewise_append_kv(&call.a);
  check_message(status);
  expect(status == TILEWISE_OK || call.memory.untouched(Writer::forward),
         "a refused append has written");
}

// Selects one of the instruction sets that this machine can run.
void select_cpu(uint8_t choice) {
  int32_t usable = 0;
  int32_t available = 0;
  for (int32_t i = 0; tilewise_cpu_isa(i, &available) != nullptr; ++i) usable += available;
  int32_t wanted = choice % usable;
  for (int32_t i = 0; const char* name = tilewise_cpu_isa(i, &available); ++i)
    if (available == 1 && wanted-- == 0)
      expect(tilewise_select_cpu(name) == TILEWISE_OK, "an available instruction set is refused");
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  setenv("TILEWISE_NUM_THREADS", "2", 0);
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  fuzz::Reader in(data, size);
  select_cpu(in.byte());
  if (in.one_in(5)) {
    fuzz::AppendCall call(in);
    run(call);
    return 0;
  }
  fuzz::AttentionCall call(in);
  const bool served = run(call, false, true);
  run(call, true, served);
  return 0;
}
