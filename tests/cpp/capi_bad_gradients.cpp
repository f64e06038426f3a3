// Every field of tilewise_gradients with invalid values.
#include "capi_support.h"

namespace capi_test {
namespace {

using Bad = BadInput<Call>;
constexpr int64_t kHuge = int64_t{1} << 60;

void expect_refused(tilewise_status status, const Call& call, const char* message) {
  EXPECT_EQ(status, TILEWISE_INVALID_ARGUMENT);
  expect_message(message);
  EXPECT_TRUE(call.untouched());
}

void expect_plan(const Call& call, tilewise_status expected) {
  tilewise_plan_info info{};
  info.struct_size = sizeof(info);
  EXPECT_EQ(call.plan(TILEWISE_PASS_BACKWARD, &info), expected) << tilewise_last_error();
}

// Invalid without following a pointer: plan and backward give the same sentence.
class BadGradients : public testing::TestWithParam<Bad> {};

TEST_P(BadGradients, IsRefusedByPlan) {
  Call call;
  GetParam().corrupt(call);
  expect_plan(call, TILEWISE_INVALID_ARGUMENT);
  expect_message(GetParam().message);
}

TEST_P(BadGradients, IsRefusedByBackward) {
  Call call;
  GetParam().corrupt(call);
  expect_refused(call.backward(), call, GetParam().message);
}

const Bad kBad[] = {
    {"null", [](Call& c) { c.give_gradients = false; }, "gradients is NULL"},
    {"struct_size", [](Call& c) { c.g.struct_size = 4; }, "gradients.struct_size is 4"},
    {"reserved", [](Call& c) { c.g.reserved = 1; }, "gradients.reserved is 1: it must be 0"},
    {"dout_span", [](Call& c) { c.g.dout.stride_row = kHuge; },
     "dout.stride_row is 1152921504606846976"},
    {"dq_span", [](Call& c) { c.g.dq.stride_head = kHuge; },
     "dq.stride_head is 1152921504606846976"},
    {"dq_overlap", [](Call& c) { c.g.dq.stride_row = 0; },
     "dq.stride_row is 0: the entries of an output must not overlap"},
    {"dk_overlap", [](Call& c) { c.g.dk.stride_head = 7; },
     "dk.stride_head is 7: the entries of an output must not overlap, so it must "
     "be at least 8"},
    {"dv_overlap", [](Call& c) { c.g.dv.stride_batch = 0; }, "dv.stride_batch is 0"},
    {"dk_paged",
     [](Call& c) {
       c.use_pages();
       c.g.dk.stride_batch = 7 * 2 * 8;
     },
     "dk.stride_batch is 112: the entries of an output must not overlap, so it must "
     "be at least 144"},
    {"dlse_span",
     [](Call& c) {
       c.use_dlse();
       c.g.dlse_stride_head = kHuge;
     },
     "dlse_stride_head is 1152921504606846976"},
    {"dbias_without_bias",
     [](Call& c) {
       c.use_bias();
       c.a.bias = nullptr;
     },
     "dbias is given, but bias is NULL"},
    {"dbias_stride_batch",
     [](Call& c) {
       c.use_bias();
       c.g.dbias_stride_batch = 0;
     },
     "dbias_stride_batch is 0 and the stride of bias is 180: both or neither must be 0"},
    {"dbias_stride_head",
     [](Call& c) {
       c.use_bias();
       c.g.dbias_stride_head = 0;
     },
     "dbias_stride_head is 0 and the stride of bias is 45"},
    {"dbias_stride_row",
     [](Call& c) {
       c.use_bias();
       c.g.dbias_stride_row = 0;
     },
     "dbias_stride_row is 0 and the stride of bias is 9"},
    {"dbias_overlap",
     [](Call& c) {
       c.use_bias();
       c.g.dbias_stride_row = 6;
     },
     "dbias_stride_row is 6: the entries of an output must not overlap, so it must "
     "be at least 7"},
    {"dbias_keys",
     [](Call& c) {
       c.use_bias();
       c.g.dbias_keys = 6;
     },
     "dbias_keys is 6: it must be at least the number of keys, 7"},
    {"dbias_keys_negative",
     [](Call& c) {
       c.use_bias();
       c.g.dbias_keys = -1;
     },
     "dbias_keys is -1: it must be 0 to"},
    {"dbias_rows",
     [](Call& c) {
       c.use_bias();
       c.g.dbias_rows = 4;
     },
     "dbias_rows is 4: it must be at least seqlen_q, which is 5"},
    {"dbias_rows_negative",
     [](Call& c) {
       c.use_bias();
       c.g.dbias_rows = -1;
     },
     "dbias_rows is -1: it must be 0 to"},
    {"dsinks_without_sinks", [](Call& c) { c.g.dsinks = c.dsinks.data(); },
     "dsinks is given, but sinks is NULL"},
};
INSTANTIATE_TEST_SUITE_P(, BadGradients, testing::ValuesIn(kBad), bad_input_name<Call>);

// Invalid only once pointers are followed.
class BadGradientLaunch : public testing::TestWithParam<Bad> {};

TEST_P(BadGradientLaunch, IsRefusedByBackwardAlone) {
  Call call;
  GetParam().corrupt(call);
  expect_refused(call.backward(), call, GetParam().message);
  expect_plan(call, TILEWISE_OK);
}

const Bad kBadLaunch[] = {
    {"lse_null", [](Call& c) { c.a.lse = nullptr; },
     "lse is NULL: a pointer to its data is needed"},
    {"dout_null", [](Call& c) { c.g.dout.data = nullptr; }, "dout is NULL"},
    {"dout_misaligned", [](Call& c) { c.g.dout.data = misaligned(c.g.dout.data); }, "dout is 0x"},
    {"dq_misaligned", [](Call& c) { c.g.dq.data = misaligned(c.g.dq.data); }, "dq is 0x"},
    {"dk_misaligned", [](Call& c) { c.g.dk.data = misaligned(c.g.dk.data); }, "dk is 0x"},
    {"dv_misaligned", [](Call& c) { c.g.dv.data = misaligned(c.g.dv.data); }, "dv is 0x"},
    {"dlse_misaligned",
     [](Call& c) {
       c.use_dlse();
       c.g.dlse = misaligned(c.g.dlse);
     },
     "dlse is 0x"},
    {"dbias_misaligned",
     [](Call& c) {
       c.use_bias();
       c.g.dbias = misaligned(c.g.dbias);
     },
     "dbias is 0x"},
    {"dsinks_misaligned",
     [](Call& c) {
       c.use_sinks();
       c.g.dsinks = misaligned(c.g.dsinks);
     },
     "dsinks is 0x"},
    {"dscale_misaligned", [](Call& c) { c.g.dscale = misaligned(c.dscale.data()); },
     "dscale is 0x"},
    {"dbias_keys_of_a_sequence",
     [](Call& c) {
       c.use_bias();
       c.use_varlen_k();
       c.g.dbias_keys = 3;
     },
     "dbias_keys is 3: sequence 1 has 4 keys"},
    {"dbias_rows_of_a_sequence",
     [](Call& c) {
       c.use_bias();
       c.use_varlen_q();
       c.g.dbias_rows = 2;
     },
     "dbias_rows is 2: sequence 1 has 3 rows"},
};
INSTANTIATE_TEST_SUITE_P(, BadGradientLaunch, testing::ValuesIn(kBadLaunch), bad_input_name<Call>);

}  // namespace
}  // namespace capi_test
