// How the CUDA planner divides keys: splits, clusters that combine them, chunks and the Stream-K
// tail.
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
  const int64_t recompute_list = plan.blocks * plan.tile_q / 16 * 4;  // 4 bytes per warp
  EXPECT_GE(plan.workspace_bytes, partial + recompute_list);
  EXPECT_LE(plan.workspace_bytes, partial + recompute_list + 256);
}

// A partial last wave becomes a Stream-K tail if that saves more than it costs.
TEST(PlannerCudaSplits, StreamKSharesAPartialLastWave) {
  const auto planned = [](int64_t rows, int64_t heads, int32_t right = -1, int32_t sm = 90) {
    Problem p = problem(TILEWISE_BFLOAT16, 1, rows, rows, heads);
    p.window_right = right;
    return forward(p, gpu_with(sm));
  };
  const int64_t sms = gpu_with(90).gpu.sm_count;
  for (const auto& [rows, heads] :
       {std::pair<int64_t, int64_t>{2048, 4}, {2048, 12}, {16384, 16}, {8192, 1}}) {
    const cuda::Plan plan = planned(rows, heads);
    EXPECT_EQ(plan.splits, 1);
    EXPECT_EQ(plan.stream_k.tiles, plan.blocks % sms) << rows << " rows, " << heads << " heads";
    EXPECT_EQ(plan.stream_k.first, plan.blocks - plan.stream_k.tiles);
    EXPECT_GT(plan.workspace_bytes, int64_t{plan.stream_k.tiles} * plan.tile_q * 128 * 4);
    for (int32_t tile = 0; tile < plan.stream_k.tiles; ++tile)
      EXPECT_LE(plan.stream_k.shares_of(tile), cuda::StreamKTail::kMaxShares);
  }
  EXPECT_FALSE(planned(2048, 4, 0).stream_k.any());       // causal tiles differ in length
  EXPECT_FALSE(planned(2048, 4, -1, 80).stream_k.any());  // another kernel family
  EXPECT_FALSE(planned(512, 33).stream_k.any());          // whole waves
  EXPECT_FALSE(planned(512, 8).stream_k.any());           // saves less than it costs
}

// Few splits of a decode are combined in a cluster, with no second launch and no workspace.
TEST(PlannerCudaSplits, ClustersCombineFewSplitsThatRunAtOnce) {
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
    EXPECT_EQ(plan.cluster_size, plan.splits);
    EXPECT_EQ(plan.workspace_bytes, 0);
  }
  for (const cuda::Plan& plan :
       {planned(1, 16384), planned(1, 1024, 17), planned(64, 1024, 8), planned(1, 1024, 0, 80)}) {
    EXPECT_GT(plan.splits, 1);
    EXPECT_EQ(plan.cluster_size, 1);
    EXPECT_GT(plan.workspace_bytes, 0);
  }
  EXPECT_EQ(planned(64, 4096).cluster_size, 1);          // one split
  EXPECT_EQ(planned(8, 16384, 4).cluster_size, 1);       // many keys per CTA
  EXPECT_EQ(planned(1, 1024, 16, 110).cluster_size, 1);  // clusters of 16 are for sm_90 and sm_100
  EXPECT_EQ(planned(1, 1024, 8, 110).cluster_size, 8);
  Problem p = problem(TILEWISE_BFLOAT16, 1, 1, 1024, 8);
  const auto text = [&] {
    const Decision decision = plan(p, gpu_with(90));
    return explain(decision, p, gpu_with(90));
  };
  EXPECT_NE(text().find("16 key splits combined in a cluster"), std::string::npos) << text();
  p.softcap = 30.0f;
  EXPECT_EQ(text().find("cluster"), std::string::npos) << text();
  p = paged(TILEWISE_BFLOAT16, 1);
  p.block_table_width = p.block_table_stride = 1024;
  p.num_splits = 8;
  const cuda::Plan pages = forward(p, gpu_with(90));
  EXPECT_EQ(pages.form, Form::paged);
  EXPECT_EQ(pages.cluster_size, 8);
}

// Splits give each SM one CTA if clusters have more than 8 CTAs or if a sequence has two splits
// with many keys each, and two CTAs if clusters are smaller or a combine kernel is used. If there
// are tiles for more than half of the SMs, sequences of at least four key tiles are not split.
TEST(PlannerCudaSplits, DecodeSplitsGiveOneOrTwoCtasPerSm) {
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
  EXPECT_EQ(splits(24, 1024, 32, 8), 1);  // more CTAs than SMs
  EXPECT_EQ(splits(32, 8192, 32, 8), 1);
  EXPECT_EQ(splits(64, 4096, 32, 8), 1);
  EXPECT_EQ(splits(1, 4096, 16, 1), 16);
  EXPECT_EQ(splits(1, 16384, 16, 1), 128);
}

