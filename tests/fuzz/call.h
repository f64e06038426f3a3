// Turns the bytes of a fuzzer into calls of the C ABI whose memory is exactly as large as their
// structs say.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <initializer_list>
#include <vector>

#include "attention/dtypes.h"
#include "tilewise/tilewise.h"

namespace fuzz {

// Wraps around, because products of sizes that no library may accept must still be defined.
inline int64_t times(int64_t x, int64_t y) {
  return static_cast<int64_t>(static_cast<uint64_t>(x) * static_cast<uint64_t>(y));
}

// For %lld of printf.
inline long long as_long(int64_t x) { return x; }

// Reads values out of the input. Past the end everything is 0, and 0 always selects the simplest
// choice: the empty input is a small valid call, and every changed byte moves away from it.
class Reader {
 public:
  Reader(const uint8_t* data, std::size_t size) : data_(data), end_(data + size) {}
  uint8_t byte() { return data_ < end_ ? *data_++ : uint8_t{0}; }
  bool one_in(int n) { return byte() % n == n - 1; }
  int64_t bits64() {
    uint64_t bits = 0;
    for (int i = 0; i < 8; ++i) bits = bits << 8 | byte();
    return static_cast<int64_t>(bits);
  }
  // One of the choices, or rarely any 64-bit number.
  int64_t pick(std::initializer_list<int64_t> choices) {
    const uint8_t b = byte();
    return b == 255 ? bits64() : choices.begin()[b % choices.size()];
  }
  int32_t pick32(std::initializer_list<int64_t> choices) {
    return static_cast<int32_t>(pick(choices));
  }

 private:
  const uint8_t* data_;
  const uint8_t* end_;
};

// The pass that writes a block: none, the forward (or the append), or the backward.
enum class Writer { none, forward, backward };

// Heap blocks that end with the last element, so that AddressSanitizer detects an access past it.
// Outputs start as poison, which reveals missing and stray writes.
class Memory {
 public:
  // A call with more bytes than this in total is only planned, not run.
  static constexpr __int128 kLimit = 1 << 22;
  // An aligned address that is never mapped: an access through it crashes the run.
  static void* unmapped() { return reinterpret_cast<void*>(uintptr_t{4096}); }

  // Address of element 0 of a tensor with these sizes and strides and `columns` contiguous
  // elements; null if it has no elements, and an unmapped address if it is too large.
  void* tensor(const std::array<int64_t, 3>& sizes, const std::array<int64_t, 3>& strides,
               int64_t columns, int64_t element, Writer writer);
  template <class T>
  T* array(int64_t count, Writer writer = Writer::none) {
    return static_cast<T*>(tensor({1, 1, 1}, {0, 0, 0}, count, sizeof(T), writer));
  }
  // Fills an input with small numbers or, if `wild`, with arbitrary bit patterns.
  void fill(void* data, int64_t element, uint8_t seed, bool wild);

  bool exceeded() const { return exceeded_; }
  bool wild() const { return wild_; }
  bool untouched(Writer writer) const;
  // Whether every element was written and nothing between the elements was.
  bool complete(Writer writer) const;

 private:
  struct Block {
    std::vector<uint8_t> bytes;
    int64_t zero;  // byte offset of element 0
    std::array<int64_t, 3> sizes;
    std::array<int64_t, 3> strides;
    int64_t columns;
    int64_t element;
    Writer writer;

    bool poisoned(int64_t offset) const;
  };
  std::deque<Block> blocks_;
  __int128 total_ = 0;
  bool exceeded_ = false;
  bool wild_ = false;
};

// Runs tasks one after the other, from the last to the first.
void backwards_parallel_for(void* user, int64_t tasks, tilewise_task task, void* context);

struct AttentionCall {
  Memory memory;
  tilewise_parallel parallel{};
  tilewise_attention a{};
  tilewise_gradients g{};

  explicit AttentionCall(Reader& in);
  // Whether memory and multiply-adds are small enough to run the call.
  bool runnable() const;
  // Prints the call, for reports of failures.
  void print() const;

 private:
  void read_sizes(Reader& in);
  void read_lengths(Reader& in);
  void read_cache(Reader& in);
  void read_tensors(Reader& in);
  void read_options(Reader& in);
  void read_gradients(Reader& in);
  int64_t element() const { return tilewise::element_bytes(a.dtype); }
  tilewise_tensor rows(Reader& in, int64_t columns, Writer writer);
  tilewise_tensor keys(Reader& in, int64_t columns, Writer writer);
  const float* floats(Reader& in, int64_t count);
};

struct AppendCall {
  Memory memory;
  tilewise_parallel parallel{};
  tilewise_kv_append a{};

  explicit AppendCall(Reader& in);
  bool runnable() const;

 private:
  void read_arrays(Reader& in);
  void read_tensors(Reader& in);
};

// A view of [batch, row, head, column]: packed, heads first, with gaps, broadcast or with any
// stride.
tilewise_tensor read_view(Reader& in, Memory& memory, std::array<int64_t, 3> sizes, int64_t columns,
                          int64_t element, Writer writer);
// `count` integers that ascend from `first` by `step`, with occasional deviations.
int32_t* read_indices(Reader& in, Memory& memory, int64_t count, int64_t first, int64_t step);

}  // namespace fuzz
