// The score_mod of the forward's general form (softcap, ALiBi, bias, dropout), overlapped with the
// products: whatever does not depend on the scores is ready when they arrive. For the 64 scores of
// a lane, 130 instructions of a bias and 200 of ALiBi remain between the two products, beside 280
// of the softmax. An option that is on alone has a loop of its own, which gets all registers: on an
// H200 (D128, causal, 4k) softcap went from 58 to 76 % of the fast path's speed. The random bits of
// dropout, 270 instructions, are spread over the whole step. A fifth of them are wide integer
// products, which cost the same wherever they are issued: on an H100 dropout runs at 0.66 of the
// fast path's speed, at 0.83 without the bits, and at 0.56 when two idle warps draw them ahead
// (those share a scheduler with half of the consumer warps).
#pragma once

#include "cuda/common/forward_score_mod.h"
#include "cuda/ptx/cp_async.h"
#include "cuda/tile/copy.h"
#include "cuda/wgmma/forward_shared.h"

namespace tilewise::cuda::wgmma {

// A bias in the dtype of q, k and v. The warp that adds it copies the next tile to shared memory as
// soon as it has read the current one, and reads it in the layout of the accumulators. Loading 16
// bytes per lane and exchanging them took 128 selects and 24 shuffles per step.
template <class C>
class BiasPrefetch {
  using Element = typename C::Element;
  using Storage = typename Element::Storage;
  static constexpr int kRows = arch::WgmmaForwardTile::kRowsPerWarp;
  static constexpr int kKeys = C::kForward.keys;
  static constexpr int kSteps = kKeys / 16;  // one ldmatrix per 16 keys
  static constexpr int kChunk = 8;           // keys in 16 bytes
  // Eight lanes copy the 128 bytes of a line: each lane needs pointers to few rows, and the warp
  // accesses few lines at once.
  using CopyLanes = tile::CopyLanes<ptx::kWarpSize, kRows, kKeys * 2, 8>;
  using ReadLanes = tile::LaneOffsets<kKeys * 2, tile::Lanes::rows_first>;

 public:
  TILEWISE_DEVICE BiasPrefetch(const Problem& p, ptx::SharedAddress buffer)
      : aligned_(bias_rows_are_aligned(p, 16)),
        buffer_(buffer),
        copy_lanes_(ptx::lane_index()),
        read_lanes_(ptx::lane_index()) {}

  // Rows past the last one read the bias of the last one.
  TILEWISE_DEVICE void set_rows(const Problem& p, const QueryTile& work_tile,
                                const LanePosition& position) {
    const int lane = ptx::lane_index();
    const int32_t r = min(position.row0 - lane / 4 + lane % kRows, work_tile.rows.count - 1);
    const auto offset = static_cast<uint64_t>(row_score_mod(p, work_tile, r).bias);
#pragma unroll
    for (int pass = 0; pass < CopyLanes::kPasses; ++pass) {
      const int from = copy_lanes_.row_of(pass);  // the lane that has the offset
      const uint64_t low = ptx::shuffle(static_cast<uint32_t>(offset), from);
      const uint64_t high = ptx::shuffle(static_cast<uint32_t>(offset >> 32), from);
      rows_[pass] = static_cast<const Storage*>(p.bias) + static_cast<int64_t>(high << 32 | low);
      rows_[pass] += kChunk * copy_lanes_.chunk_of(0);
    }
  }

  // Issues the copy of a tile to shared memory. kWhole: all keys of the tile exist; otherwise
  // `keys` of them do, and nothing is read past the last one.
  template <bool kWhole>
  TILEWISE_DEVICE void prefetch(int32_t tile, int32_t keys = kKeys) {
    ptx::sync_warp();  // the previous tile has been read
    if (aligned_) [[likely]] {
      each_chunk(tile, [&](ptx::SharedAddress to, const Storage* from, int key) {
        if constexpr (kWhole)
          ptx::cp_async_16(to, from);
        else
          ptx::cp_async_16(to, from, 2 * count(keys - key));
      });
      ptx::cp_async_commit_group();
    } else {
      each_chunk(tile, [&](ptx::SharedAddress to, const Storage* from, int key) {
        tile::copy_elements<Element>(to, from, kWhole ? kChunk : count(keys - key));
      });
    }
  }