// With device lengths the keys of the batch are cut into equal chunks.
TEST(PlannerCudaSplits, DeviceLengthsAreCutIntoEqualChunks) {
  const Device device = gpu_with(90);
  const int64_t sms = device.gpu.sm_count;
  Problem p = problem(TILEWISE_BFLOAT16, 4, 1, 65536, 8);
  const int32_t lengths = 0;
  p.seqused_k = &lengths;
  const cuda::Plan chunked = forward(p, device);
  // Chunks for two waves of CTAs; without chunks the tiles would need one.
  EXPECT_EQ(chunked.chunks.max_chunks, (2 * sms - 1) / 8);
  EXPECT_EQ(chunked.chunks.chunks_if_uniform, 4);
  EXPECT_EQ(chunked.blocks, chunked.chunks.max_chunks * 8);
  EXPECT_EQ(chunked.splits, 1);
  const int64_t partial = chunked.blocks * 129 * 4;
  EXPECT_GE(chunked.workspace_bytes, partial);
  EXPECT_LE(chunked.workspace_bytes, partial + 256);
  const Decision decision = plan(p, device);
  const std::string text = explain(decision, p, device);
  EXPECT_NE(text.find("keys of the batch in 32 chunks"), std::string::npos) << text;
  p.softcap = 30.0f;
  EXPECT_TRUE(forward(p, device).chunks.any());
  EXPECT_TRUE(forward(p, gpu_with(80)).chunks.any());
  p.seqlen_k = 128;  // at most one chunk per key tile
  EXPECT_EQ(forward(p, device).chunks.max_chunks, 4 * 2);
  p.seqlen_k = 4096;
  EXPECT_EQ(forward(p, device).chunks.max_chunks,
            2 * sms / 8 + 4);  // two CTAs per SM, plus one chunk per sequence
  EXPECT_FALSE(forward(p, device).last_cta_combines);
  for (const int64_t batch : {32, 64, 1000}) {  // tiles fill the GPU; few chunks are spare
    p.batch = batch;
    p.softcap = 0.0f;
    const cuda::Plan full = forward(p, device);
    EXPECT_TRUE(full.last_cta_combines);
    EXPECT_EQ(full.chunks.chunks_if_uniform, 1);
    EXPECT_GT(full.blocks, batch * 8 + (batch < 1000 ? sms : 0) - 8);
    EXPECT_LT(full.blocks, batch * 8 + 3 * sms);
    EXPECT_GE(full.workspace_bytes, full.blocks * 132 * 4);
    EXPECT_FALSE(forward(p, gpu_with(80)).last_cta_combines);
    p.softcap = 30.0f;
    EXPECT_FALSE(forward(p, device).last_cta_combines);
  }
}

// If the kernel cannot count chunks or the counts could overflow, a rule splits each sequence by
// the number of its own keys.
TEST(PlannerCudaSplits, DeviceLengthsAreSplitByARule) {
  const Device device = gpu_with(90);
  const int32_t lengths = 0;
  Problem p = problem(TILEWISE_FLOAT32, 4, 1, 65536, 8);
  p.seqused_k = &lengths;
  const cuda::Plan by_rule = forward(p, device);
  EXPECT_FALSE(by_rule.chunks.any());
  EXPECT_EQ(by_rule.split_rule.splits(1, 65536), 2 * device.gpu.sm_count / (4 * 8));
  EXPECT_EQ(by_rule.split_rule.splits(1, 100), 1);
  EXPECT_EQ(by_rule.split_rule.splits(1, 65536), by_rule.splits);
  p = problem(TILEWISE_BFLOAT16, 64, 1, int64_t{1} << 37, 8);  // a block table may be that large
  p.seqused_k = &lengths;
  EXPECT_FALSE(forward(p, device).chunks.any());
  p.seqlen_k = 4096;
  EXPECT_TRUE(forward(p, device).chunks.any());
  p.batch_invariant = 1;
  EXPECT_FALSE(forward(p, device).chunks.any());
  p.batch_invariant = 0;
  p.num_splits = 4;
  EXPECT_FALSE(forward(p, device).chunks.any());
  p.num_splits = 0;
  p.window_left = 100;
  EXPECT_FALSE(forward(p, device).chunks.any());
}

// Full caches have as many chunks with device lengths as splits without, or twice as many if each
// CTA has a moderate number of keys and there are enough CTAs.
TEST(PlannerCudaSplits, FullCachesAreCutAsWithoutDeviceLengths) {
  const Device device = gpu_with(90);
  for (const int64_t batch : {2, 3, 5, 8, 16, 64}) {
    for (const int32_t keys : {8192, 32768}) {
      Problem p = problem(TILEWISE_BFLOAT16, batch, 1, keys, 32);
      p.heads_kv = 8;
      const int64_t splits = forward(p, device).splits;
      const int32_t lengths = 0;
      p.seqused_k = &lengths;
      const ChunkSchedule schedule = forward(p, device).chunks;
      EXPECT_GE(schedule.chunks_if_uniform, splits) << batch << " x " << keys;
      constexpr int64_t kKeysForOneCta =
          128 * 64;  // from this many keys per CTA on, an SM gets one CTA
      EXPECT_LE(schedule.chunks_if_uniform,
                keys < splits * kKeysForOneCta && batch < 16 ? 2 * splits + 1 : splits);
      EXPECT_GE(schedule.max_chunks, batch * splits);
    }
  }
}

}  // namespace
}  // namespace tilewise::dispatch
