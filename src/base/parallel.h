// Running tasks at once: through the caller's hook or on the library's own pool.
#pragma once

#include <string>

#include "base/thread_state.h"
#include "tilewise/tilewise.h"

namespace tilewise {

// `threads` tasks may run at once. Backends start that many workers, each with scratch of its own,
// and let them take work items from a shared counter: the pool never decides who computes what, so
// results cannot depend on it. Every task runs in the default floating-point state, whichever
// thread it is given to.
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

// The hook of the caller, or the pool when `hook` is null or has no function.
Parallel make_parallel(const tilewise_parallel* hook);

// Threads of the library's own pool: TILEWISE_NUM_THREADS, or the processors this process may use.
int32_t pool_threads();

// One sentence when TILEWISE_NUM_THREADS is no such number, else empty.
std::string pool_problem();

}  // namespace tilewise
