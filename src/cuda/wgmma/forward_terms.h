// The general form beside the products of the forward: what does not depend on the scores is ready
// when they come. What is left between products and weights are, for 64 scores of a lane, 150
// instructions of a bias and 200 of ALiBi, beside 280 of the softmax. An option that is on alone
// has a loop of its own, with the registers of all: on an H200 (D128, causal, 4k) softcap went from
// 58 to 76 % of the plain form's speed. The random bits of dropout, 500 instructions, come after
// the softmax: 57 % of it, 55 % when they are drawn beside the products, 43 % in the loop for any
// options.
#pragma once

#include "cuda/common/forward_terms.h"
#include "cuda/wgmma/config.h"

namespace tilewise::cuda::wgmma {

// A bias of the type of q, k and v: a tile of it leaves for registers when the one before has been
// added, in blocks of eight keys of a row (LanePlace).
template <class C>
class BiasAhead {
  using Storage = typename C::Element::Storage;
  static constexpr int kKeys = C::kForward.keys;
  static constexpr int kBlocks = kKeys / 16;  // of a lane

 public:
  TILEWISE_DEVICE explicit BiasAhead(const Problem& p) : aligned_(bias_rows_are_aligned(p, 16)) {}

  // Rows that do not exist stand for the last one.
  TILEWISE_DEVICE void take_rows(const Problem& p, const BlockWork& work, const LanePlace& place) {
    const int32_t r = min(place.row0 + 8 * place.block_row(), work.rows.count - 1);
    blocks_ = static_cast<const Storage*>(p.bias) + row_terms(p, work, r).bias;
    blocks_ += 8 * place.first_block();
  }

  // Of a tile whose keys all exist.
  TILEWISE_DEVICE void fetch(int32_t tile) {
    if (!aligned_) return fetch_elements(tile, kKeys);
#pragma unroll
    for (int i = 0; i < kBlocks; ++i)
      ptx::ld_global_v4_b32(pairs_[i], blocks_ + tile * kKeys + 16 * i);
  }

  // Of any tile, with so many keys from the lane's first one on: past the last one is no bias.
  TILEWISE_DEVICE void fetch_elements(int32_t tile, int32_t keys) {
    const Storage* const from = blocks_ + tile * kKeys;
#pragma unroll
    for (int i = 0; i < 4 * kBlocks; ++i) {
      const int key = i / 4 * 16 + i % 4 * 2;
      const uint32_t low = key < keys ? from[key].bits : 0u;
      const uint32_t high = key + 1 < keys ? from[key + 1].bits : 0u;
      pairs_[i / 4][i % 4] = low | high << 16;
    }
  }

  // To the lanes whose scores they are added to.
  TILEWISE_DEVICE void exchange(const LanePlace& place) {
#pragma unroll
    for (auto& pairs : pairs_) tile::quad_transpose(pairs, place.lane_of_quad());
  }

  // s = s * unit + bias
  TILEWISE_DEVICE void add(tile::Sums<1, kKeys / 8>& s, float unit) const {
#pragma unroll
    for (int i = 0; i < 4 * kBlocks; ++i) {
      float* const x = &s.x[0][i / 4 * 2 + i % 4 / 2][i % 2 * 2];
      const uint32_t pair = pairs_[i / 4][i % 4];
      x[0] = ptx::fma(x[0], unit, tile::low_of<typename C::Element>(pair));
      x[1] = ptx::fma(x[1], unit, tile::high_of<typename C::Element>(pair));
    }
  }

 private:
  const Storage* blocks_ = nullptr;  // of the lane, from key 0 of its row on
  bool aligned_;                     // 16 bytes at once
  uint32_t pairs_[kBlocks][4];
};

// In the order of their use. A plain form has none of it.
template <class C, Option kOption>
class ForwardTerms {
 public:
  using Scores = tile::Sums<1, C::kForward.keys / 8>;
  using Weights = uint32_t[C::kForward.keys / 16][4];

  TILEWISE_DEVICE ForwardTerms(const Problem& p, float scale) : p_(p), terms_(p, scale), bias_(p) {}

  // What weights are exponents of, and what kept ones are multiplied by.
  TILEWISE_DEVICE float unit() const { return terms_.unit(p_); }
  TILEWISE_DEVICE float keep_scale() const { return drops() ? terms_.dropout.keep_scale : 1.0f; }

