#include "compiler/spec/manifest.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "compiler/base/status_macros.h"
#include "tests/support/golden.h"
#include "tests/support/status_matchers.h"

namespace kiln {
namespace {

using ::kiln::testing::ExpectGolden;
using ::kiln::testing::ReadTestFile;
using ::kiln::testing::ScratchFolder;
using ::kiln::testing::SourcePath;
using ::kiln::testing::StatusIs;
using ::testing::ElementsAre;
using ::testing::Eq;
using ::testing::HasSubstr;

// A small manifest; the line numbers of the tests below are those here.
const char* const kSmall =
    "{\n"                                       // 1
    " \"schema\": \"kiln.model/1\",\n"          // 2
    " \"name\": \"tiny\",\n"                    // 3
    " \"requests\": [\n"                        // 4
    "  {\n"                                     // 5
    "   \"name\": \"moe\",\n"                   // 6
    "   \"op\": \"fused_moe\",\n"               // 7
    "   \"layers\": 2,\n"                       // 8
    "   \"hidden\": 256,\n"                     // 9
    "   \"intermediate\": 128,\n"               // 10
    "   \"experts\": 8,\n"                      // 11
    "   \"top_k\": 2,\n"                        // 12
    "   \"activation\": \"silu\",\n"            // 13
    "   \"io_dtype\": \"bf16\",\n"              // 14
    "   \"id_dtype\": \"i32\",\n"               // 15
    "   \"weights\": {\"format\": \"exl3\",\n"  // 16
    "     \"codebook\": \"mcg\",\n"             // 17
    "     \"bits\": 4},\n"                      // 18
    "   \"recipe\": \"w4a16\",\n"               // 19
    "   \"capacities\": [1, 2, 4]\n"            // 20
    "  }\n"                                     // 21
    " ]\n"                                      // 22
    "}\n";                                      // 23

std::string Changed(const std::string& from, const std::string& to) {
  const std::string text = kSmall;
  const size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  EXPECT_EQ(text.find(from, at + 1), std::string::npos) << from << " is twice";
  return absl::StrReplaceAll(text, {{from, to}});
}

class ModelTest : public ::testing::TestWithParam<const char*> {};

INSTANTIATE_TEST_SUITE_P(Models, ModelTest,
                         ::testing::Values("deepseek-v3-tp8", "mixtral-8x7b",
                                           "olmoe-1b-7b", "qwen3-30b-a3b"),
                         [](const auto& path) {
                           return absl::StrReplaceAll(path.param, {{"-", "_"}});
                         });

TEST_P(ModelTest, CanonicalTextIsAFixedPointAndGolden) {
  const std::string path =
      SourcePath(absl::StrCat("tests/data/models/", GetParam(), ".json"));
  ASSERT_OK_AND_ASSIGN(const Manifest manifest, ReadManifest(path));
  const std::string text = ManifestToJson(manifest);
  ASSERT_OK_AND_ASSIGN(const Manifest again, ParseManifest(text, "again"));
  EXPECT_EQ(ManifestToJson(again), text);
  ExpectGolden(text, absl::StrCat("manifest.v1/", GetParam(), ".json"));
}

TEST_P(ModelTest, CanonicalisesToOneRequestWithGapFreeIntervals) {
  ASSERT_OK_AND_ASSIGN(const Manifest manifest,
                       ReadManifest(SourcePath(absl::StrCat(
                           "tests/data/models/", GetParam(), ".json"))));
  ASSERT_OK_AND_ASSIGN(const std::vector<PlannedRequest> planned,
                       Canonicalize(manifest, 0));
  ASSERT_EQ(planned.size(), 1u);
  EXPECT_THAT(planned[0].names, ElementsAre("moe"));
  ASSERT_EQ(planned[0].intervals.size(), 13u);
  uint32_t next = 1;
  for (const Interval& interval : planned[0].intervals) {
    EXPECT_EQ(interval.m_min, next);
    EXPECT_GE(interval.m_max, interval.m_min);
    next = interval.m_max + 1;
  }
  EXPECT_EQ(next, 4097u);
}

TEST_P(ModelTest, EveryTruncationIsAnError) {
  const std::string text = ReadTestFile(
      SourcePath(absl::StrCat("tests/data/models/", GetParam(), ".json")));
  const size_t last = text.rfind('}');
  for (size_t size = 0; size <= last; ++size) {
    ASSERT_THAT(ParseManifest(absl::string_view(text).substr(0, size), "f"),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("f:")))
        << size;
  }
}

TEST(ParseManifestTest, ReadsEveryField) {
  ASSERT_OK_AND_ASSIGN(const Manifest manifest, ParseManifest(kSmall, "f"));
  EXPECT_EQ(manifest.name, "tiny");
  ASSERT_EQ(manifest.requests.size(), 1u);
  const Request& request = manifest.requests[0];
  EXPECT_EQ(request.name, "moe");
  EXPECT_THAT(request.layers, ElementsAre(0, 1));
  EXPECT_THAT(request.capacities, ElementsAre(1, 2, 4));
  RequestGeometry expected;
  expected.hidden = 256;
  expected.intermediate = 128;
  expected.experts = 8;
  expected.top_k = 2;
  expected.weights.bits = {.gate = 4, .up = 4, .down = 4};
  EXPECT_EQ(request.geometry, expected);
}

TEST(ParseManifestTest, ReadsTheOtherSpellings) {
  const std::string text = absl::StrReplaceAll(
      kSmall, {{"\"layers\": 2", "\"layers\": [3, 5, 1023]"},
               {"\"bits\": 4",
                "\"bits\": {\"down\": 8, \"gate\": 1, "
                "\"up\": 2}, \"scales\": \"shared\""},
               {"\"mcg\"", "\"mul1\""},
               {"bf16", "f16"},
               {"i32", "i64"},
               {"[1, 2, 4]", "[65536], \"deterministic\": false"}});
  ASSERT_OK_AND_ASSIGN(const Manifest manifest, ParseManifest(text, "f"));
  const Request& request = manifest.requests[0];
  EXPECT_THAT(request.layers, ElementsAre(3, 5, 1023));
  EXPECT_THAT(request.capacities, ElementsAre(65536));
  const RequestGeometry& geometry = request.geometry;
  EXPECT_EQ(geometry.weights.bits, (Bits{.gate = 1, .up = 2, .down = 8}));
  EXPECT_EQ(geometry.weights.codebook, Codebook::kMul1);
  EXPECT_TRUE(geometry.weights.shared_scales);
  EXPECT_FALSE(geometry.deterministic);
  EXPECT_EQ(geometry.io_dtype, DType::kF16);
  EXPECT_EQ(geometry.id_dtype, DType::kI64);
  // All of it survives the canonical text.
  ASSERT_OK_AND_ASSIGN(const Manifest again,
                       ParseManifest(ManifestToJson(manifest), "f"));
  EXPECT_EQ(again.requests[0].geometry, geometry);
  EXPECT_EQ(again.requests[0].layers, request.layers);
}

struct BadInput {
  const char* name;
  std::string from;
  std::string to;
  std::string message;  // whole
};

std::vector<BadInput> BadInputs() {
  const auto capacities_of = [](size_t count) {
    std::vector<std::string> values;
    for (size_t i = 1; i <= count; ++i) values.push_back(absl::StrCat(i));
    return absl::StrCat("[", absl::StrJoin(values, ","), "]");
  };
  const std::string long_name(129, 'n');
  const std::string request_keys =
      "name, op, layers, hidden, intermediate, experts, top_k, activation, "
      "io_dtype, id_dtype, weights, recipe, capacities, deterministic";
  return {
      // Keys.
      {"UnknownRequestKey", "\"hidden\"", "\"hiden\"",
       "m.json:9:4: unknown key \"hiden\" in request; known: " + request_keys},
      {"UnknownManifestKey", " \"name\": \"tiny\"",
       " \"nom\": 1, \"name\": \"tiny\"",
       "m.json:3:2: unknown key \"nom\" in manifest; known: schema, name, "
       "requests"},
      {"UnknownWeightsKey", "\"bits\": 4", "\"bits\": 4, \"group\": 128",
       "m.json:18:17: unknown key \"group\" in \"weights\"; known: format, "
       "codebook, bits, scales"},
      {"UnknownBitsKey", "\"bits\": 4", "\"bits\": {\"gat\": 4}",
       "m.json:18:15: unknown key \"gat\" in \"bits\"; known: gate, up, down"},
      {"MissingKey", "   \"recipe\": \"w4a16\",\n", "",
       "m.json:5:3: request lacks the key \"recipe\""},
      {"MissingBits", ",\n     \"bits\": 4}", "}",
       "m.json:16:15: \"weights\" lacks the key \"bits\""},
      {"MissingOneOfBits", "\"bits\": 4", "\"bits\": {\"gate\": 4, \"up\": 4}",
       "m.json:18:14: \"bits\" lacks the key \"down\""},
      {"DuplicateKey", "\"experts\": 8", "\"hidden\": 8",
       "m.json:11:4: duplicate key \"hidden\", first on line 9"},
      // Sizes.
      {"Row16ZeroHidden", "\"hidden\": 256", "\"hidden\": 0",
       "m.json:9:14: \"hidden\" is 0, must be within 128..65536 and a multiple "
       "of 128 (the Hadamard block)"},
      {"NegativeHidden", "\"hidden\": 256", "\"hidden\": -256",
       "m.json:9:14: \"hidden\" is -256, must be within 128..65536 and a "
       "multiple of 128 (the Hadamard block)"},
      {"HugeHidden", "\"hidden\": 256", "\"hidden\": 9223372036854775807",
       "m.json:9:14: \"hidden\" is 9223372036854775807, must be within "
       "128..65536 and a multiple of 128 (the Hadamard block)"},
      {"HugerHidden", "\"hidden\": 256", "\"hidden\": 9223372036854775808",
       "m.json:9:14: number 9223372036854775808 is out of range"},
      {"HugestHidden", "\"hidden\": 256", "\"hidden\": 1e300",
       "m.json:9:14: \"hidden\" must be an integer, found 1e+300"},
      {"Row36RaggedHidden", "\"hidden\": 256", "\"hidden\": 192",
       "m.json:9:14: \"hidden\" is 192, must be a multiple of 128 (the "
       "Hadamard block)"},
      {"ZeroIntermediate", "\"intermediate\": 128", "\"intermediate\": 0",
       "m.json:10:20: \"intermediate\" is 0, must be within 128..262144 and a "
       "multiple of 128 (the Hadamard block)"},
      {"HugeIntermediate", "\"intermediate\": 128", "\"intermediate\": 262272",
       "m.json:10:20: \"intermediate\" is 262272, must be within 128..262144 "
       "and a multiple of 128 (the Hadamard block)"},
      {"Row36RaggedIntermediate", "\"intermediate\": 128",
       "\"intermediate\": 129",
       "m.json:10:20: \"intermediate\" is 129, must be a multiple of 128 (the "
       "Hadamard block)"},
      {"Row16ZeroExperts", "\"experts\": 8", "\"experts\": 0",
       "m.json:11:15: \"experts\" is 0, must be within 1..1024"},
      {"HugeExperts", "\"experts\": 8", "\"experts\": 1025",
       "m.json:11:15: \"experts\" is 1025, must be within 1..1024"},
      {"ZeroTopK", "\"top_k\": 2", "\"top_k\": 0",
       "m.json:12:13: \"top_k\" is 0, must be within 1..32"},
      {"HugeTopK", "\"top_k\": 2", "\"top_k\": 33",
       "m.json:12:13: \"top_k\" is 33, must be within 1..32"},
      {"TopKAboveExperts", "\"top_k\": 2", "\"top_k\": 9",
       "m.json:12:13: \"top_k\" is 9, must be at most \"experts\" (8)"},
      {"Row16ZeroBits", "\"bits\": 4", "\"bits\": 0",
       "m.json:18:14: \"bits\" is 0, must be within 1..8"},
      {"Row16NineBits", "\"bits\": 4", "\"bits\": 9",
       "m.json:18:14: \"bits\" is 9, must be within 1..8"},
      {"NineBitsOfOne", "\"bits\": 4",
       "\"bits\": {\"gate\": 4, \"up\": 9, \"down\": 4}",
       "m.json:18:32: \"up\" is 9, must be within 1..8"},
      {"FractionalBits", "\"bits\": 4", "\"bits\": 4.5",
       "m.json:18:14: \"bits\" must be an integer, found 4.5"},
      // Lists.
      {"EmptyCapacities", "[1, 2, 4]", "[]",
       "m.json:20:18: \"capacities\" has 0 entries, must have 1..64"},
      {"TooManyCapacities", "[1, 2, 4]", capacities_of(65),
       "m.json:20:18: \"capacities\" has 65 entries, must have 1..64"},
      {"DuplicateCapacity", "[1, 2, 4]", "[1, 2, 2, 4]",
       "m.json:20:25: \"capacities\" has 2 twice"},
      {"UnsortedCapacities", "[1, 2, 4]", "[1, 4, 2]",
       "m.json:20:25: \"capacities\" has 2 after 4, must ascend"},
      {"ZeroCapacity", "[1, 2, 4]", "[0, 1]",
       "m.json:20:19: \"capacities\" is 0, must be within 1..65536"},
      {"HugeCapacity", "[1, 2, 4]", "[1, 65537]",
       "m.json:20:22: \"capacities\" is 65537, must be within 1..65536"},
      {"TextCapacity", "[1, 2, 4]", "[1, \"2\"]",
       "m.json:20:22: \"capacities\" must be an integer, found \"2\""},
      {"CapacitiesNoList", "[1, 2, 4]", "4",
       "m.json:20:18: \"capacities\" must be an array, found 4"},
      {"ZeroLayers", "\"layers\": 2", "\"layers\": 0",
       "m.json:8:14: \"layers\" is 0, must be within 1..1024"},
      {"HugeLayers", "\"layers\": 2", "\"layers\": 1025",
       "m.json:8:14: \"layers\" is 1025, must be within 1..1024"},
      {"EmptyLayers", "\"layers\": 2", "\"layers\": []",
       "m.json:8:14: \"layers\" is empty, must name a layer"},
      {"RepeatedLayer", "\"layers\": 2", "\"layers\": [1, 1]",
       "m.json:8:18: \"layers\" has 1 after 1, must ascend without repeats"},
      {"NegativeLayer", "\"layers\": 2", "\"layers\": [-1]",
       "m.json:8:15: \"layers\" is -1, must be within 0..1023"},
      // Words.
      {"UnknownOp", "\"fused_moe\"", "\"gemm\"",
       "m.json:7:10: \"op\" is \"gemm\", must be one of \"fused_moe\", "
       "\"linear\""},
      {"Row33UnknownActivation", "\"silu\"", "\"gelu\"",
       "m.json:13:18: \"activation\" is \"gelu\", must be one of \"silu\""},
      {"Row35UnknownIoDtype", "\"bf16\"", "\"f32\"",
       "m.json:14:16: \"io_dtype\" is \"f32\", must be one of \"bf16\", "
       "\"f16\""},
      {"Row35UnknownIdDtype", "\"i32\"", "\"u32\"",
       "m.json:15:16: \"id_dtype\" is \"u32\", must be one of \"i32\", "
       "\"i64\""},
      {"UnknownFormat", "\"exl3\"", "\"exl2\"",
       "m.json:16:26: \"format\" is \"exl2\", must be one of \"exl3\", "
       "\"trellis_mx\", \"qsrt\""},
      {"ActivationOfQsrt", "\"silu\"", "\"situ\"",
       "m.json:13:18: \"activation\" is \"situ\", must be one of \"silu\""},
      {"UnknownCodebook", "\"mcg\"", "\"mcg2\"",
       "m.json:17:18: \"codebook\" is \"mcg2\", must be one of \"3inst\", "
       "\"mcg\", \"mul1\""},
      // 8-bit activations need a codebook of E4M3 values, which none of EXL3
      // is.
      {"Row34RecipeW4a8", "\"w4a16\"", "\"w4a8\"",
       "m.json:19:14: \"recipe\" is \"w4a8\", must be one of \"w4a16\""},
      {"UnknownRecipe", "\"w4a16\"", "\"w4a4\"",
       "m.json:19:14: \"recipe\" is \"w4a4\", must be one of \"w4a16\""},
      {"UnknownScales", "\"bits\": 4", "\"bits\": 4, \"scales\": \"both\"",
       "m.json:18:27: \"scales\" is \"both\", must be one of \"per_expert\", "
       "\"shared\""},
      {"OtherSchema", "kiln.model/1", "kiln.model/2",
       "m.json:2:12: \"schema\" is \"kiln.model/2\", this build reads "
       "\"kiln.model/1\""},
      {"OtherSchemaBeforeItsKeys", "kiln.model/1\"", "kiln.model/2\", \"x\": 1",
       "m.json:2:12: \"schema\" is \"kiln.model/2\", this build reads "
       "\"kiln.model/1\""},
      // Types.
      {"HiddenAsText", "\"hidden\": 256", "\"hidden\": \"256\"",
       "m.json:9:14: \"hidden\" must be an integer, found \"256\""},
      {"OpAsNumber", "\"fused_moe\"", "7",
       "m.json:7:10: \"op\" must be a string, found 7"},
      {"WeightsAsText",
       "{\"format\": \"exl3\",\n     \"codebook\": \"mcg\",\n"
       "     \"bits\": 4}",
       "\"exl3\"",
       "m.json:16:15: \"weights\" must be an object, found "
       "\"exl3\""},
      {"BitsAsList", "\"bits\": 4", "\"bits\": [4, 4, 4]",
       "m.json:18:14: \"bits\" must be an integer, found an array of 3"},
      {"SchemaAsNull", "\"kiln.model/1\"", "null",
       "m.json:2:12: \"schema\" must be a string, found null"},
      {"DeterministicAsNumber", "[1, 2, 4]", "[1], \"deterministic\": 1",
       "m.json:20:40: \"deterministic\" must be a boolean, found 1"},
      // Names.
      {"EmptyName", "\"moe\"", "\"\"",
       "m.json:6:12: \"name\" has 0 bytes, must have 1..128"},
      {"LongName", "\"moe\"", "\"" + long_name + "\"",
       "m.json:6:12: \"name\" has 129 bytes, must have 1..128"},
      {"NameWithLineBreak", "\"moe\"", "\"a\\nb\"",
       "m.json:6:12: \"name\" is \"a\\nb\", must not contain control "
       "characters"},
      {"NameBeyondAscii", "\"moe\"", "\"mo\xC3\xA9\"",
       "m.json:6:12: \"name\" is \"mo\xC3\xA9\", must be printable ASCII: it "
       "names a bundle's entry"},
  };
}

class BadInputTest : public ::testing::TestWithParam<BadInput> {};

INSTANTIATE_TEST_SUITE_P(Inputs, BadInputTest, ::testing::ValuesIn(BadInputs()),
                         [](const auto& input) { return input.param.name; });

TEST_P(BadInputTest, IsRefusedWithPlaceValueAndRule) {
  const BadInput& input = GetParam();
  EXPECT_THAT(ParseManifest(Changed(input.from, input.to), "m.json"),
              StatusIs(absl::StatusCode::kInvalidArgument, Eq(input.message)));
}

// The same of one matrix.
const char* const kLinear =
    "{\n"                                          // 1
    " \"schema\": \"kiln.model/1\",\n"             // 2
    " \"name\": \"tiny\",\n"                       // 3
    " \"requests\": [{\n"                          // 4
    "   \"name\": \"k_proj\",\n"                   // 5
    "   \"op\": \"linear\",\n"                     // 6
    "   \"layers\": 2,\n"                          // 7
    "   \"in_features\": 256,\n"                   // 8
    "   \"out_features\": 128,\n"                  // 9
    "   \"io_dtype\": \"bf16\",\n"                 // 10
    "   \"weights\": {\"format\": \"exl3\",\n"     // 11
    "     \"codebook\": \"mcg\", \"bits\": 4},\n"  // 12
    "   \"recipe\": \"w4a16\",\n"                  // 13
    "   \"capacities\": [1, 2, 4]\n"               // 14
    " }]\n"                                        // 15
    "}\n";                                         // 16

TEST(ParseLinearTest, ReadsEveryField) {
  ASSERT_OK_AND_ASSIGN(const Manifest manifest, ParseManifest(kLinear, "f"));
  ASSERT_EQ(manifest.requests.size(), 1u);
  const Request& request = manifest.requests[0];
  EXPECT_EQ(request.name, "k_proj");
  EXPECT_THAT(request.layers, ElementsAre(0, 1));
  EXPECT_THAT(request.capacities, ElementsAre(1, 2, 4));
  RequestGeometry expected;
  expected.op = Op::kLinear;
  expected.linear = {.in_features = 256, .out_features = 128, .bits = 4};
  EXPECT_EQ(request.geometry, expected);
}

TEST(ParseLinearTest, ReadsTheOtherSpellings) {
  const std::string text = absl::StrReplaceAll(
      kLinear, {{"\"layers\": 2", "\"layers\": [3, 1023]"},
                {"256", "1048576"},
                {"\"out_features\": 128",
                 "\"out_features\": 384, \"bias\": "
                 "true"},
                {"\"bits\": 4", "\"bits\": 8"},
                {"\"mcg\"", "\"3inst\""},
                {"bf16", "f16"},
                {"[1, 2, 4]", "[65536], \"deterministic\": false"}});
  ASSERT_OK_AND_ASSIGN(const Manifest manifest, ParseManifest(text, "f"));
  RequestGeometry expected;
  expected.op = Op::kLinear;
  expected.linear = {
      .in_features = 1048576, .out_features = 384, .bits = 8, .bias = true};
  expected.io_dtype = DType::kF16;
  expected.weights.codebook = Codebook::k3Inst;
  expected.deterministic = false;
  EXPECT_EQ(manifest.requests[0].geometry, expected);
}

TEST(ParseLinearTest, CanonicalTextIsAFixedPointAndGolden) {
  ASSERT_OK_AND_ASSIGN(const Manifest manifest, ParseManifest(kLinear, "f"));
  const std::string text = ManifestToJson(manifest);
  ASSERT_OK_AND_ASSIGN(const Manifest again, ParseManifest(text, "again"));
  EXPECT_EQ(again.requests[0].geometry, manifest.requests[0].geometry);
  EXPECT_EQ(ManifestToJson(again), text);
  ExpectGolden(text, "manifest.v1/linear.json");
}

TEST(ParseLinearTest, StandsBesideFusedMoeInOneManifest) {
  const std::string moe = kSmall;
  const std::string linear = kLinear;
  const size_t request = linear.find("{\n   \"name\"");
  const size_t end = linear.find("]\n}");
  const std::string both =
      absl::StrCat(moe.substr(0, moe.find(" ]\n}")), ", ",
                   linear.substr(request, end - request), "]}");
  ASSERT_OK_AND_ASSIGN(const Manifest manifest, ParseManifest(both, "f"));
  ASSERT_OK_AND_ASSIGN(const std::vector<PlannedRequest> planned,
                       Canonicalize(manifest, 0));
  ASSERT_EQ(planned.size(), 2u);
  EXPECT_EQ(planned[0].geometry.op, Op::kFusedMoe);
  EXPECT_EQ(planned[1].geometry.op, Op::kLinear);
}

std::vector<BadInput> BadLinearInputs() {
  const std::string keys =
      "known: name, op, layers, in_features, out_features, bias, io_dtype, "
      "weights, recipe, capacities, deterministic";
  return {
      {"KeyOfFusedMoe", "\"out_features\"", "\"hidden\"",
       "m.json:9:4: unknown key \"hidden\" in request; " + keys},
      {"ActivationOfFusedMoe", "\"io_dtype\"",
       "\"activation\": \"silu\", \"io_dtype\"",
       "m.json:10:4: unknown key \"activation\" in request; " + keys},
      {"MissingOutFeatures", "   \"out_features\": 128,\n", "",
       "m.json:4:15: request lacks the key \"out_features\""},
      {"ZeroInFeatures", "\"in_features\": 256", "\"in_features\": 0",
       "m.json:8:19: \"in_features\" is 0, must be within 128..1048576 and a "
       "multiple of 128 (the Hadamard block)"},
      {"HugeOutFeatures", "\"out_features\": 128", "\"out_features\": 1048704",
       "m.json:9:20: \"out_features\" is 1048704, must be within "
       "128..1048576 and a multiple of 128 (the Hadamard block)"},
      {"Row23RaggedInFeatures", "\"in_features\": 256", "\"in_features\": 192",
       "m.json:8:19: \"in_features\" is 192, must be a multiple of 128 (the "
       "Hadamard block)"},
      {"Row23RaggedOutFeatures", "\"out_features\": 128",
       "\"out_features\": 144",
       "m.json:9:20: \"out_features\" is 144, must be a multiple of 128 (the "
       "Hadamard block)"},
      {"BiasAsNumber", "\"out_features\": 128",
       "\"out_features\": 128, \"bias\": 1",
       "m.json:9:33: \"bias\" must be a boolean, found 1"},
      {"ZeroBits", "\"bits\": 4", "\"bits\": 0",
       "m.json:12:33: \"bits\" is 0, must be within 1..8"},
      // Two rates in one matrix: pairs, or those of three projections.
      {"Row24PairOfBits", "\"bits\": 4", "\"bits\": [2, 4]",
       "m.json:12:33: \"bits\" must be an integer, found an array of 2"},
      {"Row24BitsByProjection", "\"bits\": 4",
       "\"bits\": {\"gate\": 4, \"up\": 4, \"down\": 4}",
       "m.json:12:33: \"bits\" must be an integer, found an object"},
      {"ScalesOfExperts", "\"bits\": 4", "\"bits\": 4, \"scales\": \"shared\"",
       "m.json:12:36: unknown key \"scales\" in \"weights\"; known: format, "
       "codebook, bits"},
      {"UnknownIoDtype", "\"bf16\"", "\"f32\"",
       "m.json:10:16: \"io_dtype\" is \"f32\", must be one of \"bf16\", "
       "\"f16\""},
      {"RecipeW4a8", "\"w4a16\"", "\"w4a8\"",
       "m.json:13:14: \"recipe\" is \"w4a8\", must be one of \"w4a16\""},
  };
}

class BadLinearTest : public ::testing::TestWithParam<BadInput> {};

INSTANTIATE_TEST_SUITE_P(Inputs, BadLinearTest,
                         ::testing::ValuesIn(BadLinearInputs()),
                         [](const auto& input) { return input.param.name; });

TEST_P(BadLinearTest, IsRefusedWithPlaceValueAndRule) {
  const BadInput& input = GetParam();
  const std::string text =
      absl::StrReplaceAll(kLinear, {{input.from, input.to}});
  ASSERT_NE(text, kLinear);
  EXPECT_THAT(ParseManifest(text, "m.json"),
              StatusIs(absl::StatusCode::kInvalidArgument, Eq(input.message)));
}

// The same of TrellisMX weights.
const char* const kMx =
    "{\n"                                             // 1
    " \"schema\": \"kiln.model/1\",\n"                // 2
    " \"name\": \"tiny\",\n"                          // 3
    " \"requests\": [{\n"                             // 4
    "   \"name\": \"moe\",\n"                         // 5
    "   \"op\": \"fused_moe\",\n"                     // 6
    "   \"layers\": 2,\n"                             // 7
    "   \"hidden\": 1024,\n"                          // 8
    "   \"intermediate\": 128,\n"                     // 9
    "   \"experts\": 8,\n"                            // 10
    "   \"top_k\": 2,\n"                              // 11
    "   \"activation\": \"silu\",\n"                  // 12
    "   \"io_dtype\": \"bf16\",\n"                    // 13
    "   \"id_dtype\": \"i32\",\n"                     // 14
    "   \"weights\": {\"format\": \"trellis_mx\",\n"  // 15
    "     \"bits\": 4, \"limit\": \"10\"},\n"         // 16
    "   \"recipe\": \"w4a8\",\n"                      // 17
    "   \"smallm_max_tokens\": 4,\n"                  // 18
    "   \"capacities\": [1, 4, 32]\n"                 // 19
    " }]\n"                                           // 20
    "}\n";                                            // 21

TEST(ParseTrellisMxTest, ReadsEveryField) {
  ASSERT_OK_AND_ASSIGN(const Manifest manifest, ParseManifest(kMx, "f"));
  RequestGeometry expected;
  expected.hidden = 1024;
  expected.intermediate = 128;
  expected.experts = 8;
  expected.top_k = 2;
  expected.weights.format = WeightFormat::kTrellisMx;
  expected.weights.bits = {.gate = 4, .up = 4, .down = 4};
  expected.recipe = Recipe::kW4A8;
  expected.mx = {.limit = "10", .smallm_max_tokens = 4};
  EXPECT_EQ(manifest.requests[0].geometry, expected);
}

TEST(ParseTrellisMxTest, CanonicalTextIsAFixedPointAndGolden) {
  ASSERT_OK_AND_ASSIGN(const Manifest manifest, ParseManifest(kMx, "f"));
  const std::string text = ManifestToJson(manifest);
  ASSERT_OK_AND_ASSIGN(const Manifest again, ParseManifest(text, "again"));
  EXPECT_EQ(again.requests[0].geometry, manifest.requests[0].geometry);
  EXPECT_EQ(ManifestToJson(again), text);
  ExpectGolden(text, "manifest.v1/trellis-mx.json");
}

// The small-M arm's limit in `text`, with line 18 replaced by `line` and the
// capacities by `capacities`.
absl::StatusOr<uint32_t> SmallMOf(const std::string& line,
                                  const std::string& capacities) {
  const std::string text = absl::StrReplaceAll(
      kMx,
      {{"   \"smallm_max_tokens\": 4,\n", line}, {"[1, 4, 32]", capacities}});
  ASSIGN_OR_RETURN(const Manifest manifest, ParseManifest(text, "m.json"));
  return manifest.requests[0].geometry.mx.smallm_max_tokens;
}

TEST(ParseTrellisMxTest, TheSmallMLimitIsACapacityOrSixteenOrBeyondAllOrNone) {
  using ::kiln::testing::IsOkAndHolds;
  EXPECT_THAT(SmallMOf("", "[1, 16, 32]"), IsOkAndHolds(16u));
  EXPECT_THAT(SmallMOf("", "[1, 8]"), IsOkAndHolds(16u));
  EXPECT_THAT(SmallMOf("\"smallm_max_tokens\": 0,\n", "[1, 32]"),
              IsOkAndHolds(0u));
  EXPECT_THAT(SmallMOf("\"smallm_max_tokens\": 65536,\n", "[1, 32]"),
              IsOkAndHolds(65536u));
  EXPECT_THAT(SmallMOf("\"smallm_max_tokens\": 32,\n", "[1, 32]"),
              IsOkAndHolds(32u));
}

TEST(ParseTrellisMxTest, ADefaultLimitInsideAnIntervalIsRefusedThere) {
  EXPECT_THAT(
      SmallMOf("", "[1, 8, 32]"),
      StatusIs(absl::StatusCode::kInvalidArgument,
               Eq("m.json:18:18: \"smallm_max_tokens\" is 16, its default; it "
                  "must be one of \"capacities\", 0 (never), or at least the "
                  "largest, so that no interval has tokens on both sides of "
                  "it")));
}

// The same request with other lines for the small-M limit.
absl::StatusOr<Manifest> WithArms(const std::string& lines,
                                  const std::string& capacities) {
  return ParseManifest(
      absl::StrReplaceAll(kMx, {{"   \"smallm_max_tokens\": 4,\n", lines},
                                {"[1, 4, 32]", capacities}}),
      "m.json");
}

TEST(ParseTrellisMxTest, TheDirectArmHasALimitAndARemainder) {
  const struct {
    const char* lines;
    const char* capacities;
    TrellisMx mx;
  } cases[] = {
      {"\"direct_max_tokens\": 4, \"remainder\": \"rp2\",",
       "[1, 4, 32]",
       {.limit = "10", .direct_max_tokens = 4, .remainder = Remainder::kRp2}},
      // A remainder alone chooses the arm, up to its most.
      {"\"remainder\": \"rp2\",",
       "[1, 16, 32]",
       {.limit = "10", .direct_max_tokens = 16, .remainder = Remainder::kRp2}},
      {"\"remainder\": \"rp2\", \"smallm_max_tokens\": 0,",
       "[1, 8]",
       {.limit = "10", .direct_max_tokens = 16, .remainder = Remainder::kRp2}},
      {"\"direct_max_tokens\": 16,",
       "[16]",
       {.limit = "10", .direct_max_tokens = 16}},
      {"\"direct_max_tokens\": 1, \"remainder\": \"none\",",
       "[1, 32]",
       {.limit = "10", .direct_max_tokens = 1}},
      // No such arm: the small-M arm's default stays.
      {"\"direct_max_tokens\": 0, \"remainder\": \"none\",",
       "[1, 16]",
       {.limit = "10", .smallm_max_tokens = 16}},
  };

  for (const auto& c : cases) {
    SCOPED_TRACE(c.lines);
    ASSERT_OK_AND_ASSIGN(const Manifest manifest,
                         WithArms(c.lines, c.capacities));
    EXPECT_EQ(manifest.requests[0].geometry.mx, c.mx);
    const std::string text = ManifestToJson(manifest);
    ASSERT_OK_AND_ASSIGN(const Manifest again, ParseManifest(text, "again"));
    EXPECT_EQ(again.requests[0].geometry, manifest.requests[0].geometry);
    EXPECT_EQ(ManifestToJson(again), text);
  }
}

TEST(ParseTrellisMxTest, CanonicalTextOfTheDirectArmIsGolden) {
  ASSERT_OK_AND_ASSIGN(
      const Manifest manifest,
      WithArms("\"direct_max_tokens\": 4, \"remainder\": \"rp2\",",
               "[1, 4, 32]"));
  ExpectGolden(ManifestToJson(manifest), "manifest.v1/trellis-mx-direct.json");
}

TEST(ParseTrellisMxTest, ADefaultLimitOfTheDirectArmInsideAnIntervalIsRefused) {
  EXPECT_THAT(
      WithArms("\"remainder\": \"rp2\",\n", "[1, 8, 32]"),
      StatusIs(absl::StatusCode::kInvalidArgument,
               Eq("m.json:19:18: \"direct_max_tokens\" is 16, its default; it "
                  "must be one of \"capacities\", 0 (never), or at least the "
                  "largest, so that no interval has tokens on both sides of "
                  "it")));
}

// kMx without a boundary, and another H.
std::string IdentityText(const std::string& hidden) {
  return absl::StrReplaceAll(
      kMx,
      {{"\"limit\": \"10\"", "\"limit\": \"10\", \"boundary\": \"identity\""},
       {"1024", hidden}});
}

TEST(ParseTrellisMxTest, TheBoundaryIsCoupledUnlessItSaysIdentity) {
  ASSERT_OK_AND_ASSIGN(const Manifest silent, ParseManifest(kMx, "f"));
  EXPECT_EQ(silent.requests[0].geometry.mx.boundary, MxBoundary::kCoupled);
  ASSERT_OK_AND_ASSIGN(
      const Manifest coupled,
      ParseManifest(
          absl::StrReplaceAll(IdentityText("1024"), {{"identity", "coupled"}}),
          "f"));
  EXPECT_EQ(coupled.requests[0].geometry, silent.requests[0].geometry);
  EXPECT_EQ(ManifestToJson(coupled), ManifestToJson(silent));
  // Nothing has blocks of 512 channels.
  ASSERT_OK_AND_ASSIGN(const Manifest identity,
                       ParseManifest(IdentityText("640"), "f"));
  EXPECT_EQ(identity.requests[0].geometry.hidden, 640);
  EXPECT_EQ(identity.requests[0].geometry.mx.boundary, MxBoundary::kIdentity);
  const std::string text = ManifestToJson(identity);
  ASSERT_OK_AND_ASSIGN(const Manifest again, ParseManifest(text, "again"));
  EXPECT_EQ(again.requests[0].geometry, identity.requests[0].geometry);
  ExpectGolden(text, "manifest.v1/trellis-mx-identity.json");
}

TEST(ParseTrellisMxTest, BothBoundariesOfOneShapeAreTwoRequests) {
  ASSERT_OK_AND_ASSIGN(Manifest manifest, ParseManifest(kMx, "f"));
  Request identity = manifest.requests[0];
  identity.name = "identity";
  identity.geometry.mx.boundary = MxBoundary::kIdentity;
  manifest.requests.push_back(identity);
  ASSERT_OK_AND_ASSIGN(const std::vector<PlannedRequest> planned,
                       Canonicalize(manifest, 0));
  EXPECT_EQ(planned.size(), 2u);
}

std::vector<BadInput> BadMxInputs() {
  const std::string decimal =
      ", must be \"inf\" or a decimal of at least 0.015625, without exponent "
      "or needless zeros";
  return {
      {"CodebookOfExl3", "\"bits\": 4", "\"codebook\": \"mcg\", \"bits\": 4",
       "m.json:16:6: unknown key \"codebook\" in \"weights\"; known: format, "
       "bits, limit, boundary"},
      {"UnknownBoundary", "\"10\"", "\"10\", \"boundary\": \"none\"",
       "m.json:16:44: \"boundary\" is \"none\", must be one of \"coupled\", "
       "\"identity\""},
      {"BoundaryAsNumber", "\"10\"", "\"10\", \"boundary\": 0",
       "m.json:16:44: \"boundary\" must be a string, found 0"},
      {"UnknownKey", "\"top_k\"", "\"smallm\": 4, \"top_k\"",
       "m.json:11:4: unknown key \"smallm\" in request; known: name, op, "
       "layers, hidden, intermediate, experts, top_k, activation, io_dtype, "
       "id_dtype, weights, recipe, smallm_max_tokens, direct_max_tokens, "
       "remainder, capacities, deterministic"},
      {"OneBit", "\"bits\": 4", "\"bits\": 1",
       "m.json:16:14: \"bits\" is 1, must be within 2..5"},
      {"SixBits", "\"bits\": 4", "\"bits\": 6",
       "m.json:16:14: \"bits\" is 6, must be within 2..5"},
      {"BitsByProjection", "\"bits\": 4",
       "\"bits\": {\"gate\": 4, \"up\": 4, \"down\": 4}",
       "m.json:16:14: \"bits\" must be an integer, found an object"},
      {"NoLimit", ", \"limit\": \"10\"", "",
       "m.json:15:15: \"weights\" lacks the key \"limit\""},
      {"LimitAsNumber", "\"10\"", "10",
       "m.json:16:26: \"limit\" must be a string, found 10"},
      {"ZeroLimit", "\"10\"", "\"0\"",
       "m.json:16:26: \"limit\" is \"0\"" + decimal},
      {"LimitThatClampsAllAway", "\"10\"", "\"0.000000001\"",
       "m.json:16:26: \"limit\" is \"0.000000001\"" + decimal},
      {"LimitWithNeedlessZeros", "\"10\"", "\"10.0\"",
       "m.json:16:26: \"limit\" is \"10.0\"" + decimal},
      {"HiddenBesideTheBlock", "\"hidden\": 1024", "\"hidden\": 640",
       "m.json:8:14: \"hidden\" is 640, must be a multiple of 512 (the coupled "
       "Hadamard block of trellis_mx)"},
      // Whoever takes the next multiple of 128 would be told of 512 then.
      {"HiddenBesideEveryBlock", "\"hidden\": 1024", "\"hidden\": 600",
       "m.json:8:14: \"hidden\" is 600, must be a multiple of 512 (the coupled "
       "Hadamard block of trellis_mx)"},
      {"HiddenBelowTheBlock", "\"hidden\": 1024", "\"hidden\": 128",
       "m.json:8:14: \"hidden\" is 128, must be within 512..65536 and a "
       "multiple of 512 (the coupled Hadamard block of trellis_mx)"},
      {"IntermediateBesideTheBlock", "\"intermediate\": 128",
       "\"intermediate\": 160",
       "m.json:9:20: \"intermediate\" is 160, must be a multiple of 128 (the "
       "Hadamard block)"},
      {"RecipeW4a16", "\"w4a8\"", "\"w4a16\"",
       "m.json:17:14: \"recipe\" is \"w4a16\", must be one of \"w4a8\""},
      {"NegativeSmallM", "_tokens\": 4", "_tokens\": -1",
       "m.json:18:25: \"smallm_max_tokens\" is -1, must be within 0..65536"},
      {"HugeSmallM", "_tokens\": 4", "_tokens\": 65537",
       "m.json:18:25: \"smallm_max_tokens\" is 65537, must be within "
       "0..65536"},
      {"SmallMAsText", "_tokens\": 4", "_tokens\": \"4\"",
       "m.json:18:25: \"smallm_max_tokens\" must be an integer, found \"4\""},
      {"SmallMInsideAnInterval", "_tokens\": 4", "_tokens\": 16",
       "m.json:18:25: \"smallm_max_tokens\" is 16, must be one of "
       "\"capacities\", 0 (never), or at least the largest, so that no "
       "interval "
       "has tokens on both sides of it"},
      {"NegativeDirect", "smallm_max_tokens\": 4", "direct_max_tokens\": -1",
       "m.json:18:25: \"direct_max_tokens\" is -1, must be within 0..16"},
      {"SeventeenDirect", "smallm_max_tokens\": 4", "direct_max_tokens\": 17",
       "m.json:18:25: \"direct_max_tokens\" is 17, must be within 0..16"},
      {"DirectAsText", "smallm_max_tokens\": 4", "direct_max_tokens\": \"4\"",
       "m.json:18:25: \"direct_max_tokens\" must be an integer, found \"4\""},
      {"DirectInsideAnInterval", "smallm_max_tokens\": 4",
       "direct_max_tokens\": 8",
       "m.json:18:25: \"direct_max_tokens\" is 8, must be one of "
       "\"capacities\", 0 (never), or at least the largest, so that no "
       "interval has tokens on both sides of it"},
      {"BothLimits", "\"smallm_max_tokens\": 4",
       "\"direct_max_tokens\": 4, \"smallm_max_tokens\": 1",
       "m.json:18:49: \"smallm_max_tokens\" is 1, must be 0 or missing where "
       "\"direct_max_tokens\" is 4: one arm answers the smallest token counts"},
      {"BothLimitsByTheRemainder", "\"smallm_max_tokens\": 4",
       "\"remainder\": \"rp2\", \"direct_max_tokens\": 1, "
       "\"smallm_max_tokens\": 4",
       "m.json:18:69: \"smallm_max_tokens\" is 4, must be 0 or missing where "
       "\"direct_max_tokens\" is 1: one arm answers the smallest token counts"},
      {"RemainderWithoutTheArm", "\"smallm_max_tokens\": 4",
       "\"direct_max_tokens\": 0, \"remainder\": \"rp2\"",
       "m.json:18:41: \"remainder\" is \"rp2\", must be \"none\" or missing "
       "where \"direct_max_tokens\" is 0: no other arm has one"},
      {"UnknownRemainder", "\"smallm_max_tokens\": 4", "\"remainder\": \"rp3\"",
       "m.json:18:17: \"remainder\" is \"rp3\", must be one of \"none\", "
       "\"rp2\""},
      {"RemainderAsNumber", "\"smallm_max_tokens\": 4", "\"remainder\": 2",
       "m.json:18:17: \"remainder\" must be a string, found 2"},
  };
}

class BadMxTest : public ::testing::TestWithParam<BadInput> {};

INSTANTIATE_TEST_SUITE_P(Inputs, BadMxTest, ::testing::ValuesIn(BadMxInputs()),
                         [](const auto& input) { return input.param.name; });

TEST(ParseTrellisMxTest, ChannelsBesideAWordOfScalesAreRefused) {
  EXPECT_THAT(
      ParseManifest(IdentityText("576"), "m.json"),
      StatusIs(
          absl::StatusCode::kInvalidArgument,
          Eq("m.json:8:14: \"hidden\" is 576, must be a multiple of 128 (a "
             "word of prepared scales, which identity layers have too)")));
  EXPECT_THAT(
      ParseManifest(absl::StrReplaceAll(
                        IdentityText("640"),
                        {{"\"intermediate\": 128", "\"intermediate\": 160"}}),
                    "m.json"),
      StatusIs(absl::StatusCode::kInvalidArgument,
               Eq("m.json:9:20: \"intermediate\" is 160, must be a multiple of "
                  "128 (a word of prepared scales, which identity layers have "
                  "too)")));
}

TEST_P(BadMxTest, IsRefusedWithPlaceValueAndRule) {
  const BadInput& input = GetParam();
  const std::string text = absl::StrReplaceAll(kMx, {{input.from, input.to}});
  ASSERT_NE(text, kMx);
  EXPECT_THAT(ParseManifest(text, "m.json"),
              StatusIs(absl::StatusCode::kInvalidArgument, Eq(input.message)));
}

// The same of QSRT weights.
const char* const kQsrt =
    "{\n"                                                      // 1
    " \"schema\": \"kiln.model/1\",\n"                         // 2
    " \"name\": \"tiny\",\n"                                   // 3
    " \"requests\": [{\n"                                      // 4
    "   \"name\": \"part\",\n"                                 // 5
    "   \"op\": \"fused_moe\",\n"                              // 6
    "   \"layers\": 2,\n"                                      // 7
    "   \"hidden\": 384,\n"                                    // 8
    "   \"intermediate\": 256,\n"                              // 9
    "   \"experts\": 8,\n"                                     // 10
    "   \"top_k\": 2,\n"                                       // 11
    "   \"activation\": \"per_expert\",\n"                     // 12
    "   \"io_dtype\": \"bf16\",\n"                             // 13
    "   \"id_dtype\": \"i32\",\n"                              // 14
    "   \"weights\": {\"format\": \"qsrt\",\n"                 // 15
    "     \"pairs\": \"p33_p43\", \"scales\": \"shared\"},\n"  // 16
    "   \"recipe\": \"w4a8\", \"decode_max_tokens\": 4,\n"     // 17
    "   \"capacities\": [1, 4, 32]\n"                          // 18
    " }]\n"                                                    // 19
    "}\n";                                                     // 20

RequestGeometry QsrtGeometry() {
  RequestGeometry geometry;
  geometry.hidden = 384;
  geometry.intermediate = 256;
  geometry.experts = 8;
  geometry.top_k = 2;
  geometry.activation = Activation::kPerExpert;
  geometry.weights.format = WeightFormat::kQsrt;
  geometry.weights.shared_scales = true;
  geometry.recipe = Recipe::kW4A8;
  geometry.qsrt = {.pairs = PairKinds::kP33P43, .decode_max_tokens = 4};
  return geometry;
}

TEST(ParseQsrtTest, ReadsEveryField) {
  ASSERT_OK_AND_ASSIGN(const Manifest manifest, ParseManifest(kQsrt, "f"));
  EXPECT_EQ(manifest.requests[0].geometry, QsrtGeometry());
}

TEST(ParseQsrtTest, ReadsTheOtherWords) {
  ASSERT_OK_AND_ASSIGN(
      const Manifest manifest,
      ParseManifest(
          absl::StrReplaceAll(
              kQsrt, {{"p33_p43", "p24_p33"},
                      {", \"scales\": \"shared\"", ""},
                      {"per_expert", "situ"},
                      {"\"w4a8\", \"decode_max_tokens\": 4", "\"w4a16\""}}),
          "f"));
  RequestGeometry expected = QsrtGeometry();
  expected.activation = Activation::kSitu;
  expected.weights.shared_scales = false;
  expected.recipe = Recipe::kW4A16;
  expected.qsrt = {.pairs = PairKinds::kP24P33};
  EXPECT_EQ(manifest.requests[0].geometry, expected);
}

TEST(ParseQsrtTest, CanonicalTextIsAFixedPointAndGolden) {
  ASSERT_OK_AND_ASSIGN(const Manifest manifest, ParseManifest(kQsrt, "f"));
  const std::string text = ManifestToJson(manifest);
  ASSERT_OK_AND_ASSIGN(const Manifest again, ParseManifest(text, "again"));
  EXPECT_EQ(again.requests[0].geometry, manifest.requests[0].geometry);
  EXPECT_EQ(ManifestToJson(again), text);
  ExpectGolden(text, "manifest.v1/qsrt.json");
}

TEST(ParseQsrtTest, CanonicalTextOfW4a16NamesNoLimit) {
  ASSERT_OK_AND_ASSIGN(
      const Manifest manifest,
      ParseManifest(
          absl::StrReplaceAll(
              kQsrt, {{"\"w4a8\", \"decode_max_tokens\": 4", "\"w4a16\""}}),
          "f"));
  ASSERT_OK_AND_ASSIGN(const Manifest again,
                       ParseManifest(ManifestToJson(manifest), "again"));
  EXPECT_EQ(again.requests[0].geometry, manifest.requests[0].geometry);
}

TEST(ParseQsrtTest, ALimitBeyondAllCapacitiesIsLegal) {
  ASSERT_OK_AND_ASSIGN(
      const Manifest manifest,
      ParseManifest(
          absl::StrReplaceAll(kQsrt, {{"_tokens\": 4", "_tokens\": 33"}}),
          "f"));
  EXPECT_EQ(manifest.requests[0].geometry.qsrt.decode_max_tokens, 33u);
}

std::vector<BadInput> BadQsrtInputs() {
  return {
      {"CodebookOfExl3", "\"pairs\"", "\"codebook\": \"mcg\", \"pairs\"",
       "m.json:16:6: unknown key \"codebook\" in \"weights\"; known: format, "
       "pairs, scales"},
      {"UnknownPairs", "p33_p43", "p22_p44",
       "m.json:16:15: \"pairs\" is \"p22_p44\", must be one of \"p24_p33\", "
       "\"p33_p43\""},
      {"NoPairs", "\"pairs\": \"p33_p43\", ", "",
       "m.json:15:15: \"weights\" lacks the key \"pairs\""},
      {"UnknownScales", "\"shared\"", "\"broadcast\"",
       "m.json:16:36: \"scales\" is \"broadcast\", must be one of "
       "\"per_expert\", \"shared\""},
      {"UnknownActivation", "\"per_expert\"", "\"gelu\"",
       "m.json:12:18: \"activation\" is \"gelu\", must be one of \"silu\", "
       "\"situ\", \"per_expert\""},
      {"ChannelsBesidePairs", "\"intermediate\": 256", "\"intermediate\": 300",
       "m.json:9:20: \"intermediate\" is 300, must be 256 (one pair of records "
       "of qsrt; a layer with more channels is several parts, whose outputs "
       "add up)"},
      {"TwoPairsOfRecords", "\"intermediate\": 256", "\"intermediate\": 512",
       "m.json:9:20: \"intermediate\" is 512, must be 256 (one pair of records "
       "of qsrt; a layer with more channels is several parts, whose outputs "
       "add up)"},
      {"UnknownRecipe", "\"w4a8\"", "\"w8a8\"",
       "m.json:17:14: \"recipe\" is \"w8a8\", must be one of \"w4a16\", "
       "\"w4a8\""},
      {"LimitOfTheOtherRecipe", "\"w4a8\"", "\"w4a16\"",
       "m.json:17:44: \"decode_max_tokens\" is 4, must not be there: recipe "
       "w4a16 has 16-bit activations for all token counts"},
      {"NoLimit", ", \"decode_max_tokens\": 4", "",
       "m.json:4:15: request lacks the key \"decode_max_tokens\""},
      {"ZeroLimit", "_tokens\": 4", "_tokens\": 0",
       "m.json:17:43: \"decode_max_tokens\" is 0, must be within 1..65536"},
      {"LimitInsideAnInterval", "_tokens\": 4", "_tokens\": 16",
       "m.json:17:43: \"decode_max_tokens\" is 16, must be one of "
       "\"capacities\" or at least the largest, so that no interval has tokens "
       "on both sides of it"},
      {"LimitOfTrellisMx", "decode_max_tokens", "smallm_max_tokens",
       "m.json:17:22: unknown key \"smallm_max_tokens\" in request; known: "
       "name, op, layers, hidden, intermediate, experts, top_k, activation, "
       "io_dtype, id_dtype, weights, recipe, decode_max_tokens, capacities, "
       "deterministic"},
  };
}

class BadQsrtTest : public ::testing::TestWithParam<BadInput> {};

INSTANTIATE_TEST_SUITE_P(Inputs, BadQsrtTest,
                         ::testing::ValuesIn(BadQsrtInputs()),
                         [](const auto& input) { return input.param.name; });

TEST_P(BadQsrtTest, IsRefusedWithPlaceValueAndRule) {
  const BadInput& input = GetParam();
  const std::string text = absl::StrReplaceAll(kQsrt, {{input.from, input.to}});
  ASSERT_NE(text, kQsrt);
  EXPECT_THAT(ParseManifest(text, "m.json"),
              StatusIs(absl::StatusCode::kInvalidArgument, Eq(input.message)));
}

// What decides which keys belong to a request is judged before the keys.
TEST(ParseManifestTest, AMistakeInTheFormatOrOpIsNotBlamedOnTheKeys) {
  EXPECT_THAT(ParseManifest(
                  absl::StrReplaceAll(kQsrt, {{"\"qsrt\"", "\"QSRT\""}}), "f"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("\"format\" is \"QSRT\""),
                             HasSubstr("\"qsrt\""))));
  EXPECT_THAT(
      ParseManifest(
          absl::StrReplaceAll(kQsrt, {{"\"fused_moe\"", "\"Linear\""}}), "f"),
      StatusIs(absl::StatusCode::kInvalidArgument,
               HasSubstr("\"op\" is \"Linear\"")));
}

