// Every field of tilewise_mask with invalid values, and every column of its entries: forward and
// backward refuse them with an error message, and nothing is written.
#include "capi_support.h"

namespace capi_test {
namespace {

// A call with a valid mask: of ranges, or of blocks per sequence and head.
struct MaskedCall {
  Call c;
  std::vector<int32_t> first = {0, 1, 3};
  std::vector<int32_t> entries = {0, 5, 0, 7, 1, 0, 2, 0, 7, 0, 2, 5, 3, 7, 3};
  std::vector<uint32_t> bits = std::vector<uint32_t>(128 * 4 + 1, 0x55555555u);
  tilewise_mask m{};

  MaskedCall() {
    m.struct_size = sizeof(m);
    m.kind = TILEWISE_MASK_RANGES;
    m.batch = Call::B;
    m.heads = 1;
    m.entry_count = 3;
    point();
  }
  void use_blocks() {
    m.kind = TILEWISE_MASK_BLOCKS;
    m.heads = Call::Hq;
    m.rows = 200;
    m.keys = 300;
    first.assign(Call::B * Call::Hq * 2 + 1, 3);
    first[0] = 0;
    entries = {0, 1, 0, 1, 2, -1, 2, 3, 0};
    m.bit_blocks = 1;
    point();
  }
  void point() {
    m.first = first.data();
    m.entries = entries.data();
    m.bits = bits.data();
    c.a.mask = &m;
  }
};

template <class T>
const T* misaligned(const std::vector<T>& values) {
  return reinterpret_cast<const T*>(reinterpret_cast<const char*>(values.data()) + 2);
}

using Bad = BadInput<MaskedCall>;
class BadMask : public testing::TestWithParam<Bad> {};

TEST_P(BadMask, IsRefused) {
  for (const bool backward : {false, true}) {
    MaskedCall call;
    GetParam().corrupt(call);
    EXPECT_EQ(backward ? call.c.backward() : call.c.forward(), TILEWISE_INVALID_ARGUMENT);
    expect_message(GetParam().message);
    EXPECT_TRUE(call.c.untouched());
  }
}

const Bad kBad[] = {
    {"struct_size", [](MaskedCall& c) { c.m.struct_size = 72; }, "mask.struct_size is 72"},
    {"kind", [](MaskedCall& c) { c.m.kind = 3; },
     "mask.kind is 3: it must be 1 (ranges) or 2 (blocks)"},
    {"batch", [](MaskedCall& c) { c.m.batch = 3; },
     "mask.batch is 3: it must be 1 (the same for every sequence) or batch, which is 2"},
    {"heads_of_ranges", [](MaskedCall& c) { c.m.heads = 4; },
     "mask.heads is 4: it must be 1 for ranges"},
    {"heads",
     [](MaskedCall& c) {
       c.use_blocks();
       c.m.heads = 2;
     },
     "mask.heads is 2: it must be 1 (the same for every head) or heads_q, which is 4"},
    {"rows",
     [](MaskedCall& c) {
       c.use_blocks();
       c.m.rows = -1;
     },
     "mask.rows is -1: it must be 0 to"},
    {"keys",
     [](MaskedCall& c) {
       c.use_blocks();
       c.m.keys = int64_t{1} << 31;
     },
     "mask.keys is 2147483648: it must be 0 to"},
    {"bit_blocks",
     [](MaskedCall& c) {
       c.use_blocks();
       c.m.bit_blocks = -1;
     },
     "mask.bit_blocks is -1: it must be 0 to"},
    {"entry_count", [](MaskedCall& c) { c.m.entry_count = -1; },
     "mask.entry_count is -1: it must be 0 to"},
    {"entry_count_small", [](MaskedCall& c) { c.m.entry_count = 2; },
     "mask.first[2] is 3: it must be at most mask.entry_count, which is 2"},
    {"first_null", [](MaskedCall& c) { c.m.first = nullptr; }, "mask.first is NULL"},
    {"first_misaligned", [](MaskedCall& c) { c.m.first = misaligned(c.first); }, "mask.first"},
    {"entries_null", [](MaskedCall& c) { c.m.entries = nullptr; }, "mask.entries is NULL"},
    {"bits_null",
     [](MaskedCall& c) {
       c.use_blocks();
       c.m.bits = nullptr;
     },
     "mask.bits is NULL"},
    {"first_start", [](MaskedCall& c) { c.first[0] = 1; }, "mask.first[0] is 1: it must be 0"},
    {"first_falls", [](MaskedCall& c) { c.first[1] = 4; }, "mask.first[2] is 3: it must not be"},
    {"row_begin", [](MaskedCall& c) { c.entries[0] = -1; },
     "mask.entries[0, 0] is -1: row_begin must be 0 to 2147483647"},
    {"row_end", [](MaskedCall& c) { c.entries[11] = 1; },
     "mask.entries[2, 1] is 1: row_end must be 2 to 2147483647"},
    {"key_begin", [](MaskedCall& c) { c.entries[7] = -5; },
     "mask.entries[1, 2] is -5: key_begin must be"},
    {"key_end", [](MaskedCall& c) { c.entries[13] = 2; },
     "mask.entries[2, 3] is 2: key_end must be 3 to"},
    {"range_kind", [](MaskedCall& c) { c.entries[4] = 4; },
     "mask.entries[0, 4] is 4: kind must be 0 to 3"},
    {"block_begin",
     [](MaskedCall& c) {
       c.use_blocks();
       c.entries[3] = 0;
     },
     "mask.entries[1, 0] is 0: block_begin must be 1 to 3"},
    {"block_end",
     [](MaskedCall& c) {
       c.use_blocks();
       c.entries[4] = 4;
     },
     "mask.entries[1, 1] is 4: block_end must be 2 to 3"},
    {"block_end_of_bits",
     [](MaskedCall& c) {
       c.use_blocks();
       c.entries[1] = 2;
     },
     "mask.entries[0, 1] is 2: block_end must be 1 to 1"},
    {"bits",
     [](MaskedCall& c) {
       c.use_blocks();
       c.entries[8] = 1;
     },
     "mask.entries[2, 2] is 1: bits must be"},
};
INSTANTIATE_TEST_SUITE_P(, BadMask, testing::ValuesIn(kBad), bad_input_name<MaskedCall>);

TEST(Mask, ValidOnesAreComputed) {
  MaskedCall ranges;
  EXPECT_EQ(ranges.c.forward(), TILEWISE_OK) << tilewise_last_error();
  EXPECT_EQ(ranges.c.backward(), TILEWISE_OK) << tilewise_last_error();
  MaskedCall blocks;
  blocks.use_blocks();
  EXPECT_EQ(blocks.c.forward(), TILEWISE_OK) << tilewise_last_error();
}

TEST(Mask, UnknownOptionIsRefused) {
  MaskedCall call;
  std::vector<unsigned char> newer(sizeof(tilewise_mask) + 8, 0);
  call.m.struct_size = static_cast<uint32_t>(newer.size());
  std::memcpy(newer.data(), &call.m, sizeof(call.m));
  newer[sizeof(tilewise_mask)] = 1;
  call.c.a.mask = reinterpret_cast<const tilewise_mask*>(newer.data());
  EXPECT_EQ(call.c.forward(), TILEWISE_INVALID_ARGUMENT);
  expect_message("mask uses an option that this version does not know: byte 80");
}

}  // namespace
}  // namespace capi_test
