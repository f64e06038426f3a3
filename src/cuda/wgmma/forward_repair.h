// Rows that a stranger's NaN has spoilt are computed again (decision 008).
//
// A masked key of an edge tile has weight 0, and in a tensor core 0 times its NaN is NaN. That
// shows: what has been spoilt is not finite. When all works are done a warp computes such rows of
// its own once more, in fp32, without the keys that they do not see or that weigh nothing; a row
// that does see the NaN gets it again. In blocks of 32 keys: a lane has the score of one of them,
// and then columns of the sum over all.
#pragma once

#include <cfloat>

#include "cuda/ptx/global.h"
#include "cuda/wgmma/forward_store.h"

namespace tilewise::cuda::wgmma {

template <class C>
class RowRepair {
  using Element = typename C::Element;
  using Storage = typename Element::Storage;
  static constexpr int kLanes = ptx::kWarpSize;
  static constexpr int kPairs = (C::kHeadDimV + 2 * kLanes - 1) / (2 * kLanes);  // of columns

 public:
  static constexpr int32_t kNone = -1;

  // Of warp `warp` of the block.
  TILEWISE_DEVICE RowRepair(const TmaForwardParams& params, int warp)
      : params_(params), p_(params.problem), warp_(warp), all_(ScoreTerms::of(params.problem)) {}

  // The works of the warp with such rows are a list from the last one back to the first: `before`,
  // [works, math warps], holds what was the last one.
  TILEWISE_DEVICE static void note(const TmaForwardParams& p, int warp, int32_t work,
                                   int32_t& last) {
    if (ptx::lane_index() == 0) p.before[link(work, warp)] = last;
    last = work;
  }

  TILEWISE_DEVICE void run(int32_t last) {
#pragma unroll 1
    for (int32_t at = last; at != kNone;) {
      work_ = BlockWork::of(params_, params_.order.at(at), C::kForward.keys);
      const int32_t end = min(kRows * warp_ + kRows, work_.rows.count);
#pragma unroll 1
      for (int32_t r = kRows * warp_; r < end; ++r) {
        if (is_spoilt(r)) compute(r);
      }
      at = uniform(params_.before[link(at, warp_)]);
    }
  }

 private:
  static constexpr int kRows = arch::WgmmaForwardTile::kRowsOfWarp;
  static constexpr int kWarps = C::kForward.rows() / kRows;

  TILEWISE_DEVICE static int64_t link(int32_t work, int warp) {
    return int64_t{work} * kWarps + warp;
  }

  TILEWISE_DEVICE bool is_part() const { return C::kGeneral && work_.splits > 1; }
  TILEWISE_DEVICE Storage* out(int32_t r) const {
    return static_cast<Storage*>(p_.out.data) + work_.offset(p_.out, r);
  }
  TILEWISE_DEVICE float* partial_out(int32_t r) const {
    return params_.partial_out + partial_index(params_, work_, r) * p_.head_dim_v;
  }

  TILEWISE_DEVICE bool is_spoilt(int32_t r) const {
    float zero = 0.0f;
#pragma unroll 1
    for (int column = ptx::lane_index(); column < p_.head_dim_v; column += kLanes)
      zero += 0.0f * (is_part() ? partial_out(r)[column] : to_float(out(r)[column]));
    return ptx::any(zero != 0.0f);  // NaN
  }

  TILEWISE_DEVICE void compute(int32_t r) {
    const KeyTiles& tiles = work_.tiles;
    const int32_t row = work_.rows.row(r);
    row_ = row_terms(p_, work_, r);
    q_ = static_cast<const Storage*>(p_.q.data) + work_.offset(p_.q, r);
    const int32_t kv_head = params_.group.quotient(work_.head(r));
    k_ = static_cast<const Storage*>(p_.k.data) + kv_head * p_.k.stride_head;
    v_ = static_cast<const Storage*>(p_.v.data) + kv_head * p_.v.stride_head;
    const int32_t begin = max(max(0, tiles.lower + row), tiles.first * C::kForward.keys);
    const int32_t end =
        min(min(tiles.keys, tiles.upper + row), (tiles.last + 1) * C::kForward.keys);
    m_ = -FLT_MAX;
    l_ = 0.0f;
#pragma unroll
    for (float (&pair)[2] : o_) pair[0] = pair[1] = 0.0f;
#pragma unroll 1
    for (int32_t key = begin; key < end; key += kLanes) add_keys(key, min(kLanes, end - key));
    store(r);
  }

