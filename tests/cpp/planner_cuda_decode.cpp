// Plans of decodes on Hopper: CTAs per SM, warps per tile, stages, clusters, chunks, which kernel
// combines, and PDL triggers.
#include <gtest/gtest.h>

#include <tuple>
#include <utility>
#include <vector>

#include "cuda/plan.h"
#include "described_cuda.h"
#include "planned_cuda.h"

namespace tilewise::dispatch {
namespace {

using cuda::Form;

constexpr int32_t kH100 = 3352;  // memory bandwidth in GB/s
constexpr int32_t kH200 = 4917;
const int32_t kDeviceLengths = 0;  // the planner reads no index array

// The plan of sm_90 with a memory bandwidth of `speed`, for contiguous keys or pages of 16.
cuda::Plan decode(int64_t batch, int64_t keys, int64_t heads, int64_t heads_kv,
                  const int32_t* lengths = nullptr, bool pages = false, int32_t speed = kH200) {
  Problem p =
      pages ? paged(TILEWISE_BFLOAT16, 16) : problem(TILEWISE_BFLOAT16, batch, 1, keys, heads);
  p.batch = batch;
  p.heads_q = heads;
  p.heads_kv = heads_kv;
  if (pages) {
    p.block_table_width = p.block_table_stride = keys / 16;
    p.pages = batch * p.block_table_width;
  }
  p.seqused_k = lengths;
  Device device = gpu_with(90);
  device.gpu.memory_speed = speed;
  return forward(p, device);
}

// If there are tiles for few SMs only, clusters of 16 CTAs with two warps per tile read them as
// long as each CTA has few key tiles, with and without device lengths. Longer sequences are split
// for a combine kernel, all into the same number of splits.
TEST(PlannerCudaDecode, FewTilesUseLargeClusters) {
  for (const int32_t* lengths : {static_cast<const int32_t*>(nullptr), &kDeviceLengths}) {
    for (const int64_t batch : {2, 6}) {
      const cuda::Plan large = decode(batch, 8192, 16, 1, lengths);
      EXPECT_EQ(large.cluster_size, 16);
      EXPECT_EQ(large.warps_per_tile, cuda::kMaxWarpsPerTile);
      EXPECT_FALSE(large.chunks.any());
      const cuda::Plan small = decode(batch, 1024, 16, 1, lengths);  // one tile per CTA
      EXPECT_EQ(small.cluster_size, 16);
      EXPECT_EQ(small.warps_per_tile, 1);
      const cuda::Plan longer = decode(batch, 16384, 16, 1, lengths);
      EXPECT_EQ(longer.cluster_size, 1);
      EXPECT_FALSE(longer.chunks.any());
      EXPECT_EQ(longer.one_cta_per_sm, batch == 6);  // six key tiles per SM
    }
    // Clusters of 16 would find no room beside those of the next launch.
    EXPECT_EQ(decode(8, 8192, 16, 1, lengths).warps_per_tile, 1);
  }
  // There are chunks if there is much to read, except with two or three sequences.
  EXPECT_TRUE(decode(6, 65536, 16, 1, &kDeviceLengths).chunks.any());
  EXPECT_FALSE(decode(3, 65536, 16, 1, &kDeviceLengths).chunks.any());
  const cuda::Plan paged_decode = decode(2, 8192, 16, 1, &kDeviceLengths, true);
  EXPECT_EQ(paged_decode.cluster_size, 16);
  EXPECT_EQ(paged_decode.warps_per_tile, cuda::kMaxWarpsPerTile);
  // There are no such clusters if the caller chooses the splits or wants batch-invariant results.
  Problem p = problem(TILEWISE_BFLOAT16, 2, 1, 8192, 16);
  p.heads_kv = 1;
  p.num_splits = 16;
  EXPECT_EQ(forward(p, gpu_with(90)).warps_per_tile, 1);
  p.num_splits = 0;
  p.batch_invariant = 1;
  EXPECT_EQ(forward(p, gpu_with(90)).warps_per_tile, 1);
}

// An SM gets one CTA where two would leave more results to combine; with device lengths only if
// sequences may have many keys.
TEST(PlannerCudaDecode, OneCtaPerSm) {
  for (const int64_t batch : {9, 12, 16}) {
    EXPECT_TRUE(decode(batch, 8192, 32, 8).one_cta_per_sm) << batch;
    EXPECT_TRUE(decode(batch, 256, 32, 8).one_cta_per_sm) << batch;
    EXPECT_TRUE(decode(batch, 8192, 32, 8, &kDeviceLengths).one_cta_per_sm) << batch;
    EXPECT_FALSE(decode(batch, 1024, 32, 8, &kDeviceLengths).one_cta_per_sm) << batch;
    EXPECT_TRUE(decode(8 * batch, 2048, 16, 1, &kDeviceLengths).one_cta_per_sm) << batch;
  }
  EXPECT_FALSE(decode(24, 8192, 32, 8).one_cta_per_sm);  // more tiles than SMs
  EXPECT_FALSE(decode(16, 128, 32, 8).one_cta_per_sm);
  EXPECT_TRUE(decode(8, 8192, 32, 8).one_cta_per_sm);  // two splits
  EXPECT_FALSE(decode(8, 1024, 32, 8).one_cta_per_sm);
  EXPECT_FALSE(decode(4, 16384, 32, 8).one_cta_per_sm);
  EXPECT_TRUE(decode(32, 16384, 16, 1).one_cta_per_sm);
  EXPECT_FALSE(decode(64, 2048, 16, 1).one_cta_per_sm);
  // With eight or sixteen rows there is more to combine.
  EXPECT_TRUE(decode(12, 1024, 64, 8, &kDeviceLengths).one_cta_per_sm);
  EXPECT_FALSE(decode(12, 512, 64, 8, &kDeviceLengths).one_cta_per_sm);
  EXPECT_TRUE(decode(96, 1024, 16, 1, &kDeviceLengths).one_cta_per_sm);
  EXPECT_TRUE(decode(96, 256, 16, 1, &kDeviceLengths).one_cta_per_sm);
  EXPECT_FALSE(decode(80, 1024, 16, 1, &kDeviceLengths).one_cta_per_sm);
  EXPECT_TRUE(decode(80, 512, 16, 1, &kDeviceLengths).one_cta_per_sm);
  // If sequences are cut into several chunks, they need more keys.
  EXPECT_FALSE(decode(8, 8192, 32, 8, &kDeviceLengths).one_cta_per_sm);
  EXPECT_TRUE(decode(8, 16384, 32, 8, &kDeviceLengths).one_cta_per_sm);
  EXPECT_TRUE(decode(32, 16384, 16, 1, &kDeviceLengths).one_cta_per_sm);
  EXPECT_FALSE(decode(32, 8192, 16, 1, &kDeviceLengths).one_cta_per_sm);
}

// Pages need more instructions per key tile, so one CTA per SM needs more tiles.
TEST(PlannerCudaDecode, OneCtaPerSmWithPages) {
  const auto one_cta = [](int64_t batch, int64_t keys, int64_t heads, int64_t heads_kv) {
    const cuda::Plan plan = decode(batch, keys, heads, heads_kv, &kDeviceLengths, true);
    EXPECT_EQ(plan.form, cuda::Form::tma_paged);
    EXPECT_EQ(plan.warps_per_tile, plan.one_cta_per_sm ? 2 : 1);
    return plan.one_cta_per_sm;
  };
  EXPECT_TRUE(one_cta(12, 8192, 32, 8));
  EXPECT_FALSE(one_cta(10, 8192, 32, 8));
  EXPECT_TRUE(one_cta(16, 1024, 32, 8));
  EXPECT_FALSE(one_cta(12, 1024, 32, 8));
  EXPECT_FALSE(one_cta(16, 512, 32, 8));
  EXPECT_FALSE(one_cta(8, 8192, 32, 8));
  EXPECT_TRUE(one_cta(72, 2048, 16, 1));
  EXPECT_TRUE(one_cta(32, 16384, 16, 1));
}

// With one CTA per SM two warps share a tile, or one if one already saturates memory.
TEST(PlannerCudaDecode, WarpsPerTileSaturateMemory) {
  const auto warps = [](int32_t speed, int64_t batch, int64_t keys, int64_t heads, int64_t heads_kv,
                        const int32_t* lengths = nullptr) {
    return decode(batch, keys, heads, heads_kv, lengths, false, speed).warps_per_tile;
  };
  for (const int32_t* lengths : {static_cast<const int32_t*>(nullptr), &kDeviceLengths}) {
    EXPECT_EQ(warps(kH200, 16, 8192, 32, 8, lengths), 2);
    EXPECT_EQ(warps(kH100, 16, 8192, 32, 8, lengths), 1);
    EXPECT_EQ(warps(kH100, 10, 8192, 32, 8, lengths), 2);
    EXPECT_EQ(warps(kH100, 96, 2048, 16, 1, lengths), 2);
    EXPECT_EQ(warps(kH100, 14, 8192, 32, 8, lengths), 2);
    EXPECT_EQ(warps(kH100, 128, 2048, 16, 1, lengths), 2);  // sixteen rows
    EXPECT_EQ(warps(kH100, 128, 2048, 32, 8, lengths), 2);  // many waves
    EXPECT_EQ(warps(kH100, 48, 2048, 32, 8, lengths), 1);   // few waves
  }
  EXPECT_EQ(warps(kH100, 128, 1024, 32, 8), 2);
  EXPECT_EQ(warps(kH100, 128, 1024, 32, 8, &kDeviceLengths), 1);  // there may be short sequences
  EXPECT_EQ(warps(kH100, 16, 1024, 32, 8), 2);
  EXPECT_EQ(warps(kH200, 24, 8192, 32, 8), 1);  // two CTAs per SM
  EXPECT_EQ(decode(16, 8192, 32, 8, nullptr, true, kH100).warps_per_tile, 2);
  // Results must not depend on the rest of the batch.
  Problem p = problem(TILEWISE_BFLOAT16, 16, 1, 8192, 32);
  p.heads_kv = 8;
  p.batch_invariant = 1;
  EXPECT_EQ(forward(p, gpu_with(90)).warps_per_tile, 1);
}

// Pipelines have only two stages where those already have enough bytes in flight to saturate
// memory.
TEST(PlannerCudaDecode, StagesSaturateMemory) {
  const auto stages = [](int32_t speed, int64_t batch, int64_t keys, int64_t heads,
                         int64_t heads_kv, const int32_t* lengths = nullptr, bool pages = false) {
    return decode(batch, keys, heads, heads_kv, lengths, pages, speed).stages;
  };
  EXPECT_EQ(stages(kH100, 96, 2048, 16, 1), cuda::kReducedStages);
  EXPECT_EQ(stages(kH100, 80, 2048, 16, 1), 0);
  EXPECT_EQ(stages(kH200, 128, 2048, 16, 1), 0);
  EXPECT_EQ(stages(0, 96, 2048, 16, 1), 0);                         // unknown bandwidth
  EXPECT_EQ(stages(kH100, 64, 8192, 16, 1), cuda::kReducedStages);  // two splits
  EXPECT_EQ(stages(kH100, 16, 8192, 32, 8), 0);                     // one warp per tile
  for (const int32_t speed : {kH100, kH200}) {
    EXPECT_EQ(stages(speed, 6, 8192, 16, 1), 0);  // clusters of 16
    EXPECT_EQ(stages(speed, 10, 1024, 32, 8, &kDeviceLengths), 0);
    EXPECT_EQ(stages(speed, 12, 1024, 32, 8, &kDeviceLengths), cuda::kReducedStages);
    EXPECT_EQ(stages(speed, 20, 4096, 32, 8), 0);
    EXPECT_EQ(stages(speed, 24, 4096, 32, 8), cuda::kReducedStages);
    EXPECT_EQ(stages(speed, 128, 2048, 32, 8), cuda::kReducedStages);
    EXPECT_EQ(stages(speed, 128, 2048, 32, 8, nullptr, true), 0);
  }
  Problem p = problem(TILEWISE_BFLOAT16, 128, 1, 2048, 32);
  p.heads_kv = 8;
  p.batch_invariant = 1;
  EXPECT_EQ(forward(p, gpu_with(90)).warps_per_tile, 1);
}

// If some CTAs have no chunk or only some SMs have a second one, a bijection spreads the chunks
// over the grid.
TEST(PlannerCudaDecode, ChunksAreSpreadOverTheGrid) {
  const auto placement = [](auto... args) { return decode(args..., &kDeviceLengths).placement; };
  const int64_t sms = gpu_with(90).gpu.sm_count;
  EXPECT_EQ(placement(12, 8192, 32, 8).chunks, 96);
  EXPECT_EQ(placement(12, 8192, 32, 8).ctas, sms);
  EXPECT_EQ(placement(96, 2048, 16, 1).chunks, 96);
  EXPECT_EQ(placement(96, 2048, 16, 1).ctas, 2 * sms - 96);
  EXPECT_FALSE(placement(16, 8192, 32, 8).any());           // chunks for nearly all SMs
  EXPECT_FALSE(placement(8, 8192, 32, 8).any());            // two CTAs per SM
  EXPECT_EQ(placement(24, 4096, 32, 8).chunks, 192 - sms);  // the second CTAs of the SMs
  EXPECT_EQ(placement(24, 4096, 32, 8).ctas, sms);
  EXPECT_EQ(placement(24, 4096, 32, 8).first, sms);
  EXPECT_FALSE(placement(24, 1024, 32, 8).any());  // short sequences
  EXPECT_FALSE(placement(32, 4096, 32, 8).any());  // nearly all SMs have two chunks
  EXPECT_FALSE(decode(12, 8192, 32, 8).placement.any());
  EXPECT_EQ(cuda::CtaPlacement{}.chunk_of(7), 7);
  for (const cuda::CtaPlacement& s :
       {placement(12, 8192, 32, 8), placement(96, 2048, 16, 1), placement(72, 2048, 16, 1),
        placement(24, 4096, 32, 8), placement(6, 4096, 32, 32),
        cuda::CtaPlacement{.chunks = 1, .ctas = 5}}) {
    const int32_t blocks = s.first + s.ctas + 3;
    std::vector<int32_t> ctas_of_chunk(static_cast<std::size_t>(blocks));
    for (int32_t block = 0; block < blocks; ++block) {
      const int32_t chunk = s.chunk_of(block);
      ASSERT_GE(chunk, 0);
      ASSERT_LT(chunk, blocks);
      ++ctas_of_chunk[static_cast<std::size_t>(chunk)];
      // The number of chunks grows linearly with the CTA index.
      if (block < s.first) {
        EXPECT_EQ(chunk, block);
      } else if (chunk < s.first + s.chunks) {
        EXPECT_EQ(chunk - s.first, (block - s.first) * s.chunks / s.ctas);
      }
    }
    EXPECT_EQ(ctas_of_chunk, std::vector<int32_t>(static_cast<std::size_t>(blocks), 1));
  }
}

// The plan of sm_90 for pages of any size.
cuda::Plan paged_decode(int64_t batch, int64_t keys, int64_t page, int64_t heads = 32,
                        int64_t heads_kv = 8, const int32_t* lengths = nullptr) {
  Problem p = paged(TILEWISE_BFLOAT16, page);
  p.batch = batch;
  p.heads_q = heads;
  p.heads_kv = heads_kv;
  p.block_table_width = p.block_table_stride = keys / page;
  p.pages = batch * p.block_table_width;
  p.seqused_k = lengths;
  const cuda::Plan plan = forward(p, gpu_with(90));
  EXPECT_EQ(plan.form, page < 16 ? Form::paged : Form::tma_paged);
  return plan;
}

// Small pages, which cp.async loads into the same pipelines, have the same plan as pages loaded by
// TMA.
TEST(PlannerCudaDecode, SmallPagesArePlannedLikeLargeOnes) {
  const auto partition = [](const cuda::Plan& plan) {
    return std::make_tuple(plan.splits, plan.cluster_size, plan.warps_per_tile,
                           plan.chunks.max_chunks, plan.one_cta_per_sm);
  };
  for (const int32_t* lengths : {static_cast<const int32_t*>(nullptr), &kDeviceLengths}) {
    for (const int64_t batch : {1, 2, 4, 12, 16, 24, 64}) {
      for (const int64_t keys : {1024, 4096, 16384}) {
        for (const auto& [heads, heads_kv] : {std::pair{32, 8}, std::pair{16, 1}}) {
          EXPECT_EQ(partition(paged_decode(batch, keys, 1, heads, heads_kv, lengths)),
                    partition(paged_decode(batch, keys, 16, heads, heads_kv, lengths)))
              << batch << ' ' << keys << ' ' << heads;
        }
      }
    }
  }
  EXPECT_EQ(paged_decode(2, 4096, 1, 16, 1).cluster_size, 16);
  EXPECT_EQ(paged_decode(2, 4096, 1, 16, 1).warps_per_tile, 2);
  EXPECT_EQ(paged_decode(128, 1024, 1, 16, 1).warps_per_tile, 2);
}

// The plan with device lengths.
cuda::Plan device_lengths_decode(int64_t batch, int64_t keys = 8192, int64_t heads = 32,
                                 int64_t heads_kv = 8, bool pages = false) {
  return decode(batch, keys, heads, heads_kv, &kDeviceLengths, pages);
}
ChunkSchedule chunks_of_decode(int64_t batch) { return device_lengths_decode(batch).chunks; }

// Batches of few long sequences with many heads have spare chunks, so that all long ones can be
// cut.
TEST(PlannerCudaDecode, FewLongSequencesHaveSpareChunks) {
  const auto max_chunks = [](auto... args) {
    return device_lengths_decode(args...).chunks.max_chunks;
  };
  EXPECT_EQ(max_chunks(16, 4096, 32, 32), 16 + 8);
  EXPECT_EQ(max_chunks(16, 2048, 32, 32), 20);     // one wave more than the tiles need
  EXPECT_EQ(max_chunks(12, 4096, 32, 32), 16);     // fewer tiles per SM
  EXPECT_GT(max_chunks(64, 4096, 32, 8), 64 + 8);  // more sequences have more spare chunks
}

// Clusters of four read sequences of few key tiles if there are tiles for 3/8 to 1/2 of the SMs,
// or, with up to four rows, for 3/8 to 3/4.
TEST(PlannerCudaDecode, DeviceLengthsUseClustersOfFour) {
  const auto uses_clusters_of_four = [](auto... args) {
    const cuda::Plan plan = device_lengths_decode(args...);
    EXPECT_TRUE(plan.cluster_size != 4 || (plan.warps_per_tile == 1 && !plan.chunks.any()));
    return plan.cluster_size == 4;
  };
  EXPECT_TRUE(uses_clusters_of_four(8, 4096));
  EXPECT_TRUE(uses_clusters_of_four(64, 4096, 16, 1));
  EXPECT_TRUE(uses_clusters_of_four(12, 2048));
  EXPECT_TRUE(uses_clusters_of_four(3, 2048, 32, 32));
  EXPECT_TRUE(uses_clusters_of_four(3, 1024, 32, 32, true));
  EXPECT_FALSE(uses_clusters_of_four(3, 1024, 32, 32));  // one row, contiguous keys
  EXPECT_TRUE(uses_clusters_of_four(12, 2048, 32, 8, true));
  EXPECT_FALSE(uses_clusters_of_four(8, 8192));
  EXPECT_FALSE(uses_clusters_of_four(12, 4096));
  EXPECT_FALSE(uses_clusters_of_four(12, 2048, 64, 8));
  EXPECT_FALSE(uses_clusters_of_four(96, 1024, 16, 1));
  EXPECT_FALSE(uses_clusters_of_four(14, 2048));
  EXPECT_NE(decode(12, 2048, 32, 8).cluster_size, 4);
}

// The last CTA of a tile combines if there are tiles for at least 3/4 of the SMs, or for 9/20 with
// more than four rows, or for more than 1/2 with one CTA per SM. Clusters of two are faster for few
// key tiles.
TEST(PlannerCudaDecode, LastCtaCombinesManyTiles) {
  EXPECT_FALSE(device_lengths_decode(8).last_cta_combines);
  EXPECT_TRUE(device_lengths_decode(12).one_cta_per_sm &&
              device_lengths_decode(12).last_cta_combines);
  EXPECT_FALSE(device_lengths_decode(48, 4096, 16, 1).last_cta_combines);
  EXPECT_TRUE(device_lengths_decode(64, 8192, 16, 1).one_cta_per_sm &&
              device_lengths_decode(64, 8192, 16, 1).last_cta_combines);
  EXPECT_TRUE(device_lengths_decode(8, 8192, 64, 8).last_cta_combines);
  EXPECT_TRUE(device_lengths_decode(14).last_cta_combines);
  EXPECT_TRUE(device_lengths_decode(16).last_cta_combines);
  EXPECT_EQ(device_lengths_decode(16, 1024).cluster_size, 2);
  EXPECT_EQ(device_lengths_decode(16, 512, 32, 8, true).cluster_size, 2);
  EXPECT_TRUE(device_lengths_decode(16, 1024, 32, 8, true).last_cta_combines);
  const cuda::Plan many_rows = device_lengths_decode(128, 1024, 16, 1);
  EXPECT_TRUE(many_rows.last_cta_combines);
  EXPECT_TRUE(many_rows.one_cta_per_sm);
  EXPECT_EQ(many_rows.chunks.chunks_if_uniform, 1);
  EXPECT_TRUE(device_lengths_decode(128, 512, 16, 1).one_cta_per_sm);
  EXPECT_EQ(device_lengths_decode(16, 512, 64, 8).cluster_size, 2);
  EXPECT_EQ(device_lengths_decode(80, 1024, 16, 1).cluster_size, 3);
}

// ChunkArrivals has room for the counts of all chunks that the last CTA combines.
TEST(PlannerCudaDecode, ChunksFitTheArrivalCounter) {
  for (const int64_t batch : {100, 140, 160, 900}) {
    for (const int64_t heads_kv : {1, 2, 8}) {
      Problem p = problem(TILEWISE_BFLOAT16, batch, 1, 65536 * 4, 16 * heads_kv);
      p.heads_kv = heads_kv;
      p.kv_float8 = 1;
      const int32_t lengths = 0;
      p.seqused_k = &lengths;
      const cuda::Plan plan = forward(p, gpu_with(90));
      ASSERT_TRUE(plan.last_cta_combines);
      EXPECT_GE(plan.chunks.max_chunks, batch * plan.chunks.chunks_if_uniform);
      EXPECT_LT(plan.chunks.max_chunks, batch + cuda::ChunkArrivals::kMaxChunks);
    }
  }
}

// With several tiles per SM, short sequences count as uniform even if the longest is several times
// the mean.
TEST(PlannerCudaDecode, UniformityLimitGrowsWithTheNumberOfTiles) {
  EXPECT_EQ(chunks_of_decode(16).max_imbalance_quarters, ChunkSchedule::kDefaultImbalanceQuarters);
  EXPECT_EQ(chunks_of_decode(64).max_imbalance_quarters,
            64 * 8 * 23 / (5 * gpu_with(90).gpu.sm_count));
  EXPECT_GT(chunks_of_decode(128).max_imbalance_quarters, 7 * 4);
}

// Long sequences start first if there are more tiles than run at once, or nearly as many and
// sequences may be long. The batch must not be too large for each CTA to read all lengths.
TEST(PlannerCudaDecode, LongSequencesStartFirst) {
  for (const int64_t batch : {32, 64, 128, 256, 257}) {
    const ChunkSchedule schedule = chunks_of_decode(batch);
    EXPECT_TRUE(schedule.any()) << batch;
    EXPECT_EQ(schedule.longest_first(), batch == 64 || batch == 128 || batch == 256) << batch;
    if (schedule.longest_first()) {
      EXPECT_EQ(schedule.concurrent_sequences, 4 * gpu_with(90).gpu.sm_count / 8);
    }
  }
  EXPECT_FALSE(device_lengths_decode(64, 1024).chunks.longest_first());
  EXPECT_TRUE(device_lengths_decode(128, 1024).chunks.longest_first());
}

// No chunk is longer than the keys of the batch divided by the number of sequences that run at
// once.
TEST(PlannerCudaDecode, ConcurrentSequencesLimitTheChunkSize) {
  ChunkSchedule schedule = chunks_of_decode(128);
  const ChunkSchedule::Batch batch = {
      .sequences = 128, .keys = 128 * 400, .longest = 1000};  // short enough to count as uniform
  EXPECT_EQ(schedule.first_chunk_size(batch), 832);           // 66 run at once; tiles of 64 keys
  EXPECT_EQ(schedule.first_chunk_size({.sequences = 128, .keys = 128 * 1000, .longest = 1024}),
            1024);
  schedule.concurrent_sequences = 0;
  EXPECT_EQ(schedule.first_chunk_size(batch), 1024);
}

// The PDL trigger comes early if the CTAs of the next launch will spread evenly over the SMs.
TEST(PlannerCudaDecode, PdlTriggerComesEarlyWhereThereIsRoom) {
  using cuda::PdlTrigger;
  static constexpr int32_t kLengths[] = {0};  // the planner reads no index array
  const auto planned = [](int64_t batch, int64_t keys, int64_t heads, int64_t kv_heads,
                          bool lengths, int32_t sm = 90) {
    Problem p = problem(TILEWISE_BFLOAT16, batch, 1, keys, heads);
    p.heads_kv = kv_heads;
    for (tilewise_tensor* t : {&p.k, &p.v})
      *t = {nullptr, keys * kv_heads * 128, kv_heads * 128, 128};
    if (lengths) p.seqused_k = kLengths;
    return forward(p, gpu_with(sm));
  };
  const auto trigger = [&](auto... args) { return planned(args...).pdl_trigger; };
  // Clusters with one CTA per SM and with two.
  EXPECT_EQ(planned(1, 1024, 32, 8, false).cluster_size, 16);
  EXPECT_EQ(trigger(1, 1024, 32, 8, false), PdlTrigger::after_first_loads);
  EXPECT_EQ(planned(4, 4096, 32, 8, false).cluster_size, 8);
  EXPECT_EQ(trigger(4, 4096, 32, 8, false), PdlTrigger::at_exit);
  // One CTA per tile, in one wave and in several.
  EXPECT_EQ(trigger(16, 1024, 32, 8, false), PdlTrigger::after_first_loads);
  EXPECT_EQ(trigger(48, 1024, 32, 8, false), PdlTrigger::before_epilogue);
  // Clusters of two, and chunks.
  EXPECT_EQ(planned(16, 1024, 32, 8, true).cluster_size, 2);
  EXPECT_EQ(trigger(16, 1024, 32, 8, true), PdlTrigger::after_first_loads);
  EXPECT_TRUE(planned(16, 4096, 32, 8, true).one_cta_per_sm);
  EXPECT_EQ(trigger(16, 4096, 32, 8, true), PdlTrigger::after_first_loads);
  EXPECT_EQ(trigger(14, 2048, 32, 8, true), PdlTrigger::after_first_loads);
  EXPECT_EQ(trigger(14, 8192, 32, 8, true), PdlTrigger::at_exit);  // chunks spread over one wave
  EXPECT_EQ(trigger(48, 1024, 32, 8, true), PdlTrigger::before_epilogue);
  // With a combine kernel.
  EXPECT_TRUE(needs_combine_kernel(planned(1, 131072, 32, 8, false)));
  EXPECT_EQ(trigger(1, 131072, 32, 8, false), PdlTrigger::after_first_loads);
  EXPECT_EQ(planned(2, 16384, 16, 1, false).combine_pdl_trigger, PdlTrigger::after_first_loads);
  EXPECT_EQ(planned(24, 8192, 16, 1, true).combine_pdl_trigger, PdlTrigger::after_first_loads);
  EXPECT_EQ(planned(24, 16384, 16, 1, true).combine_pdl_trigger, PdlTrigger::at_exit);
  const cuda::Plan one_cta = planned(8, 16384, 32, 8, true);
  EXPECT_TRUE(one_cta.one_cta_per_sm && needs_combine_kernel(one_cta));
  EXPECT_EQ(one_cta.combine_pdl_trigger, PdlTrigger::at_exit);
  EXPECT_EQ(planned(8, 8192, 32, 8, true).combine_pdl_trigger, PdlTrigger::after_first_loads);
  // Many rows.
  EXPECT_EQ(planned(7, 8192, 64, 8, true).combine_pdl_trigger, PdlTrigger::at_exit);
  // Prompts.
  const Device device = gpu_with(90);
  EXPECT_EQ(forward(problem(TILEWISE_BFLOAT16), device).pdl_trigger, PdlTrigger::at_exit);
  const cuda::Plan with_stream_k = forward(problem(TILEWISE_BFLOAT16, 1, 2048, 2048, 4), device);
  EXPECT_TRUE(with_stream_k.stream_k.any());
  EXPECT_EQ(with_stream_k.pdl_trigger, PdlTrigger::after_first_loads);
}

}  // namespace
}  // namespace tilewise::dispatch
