// Recomputes rows contaminated by NaN in keys they do not attend to (docs/decisions/013), and rows
// whose weights have overflowed (forward_softmax.h).
//
// A masked key of an edge tile has weight 0, and in a tensor core 0 times a NaN in its value is
// NaN, so a contaminated row is not finite. When all work tiles are done, a warp recomputes such
// rows of its own in fp32, without the keys that they do not see or that weigh nothing; a row that
// does see the NaN gets it again.
//
// The recompute is bound by the latency of loads, so rows share loads and several are in flight.
// Keys are taken in blocks of 32: a lane first computes the score of one key, and then some columns
// of the sums over all keys.
#pragma once

#include <cfloat>

#include "attention/mask.h"
#include "cuda/common/block.h"
#include "cuda/wgmma/forward_store.h"

namespace tilewise::cuda::wgmma {

template <class C>
class NanRecompute {
  using Element = typename C::Element;
  using Storage = typename Element::Storage;
  // What loads convert numbers to: those of float8 are exact in fp16.
  using Wide = std::conditional_t<C::kFloat8, F16, Element>;
  using OutStorage = typename C::Out::Storage;
  static constexpr int kLanes = ptx::kWarpSize;
  static constexpr int kPairs = (C::kHeadDimV + 2 * kLanes - 1) / (2 * kLanes);  // of columns
  static constexpr int kRowsAtOnce = C::kGeneral ? 2 : 4;  // as many as registers permit
  static constexpr int kChunksAtOnce = 4;                  // of 8 columns of a key
  static constexpr int kValuesAtOnce = 8;

 public:
  static constexpr int32_t kNone = -1;

  // `warp` is its index among the consumer warps of the CTA.
  TILEWISE_DEVICE NanRecompute(const TmaForwardParams& params, int warp)
      : params_(params),
        p_(params.problem),
        warp_(ptx::uniform(warp)),
        score_mod_(ScoreMod::of(params.problem)) {}

  // The work tiles in which a warp has rows to recompute form a linked list, from the last one back
  // to the first: recompute_list, [tiles, consumer warps], holds the predecessor of each.
  TILEWISE_DEVICE static void add_to_list(const TmaForwardParams& p, int warp, int32_t index,
                                          int32_t& last) {
    if (ptx::lane_index() == 0) p.recompute_list[list_index(index, warp)] = last;
    last = index;
  }

  TILEWISE_DEVICE void run(int32_t last) {
#pragma unroll 1
    for (int32_t index = last; index != kNone;) {
      work_tile_ = QueryTile::of(params_, params_.order.at(index), C::kForward.keys);
      k_ = head_of(p_.k);
      v_ = head_of(p_.v);
      if constexpr (C::kFloat8) factors_.set_factors(p_, work_tile_.sequence.batch, kv_head());
      const int32_t end = min(kRows * warp_ + kRows, work_tile_.rows.count);
#pragma unroll 1
      for (first_ = kRows * warp_; first_ < end; first_ += kRowsAtOnce) {
        last_ = min(first_ + kRowsAtOnce, end) - 1;
        find_contaminated();
        if (contaminated_ != 0) compute();
      }
      index = ptx::uniform(params_.recompute_list[list_index(index, warp_)]);
    }
  }

 private:
  static constexpr int kRows = arch::WgmmaForwardTile::kRowsPerWarp;
  static constexpr int kWarps = C::kForward.rows() / kRows;

  struct Row {
    RowScoreMod score_mod;
    float m;
    float l;  // over the keys of this lane
    float o[kPairs][2];
  };

  TILEWISE_DEVICE static int64_t list_index(int32_t index, int warp) {
    return int64_t{index} * kWarps + warp;
  }

