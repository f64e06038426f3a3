// src/base: 16-bit conversions over all values, integer arithmetic, the thread pool.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <limits>
#include <set>
#include <thread>
#include <vector>

#include "base/half.h"
#include "base/math.h"
#include "base/parallel.h"
#include "base/size.h"

namespace tilewise {
namespace {

// The value of a 16-bit float by its definition.
double value_of(uint32_t bits, int exponent_bits, int mantissa_bits) {
  const double sign = (bits >> 15) != 0 ? -1.0 : 1.0;
  const int exponent = static_cast<int>((bits >> mantissa_bits) & ((1u << exponent_bits) - 1));
  const double mantissa = static_cast<double>(bits & ((1u << mantissa_bits) - 1));
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const double scale = std::ldexp(1.0, -mantissa_bits);
  if (exponent == (1 << exponent_bits) - 1)
    return mantissa == 0 ? sign * HUGE_VAL : std::numeric_limits<double>::quiet_NaN();
  if (exponent == 0) return sign * std::ldexp(mantissa * scale, 1 - bias);
  return sign * std::ldexp(1.0 + mantissa * scale, exponent - bias);
}

template <class T>
void check_all_values(int exponent_bits, int mantissa_bits) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const T stored{static_cast<uint16_t>(bits)};
    const double expected = value_of(bits, exponent_bits, mantissa_bits);
    const float wide = to_float(stored);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(wide)) << bits;
      ASSERT_TRUE(std::isnan(to_float(from_float<T>(wide)))) << bits;
      continue;
    }
    ASSERT_EQ(static_cast<double>(wide), expected) << bits;
    ASSERT_EQ(from_float<T>(wide).bits, bits) << "does not come back";
  }
}

TEST(Half, HoldsEveryValue) { check_all_values<Half>(5, 10); }
TEST(BFloat16, HoldsEveryValue) { check_all_values<BFloat16>(8, 7); }

// A number between two neighbours rounds to the nearer one, and in the middle to the even one.
template <class T>
void check_rounding(uint32_t largest_finite) {
  for (uint32_t bits = 0; bits < largest_finite; ++bits) {
    const double low = to_float(T{static_cast<uint16_t>(bits)});
    const double high = to_float(T{static_cast<uint16_t>(bits + 1)});
    const auto middle = static_cast<float>((low + high) / 2);
    ASSERT_EQ(from_float<T>(middle).bits, bits + (bits & 1)) << bits;
    ASSERT_EQ(from_float<T>(std::nextafter(middle, 0.0f)).bits, bits) << bits;
    ASSERT_EQ(from_float<T>(std::nextafter(middle, HUGE_VALF)).bits, bits + 1) << bits;
    ASSERT_EQ(from_float<T>(-middle).bits, 0x8000u + bits + (bits & 1)) << bits;
  }
}

TEST(Half, RoundsToNearestEven) { check_rounding<Half>(0x7bff); }
TEST(BFloat16, RoundsToNearestEven) {
  check_rounding<BFloat16>(0x7f7f);
  EXPECT_EQ(from_float<BFloat16>(std::numeric_limits<float>::max()).bits, 0x7f80);
}

TEST(Half, OverflowsToInfinity) {
  EXPECT_EQ(from_float<Half>(65504.0f).bits, 0x7bff);
  EXPECT_EQ(from_float<Half>(65519.0f).bits, 0x7bff);
  EXPECT_EQ(from_float<Half>(65520.0f).bits, 0x7c00);
  EXPECT_EQ(from_float<Half>(-1e30f).bits, 0xfc00);
  EXPECT_EQ(from_float<Half>(1e-30f).bits, 0);
}

TEST(Math, ChecksOverflow) {
  int64_t result = 17;
  EXPECT_FALSE(checked_mul(INT64_MAX, 2, &result));
  EXPECT_FALSE(checked_mul(int64_t{1} << 32, int64_t{1} << 31, &result));
  EXPECT_TRUE(checked_mul(int64_t{1} << 31, int64_t{1} << 31, &result));
  EXPECT_EQ(result, int64_t{1} << 62);
  EXPECT_FALSE(checked_add(INT64_MAX, 1, &result));
  EXPECT_TRUE(checked_add(INT64_MAX - 1, 1, &result));
  EXPECT_EQ(result, INT64_MAX);
}

