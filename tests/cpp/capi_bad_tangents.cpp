// Every field of tilewise_tangents with invalid values, and what jvp and second refuse.
#include "capi_support.h"

namespace capi_test {
namespace {

constexpr int64_t kHuge = int64_t{1} << 60;

// A call with every tangent.
struct TangentCall : Call {
  Output out_tangent{B * Sq * Hq * Dv}, lse_tangent{B * Hq * Sq};
  float number = 0.5f;
  bool give_tangents = true;
  tilewise_tangents t{};

  TangentCall() {
    use_bias();
    use_sinks();
    t.struct_size = sizeof(t);
    t.q = a.q;
    t.k = a.k;
    t.v = a.v;
    t.out = {out_tangent.data(), Sq * Hq * Dv, Hq * Dv, Dv};
    t.lse = lse_tangent.data();
    t.lse_stride_batch = Hq * Sq;
    t.lse_stride_head = Sq;
    t.bias = a.bias;
    t.bias_stride_batch = a.bias_stride_batch;
    t.bias_stride_head = a.bias_stride_head;
    t.bias_stride_row = a.bias_stride_row;
    t.sinks = a.sinks;
    t.scale = &number;
    t.dout = g.dout;
    t.dlse = dlse_values.data();
    t.dlse_stride_batch = Hq * Sq;
    t.dlse_stride_head = Sq;
  }
  const tilewise_tangents* tangents() const { return give_tangents ? &t : nullptr; }
  tilewise_status jvp() { return tilewise_jvp(&a, tangents(), workspace_data, workspace_bytes); }
  tilewise_status second() {
    return tilewise_second(&a, tangents(), give_gradients ? &g : nullptr, workspace_data,
                           workspace_bytes);
  }
  tilewise_status plan_tangents(int32_t pass, tilewise_plan_info* info) const {
    const bool with_gradients = pass == TILEWISE_PASS_SECOND && give_gradients;
    return tilewise_plan_tangents(&a, tangents(), with_gradients ? &g : nullptr, pass, info);
  }
  bool untouched() const {
    return Call::untouched() && out_tangent.untouched() && lse_tangent.untouched();
  }
};

using Bad = BadInput<TangentCall>;
class BadTangents : public testing::TestWithParam<Bad> {};

// Second reads everything that jvp reads or writes, so it gives all of these sentences.
TEST_P(BadTangents, IsRefusedBySecond) {
  TangentCall call;
  GetParam().corrupt(call);
  EXPECT_EQ(call.second(), TILEWISE_INVALID_ARGUMENT);
  expect_message(GetParam().message);
  EXPECT_TRUE(call.untouched());
}

const Bad kBad[] = {
    {"null", [](TangentCall& c) { c.give_tangents = false; }, "tangents is NULL"},
    {"struct_size", [](TangentCall& c) { c.t.struct_size = 4; }, "tangents.struct_size is 4"},
    {"reserved", [](TangentCall& c) { c.t.reserved = 1; }, "tangents.reserved is 1"},
    {"q", [](TangentCall& c) { c.t.q.stride_row = kHuge; }, "tangents.q.stride_row is 115292"},
    {"k", [](TangentCall& c) { c.t.k.data = misaligned(c.k.data()); }, "tangents.k is 0x"},
    {"v", [](TangentCall& c) { c.t.v.stride_head = kHuge; }, "tangents.v.stride_head is 115292"},
    {"out", [](TangentCall& c) { c.t.out.data = nullptr; }, "tangents.out is NULL"},
    {"lse", [](TangentCall& c) { c.t.lse = nullptr; }, "tangents.lse is NULL"},
    {"lse_batch", [](TangentCall& c) { c.t.lse_stride_batch = kHuge; },
     "tangents.lse_stride_batch is 115292"},
    {"lse_head", [](TangentCall& c) { c.t.lse_stride_head = kHuge; },
     "tangents.lse_stride_head is 115292"},
    {"bias",
     [](TangentCall& c) {
       c.t.bias = c.bias.data();
       c.a.bias = nullptr;
       c.g.dbias = nullptr;
     },
     "tangents.bias is given, but bias is NULL"},
    {"bias_batch", [](TangentCall& c) { c.t.bias_stride_batch = 2 * kHuge; },
     "tangents.bias_stride_batch is 230584"},
    {"bias_head", [](TangentCall& c) { c.t.bias_stride_head = kHuge; },
     "tangents.bias_stride_head is 115292"},
    {"bias_row", [](TangentCall& c) { c.t.bias_stride_row = kHuge; },
     "tangents.bias_stride_row is 115292"},
    {"sinks",
     [](TangentCall& c) {
       c.t.sinks = c.sinks.data();
       c.a.sinks = nullptr;
       c.g.dsinks = nullptr;
     },
     "tangents.sinks is given, but sinks is NULL"},
    {"scale", [](TangentCall& c) { c.t.scale = misaligned(&c.number); }, "tangents.scale is 0x"},
    {"dout", [](TangentCall& c) { c.t.dout.data = nullptr; }, "tangents.dout is NULL"},
    {"dlse", [](TangentCall& c) { c.t.dlse = misaligned(c.t.dlse); }, "tangents.dlse is 0x"},
    {"dlse_batch", [](TangentCall& c) { c.t.dlse_stride_batch = kHuge; },
     "tangents.dlse_stride_batch is 115292"},
    {"dlse_head", [](TangentCall& c) { c.t.dlse_stride_head = kHuge; },
     "tangents.dlse_stride_head is 115292"},
    {"gradients", [](TangentCall& c) { c.give_gradients = false; }, "gradients is NULL"},
};
INSTANTIATE_TEST_SUITE_P(, BadTangents, testing::ValuesIn(kBad), bad_input_name<TangentCall>);

TEST(Tangents, OutputsMayNotOverlap) {
  TangentCall call;
  call.t.out.stride_row = 0;
  EXPECT_EQ(call.jvp(), TILEWISE_INVALID_ARGUMENT);
  expect_message("tangents.out.stride_row is 0: the entries of an output must not overlap");
  EXPECT_TRUE(call.untouched());
}

TEST(Tangents, PagesAndBatchInvarianceAreRefused) {
  TangentCall pages;
  pages.use_pages();
  pages.t.k = pages.a.k;
  pages.t.v = pages.a.v;
  EXPECT_EQ(pages.jvp(), TILEWISE_UNSUPPORTED);
  expect_message("jvp with block_table: keys and values in pages are not supported");
  TangentCall invariant;
  invariant.a.batch_invariant = 1;
  EXPECT_EQ(invariant.second(), TILEWISE_UNSUPPORTED);
  expect_message("second with batch_invariant 1: it is not supported");
}

TEST(Tangents, PlansNameTheKernelAndOtherPassesAreRefused) {
  TangentCall call;
  tilewise_plan_info info{};
  info.struct_size = sizeof(info);
  ASSERT_EQ(call.plan_tangents(TILEWISE_PASS_JVP, &info), TILEWISE_OK) << tilewise_last_error();
  EXPECT_NE(std::string(info.kernel).find(".jvp.f32"), std::string::npos) << info.kernel;
  ASSERT_EQ(call.plan_tangents(TILEWISE_PASS_SECOND, &info), TILEWISE_OK) << tilewise_last_error();
  EXPECT_NE(std::string(info.kernel).find(".second.f32"), std::string::npos) << info.kernel;
  EXPECT_EQ(call.plan_tangents(TILEWISE_PASS_FORWARD, &info), TILEWISE_INVALID_ARGUMENT);
  expect_message("pass is 0: it must be 2 (jvp) or 3 (second)");
  EXPECT_EQ(call.plan(TILEWISE_PASS_JVP, &info), TILEWISE_INVALID_ARGUMENT);
  expect_message("pass is 2: it must be 0 (forward) or 1 (backward)");
}

// Absent tangents and gradients are skipped, and the others are computed.
TEST(Tangents, RunWithoutWhatIsOptional) {
  TangentCall call;
  call.t.q.data = nullptr;
  call.t.k.data = nullptr;
  call.t.bias = nullptr;
  call.t.sinks = nullptr;
  call.t.scale = nullptr;
  call.t.dlse = nullptr;
  ASSERT_EQ(call.forward(), TILEWISE_OK) << tilewise_last_error();
  ASSERT_EQ(call.jvp(), TILEWISE_OK) << tilewise_last_error();
  EXPECT_FALSE(call.out_tangent.untouched());
  call.g.dout.data = nullptr;
  call.g.dq.data = nullptr;
  call.g.dscale = nullptr;
  ASSERT_EQ(call.second(), TILEWISE_OK) << tilewise_last_error();
  EXPECT_TRUE(call.dq.untouched());
  EXPECT_FALSE(call.dk.untouched());
}

}  // namespace
}  // namespace capi_test
