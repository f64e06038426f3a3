#include "capi/problem_views.h"
#include "capi/validate.h"
#include "capi/versioned.h"
#include "capi/views.h"

namespace tilewise::capi {
namespace {

void check_dbias(const Gradients& g, const Problem& p, Contents contents) {
  if (g.dbias == nullptr) return;
  require(p.bias != nullptr, "dbias is given, but bias is NULL: it is the gradient of bias");
  const struct {
    const char* name;
    int64_t gradient;
    int64_t bias;
  } strides[] = {{"dbias_stride_batch", g.dbias_stride_batch, p.bias_stride_batch},
                 {"dbias_stride_head", g.dbias_stride_head, p.bias_stride_head},
                 {"dbias_stride_row", g.dbias_stride_row, p.bias_stride_row}};
  for (const auto& stride : strides) {
    require(
        (stride.gradient == 0) == (stride.bias == 0), stride.name, " is ", stride.gradient,
        " and the stride of bias is ", stride.bias,
        ": both or neither must be 0, because dbias sums over the dimensions that bias broadcasts");
  }
  check_range("dbias_keys", g.dbias_keys, 0, kMaxRows);
  if (g.dbias_stride_row != 0) check_range("dbias_rows", g.dbias_rows, 0, kMaxRows);
  // If lengths differ per sequence, check_dbias_extent compares the largest at launch.
  if (p.cu_seqlens_k == nullptr && p.seqused_k == nullptr && p.leftpad_k == nullptr) {
    require(g.dbias_keys >= key_capacity(p), "dbias_keys is ", g.dbias_keys,
            ": it must be at least the number of keys, ", key_capacity(p));
  }
  if (p.cu_seqlens_q == nullptr && p.seqused_q == nullptr && g.dbias_stride_row != 0) {
    require(g.dbias_rows >= p.seqlen_q, "dbias_rows is ", g.dbias_rows,
            ": it must be at least seqlen_q, which is ", p.seqlen_q);
  }
  check_view({"dbias",
              g.dbias,
              {{{"_stride_batch", g.dbias_stride_batch != 0 ? p.batch : 1, g.dbias_stride_batch},
                {"_stride_head", g.dbias_stride_head != 0 ? p.heads_q : 1, g.dbias_stride_head},
                {"_stride_row", g.dbias_stride_row != 0 ? g.dbias_rows : 1, g.dbias_stride_row}}},
              g.dbias_keys,
              4,
              Access::write},
             Presence::needed, contents);
}

void check_dbias_extent(const Gradients& g, const Problem& p) {
  const bool uniform = p.cu_seqlens_q == nullptr && p.seqused_q == nullptr &&
                       p.cu_seqlens_k == nullptr && p.seqused_k == nullptr &&
                       p.leftpad_k == nullptr;
  if (g.dbias == nullptr || uniform) return;  // check_dbias has compared the sizes
  for (int64_t b = 0; b < p.batch; ++b) {
    const Band band = sequence_of(p, b).band;
    if (band.rows == 0) continue;
    require(g.dbias_keys >= band.keys, "dbias_keys is ", g.dbias_keys, ": sequence ", b, " has ",
            band.keys, " keys, so it must be at least that");
    require(g.dbias_stride_row == 0 || g.dbias_rows >= band.rows, "dbias_rows is ", g.dbias_rows,
            ": sequence ", b, " has ", band.rows, " rows, so it must be at least that");
  }
}

}  // namespace

Gradients validated_gradients(const tilewise_gradients* given, const Problem& p, Pass pass,
                              Contents contents) {
  Gradients g = read_struct(given, "gradients");
  if (p.device != TILEWISE_CPU && contents == Contents::read) contents = Contents::pointers;
  check_range("gradients.reserved", g.reserved, 0, 0);
  const Dtypes dtypes = dtypes_of(p);
  const auto optional = [&](const View& view) { check_view(view, Presence::optional, contents); };
  check_view(rows_view("dout", g.dout, p, dtypes.q, p.head_dim_v, Access::read),
             pass == Pass::second ? Presence::optional : Presence::needed, contents);
  optional(rows_view("dq", g.dq, p, dtypes.q, p.head_dim, Access::write));
  optional(dkeys_view("dk", g.dk, p, p.head_dim));
  optional(dkeys_view("dv", g.dv, p, p.head_dim_v));
  optional(lse_view("dlse", g.dlse, g.dlse_stride_batch, g.dlse_stride_head, p, Access::read));
  check_dbias(g, p, contents);
  require(g.dsinks == nullptr || p.sinks != nullptr,
          "dsinks is given, but sinks is NULL: it is the gradient of sinks");
  if (contents != Contents::unread) {
    check_aligned("dsinks", g.dsinks, 4);
    check_aligned("dscale", g.dscale, 4);
  }
  if (contents == Contents::read) check_dbias_extent(g, p);
  return g;
}

}  // namespace tilewise::capi
