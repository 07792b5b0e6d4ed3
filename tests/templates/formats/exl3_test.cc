#include "templates/formats/exl3.h"

#include <gtest/gtest.h>

#include <functional>

#include "absl/strings/strip.h"
#include "tests/support/checkpoint_writer.h"
#include "tests/support/npk_writer.h"
#include "tests/support/status_matchers.h"

namespace kiln {
namespace {

using ::absl::StatusCode;
using ::kiln::testing::AddExl3;
using ::kiln::testing::NpkBytes;
using ::kiln::testing::RandomNpkTensors;
using ::kiln::testing::SmallNpk;
using ::kiln::testing::StatusIs;
using ::kiln::testing::TestFolder;
using ::kiln::testing::TestTensor;
using ::kiln::testing::TestTensors;
using ::kiln::testing::WriteCheckpoint;
using ::testing::AllOf;
using ::testing::HasSubstr;

// One matrix [256][128] of 3 bits under the key "m", as a checkpoint on disk.
class Matrix {
 public:
  using Change = std::function<void(TestTensors*)>;

  explicit Matrix(const std::string& codebook, const Change& change = {},
                  uint64_t bits = 3) {
    AddExl3("m", 256, 128, bits, codebook, 1, &tensors_);
    if (change) change(&tensors_);
    WriteCheckpoint(folder_, tensors_, 1);
    absl::StatusOr<Checkpoint> opened = Checkpoint::Open(folder_.path());
    EXPECT_OK(opened);
    checkpoint_ = *std::move(opened);
  }

  // Every tensor "m.*" into a group, then the group's check.
  absl::StatusOr<Exl3Matrix> Check() {
    Exl3Group group;
    for (const SafetensorsTensor& tensor :
         checkpoint_.shards()[0].header().tensors()) {
      const absl::Status status =
          AddToExl3Group(absl::StripPrefix(tensor.name, "m."), tensor, &group);
      if (!status.ok()) return status;
    }
    return CheckExl3Group("m", group);
  }

  absl::Status CheckValues() {
    const absl::StatusOr<Exl3Matrix> matrix = Check();
    if (!matrix.ok()) return matrix.status();
    return CheckExl3Values(*matrix, &checkpoint_);
  }

  std::vector<uint16_t> Scales(bool input_side, uint64_t begin,
                               uint64_t count) {
    const absl::StatusOr<Exl3Matrix> matrix = Check();
    EXPECT_OK(matrix);
    std::vector<uint16_t> out(count);
    EXPECT_OK(ReadExl3Scales(*matrix, input_side, begin, &checkpoint_, out));
    return out;
  }

  const TestTensor& tensor(const std::string& name) const {
    return tensors_.at(name);
  }

 private:
  TestTensors tensors_;
  TestFolder folder_;
  Checkpoint checkpoint_;
};

void ExpectRefused(const Matrix::Change& change, const std::string& tensor,
                   const std::string& value, const std::string& rule) {
  EXPECT_THAT(
      Matrix("mcg", change).Check(),
      StatusIs(StatusCode::kInvalidArgument,
               AllOf(HasSubstr(tensor), HasSubstr(value), HasSubstr(rule))));
}

TEST(Exl3Test, RatesOneToEightOfEveryCodebookAreRead) {
  for (const auto& [name, codebook] :
       std::map<std::string, Codebook>{{"3inst", Codebook::k3Inst},
                                       {"mcg", Codebook::kMcg},
                                       {"mul1", Codebook::kMul1}}) {
    for (uint64_t bits = 1; bits <= 8; ++bits) {
      Matrix matrix(name, {}, bits);
      ASSERT_OK_AND_ASSIGN(const Exl3Matrix checked, matrix.Check());
      EXPECT_EQ(checked.in, 256);
      EXPECT_EQ(checked.out, 128);
      EXPECT_EQ(checked.bits, static_cast<int>(bits));
      EXPECT_EQ(checked.codebook, codebook);
      EXPECT_OK(matrix.CheckValues());
    }
  }
}

TEST(Exl3Test, ScalesAreReadAsStored) {
  Matrix matrix("mcg");
  const std::vector<uint16_t> suh = matrix.Scales(true, 0, 256);
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(suh.data()), 512),
            matrix.tensor("m.suh").bytes);
  const std::vector<uint16_t> part = matrix.Scales(true, 100, 30);
  EXPECT_EQ(part, std::vector<uint16_t>(suh.begin() + 100, suh.begin() + 130));
  EXPECT_EQ(matrix.Scales(false, 0, 128).size(), 128u);
}

