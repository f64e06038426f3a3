// How the CUDA planner cuts the keys of few rows: splits, and clusters that merge them.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cuda/plan.h"
#include "described_cuda.h"
#include "planned_cuda.h"

namespace tilewise::dispatch {
namespace {

using cuda::Form;

TEST(PlannerCudaSplits, SplitsFillTheGpuAndFollowTheCaller) {
  const Device device = gpu_with(90);
  EXPECT_EQ(forward(problem(TILEWISE_BFLOAT16, 16, 2048, 2048, 16), device).splits, 1);
  EXPECT_GT(forward(problem(TILEWISE_BFLOAT16, 1, 128, 65536, 1), device).splits, 32);
  EXPECT_GT(forward(problem(TILEWISE_BFLOAT16, 1, 128, 65536, 1), gpu_with(80)).splits, 32);
  EXPECT_EQ(forward(problem(TILEWISE_BFLOAT16, 1, 17, 200, 1), device).splits, 1);
  EXPECT_EQ(forward(problem(TILEWISE_BFLOAT16, 1, 1, 64, 1), device).splits, 1);
  Problem asked = problem(TILEWISE_BFLOAT16, 16, 2048, 2048, 16);
  asked.num_splits = 3;
  const cuda::Plan plan = forward(asked, device);
  EXPECT_EQ(plan.splits, 3);
  const int64_t partial = int64_t{3} * 16 * 2048 * 16 * 129 * 4;
  const int64_t overflows = plan.blocks * plan.tile_q / 16 * 4;  // four bytes a warp
  EXPECT_GE(plan.workspace_bytes, partial + overflows);
  EXPECT_LE(plan.workspace_bytes, partial + overflows + 256);
}

// Tiles that fill no round of blocks share their keys, where that saves more than it costs.
TEST(PlannerCudaSplits, TheLastRoundOfAFullForwardIsShared) {
  const auto planned = [](int64_t rows, int64_t heads, int32_t right = -1, int32_t sm = 90) {
    Problem p = problem(TILEWISE_BFLOAT16, 1, rows, rows, heads);
    p.window_right = right;
    return forward(p, gpu_with(sm));
  };
  const int64_t all = gpu_with(90).gpu.multiprocessors;
  for (const auto& [rows, heads] :
       {std::pair<int64_t, int64_t>{2048, 4}, {2048, 12}, {16384, 16}, {8192, 1}}) {
    const cuda::Plan plan = planned(rows, heads);
    EXPECT_EQ(plan.splits, 1);
    EXPECT_EQ(plan.shares.works, plan.blocks % all) << rows << " rows, " << heads << " heads";
    EXPECT_EQ(plan.shares.first, plan.blocks - plan.shares.works);
    EXPECT_GT(plan.workspace_bytes, int64_t{plan.shares.works} * plan.tile_q * 128 * 4);
    for (int32_t work = 0; work < plan.shares.works; ++work)
      EXPECT_LE(plan.shares.parts(work), cuda::Shares::kMostParts);
  }
  EXPECT_FALSE(planned(2048, 4, 0).shares.any());       // causal tiles have lengths of their own
  EXPECT_FALSE(planned(2048, 4, -1, 80).shares.any());  // another family
  EXPECT_FALSE(planned(512, 33).shares.any());          // whole rounds
  EXPECT_FALSE(planned(512, 8).shares.any());           // saves less than it costs
}

// Few splits of a decode become a cluster: no second launch, and nothing in the workspace.
TEST(PlannerCudaSplits, AClusterMergesFewSplitsThatRunAtOnce) {
  const auto planned = [](int64_t batch, int64_t keys, int32_t splits = 0, int32_t sm = 90) {
    Problem p = problem(TILEWISE_BFLOAT16, batch, 1, keys, 32);
    p.heads_kv = 8;
    p.num_splits = splits;
    return forward(p, gpu_with(sm));
  };
  for (const cuda::Plan& plan :
       {planned(1, 1024), planned(1, 1024, 16), planned(8, 1024), planned(1, 8192),
        planned(1, 100, 2), planned(2, 4096), planned(1, 1024, 0, 100)}) {
    EXPECT_GT(plan.splits, 1);
    EXPECT_EQ(plan.cluster, plan.splits);
    EXPECT_EQ(plan.workspace_bytes, 0);
  }
  for (const cuda::Plan& plan :
       {planned(1, 16384), planned(1, 1024, 17), planned(64, 1024, 8), planned(1, 1024, 0, 80)}) {
    EXPECT_GT(plan.splits, 1);
    EXPECT_EQ(plan.cluster, 1);
    EXPECT_GT(plan.workspace_bytes, 0);
  }
  EXPECT_EQ(planned(64, 4096).cluster, 1);          // one split
  EXPECT_EQ(planned(8, 16384, 4).cluster, 1);       // many keys of a block
  EXPECT_EQ(planned(1, 1024, 16, 110).cluster, 1);  // not every GPU has such clusters
  EXPECT_EQ(planned(1, 1024, 8, 110).cluster, 8);
  Problem p = problem(TILEWISE_BFLOAT16, 1, 1, 1024, 8);
  const auto text = [&] {
    const Decision decision = plan(p, nullptr, gpu_with(90));
    return explain(decision, p, nullptr, gpu_with(90));
  };
  EXPECT_NE(text().find("16 key splits of a cluster"), std::string::npos) << text();
  p.softcap = 30.0f;
  EXPECT_EQ(text().find("cluster"), std::string::npos) << text();
  p = paged(TILEWISE_BFLOAT16, 1);
  p.block_table_width = p.block_table_stride = 1024;
  p.num_splits = 8;
  const cuda::Plan pages = forward(p, gpu_with(90));
  EXPECT_EQ(pages.form, Form::paged);
  EXPECT_EQ(pages.cluster, 8);
}

// One block a multiprocessor where clusters of up to 16 merge or two splits of many keys are
// enough, two in clusters of up to 8 and where a second kernel merges; no splits where tiles are
// enough for more than half of the multiprocessors.
TEST(PlannerCudaSplits, SplitsOfADecodeFillTheGpuOnceOrTwice) {
  const auto splits = [](int64_t batch, int64_t keys, int64_t heads, int64_t heads_kv) {
    Problem p = problem(TILEWISE_BFLOAT16, batch, 1, keys, heads);
    p.heads_kv = heads_kv;
    return forward(p, gpu_with(90)).splits;
  };
  EXPECT_EQ(splits(1, 1024, 32, 8), 16);
  EXPECT_EQ(splits(1, 8192, 32, 8), 16);
  EXPECT_EQ(splits(1, 16384, 32, 8), 32);
  EXPECT_EQ(splits(2, 4096, 32, 8), 8);
  EXPECT_EQ(splits(2, 16384, 32, 8), 16);
  EXPECT_EQ(splits(4, 4096, 32, 8), 8);
  EXPECT_EQ(splits(8, 1024, 32, 8), 4);
  EXPECT_EQ(splits(8, 4096, 32, 8), 2);
  EXPECT_EQ(splits(16, 128, 32, 8), 2);
  EXPECT_EQ(splits(9, 1024, 32, 8), 1);
  EXPECT_EQ(splits(16, 256, 32, 8), 1);
  EXPECT_EQ(splits(16, 8192, 32, 8), 1);
  EXPECT_EQ(splits(24, 1024, 32, 8), 1);  // more blocks than multiprocessors
  EXPECT_EQ(splits(32, 8192, 32, 8), 1);
  EXPECT_EQ(splits(64, 4096, 32, 8), 1);
  EXPECT_EQ(splits(1, 4096, 16, 1), 64);
}

// Lengths that only the GPU knows: each block has a part of the keys of the batch.
TEST(PlannerCudaSplits, UnevenLengthsAreCutIntoEqualParts) {
  const Device device = gpu_with(90);
  const int64_t all = device.gpu.multiprocessors;
  Problem p = problem(TILEWISE_BFLOAT16, 4, 1, 65536, 8);
  const int32_t lengths = 0;
  p.seqused_k = &lengths;
  const cuda::Plan some = forward(p, device);
  EXPECT_EQ(some.parts.most, (2 * all - 1) / 8);  // one more on each multiprocessor
  EXPECT_EQ(some.parts.alike, 4);
  EXPECT_EQ(some.blocks, some.parts.most * 8);
  EXPECT_EQ(some.splits, 1);
  const int64_t partial = some.blocks * 129 * 4;
  EXPECT_GE(some.workspace_bytes, partial);
  EXPECT_LE(some.workspace_bytes, partial + 256);
  const Decision decision = plan(p, nullptr, device);
  const std::string text = explain(decision, p, nullptr, device);
  EXPECT_NE(text.find("keys of the batch in 32 parts"), std::string::npos) << text;
  p.softcap = 30.0f;
  EXPECT_TRUE(forward(p, device).parts.any());
  EXPECT_TRUE(forward(p, gpu_with(80)).parts.any());
  p.seqlen_k = 128;  // no more of them than tiles
  EXPECT_EQ(forward(p, device).parts.most, 4 * 2);
  p.seqlen_k = 4096;
  EXPECT_EQ(forward(p, device).parts.most, 2 * all / 8 + 4);  // two, and one for each sequence
  EXPECT_FALSE(forward(p, device).merges_parts);
  for (const int64_t batch : {32, 64, 1000}) {  // tiles fill the GPU: room for a few more
    p.batch = batch;
    p.softcap = 0.0f;
    const cuda::Plan full = forward(p, device);
    EXPECT_TRUE(full.merges_parts);
    EXPECT_EQ(full.parts.alike, 1);
    EXPECT_GT(full.blocks, batch * 8 + (batch < 1000 ? all : 0) - 8);
    EXPECT_LT(full.blocks, batch * 8 + 3 * all);
    EXPECT_GE(full.workspace_bytes, full.blocks * 132 * 4);
    EXPECT_FALSE(forward(p, gpu_with(80)).merges_parts);
    p.softcap = 30.0f;
    EXPECT_FALSE(forward(p, device).merges_parts);
  }
}

// By its own keys where nobody counts the parts, or could not.
TEST(PlannerCudaSplits, UnevenLengthsAreCutByTheirKeys) {
  const Device device = gpu_with(90);
  const int32_t lengths = 0;
  Problem p = problem(TILEWISE_FLOAT32, 4, 1, 65536, 8);
  p.seqused_k = &lengths;
  const cuda::Plan some = forward(p, device);
  EXPECT_FALSE(some.parts.any());
  EXPECT_EQ(some.rule.parts(1, 65536), 2 * device.gpu.multiprocessors / (4 * 8));
  EXPECT_EQ(some.rule.parts(1, 100), 1);
  EXPECT_EQ(some.rule.parts(1, 65536), some.splits);
  p = problem(TILEWISE_BFLOAT16, 64, 1, int64_t{1} << 37, 8);  // a block table may have room for it
  p.seqused_k = &lengths;
  EXPECT_FALSE(forward(p, device).parts.any());
  p.seqlen_k = 4096;
  EXPECT_TRUE(forward(p, device).parts.any());
  p.batch_invariant = 1;
  EXPECT_FALSE(forward(p, device).parts.any());
  p.batch_invariant = 0;
  p.num_splits = 4;
  EXPECT_FALSE(forward(p, device).parts.any());
  p.num_splits = 0;
  p.window_left = 100;
  EXPECT_FALSE(forward(p, device).parts.any());
}

// Full caches are cut as they are without lengths, or twice as often where a block has not very
// many keys, and there are blocks for that.
TEST(PlannerCudaSplits, FullLengthsAreCutAsNoLengths) {
  const Device device = gpu_with(90);
  for (const int64_t batch : {2, 3, 5, 8, 16, 64}) {
    for (const int32_t keys : {8192, 32768}) {
      Problem p = problem(TILEWISE_BFLOAT16, batch, 1, keys, 32);
      p.heads_kv = 8;
      const int64_t splits = forward(p, device).splits;
      const int32_t lengths = 0;
      p.seqused_k = &lengths;
      const EqualParts parts = forward(p, device).parts;
      EXPECT_GE(parts.alike, splits) << batch << " x " << keys;
      constexpr int64_t kMany = 128 * 64;  // keys of a block that reads alone, whatever the lengths
      EXPECT_LE(parts.alike, keys < splits * kMany && batch < 16 ? 2 * splits + 1 : splits);
      EXPECT_GE(parts.most, batch * splits);
    }
  }
}

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

// A block is alone on its multiprocessor where more of them would have more to merge: of lengths
// that are not known, if it has many keys.
TEST(PlannerCudaSplits, ABlockMayReadAlone) {
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
TEST(PlannerCudaSplits, ABlockMayReadPagesAlone) {
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
TEST(PlannerCudaSplits, ReadersAreAsManyAsMemoryNeeds) {
  const auto readers = [](int32_t speed, int64_t batch, int64_t keys, int64_t heads,
                          int64_t heads_kv, const int32_t* lengths = nullptr) {
    return decode(batch, keys, heads, heads_kv, lengths, false, speed).readers;
  };
  for (const int32_t* lengths : {static_cast<const int32_t*>(nullptr), &kSomeLengths}) {
    EXPECT_EQ(readers(kH200, 16, 8192, 32, 8, lengths), 2);
    EXPECT_EQ(readers(kH100, 16, 8192, 32, 8, lengths), 1);
    EXPECT_EQ(readers(kH100, 10, 8192, 32, 8, lengths), 2);
    EXPECT_EQ(readers(kH100, 96, 2048, 16, 1, lengths), 2);
    EXPECT_EQ(readers(kH100, 112, 2048, 16, 1, lengths), 1);
  }
  EXPECT_EQ(readers(kH100, 16, 1024, 32, 8), 2);
  EXPECT_EQ(readers(kH200, 24, 8192, 32, 8), 1);  // not alone
  EXPECT_EQ(decode(16, 8192, 32, 8, nullptr, true, kH100).readers, 2);
  // A row may not depend on what else is in the batch.
  Problem p = problem(TILEWISE_BFLOAT16, 16, 1, 8192, 32);
  p.heads_kv = 8;
  p.batch_invariant = 1;
  EXPECT_EQ(forward(p, gpu_with(90)).readers, 1);
}

// Parts of which not all may be there are spread over the grid, as a bijection.
TEST(PlannerCudaSplits, PartsAreSpreadOverTheGrid) {
  const auto spread = [](auto... of) { return decode(of..., &kSomeLengths).spread; };
  const int64_t all = gpu_with(90).gpu.multiprocessors;
  EXPECT_EQ(spread(12, 8192, 32, 8).works, 96);
  EXPECT_EQ(spread(12, 8192, 32, 8).places, all);
  EXPECT_EQ(spread(96, 2048, 16, 1).works, 96);
  EXPECT_EQ(spread(96, 2048, 16, 1).places, 2 * all - 96);
  EXPECT_FALSE(spread(16, 8192, 32, 8).any());  // nearly as many as multiprocessors
  EXPECT_FALSE(spread(8, 8192, 32, 8).any());   // two blocks a multiprocessor
  EXPECT_FALSE(decode(12, 8192, 32, 8).spread.any());
  EXPECT_EQ(cuda::Spread{}.work_of(7), 7);
  for (const cuda::Spread& s : {spread(12, 8192, 32, 8), spread(96, 2048, 16, 1),
                                spread(72, 2048, 16, 1), cuda::Spread{1, 5}}) {
    const int32_t blocks = s.places + 3;
    std::vector<int32_t> taken(static_cast<std::size_t>(blocks));
    for (int32_t block = 0; block < blocks; ++block) {
      const int32_t work = s.work_of(block);
      ASSERT_GE(work, 0);
      ASSERT_LT(work, blocks);
      ++taken[static_cast<std::size_t>(work)];
      // At every place as many have come as should have.
      if (work < s.works) {
        EXPECT_EQ(work, block * s.works / s.places);
      }
    }
    EXPECT_EQ(taken, std::vector<int32_t>(static_cast<std::size_t>(blocks), 1));
  }
}

// Small pages: more blocks read long sequences, where they find room.
TEST(PlannerCudaSplits, SmallPagesHaveMoreReaders) {
  const auto splits = [](int64_t batch, int64_t keys, int64_t page) {
    Problem p = paged(TILEWISE_BFLOAT16, page);
    p.batch = batch;
    p.block_table_width = p.block_table_stride = keys / page;
    p.pages = batch * p.block_table_width;
    p.heads_q = 32;
    const cuda::Plan plan = forward(p, gpu_with(90));
    EXPECT_EQ(plan.form, page < 16 ? cuda::Form::paged : cuda::Form::paged_boxes);
    return plan.splits;
  };
  EXPECT_EQ(splits(16, 8192, 1), 4);
  EXPECT_EQ(splits(16, 8192, 16), 1);  // alone
  EXPECT_EQ(splits(16, 1024, 1), 2);
  EXPECT_EQ(splits(24, 8192, 1), 1);
  EXPECT_EQ(splits(8, 2048, 1), splits(8, 2048, 16));
  EXPECT_EQ(splits(2, 8192, 1), splits(2, 8192, 16));
  EXPECT_EQ(splits(1, 8192, 1), 32);  // no cluster of blocks that are alone with many tiles
  EXPECT_EQ(splits(1, 8192, 16), 16);
}

// The same of lengths that only the GPU knows.
cuda::Plan uneven_decode(int64_t batch, int64_t keys = 8192, int64_t heads = 32,
                         int64_t heads_kv = 8, bool pages = false) {
  return decode(batch, keys, heads, heads_kv, &kSomeLengths, pages);
}
EqualParts parts_of_decode(int64_t batch) { return uneven_decode(batch).parts; }

// By the last block where tiles are nearly as many as multiprocessors, or more, but a pair of
// blocks merges four rows of a few tiles faster.
TEST(PlannerCudaSplits, ManyTilesAreMergedByTheLastBlock) {
  EXPECT_FALSE(uneven_decode(12).merges_parts);
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
TEST(PlannerCudaSplits, MergedPartsFitTheirRecord) {
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
TEST(PlannerCudaSplits, ManyShortSequencesNeedNotBeAlike) {
  EXPECT_EQ(parts_of_decode(16).fourths, EqualParts::kFourths);
  EXPECT_EQ(parts_of_decode(64).fourths, 64 * 8 * 23 / (5 * gpu_with(90).gpu.multiprocessors));
  EXPECT_GT(parts_of_decode(128).fourths, 7 * 4);
}

// Long sequences come first where not all run at once, or nearly so where they may be long, and no
// more of them than a warp looks at.
TEST(PlannerCudaSplits, LongSequencesOfManyComeFirst) {
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
TEST(PlannerCudaSplits, WhatIsLongerThanItsShareIsCut) {
  EqualParts parts = parts_of_decode(128);
  const EqualParts::Batch batch = {128, 128 * 400, 1000};  // alike: short enough
  EXPECT_EQ(parts.first_part(batch), 832);                 // of 66 at once, in tiles of 64
  EXPECT_EQ(parts.first_part({128, 128 * 1000, 1024}), 1024);
  parts.at_once = 0;
  EXPECT_EQ(parts.first_part(batch), 1024);
}

// The launch after this one comes early where its blocks find their places evenly.
TEST(PlannerCudaSplits, TheNextLaunchComesWhereThereIsRoom) {
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
  EXPECT_EQ(planned(4, 16384, 16, 1, false).next_of_merge, NextStart::after_first_keys);
  const cuda::Plan alone = planned(8, 16384, 32, 8, true);
  EXPECT_TRUE(alone.alone && leaves_results(alone));
  EXPECT_EQ(alone.next_of_merge, NextStart::at_end);
  EXPECT_EQ(planned(8, 8192, 32, 8, true).next_of_merge, NextStart::after_first_keys);
  EXPECT_EQ(planned(8, 8192, 64, 8, true).next_of_merge, NextStart::at_end);  // of many rows
  // Prompts.
  const Device device = gpu_with(90);
  EXPECT_EQ(forward(problem(TILEWISE_BFLOAT16), device).next, NextStart::at_end);
  const cuda::Plan shared = forward(problem(TILEWISE_BFLOAT16, 1, 2048, 2048, 4), device);
  EXPECT_TRUE(shared.shares.any());
  EXPECT_EQ(shared.next, NextStart::after_first_keys);
}

}  // namespace
}  // namespace tilewise::dispatch
