// Tilewise benchmark: measures the machine's peak rates.
//
// Registers only, on all threads at once: fp32 FMA per instruction set, bf16 dot product
// (vdpbf16ps; on Arm bfdot), AMX bf16 tile product. The attention benchmark divides by these
// numbers, so each is the best of several repetitions: a peak is a limit, not an average.
//
//   g++ -O3 -std=c++20 -pthread peaks.cpp -o peaks && ./peaks --threads 2
//
// Copyright (c) 2026 The Tilewise authors. BSD-3-Clause.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#include <sys/auxv.h>
#endif

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Keeps a result alive without a store that the loop would have to wait for.
template <class T>
void keep(const T& value) {
  asm volatile("" : : "r"(&value) : "memory");
}

// A work function runs `rounds` rounds and returns their number of flop.
using Work = std::function<double(int thread, int64_t rounds)>;

struct Rate {
  double best = 0;
  double median = 0;
};

// Runs `work` on all threads at once, `repetitions` times. A repetition lasts from the common start
// to the end of the last thread.
Rate measure(int threads, int repetitions, int64_t rounds, const Work& work) {
  std::vector<double> rates;
  for (int repetition = 0; repetition < repetitions; ++repetition) {
    std::atomic<int> ready{0};
    std::atomic<bool> go{false};
    std::vector<double> done(static_cast<size_t>(threads));
    std::vector<Clock::time_point> ends(static_cast<size_t>(threads));
    std::vector<std::thread> pool;
    for (int t = 0; t < threads; ++t) {
      pool.emplace_back([&, t] {
        (void)work(t, std::max<int64_t>(1, rounds / 16));  // powers up the vector units
        ready.fetch_add(1);
        while (!go.load(std::memory_order_acquire)) {
        }
        done[static_cast<size_t>(t)] = work(t, rounds);
        ends[static_cast<size_t>(t)] = Clock::now();
      });
    }
    while (ready.load() < threads) std::this_thread::yield();
    const auto start = Clock::now();
    go.store(true, std::memory_order_release);
    for (std::thread& thread : pool) thread.join();
    double total = 0;
    for (double amount : done) total += amount;
    const auto last = *std::max_element(ends.begin(), ends.end());
    rates.push_back(total / std::chrono::duration<double>(last - start).count());
  }
  std::sort(rates.begin(), rates.end());
  return {rates.back(), rates[rates.size() / 2]};
}

// The number of rounds that take about `target` seconds on one thread.
int64_t calibrate(const Work& work, double target) {
  for (int64_t rounds = 64;; rounds *= 2) {
    const auto start = Clock::now();
    (void)work(0, rounds);
    const double elapsed = seconds_since(start);
    if (elapsed > target / 4) {
      return std::max<int64_t>(
          1, static_cast<int64_t>(static_cast<double>(rounds) * target / elapsed));
    }
  }
}

// 12 independent chains: a latency of 4 cycles on 2 units needs 8, and register files hold 16.
constexpr int kChains = 12;
// Arrays of accumulators stay in registers only if the loops over them are fully unrolled.
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 32")
#endif
volatile float one_ish = 0.999999f;

// Chains have different start values: the compiler would merge equal ones.
template <class Vector, int N>
void start(Vector (&chain)[N]) {
  for (int c = 0; c < N; ++c) chain[c] = Vector{} + static_cast<float>(c);
}

double work_portable(int, int64_t rounds) {
  typedef float Vector __attribute__((vector_size(16)));
  const float m = one_ish;
  const Vector x = {m, m, m, m};
  Vector chain[kChains];
  start(chain);
  for (int64_t r = 0; r < rounds; ++r) {
    UNROLL for (int c = 0; c < kChains; ++c) chain[c] = chain[c] * x + x;
  }
  keep(chain);
  return static_cast<double>(rounds) * kChains * 4 * 2;
}

#if defined(__x86_64__)

struct Features {
  bool avx2 = false;
  bool avx512 = false;
  bool avx512_bf16 = false;
  bool amx = false;
};

// CPUID tells what the processor has, XGETBV what the system saves, and arch_prctl whether this
// process may use tile registers.
Features detect() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  Features have;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & (1u << 27))) return have;
  const bool fma = c & (1u << 12);
  unsigned low = 0, high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return have;
  const unsigned leaf7_edx = d;
  have.avx2 = fma && (b & (1u << 5)) && (low & 0x6) == 0x6;
  have.avx512 = have.avx2 && (b & (1u << 16)) && (b & (1u << 30)) && (low & 0xe6) == 0xe6;
  const bool tiles = (leaf7_edx & (1u << 24)) && (leaf7_edx & (1u << 22));
  if (__get_cpuid_count(7, 1, &a, &b, &c, &d)) have.avx512_bf16 = have.avx512 && (a & (1u << 5));
  if (tiles && (low & 0x60000) == 0x60000) {
    constexpr long kRequestPermission = 0x1023;
    constexpr long kTileData = 18;
    have.amx = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }
  return have;
}

__attribute__((target("avx2,fma"))) double work_avx2(int, int64_t rounds) {
  const __m256 x = _mm256_set1_ps(one_ish);
  __m256 chain[kChains];
  start(chain);
  for (int64_t r = 0; r < rounds; ++r) {
    UNROLL for (int c = 0; c < kChains; ++c) chain[c] = _mm256_fmadd_ps(chain[c], x, x);
  }
  keep(chain);
  return static_cast<double>(rounds) * kChains * 8 * 2;
}

