#include "emulator/launches.h"

#include <string>
#include <utility>

#include "emulator/block.h"
#include "emulator/device.h"
#include "emulator/grid.h"
#include "emulator/options.h"

namespace tilewise::cuda::emulator {
namespace {

thread_local std::function<void()> held;         // until the next launch
thread_local std::function<void()> predecessor;  // of the grid that runs

bool holds_back(Pdl pdl, bool dependent) { return pdl == (dependent ? Pdl::second : Pdl::first); }

}  // namespace

void launch(bool dependent, std::function<void()> grid) {
  const Pdl pdl = read_options().pdl;
  if (!dependent || !held) {
    finish_launches();
    if (holds_back(pdl, dependent)) {
      held = std::move(grid);
    } else {
      grid();
    }
    return;
  }
  predecessor = std::exchange(held, nullptr);
  try {
    grid();
  } catch (...) {
    predecessor = nullptr;
    throw;
  }
  if (!predecessor) return;
  predecessor = nullptr;
  throw Fault(
      "a dependent launch is complete, but none of its threads has waited for the launch "
      "before it (griddepcontrol_wait)");
}

void finish_launches() {
  if (held) std::exchange(held, nullptr)();
}

void drop_launches() { held = nullptr; }

void griddepcontrol_wait() {
  if (!predecessor) return;
  std::string failure;
  try {
    run_nested(std::exchange(predecessor, nullptr));
    return;
  } catch (const Fault& of_predecessor) {
    failure = of_predecessor.what();
  }
  // No exception may leave the stack of this thread, nor be alive when the thread is abandoned.
  fault(failure);
}

}  // namespace tilewise::cuda::emulator
