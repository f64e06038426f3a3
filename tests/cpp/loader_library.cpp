// The shared library in programs that load it, unload it, fork, cancel threads and trap
// floating-point exceptions. These tests are not linked to the library.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cfenv>
#include <filesystem>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include "tilewise/tilewise.h"

namespace {

class Library {
 public:
  Library() : handle_(dlopen(TILEWISE_LIBRARY, RTLD_NOW | RTLD_LOCAL)) {
    if (handle_ == nullptr) throw std::runtime_error(dlerror());
  }
  ~Library() { dlclose(handle_); }
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  template <class Function>
  Function* symbol(const char* name) const {
    return reinterpret_cast<Function*>(dlsym(handle_, name));
  }

 private:
  void* handle_;
};

// A forward that is large enough to occupy every thread of the pool. All rows of v are equal, so
// every row of the output equals that row.
class Call {
 public:
  explicit Call(const Library& library, int64_t rows = 512)
      : plan_(library.symbol<decltype(tilewise_plan)>("tilewise_plan")),
        forward_(library.symbol<decltype(tilewise_forward)>("tilewise_forward")),
        q_(static_cast<std::size_t>(rows * kHeads * kDim), 0.5f),
        out_(q_.size()) {
    a_.struct_size = sizeof(a_);
    a_.batch = 1;
    a_.seqlen_q = a_.seqlen_k = rows;
    a_.heads_q = a_.heads_kv = kHeads;
    a_.head_dim = a_.head_dim_v = kDim;
    a_.q = a_.k = a_.v = {q_.data(), rows * kHeads * kDim, kHeads * kDim, kDim};
    a_.out = {out_.data(), rows * kHeads * kDim, kHeads * kDim, kDim};
    a_.window_left = a_.window_right = -1;
    a_.scale = 0.25f;
  }

  void set_hook(const tilewise_parallel* hook) { a_.parallel = hook; }

  bool run() {
    tilewise_plan_info plan{};
    plan.struct_size = sizeof(plan);
    if (plan_(&a_, nullptr, TILEWISE_PASS_FORWARD, &plan) != TILEWISE_OK) return false;
    const auto room = static_cast<std::size_t>(plan.workspace_bytes) + kAlignment;
    const std::unique_ptr<char[]> memory(new char[room]);
    const auto address = reinterpret_cast<std::uintptr_t>(memory.get());
    char* const workspace = memory.get() + (kAlignment - address % kAlignment) % kAlignment;
    out_.assign(out_.size(), 0.0f);
    if (forward_(&a_, workspace, plan.workspace_bytes) != TILEWISE_OK) return false;
    for (const float value : out_)
      if (value < 0.4999f || value > 0.5001f) return false;
    return true;
  }

 private:
  static constexpr int64_t kHeads = 4, kDim = 64;
  static constexpr std::size_t kAlignment = 64;

  decltype(tilewise_plan)* plan_;
  decltype(tilewise_forward)* forward_;
  std::vector<float> q_, out_;
  tilewise_attention a_{};
};

int64_t threads_of_this_process() {
  const std::filesystem::directory_iterator tasks("/proc/self/task");
  return std::distance(begin(tasks), end(tasks));
}

TEST(Loader, LibraryStaysMappedWhileItsThreadsLive) {
  const auto load_call_and_unload = [] {
    const Library library;
    EXPECT_TRUE(Call(library).run());
  };
  load_call_and_unload();
  const int64_t threads = threads_of_this_process();
  void* const still_there = dlopen(TILEWISE_LIBRARY, RTLD_NOW | RTLD_NOLOAD);
  ASSERT_NE(still_there, nullptr) << "unmapped under the threads of its pool";
  dlclose(still_there);
  for (int i = 0; i < 50; ++i) load_call_and_unload();
  EXPECT_EQ(threads_of_this_process(), threads) << "one pool, however often the library is loaded";
}

// Forks and expects a correct call in the child. An alarm ends a child that hangs.
void expect_a_call_in_a_child(const Library& library) {
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(60);
    _exit(Call(library).run() ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

TEST(Loader, ForkedChildCanCall) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "ThreadSanitizer does not follow threads that start after a fork";
#endif
  const Library library;
  expect_a_call_in_a_child(library);  // before the parent's first call
  ASSERT_TRUE(Call(library).run());
  expect_a_call_in_a_child(library);

  std::atomic<bool> stop{false};  // another thread of the parent is inside a call
  std::thread other([&] {
    Call call(library);
    while (!stop) EXPECT_TRUE(call.run());
  });
  for (int i = 0; i < 5; ++i) expect_a_call_in_a_child(library);
  stop = true;
  other.join();
}

// The hook waits at a cancellation point until its thread has been cancelled.
TEST(Loader, CancellationWaitsUntilTheCallIsOver) {
  struct State {
    const Library library;
    Call call{library};
    std::atomic<bool> inside{false}, cancelled{false}, correct{false}, went_on{false};
  } state;
  tilewise_parallel hook{};
  hook.user = &state;
  hook.threads = 2;
  hook.parallel_for = [](void* user, int64_t tasks, tilewise_task task, void* context) {
    State& s = *static_cast<State*>(user);
    s.inside = true;
    while (!s.cancelled) usleep(1000);
    usleep(1000);
    for (int64_t i = 0; i < tasks; ++i) task(context, i);
  };
  state.call.set_hook(&hook);
  pthread_t thread;
  ASSERT_EQ(pthread_create(
                &thread, nullptr,
                [](void* user) -> void* {
                  State& s = *static_cast<State*>(user);
                  s.correct = s.call.run();
                  pthread_testcancel();
                  s.went_on = true;
                  return nullptr;
                },
                &state),
            0);
  while (!state.inside) usleep(1000);
  ASSERT_EQ(pthread_cancel(thread), 0);
  state.cancelled = true;
  void* result = nullptr;
  ASSERT_EQ(pthread_join(thread, &result), 0);
  EXPECT_TRUE(state.correct) << "the call ends as if nothing had happened";
  EXPECT_EQ(result, PTHREAD_CANCELED) << "the thread ends at its next cancellation point";
  EXPECT_FALSE(state.went_on);
}

#if defined(__GLIBC__)
TEST(Loader, TrappedExceptionsAreMaskedDuringACall) {
  const Library library;
  std::feclearexcept(FE_ALL_EXCEPT);
  constexpr int kTrapped = FE_INVALID | FE_DIVBYZERO | FE_OVERFLOW | FE_UNDERFLOW | FE_INEXACT;
  Call call(library);
  feenableexcept(kTrapped);
  const int wanted = fegetexcept();  // none on cores that cannot trap, as most of Arm's
  const bool correct = call.run();
  const int trapped = fegetexcept();
  fedisableexcept(FE_ALL_EXCEPT);
  EXPECT_TRUE(correct);
  EXPECT_EQ(trapped, wanted);
}
#endif

}  // namespace
