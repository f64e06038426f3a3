#include "emulator/bulk.h"

#include <algorithm>
#include <cstring>

#include "emulator/block.h"
#include "emulator/device.h"

namespace tilewise::cuda::emulator {
namespace {

constexpr uint64_t kEncoded = 0x6569776c6974616d;  // marks an encoded map, in its last word
constexpr int kRowBytes = kTensorMapBoxBytes;
constexpr int kChunkBytes = 16;

struct Box {
  TensorMapShape shape;
  uint32_t shared;
  int64_t column, row, head, batch;

  int bytes() const { return shape.box_rows * kRowBytes; }
};

bool aligned(const void* p, uintptr_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

Box box_of(const TensorMap& map, uint32_t shared, int column, int row, int head, int batch,
           const char* what) {
  constexpr int kSharedAlignment = 128;
  if (!aligned(&map, alignof(TensorMap)) || map.opaque[15] != kEncoded) {
    fault(text("%s: no tensor map at %p", what, static_cast<const void*>(&map)));
  }
  Box box{{}, shared, column, row, head, batch};
  std::memcpy(&box.shape, map.opaque, sizeof(box.shape));
  if (shared % kSharedAlignment != 0) {
    fault(text("%s at byte %d of shared memory: not 128-byte aligned", what,
               static_cast<int>(shared - SharedMemory::kFirstAddress)));
  }
  return box;
}

// Visits each 16 bytes of the box: their places in shared and in global memory, and how many of the
// bytes exist in global memory.
template <class Visit>
void for_each_chunk(const Box& box, Visit visit) {
  const TensorMapShape& s = box.shape;
  const int element_bytes = s.element_bytes;
  const int chunk_elements = kChunkBytes / element_bytes;
  const auto inside = [](int64_t i, int64_t size) { return i >= 0 && i < size; };
  const bool head_exists = inside(box.head, s.heads) && inside(box.batch, s.batches);
  const char* head = static_cast<const char*>(s.data) +
                     (box.head * s.stride_head + box.batch * s.stride_batch) * element_bytes;
  for (int row = 0; row < s.box_rows; ++row) {
    const bool row_exists = head_exists && inside(box.row + row, s.rows);
    const char* start = head + (box.row + row) * s.stride_row * element_bytes;
    const uint32_t line = box.shared + static_cast<uint32_t>(row * kRowBytes);
    for (int chunk = 0; chunk < kRowBytes / kChunkBytes; ++chunk) {
      const int64_t column = box.column + chunk * chunk_elements;
      const uint32_t at = line + static_cast<uint32_t>(chunk * kChunkBytes);
      const int64_t first = row_exists ? std::clamp<int64_t>(-column, 0, chunk_elements) : 0;
      const int64_t end =
          row_exists ? std::clamp<int64_t>(s.columns - column, first, chunk_elements) : first;
      visit(at ^ (at >> 3 & 0x70), start + column * element_bytes,
            static_cast<size_t>(first * element_bytes), static_cast<size_t>(end * element_bytes));
    }
  }
}

void check_bulk(uint32_t shared, const void* global, int bytes, const char* what) {
  if (bytes <= 0 || bytes % kChunkBytes != 0 || shared % kChunkBytes != 0 ||
      !aligned(global, kChunkBytes)) {
    fault(
        text("%s of %d bytes between global address %p and byte %d of shared memory: all three "
             "must be multiples of 16",
             what, bytes, global, static_cast<int>(shared - SharedMemory::kFirstAddress)));
  }
}

void start_load(uint32_t to, int bytes, uint32_t barrier, const char* what,
                std::function<void()> land) {
  Block& b = block();
  b.shared().start_async_write(to, bytes, what, b.moment());
  b.counts().bulk_bytes += bytes;
  b.barriers().start_write(barrier, {to, bytes, std::move(land)});
}

}  // namespace

void encode_tensor_map(TensorMap& map, const TensorMapShape& s) {
  const auto refuse = [](const std::string& why) { throw Fault("tensor map: " + why); };
  constexpr int64_t kMaxSize = int64_t{1} << 32;
  constexpr int64_t kMaxStride = int64_t{1} << 40;
  if (s.data == nullptr || !aligned(s.data, kTensorMapAlignment)) {
    refuse(text("address %p is not a multiple of 16", s.data));
  }
  for (const int64_t size : {s.columns, s.rows, s.heads, s.batches}) {
    if (size < 1 || size > kMaxSize) {
      refuse(text("size %lld: it must be 1 to 2^32", static_cast<long long>(size)));
    }
  }
  const auto check_stride = [&](int64_t size, int64_t stride) {
    const int64_t bytes = stride * s.element_bytes;
    if (size > 1 && (bytes < 0 || bytes >= kMaxStride || bytes % kTensorMapAlignment != 0)) {
      refuse(text("a stride of %lld bytes: it must be a multiple of 16 below 2^40",
                  static_cast<long long>(bytes)));
    }
  };
  check_stride(s.rows, s.stride_row);
  check_stride(s.heads, s.stride_head);
  check_stride(s.batches, s.stride_batch);
  if (s.box_rows < 1 || s.box_rows > kTensorMapMaxBoxRows) {
    refuse(text("a box of %d rows: it must be 1 to %d", s.box_rows, kTensorMapMaxBoxRows));
  }
  static_assert(sizeof(s) <= sizeof(map.opaque) - sizeof(kEncoded));
  map = {};
  std::memcpy(map.opaque, &s, sizeof(s));
  map.opaque[15] = kEncoded;
}

void BulkCopies::start(uint32_t from, int bytes, const char* what, std::function<void()> land) {
  Block& b = block();
  b.shared().start_async_read(from, bytes, what, b.moment());
  b.counts().bulk_bytes += bytes;
  Copy copy{from, bytes, what, std::move(land)};
  if (b.options().early_copies) {
    copy.land();
    copy.land = nullptr;
  }
  in_flight_.push_back(std::move(copy));
  ++open_;
}

void BulkCopies::commit() {
  groups_.push_back(open_);
  open_ = 0;
}

void BulkCopies::wait_read(int pending) {
  Block& b = block();
  for (; static_cast<int>(groups_.size()) - read_ > pending; ++read_) {
    for (int i = 0; i < groups_[static_cast<size_t>(read_)]; ++i) {
      const Copy& copy = in_flight_.front();
      if (copy.land) copy.land();
      b.shared().finish_async_read(copy.from, copy.bytes, copy.what, b.moment());
      in_flight_.pop_front();
    }
  }
}

void BulkCopies::wait(int pending) {
  wait_read(pending);
  for (; static_cast<int>(groups_.size()) > pending; --read_) groups_.pop_front();
}

void BulkCopies::check_release() const {
  if (groups_.empty() && open_ == 0) return;
  fault(
      "st_release while bulk copies of the thread may still be writing: "
      "cp_async_bulk_wait_group_read does not wait for that");
}

void BulkCopies::check_exit() const {
  if (in_flight_.empty()) return;
  fault(text("the thread exits while %s from byte %u of shared memory is in flight",
             in_flight_.front().what, in_flight_.front().from - SharedMemory::kFirstAddress));
}

// --- the instructions ----------------------------------------------------------------------------

void cp_async_bulk_tensor_load(uint32_t to, const TensorMap& map, int column, int row, int head,
                               int batch, uint32_t barrier) {
  constexpr const char* kWhat = "cp.async.bulk.tensor load";
  const Box box = box_of(map, to, column, row, head, batch, kWhat);
  start_load(to, box.bytes(), barrier, kWhat, [box, &shared = block().shared()] {
    for_each_chunk(box, [&shared](uint32_t at, const char* from, size_t first, size_t end) {
      char* chunk = shared.at(at);
      std::memset(chunk, 0, kChunkBytes);
      if (end > first) std::memcpy(chunk + first, from + first, end - first);
    });
  });
}

void cp_async_bulk_tensor_store(const TensorMap& map, int column, int row, int head, int batch,
                                uint32_t from) {
  constexpr const char* kWhat = "cp.async.bulk.tensor store";
  const Box box = box_of(map, from, column, row, head, batch, kWhat);
  block().bulk_copies().start(from, box.bytes(), kWhat, [box] {
    for_each_chunk(box, [](uint32_t at, const char* to, size_t first, size_t end) {
      if (end <= first) return;
      std::memcpy(const_cast<char*>(to) + first, block().shared().at(at) + first, end - first);
    });
  });
}

void cp_async_bulk_load(uint32_t to, const void* from, int bytes, uint32_t barrier) {
  constexpr const char* kWhat = "cp.async.bulk load";
  check_bulk(to, from, bytes, kWhat);
  start_load(to, bytes, barrier, kWhat, [to, from, bytes, &shared = block().shared()] {
    std::memcpy(shared.at(to), from, static_cast<size_t>(bytes));
  });
}

void cp_reduce_async_bulk_add_f32(float* to, uint32_t from, int bytes) {
  constexpr const char* kWhat = "cp.reduce.async.bulk";
  check_bulk(from, to, bytes, kWhat);
  block().bulk_copies().start(from, bytes, kWhat, [to, from, bytes] {
    const auto* terms = reinterpret_cast<const float*>(block().shared().at(from));
    for (int i = 0; i < bytes / 4; ++i) to[i] += terms[i];
  });
}

void cp_async_bulk_commit_group() { block().bulk_copies().commit(); }
void cp_async_bulk_wait_group_read(int pending) { block().bulk_copies().wait_read(pending); }
void cp_async_bulk_wait_group(int pending) { block().bulk_copies().wait(pending); }

}  // namespace tilewise::cuda::emulator
