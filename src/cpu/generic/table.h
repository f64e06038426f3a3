// The kernels of one engine as a row of the kernel table.
#pragma once

#include "cpu/generic/backward.h"
#include "cpu/generic/decode.h"
#include "cpu/generic/forward.h"
#include "cpu/generic/jvp.h"
#include "cpu/generic/rows.h"
#include "cpu/generic/second.h"

namespace tilewise::cpu {
namespace {

template <class E, Isa kIsa, class Products = DotProducts<typename E::Storage>>
const Kernels* kernels_of() {
  using T = typename E::Storage;
  static_assert(E::S.lanes == W);
  static constexpr Kernels kernels = {
      pack_item<E>,      forward_item<E>, decode_item<T, Products, kIsa>,
      combine_item<T>,   delta_item<T>,   backward_item<E>,
      finish_dq_item<E>, jvp_item<E>,     second_rows_item<T>,
      second_item<E>,
  };
  return &kernels;
}

}  // namespace
}  // namespace tilewise::cpu
