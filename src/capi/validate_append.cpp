#include <algorithm>
#include <tuple>
#include <vector>

#include "capi/validate.h"
#include "capi/versioned.h"
#include "capi/views.h"
#include "cpu/append.h"
#include "cuda/backend.h"
#include "cuda/index_errors.h"

namespace tilewise::capi {
namespace {

using Append = tilewise_kv_append;

int64_t capacity(const Append& a) {
  return a.block_table != nullptr ? a.block_table_width * a.page_size : a.seqlen_k;
}

bool appends(const Append& a) { return a.k_new.data != nullptr; }
bool rotates_q(const Append& a) { return a.q.data != nullptr; }

void check_sizes(Append& a) {
  check_range("batch", a.batch, 0, kMaxCount);
  check_range("seqlen_q", a.seqlen_q, 0, kMaxRows);
  check_range("seqlen_new", a.seqlen_new, 0, kMaxRows);
  check_range("heads_q", a.heads_q, rotates_q(a) ? 1 : 0, kMaxCount);
  check_range("heads_kv", a.heads_kv, 1, kMaxCount);
  check_range("head_dim", a.head_dim, 1, kMaxHeadDim);
  check_range("head_dim_v", a.head_dim_v, 0, kMaxHeadDim);
  if (a.head_dim_v == 0) a.head_dim_v = a.head_dim;
  check_rows("batch * heads_q * seqlen_q", a.cu_seqlens_q != nullptr ? 1 : a.batch, a.heads_q,
             a.seqlen_q);
  check_rows("batch * heads_kv * seqlen_new", a.cu_seqlens_new != nullptr ? 1 : a.batch, a.heads_kv,
             a.seqlen_new);
}

void check_cache(Append& a) {
  check_range("kv_batch", a.kv_batch, 0, kMaxCount);
  if (a.kv_batch == 0) a.kv_batch = a.batch;
  if (a.block_table != nullptr) {
    require(a.kv_batch_idx == nullptr,
            "kv_batch_idx is given together with block_table: only one of them is allowed");
    check_range("page_size", a.page_size, 1, kMaxRows);
    check_range("pages", a.pages, 0, kMaxRows);
    check_range("block_table_width", a.block_table_width, 0, kMaxRows);
    check_rows("pages * page_size * heads_kv", a.pages, a.page_size, a.heads_kv);
    check_rows("batch * block_table_width * page_size", a.batch, a.block_table_width, a.page_size);
    check_layout({"block_table",
                  nullptr,
                  {{{"_stride", a.batch, a.block_table_stride}, {"", 1, 0}, {"", 1, 0}}},
                  a.block_table_width,
                  4,
                  Access::read});
    check_aligned("block_table", a.block_table, 4);
    return;
  }
  check_range("seqlen_k", a.seqlen_k, 0, kMaxRows);
  check_rows("kv_batch * seqlen_k * heads_kv", a.kv_batch, a.seqlen_k, a.heads_kv);
  if (a.kv_batch_idx != nullptr) {
    check_aligned("kv_batch_idx", a.kv_batch_idx, 4);
    return;
  }
  require(a.kv_batch >= a.batch, "kv_batch is ", a.kv_batch,
          ": without kv_batch_idx it must be at least batch, which is ", a.batch);
}

View rows_view(const char* name, const tilewise_tensor& t, const Append& a, int64_t rows,
               int64_t heads, bool varlen, int64_t columns, Access access) {
  return {name,
          t.data,
          {{{".stride_batch", varlen ? 1 : a.batch, t.stride_batch},
            {".stride_row", rows, t.stride_row},
            {".stride_head", heads, t.stride_head}}},
          columns,
          element_bytes(a.dtype),
          access};
}

View cache_view(const char* name, const tilewise_tensor& t, const Append& a, int64_t columns) {
  const bool paged = a.block_table != nullptr;
  return {name,
          t.data,
          {{{".stride_batch", paged ? a.pages : a.kv_batch, t.stride_batch},
            {".stride_row", paged ? a.page_size : a.seqlen_k, t.stride_row},
            {".stride_head", a.heads_kv, t.stride_head}}},
          columns,
          element_bytes(dtypes_of(a).kv),
          Access::write};
}

void check_tensors(const Append& a) {
  const auto needed = [](const View& view) {
    check_view(view, Presence::needed, Contents::pointers);
  };
  if (rotates_q(a)) {
    const bool varlen = a.cu_seqlens_q != nullptr;
    needed(rows_view("q", a.q, a, a.seqlen_q, a.heads_q, varlen, a.head_dim, Access::read));
    needed(
        rows_view("q_out", a.q_out, a, a.seqlen_q, a.heads_q, varlen, a.head_dim, Access::write));
    const bool same_strides = a.q.stride_row == a.q_out.stride_row &&
                              a.q.stride_head == a.q_out.stride_head &&
                              (varlen || a.q.stride_batch == a.q_out.stride_batch);
    require(
        a.q.data != a.q_out.data || same_strides,
        "q_out has the data of q but other strides: in place, only the same strides are allowed");
  }
  if (!appends(a)) return;
  const bool varlen = a.cu_seqlens_new != nullptr;
  needed(
      rows_view("k_new", a.k_new, a, a.seqlen_new, a.heads_kv, varlen, a.head_dim, Access::read));
  needed(
      rows_view("v_new", a.v_new, a, a.seqlen_new, a.heads_kv, varlen, a.head_dim_v, Access::read));
  needed(cache_view("k_cache", a.k_cache, a, a.head_dim));
  needed(cache_view("v_cache", a.v_cache, a, a.head_dim_v));
}

void check_rotary(const Append& a) {
  check_range("rotary_interleaved", a.rotary_interleaved, 0, 1);
  check_range("q_single_position", a.q_single_position, 0, 1);
  require((a.rotary_cos == nullptr) == (a.rotary_sin == nullptr), "rotary_",
          a.rotary_cos == nullptr ? "cos" : "sin", " is NULL and rotary_",
          a.rotary_cos == nullptr ? "sin" : "cos", " is given: give both or neither");
  if (a.rotary_cos == nullptr) return;
  check_range("rotary_rows", a.rotary_rows, 0, kMaxRows);
  require(a.rotary_dim >= 0 && a.rotary_dim % 2 == 0 && a.rotary_dim <= a.head_dim,
          "rotary_dim is ", a.rotary_dim, ": it must be an even number up to head_dim, which is ",
          a.head_dim);
  check_aligned("rotary_cos", a.rotary_cos, element_bytes(a.dtype));
  check_aligned("rotary_sin", a.rotary_sin, element_bytes(a.dtype));
}

int64_t rows_of(const int32_t* cu_seqlens, int64_t rows, int64_t b) {
  return cu_seqlens != nullptr ? cu_seqlens[b + 1] - cu_seqlens[b] : rows;
}

// The last position at which sequence b is rotated must have a row in the tables.
void check_positions(const Append& a, int64_t b, int64_t new_rows) {
  if (a.rotary_cos == nullptr) return;
  const int64_t q_rows = rotates_q(a) ? rows_of(a.cu_seqlens_q, a.seqlen_q, b) : 0;
  if (q_rows == 0 && new_rows == 0) return;
  const int64_t first = cpu::rotary_position(a, b);
  require(first >= 0, a.rotary_seqlens != nullptr ? "rotary_seqlens" : "leftpad_k",
          " places sequence ", b, " at position ", first, ": it must be 0 or more");
  const int64_t q_steps = a.q_single_position != 0 && q_rows > 0 ? 1 : q_rows;
  const int64_t last = first + max(q_steps, new_rows) - 1;
  require(last < a.rotary_rows, "rotary_rows is ", a.rotary_rows, ": sequence ", b,
          " is rotated up to position ", last, ", so it must be larger");
}

void check_index_pointers(const Append& a) {
  for (const auto& [name, pointer] : {std::pair{"cache_seqlens", a.cache_seqlens},
                                      {"cu_seqlens_q", a.cu_seqlens_q},
                                      {"cu_seqlens_new", a.cu_seqlens_new},
                                      {"rotary_seqlens", a.rotary_seqlens},
                                      {"leftpad_k", a.leftpad_k}}) {
    check_aligned(name, pointer, 4);
  }
  check_aligned("k_descale", a.k_descale, 4);
  check_aligned("v_descale", a.v_descale, 4);
}

// The new keys of a sequence in one page.
struct Written {
  int32_t page;
  Range rows;
  int64_t sequence;
  int64_t index;  // of the page in the sequence's row of block_table
};

void add_pages(std::vector<Written>& written, const Append& a, int64_t b, Range keys) {
  if (keys.empty()) return;
  for (int64_t i = keys.begin / a.page_size; i * a.page_size < keys.end; ++i) {
    const int64_t first = i * a.page_size;
    const Range rows = intersect(keys, {first, first + a.page_size});
    written.push_back({a.block_table[b * a.block_table_stride + i],
                       {rows.begin - first, rows.end - first},
                       b,
                       i});
  }
}

// Sequences may share pages, but no row of a page may be written twice.
void check_written_once(std::vector<Written>& written) {
  std::sort(written.begin(), written.end(), [](const Written& x, const Written& y) {
    return std::tie(x.page, x.rows.begin, x.sequence, x.index) <
           std::tie(y.page, y.rows.begin, y.sequence, y.index);
  });
  for (std::size_t i = 1; i < written.size(); ++i) {
    const Written& x = written[i - 1];
    const Written& y = written[i];
    require(x.page != y.page || x.rows.end <= y.rows.begin, "block_table[", y.sequence, ", ",
            y.index, "] is ", y.page, ", like block_table[", x.sequence, ", ", x.index,
            "], and both would hold a new key in row ", y.rows.begin,
            " of that page: every new key needs a row of its own");
  }
}

// Checks the entries of index arrays in CPU memory.
void check_entries(const Append& a) {
  if (a.kv_batch_idx != nullptr) {
    check_kv_batch_idx(a.kv_batch_idx, a.batch, a.kv_batch);
    if (appends(a)) check_distinct(a.kv_batch_idx, a.batch);
  }
  if (a.cu_seqlens_q != nullptr) {
    check_cu_seqlens("cu_seqlens_q", a.cu_seqlens_q, a.batch, a.seqlen_q, "seqlen_q");
  }
  if (a.cu_seqlens_new != nullptr) {
    check_cu_seqlens("cu_seqlens_new", a.cu_seqlens_new, a.batch, a.seqlen_new, "seqlen_new");
  }
  std::vector<Written> written;
  for (int64_t b = 0; b < a.batch; ++b) {
    const int64_t before = a.cache_seqlens != nullptr ? a.cache_seqlens[b] : 0;
    const int64_t rows = appends(a) ? rows_of(a.cu_seqlens_new, a.seqlen_new, b) : 0;
    if (before < 0 || before + rows > capacity(a)) {
      refuse(TILEWISE_INVALID_ARGUMENT, "cache_seqlens[", b, "] is ", before, ": ",
             cuda::cache_length_rule(rows, capacity(a)));
    }
    if (a.leftpad_k != nullptr) {
      require(a.leftpad_k[b] >= 0 && a.leftpad_k[b] <= before, "leftpad_k[", b, "] is ",
              a.leftpad_k[b], ": it must be 0 to cache_seqlens[", b, "], which is ", before);
    }
    if (a.block_table != nullptr) {
      check_pages(a.block_table, a.block_table_stride, b, {before, before + rows}, a.page_size,
                  a.pages);
      add_pages(written, a, b, {before, before + rows});
    }
    check_positions(a, b, rows);
  }
  check_written_once(written);
}

void check_float8(const Append& a) {
  check_range("kv_float8", a.kv_float8, 0, 1);
  require(a.kv_float8 == 0 || a.dtype != TILEWISE_FLOAT32, "kv_float8 is 1 with dtype ",
          dtype_name(a.dtype), ": float16 and bfloat16 are allowed");
  const bool is_float8 = dtypes_of(a).scales_kv();
  check_descale({"k_descale", a.k_descale, a.k_descale_stride_batch, a.k_descale_stride_head},
                is_float8, a.batch, a.heads_kv);
  check_descale({"v_descale", a.v_descale, a.v_descale_stride_batch, a.v_descale_stride_head},
                is_float8, a.batch, a.heads_kv);
}

}  // namespace

tilewise_kv_append validated_append(const tilewise_kv_append* given) {
  Append a = read_struct(given, "append");
  check_device(a.device, a.device_index);
  require(is_dtype(a.dtype), "dtype is ", a.dtype,
          ": it must be 0 (float32), 1 (float16), 2 (bfloat16) or 3 (float8_e4m3)");
  if (a.dtype == TILEWISE_FLOAT8_E4M3) {
    refuse(TILEWISE_UNSUPPORTED, "dtype is ", dtype_name(a.dtype),
           ": an append allows float32, float16 and bfloat16");
  }
  check_parallel(a.parallel);
  check_range("check", a.check, 0, 1);
  require((a.k_new.data == nullptr) == (a.v_new.data == nullptr), "k_new is ",
          a.k_new.data == nullptr ? "NULL" : "given", " and v_new is ",
          a.v_new.data == nullptr ? "NULL" : "given", ": give both or neither");
  check_sizes(a);
  check_cache(a);
  check_rotary(a);
  check_float8(a);
  check_tensors(a);
  check_index_pointers(a);
  if (a.device == TILEWISE_CPU) check_entries(a);
  return a;
}

void check_entries_of_gpu(const tilewise_kv_append& append) {
  Append a = append;
  std::vector<std::vector<int32_t>> copies;
  const auto fetch = [&](const int32_t*& entries, int64_t count) {
    if (entries == nullptr || count == 0) return;
    std::vector<int32_t>& copy = copies.emplace_back(count);
    cuda::read_entries(copy.data(), entries, count, a.device_index, a.stream);
    entries = copy.data();
  };
  fetch(a.cache_seqlens, a.batch);
  fetch(a.cu_seqlens_q, a.batch + 1);
  fetch(a.cu_seqlens_new, a.batch + 1);
  fetch(a.rotary_seqlens, a.batch);
  fetch(a.kv_batch_idx, a.batch);
  fetch(a.leftpad_k, a.batch);
  if (a.block_table !=
      nullptr) {  // row by row, because a stride may be negative or arbitrarily large
    const int64_t width = a.block_table_width;
    std::vector<int32_t>& copy = copies.emplace_back(a.batch * width);
    for (int64_t b = 0; b < a.batch && width > 0; ++b)
      cuda::read_entries(copy.data() + b * width, a.block_table + b * a.block_table_stride, width,
                         a.device_index, a.stream);
    a.block_table = copy.data();
    a.block_table_stride = width;
  }
  check_entries(a);
}

}  // namespace tilewise::capi
