// How the CUDA planner decodes on a Hopper: who reads alone, in clusters or in parts, who merges,
// and when the next launch may begin.
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

constexpr int32_t kH100 = 3352;  // gigabytes a second
constexpr int32_t kH200 = 4917;
const int32_t kSomeLengths = 0;  // read by no planner

// How sm_90 with such memory decodes: contiguous keys, or pages of 16.
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

// Few tiles: clusters of blocks of two readers, as long as none has more than a few tiles of keys,
// whether lengths are known or not. Longer ones are cut for a second kernel, all as many times.
TEST(PlannerCudaDecode, FewTilesAreReadInLargeClusters) {
  for (const int32_t* lengths : {static_cast<const int32_t*>(nullptr), &kSomeLengths}) {
    for (const int64_t batch : {2, 6}) {
      const cuda::Plan large = decode(batch, 8192, 16, 1, lengths);
      EXPECT_EQ(large.cluster_size, 16);
      EXPECT_EQ(large.warps_per_tile, cuda::kMaxWarpsPerTile);
      EXPECT_FALSE(large.chunks.any());
      const cuda::Plan small = decode(batch, 1024, 16, 1, lengths);  // of a tile each
      EXPECT_EQ(small.cluster_size, 16);
      EXPECT_EQ(small.warps_per_tile, 1);
      const cuda::Plan longer = decode(batch, 16384, 16, 1, lengths);
      EXPECT_EQ(longer.cluster_size, 1);
      EXPECT_FALSE(longer.chunks.any());
      EXPECT_EQ(longer.one_cta_per_sm, batch == 6);  // six tiles of keys a multiprocessor
    }
    EXPECT_EQ(decode(8, 8192, 16, 1, lengths).warps_per_tile,
              1);  // clusters find no places beside others
  }
  // Parts where some have much to read, but for two or three.
  EXPECT_TRUE(decode(6, 65536, 16, 1, &kSomeLengths).chunks.any());
  EXPECT_FALSE(decode(3, 65536, 16, 1, &kSomeLengths).chunks.any());
  const cuda::Plan of_pages = decode(2, 8192, 16, 1, &kSomeLengths, true);
  EXPECT_EQ(of_pages.cluster_size, 16);
  EXPECT_EQ(of_pages.warps_per_tile, cuda::kMaxWarpsPerTile);
  // Whoever asks for splits gets them, and rows do not depend on their batch.
  Problem p = problem(TILEWISE_BFLOAT16, 2, 1, 8192, 16);
  p.heads_kv = 1;
  p.num_splits = 16;
  EXPECT_EQ(forward(p, gpu_with(90)).warps_per_tile, 1);
  p.num_splits = 0;
  p.batch_invariant = 1;
  EXPECT_EQ(forward(p, gpu_with(90)).warps_per_tile, 1);
}

// A block is alone on its multiprocessor where more of them would have more to merge: of lengths
// that are not known, if it has many keys.
TEST(PlannerCudaDecode, ABlockMayReadAlone) {
  for (const int64_t batch : {9, 12, 16}) {
    EXPECT_TRUE(decode(batch, 8192, 32, 8).one_cta_per_sm) << batch;
    EXPECT_TRUE(decode(batch, 256, 32, 8).one_cta_per_sm) << batch;
    EXPECT_TRUE(decode(batch, 8192, 32, 8, &kSomeLengths).one_cta_per_sm) << batch;
    EXPECT_FALSE(decode(batch, 1024, 32, 8, &kSomeLengths).one_cta_per_sm) << batch;
    EXPECT_TRUE(decode(8 * batch, 2048, 16, 1, &kSomeLengths).one_cta_per_sm) << batch;
  }
  EXPECT_FALSE(decode(24, 8192, 32, 8).one_cta_per_sm);  // more of them than multiprocessors
  EXPECT_FALSE(decode(16, 128, 32, 8).one_cta_per_sm);
  EXPECT_TRUE(decode(8, 8192, 32, 8).one_cta_per_sm);  // two splits
  EXPECT_FALSE(decode(8, 1024, 32, 8).one_cta_per_sm);
  EXPECT_FALSE(decode(4, 16384, 32, 8).one_cta_per_sm);
  EXPECT_TRUE(decode(32, 16384, 16, 1).one_cta_per_sm);
  EXPECT_FALSE(decode(64, 2048, 16, 1).one_cta_per_sm);
  // Eight and sixteen rows have more to merge.
  EXPECT_TRUE(decode(12, 1024, 64, 8, &kSomeLengths).one_cta_per_sm);
  EXPECT_FALSE(decode(12, 512, 64, 8, &kSomeLengths).one_cta_per_sm);
  EXPECT_TRUE(decode(96, 1024, 16, 1, &kSomeLengths).one_cta_per_sm);
  EXPECT_TRUE(decode(96, 256, 16, 1, &kSomeLengths).one_cta_per_sm);
  EXPECT_FALSE(decode(80, 1024, 16, 1, &kSomeLengths).one_cta_per_sm);
  EXPECT_TRUE(decode(80, 512, 16, 1, &kSomeLengths).one_cta_per_sm);
  // Of several parts.
  EXPECT_FALSE(decode(8, 8192, 32, 8, &kSomeLengths).one_cta_per_sm);
  EXPECT_TRUE(decode(8, 16384, 32, 8, &kSomeLengths).one_cta_per_sm);
  EXPECT_TRUE(decode(32, 16384, 16, 1, &kSomeLengths).one_cta_per_sm);
  EXPECT_FALSE(decode(32, 8192, 16, 1, &kSomeLengths).one_cta_per_sm);
}

