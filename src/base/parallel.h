// Running tasks in parallel, with the caller's hook or on the library's own pool.
#pragma once

#include <string>

#include "base/thread_state.h"
#include "tilewise/tilewise.h"

namespace tilewise {

// Up to `threads` tasks run at a time. Backends start that many workers, each with its own scratch
// memory, which take work items from a shared counter. Results do not depend on which worker
// computes which item. Every task runs in the default floating-point state, whatever thread it runs
// on.
struct Parallel {
  void (*parallel_for)(void* user, int64_t tasks, tilewise_task task, void* context);
  void* user;
  int32_t threads;

  template <class Body>
  void run(int64_t tasks, const Body& body) const {
    const auto task = [](void* context, int64_t index) {
      const DefaultFloatState state;
      (*static_cast<const Body*>(context))(index);
    };
    void* const context = const_cast<void*>(static_cast<const void*>(&body));
    if (tasks == 1) return task(context, 0);
    const CallersFloatState callers;
    parallel_for(user, tasks, task, context);
  }
};

// The hook of the caller, or the pool if `hook` is null or has no function.
Parallel make_parallel(const tilewise_parallel* hook);

// Threads of the library's own pool: TILEWISE_NUM_THREADS, or the number of processors this process
// may use.
int32_t pool_threads();

// One sentence if TILEWISE_NUM_THREADS is not a valid number, else empty.
std::string pool_problem();

}  // namespace tilewise