__attribute__((target("avx512f"))) double work_avx512(int, int64_t rounds) {
  const __m512 x = _mm512_set1_ps(one_ish);
  __m512 chain[kChains];
  start(chain);
  for (int64_t r = 0; r < rounds; ++r) {
    UNROLL for (int c = 0; c < kChains; ++c) chain[c] = _mm512_fmadd_ps(chain[c], x, x);
  }
  keep(chain);
  return static_cast<double>(rounds) * kChains * 16 * 2;
}

__attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16"))) double work_dot(int,
                                                                                int64_t rounds) {
  // The latency is 5-6 cycles at up to two per cycle, which needs more chains than FMA.
  constexpr int kDotChains = 16;
  const __m512bh x = _mm512_cvtne2ps_pbh(_mm512_set1_ps(one_ish), _mm512_set1_ps(one_ish));
  __m512 chain[kDotChains];
  start(chain);
  for (int64_t r = 0; r < rounds; ++r) {
    UNROLL for (int c = 0; c < kDotChains; ++c) chain[c] = _mm512_dpbf16_ps(chain[c], x, x);
  }
  keep(chain);
  return static_cast<double>(rounds) * kDotChains * 32 * 2;
}

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t column_bytes[16] = {64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16};
};

__attribute__((target("amx-tile,amx-bf16"))) double work_amx(int, int64_t rounds) {
  // A constant in memory, because GCC's intrinsic claims to read only 8 bytes of it.
  static constexpr TileConfig kConfig;
  _tile_loadconfig(&kConfig);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
  for (int64_t r = 0; r < rounds; ++r) {
    for (int step = 0; step < 4; ++step) {
      _tile_dpbf16ps(0, 4, 5);
      _tile_dpbf16ps(1, 4, 5);
      _tile_dpbf16ps(2, 4, 5);
      _tile_dpbf16ps(3, 4, 5);
    }
  }
  _tile_release();
  return static_cast<double>(rounds) * 16 * (16.0 * 16.0 * 32.0 * 2.0);
}

#elif defined(__aarch64__)

// Four vector units with a latency of 4 cycles need 16 chains. The instructions are written out:
// with intrinsics GCC 12 stores every sum in every round, and compilers differ in how a function
// asks for bf16. An operand of asm must not be in an array, or the array stays in memory.
#define ARM_WORK(function, flop, instruction)                 \
  double function(int, int64_t rounds) {                      \
    constexpr int kArmChains = 16;                            \
    const float32x4_t x = vdupq_n_f32(one_ish);               \
    float32x4_t chain[kArmChains];                            \
    start(chain);                                             \
    for (int64_t r = 0; r < rounds; ++r) {                    \
      UNROLL for (int c = 0; c < kArmChains; ++c) {           \
        float32x4_t sum = chain[c];                           \
        asm(instruction : "+w"(sum) : "w"(x));                \
        chain[c] = sum;                                       \
      }                                                       \
    }                                                         \
    keep(chain);                                              \
    return static_cast<double>(rounds) * kArmChains * (flop); \
  }
ARM_WORK(work_neon, 4 * 2, "fmla %0.4s, %1.4s, %1.4s")
ARM_WORK(work_bfdot, 8 * 2, ".arch_extension bf16\n\tbfdot %0.4s, %1.8h, %1.8h")

bool has_bf16() { return (getauxval(AT_HWCAP2) & (1u << 14)) != 0; }  // HWCAP2_BF16

#endif

void print_rate(const char* name, Rate rate, bool& first) {
  std::printf("%s\n  \"%s\": {\"best\": %.4g, \"median\": %.4g}", first ? "" : ",", name, rate.best,
              rate.median);
  first = false;
}

int64_t argument(int argc, char** argv, const char* name, int64_t fallback) {
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::strcmp(argv[i], name) == 0) {
      const int64_t value = std::atoll(argv[i + 1]);
      if (value >= 1) return value;
      std::fprintf(stderr, "peaks: %s is %s, but must be at least 1\n", name, argv[i + 1]);
      std::exit(2);
    }
  }
  return fallback;
}

}  // namespace

int main(int argc, char** argv) {
  const int threads = static_cast<int>(argument(argc, argv, "--threads", 1));
  const int repetitions = static_cast<int>(argument(argc, argv, "--repetitions", 15));
  bool first = true;
  std::printf("{\"threads\": %d, \"flops\": {", threads);
  const auto flops = [&](const char* name, const Work& work) {
    print_rate(name, measure(threads, repetitions, calibrate(work, 0.005), work), first);
  };
  flops("portable.fma", work_portable);
#if defined(__x86_64__)
  const Features have = detect();
  if (have.avx2) flops("avx2.fma", work_avx2);
  if (have.avx512) flops("avx512.fma", work_avx512);
  if (have.avx512_bf16) flops("avx512_bf16.dot", work_dot);
  if (have.amx) flops("amx.tile", work_amx);
#elif defined(__aarch64__)
  flops("neon.fma", work_neon);
  if (has_bf16()) flops("neon_bf16.dot", work_bfdot);
#endif
  std::printf("\n}}\n");
  return 0;
}