TEST(Exl3Test, LegacySignBitsBecomePlusAndMinusOne) {
  Matrix matrix("mcg", [](TestTensors* tensors) {
    tensors->erase("m.suh");
    tensors->erase("m.svh");
    std::string bits(32, '\0');
    bits[0] = 0x05;                     // channels 0 and 2
    bits[3] = static_cast<char>(0x80);  // word 1, bit 15: channel 31
    (*tensors)["m.su"] = {"I16", {16}, bits};
    (*tensors)["m.sv"] = {"I16", {8}, std::string(16, '\xFF')};
  });
  ASSERT_OK(matrix.CheckValues());
  const std::vector<uint16_t> suh = matrix.Scales(true, 0, 256);
  for (size_t i = 0; i < suh.size(); ++i) {
    EXPECT_EQ(suh[i], i == 0 || i == 2 || i == 31 ? 0xBC00 : 0x3C00) << i;
  }
  EXPECT_EQ(matrix.Scales(true, 30, 2),
            (std::vector<uint16_t>{0x3C00, 0xBC00}));
  EXPECT_EQ(matrix.Scales(false, 0, 128), std::vector<uint16_t>(128, 0xBC00));
}

TEST(Exl3Test, RefusesAGroupWithoutTrellis) {
  ExpectRefused([](TestTensors* t) { t->erase("m.trellis"); }, "\"m\"", "",
                "lacks .trellis");
}

TEST(Exl3Test, Row19RefusesAGroupWithoutInputScales) {
  ExpectRefused([](TestTensors* t) { t->erase("m.suh"); }, "\"m\"", "",
                "lacks .suh (or its legacy form .su)");
}

TEST(Exl3Test, Row19RefusesAGroupWithoutOutputScales) {
  ExpectRefused([](TestTensors* t) { t->erase("m.svh"); }, "\"m\"", "",
                "lacks .svh (or its legacy form .sv)");
}

TEST(Exl3Test, Row17RefusesATrellisOfAnotherType) {
  ExpectRefused([](TestTensors* t) { (*t)["m.trellis"].type = "F16"; },
                "\"m.trellis\"", "F16 [16, 8, 48]", "must be I16");
}

TEST(Exl3Test, Row23RefusesATrellisOfAnotherRank) {
  ExpectRefused(
      [](TestTensors* t) {
        (*t)["m.trellis"].shape = {128, 48};
      },
      "\"m.trellis\"", "I16 [128, 48]", "must be I16 [in/16");
}

TEST(Exl3Test, Row16RefusesALastDimensionThatIsNoRate) {
  ExpectRefused(
      [](TestTensors* t) {
        (*t)["m.trellis"] = {"I16", {16, 8, 24}, std::string(6144, '\0')};
      },
      "\"m.trellis\"", "last dimension 24", "K within 1..8");
}

TEST(Exl3Test, Row16RefusesRateNine) {
  ExpectRefused(
      [](TestTensors* t) {
        (*t)["m.trellis"] = {"I16", {8, 8, 144}, std::string(18432, '\0')};
      },
      "\"m.trellis\"", "last dimension 144", "K within 1..8");
}

TEST(Exl3Test, Row16RefusesRateZero) {
  ExpectRefused(
      [](TestTensors* t) {
        (*t)["m.trellis"] = {"I16", {16, 8, 0}, ""};
      },
      "\"m.trellis\"", "last dimension 0", "K within 1..8");
}

TEST(Exl3Test, Row23RefusesInputChannelsThatFillNoHadamardBlock) {
  ExpectRefused(
      [](TestTensors* t) {
        (*t)["m.trellis"] = {"I16", {12, 8, 16}, std::string(3072, '\0')};
      },
      "\"m.trellis\"", "12 tiles of 16 input", "Hadamard block");
}

TEST(Exl3Test, Row23RefusesOutputChannelsThatFillNoHadamardBlock) {
  ExpectRefused(
      [](TestTensors* t) {
        (*t)["m.trellis"] = {"I16", {8, 12, 16}, std::string(3072, '\0')};
      },
      "\"m.trellis\"", "12 tiles of 16 output", "Hadamard block");
}