  // Reads the tile that was prefetched.
  TILEWISE_DEVICE void read() {
    ptx::cp_async_wait_group<0>();
    ptx::sync_warp();
#pragma unroll
    for (int i = 0; i < kSteps; ++i)
      ptx::ldmatrix_x4(pairs_[i], read_lanes_.address(buffer_, 0, i));
  }

  // s = s * unit + bias
  TILEWISE_DEVICE void add(tile::Sums<1, kKeys / 8>& s, float unit) const {
#pragma unroll
    for (int i = 0; i < 4 * kSteps; ++i) {
      float* const x = &s.x[0][i / 4 * 2 + i % 4 / 2][i % 2 * 2];
      const uint32_t pair = pairs_[i / 4][i % 4];
      x[0] = ptx::fma(x[0], unit, tile::low_of<Element>(pair));
      x[1] = ptx::fma(x[1], unit, tile::high_of<Element>(pair));
    }
  }

 private:
  TILEWISE_DEVICE static int count(int32_t keys) { return max(0, min(keys, kChunk)); }

  // Calls copy(to, from, first key) for each chunk of the lane.
  template <class Copy>
  TILEWISE_DEVICE void each_chunk(int32_t tile, const Copy& copy) const {
#pragma unroll
    for (int pass = 0; pass < CopyLanes::kPasses; ++pass) {
      const Storage* const row = rows_[pass] + tile * kKeys;
#pragma unroll
      for (int column = 0; column < CopyLanes::kColumns; ++column) {
        copy(buffer_ + copy_lanes_.offset(pass, column), row + column * CopyLanes::kStride * kChunk,
             copy_lanes_.chunk_of(column) * kChunk);
      }
    }
  }

  bool aligned_;  // rows start at multiples of 16 bytes
  ptx::SharedAddress buffer_;
  CopyLanes copy_lanes_;
  ReadLanes read_lanes_;
  const Storage* rows_[CopyLanes::kPasses];  // at the lane's first chunk of key 0
  uint32_t pairs_[kSteps][4];
};

// The methods are in the order in which a step calls them. In the fast path all of them are empty.
template <class C, Option kOption>
class OverlappedScoreMod {
  static_assert(kOption != Option::bias || ForwardShared<C>::kHasBias);
  // Reads from shared memory are served behind queued products, so the bias is read before them.
  // With more than one option there are no registers to hold it (D128: 58 loads of spilled
  // registers per step instead of 1).
  static constexpr bool kReadsEarly = kOneOption<kOption>;

 public:
  using Scores = tile::Sums<1, C::kForward.keys / 8>;
  using Weights = uint32_t[C::kForward.keys / 16][4];

  TILEWISE_DEVICE OverlappedScoreMod(const Problem& p, float scale, const ForwardShared<C>& shared)
      : p_(p), general_(p, scale), bias_(p, shared.bias(ptx::warp_index() - 4)) {
    if constexpr (kOption == Option::dropout) general_.dropout.key_shift = 0;  // see option_of
  }

  // The unit of the scores, and the factor of the weights that dropout keeps.
  TILEWISE_DEVICE float unit() const { return general_.unit(p_); }
  TILEWISE_DEVICE float dropout_scale() const {
    return has_dropout() ? general_.dropout.keep_scale : 1.0f;
  }

  // Called once per work tile, while the products of its first key tile are in flight.
  TILEWISE_DEVICE void begin_tile(const QueryTile& work_tile, const LanePosition& position,
                                  int32_t tile) {
    if (prefetches_bias()) {
      bias_.set_rows(p_, work_tile, position);
      bias_.template prefetch<false>(tile, work_tile.tiles.keys - tile * C::kForward.keys);
    }
    if (has_alibi()) alibi_ = AlibiRows<1>::of(p_, work_tile, position);
    if (has_dropout()) dropped_ = DropoutRows<1>::of(p_, work_tile, position);
  }

  // Called before the products of a step; in the first step of a work tile, beside them.
  TILEWISE_DEVICE void read_bias() {
    if (kReadsEarly && prefetches_bias()) bias_.read();
  }

  // Called beside the products. `more`: key tile `tile - 1` follows.
  TILEWISE_DEVICE void prefetch_bias(int32_t tile, bool more) {
    if (kReadsEarly && prefetches_bias() && more) bias_.template prefetch<true>(tile - 1);
  }

