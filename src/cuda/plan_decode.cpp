// Planning of decodes: how many CTAs and warps read a tile, and which kernel combines their
// results. docs/lab/decode-planner-rules.md has the measurements behind each threshold.
#include "cuda/plan_decode.h"

#include "cuda/arch/limits.h"
#include "cuda/common/combine.h"
#include "cuda/plan.h"
#include "cuda/plan_shape.h"

namespace tilewise::cuda {
namespace {

// Whether `blocks` CTAs occupy at least this fraction of the SMs.
bool fills_3_of_4_sms(const Gpu& gpu, int64_t blocks) {
  return blocks * 4 >= int64_t{gpu.sm_count} * 3;
}
bool fills_2_of_3_sms(const Gpu& gpu, int64_t blocks) {
  return blocks * 3 >= int64_t{gpu.sm_count} * 2;
}
bool fills_9_of_20_sms(const Gpu& gpu, int64_t blocks) {
  return blocks * 20 >= int64_t{gpu.sm_count} * 9;
}

// Maximum cluster size: sm_90 and sm_100 run more CTAs than is portable.
int64_t max_cluster_splits(const Gpu& gpu) {
  return gpu.sm < 110 ? kMaxClusterSplits : arch::kPortableClusterSize;
}

// Minimum key tiles per sequence (device lengths) from which one CTA per SM matches two. One CTA
// has nothing to combine if all sequences are long, but more to combine if some are short. `tiles`
// is the maximum of a sequence.
int64_t min_tiles_for_one_cta(int64_t rows, int64_t tiles, bool fills_2_of_3,
                              bool paged_and_fills_3_of_4) {
  constexpr int64_t kMinTiles = 32;
  if (rows <= 4) return paged_and_fills_3_of_4 ? 16 : kMinTiles;
  if (rows <= 8) return fills_2_of_3 ? 16 : kMinTiles;
  return fills_2_of_3 || tiles <= 8 ? 4 : kMinTiles;
}

}  // namespace

bool max_clusters_fit(const Gpu& gpu, int64_t blocks) {
  return blocks * kMaxClusterSplits * 4 <= int64_t{gpu.sm_count} * 3;
}

// Computing the chunk size takes a microsecond on the GPU, which only pays for more than a few
// sequences with many keys.
bool prefers_uniform_splits(const Gpu& gpu, int64_t blocks, int64_t tiles) {
  constexpr int64_t kMaxTilesPerSm = 16;  // key tiles
  const bool short_batch = blocks * tiles <= kMaxTilesPerSm * gpu.sm_count;
  return max_clusters_fit(gpu, 2 * blocks) || (short_batch && max_clusters_fit(gpu, blocks));
}

bool reads_float8(const KernelSet& kernel_set) { return kernel_set.dtype == TILEWISE_FLOAT8_E4M3; }

bool uses_tma(const KernelSet& kernel_set) {
  return kernel_set.tma.tma_forward.function != nullptr;
}
bool has_warp_pipelines(const Plan& plan) {
  return uses_tma(*plan.kernel_set) && !includes_general(plan.form);
}

// The last CTA of a tile combines when most tiles have one chunk and few have more than two or
// three. With more than four rows a combine kernel would read more, so fewer tiles suffice.
bool last_cta_combines(const Problem& p, const Plan& plan, const Gpu& gpu, int64_t blocks) {
  const bool enough_tiles = packed_rows(p, plan) > 4
                                ? fills_9_of_20_sms(gpu, blocks)
                                : plan.one_cta_per_sm && blocks * 2 > gpu.sm_count;
  return has_warp_pipelines(plan) && (enough_tiles || fills_3_of_4_sms(gpu, blocks));
}

// Tiles of float8 have twice as many keys.
int64_t max_tiles_per_cluster_cta(const Plan& plan) {
  return reads_float8(*plan.kernel_set) ? 4 : 8;
}

// Clusters save the launch of a combine kernel. They win while each CTA has few tiles and all CTAs
// of a cluster, which must start together, find room at once. Clusters of two always find room and
// win at any number of tiles.
bool cluster_combine_is_faster(const Plan& plan, const Gpu& gpu, int64_t blocks, int64_t splits,
                               int64_t key_tiles) {
  const int64_t ctas_per_sm = splits <= arch::kPortableClusterSize ? 2 : 1;
  return splits > 1 && splits <= max_cluster_splits(gpu) &&
         blocks * splits <= ctas_per_sm * gpu.sm_count &&
         (splits == 2 || ceil_div(key_tiles, splits) <= max_tiles_per_cluster_cta(plan));
}

// A warp converts float8 to fp16, so it needs three times as many instructions per byte as for
// 16-bit keys: 820 instead of 557 per tile of 64 keys and 128 columns.
int64_t ctas_to_saturate(const Plan& plan) { return reads_float8(*plan.kernel_set) ? 3 : 2; }

bool has_device_lengths(const Problem& p) {
  return p.batch > 1 && p.seqused_k != nullptr && p.window_left < 0;
}

namespace {

// Minimum key tiles per split (per chunk with device lengths) from which one CTA per SM matches
// two, when the keys of a tile are divided among several SMs. The fewer tiles the batch has, the
// more splits there are to combine, so the lower the threshold is.
int64_t min_tiles_per_split_for_one_cta(const Gpu& gpu, int64_t blocks, int64_t tiles, int64_t rows,
                                        bool device_lengths, bool paged) {
  const int64_t splits = gpu.sm_count / blocks;
  if (rows <= 8) return !device_lengths && splits == 2 ? 16 : 128;
  if (prefers_uniform_splits(gpu, blocks, tiles) && splits < kMaxSplits) return paged ? 16 : 6;
  if (!device_lengths) return 24;
  return fills_9_of_20_sms(gpu, blocks) && !paged ? 32 : 64;
}

// Whether two CTAs with two warps per tile fit on an SM: with PDL the CTAs of the next launch start
// early.
bool two_warp_split_ctas_fit(const Plan& plan, const Gpu& gpu) {
  constexpr int32_t kReserved = 1024;  // bytes of shared memory that the driver takes per CTA
  const FormKernels& kernels = plan.kernel_set->form(plan.form);
  const bool built = kernels.tma_forward_warp_split.function != nullptr ||
                     kernels.forward_warp_split.function != nullptr;
  const int32_t bytes =
      max(kernels.tma_forward_warp_split.shared_bytes, kernels.forward_warp_split.shared_bytes);
  return built && 2 * (bytes + kReserved) <= gpu.shared_bytes + kReserved;
}

// With device lengths and tiles for at least 3/8 of the SMs, clusters of four are used: they
// compute no chunk size, launch no combine kernel and still split long sequences. Three such CTAs
// per SM read sequences of full length slightly slower than one CTA with two warps per tile; with
// one row and few contiguous tiles they gain nothing at other lengths either.
int64_t cluster_size_for_device_lengths(const Problem& p, const Plan& plan, const Gpu& gpu,
                                        int64_t blocks, int64_t tiles) {
  constexpr int64_t kClusterSize = 4;
  const int64_t sms = gpu.sm_count;
  const bool fill_3_of_8 = blocks * kClusterSize * 2 > 3 * sms;
  if (!fill_3_of_8 || !has_device_lengths(p) || tiles < kClusterSize ||
      reads_float8(*plan.kernel_set))
    return 0;
  const bool two_per_sm = blocks * kClusterSize <= 2 * sms && tiles <= 64;
  const int64_t rows = packed_rows(p, plan);
  const bool enough_work = rows > 1 || tiles > 16 || plan.form != Form::tma;
  const bool three_per_sm =
      blocks * kClusterSize <= 3 * sms && enough_work && tiles <= 32 && rows <= 4;
  return two_per_sm || three_per_sm ? kClusterSize : 0;
}

// With tiles for few SMs, a combine kernel would take most of the time. Eight clusters are already
// too many: those of the next launch find no room beside them.
int64_t cluster_size_at_low_occupancy(const Plan& plan, const Gpu& gpu, int64_t blocks,
                                      int64_t tiles) {
  const int64_t cluster_size = max_cluster_splits(gpu);
  const bool fits = max_clusters_fit(gpu, blocks) && two_warp_split_ctas_fit(plan, gpu) &&
                    tiles > cluster_size &&
                    ceil_div(tiles, cluster_size) <= max_tiles_per_cluster_cta(plan);
  return fits ? cluster_size : 0;
}

}  // namespace

int32_t choose_max_cluster_size(const Problem& p, const Plan& plan, const Gpu& gpu,
                                int64_t blocks) {
  if (p.num_splits > 0 || p.batch_invariant != 0 || blocks == 0 || !has_warp_pipelines(plan))
    return 0;
  const int64_t tiles = ceil_div(max_keys_per_tile(p, max_rows(p)), int64_t{plan.tile_k});
  const int64_t low_occupancy_size = cluster_size_at_low_occupancy(plan, gpu, blocks, tiles);
  return static_cast<int32_t>(low_occupancy_size > 0
                                  ? low_occupancy_size
                                  : cluster_size_for_device_lengths(p, plan, gpu, blocks, tiles));
}

// One CTA per SM, usually with two warps per tile, reads as fast as two CTAs and leaves fewer
// results to combine. Pages cost a warp more instructions per tile, so paged caches need more
// tiles.
bool uses_one_cta_per_sm(const Problem& p, const Plan& plan, const Gpu& gpu, int64_t blocks) {
  if (!has_warp_pipelines(plan) || p.num_splits > 0 || p.batch_invariant != 0 || blocks == 0 ||
      !two_warp_split_ctas_fit(plan, gpu))
    return false;
  const int64_t splits = gpu.sm_count / blocks;
  const int64_t tiles = ceil_div(max_keys_per_tile(p, max_rows(p)), plan.tile_k);
  const int64_t rows = packed_rows(p, plan);
  const bool paged = plan.form != Form::tma;
  const bool device_lengths = paged || has_device_lengths(p);
  const bool fills_2_of_3 = fills_2_of_3_sms(gpu, blocks);
  if (splits == 0 || (paged && rows <= 8 && splits > 1) || (paged && rows <= 4 && !fills_2_of_3))
    return false;
  if (splits > 1) {
    const int64_t min_tiles =
        min_tiles_per_split_for_one_cta(gpu, blocks, tiles, rows, device_lengths, paged);
    return ceil_div(tiles, splits) >= min_tiles;
  }
  const bool paged_and_fills_3_of_4 = paged && fills_3_of_4_sms(gpu, blocks);
  return tiles >= (device_lengths
                       ? min_tiles_for_one_cta(rows, tiles, fills_2_of_3, paged_and_fills_3_of_4)
                       : 4);
}

namespace {

// Whether one CTA per SM saturates memory if each reads `gb_per_s_of_cta`. The thresholds are
// relative to the nominal bandwidth from clock and bus width.
bool saturate_memory(const Gpu& gpu, int64_t blocks, int64_t gb_per_s_of_cta) {
  const int64_t splits = gpu.sm_count / blocks;
  return gpu.memory_speed > 0 && blocks * splits * gb_per_s_of_cta >= gpu.memory_speed;
}

// Whether CTAs with two warps per tile run in so many waves that an unfinished last wave costs
// little. With device lengths, short sequences are faster with more CTAs of one warp.
bool run_many_waves(const Problem& p, const Plan& plan, const Gpu& gpu, int64_t blocks) {
  const int64_t tiles = ceil_div(max_keys_per_tile(p, max_rows(p)), int64_t{plan.tile_k});
  return !plan.one_cta_per_sm && plan.form == Form::tma && p.num_splits == 0 &&
         p.batch_invariant == 0 && two_warp_split_ctas_fit(plan, gpu) &&
         blocks * 3 >= int64_t{gpu.sm_count} * 10 && tiles >= (has_device_lengths(p) ? 17 : 16);
}

}  // namespace

int32_t choose_warps_per_tile(const Problem& p, const Plan& plan, const Gpu& gpu, int64_t blocks) {
  if (plan.max_cluster_size > 0) return max_clusters_fit(gpu, blocks) ? kMaxWarpsPerTile : 1;
  if (!plan.one_cta_per_sm) return run_many_waves(p, plan, gpu, blocks) ? kMaxWarpsPerTile : 1;
  const int64_t splits = gpu.sm_count / blocks;
  const bool long_splits = max_keys_per_tile(p, max_rows(p)) >= 32 * plan.tile_k * splits;
  const bool one_warp_saturates = plan.form == Form::tma && long_splits &&
                                  packed_rows(p, plan) <= 8 && saturate_memory(gpu, blocks, 27);
  return one_warp_saturates ? 1 : kMaxWarpsPerTile;
}

// Bytes in flight beyond what saturates HBM only queue, and some CTAs then finish late. With one
// warp per SM, three stages saturate memory when nearly all SMs read; with two warps, two stages do
// so when two thirds read. With two or three one-warp CTAs per SM, two stages are enough.
int32_t choose_stages(const Plan& plan, const Gpu& gpu, int64_t blocks) {
  if (plan.form != Form::tma || reads_float8(*plan.kernel_set)) return 0;
  const bool one_cta = plan.one_cta_per_sm && plan.max_cluster_size == 0;
  const int64_t tenths = plan.max_cluster_size > 0 ? 7 : 14;  // of the SMs
  const bool saturated = one_cta ? plan.warps_per_tile > 1 && saturate_memory(gpu, blocks, 36)
                                 : blocks * 10 >= tenths * gpu.sm_count;
  return saturated ? kReducedStages : 0;
}

// Spreads the chunks of uniform lengths over all GPCs (CtaPlacement) when the last wave leaves at
// least 1/16 of the SMs without a chunk. The hardware gives the CTAs of a grid first to idle SMs
// and then one to each SM, one GPC after the other.
//   - One CTA per SM, long sequences: there is no early launch (choose_pdl_trigger), so all SMs are
//     idle when a grid starts, and its chunks are spread over the first CTA of every SM.
//   - One CTA per SM, shorter sequences: a grid starts while the chunks of the previous one still
//     run, and sms - chunks SMs are idle. These get the first CTAs, and every SM gets one of the
//     next; the chunks are spread over both, 2 * sms - chunks CTAs.
//   - Two CTAs per SM: every SM gets a first chunk, and the second ones are spread over the SMs.
CtaPlacement place_chunks(const Plan& plan, const Gpu& gpu, int64_t tiles) {
  constexpr int64_t kMinTilesOneCta = 64;  // per sequence
  constexpr int64_t kMinTilesTwoCtas = 32;
  const ChunkSchedule& schedule = plan.chunks;
  if (!schedule.any() || schedule.longest_first()) return {};
  const int64_t sms = gpu.sm_count;
  const int64_t chunks = int64_t{plan.tiles} * schedule.chunks_if_uniform;
  if (!plan.one_cta_per_sm) {
    const int64_t second_ctas = chunks - sms;
    const bool imbalanced = second_ctas > 0 && second_ctas * 16 <= sms * 15;
    if (tiles < kMinTilesTwoCtas || !imbalanced || plan.blocks < 2 * sms) return {};
    return {.chunks = static_cast<int32_t>(second_ctas),
            .ctas = static_cast<int32_t>(sms),
            .first = static_cast<int32_t>(sms)};
  }
  const int64_t ctas = tiles >= kMinTilesOneCta ? sms : 2 * sms - chunks;
  if (chunks * 16 > sms * 15 || ctas > plan.blocks) return {};
  return {.chunks = static_cast<int32_t>(chunks), .ctas = static_cast<int32_t>(ctas)};
}

// With TMA two CTAs per SM read as fast as four and leave half as many partial results (B1, 32k
// keys: 38.0 -> 36.3 us); one CTA per SM is not far behind. Clusters of up to eight also run two
// CTAs per SM; of larger clusters only one CTA per SM has room.
int64_t choose_tma_splits(const Plan& plan, const Gpu& gpu, int64_t blocks, int64_t key_tiles) {
  if (plan.max_cluster_size > 0)
    return ceil_div(key_tiles, ceil_div(key_tiles, int64_t{plan.max_cluster_size}));
  const int64_t sms = gpu.sm_count;
  int64_t ctas_per_sm = ctas_to_saturate(plan);
  if (blocks * 2 > sms * ctas_per_sm) return 1;
  if (plan.one_cta_per_sm) ctas_per_sm = 1;
  const int64_t max_splits = min(kMaxSplits, ctas_per_sm * sms / blocks);
  int64_t cluster_splits = min(max_splits, arch::kPortableClusterSize);
  if (blocks * cluster_splits * 8 < sms * 7)
    cluster_splits = min(max_cluster_splits(gpu), sms / blocks);
  const bool fills_sms = blocks * cluster_splits * 8 >= sms * 7 || key_tiles <= cluster_splits;
  const bool cluster_combines =
      !includes_general(plan.form) && fills_sms &&
      cluster_combine_is_faster(plan, gpu, blocks, cluster_splits, key_tiles);
  // Splits are whole tiles.
  const int64_t tiles = ceil_div(key_tiles, cluster_combines ? cluster_splits : max_splits);
  return ceil_div(key_tiles, tiles);
}

bool uses_decode_tile(const Plan& plan) {
  return plan.kernel_set->forward_tile.rows == kDecodeRows;
}

// A combine kernel waits for the whole main kernel, so it may launch early. Otherwise the next
// launch is probably the decode of the next call, whose CTAs spread evenly over the SMs only if
// every SM has the same room for them. An early launch finds equal room
//   - with one CTA per SM, with clusters of two, or with up to two independent CTAs per SM;
//   - not with larger clusters at two CTAs per SM, nor with CTAs in several waves;
//   - with chunks, although their grid has more CTAs than there is room for and CTAs end at
//     different times, as long as there are no more tiles than SMs; but not with long chunks that
//     are spread over one wave.
PdlTrigger choose_pdl_trigger(const Plan& plan, const Gpu& gpu) {
  if (needs_combine_kernel(plan)) return PdlTrigger::after_first_loads;
  if (!uses_decode_tile(plan) || plan.nan_recompute != nullptr) return PdlTrigger::at_exit;
  const int64_t sms = gpu.sm_count;
  const auto early_if = [](bool early, PdlTrigger otherwise) {
    return early ? PdlTrigger::after_first_loads : otherwise;
  };
  if (plan.cluster_size > 1)
    return early_if(plan.cluster_size == 2 || plan.blocks <= sms, PdlTrigger::at_exit);
  if (plan.placement.any() && plan.placement.ctas == sms) return PdlTrigger::at_exit;
  if (plan.chunks.any()) return early_if(plan.tiles <= sms, PdlTrigger::before_epilogue);
  return early_if(plan.blocks <= 2 * sms, PdlTrigger::before_epilogue);
}

// The combine kernel's CTAs are all resident when it starts to combine. They leave the CTAs of the
// next call little room, and unequal room per SM if they are many. So the next launch comes early
// only if there are few rows, or somewhat more rows and few keys to read. After a main kernel with
// one CTA per SM there must be few tiles, and too many rows for several groups of warps per row
// (common/combine.h).
PdlTrigger choose_combine_pdl_trigger(const Problem& p, const Plan& plan, const Gpu& gpu) {
  constexpr int64_t kMaxTilesPerSm = 24;  // key tiles
  if (!needs_combine_kernel(plan) || !uses_decode_tile(plan) || plan.nan_recompute != nullptr)
    return PdlTrigger::at_exit;
  const int64_t sms = gpu.sm_count;
  const int64_t rows = plan.tiles * packed_rows(p, plan);
  const auto reads_few_tiles = [&] {
    return plan.tiles * ceil_div(max_keys(p), int64_t{plan.tile_k}) <= kMaxTilesPerSm * sms;
  };
  const bool few_rows = rows <= 2 * sms || (rows <= 6 * sms && reads_few_tiles());
  const bool fits = plan.one_cta_per_sm
                        ? max_clusters_fit(gpu, plan.tiles) && rows > common::kMaxRowsWithGroups
                        : few_rows;
  return fits ? PdlTrigger::after_first_loads : PdlTrigger::at_exit;
}

}  // namespace tilewise::cuda
