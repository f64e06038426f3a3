// The launches that both passes and the cache share.
#include "cuda/launch.h"

#include <atomic>
#include <random>

#include "cuda/common/kernels.h"

namespace tilewise::cuda {
namespace {

using common::Fault;

// The sentences of capi/validate_entries.cpp for what the GPU has found.
std::string sentence(const common::CheckReport& r, const Problem& p) {
  const std::string index = "[" + std::to_string(r.index) + "] is " + std::to_string(r.value);
  const std::string allowed = std::to_string(r.allowed);
  const std::string sequence =
      ": sequence " + std::to_string(r.index) + " has " + std::to_string(r.value);
  const auto up_to = [&](const char* name, const char* what) {
    return name + index + ": allowed is 0 to " + allowed + ", " + what;
  };
  const auto order = [&](const char* name) {
    return name + index + ": not less than the entry before it, " + allowed + ", is allowed";
  };
  const auto last = [&](const char* name, const char* rows) {
    return name + index + ": at most " + rows + ", which is " + allowed + ", is allowed";
  };
  const auto bound = [&](const char* name, const char* what) {
    return name + (" is " + allowed) + sequence + what +
           "; allowed is 0 (not known) or an upper bound";
  };
  const auto extent = [&](const char* name, const char* what) {
    return name + (" is " + allowed) + sequence + what + ", at least that many are allowed";
  };
  switch (r.fault) {
    case Fault::none:
      return {};
    case Fault::cu_seqlens_q_first:
      return "cu_seqlens_q" + index + ": 0 is allowed";
    case Fault::cu_seqlens_q_order:
      return order("cu_seqlens_q");
    case Fault::cu_seqlens_q_last:
      return last("cu_seqlens_q", "seqlen_q");
    case Fault::seqused_q:
      return up_to("seqused_q", "the rows of that sequence");
    case Fault::max_seqlen_q:
      return bound("max_seqlen_q", " rows");
    case Fault::kv_batch_idx:
      return "kv_batch_idx" + index + ": from 0 and less than kv_batch, which is " + allowed +
             ", is allowed";
    case Fault::cu_seqlens_k_first:
      return "cu_seqlens_k" + index + ": 0 is allowed";
    case Fault::cu_seqlens_k_order:
      return order("cu_seqlens_k");
    case Fault::cu_seqlens_k_last:
      return last("cu_seqlens_k",
                  p.block_table != nullptr ? "batch * block_table_width * page_size" : "seqlen_k");
    case Fault::seqused_k:
      return up_to("seqused_k", "the keys of that sequence");
    case Fault::leftpad_k:
      return up_to("leftpad_k", "the keys of that sequence");
    case Fault::cu_seqlens_k_paged:
      return "cu_seqlens_k says that" + sequence.substr(1) +
             " keys: allowed is at most block_table_width * page_size, " + allowed;
    case Fault::max_seqlen_k:
      return bound("max_seqlen_k", " keys");
    case Fault::block_table:
      return "block_table[" + std::to_string(r.index) + ", " + std::to_string(r.second) + "] is " +
             std::to_string(r.value) + ": from 0 and less than pages, which is " + allowed +
             ", is allowed";
    case Fault::dbias_keys:
      return extent("dbias_keys", " keys");
    case Fault::dbias_rows:
      return extent("dbias_rows", " rows");
  }
  return "an index array holds an entry that is not allowed";
}

// Before anything of the check is launched: it would become a part of the graph.
void refuse_capture(Stream stream) {
  if (!is_captured(stream)) return;
  throw InvalidArgument(
      "check is 1 while the stream is being captured: it waits for the GPU, 0 is allowed");
}

}  // namespace

void check_entries(const Problem& p, const Gradients* g, void* report) {
  refuse_capture(p.stream);
  common::CheckParams params;
  params.problem = p;
  if (g != nullptr) params.gradients = *g;
  params.report = static_cast<common::CheckReport*>(report);
  launch(common::check_kernel(), common::kCheckBlocks, p.stream, params);
  common::CheckReport found{};
  read_back(&found, report, sizeof(found), p.stream);
  if (found.fault != Fault::none) throw InvalidArgument(sentence(found, p));
}

uint64_t number_of_launch() {
  static std::atomic<uint64_t> next{std::random_device{}() * uint64_t{0x9e3779b97f4a7c15}};
  return next.fetch_add(1, std::memory_order_relaxed);
}

bool prepare(common::PrepareParams& params, Stream stream) {
  const int64_t blocks = common::finish(params);
  launch(common::prepare_kernel(), blocks, stream, params);
  return blocks > 0;
}

int64_t second_blocks(const Flags& flags, const Tile& tile, int32_t device_index) {
  const int64_t at_once = int64_t{gpu(device_index).multiprocessors} * tile.blocks_per_sm;
  return min<int64_t>(flags.tiles, (at_once - 1) | 1);
}

void read_entries(int32_t* to, const int32_t* from, int64_t count, int32_t device_index,
                  void* stream) {
  const DeviceScope scope(device_index);
  refuse_capture(stream);
  read_back(to, from, count * static_cast<int64_t>(sizeof(int32_t)), stream);
}

void append_kv(const tilewise_kv_append& append) {
  const DeviceScope scope(append.device_index);
  common::AppendParams params;
  params.append = append;
  launch(common::tensor_kernels(append.dtype).append, common::append_blocks(append), append.stream,
         params);
}

}  // namespace tilewise::cuda