TEST(ParseManifestTest, Exl3HasNoSmallMLimit) {
  EXPECT_THAT(
      ParseManifest(
          Changed("\"recipe\"", "\"smallm_max_tokens\": 1, \"recipe\""), "f"),
      StatusIs(absl::StatusCode::kInvalidArgument,
               HasSubstr("f:19:4: unknown key \"smallm_max_tokens\"")));
}

TEST(ParseManifestTest, RefusesOtherRoots) {
  EXPECT_THAT(ParseManifest("[]", "f"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       Eq("f:1:1: manifest must be an object, found an array "
                          "of 0")));
  EXPECT_THAT(ParseManifest("{}", "f"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       Eq("f:1:1: manifest lacks the key \"schema\"")));
  EXPECT_THAT(ParseManifest("", "f"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("f:1:1: invalid JSON")));
  EXPECT_THAT(ParseManifest(absl::StrCat(std::string(100000, '['), "1"), "f"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("f:1:65: more than 64 levels")));
}

TEST(ParseManifestTest, RefusesNoRequestsAndTooMany) {
  const std::string head =
      "{\"schema\": \"kiln.model/1\", \"name\": \"n\", \"requests\": [";
  EXPECT_THAT(ParseManifest(head + "]}", "f"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       Eq("f:1:53: \"requests\" has 0 entries, must have "
                          "1..1024")));
  std::string many = head + "0";
  for (int i = 0; i < 1024; ++i) many += ",0";
  EXPECT_THAT(ParseManifest(many + "]}", "f"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("has 1025 entries")));
  EXPECT_THAT(ParseManifest(head + "7]}", "f"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("request must be an object, found 7")));
}

