#include "capi/problem_views.h"
#include "capi/validate.h"
#include "capi/versioned.h"
#include "capi/views.h"

namespace tilewise::capi {
namespace {

// The options of the backward that these passes lack.
void refuse_options(const Problem& p, Pass pass) {
  if (p.block_table != nullptr) {
    refuse(TILEWISE_UNSUPPORTED, pass_name(pass),
           " with block_table: keys and values in pages are not supported; contiguous k and v are "
           "allowed");
  }
  if (p.batch_invariant != 0) {
    refuse(TILEWISE_UNSUPPORTED, pass_name(pass),
           " with batch_invariant 1: it is not supported; 0 is allowed");
  }
}

void check_bias(const Tangents& t, const Problem& p, Contents contents) {
  if (t.bias == nullptr) return;
  require(p.bias != nullptr, "tangents.bias is given, but bias is NULL: it is the tangent of bias");
  check_view(bias_view("tangents.bias", t.bias, p, t.bias_stride_batch, t.bias_stride_head,
                       t.bias_stride_row),
             Presence::optional, contents);
}

}  // namespace

Tangents validated_tangents(const tilewise_tangents* given, const Problem& p, Pass pass,
                            Contents contents) {
  const Tangents t = read_struct(given, "tangents");
  if (p.device != TILEWISE_CPU && contents == Contents::read) contents = Contents::pointers;
  check_range("tangents.reserved", t.reserved, 0, 0);
  refuse_options(p, pass);
  const bool second = pass == Pass::second;
  const Access results = second ? Access::read : Access::write;
  const Dtypes dtypes = dtypes_of(p);
  const auto optional = [&](const View& view) { check_view(view, Presence::optional, contents); };
  const auto needed = [&](const View& view) { check_view(view, Presence::needed, contents); };
  optional(rows_view("tangents.q", t.q, p, dtypes.q, p.head_dim, Access::read));
  optional(keys_view("tangents.k", t.k, p, p.head_dim));
  optional(keys_view("tangents.v", t.v, p, p.head_dim_v));
  needed(rows_view("tangents.out", t.out, p, dtypes.out, p.head_dim_v, results));
  const View lse =
      lse_view("tangents.lse", t.lse, t.lse_stride_batch, t.lse_stride_head, p, results);
  check_view(lse, second && contents != Contents::unread ? Presence::needed : Presence::optional,
             contents);
  check_bias(t, p, contents);
  require(t.sinks == nullptr || p.sinks != nullptr,
          "tangents.sinks is given, but sinks is NULL: it is the tangent of sinks");
  if (contents != Contents::unread) {
    check_aligned("tangents.sinks", t.sinks, 4);
    check_aligned("tangents.scale", t.scale, 4);
  }
  if (!second) return t;
  needed(rows_view("tangents.dout", t.dout, p, dtypes.q, p.head_dim_v, Access::read));
  optional(
      lse_view("tangents.dlse", t.dlse, t.dlse_stride_batch, t.dlse_stride_head, p, Access::read));
  return t;
}

}  // namespace tilewise::capi
