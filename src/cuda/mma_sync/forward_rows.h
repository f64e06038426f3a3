// The tile of a block (cuda/common/query_tile.h), and the thread that asks for it.
#pragma once

#include "cuda/common/query_tile.h"

namespace tilewise::cuda::mma_sync {

TILEWISE_DEVICE int recent_thread() {
  return static_cast<int>(ptx::recent(static_cast<uint32_t>(ptx::thread_index())));
}

}  // namespace tilewise::cuda::mma_sync
