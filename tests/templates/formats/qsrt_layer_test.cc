// QSRT atoms: rows 25 to 28 of the format specification's fail-closed table for
// extents in memory, rows 29 and 32 for layer files, and the native tensors.
// Every refusal changes one thing of a valid extent or file.

#include "templates/formats/qsrt_layer.h"

#include <gtest/gtest.h>

#include <cmath>

#include "absl/strings/str_cat.h"
#include "templates/formats/pair_layer.h"
#include "tests/support/native_layer.h"
#include "tests/support/qsrt_writer.h"
#include "tests/support/status_matchers.h"

namespace kiln {
namespace {

using ::absl::StatusCode;
using ::kiln::testing::MakeQsrtFile;
using ::kiln::testing::QsrtFile;
using ::kiln::testing::QsrtOptions;
using ::kiln::testing::RandomLayer;
using ::kiln::testing::StatusIs;
using ::kiln::testing::TestFolder;
using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;

QsrtOptions Kimi() { return QsrtOptions(); }

QsrtOptions Fruit() {
  QsrtOptions options;
  options.kimi = false;
  options.alignment = 256;
  return options;
}

// A layer file on disk, opened and validated.
absl::StatusOr<QsrtLayer> OpenValid(const TestFolder& folder,
                                    const QsrtOptions& options,
                                    const QsrtFile& file) {
  folder.Write(testing::QsrtName(options.layer),
               testing::QsrtFileBytes(options, file));
  absl::StatusOr<QsrtLayer> layer =
      QsrtLayer::Open(folder.path(), options.layer);
  if (!layer.ok()) return layer;
  const absl::Status valid = layer->Validate();
  if (!valid.ok()) return valid;
  return layer;
}

// ---- extents ---------------------------------------------------------------

// A valid extent of the Kimi layer, and what a change makes of it.
template <typename Change>
absl::Status Changed(const Change& change) {
  const TestFolder folder;
  const absl::StatusOr<QsrtLayer> layer =
      OpenValid(folder, Kimi(), MakeQsrtFile(Kimi()));
  if (!layer.ok()) return layer.status();
  absl::StatusOr<QsrtExtent> extent = layer->Extent(8);
  if (!extent.ok()) return extent.status();
  change(&*extent);
  return TrellisFromQsrt(*extent).status();
}

auto Refused(const std::string& text) {
  return StatusIs(StatusCode::kInvalidArgument, HasSubstr(text));
}

TEST(QsrtExtentTest, Row25RefusesImpossibleGeometry) {
  EXPECT_OK(Changed([](QsrtExtent*) {}));
  for (const int64_t hidden : {0, -128, 64, 192, 1 << 20}) {
    EXPECT_THAT(Changed([&](QsrtExtent* e) { e->hidden = hidden; }),
                Refused(absl::StrCat("QSRT hidden size is ", hidden,
                                     ", must be a positive multiple of 128")));
  }
  for (const int64_t slots : {0, -8, 12, 1 << 20}) {
    EXPECT_THAT(Changed([&](QsrtExtent* e) { e->atom_slots = slots; }),
                Refused(absl::StrCat("QSRT atom_slots is ", slots,
                                     ", must be a positive multiple of 8")));
  }
  for (const int64_t experts : {0, -1, 1 << 20}) {
    EXPECT_THAT(Changed([&](QsrtExtent* e) { e->experts_per_layer = experts; }),
                Refused("QSRT experts_per_layer is "));
  }
  EXPECT_THAT(Changed([](QsrtExtent* e) { e->rotation_multiplier = -1; }),
              Refused("QSRT rotation_multiplier is -1"));
  EXPECT_THAT(Changed([](QsrtExtent* e) {
                e->expert_ids = {};
                e->format_codes = {};
              }),
              Refused("QSRT count of expert numbers is 0"));
}

TEST(QsrtExtentTest, Row26RefusesAPayloadOfAnotherShape) {
  const uint64_t row = 5 * QsrtBundleBytes(128);
  EXPECT_THAT(Changed([&](QsrtExtent* e) { e->row_stride = row - 1; }),
              Refused(absl::StrCat("must be at least ", row)));
  EXPECT_THAT(Changed([&](QsrtExtent* e) { e->row_stride = UINT64_MAX; }),
              Refused("QSRT row stride is 18446744073709551615"));
  EXPECT_THAT(Changed([](QsrtExtent* e) { e->row_stride *= 2; }),
              Refused("QSRT payload has "));
  EXPECT_THAT(Changed([](QsrtExtent* e) {
                e->payload = e->payload.first(7 * e->row_stride);
              }),
              Refused("for 8 rows"));
}

TEST(QsrtExtentTest, Row27RefusesSlotsLayersExpertsAndCodesOutOfRange) {
  for (const int64_t slot : {-8, 4, 16, 24}) {
    EXPECT_THAT(Changed([&](QsrtExtent* e) { e->first_slot = slot; }),
                Refused(absl::StrCat("QSRT first atom slot is ", slot,
                                     ", must be a multiple of 8 below 16")));
  }
  EXPECT_THAT(Changed([](QsrtExtent* e) { e->layer = -1; }),
              Refused("QSRT layer is -1"));
  const auto with_id = [](int64_t id) {
    std::vector<int64_t> ids = {0, 1, 2, 3, id};
    return Changed([&](QsrtExtent* e) { e->expert_ids = ids; });
  };
  EXPECT_OK(with_id(4));
  // 2^32 + 4 would be 4 in 32 bits.
  for (const int64_t id : {int64_t{-1}, int64_t{5}, (int64_t{1} << 32) + 4}) {
    EXPECT_THAT(with_id(id), Refused(absl::StrCat("expert number at 4 is ", id,
                                                  ", must be within 0..4")));
  }
  EXPECT_THAT(with_id(3), Refused("must be named once"));
  const auto with_code = [](int64_t code) {
    std::vector<int64_t> codes = {0x10, 0x01, 0x22, 0x00, code};
    return Changed([&](QsrtExtent* e) { e->format_codes = codes; });
  };
  for (const int64_t code : {int64_t{0x30}, int64_t{0x03}, int64_t{-1},
                             int64_t{0x100}, int64_t{1} << 32}) {
    EXPECT_THAT(with_code(code),
                Refused(absl::StrCat("format code of expert 4 is ", code,
                                     ", must be two nibbles within 0..2")));
  }
  EXPECT_THAT(with_code(0xFF), Refused("X4T tier"));
  EXPECT_THAT(Changed([](QsrtExtent* e) {
                e->format_codes = e->format_codes.first(4);
              }),
              Refused("QSRT count of format codes is 4, must be 5"));
}

TEST(QsrtExtentTest, Row28RefusesTablesOfAnotherShapeOrKindOrNotFinite) {
  for (const auto table :
       {&QsrtExtent::gate_suh, &QsrtExtent::up_suh, &QsrtExtent::down_svh}) {
    EXPECT_THAT(Changed([&](QsrtExtent* e) {
                  e->*table = (e->*table).first((e->*table).size() - 2);
                }),
                Refused(" bytes, must have 256 (shared"));
    EXPECT_THAT(Changed([&](QsrtExtent* e) { e->*table = {}; }),
                Refused(" has 0 bytes, must have 256"));
    // One table of each expert beside two shared ones.
    const std::vector<uint8_t> own(5 * 256);
    EXPECT_THAT(Changed([&](QsrtExtent* e) { e->*table = own; }),
                Refused("as gate_suh has"));
    std::vector<uint8_t> infinite(256);
    infinite[11] = 0x7C;
    EXPECT_THAT(Changed([&](QsrtExtent* e) { e->*table = infinite; }),
                Refused("has the binary16 bits 0x7c00 at element 5"));
  }
}

TEST(QsrtExtentTest, Row28RefusesLocalScalesThatAreNotFinite) {
  EXPECT_THAT(
      Changed([](QsrtExtent* e) {
        static std::vector<uint8_t> payload;  // outlives the extent
        payload.assign(e->payload.begin(), e->payload.end());
        payload[3 * e->row_stride + 2 * QsrtBundleBytes(128) - 1] = 0xFC;
        payload[3 * e->row_stride + 2 * QsrtBundleBytes(128) - 2] = 0x00;
        e->payload = payload;
      }),
      Refused("scales of atom 11, expert 1: tensor \"qsrt_atoms\" has the "
              "binary16 bits 0xfc00 at element 95"));
}

// ---- layer files -----------------------------------------------------------

template <typename Change>
absl::Status FileChanged(const QsrtOptions& options, const Change& change) {
  const TestFolder folder;
  QsrtFile file = MakeQsrtFile(options);
  change(&file);
  return OpenValid(folder, options, file).status();
}

auto FileRefused(const std::string& text) {
  return StatusIs(
      StatusCode::kInvalidArgument,
      AllOf(HasSubstr("qsrt-layer-003.safetensors: "), HasSubstr(text)));
}

TEST(QsrtLayerTest, AcceptsBothSchemas) {
  for (const QsrtOptions& options : {Kimi(), Fruit()}) {
    EXPECT_OK(FileChanged(options, [](QsrtFile*) {}));
  }
}

// Files of the second version have another schema, its coupled profile too.
TEST(QsrtLayerTest, Row29RefusesOtherSchemas) {
  for (const char* schema : {"kquant_kimi_k3_qsrt_atoms_v2",
                             "kquant_fruit_qsrt_atoms_v2", "btx-atoms-v1"}) {
    EXPECT_THAT(
        FileChanged(Kimi(),
                    [&](QsrtFile* file) { file->metadata["schema"] = schema; }),
        FileRefused(
            absl::StrCat("\"schema\" is \"", schema,
                         "\", must be \"kquant_kimi_k3_qsrt_atoms_v1\" or ")));
  }
}

TEST(QsrtLayerTest, Row32RefusesMetadataThatDisagrees) {
  for (const QsrtOptions& options : {Kimi(), Fruit()}) {
    for (const auto& [key, value] : MakeQsrtFile(options).metadata) {
      SCOPED_TRACE(key);
      for (const std::string other :
           {"", "-1", "00", "7", "x", "99999999999999999999"}) {
        if (key == "rotation_multiplier" && other == "7") continue;
        EXPECT_THAT(FileChanged(options,
                                [&, &key = key](QsrtFile* file) {
                                  file->metadata[key] = other;
                                }),
                    FileRefused("\"__metadata__\": "))
            << other;
      }
      EXPECT_THAT(FileChanged(options,
                              [&key = key](QsrtFile* file) {
                                file->metadata.erase(key);
                              }),
                  FileRefused(absl::StrCat("\"", key, "\" is missing")));
    }
    EXPECT_THAT(
        FileChanged(options, [](QsrtFile* file) { file->metadata["x"] = "1"; }),
        FileRefused("unknown key \"x\""));
  }
}

TEST(QsrtLayerTest, Row32RefusesAtomCountsThatDisagreeWithTheGeometry) {
  // 96 atoms are those of 3072 channels and of no other size.
  EXPECT_THAT(
      FileChanged(Kimi(),
                  [](QsrtFile* file) { file->metadata["atom_slots"] = "96"; }),
      FileRefused("\"atom_slots\" is \"96\", must be \"16\""));
  EXPECT_THAT(FileChanged(Kimi(),
                          [](QsrtFile* file) {
                            testing::TestTensor& atoms =
                                file->tensors["qsrt_atoms"];
                            atoms.shape = {8, 2 * atoms.shape[1]};
                          }),
              FileRefused("tensor \"qsrt_atoms\" is U8 [8, "));
}

TEST(QsrtLayerTest, Row32RefusesAnotherSetOrShapeOfTensors) {
  for (const QsrtOptions& options : {Kimi(), Fruit()}) {
    for (const auto& [name, tensor] : MakeQsrtFile(options).tensors) {
      EXPECT_THAT(
          FileChanged(
              options,
              [&name = name](QsrtFile* file) { file->tensors.erase(name); }),
          FileRefused(absl::StrCat("tensor \"", name, "\" is missing")));
      EXPECT_THAT(FileChanged(options,
                              [&name = name](QsrtFile* file) {
                                file->tensors[name].type = "I8";
                              }),
                  FileRefused("must be U8 ["));
      EXPECT_THAT(FileChanged(options,
                              [&name = name](QsrtFile* file) {
                                file->tensors[name].shape.push_back(1);
                              }),
                  FileRefused("must be U8 ["));
    }
    EXPECT_THAT(FileChanged(options,
                            [](QsrtFile* file) {
                              file->tensors["zz"] = {"U8", {1}, "a"};
                            }),
                FileRefused("tensor \"zz\" is not a part of a QSRT layer"));
  }
}

TEST(QsrtLayerTest, Row32RefusesAHeaderThatIsNotCanonical) {
  const TestFolder folder;
  const std::string valid =
      testing::QsrtFileBytes(Kimi(), MakeQsrtFile(Kimi()));
  const std::string data = valid.substr(4096);
  const std::string json = valid.substr(8, 4088);
  const auto open = [&](const std::string& header) {
    folder.Write("qsrt-layer-003.safetensors",
                 testing::SafetensorsBytes(header, data));
    return QsrtLayer::Open(folder.path(), 3).status();
  };
  EXPECT_OK(open(json));
  EXPECT_THAT(open(json + "        "),
              FileRefused("the header's length is 4096 bytes, must be 4088"));
  EXPECT_THAT(open(json.substr(0, 4080)), FileRefused("length is 4080"));
  std::string spaced = json;
  spaced.insert(1, " ");
  spaced.resize(4088);
  EXPECT_THAT(open(spaced), FileRefused("not in its canonical form: byte 1"));
  std::string swapped = json;
  const std::string from = "\"dtype\":\"U8\",\"shape\":[4096]";
  const size_t at = swapped.find(from);
  ASSERT_NE(at, std::string::npos);
  swapped.replace(at, from.size(), "\"shape\":[4096],\"dtype\":\"U8\"");
  EXPECT_THAT(open(swapped), FileRefused("not in its canonical form"));
}

TEST(QsrtLayerTest, Row32RefusesImpossibleFormatCodes) {
  for (const QsrtOptions& options : {Kimi(), Fruit()}) {
    for (const char code : {'\x30', '\x03', '\xF0', '\x0F'}) {
      EXPECT_THAT(FileChanged(options,
                              [&](QsrtFile* file) {
                                file->tensors["_qsrt_format_section"].bytes[2] =
                                    code;
                              }),
                  FileRefused("for expert 2, must be two nibbles within 0..2"));
    }
    EXPECT_THAT(
        FileChanged(options,
                    [](QsrtFile* file) {
                      file->tensors["_qsrt_format_section"].bytes[2] = '\xFF';
                    }),
        FileRefused("has 1 experts of the X4T tier, \"x4t_experts\" says 0"));
  }
}

TEST(QsrtLayerTest, Row32RefusesPaddingThatIsNotZero) {
  for (const QsrtOptions& options : {Kimi(), Fruit()}) {
    for (const char* name : {"_qsrt_format_section", "qsrt_atoms"}) {
      EXPECT_THAT(FileChanged(options,
                              [&](QsrtFile* file) {
                                file->tensors[name].bytes.back() = 1;
                              }),
                  FileRefused("which is padding and must be 0"));
    }
  }
  EXPECT_THAT(
      FileChanged(Kimi(),
                  [](QsrtFile* file) {
                    file->tensors["_qsrt_shared_scale_section"].bytes.back() =
                        1;
                  }),
      FileRefused("at byte 4095, which is padding and must be 0"));
}

TEST(QsrtLayerTest, Row32RefusesSharedScalesThatAreNotFinite) {
  for (const QsrtOptions& options : {Kimi(), Fruit()}) {
    EXPECT_THAT(
        FileChanged(options,
                    [](QsrtFile* file) {
                      std::string& bytes =
                          file->tensors["_qsrt_shared_scale_section"].bytes;
                      bytes[10] = 0;
                      bytes[11] = 0x7C;
                    }),
        FileRefused("has the binary16 bits 0x7c00 at element 5"));
  }
}

TEST(QsrtLayerTest, RefusesLayersWithExpertsOfTheX4tTier) {
  QsrtOptions options = Kimi();
  options.codes[1] = '\xFF';
  const TestFolder folder;
  ASSERT_OK_AND_ASSIGN(QsrtLayer layer,
                       OpenValid(folder, options, MakeQsrtFile(options)));
  EXPECT_THAT(TrellisFromQsrtLayer({0, 256}, &layer).status(),
              StatusIs(StatusCode::kFailedPrecondition,
                       HasSubstr("expert 1 is stored in the X4T tier")));
}

TEST(QsrtLayerTest, ComparesTheDigestWhereTheFolderListsIt) {
  const TestFolder folder;
  const std::string bytes =
      testing::QsrtFileBytes(Kimi(), MakeQsrtFile(Kimi()));
  folder.Write("qsrt-layer-003.safetensors", bytes);
  const auto with_list = [&](const std::string& list) -> absl::Status {
    folder.Write("MANIFEST.sha256", list);
    absl::StatusOr<QsrtLayer> layer = QsrtLayer::Open(folder.path(), 3);
    if (!layer.ok()) return layer.status();
    return layer->Validate();
  };
  const std::string good = Sha256(bytes).ToHex();
  const std::string name = "  qsrt-layer-003.safetensors\n";
  EXPECT_OK(with_list(std::string(64, '0') + "  other\n" + good + name));
  EXPECT_THAT(with_list(std::string(64, '0') + name),
              FileRefused(absl::StrCat("has the SHA-256 ", good)));
  EXPECT_THAT(with_list(good + "  other\n"),
              Refused("MANIFEST.sha256: does not name qsrt-layer-003"));
  EXPECT_THAT(with_list(good + name + good + name), Refused("twice"));
  EXPECT_THAT(with_list(good + " qsrt-layer-003.safetensors\n"),
              Refused("MANIFEST.sha256:1: is "));
  EXPECT_THAT(with_list("zz" + name), Refused("64 hexadecimal digits"));
}

// ---- native tensors --------------------------------------------------------

TEST(QsrtLayerTest, Row29RefusesExtentsThatAreNotOnePair) {
  const TestFolder folder;
  ASSERT_OK_AND_ASSIGN(QsrtLayer layer,
                       OpenValid(folder, Kimi(), MakeQsrtFile(Kimi())));
  for (const TrellisExtent& extent :
       {TrellisExtent{0, 512}, {128, 384}, {512, 768}, {-256, 0}}) {
    EXPECT_THAT(TrellisFromQsrtLayer(extent, &layer).status(),
                FileRefused("must be one pair of 256 channels"));
  }
}

TEST(QsrtLayerTest, OtherNumbersOfRanksAreRefusedWithTheOneThatIsPossible) {
  const auto extent = [](int64_t channels, int64_t rank, int64_t ranks) {
    return ExtentOfRank(channels, rank, ranks, [&](const auto& part) {
      return CheckPairExtent(part, channels);
    });
  };
  ASSERT_OK_AND_ASSIGN(const TrellisExtent last, extent(768, 2, 3));
  EXPECT_EQ(last.begin, 512);
  EXPECT_EQ(last.end, 768);
  for (const int64_t ranks : {1, 2, 4, 6}) {
    EXPECT_THAT(
        extent(768, 0, ranks),
        StatusIs(StatusCode::kInvalidArgument,
                 AllOf(HasSubstr(absl::StrCat("768 cannot be split over ",
                                              ranks, " ranks: ")),
                       EndsWith("; possible with --tp: 3"))))
        << ranks;
  }
  EXPECT_THAT(extent(768, 3, 3), StatusIs(StatusCode::kInvalidArgument,
                                          HasSubstr("must be within 0..2")));
  EXPECT_THAT(extent(384, 0, 3), StatusIs(StatusCode::kInvalidArgument,
                                          EndsWith("no --tp is possible")));
}

TEST(QsrtLayerTest, NativeTensorsHoldTheExpertsOwnPairs) {
  for (const QsrtOptions& options : {Kimi(), Fruit()}) {
    const TestFolder folder;
    ASSERT_OK_AND_ASSIGN(QsrtLayer layer,
                         OpenValid(folder, options, MakeQsrtFile(options)));
    const RandomLayer random(options.seed);
    const auto experts = static_cast<int64_t>(options.codes.size());
    for (const int64_t pair : {0, 1}) {
      ASSERT_OK_AND_ASSIGN(
          const std::unique_ptr<TrellisSource> source,
          TrellisFromQsrtLayer({256 * pair, 256 * pair + 256}, &layer));
      std::string up, down, rotations, scales;
      for (int64_t e = 0; e < experts; ++e) {
        const int64_t logical =
            testing::QsrtPhysicalPair(options, e, 0) == pair ? 0 : 1;
        const auto bits = [&](int64_t t, bool fc2) {
          return testing::QsrtRecordBits(options, e, logical, t >= 8, fc2);
        };
        for (int64_t h = 0; h < options.hidden / 16; ++h) {
          for (int64_t t = 0; t < 16; ++t) {
            up += random.Tile(e, 1, 16 * logical + t, h, bits(t, false));
          }
        }
        for (int64_t t = 0; t < 16; ++t) {
          for (int64_t h = 0; h < options.hidden / 16; ++h) {
            down += random.Tile(e, 2, 16 * logical + t, h, bits(t, true));
          }
        }
        for (int section = 0; section < 3; ++section) {
          rotations += random.Scales(e, testing::kRotationTable + section,
                                     256 * logical, 256 * logical + 256);
        }
        if (e == 0 || !options.kimi) {
          scales += random.Scales(e, testing::kDownSvhTable, 0, options.hidden);
        }
      }
      const auto read = [&](FusedMoeParam slot) {
        return testing::ReadSlot(source.get(), slot);
      };
      EXPECT_TRUE(read(FusedMoeParam::kWUp) == up);
      EXPECT_TRUE(read(FusedMoeParam::kWDown) == down);
      EXPECT_TRUE(read(FusedMoeParam::kRotations) == rotations);
      EXPECT_TRUE(read(FusedMoeParam::kDownSvh) == scales);
      for (const FusedMoeParam slot : kTrellisSlots) {
        EXPECT_EQ(source->Tensor(slot).bytes(), read(slot).size());
      }
      ASSERT_OK_AND_ASSIGN(const PairArm arm,
                           PairArmOf(source->layout().rates_fc1));
      EXPECT_EQ(arm, PairArm::kDynamic);
    }
  }
}

// Where an expert's atoms lie is no property of the model: another layer number
// permutes them, and the parts' sum stays.
TEST(QsrtLayerTest, PhysicalRotationDoesNotChangeTheResult) {
  const auto result = [](int64_t layer_number) {
    QsrtOptions options = Kimi();
    options.layer = layer_number;
    const TestFolder folder;
    absl::StatusOr<QsrtLayer> layer =
        OpenValid(folder, options, MakeQsrtFile(options));
    EXPECT_OK(layer.status());
    std::vector<double> sum(3 * 128);
    for (const int64_t begin : {0, 256}) {
      absl::StatusOr<std::unique_ptr<TrellisSource>> source =
          TrellisFromQsrtLayer({begin, begin + 256}, &*layer);
      EXPECT_OK(source.status());
      const testing::NativeLayer native(source->get());
      const testing::NativeCall call((*source)->layout(), 3, 2, 4);
      FusedMoeProblem p = native.Problem();
      call.Fill(&p);
      p.activation = MoeActivation::kSitu;
      const auto part = testing::AllRows(p, ReferenceMode::kFloat64);
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += part[i];
    }
    return sum;
  };
  const std::vector<double> even = result(2);
  const std::vector<double> odd = result(3);
  double norm = 0;
  for (const double value : even) norm += value * value;
  ASSERT_GT(norm, 0);
  for (size_t i = 0; i < even.size(); ++i) {
    EXPECT_NEAR(even[i], odd[i], 1e-12 * std::sqrt(norm));
  }
}

}  // namespace
}  // namespace kiln