// Pages, of which a warp needs more instructions.
TEST(PlannerCudaDecode, ABlockMayReadPagesAlone) {
  const auto alone = [](int64_t batch, int64_t keys, int64_t heads, int64_t heads_kv) {
    const cuda::Plan plan = decode(batch, keys, heads, heads_kv, &kSomeLengths, true);
    EXPECT_EQ(plan.form, cuda::Form::tma_paged);
    EXPECT_EQ(plan.warps_per_tile, plan.one_cta_per_sm ? 2 : 1);
    return plan.one_cta_per_sm;
  };
  EXPECT_TRUE(alone(12, 8192, 32, 8));
  EXPECT_FALSE(alone(10, 8192, 32, 8));
  EXPECT_TRUE(alone(16, 1024, 32, 8));
  EXPECT_FALSE(alone(12, 1024, 32, 8));
  EXPECT_FALSE(alone(16, 512, 32, 8));
  EXPECT_FALSE(alone(8, 8192, 32, 8));
  EXPECT_TRUE(alone(72, 2048, 16, 1));
  EXPECT_TRUE(alone(32, 16384, 16, 1));
}

// Two warps of a block that is alone share its keys, one where memory is no faster for more.
TEST(PlannerCudaDecode, ReadersAreAsManyAsMemoryNeeds) {
  const auto readers = [](int32_t speed, int64_t batch, int64_t keys, int64_t heads,
                          int64_t heads_kv, const int32_t* lengths = nullptr) {
    return decode(batch, keys, heads, heads_kv, lengths, false, speed).warps_per_tile;
  };
  for (const int32_t* lengths : {static_cast<const int32_t*>(nullptr), &kSomeLengths}) {
    EXPECT_EQ(readers(kH200, 16, 8192, 32, 8, lengths), 2);
    EXPECT_EQ(readers(kH100, 16, 8192, 32, 8, lengths), 1);
    EXPECT_EQ(readers(kH100, 10, 8192, 32, 8, lengths), 2);
    EXPECT_EQ(readers(kH100, 96, 2048, 16, 1, lengths), 2);
    EXPECT_EQ(readers(kH100, 14, 8192, 32, 8, lengths), 2);
    EXPECT_EQ(readers(kH100, 128, 2048, 16, 1, lengths), 2);  // sixteen rows
    EXPECT_EQ(readers(kH100, 128, 2048, 32, 8, lengths), 2);  // many turns
    EXPECT_EQ(readers(kH100, 48, 2048, 32, 8, lengths), 1);   // a few
  }
  EXPECT_EQ(readers(kH100, 128, 1024, 32, 8), 2);
  EXPECT_EQ(readers(kH100, 128, 1024, 32, 8, &kSomeLengths), 1);  // short ones among them
  EXPECT_EQ(readers(kH100, 16, 1024, 32, 8), 2);
  EXPECT_EQ(readers(kH200, 24, 8192, 32, 8), 1);  // not alone
  EXPECT_EQ(decode(16, 8192, 32, 8, nullptr, true, kH100).warps_per_tile, 2);
  // A row may not depend on what else is in the batch.
  Problem p = problem(TILEWISE_BFLOAT16, 16, 1, 8192, 32);
  p.heads_kv = 8;
  p.batch_invariant = 1;
  EXPECT_EQ(forward(p, gpu_with(90)).warps_per_tile, 1);
}