// Text of the second request of a manifest that repeats the first one.
std::string TwoRequests(const std::string& from, const std::string& to) {
  const std::string text = kSmall;
  const size_t begin = text.find("  {\n");
  const size_t end = text.find(" ]\n}");
  const std::string request = text.substr(begin, end - begin - 1);
  return absl::StrCat(text.substr(0, begin), request, ",\n",
                      absl::StrReplaceAll(request, {{from, to}}), "\n",
                      text.substr(end));
}

TEST(ParseManifestTest, RefusesADuplicateRequestName) {
  EXPECT_THAT(
      ParseManifest(TwoRequests("\"hidden\": 256", "\"hidden\": 384"), "f"),
      StatusIs(absl::StatusCode::kInvalidArgument,
               Eq("f:23:12: duplicate request name \"moe\", first used by the "
                  "request on line 5")));
}

TEST(ReadManifestTest, NamesTheFile) {
  const ScratchFolder folder;
  EXPECT_THAT(ReadManifest(folder.File("none.json")),
              StatusIs(absl::StatusCode::kNotFound,
                       HasSubstr(folder.File("none.json"))));
  EXPECT_THAT(ReadManifest(folder.path()),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("is not a regular file")));
}

TEST(CanonicalizeTest, MergesRequestsThatDifferByNameAndLayers) {
  ASSERT_OK_AND_ASSIGN(const Manifest manifest,
                       ParseManifest(TwoRequests("\"moe\"", "\"a_moe\""), "f"));
  ASSERT_OK_AND_ASSIGN(const std::vector<PlannedRequest> planned,
                       Canonicalize(manifest, 0));
  ASSERT_EQ(planned.size(), 1u);
  EXPECT_THAT(planned[0].names, ElementsAre("a_moe", "moe"));
  EXPECT_THAT(planned[0].intervals,
              ElementsAre(Interval{1, 1}, Interval{2, 2}, Interval{3, 4}));
}