TEST(Size, SaturatesInsteadOfWrapping) {
  EXPECT_EQ((Size(6) * 7 + 8).value(), 50);
  EXPECT_TRUE((Size(int64_t{1} << 31) * (int64_t{1} << 30)).fits());
  for (const Size size : {Size(int64_t{1} << 31) * (int64_t{1} << 31), Size(INT64_MAX),
                          Size(Size::kMax - 1) + 1, Size(Size::kMax) + Size::kMax,
                          Size(int64_t{1} << 40) * (int64_t{1} << 40) * (int64_t{1} << 40)}) {
    EXPECT_FALSE(size.fits());
    EXPECT_EQ(size.value(), Size::kMax);
  }
  EXPECT_EQ((Size(INT64_MAX) * 0).value(), 0);
}

TEST(Math, Ranges) {
  EXPECT_EQ(ceil_div(0, 4), 0);
  EXPECT_EQ(ceil_div(1, 4), 1);
  EXPECT_EQ(ceil_div(8, 4), 2);
  EXPECT_EQ(round_up(9, 8), 16);
  EXPECT_TRUE(intersect({0, 5}, {5, 9}).empty());
  EXPECT_EQ(intersect({0, 7}, {5, 9}).size(), 2);
  EXPECT_EQ((Range{5, 3}).size(), 0);
}

// Expects that `parallel` runs every index exactly once.
void expect_each_index_once(const Parallel& parallel, int64_t tasks) {
  std::vector<std::atomic<int>> seen(static_cast<std::size_t>(tasks));
  parallel.run(tasks, [&](int64_t i) { ++seen[static_cast<std::size_t>(i)]; });
  for (const auto& count : seen) ASSERT_EQ(count, 1);
}

TEST(Pool, RunsEveryIndexOnce) {
  const Parallel pool = make_parallel(nullptr);
  EXPECT_EQ(pool.threads, pool_threads());
  for (int64_t tasks : {1, 2, 3, 17, 1000})
    for (int repetition = 0; repetition < 20; ++repetition) expect_each_index_once(pool, tasks);
}

TEST(Pool, NestedCallsRun) {
  const Parallel pool = make_parallel(nullptr);
  std::atomic<int64_t> sum{0};
  pool.run(8, [&](int64_t i) { pool.run(8, [&](int64_t j) { sum += i * 8 + j; }); });
  EXPECT_EQ(sum, 64 * 63 / 2);
}

TEST(Pool, ServesSeveralCallersAtOnce) {
  const Parallel pool = make_parallel(nullptr);
  std::vector<std::thread> callers;
  for (int c = 0; c < 4; ++c)
    callers.emplace_back([&] {
      for (int repetition = 0; repetition < 20; ++repetition) expect_each_index_once(pool, 50);
    });
  for (std::thread& caller : callers) caller.join();
}

// A forked child has no threads of its parent and must not wait for them.
TEST(Pool, WorksInAForkedChild) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "ThreadSanitizer does not follow threads that start after a fork";
#endif
  const Parallel pool = make_parallel(nullptr);
  expect_each_index_once(pool, 100);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(20);  // a deadlock ends the child, not the test run
    std::atomic<int64_t> sum{0};
    pool.run(100, [&](int64_t i) { sum += i; });
    _exit(sum == 4950 ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

TEST(Pool, CallersHookReplacesThePool) {
  struct Count {
    int64_t tasks = 0;
  } count;
  tilewise_parallel hook{};
  hook.parallel_for = [](void* user, int64_t tasks, tilewise_task task, void* context) {
    static_cast<Count*>(user)->tasks += tasks;
    for (int64_t i = tasks; i-- > 0;) task(context, i);  // any order is legal
  };
  hook.user = &count;
  hook.threads = 5;
  const Parallel parallel = make_parallel(&hook);
  EXPECT_EQ(parallel.threads, 5);
  expect_each_index_once(parallel, 12);
  EXPECT_EQ(count.tasks, 12);
  hook.threads = 0;
  EXPECT_EQ(make_parallel(&hook).threads, pool_threads());
  hook.parallel_for = nullptr;
  hook.threads = 3;
  EXPECT_EQ(make_parallel(&hook).threads, 3);
  expect_each_index_once(make_parallel(&hook), 12);
}

}  // namespace
}  // namespace tilewise