  TILEWISE_DEVICE bool is_partial() const { return C::kGeneral && work_tile_.splits > 1; }
  // Offset of row r. The fast path has no packed heads.
  TILEWISE_DEVICE int64_t offset(const tilewise_tensor& view, int32_t r) const {
    return C::kGeneral ? work_tile_.offset(view, r) : work_tile_.offset_unpacked(view, r);
  }
  TILEWISE_DEVICE const Storage* q(int32_t r) const {
    return static_cast<const Storage*>(p_.q.data) + offset(p_.q, r);
  }
  TILEWISE_DEVICE OutStorage* out(int32_t r) const {
    return static_cast<OutStorage*>(p_.out.data) + offset(p_.out, r);
  }
  TILEWISE_DEVICE bool is_fp16_beside_float8() const {
    return C::kFloat8 && dtypes_of(p_).out == TILEWISE_FLOAT16;
  }
  TILEWISE_DEVICE float load_out(int32_t r, int column) const {
    const OutStorage x = out(r)[column];
    return is_fp16_beside_float8() ? to_float(Half{x.bits}) : to_float(x);
  }
  TILEWISE_DEVICE void store_out(int32_t r, int column, float x) const {
    out(r)[column] =
        is_fp16_beside_float8() ? OutStorage{from_float<Half>(x).bits} : from_float<OutStorage>(x);
  }
  // The same of rows in fp32: partial results, or out if the caller wants that in fp32.
  TILEWISE_DEVICE bool is_fp32() const {
    return is_partial() || (C::kGeneral && widens_out<OutStorage>(p_));
  }
  TILEWISE_DEVICE float* fp32_out(int32_t r) const {
    if (!is_partial()) return static_cast<float*>(p_.out.data) + offset(p_.out, r);
    return params_.partial_out + partial_index(params_, work_tile_, r) * p_.head_dim_v;
  }

  // Key 0 of the key/value head. The fast path has no pages.
  TILEWISE_DEVICE const Storage* head_of(const tilewise_tensor& view) const {
    return static_cast<const Storage*>(view.data) + kv_head() * view.stride_head;
  }
  TILEWISE_DEVICE int32_t kv_head() const {
    return params_.group.quotient(work_tile_.rows.first_head);
  }
  TILEWISE_DEVICE int64_t key_offset(const tilewise_tensor& view, int32_t key) const {
    const KvSource& kv = work_tile_.sequence.kv;
    if constexpr (C::kGeneral) return kv.offset_32(view, key);
    return kv.batch_index * view.stride_batch + (kv.first + key) * view.stride_row;
  }

  // Indices past the last row repeat it.
  TILEWISE_DEVICE int32_t row_at(int i) const { return min(first_ + i, last_); }

  TILEWISE_DEVICE void find_contaminated() {
    contaminated_ = 0;
#pragma unroll 1
    for (int i = 0; i < kRowsAtOnce; ++i) {
      if (is_contaminated(row_at(i))) contaminated_ |= 1u << i;
    }
  }

  TILEWISE_DEVICE bool is_contaminated(int32_t r) const {
    float zero = 0.0f;
#pragma unroll 1
    for (int column = ptx::lane_index(); column < p_.head_dim_v; column += kLanes)
      zero += 0.0f * (is_fp32() ? fp32_out(r)[column] : load_out(r, column));
    return ptx::any(zero != 0.0f);  // NaN
  }

  // A row sees the keys [begin_of(r), end_of(r)).
  TILEWISE_DEVICE int32_t begin_of(int32_t r) const {
    const KeyTiles& tiles = work_tile_.tiles;
    return max(max(0, tiles.lower + row_position(r)), tiles.first * C::kForward.keys);
  }
  TILEWISE_DEVICE int32_t end_of(int32_t r) const {
    const KeyTiles& tiles = work_tile_.tiles;
    return min(min(tiles.keys, tiles.upper + row_position(r)), (tiles.last + 1) * C::kForward.keys);
  }
  TILEWISE_DEVICE int32_t row_position(int32_t r) const {
    return C::kGeneral ? work_tile_.rows.row(r) : r;
  }

