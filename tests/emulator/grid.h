// Runs a kernel on this CPU: the blocks of a grid one after another, every thread of a block as a
// fiber of the calling host thread. Not for programs built with AddressSanitizer or
// ThreadSanitizer, which would have to be told of every change of stack.
#pragma once

#include <cstdint>
#include <stdexcept>

namespace tilewise::cuda::emulator {

// The kernel did what a GPU does not define, or would wait for ever. The text names kernel, block
// and thread.
struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// What the last grid of this host thread did, all blocks together.
struct Statistics {
  int64_t blocks = 0;
  int64_t switches = 0;  // from one thread to another
  int64_t block_barriers = 0;
  int64_t shuffles = 0;  // per warp, votes included
  int64_t matrix_products = 0;
  int64_t matrix_loads = 0;  // 8x8 matrices read by ldmatrix: one wavefront each when all is well
  int64_t matrix_load_conflicts = 0;  // wavefronts beyond that
  int64_t shared_accesses = 0;        // ld.shared and st.shared, per thread
  int64_t shared_conflicts = 0;       // their wavefronts beyond the least, per warp, when counted
  int64_t copied_bytes = 0;           // cp.async
  int64_t bulk_bytes = 0;             // cp.async.bulk and its relatives, whole boxes
  int64_t warpgroup_products = 0;     // wgmma, per warp
};
const Statistics& statistics();

// Stands for a stream that records a graph. All others are alike: a grid runs when it is launched.
inline void* captured_stream() {
  static char address;
  return &address;
}

namespace detail {
struct Launch {
  int64_t blocks;
  int threads;
  int shared_bytes;
  const char* kernel;  // for messages
  void (*invoke)(const void* body);
  const void* body;
  int cluster = 1;  // blocks that run together
};
void run(const Launch& launch);
}  // namespace detail

// Runs `body()` as every thread of every block, `cluster` blocks side by side. Throws Fault.
template <class Body>
void run_grid(int64_t blocks, int threads, int shared_bytes, Body body, int cluster = 1) {
  detail::run({blocks, threads, shared_bytes, __PRETTY_FUNCTION__,
               [](const void* b) { (*static_cast<const Body*>(b))(); }, &body, cluster});
}

}  // namespace tilewise::cuda::emulator
