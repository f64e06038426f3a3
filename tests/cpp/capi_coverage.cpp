// Every field of the parameter structs is named by a bad-input test or is listed here as one that
// takes any value. A field that is added to a header without a test fails this one.
#include <fstream>
#include <iterator>
#include <regex>
#include <set>
#include <sstream>

#include "capi_support.h"

namespace capi_test {
namespace {

std::string read(const std::string& path) {
  std::ifstream file(std::string(TILEWISE_SOURCE_DIR) + "/" + path);
  EXPECT_TRUE(file) << path;
  return {std::istreambuf_iterator<char>(file), {}};
}

// The struct `name` of include/tilewise/`header`.
std::vector<std::string> fields(const std::string& header, const std::string& name) {
  std::string body = read("include/tilewise/" + header);
  const std::size_t begin = body.find("typedef struct " + name + " {");
  EXPECT_NE(begin, std::string::npos) << name;
  body = body.substr(begin, body.find("} " + name + ";") - begin);
  body = std::regex_replace(body, std::regex(R"(/\*[^]*?\*/)"), "");
  std::vector<std::string> names;
  const std::regex field(R"((\w+);)");
  for (std::sregex_iterator i(body.begin(), body.end(), field), end; i != end; ++i)
    names.push_back((*i)[1]);
  return names;
}

void expect_covered(const std::string& header, const std::string& name, const std::string& access,
                    const std::vector<std::string>& files, const std::set<std::string>& free) {
  std::string tests;
  for (const std::string& file : files) tests += read("tests/cpp/" + file);
  const std::vector<std::string> all = fields(header, name);
  EXPECT_GT(all.size(), 10u) << name;
  for (const std::string& field : all) {
    const bool corrupted = std::regex_search(tests, std::regex(access + field + "\\b"));
    EXPECT_TRUE(corrupted || free.count(field) == 1)
        << name << "." << field << " has no bad-input test";
  }
}

TEST(Coverage, EveryFieldOfAttentionIsTested) {
  expect_covered("attention.h", "tilewise_attention", R"(c\.a\.)",
                 {"capi_bad_attention.cpp", "capi_bad_launch.cpp", "capi_bad_gradients.cpp",
                  "capi_bad_mask.cpp"},
                 // Fields for which every value is valid; the stream is not read for the CPU.
                 {"stream", "window_left", "window_right", "dropout_seed", "dropout_offset"});
}

TEST(Coverage, EveryFieldOfMaskIsTested) {
  expect_covered("mask.h", "tilewise_mask", R"(c\.m\.)", {"capi_bad_mask.cpp"}, {});
}

TEST(Coverage, EveryFieldOfGradientsIsTested) {
  expect_covered("attention.h", "tilewise_gradients", R"(c\.g\.)", {"capi_bad_gradients.cpp"},
                 // The strides of dlse are checked like those of lse, which are tested.
                 {"dlse_stride_batch"});
}

TEST(Coverage, EveryFieldOfTangentsIsTested) {
  expect_covered("attention.h", "tilewise_tangents", R"(c\.t\.)", {"capi_bad_tangents.cpp"}, {});
}

TEST(Coverage, EveryFieldOfAppendIsTested) {
  expect_covered("append.h", "tilewise_kv_append", R"(c\.a\.)", {"capi_bad_append.cpp"},
                 {"stream"});
}

}  // namespace
}  // namespace capi_test