  TILEWISE_DEVICE void compute() {
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
      rows_[i] = {};
      rows_[i].m = -FLT_MAX;
      if constexpr (C::kGeneral) rows_[i].score_mod = row_score_mod(p_, work_tile_, row_at(i));
    }
    const int32_t end = ptx::uniform(end_of(last_));
#pragma unroll 1
    for (int32_t key = ptx::uniform(begin_of(first_)); key < end && !all_see_nan(); key += kLanes)
      add_keys(key, end);
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
      if ((contaminated_ >> i & 1u) != 0) store(rows_[i], row_at(i));
    }
  }

  // Whether all contaminated rows see a NaN themselves, so that further keys change nothing.
  TILEWISE_DEVICE bool all_see_nan() const {
    uint32_t nan = 0;
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i)
      nan |= (ptx::any(rows_[i].l != rows_[i].l) ? 1u : 0u) << i;
    return (contaminated_ & ~nan) == 0;
  }

  // Keys of a block that are not below `end` repeat the last one and weigh nothing.
  TILEWISE_DEVICE void add_keys(int32_t key0, int32_t end) {
    const int32_t key = key0 + ptx::lane_index();
    float products[kRowsAtOnce];
    multiply(k_ + key_offset(p_.k, min(key, end - 1)), products);
    float weights[kRowsAtOnce];
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) weights[i] = weigh(rows_[i], row_at(i), key, products[i]);
#pragma unroll 1
    for (int first = 0; first < min(kLanes, end - key0); first += kValuesAtOnce)
      add_values(key0, first, end, weights);
  }

  // q k of the rows and the lane's key.
  TILEWISE_DEVICE void multiply(const Storage* k, float (&products)[kRowsAtOnce]) const {
    float sum[kRowsAtOnce][2] = {};
#pragma unroll 1
    for (int32_t column0 = 0; column0 < p_.head_dim; column0 += 8 * kChunksAtOnce) {
      uint32_t b[kChunksAtOnce][4];
#pragma unroll
      for (int c = 0; c < kChunksAtOnce; ++c)
        load_chunk(b[c], k + min<int64_t>(column0 + 8 * c, p_.head_dim - 8));
#pragma unroll
      for (int c = 0; c < kChunksAtOnce; ++c) {
        if (column0 + 8 * c >= p_.head_dim) break;
#pragma unroll
        for (int i = 0; i < kRowsAtOnce; ++i) {
          uint32_t a[4];
          load_chunk(a, q(row_at(i)) + column0 + 8 * c);
          add_products(sum[i], a, b[c]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) products[i] = sum[i][0] + sum[i][1];
  }

  // 8 columns, as pairs of 16-bit numbers.
  TILEWISE_DEVICE static void load_chunk(uint32_t (&pairs)[4], const Storage* from) {
    if constexpr (C::kFloat8) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t x = ptx::ld_global_b32(from + 4 * i);
        pairs[2 * i] = ptx::cvt_f16x2_e4m3x2<false>(x);
        pairs[2 * i + 1] = ptx::cvt_f16x2_e4m3x2<true>(x);
      }
    } else {
      ptx::ld_global_v4_b32(pairs, from);
    }
  }
  // Two columns.
  TILEWISE_DEVICE static uint32_t load_pair(const Storage* from) {
    if constexpr (C::kFloat8)
      return ptx::cvt_f16x2_e4m3x2<false>(*reinterpret_cast<const uint16_t*>(from));
    else
      return ptx::ld_global_b32(from);
  }

  TILEWISE_DEVICE static void add_products(float (&sum)[2], const uint32_t (&a)[4],
                                           const uint32_t (&b)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sum[0] = ptx::fma(tile::low_of<Wide>(a[i]), tile::low_of<Wide>(b[i]), sum[0]);
      sum[1] = ptx::fma(tile::high_of<Wide>(a[i]), tile::high_of<Wide>(b[i]), sum[1]);
    }
  }

  // Continues the online softmax of a row by one key per lane, and returns the weight of this
  // lane's key. The maximum is subtracted before the scale is applied, because scores may be as
  // large as fp32 permits.
  TILEWISE_DEVICE float weigh(Row& row, int32_t r, int32_t key, float product) const {
    float x = kMinusInfinity;
    if (begin_of(r) <= key && key < end_of(r) && is_shown(r, key)) x = score(product, row, key);
    const float highest = ptx::fmax(row.m, common::max_of_warp(x));
    const float shrink = ptx::ex2((row.m - highest) * kLog2e);
    const float weight = ptx::ex2((x - highest) * kLog2e);
    row.m = highest;
    row.l = row.l * shrink + weight;
#pragma unroll
    for (float (&pair)[2] : row.o) {
      pair[0] *= shrink;
      pair[1] *= shrink;
    }
    if (!C::kGeneral || !score_mod_.dropout.on()) return weight;
    const float keep = score_mod_.keep(row.score_mod, key).at(key);
    return keep == 0.0f ? 0.0f : weight * keep;
  }

  TILEWISE_DEVICE bool is_shown(int32_t r, int32_t key) const {
    if constexpr (C::kMasked)
      return mask_shows(params_.mask, work_tile_.sequence.batch, work_tile_.head(r),
                        work_tile_.rows.first + r, key);
    return true;
  }
  TILEWISE_COLD static bool mask_shows(const tilewise_mask& mask, int64_t batch, int64_t head,
                                       int64_t row, int64_t key) {
    return Mask::of(&mask, batch).shows(head, row, key);
  }

  TILEWISE_DEVICE float score(float product, const Row& row, int32_t key) const {
    if constexpr (C::kGeneral) return score_mod_.at(product, row.score_mod, key).value;
    if constexpr (C::kFloat8) return ptx::mul(product, factors_.scale);
    return ptx::mul(product, score_mod_.score.scale);
  }

  // o += p v for kValuesAtOnce keys from key0 + first on.
  TILEWISE_DEVICE void add_values(int32_t key0, int first, int32_t end,
                                  const float (&weights)[kRowsAtOnce]) {
    uint32_t v[kValuesAtOnce][kPairs];
#pragma unroll
    for (int i = 0; i < kValuesAtOnce; ++i) {
      const Storage* from = v_ + key_offset(p_.v, min(key0 + first + i, end - 1));
#pragma unroll
      for (int j = 0; j < kPairs; ++j)
        v[i][j] = load_pair(from + min<int64_t>(column_of(j), p_.head_dim_v - 2));
    }
#pragma unroll
    for (int i = 0; i < kValuesAtOnce; ++i) {
#pragma unroll
      for (int row = 0; row < kRowsAtOnce; ++row) {
        const float p = ptx::shuffle(weights[row], first + i);
        if (p != 0.0f) add_value(rows_[row].o, p, v[i]);
      }
    }
  }

  TILEWISE_DEVICE static void add_value(float (&o)[kPairs][2], float p,
                                        const uint32_t (&v)[kPairs]) {
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      o[j][0] = ptx::fma(p, tile::low_of<Wide>(v[j]), o[j][0]);
      o[j][1] = ptx::fma(p, tile::high_of<Wide>(v[j]), o[j][1]);
    }
  }

  TILEWISE_DEVICE static int column_of(int pair) { return 2 * (ptx::lane_index() + kLanes * pair); }

  TILEWISE_DEVICE void store(const Row& row, int32_t r) const {
    RowNormaliser all{0.0f, common::sum_of_warp(row.l), row.m};
    if (all.l == 0.0f) all = {kNoKey, 0.0f};
    float factor = 1.0f;
    if (p_.sinks != nullptr && work_tile_.splits == 1)
      factor = all.add_sink(p_.sinks[work_tile_.head(r)]);
    store_lse_of(r, all);
    factor = all.l == 0.0f ? 0.0f : factor * ptx::rcp_approximate(all.l);
    if constexpr (C::kFloat8) factor *= factors_.values;
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const int column = column_of(j);
      if (column >= p_.head_dim_v) break;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (is_fp32())
          fp32_out(r)[column + e] = row.o[j][e] * factor;
        else
          store_out(r, column + e, row.o[j][e] * factor);
      }
    }
  }

  // lse is stored as well, because an overflow also affects the sum.
  TILEWISE_DEVICE void store_lse_of(int32_t r, const RowNormaliser& row) const {
    if (ptx::lane_index() != 0) return;
    LogSum sum;
    if (row.l != 0.0f) sum = LogSum::of(row.origin, ptx::log_accurate(row.l));
    if (is_partial()) {
      params_.partial_lse[partial_index(params_, work_tile_, r)] = sum.lse;
    } else {
      store_log_sum(p_, lse_index(p_, work_tile_, r), sum);
    }
  }

  const TmaForwardParams& params_;
  const Problem& p_;
  const int warp_;
  const ScoreMod score_mod_;
  QueryTile work_tile_;
  WorkTileFactors<C::kFloat8> factors_;
  const Storage* k_;  // key 0 of the head
  const Storage* v_;
  int32_t first_;  // of the rows computed at once
  int32_t last_;
  uint32_t contaminated_;  // one bit per row
  Row rows_[kRowsAtOnce];
};

}  // namespace tilewise::cuda::wgmma