  // Of a work, whose first tile of keys is under way.
  TILEWISE_DEVICE void take_rows(const BlockWork& work, const LanePlace& place, int32_t tile) {
    if (bias_ahead()) {
      bias_.take_rows(p_, work, place);
      const int32_t keys = work.tiles.keys - tile * C::kForward.keys;
      if (keys >= C::kForward.keys)
        bias_.fetch(tile);
      else
        bias_.fetch_elements(tile, keys - 8 * place.first_block());
    }
    if (alibi()) alibi_ = AlibiRows<1>::of(p_, work, place);
    if (drops()) dropped_ = DropoutRows<1>::of(p_, work, place);
  }

  // Beside the products of a tile.
  TILEWISE_DEVICE void prepare(const LanePlace& place) {
    if (bias_ahead()) bias_.exchange(place);
  }

  // Whether nothing but a softcap is on that a polynomial serves for all of `s`: exponents are then
  // computed from products (`small_exponent`).
  TILEWISE_DEVICE bool are_small(Scores& s) const {
    if constexpr (kOption == Option::softcap) return terms_.tanh.are_small(s.flat());
    return false;
  }
  TILEWISE_DEVICE auto small_exponent(float scale) const { return terms_.tanh.small(scale); }

  // Products become scores, in units of unit().
  TILEWISE_DEVICE void apply(const BlockWork& work, Scores& s, int32_t tile,
                             const LanePlace& place) {
    if constexpr (kOption == Option::softcap) return terms_.tanh.apply_to_any(s.flat());
    if (is_on<kOption, Option::softcap>(p_.softcap != 0.0f)) terms_.tanh.apply(s.flat());
    if (alibi()) terms_.add_alibi(alibi_, s, tile * C::kForward.keys + place.column);
    if (bias_ahead()) {
      bias_.add(s, terms_.unit_before_bias(p_));
      if (tile > 0) bias_.fetch(tile - 1);  // maybe in vain: its keys exist
    } else if (kOption == Option::any && p_.bias != nullptr) {
      terms_.template add_bias<float>(p_, work, s, tile, place);
    }
  }

  // Beside the values of the tile before.
  TILEWISE_DEVICE void finish(int32_t tile, const LanePlace& place) {
    if (drops()) kept_ = terms_.template draw<1, C::kForward.keys / 8>(dropped_, tile, place);
  }

  // Zeroes the weights that dropout drops.
  TILEWISE_DEVICE void drop(Weights& weights) const {
    if (drops()) kept_.apply(weights);
  }

 private:
  TILEWISE_DEVICE bool alibi() const {
    return is_on<kOption, Option::alibi>(p_.alibi_slopes != nullptr);
  }
  TILEWISE_DEVICE bool bias_ahead() const {
    return is_on<kOption, Option::bias>(p_.bias != nullptr && p_.bias_dtype != TILEWISE_FLOAT32);
  }
  TILEWISE_DEVICE bool drops() const {
    return is_on<kOption, Option::dropout>(terms_.dropout.on());
  }

  const Problem& p_;
  GeneralTerms<typename C::Element::Storage> terms_;
  BiasAhead<C> bias_;
  AlibiRows<1> alibi_;
  DropoutRows<1> dropped_;
  KeptBits<1, C::kForward.keys / 8> kept_;
};

template <class C>
class ForwardTerms<C, Option::none> {
 public:
  using Scores = tile::Sums<1, C::kForward.keys / 8>;
  using Weights = uint32_t[C::kForward.keys / 16][4];

  TILEWISE_DEVICE ForwardTerms(const Problem&, float scale) : unit_(scale) {}

  TILEWISE_DEVICE float unit() const { return unit_; }
  TILEWISE_DEVICE float keep_scale() const { return 1.0f; }
  TILEWISE_DEVICE void take_rows(const BlockWork&, const LanePlace&, int32_t) const {}
  TILEWISE_DEVICE void prepare(const LanePlace&) const {}
  TILEWISE_DEVICE void apply(const BlockWork&, Scores&, int32_t, const LanePlace&) const {}
  TILEWISE_DEVICE void finish(int32_t, const LanePlace&) const {}
  TILEWISE_DEVICE void drop(const Weights&) const {}

 private:
  float unit_;
};

}  // namespace tilewise::cuda::wgmma
