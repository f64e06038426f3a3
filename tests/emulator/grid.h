// Runs a kernel on this CPU: the blocks of a grid run one after another, and every thread of a
// block is a fiber of the calling host thread. This does not work in programs built with
// AddressSanitizer or ThreadSanitizer, which would have to be told of every stack switch.
#pragma once

#include <cstdint>
#include <stdexcept>

namespace tilewise::cuda::emulator {

// The kernel did something that a GPU does not define, or would wait forever. The text names
// kernel, block and thread.
struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Counts of the last grid of this host thread, over all blocks.
struct Statistics {
  int64_t blocks = 0;
  int64_t switches = 0;  // from one thread to another
  int64_t block_barriers = 0;
  int64_t shuffles = 0;  // per warp, votes included
  int64_t matrix_products = 0;
  int64_t matrix_loads = 0;  // 8x8 matrices read by ldmatrix: one wavefront each without conflicts
  int64_t matrix_load_conflicts = 0;  // additional wavefronts
  int64_t shared_accesses = 0;        // ld.shared and st.shared, per thread
  int64_t shared_conflicts = 0;       // additional wavefronts, per warp, when counted
  int64_t copied_bytes = 0;           // cp.async
  int64_t bulk_bytes = 0;             // cp.async.bulk and its variants, whole boxes
  int64_t warpgroup_products = 0;     // wgmma, per warp
  int64_t tensor_products = 0;        // tcgen05.mma
  // Those that follow an unfinished product in an order that GPUs keep and the ISA does not
  // promise.
  int64_t tensor_products_by_issue = 0;
  int64_t tensor_loads = 0;   // columns read by tcgen05.ld, per warp
  int64_t tensor_stores = 0;  // columns written by tcgen05.st, per warp
};
const Statistics& statistics();

// Represents a stream that records a graph. On any other stream a grid runs when it is launched.
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

// Runs `body()` as every thread of every block, `cluster` blocks together. Throws Fault.
template <class Body>
void run_grid(int64_t blocks, int threads, int shared_bytes, Body body, int cluster = 1) {
  detail::run({blocks, threads, shared_bytes, __PRETTY_FUNCTION__,
               [](const void* b) { (*static_cast<const Body*>(b))(); }, &body, cluster});
}

}  // namespace tilewise::cuda::emulator
