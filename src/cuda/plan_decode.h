// Planning of decodes: splits, clusters, chunks, warps per tile and PDL triggers. Splits are a
// fixed number of parts of a sequence; chunks are parts of equal length, which the GPU cuts out of
// a varlen batch. `blocks` is the number of tiles, over rows, heads and sequences, before their
// keys are split. The evidence for each rule is in docs/lab/decode-planner-rules.md.
#pragma once

#include "cuda/plan.h"

namespace tilewise::cuda {

inline constexpr int64_t kMaxSplits = 128;

bool reads_float8(const KernelSet& kernel_set);

// Whether the kernels have the tile of decoding, which is as small as an instruction allows.
bool uses_decode_tile(const Plan& plan);

// Whether the kernels decode with keys and values loaded by TMA.
bool uses_tma(const KernelSet& kernel_set);
// Whether each warp loads and reads a pipeline of its own. Only then can clusters or the last CTA
// of a tile combine, and two warps share a tile.
bool has_warp_pipelines(const Plan& plan);

// Whether maximum-size clusters can be co-resident with those of the next launch.
bool max_clusters_fit(const Gpu& gpu, int64_t blocks);
// Whether the same number of splits for every sequence, regardless of its length, is faster than
// chunks. `tiles` is the maximum number of key tiles of a sequence.
bool prefers_uniform_splits(const Gpu& gpu, int64_t blocks, int64_t tiles);

// Whether only the GPU knows the lengths of the sequences.
bool has_device_lengths(const Problem& p);

// Whether the CTA that finishes a tile last should combine its chunks.
bool last_cta_combines(const Problem& p, const Plan& plan, const Gpu& gpu, int64_t blocks);

// Maximum number of key tiles per CTA with which combining in a cluster still pays.
int64_t max_tiles_per_cluster_cta(const Plan& plan);

// Whether combining `splits` splits in clusters is faster than a combine kernel.
bool cluster_combine_is_faster(const Plan& plan, const Gpu& gpu, int64_t blocks, int64_t splits,
                               int64_t key_tiles);

// CTAs per SM beyond which more CTAs do not read faster.
int64_t ctas_to_saturate(const Plan& plan);

// Plan::max_cluster_size: the largest number of splits per tile, combined in a cluster, if clusters
// are faster than chunks and than a combine kernel; otherwise 0. The plan then has that many splits
// or fewer, so that all have the same number of key tiles (choose_tma_splits).
int32_t choose_max_cluster_size(const Problem& p, const Plan& plan, const Gpu& gpu, int64_t blocks);

// Whether one CTA per SM is as fast as two, and how many warps of a CTA share the keys of its tile.
bool uses_one_cta_per_sm(const Problem& p, const Plan& plan, const Gpu& gpu, int64_t blocks);
int32_t choose_warps_per_tile(const Problem& p, const Plan& plan, const Gpu& gpu, int64_t blocks);
// Stages of each warp's pipeline; 0: as many as fit.
int32_t choose_stages(const Plan& plan, const Gpu& gpu, int64_t blocks);

// Places chunks on the CTAs of the grid. `tiles` is the maximum number of key tiles of a sequence.
CtaPlacement place_chunks(const Plan& plan, const Gpu& gpu, int64_t tiles);

// Number of splits, which all have the same number of key tiles.
int64_t choose_tma_splits(const Plan& plan, const Gpu& gpu, int64_t blocks, int64_t key_tiles);

// When the main kernel and the combine kernel trigger the next launch. Everything else of the plan
// has been chosen.
PdlTrigger choose_pdl_trigger(const Plan& plan, const Gpu& gpu);
PdlTrigger choose_combine_pdl_trigger(const Problem& p, const Plan& plan, const Gpu& gpu);

}  // namespace tilewise::cuda