// Two slots of a ring, where more on its way would be more than memory needs.
TEST(PlannerCudaDecode, SlotsAreAsManyAsMemoryNeeds) {
  const auto slots = [](int32_t speed, int64_t batch, int64_t keys, int64_t heads, int64_t heads_kv,
                        const int32_t* lengths = nullptr, bool pages = false) {
    return decode(batch, keys, heads, heads_kv, lengths, pages, speed).stages;
  };
  EXPECT_EQ(slots(kH100, 96, 2048, 16, 1), cuda::kReducedStages);
  EXPECT_EQ(slots(kH100, 80, 2048, 16, 1), 0);
  EXPECT_EQ(slots(kH200, 128, 2048, 16, 1), 0);
  EXPECT_EQ(slots(0, 96, 2048, 16, 1), 0);                     // not known
  EXPECT_EQ(slots(kH100, 64, 8192, 16, 1), cuda::kReducedStages);  // two splits
  EXPECT_EQ(slots(kH100, 16, 8192, 32, 8), 0);                 // one reader
  for (const int32_t speed : {kH100, kH200}) {
    EXPECT_EQ(slots(speed, 6, 8192, 16, 1), 0);  // clusters, which wait for keys
    EXPECT_EQ(slots(speed, 10, 1024, 32, 8, &kSomeLengths), 0);
    EXPECT_EQ(slots(speed, 12, 1024, 32, 8, &kSomeLengths), cuda::kReducedStages);
    EXPECT_EQ(slots(speed, 20, 4096, 32, 8), 0);
    EXPECT_EQ(slots(speed, 24, 4096, 32, 8), cuda::kReducedStages);
    EXPECT_EQ(slots(speed, 128, 2048, 32, 8), cuda::kReducedStages);
    EXPECT_EQ(slots(speed, 128, 2048, 32, 8, nullptr, true), 0);
  }
  Problem p = problem(TILEWISE_BFLOAT16, 128, 1, 2048, 32);
  p.heads_kv = 8;
  p.batch_invariant = 1;
  EXPECT_EQ(forward(p, gpu_with(90)).warps_per_tile, 1);
}

// Parts of which not all may be there are spread over the grid, as a bijection.
TEST(PlannerCudaDecode, PartsAreSpreadOverTheGrid) {
  const auto spread = [](auto... of) { return decode(of..., &kSomeLengths).placement; };
  const int64_t all = gpu_with(90).gpu.sm_count;
  EXPECT_EQ(spread(12, 8192, 32, 8).chunks, 96);
  EXPECT_EQ(spread(12, 8192, 32, 8).ctas, all);
  EXPECT_EQ(spread(96, 2048, 16, 1).chunks, 96);
  EXPECT_EQ(spread(96, 2048, 16, 1).ctas, 2 * all - 96);
  EXPECT_FALSE(spread(16, 8192, 32, 8).any());           // nearly as many as multiprocessors
  EXPECT_FALSE(spread(8, 8192, 32, 8).any());            // two blocks a multiprocessor
  EXPECT_EQ(spread(24, 4096, 32, 8).chunks, 192 - all);  // the second blocks of multiprocessors
  EXPECT_EQ(spread(24, 4096, 32, 8).ctas, all);
  EXPECT_EQ(spread(24, 4096, 32, 8).first, all);
  EXPECT_FALSE(spread(24, 1024, 32, 8).any());  // short ones
  EXPECT_FALSE(spread(32, 4096, 32, 8).any());  // nearly all have two
  EXPECT_FALSE(decode(12, 8192, 32, 8).placement.any());
  EXPECT_EQ(cuda::CtaPlacement{}.chunk_of(7), 7);
  for (const cuda::CtaPlacement& s :
       {spread(12, 8192, 32, 8), spread(96, 2048, 16, 1), spread(72, 2048, 16, 1),
        spread(24, 4096, 32, 8), spread(6, 4096, 32, 32), cuda::CtaPlacement{1, 5}}) {
    const int32_t blocks = s.first + s.ctas + 3;
    std::vector<int32_t> taken(static_cast<std::size_t>(blocks));
    for (int32_t block = 0; block < blocks; ++block) {
      const int32_t work = s.chunk_of(block);
      ASSERT_GE(work, 0);
      ASSERT_LT(work, blocks);
      ++taken[static_cast<std::size_t>(work)];
      // At every place as many have come as should have.
      if (block < s.first) {
        EXPECT_EQ(work, block);
      } else if (work < s.first + s.chunks) {
        EXPECT_EQ(work - s.first, (block - s.first) * s.chunks / s.ctas);
      }
    }
    EXPECT_EQ(taken, std::vector<int32_t>(static_cast<std::size_t>(blocks), 1));
  }
}

