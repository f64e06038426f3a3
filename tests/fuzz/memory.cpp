#include <algorithm>
#include <cstdio>
#include <cstring>

#include "call.h"

namespace fuzz {
namespace {

constexpr uint8_t kPoison = 0xfe;

}  // namespace

bool Memory::Block::poisoned(int64_t offset) const {
  const uint8_t* at = bytes.data() + zero + offset * element;
  return std::all_of(at, at + element, [](uint8_t b) { return b == kPoison; });
}

void* Memory::tensor(const std::array<int64_t, 3>& sizes, const std::array<int64_t, 3>& strides,
                     int64_t columns, int64_t element, Writer writer) {
  __int128 low = 0;
  __int128 high = columns;
  if (columns <= 0) return nullptr;
  for (std::size_t i = 0; i < 3; ++i) {
    if (sizes[i] <= 0) return nullptr;
    const __int128 reach = static_cast<__int128>(sizes[i] - 1) * strides[i];
    if (reach > kLimit || reach < -kLimit) {
      exceeded_ = true;
      return unmapped();
    }
    (reach < 0 ? low : high) += reach;
  }
  total_ += (high - low) * element;
  if (total_ > kLimit) {
    exceeded_ = true;
    return unmapped();
  }
  Block& block = blocks_.emplace_back();
  block.bytes.assign(static_cast<std::size_t>((high - low) * element), kPoison);
  block.zero = static_cast<int64_t>(-low) * element;
  block.sizes = sizes;
  block.strides = strides;
  block.columns = columns;
  block.element = element;
  block.writer = writer;
  return block.bytes.data() + block.zero;
}

void Memory::fill(void* data, int64_t element, uint8_t seed, bool wild) {
  if (data == nullptr || data == unmapped()) return;
  wild_ = wild_ || wild;
  std::vector<uint8_t>& bytes = blocks_.back().bytes;
  uint32_t state = seed * 2654435761u + 1;
  for (std::size_t i = 0; i + static_cast<std::size_t>(element) <= bytes.size();
       i += static_cast<std::size_t>(element)) {
    state = state * 1664525u + 1013904223u;
    if (element == 4) {
      const float number = static_cast<float>(static_cast<int32_t>(state)) * 0x1p-30f;
      std::memcpy(bytes.data() + i, wild ? static_cast<const void*>(&state) : &number, 4);
    } else if (element == 1) {  // an e4m3 number between 0.5 and 1
      bytes[i] = static_cast<uint8_t>(wild ? state >> 24 : ((state >> 24) & 0x87) | 0x30);
    } else {  // for either 16-bit type, a number between 2^-15 and 2
      const auto bits =
          static_cast<uint16_t>(wild ? state >> 16 : ((state >> 16) & 0x87ff) | 0x3800);
      std::memcpy(bytes.data() + i, &bits, 2);
    }
  }
}

bool Memory::untouched(Writer writer) const {
  return std::all_of(blocks_.begin(), blocks_.end(), [&](const Block& block) {
    return block.writer != writer || std::all_of(block.bytes.begin(), block.bytes.end(),
                                                 [](uint8_t b) { return b == kPoison; });
  });
}

bool Memory::complete(Writer writer) const {
  for (const Block& block : blocks_) {
    if (block.writer != writer) continue;
    int64_t missing = 0;
    int64_t elements = 0;
    for (int64_t i = 0; i < block.sizes[0]; ++i)
      for (int64_t j = 0; j < block.sizes[1]; ++j)
        for (int64_t k = 0; k < block.sizes[2]; ++k)
          for (int64_t c = 0; c < block.columns; ++c, ++elements)
            missing += block.poisoned(i * block.strides[0] + j * block.strides[1] +
                                      k * block.strides[2] + c);
    int64_t poison = 0;
    const auto all = static_cast<int64_t>(block.bytes.size()) / block.element;
    for (int64_t i = 0; i < all; ++i) poison += block.poisoned(i - block.zero / block.element);
    const int64_t stray = all - elements - (poison - missing);
    if (missing == 0 && stray == 0) continue;
    std::fprintf(stderr,
                 "[%lld, %lld, %lld, %lld] of %lld bytes, strides %lld, %lld, %lld: %lld missing, "
                 "%lld stray\n",
                 as_long(block.sizes[0]), as_long(block.sizes[1]), as_long(block.sizes[2]),
                 as_long(block.columns), as_long(block.element), as_long(block.strides[0]),
                 as_long(block.strides[1]), as_long(block.strides[2]), as_long(missing),
                 as_long(stray));
    return false;
  }
  return true;
}

}  // namespace fuzz