  // Whether softcap is the only option and a polynomial serves for all of `s`: the exponents are
  // then computed from the products (`small_exponent`).
  TILEWISE_DEVICE bool are_small(Scores& s) const {
    if constexpr (kOption == Option::softcap) return general_.tanh.are_small(s.flat());
    return false;
  }
  TILEWISE_DEVICE auto small_exponent(float scale) const { return general_.tanh.small(scale); }

  // Turns products into scores, in units of unit().
  TILEWISE_DEVICE void apply(const QueryTile& work_tile, Scores& s, int32_t tile,
                             const LanePosition& position, bool more) {
    if constexpr (kOption == Option::softcap) return general_.tanh.apply_to_any(s.flat());
    if (is_on<kOption, Option::softcap>(p_.softcap != 0.0f)) general_.tanh.apply(s.flat());
    if (has_alibi()) general_.add_alibi(alibi_, s, tile * C::kForward.keys + position.column);
    if (prefetches_bias()) {
      if (!kReadsEarly) bias_.read();
      bias_.add(s, general_.unit_before_bias(p_));
      if (!kReadsEarly && more) bias_.template prefetch<true>(tile - 1);
    } else if (kOption == Option::any && p_.bias != nullptr) {
      add_bias_by_elements(work_tile, s, tile, position);
    }
  }

  // Called beside the PV product of the previous step.
  TILEWISE_DEVICE void draw_dropout(int32_t tile, const LanePosition& position) {
    if (has_dropout())
      kept_ = general_.template draw<1, C::kForward.keys / 8>(dropped_, tile, position);
  }

  // Zeroes the weights that dropout drops.
  TILEWISE_DEVICE void apply_dropout(Weights& weights, const LanePosition& position) const {
    if (has_dropout()) kept_.apply(weights, position);
  }

 private:
  TILEWISE_DEVICE bool has_alibi() const {
    return is_on<kOption, Option::alibi>(p_.alibi_slopes != nullptr);
  }
  TILEWISE_DEVICE bool prefetches_bias() const {
    return ForwardShared<C>::kHasBias &&
           is_on<kOption, Option::bias>(p_.bias != nullptr && p_.bias_dtype != TILEWISE_FLOAT32);
  }
  TILEWISE_DEVICE bool has_dropout() const {
    return is_on<kOption, Option::dropout>(general_.dropout.on());
  }

  TILEWISE_DEVICE void add_bias_by_elements(const QueryTile& work_tile, Scores& s, int32_t tile,
                                            const LanePosition& position) const {
    using Storage = typename C::Element::Storage;
    if (ForwardShared<C>::kHasBias || p_.bias_dtype == TILEWISE_FLOAT32)
      general_.template add_bias<float>(p_, work_tile, s, tile, position);
    else
      general_.template add_bias<Storage>(p_, work_tile, s, tile, position);
  }

  const Problem& p_;
  ForwardScoreMod<typename C::Element::Storage> general_;
  BiasPrefetch<C> bias_;
  AlibiRows<1> alibi_;
  DropoutRows<1> dropped_;
  KeptBits<1, C::kForward.keys / 8> kept_;
};

template <class C>
class OverlappedScoreMod<C, Option::none> {
 public:
  using Scores = tile::Sums<1, C::kForward.keys / 8>;
  using Weights = uint32_t[C::kForward.keys / 16][4];

  TILEWISE_DEVICE OverlappedScoreMod(const Problem&, float scale, const ForwardShared<C>&)
      : unit_(scale) {}

  TILEWISE_DEVICE float unit() const { return unit_; }
  TILEWISE_DEVICE float dropout_scale() const { return 1.0f; }
  TILEWISE_DEVICE void begin_tile(const QueryTile&, const LanePosition&, int32_t) const {}
  TILEWISE_DEVICE void read_bias() const {}
  TILEWISE_DEVICE void prefetch_bias(int32_t, bool) const {}
  TILEWISE_DEVICE void apply(const QueryTile&, Scores&, int32_t, const LanePosition&, bool) const {}
  TILEWISE_DEVICE void draw_dropout(int32_t, const LanePosition&) const {}
  TILEWISE_DEVICE void apply_dropout(const Weights&, const LanePosition&) const {}

 private:
  float unit_;
};

}  // namespace tilewise::cuda::wgmma
