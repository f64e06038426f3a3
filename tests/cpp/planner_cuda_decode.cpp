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
      EXPECT_EQ(large.cluster, 16);
      EXPECT_EQ(large.readers, cuda::kMostReaders);
      EXPECT_FALSE(large.parts.any());
      const cuda::Plan small = decode(batch, 1024, 16, 1, lengths);  // of a tile each
      EXPECT_EQ(small.cluster, 16);
      EXPECT_EQ(small.readers, 1);
      const cuda::Plan longer = decode(batch, 16384, 16, 1, lengths);
      EXPECT_EQ(longer.cluster, 1);
      EXPECT_FALSE(longer.parts.any());
      EXPECT_EQ(longer.alone, batch == 6);  // six tiles of keys a multiprocessor
    }
    EXPECT_EQ(decode(8, 8192, 16, 1, lengths).readers, 1);  // clusters find no places beside others
  }
  // Parts where some have much to read, but for two or three.
  EXPECT_TRUE(decode(6, 65536, 16, 1, &kSomeLengths).parts.any());
  EXPECT_FALSE(decode(3, 65536, 16, 1, &kSomeLengths).parts.any());
  const cuda::Plan of_pages = decode(2, 8192, 16, 1, &kSomeLengths, true);
  EXPECT_EQ(of_pages.cluster, 16);
  EXPECT_EQ(of_pages.readers, cuda::kMostReaders);
  // Whoever asks for splits gets them, and rows do not depend on their batch.
  Problem p = problem(TILEWISE_BFLOAT16, 2, 1, 8192, 16);
  p.heads_kv = 1;
  p.num_splits = 16;
  EXPECT_EQ(forward(p, gpu_with(90)).readers, 1);
  p.num_splits = 0;
  p.batch_invariant = 1;
  EXPECT_EQ(forward(p, gpu_with(90)).readers, 1);
}

// A block is alone on its multiprocessor where more of them would have more to merge: of lengths
// that are not known, if it has many keys.
TEST(PlannerCudaDecode, ABlockMayReadAlone) {
  for (const int64_t batch : {9, 12, 16}) {
    EXPECT_TRUE(decode(batch, 8192, 32, 8).alone) << batch;
    EXPECT_TRUE(decode(batch, 256, 32, 8).alone) << batch;
    EXPECT_TRUE(decode(batch, 8192, 32, 8, &kSomeLengths).alone) << batch;
    EXPECT_FALSE(decode(batch, 1024, 32, 8, &kSomeLengths).alone) << batch;
    EXPECT_TRUE(decode(8 * batch, 2048, 16, 1, &kSomeLengths).alone) << batch;
  }
  EXPECT_FALSE(decode(24, 8192, 32, 8).alone);  // more of them than multiprocessors
  EXPECT_FALSE(decode(16, 128, 32, 8).alone);
  EXPECT_TRUE(decode(8, 8192, 32, 8).alone);  // two splits
  EXPECT_FALSE(decode(8, 1024, 32, 8).alone);
  EXPECT_FALSE(decode(4, 16384, 32, 8).alone);
  EXPECT_TRUE(decode(32, 16384, 16, 1).alone);
  EXPECT_FALSE(decode(64, 2048, 16, 1).alone);
  // Eight and sixteen rows have more to merge.
  EXPECT_TRUE(decode(12, 1024, 64, 8, &kSomeLengths).alone);
  EXPECT_FALSE(decode(12, 512, 64, 8, &kSomeLengths).alone);
  EXPECT_TRUE(decode(96, 1024, 16, 1, &kSomeLengths).alone);
  EXPECT_TRUE(decode(96, 256, 16, 1, &kSomeLengths).alone);
  EXPECT_FALSE(decode(80, 1024, 16, 1, &kSomeLengths).alone);
  EXPECT_TRUE(decode(80, 512, 16, 1, &kSomeLengths).alone);
  // Of several parts.
  EXPECT_FALSE(decode(8, 8192, 32, 8, &kSomeLengths).alone);
  EXPECT_TRUE(decode(8, 16384, 32, 8, &kSomeLengths).alone);
  EXPECT_TRUE(decode(32, 16384, 16, 1, &kSomeLengths).alone);
  EXPECT_FALSE(decode(32, 8192, 16, 1, &kSomeLengths).alone);
}

