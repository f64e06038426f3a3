// The library's own pool: started at the first parallel call, restarted in a forked child.
#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <charconv>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "base/math.h"
#include "base/parallel.h"

namespace tilewise {
namespace {

int32_t usable_processors() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set);
#endif
  return static_cast<int32_t>(std::thread::hardware_concurrency());
}

class Pool {
 public:
  // The pool has fewer threads than requested if the system grants no more (limits on processes or
  // on the memory for stacks). Results do not depend on their number.
  explicit Pool(int32_t threads) {
    workers_.reserve(static_cast<size_t>(max(threads, 1)));
    try {
      for (int32_t i = 1; i < threads; ++i) workers_.emplace_back([this] { work(); });
    } catch (const std::system_error&) {
      return;
    }
  }

  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  void run(int64_t tasks, tilewise_task task, void* context) {
    std::lock_guard<std::mutex> one_call_at_a_time(call_);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      task_ = task;
      context_ = context;
      tasks_ = tasks;
      next_.store(0, std::memory_order_relaxed);
      busy_ = static_cast<int32_t>(workers_.size());
      ++generation_;
    }
    wake_.notify_all();
    run_tasks();
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return busy_ == 0; });
  }

 private:
  void run_tasks() {
    for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < tasks_;)
      task_(context_, i);
  }

  void work() {
    int64_t seen = 0;
    for (;;) {
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return stop_ || generation_ != seen; });
        if (stop_) return;
        seen = generation_;
      }
      run_tasks();
      std::lock_guard<std::mutex> lock(mutex_);
      if (--busy_ == 0) done_.notify_one();
    }
  }

  std::mutex call_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable done_;
  std::vector<std::thread> workers_;
  tilewise_task task_ = nullptr;
  void* context_ = nullptr;
  int64_t tasks_ = 0;
  std::atomic<int64_t> next_{0};
  int32_t busy_ = 0;
  int64_t generation_ = 0;
  bool stop_ = false;
};

// Never destroyed, because a program may call the library while it exits. After a fork the threads
// are gone and the locks are in an unknown state, so the child drops the pool and starts another.
std::atomic<Pool*> pool{nullptr};
std::mutex* pool_mutex = new std::mutex;
thread_local bool inside_task = false;

Pool& instance() {
  if (Pool* existing = pool.load(std::memory_order_acquire)) return *existing;
  std::lock_guard<std::mutex> lock(*pool_mutex);
  if (pool.load(std::memory_order_relaxed) == nullptr) {
    static std::once_flag once;
    std::call_once(once, [] {
      pthread_atfork(nullptr, nullptr, [] {
        pool.store(nullptr);
        pool_mutex = new std::mutex;
      });
    });
    pool.store(new Pool(pool_threads()), std::memory_order_release);
  }
  return *pool.load(std::memory_order_relaxed);
}

struct Call {
  tilewise_task task;
  void* context;
};

void run_marked(void* context, int64_t index) {
  const Call& call = *static_cast<const Call*>(context);
  inside_task = true;
  call.task(call.context, index);
  inside_task = false;
}

void pool_parallel_for(void*, int64_t tasks, tilewise_task task, void* context) {
  if (inside_task || pool_threads() == 1) {  // a nested call runs on its own thread
    for (int64_t i = 0; i < tasks; ++i) task(context, i);
    return;
  }
  Call call{task, context};
  instance().run(tasks, run_marked, &call);
}

struct PoolSize {
  int32_t threads = max(1, usable_processors());
  std::string problem;
};

// Read only once: the pool never shrinks or grows.
const PoolSize& pool_size() {
  static const PoolSize size = [] {
    constexpr int32_t kMaxThreads = 4096;
    PoolSize of_machine;
    const char* text = std::getenv("TILEWISE_NUM_THREADS");
    if (text == nullptr || *text == '\0') return of_machine;
    int32_t requested = 0;
    const auto [end, error] = std::from_chars(text, text + std::strlen(text), requested);
    if (error == std::errc() && *end == '\0' && requested >= 1 && requested <= kMaxThreads)
      return PoolSize{requested, {}};
    of_machine.problem = "TILEWISE_NUM_THREADS is \"" + std::string(text) +
                         "\": it must be a number from 1 to " + std::to_string(kMaxThreads);
    return of_machine;
  }();
  return size;
}

}  // namespace

int32_t pool_threads() { return pool_size().threads; }
std::string pool_problem() { return pool_size().problem; }

Parallel make_parallel(const tilewise_parallel* hook) {
  if (hook == nullptr || hook->parallel_for == nullptr) {
    const int32_t requested = hook != nullptr ? hook->threads : 0;
    return {pool_parallel_for, nullptr, requested > 0 ? requested : pool_threads()};
  }
  return {hook->parallel_for, hook->user, hook->threads > 0 ? hook->threads : pool_threads()};
}

}  // namespace tilewise