  // The offset of a key, head and column 0.
  TILEWISE_DEVICE int64_t key_offset(const tilewise_tensor& view, int32_t key) const {
    const KvSource& kv = work_.sequence.kv;
    if constexpr (C::kGeneral) return kv.offset_32(view, key);
    return kv.slot * view.stride_batch + (kv.first + key) * view.stride_row;
  }

  // The online softmax over `count` keys from `key0` on.
  TILEWISE_DEVICE void add_keys(int32_t key0, int32_t count) {
    const int lane = ptx::lane_index();
    const float x = lane < count ? score(key0 + lane) * kLog2e : kMinusInfinity;
    float highest = ptx::fmax(m_, x);
#pragma unroll
    for (int lanes = 1; lanes < kLanes; lanes *= 2)
      highest = ptx::fmax(highest, ptx::shuffle_xor(highest, lanes));
    const float shrink = ptx::ex2(m_ - highest);
    m_ = highest;
    float weight = ptx::ex2(x - m_);
    l_ = l_ * shrink + weight;
    if (all_.dropout.on()) {
      const float keep = all_.keep(row_, key0 + lane).at((key0 + lane) % Dropout::kKeysPerBlock);
      weight = keep == 0.0f ? 0.0f : weight * keep;
    }
#pragma unroll
    for (float (&pair)[2] : o_) {
      pair[0] *= shrink;
      pair[1] *= shrink;
    }
#pragma unroll 1
    for (int32_t i = 0; i < count; ++i) {
      const float p = ptx::shuffle(weight, i);
      if (p != 0.0f) add_value(key0 + i, p);
    }
  }

  TILEWISE_DEVICE float score(int32_t key) const {
    const Storage* k = k_ + key_offset(p_.k, key);
    float sum[2] = {0.0f, 0.0f};
#pragma unroll 1
    for (int column = 0; column < p_.head_dim; column += 8) {
      uint32_t a[4];
      uint32_t b[4];
      ptx::ld_global_v4_b32(a, q_ + column);
      ptx::ld_global_v4_b32(b, k + column);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sum[0] = ptx::fma(tile::low_of<Element>(a[i]), tile::low_of<Element>(b[i]), sum[0]);
        sum[1] = ptx::fma(tile::high_of<Element>(a[i]), tile::high_of<Element>(b[i]), sum[1]);
      }
    }
    return all_.at(sum[0] + sum[1], row_, key).value;
  }

  TILEWISE_DEVICE void add_value(int32_t key, float p) {
    const Storage* v = v_ + key_offset(p_.v, key);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int column = column_of(i);
      if (column >= p_.head_dim_v) break;
      const uint32_t pair = ptx::ld_global_b32(v + column);
      o_[i][0] = ptx::fma(p, tile::low_of<Element>(pair), o_[i][0]);
      o_[i][1] = ptx::fma(p, tile::high_of<Element>(pair), o_[i][1]);
    }
  }

  TILEWISE_DEVICE static int column_of(int pair) { return 2 * (ptx::lane_index() + kLanes * pair); }

  TILEWISE_DEVICE void store(int32_t r) {
    float l = l_;
#pragma unroll
    for (int lanes = 1; lanes < kLanes; lanes *= 2) l += ptx::shuffle_xor(l, lanes);
    float factor = 1.0f;
    if (p_.sinks != nullptr && work_.splits == 1) {
      const float sink = p_.sinks[work_.head(r)] * kLog2e;
      const float highest = ptx::fmax(m_, sink);
      factor = ptx::ex2(m_ - highest);
      l = l * factor + ptx::ex2(sink - highest);
    }
    factor = l == 0.0f ? 0.0f : factor * ptx::rcp_approximate(l);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int column = column_of(i);
      if (column >= p_.head_dim_v) break;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (is_part())
          partial_out(r)[column + e] = o_[i][e] * factor;
        else
          out(r)[column + e] = from_float<Storage>(o_[i][e] * factor);
      }
    }
  }

  const TmaForwardParams& params_;
  const Problem& p_;
  const int warp_;
  const ScoreTerms all_;
  BlockWork work_;
  RowTerms row_;
  const Storage* q_;
  const Storage* k_;
  const Storage* v_;
  float m_;
  float l_;  // over the keys of this lane
  float o_[kPairs][2];
};

}  // namespace tilewise::cuda::wgmma