TEST(Exl3Test, Row16RefusesAMatrixWithoutChannels) {
  ExpectRefused(
      [](TestTensors* t) {
        (*t)["m.trellis"] = {"I16", {0, 8, 48}, ""};
      },
      "\"m.trellis\"", "0 tiles of 16 input", "8 or a multiple of it");
}

TEST(Exl3Test, Row23RefusesInputScalesOfAnotherLength) {
  ExpectRefused(
      [](TestTensors* t) {
        (*t)["m.suh"] = {"F16", {128}, std::string(256, '\0')};
      },
      "\"m.suh\"", "F16 [128]", "must be F16 [256]");
}

TEST(Exl3Test, Row23RefusesOutputScalesOfAnotherLength) {
  ExpectRefused(
      [](TestTensors* t) {
        (*t)["m.svh"] = {"F16", {256}, std::string(512, '\0')};
      },
      "\"m.svh\"", "F16 [256]", "must be F16 [128]");
}

TEST(Exl3Test, Row19RefusesScalesOfAnotherType) {
  ExpectRefused([](TestTensors* t) { (*t)["m.svh"].type = "BF16"; },
                "\"m.svh\"", "BF16 [128]", "must be F16 [128]");
}

TEST(Exl3Test, Row23RefusesScalesOfAnotherRank) {
  ExpectRefused(
      [](TestTensors* t) {
        (*t)["m.svh"].shape = {1, 128};
      },
      "\"m.svh\"", "F16 [1, 128]", "must be F16 [128]");
}

TEST(Exl3Test, RefusesLegacySignsOfAnotherLength) {
  ExpectRefused(
      [](TestTensors* t) {
        t->erase("m.suh");
        (*t)["m.su"] = {"I16", {256}, std::string(512, '\0')};
      },
      "\"m.su\"", "I16 [256]", "must be I16 [16]");
}

TEST(Exl3Test, Row19RefusesBothFormsOfTheInputScales) {
  ExpectRefused(
      [](TestTensors* t) {
        (*t)["m.su"] = {"I16", {16}, std::string(32, 0)};
      },
      "\"m.suh\"", ".su", "only one may exist");
}

TEST(Exl3Test, Row19RefusesBothFormsOfTheOutputScales) {
  ExpectRefused(
      [](TestTensors* t) {
        (*t)["m.sv"] = {"I16", {8}, std::string(16, 0)};
      },
      "\"m.svh\"", ".sv", "only one may exist");
}

TEST(Exl3Test, Row22RefusesBothCodebookMarkers) {
  ExpectRefused(
      [](TestTensors* t) {
        (*t)["m.mul1"] = {"I32", {}, std::string(4, 0)};
      },
      "\"m.mcg\"", ".mul1", "at most one may exist");
}

TEST(Exl3Test, Row22RefusesAMarkerOfAnotherType) {
  ExpectRefused([](TestTensors* t) { (*t)["m.mcg"].type = "F32"; }, "\"m.mcg\"",
                "F32 []", "must be I32 or U32 []");
}

TEST(Exl3Test, Row22RefusesAMarkerThatIsNoScalar) {
  ExpectRefused([](TestTensors* t) { (*t)["m.mcg"].shape = {1}; }, "\"m.mcg\"",
                "I32 [1]", "must be I32 or U32 []");
}

TEST(Exl3Test, RefusesTheObsoleteScale) {
  ExpectRefused(
      [](TestTensors* t) {
        (*t)["m.scale"] = {"F16", {1}, "ab"};
      },
      "\"m.scale\"", "", "obsolete");
}

TEST(Exl3Test, RefusesAPlainWeight) {
  const Matrix::Change change = [](TestTensors* t) {
    (*t)["m.weight"] = {"F16", {1}, "ab"};
  };
  EXPECT_THAT(Matrix("mcg", change).Check(),
              StatusIs(StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("\"m.weight\""), HasSubstr("F16 [1]"),
                             HasSubstr("only trellis weights are served"))));
}

TEST(Exl3Test, RefusesAnUnknownPart) {
  ExpectRefused(
      [](TestTensors* t) {
        (*t)["m.extra"] = {"F16", {1}, "ab"};
      },
      "\"m.extra\"", "", "parts: .trellis, .suh");
}

