// Launches that start before their predecessor.
#include "emulator/launches.h"

#include <vector>

#include "cuda/ptx/block.h"
#include "emulator/test_support.h"

namespace tilewise::cuda::emulator {
namespace {

constexpr int kThreads = 32;

// A launch that adds 1 to `to` after its wait; `seen` is the value before the wait.
struct Adds {
  int* to;
  int* seen;
  bool waits = true;

  void operator()() const {
    run_grid(2, kThreads, 0, [this] {
      if (ptx::block_index() == 0 && ptx::thread_index() == 0) *seen = *to;
      if (waits) ptx::griddepcontrol_wait();
      if (ptx::block_index() == 1 && ptx::thread_index() == 0) ++*to;
    });
  }
};

// The values that a launch, one that depends on it, and one that depends on the second see before
// they wait.
std::vector<int> seen_before_waits(const char* pdl) {
  const Environment environment("TILEWISE_EMULATOR_PDL", pdl);
  int value = 0;
  std::vector<int> seen(3, -1);
  launch(false, Adds{&value, &seen[0]});
  launch(true, Adds{&value, &seen[1]});
  launch(true, Adds{&value, &seen[2]});
  finish_launches();
  EXPECT_EQ(value, 3);
  return seen;
}

TEST(Launches, RunInOrder) { EXPECT_EQ(seen_before_waits("none"), (std::vector<int>{0, 1, 2})); }

TEST(Launches, ADependentLaunchStartsBeforeThePreceding) {
  EXPECT_EQ(seen_before_waits("first"), (std::vector<int>{0, 0, 2}));
  EXPECT_EQ(seen_before_waits("second"), (std::vector<int>{0, 1, 1}));
}

TEST(Launches, ALaunchThatIsNotDependentWaits) {
  const Environment environment("TILEWISE_EMULATOR_PDL", "first");
  int value = 0;
  int seen[2] = {-1, -1};
  launch(false, Adds{&value, &seen[0]});
  launch(false, Adds{&value, &seen[1]});
  finish_launches();
  EXPECT_EQ(seen[1], 1);
}

TEST(Launches, ADependentLaunchMustWait) {
  const Environment environment("TILEWISE_EMULATOR_PDL", "first");
  int value = 0;
  int seen[2] = {-1, -1};
  launch(false, Adds{&value, &seen[0]});
  std::string message;
  try {
    launch(true, Adds{&value, &seen[1], false});
  } catch (const Fault& fault) {
    message = fault.what();
  }
  expect_contains(message, "none of its threads has waited");
  drop_launches();
}

TEST(Launches, AFaultOfThePrecedingLaunchEndsTheDependentOne) {
  const Environment environment("TILEWISE_EMULATOR_PDL", "first");
  launch(false, [] {
    run_grid(1, kThreads, 0, [] {
      if (ptx::thread_index() != 0) ptx::sync_block();
    });
  });
  std::string message;
  try {
    launch(true, [] { run_grid(1, kThreads, 0, [] { ptx::griddepcontrol_wait(); }); });
  } catch (const Fault& fault) {
    message = fault.what();
  }
  expect_contains(message, "sync_block");
}

}  // namespace
}  // namespace tilewise::cuda::emulator
