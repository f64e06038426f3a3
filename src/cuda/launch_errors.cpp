// Error sentences for faults of index arrays, and the record in which kernels leave the first
// fault.
#include <array>
#include <atomic>

#include "cuda/backend.h"
#include "cuda/common/kernels.h"
#include "cuda/index_errors.h"

namespace tilewise::cuda {
namespace {

// The fault that a kernel recorded. If the record has only a sequence, the sequence is checked
// again with the entries of the index arrays that the kernel read.
IndexFault recorded_fault(IndexRecord& record) {
  if (record.fault.any()) return record.fault;
  Problem p = record.problem;
  const int64_t b = record.sequence;
  const auto use_copy = [&](const int32_t*& array, IndexRecord::Entry at) {
    if (array != nullptr) array = record.entries + at - b;
  };
  use_copy(p.cu_seqlens_q, IndexRecord::cu_q);
  use_copy(p.cu_seqlens_k, IndexRecord::cu_k);
  use_copy(p.seqused_q, IndexRecord::used_q);
  use_copy(p.seqused_k, IndexRecord::used_k);
  use_copy(p.leftpad_k, IndexRecord::leftpad);
  use_copy(p.kv_batch_idx, IndexRecord::kv_batch);
  const IndexFault of_sequence = sequence_fault(p, b);
  if (of_sequence.any() || record.page_entry < 0) return of_sequence;
  return {Fault::block_table, 0, b, record.page_entry, record.page, p.pages};
}

std::string entry(const IndexFault& r) {
  std::string text = "[";
  return text.append(std::to_string(r.index)).append("] is ").append(std::to_string(r.value));
}

// Sentences of rules that several arrays share.
std::string decreases(const char* name, const IndexFault& r) {
  return name + entry(r) + ": it must not be less than the entry before it, " +
         std::to_string(r.allowed);
}
std::string exceeds(const char* name, const IndexFault& r, const char* rows) {
  return name + entry(r) + ": it must be at most " + rows + ", which is " +
         std::to_string(r.allowed);
}

// The end of a sentence about an entry that must lie between 0 and `highest`, the number of rows or
// keys (`noun`) of its sequence.
std::string range_rule(int64_t highest, const char* noun) {
  if (highest == 0) return std::string("it must be 0, because that sequence has no ") + noun;
  return "it must be 0 to " + std::to_string(highest) + ", the " + noun + " of that sequence";
}

// The same sentences as in capi/validate_append.cpp.
std::string sentence_of_append(const IndexFault& r) {
  const std::string index = entry(r);
  const std::string allowed = std::to_string(r.allowed);
  switch (r.fault) {
    case Fault::cu_seqlens_new_first:
      return "cu_seqlens_new" + index + ": it must be 0";
    case Fault::cu_seqlens_new_negative:
      return "cu_seqlens_new" + index + ": it must be 0 or more";
    case Fault::cu_seqlens_new_order:
      return decreases("cu_seqlens_new", r);
    case Fault::cu_seqlens_new_last:
      return exceeds("cu_seqlens_new", r, "seqlen_new");
    case Fault::cache_seqlens:
      return "cache_seqlens" + index + ": " + cache_length_rule(r.second, r.allowed);
    case Fault::leftpad_of_cache:
      return "leftpad_k" + index + ": it must be 0 to cache_seqlens[" + std::to_string(r.index) +
             "], which is " + allowed;
    case Fault::rotary_start:
      return (r.second != 0 ? "rotary_seqlens" : "leftpad_k") + std::string(" places sequence ") +
             std::to_string(r.index) + " at position " + std::to_string(r.value) +
             ": it must be 0 or more";
    case Fault::rotary_rows:
      return "rotary_rows is " + allowed + ": sequence " + std::to_string(r.index) +
             " is rotated up to position " + std::to_string(r.value) + ", so it must be larger";
    default:
      return "an index array holds an entry that is not allowed";
  }
}

}  // namespace

std::string cache_length_rule(int64_t rows, int64_t capacity) {
  const std::string keys = std::to_string(rows) + " new keys";
  const std::string cache = "a cache for " + std::to_string(capacity) + " keys";
  if (rows > capacity) return "no value is valid, because " + keys + " do not fit into " + cache;
  if (rows == capacity) return "with " + keys + " it must be 0 in " + cache;
  return "with " + keys + ", 0 to " + std::to_string(capacity - rows) + " is allowed in " + cache;
}

// Those about whole arrays (cu_seqlens, pages) are also in capi/validate_entries.cpp.
std::string sentence(const IndexFault& r) {
  const std::string index = entry(r);
  const std::string allowed = std::to_string(r.allowed);
  const std::string sequence =
      ": sequence " + std::to_string(r.index) + " has " + std::to_string(r.value);
  const auto up_to = [&](const char* name, const char* noun) {
    return name + index + ": " + range_rule(r.allowed, noun);
  };
  const auto bound = [&](const char* name, const char* what) {
    return name + (" is " + allowed) + sequence + what +
           "; it must be 0 (not known) or an upper bound";
  };
  const auto extent = [&](const char* name, const char* what) {
    return name + (" is " + allowed) + sequence + what + ", so it must be at least that";
  };
  switch (r.fault) {
    case Fault::none:
      return {};
    case Fault::cu_seqlens_q_first:
      return "cu_seqlens_q" + index + ": it must be 0";
    case Fault::cu_seqlens_q_negative:
      return "cu_seqlens_q" + index + ": it must be 0 or more";
    case Fault::cu_seqlens_q_order:
      return decreases("cu_seqlens_q", r);
    case Fault::cu_seqlens_q_last:
      return exceeds("cu_seqlens_q", r, "seqlen_q");
    case Fault::seqused_q:
      return up_to("seqused_q", "rows");
    case Fault::max_seqlen_q:
      return bound("max_seqlen_q", " rows");
    case Fault::kv_batch_idx:
      return "kv_batch_idx" + index + ": it must be at least 0 and less than kv_batch, which is " +
             allowed;
    case Fault::cu_seqlens_k_first:
      return "cu_seqlens_k" + index + ": it must be 0";
    case Fault::cu_seqlens_k_negative:
      return "cu_seqlens_k" + index + ": it must be 0 or more";
    case Fault::cu_seqlens_k_order:
      return decreases("cu_seqlens_k", r);
    case Fault::cu_seqlens_k_last:
      return exceeds("cu_seqlens_k", r, "seqlen_k");
    case Fault::cu_seqlens_k_last_paged:
      return exceeds("cu_seqlens_k", r, "batch * block_table_width * page_size");
    case Fault::seqused_k:
      return up_to("seqused_k", "keys");
    case Fault::leftpad_k:
      return up_to("leftpad_k", "keys");
    case Fault::cu_seqlens_k_paged:
      return "cu_seqlens_k says that" + sequence.substr(1) +
             " keys: it can have at most block_table_width * page_size, which is " + allowed;
    case Fault::max_seqlen_k:
      return bound("max_seqlen_k", " keys");
    case Fault::block_table:
      return "block_table[" + std::to_string(r.index) + ", " + std::to_string(r.second) + "] is " +
             std::to_string(r.value) + ": it must be at least 0 and less than pages, which is " +
             allowed;
    case Fault::dbias_keys:
      return extent("dbias_keys", " keys");
    case Fault::dbias_rows:
      return extent("dbias_rows", " rows");
    default:
      return sentence_of_append(r);
  }
}

IndexRecord* index_record(int32_t device_index) {
  constexpr std::size_t kDevices = 64;
  static std::array<std::atomic<IndexRecord*>, kDevices> records{};
  const auto at = static_cast<std::size_t>(device_index);
  IndexRecord* record = at < kDevices ? records[at].load(std::memory_order_acquire) : nullptr;
  if (record != nullptr) return record;
  const DeviceScope scope(device_index);
  record = static_cast<IndexRecord*>(address_on_device(common::index_record_symbol()));
  if (at < kDevices) records[at].store(record, std::memory_order_release);
  return record;
}

IndexError last_index_error(int32_t device_index, IndexFault* fault) {
  const DeviceScope scope(device_index);
  IndexRecord record{};
  read_and_clear(&record, index_record(device_index), sizeof(record));
  *fault = record.state != 0 ? recorded_fault(record) : IndexFault{};
  if (!fault->any()) return {};
  // Every sentence begins with the name of the array or of the bound.
  const std::string text = sentence(*fault);
  return {text.substr(0, text.find_first_of("[ ")), text};
}

}  // namespace tilewise::cuda
