// What the planner asks about decoding. `blocks`: tiles of rows and heads, before they are cut.
#pragma once

#include "cuda/plan.h"

namespace tilewise::cuda {

inline constexpr int64_t kMaxSplits = 128;

bool reads_float8(const KernelSet& kernel_set);

// Whether its kernels are those of decoding by boxes of TMA.
bool uses_tma(const KernelSet& kernel_set);
// Whether each warp has a ring of its own: clusters and last blocks merge what these find, and
// blocks may have readers.
bool has_warp_pipelines(const Plan& plan);

// Whether clusters as large as there are find their places beside those of the next call.
bool max_clusters_fit(const Gpu& gpu, int64_t blocks);
// Whether they are better cut as many times each, however long sequences are; `tiles`: of the keys
// of one, at most.
bool prefers_uniform_splits(const Gpu& gpu, int64_t blocks, int64_t tiles);

// Whether only the GPU knows the lengths of the batch.
bool has_device_lengths(const Problem& p);

// Whether the block of a tile that is done last merges its parts.
bool last_cta_combines(const Problem& p, const Plan& plan, const Gpu& gpu, int64_t blocks);

// What a block may have to walk before it merges.
int64_t max_tiles_per_cluster_cta(const Plan& plan);

// Whether so many splits are better merged by clusters, with no second launch.
bool cluster_combine_is_faster(const Plan& plan, const Gpu& gpu, int64_t blocks, int64_t splits,
                               int64_t key_tiles);

// Blocks of a multiprocessor that read as fast as more of them.
int64_t ctas_to_saturate(const Plan& plan);

// Blocks of a cluster that each tile is better to have than parts or a second kernel; 0: it is not.
int32_t choose_max_cluster_size(const Problem& p, const Plan& plan, const Gpu& gpu, int64_t blocks);

// Whether blocks are alone on their multiprocessors, and how many warps of one then share the keys
// of its tile.
bool uses_one_cta_per_sm(const Problem& p, const Plan& plan, const Gpu& gpu, int64_t blocks);
int32_t choose_warps_per_tile(const Problem& p, const Plan& plan, const Gpu& gpu, int64_t blocks);
// Slots of the ring of each warp; 0: all that there are.
int32_t choose_stages(const Plan& plan, const Gpu& gpu, int64_t blocks);

// Where the parts of a batch lie in their grid; `tiles`: of a sequence, at most.
CtaPlacement place_chunks(const Plan& plan, const Gpu& gpu, int64_t tiles);

// Splits of as many key tiles each.
int64_t choose_tma_splits(const Plan& plan, const Gpu& gpu, int64_t blocks, int64_t key_tiles);

// When the launch after a main kernel may begin, and that after a second one which merges its
// results. The plan is complete but for this.
PdlTrigger choose_pdl_trigger(const Plan& plan, const Gpu& gpu);
PdlTrigger choose_combine_pdl_trigger(const Problem& p, const Plan& plan, const Gpu& gpu);

}  // namespace tilewise::cuda