// How sm_90 decodes from pages of any size.
cuda::Plan of_pages(int64_t batch, int64_t keys, int64_t page, int64_t heads = 32,
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

// Small pages, whose rows are copied into the same ring, are cut as those that come as boxes.
TEST(PlannerCudaDecode, SmallPagesAreCutAsOthers) {
  const auto cut = [](const cuda::Plan& plan) {
    return std::make_tuple(plan.splits, plan.cluster_size, plan.warps_per_tile,
                           plan.chunks.max_chunks, plan.one_cta_per_sm);
  };
  for (const int32_t* lengths : {static_cast<const int32_t*>(nullptr), &kSomeLengths}) {
    for (const int64_t batch : {1, 2, 4, 12, 16, 24, 64}) {
      for (const int64_t keys : {1024, 4096, 16384}) {
        for (const auto& [heads, heads_kv] : {std::pair{32, 8}, std::pair{16, 1}}) {
          EXPECT_EQ(cut(of_pages(batch, keys, 1, heads, heads_kv, lengths)),
                    cut(of_pages(batch, keys, 16, heads, heads_kv, lengths)))
              << batch << ' ' << keys << ' ' << heads;
        }
      }
    }
  }
  EXPECT_EQ(of_pages(2, 4096, 1, 16, 1).cluster_size, 16);
  EXPECT_EQ(of_pages(2, 4096, 1, 16, 1).warps_per_tile, 2);
  EXPECT_EQ(of_pages(128, 1024, 1, 16, 1).warps_per_tile, 2);
}

// The same of lengths that only the GPU knows.
cuda::Plan uneven_decode(int64_t batch, int64_t keys = 8192, int64_t heads = 32,
                         int64_t heads_kv = 8, bool pages = false) {
  return decode(batch, keys, heads, heads_kv, &kSomeLengths, pages);
}
ChunkSchedule parts_of_decode(int64_t batch) { return uneven_decode(batch).chunks; }

// Few long sequences of many heads have parts to spare, to cut all that are too long.
TEST(PlannerCudaDecode, FewLongSequencesHavePartsToSpare) {
  const auto most = [](auto... of) { return uneven_decode(of...).chunks.max_chunks; };
  EXPECT_EQ(most(16, 4096, 32, 32), 16 + 8);
  EXPECT_EQ(most(16, 2048, 32, 32), 20);     // of as many turns and one more
  EXPECT_EQ(most(12, 4096, 32, 32), 16);     // of fewer turns
  EXPECT_GT(most(64, 4096, 32, 8), 64 + 8);  // more sequences have more to spare
}

// Of a few tiles of keys, where tiles are nearly half as many as multiprocessors, or of four rows
// and up to three fourths of them.
TEST(PlannerCudaDecode, FourBlocksOfAClusterReadUnevenLengths) {
  const auto has = [](auto... of) {
    const cuda::Plan plan = uneven_decode(of...);
    EXPECT_TRUE(plan.cluster_size != 4 || (plan.warps_per_tile == 1 && !plan.chunks.any()));
    return plan.cluster_size == 4;
  };
  EXPECT_TRUE(has(8, 4096));
  EXPECT_TRUE(has(64, 4096, 16, 1));
  EXPECT_TRUE(has(12, 2048));
  EXPECT_TRUE(has(3, 2048, 32, 32));
  EXPECT_TRUE(has(3, 1024, 32, 32, true));
  EXPECT_FALSE(has(3, 1024, 32, 32));  // one row
  EXPECT_TRUE(has(12, 2048, 32, 8, true));
  EXPECT_FALSE(has(8, 8192));
  EXPECT_FALSE(has(12, 4096));
  EXPECT_FALSE(has(12, 2048, 64, 8));
  EXPECT_FALSE(has(96, 1024, 16, 1));
  EXPECT_FALSE(has(14, 2048));
  EXPECT_NE(decode(12, 2048, 32, 8).cluster_size, 4);
}

// By the last block where tiles are nearly as many as multiprocessors, or more, of more than four
// rows where they are nearly half as many, and where blocks are alone; but a pair of blocks merges
// four rows of a few tiles faster.
TEST(PlannerCudaDecode, ManyTilesAreMergedByTheLastBlock) {
  EXPECT_FALSE(uneven_decode(8).last_cta_combines);
  EXPECT_TRUE(uneven_decode(12).one_cta_per_sm && uneven_decode(12).last_cta_combines);
  EXPECT_FALSE(uneven_decode(48, 4096, 16, 1).last_cta_combines);
  EXPECT_TRUE(uneven_decode(64, 8192, 16, 1).one_cta_per_sm &&
              uneven_decode(64, 8192, 16, 1).last_cta_combines);
  EXPECT_TRUE(uneven_decode(8, 8192, 64, 8).last_cta_combines);
  EXPECT_TRUE(uneven_decode(14).last_cta_combines);
  EXPECT_TRUE(uneven_decode(16).last_cta_combines);
  EXPECT_EQ(uneven_decode(16, 1024).cluster_size, 2);
  EXPECT_EQ(uneven_decode(16, 512, 32, 8, true).cluster_size, 2);
  EXPECT_TRUE(uneven_decode(16, 1024, 32, 8, true).last_cta_combines);
  const cuda::Plan of_many_rows = uneven_decode(128, 1024, 16, 1);
  EXPECT_TRUE(of_many_rows.last_cta_combines);
  EXPECT_TRUE(of_many_rows.one_cta_per_sm);
  EXPECT_EQ(of_many_rows.chunks.chunks_if_uniform, 1);
  EXPECT_TRUE(uneven_decode(128, 512, 16, 1).one_cta_per_sm);
  EXPECT_EQ(uneven_decode(16, 512, 64, 8).cluster_size, 2);
  EXPECT_EQ(uneven_decode(80, 1024, 16, 1).cluster_size, 3);
}

// Counts of arrivals have room for all parts that are merged by the last block.
TEST(PlannerCudaDecode, MergedPartsFitTheirRecord) {
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

// Short sequences are not cut for one that is a few times as long as the mean where there are many.
TEST(PlannerCudaDecode, ManyShortSequencesNeedNotBeAlike) {
  EXPECT_EQ(parts_of_decode(16).uniform_fourths, ChunkSchedule::kFourths);
  EXPECT_EQ(parts_of_decode(64).uniform_fourths, 64 * 8 * 23 / (5 * gpu_with(90).gpu.sm_count));
  EXPECT_GT(parts_of_decode(128).uniform_fourths, 7 * 4);
}

// Long sequences come first where not all run at once, or nearly so where they may be long, and no
// more of them than a warp looks at.
TEST(PlannerCudaDecode, LongSequencesOfManyComeFirst) {
  for (const int64_t batch : {32, 64, 128, 256, 257}) {
    const ChunkSchedule parts = parts_of_decode(batch);
    EXPECT_TRUE(parts.any()) << batch;
    EXPECT_EQ(parts.longest_first(), batch == 64 || batch == 128 || batch == 256) << batch;
    if (parts.longest_first()) {
      EXPECT_EQ(parts.concurrent_sequences, 4 * gpu_with(90).gpu.sm_count / 8);
    }
  }
  EXPECT_FALSE(uneven_decode(64, 1024).chunks.longest_first());
  EXPECT_TRUE(uneven_decode(128, 1024).chunks.longest_first());
}

// What has more keys than the share of one sequence that runs at once is cut.
TEST(PlannerCudaDecode, WhatIsLongerThanItsShareIsCut) {
  ChunkSchedule parts = parts_of_decode(128);
  const ChunkSchedule::Batch batch = {128, 128 * 400, 1000};  // alike: short enough
  EXPECT_EQ(parts.first_chunk_size(batch), 832);              // of 66 at once, in tiles of 64
  EXPECT_EQ(parts.first_chunk_size({128, 128 * 1000, 1024}), 1024);
  parts.concurrent_sequences = 0;
  EXPECT_EQ(parts.first_chunk_size(batch), 1024);
}

// The launch after this one comes early where its blocks find their places evenly.
TEST(PlannerCudaDecode, TheNextLaunchComesWhereThereIsRoom) {
  using cuda::PdlTrigger;
  static constexpr int32_t kLengths[] = {0};  // read by no planner
  const auto planned = [](int64_t batch, int64_t keys, int64_t heads, int64_t kv_heads,
                          bool lengths, int32_t sm = 90) {
    Problem p = problem(TILEWISE_BFLOAT16, batch, 1, keys, heads);
    p.heads_kv = kv_heads;
    for (tilewise_tensor* t : {&p.k, &p.v})
      *t = {nullptr, keys * kv_heads * 128, kv_heads * 128, 128};
    if (lengths) p.seqused_k = kLengths;
    return forward(p, gpu_with(sm));
  };
  const auto next = [&](auto... of) { return planned(of...).pdl_trigger; };
  // A cluster of one block a multiprocessor, and of two.
  EXPECT_EQ(planned(1, 1024, 32, 8, false).cluster_size, 16);
  EXPECT_EQ(next(1, 1024, 32, 8, false), PdlTrigger::after_first_loads);
  EXPECT_EQ(planned(4, 4096, 32, 8, false).cluster_size, 8);
  EXPECT_EQ(next(4, 4096, 32, 8, false), PdlTrigger::at_exit);
  // A block a tile: one turn of them, and several.
  EXPECT_EQ(next(16, 1024, 32, 8, false), PdlTrigger::after_first_loads);
  EXPECT_EQ(next(48, 1024, 32, 8, false), PdlTrigger::before_epilogue);
  // Pairs of blocks, and equal parts.
  EXPECT_EQ(planned(16, 1024, 32, 8, true).cluster_size, 2);
  EXPECT_EQ(next(16, 1024, 32, 8, true), PdlTrigger::after_first_loads);
  EXPECT_TRUE(planned(16, 4096, 32, 8, true).one_cta_per_sm);
  EXPECT_EQ(next(16, 4096, 32, 8, true), PdlTrigger::after_first_loads);
  EXPECT_EQ(next(14, 2048, 32, 8, true), PdlTrigger::after_first_loads);
  EXPECT_EQ(next(14, 8192, 32, 8, true), PdlTrigger::at_exit);  // of parts that are spread
  EXPECT_EQ(next(48, 1024, 32, 8, true), PdlTrigger::before_epilogue);
  // A second kernel waits for this one.
  EXPECT_TRUE(needs_combine_kernel(planned(1, 131072, 32, 8, false)));
  EXPECT_EQ(next(1, 131072, 32, 8, false), PdlTrigger::after_first_loads);
  EXPECT_EQ(planned(2, 16384, 16, 1, false).combine_pdl_trigger, PdlTrigger::after_first_loads);
  EXPECT_EQ(planned(24, 8192, 16, 1, true).combine_pdl_trigger, PdlTrigger::after_first_loads);
  EXPECT_EQ(planned(24, 16384, 16, 1, true).combine_pdl_trigger, PdlTrigger::at_exit);
  const cuda::Plan alone = planned(8, 16384, 32, 8, true);
  EXPECT_TRUE(alone.one_cta_per_sm && needs_combine_kernel(alone));
  EXPECT_EQ(alone.combine_pdl_trigger, PdlTrigger::at_exit);
  EXPECT_EQ(planned(8, 8192, 32, 8, true).combine_pdl_trigger, PdlTrigger::after_first_loads);
  EXPECT_EQ(planned(7, 8192, 64, 8, true).combine_pdl_trigger,
            PdlTrigger::at_exit);  // of many rows
  // Prompts.
  const Device device = gpu_with(90);
  EXPECT_EQ(forward(problem(TILEWISE_BFLOAT16), device).pdl_trigger, PdlTrigger::at_exit);
  const cuda::Plan shared = forward(problem(TILEWISE_BFLOAT16, 1, 2048, 2048, 4), device);
  EXPECT_TRUE(shared.stream_k.any());
  EXPECT_EQ(shared.pdl_trigger, PdlTrigger::after_first_loads);
}

}  // namespace
}  // namespace tilewise::dispatch
