// The caller's floating-point state neither affects a task nor changes, on any thread.
#include <gtest/gtest.h>

#include <atomic>
#include <cfenv>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <thread>
#include <vector>

#include "base/parallel.h"
#include "base/thread_state.h"

namespace tilewise {
namespace {

struct Setting {
  const char* name;
  std::function<void()> set;
};

#if defined(__aarch64__)
#if defined(__clang__)
uint64_t fpcr() { return __builtin_arm_rsr64("fpcr"); }
void set_fpcr(uint64_t value) { __builtin_arm_wsr64("fpcr", value); }
#else
uint64_t fpcr() { return __builtin_aarch64_get_fpcr64(); }
void set_fpcr(uint64_t value) { __builtin_aarch64_set_fpcr64(value); }
#endif
#endif

std::vector<Setting> settings() {
  std::vector<Setting> all = {{"as the thread starts", [] {}},
                              {"upward", [] { std::fesetround(FE_UPWARD); }},
                              {"downward", [] { std::fesetround(FE_DOWNWARD); }},
                              {"toward zero", [] { std::fesetround(FE_TOWARDZERO); }}};
#if defined(__x86_64__)
  constexpr uint32_t kFlushAndZero = 0x8040;
  constexpr uint32_t kMasks = 0x1f80;
  all.push_back({"subnormal numbers flushed",
                 [] { __builtin_ia32_ldmxcsr(__builtin_ia32_stmxcsr() | kFlushAndZero); }});
  all.push_back(
      {"exceptions trapped", [] { __builtin_ia32_ldmxcsr(__builtin_ia32_stmxcsr() & ~kMasks); }});
#elif defined(__aarch64__)
  constexpr uint64_t kFlush = 1u << 24;       // FZ
  constexpr uint64_t kDefaultNaN = 1u << 25;  // DN
  constexpr uint64_t kOtherHalf = 1u << 26;   // AHP: fp16 without infinities and NaN
  constexpr uint64_t kTraps = 0x1f00;         // ignored by cores that cannot trap
  all.push_back({"subnormal numbers flushed", [] { set_fpcr(fpcr() | kFlush); }});
  all.push_back({"other NaN and fp16", [] { set_fpcr(fpcr() | kDefaultNaN | kOtherHalf); }});
  all.push_back({"exceptions trapped", [] { set_fpcr(fpcr() | kTraps); }});
#endif
  return all;
}

// The current state, read without arithmetic, which may trap.
int control() {
#if defined(__x86_64__)
  constexpr uint32_t kFlags = 0x3f;
  return static_cast<int>(__builtin_ia32_stmxcsr() & ~kFlags);
#elif defined(__aarch64__)
  return static_cast<int>(fpcr());
#else
  return std::fegetround();
#endif
}

// Whether arithmetic rounds to nearest, keeps subnormal numbers and continues after an exception.
bool is_default() {
#if defined(__aarch64__)
  if (fpcr() != 0) return false;
#endif
  volatile float one = 1.0f, minus = -1.0f, little = 1e-30f, subnormal = 1e-40f, zero = 0.0f;
  volatile float infinite = one / zero;
  return one + little == 1.0f && minus - little == -1.0f && one - little == 1.0f &&
         subnormal * one != 0.0f && infinite > 0.0f;
}

// The result of `run` on a new thread with this state.
int in_a_thread_with(const Setting& setting, const std::function<int()>& run) {
  int result = 0;
  std::thread thread([&] {
    setting.set();
    result = run();
  });
  thread.join();
  return result;
}

// Tasks see the default state, although a trapped exception would end the process.
void expect_default_in_tasks(const Parallel& parallel, int64_t tasks, const char* name) {
  std::atomic<int> wrong{0};
  parallel.run(tasks, [&](int64_t) {
    if (!is_default()) ++wrong;
  });
  EXPECT_EQ(wrong, 0) << name;
}

TEST(FloatState, TasksOfThePoolRunInTheDefaultState) {
  const Parallel pool = make_parallel(nullptr);
  for (const Setting& setting : settings())
    for (int64_t tasks : {1, 100})
      in_a_thread_with(setting, [&] {
        expect_default_in_tasks(pool, tasks, setting.name);
        return 0;
      });
}

TEST(FloatState, TasksOfAHookRunInTheDefaultState) {
  for (const Setting& setting : settings()) {
    tilewise_parallel hook{};
    hook.user = const_cast<Setting*>(&setting);
    hook.threads = 4;
    hook.parallel_for = [](void* user, int64_t tasks, tilewise_task task, void* context) {
      std::vector<std::thread> threads;
      for (int64_t i = 0; i < tasks; ++i)
        threads.emplace_back([=] {
          static_cast<const Setting*>(user)->set();
          task(context, i);
        });
      for (std::thread& thread : threads) thread.join();
    };
    expect_default_in_tasks(make_parallel(&hook), 4, setting.name);
  }
}

TEST(FloatState, HookItselfRunsInTheCallersState) {
  for (const Setting& setting : settings()) {
    const int wanted = in_a_thread_with(setting, control);
    const int seen = in_a_thread_with(setting, [] {
      int inside = -1;
      tilewise_parallel hook{};
      hook.user = &inside;
      hook.parallel_for = [](void* user, int64_t tasks, tilewise_task task, void* context) {
        *static_cast<int*>(user) = control();
        for (int64_t i = 0; i < tasks; ++i) task(context, i);
      };
      const DefaultFloatState entry;
      make_parallel(&hook).run(3, [](int64_t) {});
      EXPECT_TRUE(is_default()) << "the default state again after the hook";
      return inside;
    });
    EXPECT_EQ(seen, wanted) << setting.name;
  }
}

TEST(FloatState, CallersStateIsRestored) {
  const Parallel pool = make_parallel(nullptr);
  for (const Setting& setting : settings()) {
    const int wanted = in_a_thread_with(setting, control);
    const int after = in_a_thread_with(setting, [&] {
      pool.run(1, [](int64_t) {});
      pool.run(20, [&](int64_t) { pool.run(3, [](int64_t) {}); });
      try {
        const DefaultFloatState entry;
        throw std::runtime_error("refused");
      } catch (const std::runtime_error&) {
      }
      return control();
    });
    EXPECT_EQ(after, wanted) << setting.name;
  }
}

TEST(FloatState, ExceptionFlagsOfTasksDoNotReachTheCaller) {
  std::feclearexcept(FE_ALL_EXCEPT);
  make_parallel(nullptr).run(1, [](int64_t) {
    volatile float zero = 0.0f;
    volatile float infinite = 1.0f / zero;
    static_cast<void>(infinite);
  });
  EXPECT_EQ(std::fetestexcept(FE_DIVBYZERO), 0);
}

}  // namespace
}  // namespace tilewise
