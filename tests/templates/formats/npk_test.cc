// One valid sidecar, and for every rule files that break it and nothing else.

#include "templates/formats/npk.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <functional>

#include "absl/strings/str_cat.h"
#include "tests/support/checkpoint_writer.h"
#include "tests/support/npk_writer.h"
#include "tests/support/status_matchers.h"
#include "tests/templates/test_data.h"

namespace kiln {
namespace {

using ::absl::StatusCode;
using ::kiln::testing::NpkBytes;
using ::kiln::testing::NpkTensorOffset;
using ::kiln::testing::RandomNpkTensors;
using ::kiln::testing::SmallNpk;
using ::kiln::testing::StatusIs;
using ::kiln::testing::TestFolder;
using ::kiln::testing::WithHeaderText;
using ::testing::AllOf;
using ::testing::HasSubstr;

std::span<const uint8_t> AsBytes(const std::string& text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

std::string ValidFile() {
  return NpkBytes(SmallNpk(), RandomNpkTensors(SmallNpk(), 1));
}

absl::Status Check(const std::string& file, const NpkPins& pins = {}) {
  return NpkSidecar::Parse(AsBytes(file), {.pins = pins}).status();
}

// The rule, and words that the message must have.
void ExpectRefused(const absl::Status& status, int rule,
                   const std::string& first, const std::string& second = "") {
  EXPECT_THAT(status,
              StatusIs(StatusCode::kInvalidArgument,
                       AllOf(HasSubstr(absl::StrCat("rule V", rule, ": ")),
                             HasSubstr(first), HasSubstr(second))));
}

void ExpectHeaderRefused(const std::string& from, const std::string& to,
                         int rule, const std::string& first,
                         const std::string& second = "") {
  SCOPED_TRACE(to);
  ExpectRefused(Check(WithHeaderText(ValidFile(), from, to)), rule, first,
                second);
}

// The valid file with some bytes of a tensor replaced.
std::string WithBytes(NpkTensor which, size_t offset,
                      const std::string& bytes) {
  std::string file = ValidFile();
  file.replace(NpkTensorOffset(file, SmallNpk(), which) + offset, bytes.size(),
               bytes);
  return file;
}

TEST(NpkTest, TheValidFileIsRead) {
  const std::string file = ValidFile();
  ASSERT_OK_AND_ASSIGN(const NpkSidecar sidecar,
                       NpkSidecar::Parse(AsBytes(file)));
  EXPECT_EQ(sidecar.metadata(), SmallNpk());
  EXPECT_EQ(sidecar.metadata().first_atom(), 4);
  EXPECT_EQ(sidecar.metadata().LimitValue(), 10);
  for (const auto& [which, bytes] : RandomNpkTensors(SmallNpk(), 1)) {
    const std::span<const uint8_t> found = sidecar.tensor(which);
    EXPECT_EQ(std::string(found.begin(), found.end()), bytes);
  }
  EXPECT_OK(
      Check(WithHeaderText(file, "\"limit\":\"10\"", "\"limit\":\"6.25\"")));
}

TEST(NpkTest, EveryRateAndTheIdentityBoundaryAreRead) {
  for (int bits = 2; bits <= 5; ++bits) {
    NpkMetadata metadata = SmallNpk();
    metadata.bits = bits;
    EXPECT_OK(Check(NpkBytes(metadata, RandomNpkTensors(metadata, 2))));
    metadata.boundary = NpkBoundary::kIdentity;
    metadata.hidden = 128;
    metadata.intermediate = 32;
    metadata.intermediate_global = 64;
    const std::string file = NpkBytes(metadata, RandomNpkTensors(metadata, 2));
    ASSERT_OK_AND_ASSIGN(const NpkSidecar sidecar,
                         NpkSidecar::Parse(AsBytes(file)));
    EXPECT_TRUE(sidecar.tensor(NpkTensor::kSignDraw).empty());
  }
}

TEST(NpkTest, DataBeginsAtAMultipleOf64AndTensorsToo) {
  const std::string file = ValidFile();
  uint64_t length = 0;
  std::memcpy(&length, file.data(), sizeof(length));
  EXPECT_EQ((8 + length) % 64, 0u);
  for (const SafetensorsTensor& tensor : NpkTensorsOf(SmallNpk())) {
    EXPECT_EQ(tensor.begin % 64, 0u) << tensor.name;
  }
  // Any safetensors reader takes it.
  const TestFolder folder;
  EXPECT_OK(SafetensorsFile::Open(folder.Write("a", file)));
}

// ---- V1: the header --------------------------------------------------------

TEST(NpkRulesTest, V1RefusesALengthBeyondTheFileOrTheLimit) {
  std::string file = ValidFile();
  ExpectRefused(Check(file.substr(0, 7)), 1, "7 bytes");
  ExpectRefused(Check(file.substr(0, 100)), 1, "must be at most 92");
  uint64_t length = (1u << 20) + 56;
  std::memcpy(file.data(), &length, sizeof(length));
  file.resize(1u << 22);
  ExpectRefused(Check(file), 1, "1048632", "at most 1048576");
  length = UINT64_MAX;
  std::memcpy(file.data(), &length, sizeof(length));
  ExpectRefused(Check(file), 1, "18446744073709551615");
}

TEST(NpkRulesTest, V1RefusesWhatIsNotOneObject) {
  ExpectHeaderRefused("{\"__metadata__\"", "[{\"__metadata__\"", 1, "header");
  ExpectHeaderRefused("}}", "}}}", 1, "header:");
}

TEST(NpkRulesTest, V1RefusesDuplicateKeys) {
  ExpectHeaderRefused("\"rank\":\"1\"", "\"rank\":\"1\",\"rank\":\"1\"", 1,
                      "rank");
  ExpectHeaderRefused("\"down_svh\":", "\"down_svh\":{},\"down_svh\":", 1,
                      "down_svh");
}

TEST(NpkRulesTest, V1RefusesAHeaderThatIsNotCanonical) {
  const std::string canonical = "differs at byte";
  ExpectHeaderRefused("\"rank\":\"1\"", "\"rank\": \"1\"", 1, canonical);
  ExpectHeaderRefused("\"bits\":\"3\",\"boundary\":\"coupled-h512-h128.v1\"",
                      "\"boundary\":\"coupled-h512-h128.v1\",\"bits\":\"3\"", 1,
                      canonical);
  ExpectHeaderRefused("\"rank\":\"1\"", "\"rank\":\"\\u0031\"", 1, canonical);
  ExpectHeaderRefused("test/small", "caf\xC3\xA9", 1, "printable ASCII");
  ExpectHeaderRefused("\"rank\":\"1\"", "\"rank\":1.5", 1, "1.5");
  // Padded with something else than spaces, or too far.
  std::string file = ValidFile();
  uint64_t length = 0;
  std::memcpy(&length, file.data(), sizeof(length));
  length += 64;
  std::memcpy(file.data(), &length, sizeof(length));
  file.insert(static_cast<size_t>(length) - 56, std::string(64, ' '));
  ExpectRefused(Check(file), 1, canonical);
}

// ---- V2: the inventory -----------------------------------------------------

TEST(NpkRulesTest, V2RefusesATensorTooManyOrTooFew) {
  ExpectHeaderRefused(
      "\"w2_stream\":",
      "\"extra\":{\"data_offsets\":[0,0],\"dtype\":\"U8\",\"shape\":[0]},"
      "\"w2_stream\":",
      1, "");
  ExpectHeaderRefused("\"w2_stream\":",
                      "\"w2_extra\":{\"data_offsets\":[0,0],\"dtype\":\"U8\","
                      "\"shape\":[0]},\"w2_stream\":",
                      1, "");
  ExpectHeaderRefused("\"w13_stream\":",
                      "\"w13_sharp\":{\"data_offsets\":[0,0],\"dtype\":\"U8\","
                      "\"shape\":[0]},\"w13_stream\":",
                      2, "\"w13_sharp\"", "does not belong");
  ExpectHeaderRefused("\"w2_stream\"", "\"w2_streams\"", 2, "\"w2_streams\"");
  // The identity boundary has no vectors.
  NpkMetadata metadata = SmallNpk();
  metadata.boundary = NpkBoundary::kIdentity;
  const std::string file = NpkBytes(metadata, RandomNpkTensors(metadata, 1));
  ExpectRefused(
      Check(WithHeaderText(file, "\"w13_scale\":",
                           "\"down_svh\":{\"data_offsets\":[0,0],\"dtype\":"
                           "\"F16\",\"shape\":[0]},\"w13_scale\":")),
      2, "\"down_svh\"");
}

TEST(NpkRulesTest, V2RefusesAMissingTensor) {
  const std::string file = ValidFile();
  const size_t begin = file.find(",\"w2_scale\":{");
  const size_t end = file.find('}', begin) + 1;
  ExpectRefused(
      Check(WithHeaderText(file, file.substr(begin, end - begin), "")), 2,
      "\"w2_scale\" is missing");
  // A coupled layer needs each of its vectors.
  for (const std::string name :
       {"gate_up_suh", "inner_scales", "down_svh", "sign_draw"}) {
    const size_t from = file.find(",\"" + name + "\":{");
    ASSERT_NE(from, std::string::npos) << name;
    const size_t to = file.find('}', from) + 1;
    ExpectRefused(Check(WithHeaderText(file, file.substr(from, to - from), "")),
                  2, "\"" + name + "\" is missing");
  }
}

// ---- V3: the places --------------------------------------------------------

TEST(NpkRulesTest, V3RefusesOffsetsThatAreNotContiguous) {
  ExpectHeaderRefused("\"data_offsets\":[0,", "\"data_offsets\":[64,", 3,
                      "\"w13_stream\" lies at [64", "must lie at [0,");
  const SafetensorsTensor w2 = NpkTensorsOf(SmallNpk())[1];
  ExpectHeaderRefused(absl::StrCat("[", w2.begin, ",", w2.end, "]"),
                      absl::StrCat("[", w2.begin, ",", w2.end + 64, "]"), 3,
                      "\"w2_stream\"");
}

TEST(NpkRulesTest, V3RefusesTrailingDataAndACutFile) {
  const std::string file = ValidFile();
  ExpectRefused(Check(file + '\0'), 3, "too long");
  ExpectRefused(Check(file.substr(0, file.size() - 1)), 3, "cut short");
}

TEST(NpkRulesTest, V3RefusesASymbolicLink) {
  const TestFolder folder;
  const std::string path = folder.Write("file", ValidFile());
  EXPECT_OK(NpkSidecar::Open(path));
  const std::string link = folder.At("link");
  ASSERT_EQ(symlink(path.c_str(), link.c_str()), 0);
  const absl::Status status = NpkSidecar::Open(link).status();
  ExpectRefused(status, 3, "symbolic link", link);
  unlink(link.c_str());
  ExpectRefused(NpkSidecar::Open(folder.path()).status(), 3, "regular file");
  EXPECT_THAT(NpkSidecar::Open(folder.At("none")),
              StatusIs(StatusCode::kNotFound, HasSubstr("none")));
}

// ---- V4: types and shapes --------------------------------------------------

TEST(NpkRulesTest, V4RefusesAnotherType) {
  ExpectHeaderRefused("\"dtype\":\"F16\",\"shape\":[512]",
                      "\"dtype\":\"BF16\",\"shape\":[512]", 4, "\"BF16\" [512]",
                      "must be F16 [512]");
}

TEST(NpkRulesTest, V4RefusesAnotherShape) {
  ExpectHeaderRefused("\"shape\":[2,3,32,8,48]", "\"shape\":[3,2,32,8,48]", 4,
                      "\"w13_stream\"", "must be I16 [2, 3, 32, 8, 48]");
  ExpectHeaderRefused("\"shape\":[2,3,32,8,48]", "\"shape\":[2,3,32,384]", 4,
                      "\"w13_stream\"");
  ExpectHeaderRefused("\"shape\":[2,3,32,8,48]", "\"shape\":[-2,3,32,8,48]", 4,
                      "\"w13_stream\"");
  ExpectHeaderRefused("\"shape\":[2,3,32,8,48]", "\"shape\":\"2\"", 4,
                      "\"w13_stream\"");
}

// ---- V5: words -------------------------------------------------------------

TEST(NpkRulesTest, V5RefusesUnknownWords) {
  ExpectHeaderRefused("npk1-sidecar.v1", "npk1-sidecar.v2", 5,
                      "npk1-sidecar.v2", "must be npk1-sidecar.v1");
  ExpectHeaderRefused("mul=cbac1fed", "mul=83dcd12d", 5, "mul=83dcd12d",
                      "must be npk1:mul=cbac1fed");
  ExpectHeaderRefused("coupled-h512-h128.v1", "coupled-h512-h128.v2", 5,
                      "\"boundary\"", "identity or coupled");
  ExpectHeaderRefused("\"activation\":\"silu\"", "\"activation\":\"gelu\"", 5,
                      "gelu");
  ExpectHeaderRefused("gate-up", "up-gate", 5, "up-gate");
  ExpectHeaderRefused("npk1-mt19937", "mt19937", 5, "\"sign_generator\"");
}

TEST(NpkRulesTest, V5RefusesARateOutsideTheLaw) {
  ExpectHeaderRefused("\"bits\":\"3\"", "\"bits\":\"6\"", 5, "\"bits\" is 6",
                      "within 2..5");
  ExpectHeaderRefused("\"bits\":\"3\"", "\"bits\":\"1\"", 5, "\"bits\" is 1");
}

TEST(NpkRulesTest, V5RefusesTheOtherWindowLaw) {
  ExpectHeaderRefused("\"window\":\"w2\"", "\"window\":\"w3\"", 5,
                      "w3 at 3 bits", "w3 exactly at 5 bits");
  NpkMetadata metadata = SmallNpk();
  metadata.bits = 5;
  const std::string file = NpkBytes(metadata, RandomNpkTensors(metadata, 1));
  ExpectRefused(
      Check(WithHeaderText(file, "\"window\":\"w3\"", "\"window\":\"w2\"")), 5,
      "w2 at 5 bits");
}

// ---- V6, V7: geometry ------------------------------------------------------

TEST(NpkRulesTest, V6RefusesAGeometryThatTheBoundaryCannotHave) {
  ExpectHeaderRefused("\"hidden\":\"512\"", "\"hidden\":\"640\"", 6,
                      "\"hidden\" is 640", "multiple of 512");
  ExpectHeaderRefused("\"intermediate_local\":\"128\"",
                      "\"intermediate_local\":\"96\"", 6,
                      "\"intermediate_local\" is 96", "multiple of 128");
  ExpectHeaderRefused("\"experts\":\"3\"", "\"experts\":\"0\"", 6,
                      "\"experts\" is 0", "1..4096");
  ExpectHeaderRefused("\"experts\":\"3\"", "\"experts\":\"4097\"", 6,
                      "\"experts\" is 4097");
  ExpectHeaderRefused("\"hidden\":\"512\"", "\"hidden\":\"999999488\"", 6,
                      "\"hidden\"");
  NpkMetadata metadata = SmallNpk();
  metadata.boundary = NpkBoundary::kIdentity;
  const std::string file = NpkBytes(metadata, RandomNpkTensors(metadata, 1));
  ExpectRefused(
      Check(WithHeaderText(file, "\"hidden\":\"512\"", "\"hidden\":\"64\"")), 6,
      "multiple of 128");
  ExpectRefused(Check(WithHeaderText(file, "\"intermediate_local\":\"128\"",
                                     "\"intermediate_local\":\"16\"")),
                6, "multiple of 32");
}

TEST(NpkRulesTest, V7RefusesASliceThatIsNotTheRanks) {
  ExpectHeaderRefused("\"intermediate_global\":\"256\"",
                      "\"intermediate_global\":\"384\"", 7,
                      "\"intermediate_global\" is 384", "2 times");
  ExpectHeaderRefused("\"first_atom\":\"4\"", "\"first_atom\":\"0\"", 7,
                      "\"first_atom\" is 0", "must be 4");
  ExpectHeaderRefused("\"rank\":\"1\"", "\"rank\":\"2\"", 7, "\"rank\" is 2",
                      "below \"world_size\", 2");
  ExpectHeaderRefused("\"world_size\":\"2\"", "\"world_size\":\"0\"", 7,
                      "\"world_size\", 0");
  ExpectHeaderRefused("\"world_size\":\"2\"", "\"world_size\":\"999999999\"", 7,
                      "999999999");
}

// ---- V8 to V11: values -----------------------------------------------------

TEST(NpkRulesTest, V8RefusesTheReservedScale) {
  ExpectRefused(
      Check(WithBytes(NpkTensor::kW13Scale, 16 * (256 + 3) + 5, "\xFF")), 8,
      "\"w13_scale\" has the scale 255 at [1, 3, 5]", "within 0..254");
  ExpectRefused(Check(WithBytes(NpkTensor::kW2Scale, 4 * 511 + 2, "\xFF")), 8,
                "\"w2_scale\" has the scale 255 at [0, 511, 2]");
}

TEST(NpkRulesTest, V9RefusesScalesThatAreZeroOrNotFinite) {
  const std::string zero("\0\0", 2);
  const std::string minus_zero("\0\x80", 2);
  const std::string infinity("\0\x7C", 2);
  const std::string nan("\x01\xFC", 2);
  ExpectRefused(Check(WithBytes(NpkTensor::kGateUpSuh, 2 * 9, zero)), 9,
                "\"gate_up_suh\" has the binary16 bits 0x0 at [9]",
                "finite and not zero");
  ExpectRefused(Check(WithBytes(NpkTensor::kDownSvh, 0, minus_zero)), 9,
                "0x8000 at [0]");
  ExpectRefused(Check(WithBytes(NpkTensor::kInnerScales,
                                2 * (384 + 2 * 128 + 4), infinity)),
                9,
                "\"inner_scales\" has the binary16 bits 0x7c00 at [1, 2, 4]");
  ExpectRefused(Check(WithBytes(NpkTensor::kInnerScales, 2, nan)), 9,
                "0xfc01 at [0, 0, 1]");
}

TEST(NpkRulesTest, V10RefusesADrawThatIsNone) {
  ExpectRefused(Check(WithBytes(NpkTensor::kSignDraw, 2, "\x08")), 10,
                "\"sign_draw\" has 8 at [2]", "within 0..7");
}

TEST(NpkRulesTest, V10RefusesOtherSignsThanTheDraws) {
  // A legal draw that none of the experts had.
  ExpectRefused(Check(WithBytes(NpkTensor::kSignDraw, 2, "\x05")), 10,
                "\"sha256.signs\" is", "the regenerated signs have");
}

TEST(NpkRulesTest, V11RefusesAnyChangedByte) {
  for (const NpkTensor which :
       {NpkTensor::kW13Stream, NpkTensor::kW2Stream, NpkTensor::kW13Scale,
        NpkTensor::kW2Scale, NpkTensor::kGateUpSuh, NpkTensor::kInnerScales,
        NpkTensor::kDownSvh}) {
    std::string file = ValidFile();
    file[NpkTensorOffset(file, SmallNpk(), which)] ^= 1;
    const absl::string_view name =
        NpkTensorsOf(SmallNpk())[static_cast<size_t>(which)].name;
    ExpectRefused(Check(file), 11, absl::StrCat("\"", name, "\" has the SHA"));
  }
  // The draws of experts 0 and 1 exchanged: the same signs occur.
  ExpectRefused(
      Check(WithBytes(NpkTensor::kSignDraw, 0, std::string("\x01\x00", 2))), 11,
      "\"sign_draw\"");
}

TEST(NpkRulesTest, V11HoldsTheFileAgainstTheCallersDigest) {
  const std::string file = ValidFile();
  NpkPins pins;
  pins.file = Sha256(file);
  EXPECT_OK(Check(file, pins));
  pins.file->bytes[0] ^= 1;
  ExpectRefused(Check(file, pins), 11, "the file has the SHA-256",
                "the caller wants");
}

// ---- V12, V13 --------------------------------------------------------------

TEST(NpkRulesTest, V12HoldsTheFileAgainstTheCallersPins) {
  const std::string file = ValidFile();
  NpkPins right;
  right.layer = 7;
  right.rank = 1;
  right.bits = 3;
  right.design = SmallNpk().design;
  right.encoder = SmallNpk().encoder;
  EXPECT_OK(Check(file, right));
  NpkPins pins = right;
  pins.layer = 8;
  ExpectRefused(Check(file, pins), 12, "\"layer\" is 7", "wants 8");
  pins = right;
  pins.rank = 0;
  ExpectRefused(Check(file, pins), 12, "\"rank\" is 1", "wants 0");
  pins = right;
  pins.bits = 4;
  ExpectRefused(Check(file, pins), 12, "\"bits\" is 3", "wants 4");
  pins = right;
  pins.design->bytes[31] = 0;
  ExpectRefused(Check(file, pins), 12, "\"design_sha256\"");
  pins = right;
  pins.encoder->bytes[31] = 0;
  ExpectRefused(Check(file, pins), 12, "\"encoder_sha256\"");
}

TEST(NpkRulesTest, V13RefusesAnotherRateThanTheTensors) {
  ExpectHeaderRefused("\"payload_bpw\":\"3.25\"", "\"payload_bpw\":\"3.5\"", 13,
                      "\"3.5\"", "the tensors have 3.25");
  ExpectHeaderRefused("\"payload_bpw\":\"3.25\"", "\"payload_bpw\":\"3.250\"",
                      13, "\"3.250\"");
}

// ---- V14: ranks ------------------------------------------------------------

// Two ranks whose replicated vectors agree, after a change to the second.
absl::Status CheckRanks(
    const std::function<void(NpkMetadata*, std::map<NpkTensor, std::string>*)>&
        change) {
  std::string files[2];
  for (int rank = 0; rank < 2; ++rank) {
    NpkMetadata metadata = SmallNpk();
    metadata.rank = rank;
    std::map<NpkTensor, std::string> tensors =
        RandomNpkTensors(metadata, static_cast<uint64_t>(rank));
    const auto first = RandomNpkTensors(metadata, 0);
    for (const NpkTensor which :
         {NpkTensor::kGateUpSuh, NpkTensor::kDownSvh, NpkTensor::kSignDraw}) {
      tensors[which] = first.at(which);
    }
    if (rank == 1) change(&metadata, &tensors);
    files[rank] = NpkBytes(metadata, tensors);
  }
  const absl::StatusOr<NpkSidecar> a = NpkSidecar::Parse(AsBytes(files[0]));
  const absl::StatusOr<NpkSidecar> b = NpkSidecar::Parse(AsBytes(files[1]));
  EXPECT_OK(a);
  EXPECT_OK(b);
  const NpkSidecar* const ranks[] = {&*b, &*a};
  return CheckNpkRanks(ranks);
}

using Tensors = std::map<NpkTensor, std::string>;

TEST(NpkRulesTest, V14AcceptsTheRanksOfOneLayer) {
  EXPECT_OK(CheckRanks([](NpkMetadata*, Tensors*) {}));
}

TEST(NpkRulesTest, V14RefusesRanksThatDisagree) {
  ExpectRefused(CheckRanks([](NpkMetadata* m, Tensors*) { m->layer = 8; }), 14,
                "\"layer\":\"7\"", "\"layer\":\"8\"");
  ExpectRefused(CheckRanks([](NpkMetadata* m, Tensors*) { m->limit = "7"; }),
                14, "\"limit\":\"7\"", "\"limit\":\"10\"");
  ExpectRefused(
      CheckRanks([](NpkMetadata* m, Tensors*) { m->model_id = "other"; }), 14,
      "\"model_id\":\"other\"", "\"model_id\":\"test/small\"");
  ExpectRefused(CheckRanks([](NpkMetadata* m, Tensors* tensors) {
                  m->bits = 4;
                  *tensors = RandomNpkTensors(*m, 0);
                }),
                14, "rank 0 has", "rank 1 has");
}

TEST(NpkRulesTest, V14RefusesRanksThatAreNotOneOfEach) {
  ExpectRefused(CheckRanks([](NpkMetadata* m, Tensors*) { m->rank = 0; }), 14,
                "2 files, rank 0 among them", "one of each of 2 ranks");
  const std::string file = ValidFile();
  ASSERT_OK_AND_ASSIGN(const NpkSidecar one, NpkSidecar::Parse(AsBytes(file)));
  const NpkSidecar* const alone[] = {&one};
  ExpectRefused(CheckNpkRanks(alone), 14, "1 files");
  ExpectRefused(CheckNpkRanks({}), 14, "there is no rank");
}

TEST(NpkRulesTest, V14RefusesReplicatedVectorsThatDiffer) {
  const auto change = [](NpkTensor which, size_t at) {
    return [which, at](NpkMetadata*, Tensors* tensors) {
      (*tensors)[which][at] ^= 1;
    };
  };
  ExpectRefused(CheckRanks(change(NpkTensor::kGateUpSuh, 6)), 14,
                "\"gate_up_suh\" of rank 0", "at [3]");
  ExpectRefused(CheckRanks(change(NpkTensor::kDownSvh, 2)), 14,
                "\"down_svh\" of rank", "at [1]");
  ExpectRefused(CheckRanks(change(NpkTensor::kSignDraw, 2)), 14,
                "\"sign_draw\" of rank", "at [2]");
}

// ---- V15: metadata ---------------------------------------------------------

TEST(NpkRulesTest, V15RefusesUnknownAndMissingKeys) {
  ExpectHeaderRefused("\"world_size\":\"2\"",
                      "\"world_size\":\"2\",\"world_sized\":\"2\"", 15,
                      "unknown metadata key \"world_sized\"");
  ExpectHeaderRefused("\"model_id\":\"test/small\",", "", 15,
                      "lack \"model_id\"");
  ExpectHeaderRefused(",\"window\":\"w2\"", "", 15, "lack \"window\"");
  ExpectHeaderRefused("\"model_id\":\"test/small\"", "\"model_id\":[]", 15,
                      "\"model_id\" is an array of 0", "must be a string");
  ExpectHeaderRefused(
      "\"model_id\":\"test/small\"",
      absl::StrCat("\"model_id\":\"", std::string(257, 'a'), "\""), 15,
      "\"model_id\"", "257 bytes, must be at most 256");
}

TEST(NpkRulesTest, V15RefusesNumbersThatAreNotCanonical) {
  for (const char* number :
       {"03", "+3", "-3", " 3", "3 ", "3.0", "0x3", "", "9999999999"}) {
    ExpectHeaderRefused(
        "\"experts\":\"3\"", absl::StrCat("\"experts\":\"", number, "\""), 15,
        absl::StrCat("\"experts\" is \"", number, "\""), "decimal number");
  }
  for (const char* limit : {"", "0", "-1", "10.0", "1e1", "010", ".5", "1.",
                            "nan", "infinity", "0.000000001"}) {
    ExpectHeaderRefused("\"limit\":\"10\"",
                        absl::StrCat("\"limit\":\"", limit, "\""), 15,
                        "\"limit\" is");
  }
  ExpectHeaderRefused("\"design_sha256\":\"22", "\"design_sha256\":\"2G", 15,
                      "\"design_sha256\"", "64 lower-case hexadecimal");
  ExpectHeaderRefused("\"design_sha256\":\"22", "\"design_sha256\":\"2", 15,
                      "\"design_sha256\"");
}

// ---- signs -----------------------------------------------------------------

TEST(NpkSignsTest, MatchTheVectorFile) {
  const auto file =
      testing::ReadJson(testing::VectorsFolder() / "coupled_signs.json");
  int compared = 0;
  for (const auto& [key, entry] : file.at("draws").items()) {
    int draw = 0;
    int axis = 0;
    ASSERT_EQ(std::sscanf(key.c_str(), "draw%d_axis%d", &draw, &axis), 2);
    NpkMetadata whole;
    whole.intermediate = whole.intermediate_global =
        entry.at("length").get<int64_t>() / (axis == 1 ? 2 : 1);
    const std::vector<uint16_t> signs = NpkSigns(whole, draw);
    const auto half = static_cast<size_t>(2 * whole.intermediate);
    const std::vector<uint16_t> part =
        axis == 1 ? std::vector<uint16_t>(signs.begin(), signs.begin() + half)
                  : std::vector<uint16_t>(signs.begin() + half, signs.end());
    std::string packed(part.size() / 8, '\0');
    std::string first;
    for (size_t i = 0; i < part.size(); ++i) {
      const bool plus = part[i] == 0x3C00;
      if (plus) packed[i / 8] |= static_cast<char>(0x80 >> i % 8);
      if (i < 64) first += plus ? '+' : '-';
    }
    EXPECT_EQ(first, entry.at("first64").get<std::string>()) << key;
    EXPECT_EQ(Sha256(packed).ToHex(), entry.at("bits_sha256")) << key;
    ++compared;
  }
  EXPECT_EQ(compared, 14);
}

TEST(NpkSignsTest, SlicesOfTheRanksAreTheGlobalSequence) {
  NpkMetadata whole;
  whole.intermediate = whole.intermediate_global = 512;
  for (int draw = 0; draw <= 7; ++draw) {
    const std::vector<uint16_t> global = NpkSigns(whole, draw);
    std::vector<uint16_t> pre;
    std::vector<uint16_t> post;
    NpkMetadata rank = whole;
    rank.world_size = 4;
    rank.intermediate = 128;
    for (rank.rank = 0; rank.rank < 4; ++rank.rank) {
      const std::vector<uint16_t> signs = NpkSigns(rank, draw);
      pre.insert(pre.end(), signs.begin(), signs.begin() + 256);
      post.insert(post.end(), signs.begin() + 256, signs.end());
      // From local width, every rank would begin like the first.
      if (draw > 0 && rank.rank > 0) {
        EXPECT_FALSE(
            std::equal(signs.begin(), signs.begin() + 256, global.begin()));
      }
    }
    pre.insert(pre.end(), post.begin(), post.end());
    EXPECT_EQ(pre, global) << draw;
  }
}

// Published for draw 0 and 512 local channels: 1,536 times +1.
TEST(NpkSignsTest, DigestOfAllPlusOneIsThePublishedOne) {
  NpkMetadata metadata;
  metadata.intermediate = 512;
  metadata.intermediate_global = 2048;
  metadata.world_size = 4;
  const std::vector<uint8_t> draws(288, 0);
  EXPECT_EQ(NpkSignsDigest(metadata, draws).ToHex(),
            "95693b3d933cef1caca1d4aed176789faff9746303ec5f8bcac4395c68e25ff0");
}

}  // namespace
}  // namespace kiln