// Pages, of which a warp needs more instructions.
TEST(PlannerCudaDecode, ABlockMayReadPagesAlone) {
  const auto alone = [](int64_t batch, int64_t keys, int64_t heads, int64_t heads_kv) {
    const cuda::Plan plan = decode(batch, keys, heads, heads_kv, &kSomeLengths, true);
    EXPECT_EQ(plan.form, cuda::Form::paged_boxes);
    EXPECT_EQ(plan.readers, plan.alone ? 2 : 1);
    return plan.alone;
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
    return decode(batch, keys, heads, heads_kv, lengths, false, speed).readers;
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
  EXPECT_EQ(decode(16, 8192, 32, 8, nullptr, true, kH100).readers, 2);
  // A row may not depend on what else is in the batch.
  Problem p = problem(TILEWISE_BFLOAT16, 16, 1, 8192, 32);
  p.heads_kv = 8;
  p.batch_invariant = 1;
  EXPECT_EQ(forward(p, gpu_with(90)).readers, 1);
}

// Two slots of a ring, where more on its way would be more than memory needs.
TEST(PlannerCudaDecode, SlotsAreAsManyAsMemoryNeeds) {
  const auto slots = [](int32_t speed, int64_t batch, int64_t keys, int64_t heads, int64_t heads_kv,
                        const int32_t* lengths = nullptr, bool pages = false) {
    return decode(batch, keys, heads, heads_kv, lengths, pages, speed).slots;
  };
  EXPECT_EQ(slots(kH100, 96, 2048, 16, 1), cuda::kFewSlots);
  EXPECT_EQ(slots(kH100, 80, 2048, 16, 1), 0);
  EXPECT_EQ(slots(kH200, 128, 2048, 16, 1), 0);
  EXPECT_EQ(slots(0, 96, 2048, 16, 1), 0);                    // not known
  EXPECT_EQ(slots(kH100, 64, 8192, 16, 1), cuda::kFewSlots);  // two splits
  EXPECT_EQ(slots(kH100, 16, 8192, 32, 8), 0);                // one reader
  for (const int32_t speed : {kH100, kH200}) {
    EXPECT_EQ(slots(speed, 6, 8192, 16, 1), 0);  // clusters, which wait for keys
    EXPECT_EQ(slots(speed, 10, 1024, 32, 8, &kSomeLengths), 0);
    EXPECT_EQ(slots(speed, 12, 1024, 32, 8, &kSomeLengths), cuda::kFewSlots);
    EXPECT_EQ(slots(speed, 20, 4096, 32, 8), 0);
    EXPECT_EQ(slots(speed, 24, 4096, 32, 8), cuda::kFewSlots);
    EXPECT_EQ(slots(speed, 128, 2048, 32, 8), cuda::kFewSlots);
    EXPECT_EQ(slots(speed, 128, 2048, 32, 8, nullptr, true), 0);
  }
  Problem p = problem(TILEWISE_BFLOAT16, 128, 1, 2048, 32);
  p.heads_kv = 8;
  p.batch_invariant = 1;
  EXPECT_EQ(forward(p, gpu_with(90)).readers, 1);
}

// Parts of which not all may be there are spread over the grid, as a bijection.
TEST(PlannerCudaDecode, PartsAreSpreadOverTheGrid) {
  const auto spread = [](auto... of) { return decode(of..., &kSomeLengths).spread; };
  const int64_t all = gpu_with(90).gpu.multiprocessors;
  EXPECT_EQ(spread(12, 8192, 32, 8).works, 96);
  EXPECT_EQ(spread(12, 8192, 32, 8).places, all);
  EXPECT_EQ(spread(96, 2048, 16, 1).works, 96);
  EXPECT_EQ(spread(96, 2048, 16, 1).places, 2 * all - 96);
  EXPECT_FALSE(spread(16, 8192, 32, 8).any());          // nearly as many as multiprocessors
  EXPECT_FALSE(spread(8, 8192, 32, 8).any());           // two blocks a multiprocessor
  EXPECT_EQ(spread(24, 4096, 32, 8).works, 192 - all);  // the second blocks of multiprocessors
  EXPECT_EQ(spread(24, 4096, 32, 8).places, all);
  EXPECT_EQ(spread(24, 4096, 32, 8).first, all);
  EXPECT_FALSE(spread(24, 1024, 32, 8).any());  // short ones
  EXPECT_FALSE(spread(32, 4096, 32, 8).any());  // nearly all have two
  EXPECT_FALSE(decode(12, 8192, 32, 8).spread.any());
  EXPECT_EQ(cuda::Spread{}.work_of(7), 7);
  for (const cuda::Spread& s :
       {spread(12, 8192, 32, 8), spread(96, 2048, 16, 1), spread(72, 2048, 16, 1),
        spread(24, 4096, 32, 8), spread(6, 4096, 32, 32), cuda::Spread{1, 5}}) {
    const int32_t blocks = s.first + s.places + 3;
    std::vector<int32_t> taken(static_cast<std::size_t>(blocks));
    for (int32_t block = 0; block < blocks; ++block) {
      const int32_t work = s.work_of(block);
      ASSERT_GE(work, 0);
      ASSERT_LT(work, blocks);
      ++taken[static_cast<std::size_t>(work)];
      // At every place as many have come as should have.
      if (block < s.first) {
        EXPECT_EQ(work, block);
      } else if (work < s.first + s.works) {
        EXPECT_EQ(work - s.first, (block - s.first) * s.works / s.places);
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
  EXPECT_EQ(plan.form, page < 16 ? Form::paged : Form::paged_boxes);
  return plan;
}

// Small pages, whose rows are copied into the same ring, are cut as those that come as boxes.
TEST(PlannerCudaDecode, SmallPagesAreCutAsOthers) {
  const auto cut = [](const cuda::Plan& plan) {
    return std::make_tuple(plan.splits, plan.cluster, plan.readers, plan.parts.most, plan.alone);
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
  EXPECT_EQ(of_pages(2, 4096, 1, 16, 1).cluster, 16);
  EXPECT_EQ(of_pages(2, 4096, 1, 16, 1).readers, 2);
  EXPECT_EQ(of_pages(128, 1024, 1, 16, 1).readers, 2);
}

// The same of lengths that only the GPU knows.
cuda::Plan uneven_decode(int64_t batch, int64_t keys = 8192, int64_t heads = 32,
                         int64_t heads_kv = 8, bool pages = false) {
  return decode(batch, keys, heads, heads_kv, &kSomeLengths, pages);
}
EqualParts parts_of_decode(int64_t batch) { return uneven_decode(batch).parts; }

// Few long sequences of many heads have parts to spare, to cut all that are too long.
TEST(PlannerCudaDecode, FewLongSequencesHavePartsToSpare) {
  const auto most = [](auto... of) { return uneven_decode(of...).parts.most; };
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
    EXPECT_TRUE(plan.cluster != 4 || (plan.readers == 1 && !plan.parts.any()));
    return plan.cluster == 4;
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
  EXPECT_NE(decode(12, 2048, 32, 8).cluster, 4);
}

// By the last block where tiles are nearly as many as multiprocessors, or more, of more than four
// rows where they are nearly half as many, and where blocks are alone; but a pair of blocks merges
// four rows of a few tiles faster.
TEST(PlannerCudaDecode, ManyTilesAreMergedByTheLastBlock) {
  EXPECT_FALSE(uneven_decode(8).merges_parts);
  EXPECT_TRUE(uneven_decode(12).alone && uneven_decode(12).merges_parts);
  EXPECT_FALSE(uneven_decode(48, 4096, 16, 1).merges_parts);
  EXPECT_TRUE(uneven_decode(64, 8192, 16, 1).alone && uneven_decode(64, 8192, 16, 1).merges_parts);
  EXPECT_TRUE(uneven_decode(8, 8192, 64, 8).merges_parts);
  EXPECT_TRUE(uneven_decode(14).merges_parts);
  EXPECT_TRUE(uneven_decode(16).merges_parts);
  EXPECT_EQ(uneven_decode(16, 1024).cluster, 2);
  EXPECT_EQ(uneven_decode(16, 512, 32, 8, true).cluster, 2);
  EXPECT_TRUE(uneven_decode(16, 1024, 32, 8, true).merges_parts);
  const cuda::Plan of_many_rows = uneven_decode(128, 1024, 16, 1);
  EXPECT_TRUE(of_many_rows.merges_parts);
  EXPECT_TRUE(of_many_rows.alone);
  EXPECT_EQ(of_many_rows.parts.alike, 1);
  EXPECT_TRUE(uneven_decode(128, 512, 16, 1).alone);
  EXPECT_EQ(uneven_decode(16, 512, 64, 8).cluster, 2);
  EXPECT_EQ(uneven_decode(80, 1024, 16, 1).cluster, 3);
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
      ASSERT_TRUE(plan.merges_parts);
      EXPECT_GE(plan.parts.most, batch * plan.parts.alike);
      EXPECT_LT(plan.parts.most, batch + cuda::PartArrivals::kMost);
    }
  }
}

// Short sequences are not cut for one that is a few times as long as the mean where there are many.
TEST(PlannerCudaDecode, ManyShortSequencesNeedNotBeAlike) {
  EXPECT_EQ(parts_of_decode(16).fourths, EqualParts::kFourths);
  EXPECT_EQ(parts_of_decode(64).fourths, 64 * 8 * 23 / (5 * gpu_with(90).gpu.multiprocessors));
  EXPECT_GT(parts_of_decode(128).fourths, 7 * 4);
}

// Long sequences come first where not all run at once, or nearly so where they may be long, and no
// more of them than a warp looks at.
TEST(PlannerCudaDecode, LongSequencesOfManyComeFirst) {
  for (const int64_t batch : {32, 64, 128, 256, 257}) {
    const EqualParts parts = parts_of_decode(batch);
    EXPECT_TRUE(parts.any()) << batch;
    EXPECT_EQ(parts.long_first(), batch == 64 || batch == 128 || batch == 256) << batch;
    if (parts.long_first()) {
      EXPECT_EQ(parts.at_once, 4 * gpu_with(90).gpu.multiprocessors / 8);
    }
  }
  EXPECT_FALSE(uneven_decode(64, 1024).parts.long_first());
  EXPECT_TRUE(uneven_decode(128, 1024).parts.long_first());
}

// What has more keys than the share of one sequence that runs at once is cut.
TEST(PlannerCudaDecode, WhatIsLongerThanItsShareIsCut) {
  EqualParts parts = parts_of_decode(128);
  const EqualParts::Batch batch = {128, 128 * 400, 1000};  // alike: short enough
  EXPECT_EQ(parts.first_part(batch), 832);                 // of 66 at once, in tiles of 64
  EXPECT_EQ(parts.first_part({128, 128 * 1000, 1024}), 1024);
  parts.at_once = 0;
  EXPECT_EQ(parts.first_part(batch), 1024);
}

// The launch after this one comes early where its blocks find their places evenly.
TEST(PlannerCudaDecode, TheNextLaunchComesWhereThereIsRoom) {
  using cuda::NextStart;
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
  const auto next = [&](auto... of) { return planned(of...).next; };
  // A cluster of one block a multiprocessor, and of two.
  EXPECT_EQ(planned(1, 1024, 32, 8, false).cluster, 16);
  EXPECT_EQ(next(1, 1024, 32, 8, false), NextStart::after_first_keys);
  EXPECT_EQ(planned(4, 4096, 32, 8, false).cluster, 8);
  EXPECT_EQ(next(4, 4096, 32, 8, false), NextStart::at_end);
  // A block a tile: one turn of them, and several.
  EXPECT_EQ(next(16, 1024, 32, 8, false), NextStart::after_first_keys);
  EXPECT_EQ(next(48, 1024, 32, 8, false), NextStart::before_last_result);
  // Pairs of blocks, and equal parts.
  EXPECT_EQ(planned(16, 1024, 32, 8, true).cluster, 2);
  EXPECT_EQ(next(16, 1024, 32, 8, true), NextStart::after_first_keys);
  EXPECT_TRUE(planned(16, 4096, 32, 8, true).alone);
  EXPECT_EQ(next(16, 4096, 32, 8, true), NextStart::after_first_keys);
  EXPECT_EQ(next(14, 2048, 32, 8, true), NextStart::after_first_keys);
  EXPECT_EQ(next(14, 8192, 32, 8, true), NextStart::at_end);  // of parts that are spread
  EXPECT_EQ(next(48, 1024, 32, 8, true), NextStart::before_last_result);
  // A second kernel waits for this one.
  EXPECT_TRUE(leaves_results(planned(1, 131072, 32, 8, false)));
  EXPECT_EQ(next(1, 131072, 32, 8, false), NextStart::after_first_keys);
  EXPECT_EQ(planned(2, 16384, 16, 1, false).next_of_merge, NextStart::after_first_keys);
  EXPECT_EQ(planned(24, 8192, 16, 1, true).next_of_merge, NextStart::after_first_keys);
  EXPECT_EQ(planned(24, 16384, 16, 1, true).next_of_merge, NextStart::at_end);
  const cuda::Plan alone = planned(8, 16384, 32, 8, true);
  EXPECT_TRUE(alone.alone && leaves_results(alone));
  EXPECT_EQ(alone.next_of_merge, NextStart::at_end);
  EXPECT_EQ(planned(8, 8192, 32, 8, true).next_of_merge, NextStart::after_first_keys);
  EXPECT_EQ(planned(7, 8192, 64, 8, true).next_of_merge, NextStart::at_end);  // of many rows
  // Prompts.
  const Device device = gpu_with(90);
  EXPECT_EQ(forward(problem(TILEWISE_BFLOAT16), device).next, NextStart::at_end);
  const cuda::Plan shared = forward(problem(TILEWISE_BFLOAT16, 1, 2048, 2048, 4), device);
  EXPECT_TRUE(shared.shares.any());
  EXPECT_EQ(shared.next, NextStart::after_first_keys);
}

}  // namespace
}  // namespace tilewise::dispatch
