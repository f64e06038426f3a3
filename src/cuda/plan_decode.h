// What the planner asks about decoding. `blocks`: tiles of rows and heads, before they are cut.
#pragma once

#include "cuda/plan.h"

namespace tilewise::cuda {

inline constexpr int64_t kMostSplits = 128;

bool reads_float8(const UnitTable& unit);

// Whether its kernels are those of decoding by boxes of TMA.
bool has_boxes(const UnitTable& unit);
// Whether each warp has a ring of its own: clusters and last blocks merge what these find, and
// blocks may have readers.
bool has_warp_rings(const Plan& plan);

// Whether clusters as large as there are find their places beside those of the next call.
bool has_few_tiles(const Gpu& gpu, int64_t blocks);
// Whether they are better cut as many times each, however long sequences are; `tiles`: of the keys
// of one, at most.
bool are_few_cut_alike(const Gpu& gpu, int64_t blocks, int64_t tiles);

// Whether only the GPU knows the lengths of the batch.
bool are_uneven(const Problem& p);

// Whether the block of a tile that is done last merges its parts.
bool merges_parts(const Problem& p, const Plan& plan, const Gpu& gpu, int64_t blocks);

// What a block may have to walk before it merges.
int64_t few_tiles(const Plan& plan);

// Whether so many splits are better merged by clusters, with no second launch.
bool are_better_merged(const Plan& plan, const Gpu& gpu, int64_t blocks, int64_t splits,
                       int64_t key_tiles);

// Blocks of a multiprocessor that read as fast as more of them.
int64_t readers_of_multiprocessor(const Plan& plan);

// Blocks of a cluster that each tile is better to have than parts or a second kernel; 0: it is not.
int32_t choose_clusters(const Problem& p, const Plan& plan, const Gpu& gpu, int64_t blocks);

// Whether blocks are alone on their multiprocessors, and how many warps of one then share the keys
// of its tile.
bool reads_alone(const Problem& p, const Plan& plan, const Gpu& gpu, int64_t blocks);
int32_t choose_readers(const Problem& p, const Plan& plan, const Gpu& gpu, int64_t blocks);
// Slots of the ring of each warp; 0: all that there are.
int32_t choose_slots(const Plan& plan, const Gpu& gpu, int64_t blocks);

// Where the parts of a batch lie in their grid; `tiles`: of a sequence, at most.
Spread spread_parts(const Plan& plan, const Gpu& gpu, int64_t tiles);

// Splits of as many key tiles each.
int64_t choose_splits_of_boxes(const Plan& plan, const Gpu& gpu, int64_t blocks, int64_t key_tiles);

// When the launch after a main kernel may begin, and that after a second one which merges its
// results. The plan is complete but for this.
NextStart next_start(const Plan& plan, const Gpu& gpu);
NextStart next_start_of_merge(const Problem& p, const Plan& plan, const Gpu& gpu);

}  // namespace tilewise::cuda