TEST(Exl3Test, RefusesABiasOfAnotherLength) {
  ExpectRefused(
      [](TestTensors* t) {
        (*t)["m.bias"] = {"F16", {256}, std::string(512, '\0')};
      },
      "\"m.bias\"", "F16 [256]", "must be F16 or F32 [128]");
}

TEST(Exl3Test, RefusesABiasOfAnotherType) {
  ExpectRefused(
      [](TestTensors* t) {
        (*t)["m.bias"] = {"BF16", {128}, std::string(256, '\0')};
      },
      "\"m.bias\"", "BF16 [128]", "must be F16 or F32 [128]");
}

TEST(Exl3ValuesTest, Row22RefusesAMarkerOfAnotherValue) {
  Matrix mcg("mcg", [](TestTensors* t) { (*t)["m.mcg"].bytes[0] ^= 1; });
  EXPECT_THAT(mcg.CheckValues(),
              StatusIs(StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("\"m.mcg\""), HasSubstr("0xcbac1fec"),
                             HasSubstr("must hold 0xcbac1fed"))));
  Matrix mul1("mul1", [](TestTensors* t) {
    (*t)["m.mul1"].bytes = Matrix("mcg").tensor("m.mcg").bytes;
  });
  EXPECT_THAT(mul1.CheckValues(),
              StatusIs(StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("\"m.mul1\""), HasSubstr("0xcbac1fed"),
                             HasSubstr("must hold 0x83dcd12d"))));
}

TEST(Exl3ValuesTest, RefusesAnInfiniteInputScale) {
  Matrix matrix("mcg", [](TestTensors* t) {
    (*t)["m.suh"].bytes.replace(510, 2, std::string("\x00\xFC", 2));
  });
  EXPECT_THAT(matrix.CheckValues(),
              StatusIs(StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("\"m.suh\""), HasSubstr("0xfc00"),
                             HasSubstr("channel 255, must be finite"))));
}

TEST(Exl3ValuesTest, RefusesANanOutputScale) {
  Matrix matrix("mcg", [](TestTensors* t) {
    (*t)["m.svh"].bytes.replace(0, 2, "\x01\x7C");
  });
  EXPECT_THAT(matrix.CheckValues(),
              StatusIs(StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("\"m.svh\""), HasSubstr("0x7c01"),
                             HasSubstr("channel 0, must be finite"))));
}

TEST(Exl3ValuesTest, AcceptsZeroScales) {
  Matrix matrix("mcg", [](TestTensors* t) {
    (*t)["m.svh"].bytes = std::string(256, '\0');
  });
  EXPECT_OK(matrix.CheckValues());
}

// A sidecar of TrellisMX under the name of an EXL3 checkpoint's only shard: it
// is a good safetensors file, none of whose tensors is a part of a group.
TEST(Exl3Test, RefusesEveryTensorOfATrellisMxSidecar) {
  TestFolder folder;
  folder.Write("model.safetensors",
               NpkBytes(SmallNpk(), RandomNpkTensors(SmallNpk(), 1)));
  ASSERT_OK_AND_ASSIGN(const Checkpoint checkpoint,
                       Checkpoint::Open(folder.path()));
  const auto& tensors = checkpoint.shards()[0].header().tensors();
  EXPECT_EQ(tensors.size(), 8u);
  for (const SafetensorsTensor& tensor : tensors) {
    SCOPED_TRACE(tensor.name);
    Exl3Group group;
    EXPECT_THAT(AddToExl3Group(tensor.name, tensor, &group),
                StatusIs(StatusCode::kInvalidArgument,
                         HasSubstr("is not a part of an EXL3 group")));
    EXPECT_THAT(
        CheckExl3Group("w13", group),
        StatusIs(StatusCode::kInvalidArgument, HasSubstr("lacks .trellis")));
    // Nor can any serve as one.
    ASSERT_OK(AddToExl3Group("trellis", tensor, &group));
    EXPECT_THAT(CheckExl3Group("w13", group),
                StatusIs(StatusCode::kInvalidArgument,
                         HasSubstr("must be I16 [in/16, out/16, 16 K]")));
  }
}

}  // namespace
}  // namespace kiln