TEST(CanonicalizeTest, DoesNotDependOnTheOrderOfTheFile) {
  ASSERT_OK_AND_ASSIGN(
      Manifest manifest,
      ParseManifest(
          absl::StrReplaceAll(TwoRequests("\"moe\"", "\"other\""),
                              {{"\"other\",\n   \"op\": \"fused_moe\",\n   "
                                "\"layers\": 2,\n   \"hidden\": 256",
                                "\"other\",\n   \"op\": \"fused_moe\",\n   "
                                "\"layers\": 2,\n   \"hidden\": 128"}}),
          "f"));
  ASSERT_OK_AND_ASSIGN(const std::vector<PlannedRequest> one,
                       Canonicalize(manifest, 0));
  std::swap(manifest.requests[0], manifest.requests[1]);
  ASSERT_OK_AND_ASSIGN(const std::vector<PlannedRequest> two,
                       Canonicalize(manifest, 0));
  ASSERT_EQ(one.size(), 2u);
  ASSERT_EQ(two.size(), 2u);
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(one[i].geometry, two[i].geometry);
    EXPECT_EQ(one[i].names, two[i].names);
  }
  EXPECT_EQ(one[0].geometry.hidden, 128);
}

TEST(CanonicalizeTest, DropsCapacitiesAboveTheLimit) {
  ASSERT_OK_AND_ASSIGN(const Manifest manifest, ParseManifest(kSmall, "f"));
  ASSERT_OK_AND_ASSIGN(const std::vector<PlannedRequest> planned,
                       Canonicalize(manifest, 3));
  EXPECT_THAT(planned[0].capacities, ElementsAre(1, 2));
  EXPECT_THAT(planned[0].intervals,
              ElementsAre(Interval{1, 1}, Interval{2, 2}));
}

TEST(CanonicalizeTest, RefusesToDropEveryCapacity) {
  ASSERT_OK_AND_ASSIGN(const Manifest manifest,
                       ParseManifest(Changed("[1, 2, 4]", "[8, 16]"), "f"));
  EXPECT_THAT(Canonicalize(manifest, 7),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       Eq("request \"moe\" has no capacity of at most 7; its "
                          "smallest is 8")));
}

TEST(CanonicalizeTest, RefusesContradictingCapacities) {
  ASSERT_OK_AND_ASSIGN(Manifest manifest,
                       ParseManifest(TwoRequests("\"moe\"", "\"two\""), "f"));
  manifest.requests[1].capacities = {1, 4};
  EXPECT_THAT(Canonicalize(manifest, 0),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("requests \"moe\" and \"two\" have the same "
                                 "geometry but different capacities")));
}

}  // namespace
}  // namespace kiln
