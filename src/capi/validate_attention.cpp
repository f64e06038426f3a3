#include <cfloat>
#include <cmath>

#include "attention/request.h"
#include "capi/problem_views.h"
#include "capi/validate.h"
#include "capi/versioned.h"
#include "capi/views.h"

namespace tilewise::capi {
namespace {

constexpr int64_t kMaxSplits = 256;
constexpr int64_t kMaxThreads = 65536;

void check_sizes(Problem& p) {
  check_range("batch", p.batch, 0, kMaxCount);
  check_range("seqlen_q", p.seqlen_q, 0, kMaxRows);
  check_range("heads_q", p.heads_q, 1, kMaxCount);
  check_range("heads_kv", p.heads_kv, 1, kMaxCount);
  require(p.heads_q % p.heads_kv == 0, "heads_q is ", p.heads_q,
          ": it must be a multiple of heads_kv, which is ", p.heads_kv);
  check_range("head_dim", p.head_dim, 1, kMaxHeadDim);
  check_range("head_dim_v", p.head_dim_v, 0, kMaxHeadDim);
  if (p.head_dim_v == 0) p.head_dim_v = p.head_dim;
  check_range("max_seqlen_q", p.max_seqlen_q, 0, kMaxRows);
  check_range("max_seqlen_k", p.max_seqlen_k, 0, kMaxRows);
  check_rows("batch * heads_q * seqlen_q", p.cu_seqlens_q != nullptr ? 1 : p.batch, p.heads_q,
             p.seqlen_q);
  check_rows("batch * heads_q", p.batch, p.heads_q, 1);
}

void check_cache(Problem& p) {
  check_range("kv_batch", p.kv_batch, 0, kMaxCount);
  if (p.kv_batch == 0) p.kv_batch = p.batch;
  if (p.block_table != nullptr) {
    check_range("page_size", p.page_size, 1, kMaxRows);
    check_range("pages", p.pages, 0, kMaxRows);
    check_range("block_table_width", p.block_table_width, 0, kMaxRows);
    check_rows("pages * page_size * heads_kv", p.pages, p.page_size, p.heads_kv);
    check_rows("block_table_width * page_size * heads_q", p.block_table_width, p.page_size,
               p.heads_q);
    check_rows("batch * block_table_width * page_size", p.batch, p.block_table_width, p.page_size);
    check_layout({"block_table",
                  nullptr,
                  {{{"_stride", p.batch, p.block_table_stride}, {"", 1, 0}, {"", 1, 0}}},
                  p.block_table_width,
                  4,
                  Access::read});
    require(p.kv_batch_idx == nullptr,
            "kv_batch_idx is given together with block_table: only one of them is allowed");
    return;
  }
  check_range("seqlen_k", p.seqlen_k, 0, kMaxRows);
  check_rows("batch * heads_q * seqlen_k", p.cu_seqlens_k != nullptr ? 1 : p.batch, p.heads_q,
             p.seqlen_k);
  if (p.cu_seqlens_k != nullptr) {
    require(p.kv_batch_idx == nullptr,
            "kv_batch_idx is given together with cu_seqlens_k: only one of them is allowed");
    return;
  }
  check_rows("kv_batch * seqlen_k * heads_kv", p.kv_batch, p.seqlen_k, p.heads_kv);
  require(p.kv_batch_idx != nullptr || p.kv_batch >= p.batch, "kv_batch is ", p.kv_batch,
          ": without kv_batch_idx it must be at least batch, which is ", p.batch);
}

void check_score(const Problem& p) {
  require(p.scale_ptr != nullptr || std::isfinite(p.scale), "scale is ", p.scale,
          ": it must be finite");
  const bool softcap_fits = p.softcap == 0 || p.softcap >= FLT_MIN;  // scores are divided by it
  require(std::isfinite(p.softcap) && softcap_fits, "softcap is ", p.softcap,
          ": it must be 0 (off) or a finite number of at least ", FLT_MIN);
  require(p.dropout_p >= 0 && p.dropout_p < 1, "dropout_p is ", p.dropout_p,
          ": it must be at least 0 and less than 1");
  if (p.bias != nullptr) {
    const int32_t other = dtypes_of(p).widened_q();
    const bool is_float8 = p.dtype == TILEWISE_FLOAT8_E4M3;
    require(p.bias_dtype == TILEWISE_FLOAT32 || p.bias_dtype == other, "bias_dtype is ",
            p.bias_dtype, " (", dtype_name(p.bias_dtype), "): it must be float32 or ",
            is_float8 ? "" : "the dtype of q, ", dtype_name(other));
    check_layout(
        bias_view("bias", p.bias, p, p.bias_stride_batch, p.bias_stride_head, p.bias_stride_row));
  }
  if (p.alibi_slopes != nullptr) {
    check_layout({"alibi",
                  p.alibi_slopes,
                  {{{"_stride_batch", p.batch, p.alibi_stride_batch}, {"", 1, 0}, {"", 1, 0}}},
                  p.heads_q,
                  4,
                  Access::read});
  }
}

// Dropout counts rows, keys and heads of the larger problem in 32 bits.
void check_shard(Problem& p) {
  check_range("row_offset", p.row_offset, 0, INT32_MAX);
  check_range("key_offset", p.key_offset, 0, INT32_MAX);
  check_range("batch_offset", p.batch_offset, 0, kMaxCount);
  check_range("heads_q_total", p.heads_q_total, 0, kMaxCount);
  if (p.heads_q_total == 0) p.heads_q_total = p.heads_q;
  check_range("head_offset", p.head_offset, 0, kMaxCount);
  require(p.head_offset <= p.heads_q_total - p.heads_q, "head_offset is ", p.head_offset,
          " with heads_q_total ", p.heads_q_total, " and heads_q ", p.heads_q,
          ": all heads of the shard must be below heads_q_total");
  check_rows("(batch_offset + batch) * heads_q_total", p.batch_offset + p.batch, p.heads_q_total,
             1);
}

void check_switches(const Problem& p) {
  check_range("num_splits", p.num_splits, 0, kMaxSplits);
  check_range("deterministic", p.deterministic, 0, 1);
  check_range("check", p.check, 0, 1);
  check_range("tf32", p.tf32, 0, 1);
  check_parallel(p.parallel);
}

// Batch invariance: splits follow from a rule per sequence, and sums have a fixed order.
void check_batch_invariant(Problem& p) {
  check_range("batch_invariant", p.batch_invariant, 0, 1);
  if (p.batch_invariant == 0) return;
  require(
      p.num_splits == 0, "num_splits is ", p.num_splits,
      " with batch_invariant: it must be 0, because splits follow from the lengths of a sequence");
  p.deterministic = 1;
}

// Dtypes other than one for all tensors.
void check_dtypes(const Problem& p, Pass pass) {
  check_range("out_dtype", p.out_dtype, TILEWISE_OUT_DEFAULT, TILEWISE_OUT_BFLOAT16);
  check_range("reserved", p.reserved, 0, 0);
  check_range("kv_float8", p.kv_float8, 0, 1);
  require(p.kv_float8 == 0 || p.dtype != TILEWISE_FLOAT32, "kv_float8 is 1 with dtype ",
          dtype_name(p.dtype), ": float16, bfloat16 and float8_e4m3 are allowed");
  const Dtypes dtypes = dtypes_of(p);
  const bool q_is_float8 = dtypes.q == TILEWISE_FLOAT8_E4M3;
  if (dtypes.out != dtypes.q && dtypes.out != TILEWISE_FLOAT32 && !q_is_float8)
    refuse(TILEWISE_UNSUPPORTED, "out_dtype is ", dtype_name(dtypes.out), " with dtype ",
           dtype_name(dtypes.q), ": the dtype of q and float32 are allowed");
  check_descale({"q_descale", p.q_descale, p.q_descale_stride_batch, p.q_descale_stride_head},
                q_is_float8, p.batch, p.heads_kv);
  check_descale({"k_descale", p.k_descale, p.k_descale_stride_batch, p.k_descale_stride_head},
                dtypes.scales_kv(), p.batch, p.heads_kv);
  check_descale({"v_descale", p.v_descale, p.v_descale_stride_batch, p.v_descale_stride_head},
                dtypes.scales_kv(), p.batch, p.heads_kv);
  if (pass == Pass::forward || !dtypes.scales_kv()) return;
  refuse(TILEWISE_UNSUPPORTED, pass_name(pass), " with ",
         q_is_float8 ? "dtype float8_e4m3: only the forward supports tensors of float8_e4m3; q, k "
                       "and v of float32, float16 or bfloat16 are allowed"
                     : "float8_e4m3 k and v (kv_float8): only the forward supports them; k and v "
                       "in the dtype of q are allowed");
}

// Checks the length bounds of a GPU problem without index arrays; a GPU checks the arrays itself.
// On the CPU, check_index_arrays checks all bounds.
void check_bounds(const Problem& p) {
  if (p.batch == 0 || p.device != TILEWISE_CUDA) return;
  if (p.cu_seqlens_q == nullptr && p.seqused_q == nullptr) {
    require(p.max_seqlen_q == 0 || p.seqlen_q <= p.max_seqlen_q, "max_seqlen_q is ", p.max_seqlen_q,
            ": every sequence has ", p.seqlen_q,
            " rows; it must be 0 (not known) or an upper bound");
  }
  if (p.cu_seqlens_k == nullptr && p.seqused_k == nullptr && p.leftpad_k == nullptr) {
    require(p.max_seqlen_k == 0 || key_capacity(p) <= p.max_seqlen_k, "max_seqlen_k is ",
            p.max_seqlen_k, ": every sequence has ", key_capacity(p),
            " keys; it must be 0 (not known) or an upper bound");
  }
}

void check_views(const Problem& p, Pass pass, Contents contents) {
  const bool forward = pass == Pass::forward;
  const Dtypes dtypes = dtypes_of(p);
  const View views[] = {
      rows_view("q", p.q, p, dtypes.q, p.head_dim, Access::read),
      keys_view("k", p.k, p, p.head_dim),
      keys_view("v", p.v, p, p.head_dim_v),
      rows_view("out", p.out, p, dtypes.out, p.head_dim_v, forward ? Access::write : Access::read),
  };
  for (const View& view : views) check_view(view, Presence::needed, contents);
  const View lse = lse_view("lse", p.lse, p.lse_stride_batch, p.lse_stride_head, p,
                            forward ? Access::write : Access::read);
  require(p.lse_low == nullptr || p.lse != nullptr || lse.empty() || contents == Contents::unread,
          "lse_low is given, but lse is NULL: it is the rounding error of lse");
  // The forward may omit lse; a plan does not need the pointer in any pass.
  if (p.lse == nullptr && (forward || contents == Contents::unread)) return;
  if (contents != Contents::unread) check_data(lse);
  check_layout(lse);
  if (p.lse_low == nullptr || contents == Contents::unread) return;
  check_data(lse_view("lse_low", p.lse_low, p.lse_stride_batch, p.lse_stride_head, p, lse.access));
}

void check_option_pointers(const Problem& p) {
  const struct {
    const char* name;
    const void* pointer;
    int64_t bytes;
  } pointers[] = {
      {"scale_ptr", p.scale_ptr, 4},
      {"alibi_slopes", p.alibi_slopes, 4},
      {"bias", p.bias, element_bytes(p.bias_dtype)},
      {"dropout_state", p.dropout_state, 8},
      {"sinks", p.sinks, 4},
      {"cu_seqlens_q", p.cu_seqlens_q, 4},
      {"cu_seqlens_k", p.cu_seqlens_k, 4},
      {"seqused_q", p.seqused_q, 4},
      {"seqused_k", p.seqused_k, 4},
      {"block_table", p.block_table, 4},
      {"kv_batch_idx", p.kv_batch_idx, 4},
      {"leftpad_k", p.leftpad_k, 4},
      {"diagonal", p.diagonal, 4},
      {"q_descale", p.q_descale, 4},
      {"k_descale", p.k_descale, 4},
      {"v_descale", p.v_descale, 4},
      {"max_logits", p.max_logits, 4},
  };
  for (const auto& each : pointers) check_aligned(each.name, each.pointer, each.bytes);
}

// If keys and values have head stride 0, as broadcasting gives them, there is only one head, which
// all heads of q share: it is then read once, not once per head. This does not hold for gradients
// and for the factors of float8 tensors, which are per head.
void join_broadcast_heads(Problem& p) {
  if (p.k.stride_head == 0 && p.v.stride_head == 0 && !dtypes_of(p).scales_kv()) p.heads_kv = 1;
}

}  // namespace

Problem validated_problem(const tilewise_attention* given, Pass pass, Contents contents) {
  Problem p = read_struct(given, "attention");
  check_device(p.device, p.device_index);
  if (p.device != TILEWISE_CPU && contents == Contents::read) contents = Contents::pointers;
  require(is_dtype(p.dtype), "dtype is ", p.dtype,
          ": it must be 0 (float32), 1 (float16), 2 (bfloat16) or 3 (float8_e4m3)");
  check_sizes(p);
  check_cache(p);
  check_score(p);
  check_shard(p);
  check_switches(p);
  check_batch_invariant(p);
  check_dtypes(p, pass);
  check_bounds(p);
  check_views(p, pass, contents);
  if (contents != Contents::unread) check_option_pointers(p);
  if (p.mask != nullptr) check_mask(p, contents);
  if (contents == Contents::read) check_index_arrays(p);
  if (pass == Pass::forward) join_broadcast_heads(p);
  return p;
}

void check_descale(const Descale& descale, bool is_float8, int64_t batch, int64_t heads_kv) {
  if (descale.data == nullptr) return;
  const char tensor = descale.name[0];
  require(is_float8, descale.name, " is given, but ", tensor,
          " is not float8_e4m3, whose values it scales");
  check_layout({descale.name,
                descale.data,
                {{{"_stride_batch", batch, descale.stride_batch},
                  {"_stride_head", heads_kv, descale.stride_head},
                  {"", 1, 0}}},
                1,
                4,
                Access::read});
}

void check_view(const View& view, Presence presence, Contents contents) {
  if (view.data == nullptr && presence == Presence::optional) return;
  // The pointer first: a missing output has strides 0 and must not be reported as overlapping.
  if (contents != Contents::unread) check_data(view);
  check_layout(view);
}

Pass checked_pass(int32_t pass, Pass first, Pass second) {
  const auto number = [](Pass each) { return static_cast<int32_t>(each); };
  require(pass == number(first) || pass == number(second), "pass is ", pass, ": it must be ",
          number(first), " (", pass_name(first), ") or ", number(second), " (", pass_name(second),
          ")");
  return static_cast<Pass>(pass);
}

void check_device(int32_t device, int32_t device_index) {
  require(device == TILEWISE_CPU || device == TILEWISE_CUDA, "device is ", device,
          ": it must be 0 (CPU) or 1 (CUDA)");
  if (device == TILEWISE_CPU) {
    check_range("device_index", device_index, 0, 0);
  } else {
    check_range("device_index", device_index, 0, INT32_MAX);
  }
}

void check_parallel(const tilewise_parallel* parallel) {
  if (parallel == nullptr) return;
  check_range("parallel.threads", parallel->threads, 0, kMaxThreads);
  check_range("parallel.reserved", parallel->reserved, 0, 0);
}

}  // namespace tilewise::capi
