// The order, the cleared rows and the tables that the prepare kernel writes, for random metadata.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "call.h"
#include "cuda/common/kernels.h"

namespace {

namespace common = tilewise::cuda::common;
using cuda_test::Call;
using tilewise::cuda::TileOrder;

void run(common::PrepareParams& params) {
  const int64_t blocks = common::set_grid(params);
  tilewise::cuda::launch(common::prepare_kernel(), blocks, nullptr, params);
}

// Whether a is less than b by more than the width of a bucket of the sort. Different counts in the
// same bucket may come in any order.
bool clearly_less(int64_t a, int64_t b) { return a < b && (b < 32 || 8 * (b - a) > b); }

void check_order(const std::vector<TileOrder::Entry>& table, const std::vector<int64_t>& tiles) {
  std::vector<int> seen(tiles.size(), 0);
  int64_t before = 0;
  for (size_t i = 0; i + 1 < table.size(); ++i) {
    const auto sequence = static_cast<size_t>(table[i].sequence);
    ASSERT_LT(sequence, tiles.size());
    ++seen[sequence];
    ASSERT_EQ(table[i].first, before);
    before += tiles[sequence];
    if (i == 0) continue;
    const auto previous = static_cast<size_t>(table[i - 1].sequence);
    ASSERT_FALSE(clearly_less(tiles[previous], tiles[sequence])) << "entry " << i;
    if (tiles[previous] == tiles[sequence]) {
      ASSERT_LT(previous, sequence) << "not stable";
    }
  }
  ASSERT_EQ(table.back().first, before);
  for (int count : seen) ASSERT_EQ(count, 1);
}

TEST(CommonPrepare, OrdersSequencesLongestFirst) {
  for (const int64_t batch : {0, 1, 2, 31, 32, 33, 500, 513, 3000}) {
    cuda_test::Random random{std::mt19937(static_cast<uint32_t>(batch))};
    std::vector<int32_t> cu = {0};
    const int64_t longest = random.pick<int64_t>({40, 3000, 100000});
    for (int64_t b = 0; b < batch; ++b)
      cu.push_back(cu.back() +
                   static_cast<int32_t>(random.rarely() ? 0 : random.between(0, longest)));
    common::PrepareParams params;
    params.problem.batch = batch;
    params.problem.cu_seqlens_q = cu.data();
    params.problem.cu_seqlens_k = cu.data();
    params.problem.seqlen_q = params.problem.seqlen_k = cu.back();
    for (const auto counts : {common::OrderTask::Counts::rows, common::OrderTask::Counts::keys}) {
      std::vector<TileOrder::Entry> table(static_cast<size_t>(batch) + 1, {-7, -7});
      params.order = {table.data(), counts, 64, counts == common::OrderTask::Counts::rows ? 3 : 1};
      run(params);
      std::vector<int64_t> tiles;
      for (int64_t b = 0; b < batch; ++b) {
        const int64_t length = cu[static_cast<size_t>(b) + 1] - cu[static_cast<size_t>(b)];
        tiles.push_back(tilewise::ceil_div(length * params.order.group, 64));
      }
      check_order(table, tiles);
    }
  }
}

TEST(CommonPrepare, OrderCountsKeysInUse) {
  for (uint32_t seed = 0; seed < 60; ++seed) {
    Call<float> call(seed);
    if (call.p.batch == 0) continue;
    common::PrepareParams params;
    params.problem = call.p;
    for (const auto counts : {common::OrderTask::Counts::rows, common::OrderTask::Counts::keys}) {
      std::vector<TileOrder::Entry> table(static_cast<size_t>(call.p.batch) + 1);
      const bool keys = counts == common::OrderTask::Counts::keys;
      params.order = {table.data(), counts, 8, keys ? 1 : 2};
      run(params);
      std::vector<int64_t> tiles;
      for (int64_t b = 0; b < call.p.batch; ++b) {
        const tilewise::Band band = tilewise::sequence_of(call.p, b).band;
        tiles.push_back(tilewise::ceil_div(keys ? band.keys : 2 * band.rows, 8));
      }
      check_order(table, tiles);
    }
  }
}

// The blocks of a grid that uses the table visit every tile of every head exactly once.
TEST(CommonPrepare, TableMatchesTileOrder) {
  const std::vector<int32_t> cu = {0, 5, 5, 300, 310, 500};
  constexpr int kTile = 32, kHeads = 3;
  std::vector<TileOrder::Entry> table(cu.size());
  common::PrepareParams params;
  params.problem.batch = static_cast<int64_t>(cu.size()) - 1;
  params.problem.cu_seqlens_q = cu.data();
  params.problem.seqlen_q = cu.back();
  params.order = {table.data(), common::OrderTask::Counts::rows, kTile, 1};
  run(params);
  TileOrder order;
  order.heads = kHeads;
  order.sequences = static_cast<int32_t>(params.problem.batch);
  order.table = table.data();
  std::vector<int> seen(cu.size() * kHeads * 16, 0);
  for (int64_t block = 0; block < 400; ++block) {
    const TileOrder::WorkTile w = order.at(block);
    if (w.sequence < 0) continue;
    ++seen[static_cast<size_t>((w.sequence * kHeads + w.head) * 16 + w.tile)];
  }
  for (size_t b = 0; b + 1 < cu.size(); ++b)
    for (size_t i = 0; i < kHeads * 16; ++i)
      ASSERT_EQ(seen[b * kHeads * 16 + i],
                static_cast<int64_t>(i % 16) * kTile < cu[b + 1] - cu[b] ? 1 : 0);
}

// Rows in use of a tensor, by (batch index, row); the kernel should clear the others.
using Used = std::vector<std::vector<char>>;

Used used_rows(const tilewise::Problem& p) {
  const bool varlen = p.cu_seqlens_q != nullptr;
  Used used(static_cast<size_t>(varlen ? 1 : p.batch),
            std::vector<char>(static_cast<size_t>(p.seqlen_q), 0));
  for (int64_t b = 0; b < p.batch; ++b) {
    const tilewise::Sequence s = tilewise::sequence_of(p, b);
    for (int64_t i = 0; i < s.band.rows; ++i)
      used[static_cast<size_t>(s.batch_index)][static_cast<size_t>(s.first_row + i)] = 1;
  }
  return used;
}

Used used_keys(const tilewise::Problem& p) {
  const bool per_sequence = p.block_table != nullptr || p.kv_batch_idx != nullptr;
  const bool varlen = !per_sequence && p.cu_seqlens_k != nullptr;
  Used used(static_cast<size_t>(varlen         ? 1
                                : per_sequence ? p.batch
                                               : p.kv_batch),
            std::vector<char>(static_cast<size_t>(tilewise::key_capacity(p)), 0));
  for (int64_t b = 0; b < p.batch; ++b) {
    const tilewise::Sequence s = tilewise::sequence_of(p, b);
    const tilewise::KvSource kv = per_sequence ? s.kv.dense(b) : s.kv;
    for (int64_t j = 0; j < s.band.keys; ++j)
      used[static_cast<size_t>(kv.batch_index)][static_cast<size_t>(kv.first + j)] = 1;
  }
  return used;
}

// Sets to 0 every element of `expected` that is in no row in use.
template <class T>
void clear(std::vector<T>& expected, const tilewise_tensor& view, const Used& used, int64_t heads,
           int64_t columns) {
  for (size_t batch_index = 0; batch_index < used.size(); ++batch_index)
    for (size_t row = 0; row < used[batch_index].size(); ++row)
      for (int64_t h = 0; h < heads && used[batch_index][row] == 0; ++h)
        for (int64_t c = 0; c < columns; ++c)
          expected[static_cast<size_t>(static_cast<int64_t>(batch_index) * view.stride_batch +
                                       static_cast<int64_t>(row) * view.stride_row +
                                       h * view.stride_head + c)] = T{};
}

template <class T>
bool same(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

template <class T>
class CommonClear : public testing::Test {};
using Types = testing::Types<float, tilewise::Half, tilewise::BFloat16>;
TYPED_TEST_SUITE(CommonClear, Types);

TYPED_TEST(CommonClear, ForwardAndJvpClearRowsNotInUse) {
  for (uint32_t seed = 0; seed < 150; ++seed) {
    const bool is_jvp = seed % 2 == 1;
    Call<TypeParam> call(seed);
    const tilewise::Problem& p = call.p;
    const Used used = used_rows(p);
    std::vector<TypeParam> out = call.out;
    clear(out, p.out, used, p.heads_q, p.head_dim_v);
    std::vector<float> lse = call.lse;
    for (size_t batch_index = 0; batch_index < used.size(); ++batch_index)
      for (size_t row = 0; row < used[batch_index].size(); ++row)
        for (int64_t h = 0; h < p.heads_q && used[batch_index][row] == 0; ++h)
          lse[batch_index * static_cast<size_t>(p.lse_stride_batch) + row +
              static_cast<size_t>(h * p.lse_stride_head)] =
              is_jvp ? 0.0f : tilewise::kMinusInfinity;
    tilewise::Tangents t{};
    t.out = p.out;
    t.lse = p.lse;
    t.lse_stride_batch = p.lse_stride_batch;
    t.lse_stride_head = p.lse_stride_head;
    common::PrepareParams params = is_jvp ? common::prepare_jvp(p, t) : common::prepare_forward(p);
    run(params);
    ASSERT_TRUE(same(out, call.out)) << "seed " << seed;
    ASSERT_TRUE(same(lse, call.lse)) << "seed " << seed;
  }
}

TYPED_TEST(CommonClear, BackwardClearsRowsAndKeysNotInUse) {
  for (uint32_t seed = 0; seed < 150; ++seed) {
    Call<TypeParam> call(seed);
    const tilewise::Problem& p = call.p;
    std::vector<TypeParam> dq = call.dq, dk = call.dk, dv = call.dv;
    if (seed % 5 == 0) call.g.dv.data = nullptr;
    clear(dq, call.g.dq, used_rows(p), p.heads_q, p.head_dim);
    clear(dk, call.g.dk, used_keys(p), p.heads_kv, p.head_dim);
    if (call.g.dv.data != nullptr) clear(dv, call.g.dv, used_keys(p), p.heads_kv, p.head_dim_v);
    common::PrepareParams params = common::prepare_backward(p, call.g);
    run(params);
    ASSERT_TRUE(same(dq, call.dq)) << "seed " << seed;
    ASSERT_TRUE(same(dk, call.dk)) << "seed " << seed;
    ASSERT_TRUE(same(dv, call.dv)) << "seed " << seed;
  }
}

TEST(CommonPrepare, FillsWords) {
  constexpr uint32_t kBefore = 0x5a5a5a5au;
  for (const uint32_t word : {0u, 0xff800000u}) {
    for (const size_t count : {1, 3, 4, 5, 1024, 25003}) {
      for (const size_t first : {0, 1, 4}) {  // words after the start of a 16-byte unit
        std::vector<std::max_align_t> memory(count / 4 + 4);
        auto* const words = reinterpret_cast<uint32_t*>(memory.data());
        const size_t size = memory.size() * sizeof(memory[0]) / sizeof(word);
        std::fill_n(words, size, kBefore);
        common::PrepareParams params;
        params.fills[1] = {words + first, static_cast<int64_t>(count * sizeof(word)), word};
        run(params);
        for (size_t i = 0; i < size; ++i)
          ASSERT_EQ(words[i], i >= first && i < first + count ? word : kBefore) << i << count;
      }
    }
  }
}

TEST(CommonPrepare, LaunchesNothingWithoutWork) {
  common::PrepareParams params;
  params.problem.batch = 3;
  params.problem.kv_batch = 3;
  params.problem.seqlen_q = params.problem.seqlen_k = 100;
  common::PrepareParams forward = common::prepare_forward(params.problem);
  common::PrepareParams backward = common::prepare_backward(params.problem, {});
  EXPECT_EQ(common::set_grid(forward), 0);
  EXPECT_EQ(common::set_grid(backward), 0);
}

}  // namespace
