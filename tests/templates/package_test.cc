// Kernel packages: expressions, the manifest, reading a folder, and the
// template that a package becomes.

#include "templates/package/package.h"

#include <filesystem>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "templates/package/expression.h"
#include "templates/package/manifest.h"
#include "templates/package/package_template.h"
#include "tests/support/golden.h"
#include "tests/support/package_folder.h"
#include "tests/support/status_matchers.h"

namespace kiln {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::IsOkAndHolds;
using testing::kPackageSource;
using testing::PackageFolder;
using testing::PinnedPackageText;
using testing::ReadTestFile;
using ::testing::StartsWith;
using testing::StatusIs;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

// ---- expressions -----------------------------------------------------------

absl::StatusOr<int64_t> NumberOf(const std::string& text) {
  absl::StatusOr<Expression> parsed =
      Expression::Parse(text, {"a", "b"}, false);
  if (!parsed.ok()) return parsed.status();
  return parsed->Number({{"a", 7}, {"b", 3}});
}

absl::StatusOr<LaunchDim> DimOf(const std::string& text) {
  absl::StatusOr<Expression> parsed = Expression::Parse(text, {"a", "b"}, true);
  if (!parsed.ok()) return parsed.status();
  return parsed->Dim({{"a", 7}, {"b", 3}});
}

TEST(ExpressionTest, ComputesAsTheRulesOfArithmeticSay) {
  EXPECT_THAT(NumberOf("1 + 2 * a"), IsOkAndHolds(15));
  EXPECT_THAT(NumberOf("(1+2)*a"), IsOkAndHolds(21));
  EXPECT_THAT(NumberOf("a - b - 1"), IsOkAndHolds(3));
  EXPECT_THAT(NumberOf("a / b"), IsOkAndHolds(2));
  EXPECT_THAT(NumberOf("a % b"), IsOkAndHolds(1));
  EXPECT_THAT(NumberOf("ceil_div(a, b)"), IsOkAndHolds(3));
  EXPECT_THAT(NumberOf("ceil_div(6, b)"), IsOkAndHolds(2));
  EXPECT_THAT(NumberOf("ceil_div(1 - a, b)"), IsOkAndHolds(-2));
  EXPECT_THAT(NumberOf("min(a, b) + max(a, b)"), IsOkAndHolds(10));
}

TEST(ExpressionTest, BecomesTheLaunchRuleThatItWrites) {
  ASSERT_OK_AND_ASSIGN(const LaunchDim linear, DimOf("a * m + b"));
  EXPECT_EQ(linear, LaunchDim::Of({.mul = 7, .add = 3, .div = 1}));
  ASSERT_OK_AND_ASSIGN(const LaunchDim constant, DimOf("a * b"));
  EXPECT_EQ(constant, LaunchDim::Constant(21));
  ASSERT_OK_AND_ASSIGN(const LaunchDim dim,
                       DimOf("min((m + 1) * a, ceil_div(2 * m + a, b))"));
  for (const uint32_t m : {1u, 2u, 5u, 100u}) {
    EXPECT_EQ(dim.Evaluate(m),
              std::min<uint64_t>(7 * (m + 1), (2 * m + 7 + 2) / 3))
        << m;
  }
}

TEST(ExpressionTest, RefusesWhatALaunchCannotCompute) {
  for (const char* text :
       {"m * m", "m / 2", "m % 2", "a / m", "max(m, 2)", "ceil_div(a, m)",
        "ceil_div(m, 2) + 1", "min(min(m, 1), 2)", "2 * min(m, 1)",
        "ceil_div(ceil_div(m, 2), 2)"}) {
    EXPECT_THAT(DimOf(text),
                StatusIs(kInvalid, HasSubstr("a launch cannot compute")))
        << text;
  }
}

TEST(ExpressionTest, RefusesTokensWhereNoLaunchIs) {
  EXPECT_THAT(NumberOf("2 * m"),
              StatusIs(kInvalid, HasSubstr("m is known at a launch only")));
}

TEST(ExpressionTest, RefusesAnUnknownNameAndListsTheOthers) {
  EXPECT_THAT(NumberOf("a * c"),
              StatusIs(kInvalid, AllOf(HasSubstr("at byte 6"),
                                       HasSubstr("unknown name \"c\""),
                                       HasSubstr("known: a, b"))));
}

TEST(ExpressionTest, RefusesWhatIsNoExpressionAndSaysWhere) {
  const struct {
    const char* text;
    const char* message;
  } cases[] = {
      {"", "found the end"},
      {"a +", "at byte 4: expected a number, a name or \"(\", found the end"},
      {"(a", "expected \")\""},
      {"a b", "expected an operator, found \"b\""},
      {"min(a)", "expected \",\""},
      {"-a", "at byte 1"},
      {"0x10", "\"0x10\" is no whole number"},
      {"9223372036854775808", "no whole number"},
      {"a == b", "expected an operator, found \"=\""},
  };

  for (const auto& one : cases) {
    EXPECT_THAT(NumberOf(one.text), StatusIs(kInvalid, HasSubstr(one.message)))
        << one.text;
  }
}

TEST(ExpressionTest, RefusesDeepAndLongOnes) {
  EXPECT_THAT(NumberOf(std::string(40, '(') + "a" + std::string(40, ')')),
              StatusIs(kInvalid, HasSubstr("deeper than")));
  EXPECT_THAT(NumberOf(std::string(2000, ' ') + "a"),
              StatusIs(kInvalid, HasSubstr("2001 bytes")));
}

TEST(ExpressionTest, RefusesWhatOverflowsOrDividesByNothing) {
  EXPECT_THAT(NumberOf("9223372036854775807 + a"),
              StatusIs(kInvalid, HasSubstr("overflows 64 bits")));
  EXPECT_THAT(NumberOf("9223372036854775807 * a"),
              StatusIs(kInvalid, HasSubstr("overflows 64 bits")));
  for (const char* text : {"a / (b - 3)", "a % 0", "ceil_div(a, 1 - b)"}) {
    EXPECT_THAT(NumberOf(text), StatusIs(kInvalid, HasSubstr("divides by")))
        << text;
  }
}

TEST(ExpressionTest, RefusesALaunchRuleThatDoesNotFitOne) {
  EXPECT_THAT(DimOf("m - a"), StatusIs(kInvalid, HasSubstr("needs -7")));
  EXPECT_THAT(DimOf("4294967296 * m"),
              StatusIs(kInvalid, HasSubstr("needs 4294967296")));
}

TEST(ConditionTest, ComparesBothSides) {
  const ExpressionValues values = {{"a", 7}, {"b", 3}};

  const struct {
    const char* text;
    bool holds;
  } cases[] = {{"a % b == 1", true}, {"a == b", false}, {"a != b", true},
               {"a < b", false},     {"b <= 3", true},  {"a > b", true},
               {"a >= 8", false}};

  for (const auto& one : cases) {
    ASSERT_OK_AND_ASSIGN(const Condition condition,
                         Condition::Parse(one.text, {"a", "b"}));
    EXPECT_THAT(condition.Holds(values), IsOkAndHolds(one.holds)) << one.text;
  }
  EXPECT_THAT(Condition::Parse("a", {"a"}),
              StatusIs(kInvalid, HasSubstr("compares nothing")));
  EXPECT_THAT(Condition::Parse("a = 1", {"a"}),
              StatusIs(kInvalid, HasSubstr("expected one of ==")));
}

// ---- manifest --------------------------------------------------------------

absl::StatusOr<PackageManifest> Parse(const std::string& text) {
  return ParsePackageManifest(text, "p.json");
}

TEST(PackageManifestTest, ReadsWhatAPackageOffers) {
  ASSERT_OK_AND_ASSIGN(const PackageManifest manifest,
                       Parse(PinnedPackageText()));
  EXPECT_EQ(manifest.name, "acme.small");
  EXPECT_EQ(manifest.version, 3u);
  EXPECT_EQ(manifest.backend, Backend::kCpu);
  EXPECT_TRUE(manifest.deterministic);
  EXPECT_FALSE(manifest.own_compiler);
  EXPECT_THAT(manifest.numerics_axes, ElementsAre("tile"));
  ASSERT_EQ(manifest.files.size(), 2u);
  EXPECT_EQ(manifest.files[0].sha256, Sha256(kPackageSource));
  EXPECT_EQ(PackagePoints(manifest.axes).size(), 2u);
  ASSERT_EQ(manifest.steps.size(), 1u);
  EXPECT_EQ(manifest.steps[0].args.size(), 5u);
}

// Each is refused with its place.
TEST(PackageManifestTest, RefusesEachMistakeWithItsPlace) {
  const struct {
    const char* name;
    const char* from;
    const char* to;
    const char* message;
  } cases[] = {
      {"another schema", "kiln.package/1", "kiln.package/2",
       "must be one of \"kiln.package/1\""},
      {"unknown key", "\"version\": 3", "\"version\": 3, \"colour\": 1",
       "unknown key \"colour\" in the package; known: schema"},
      {"unknown key of serves", "\"bits\": [4]", "\"bits\": [4], \"bit\": 4",
       "unknown key \"bit\" in \"serves\""},
      {"unknown key of a step", "\"label\": \"all\"",
       "\"label\": \"all\", \"block\": [1]", "unknown key \"block\" in step"},
      {"unknown op", "\"fused_moe\"", "\"attention\"",
       "\"op\" is \"attention\", must be one of \"fused_moe\""},
      {"unknown backend", "\"cpu\"", "\"tpu\"", "must be one of \"cpu\""},
      {"unknown codebook", "\"mcg\"", "\"mcg2\"", "must be one of \"3inst\""},
      {"no codebook", "[\"mcg\"]", "[]", "must have 1.."},
      {"bits out of range", "\"bits\": [4]", "\"bits\": [9]",
       "must be within 1..8"},
      {"range upside down", "[128, 512]", "[512, 128]",
       "\"hidden\" is [512, 128], must be a range [low, high]"},
      {"capacities upside down", "[1, 64]", "[64, 1]",
       "\"capacity\" is [64, 1], must be a range [low, high] of whole numbers, "
       "1 <= low <= high"},
      {"range of one", "[1, 64]", "[64]",
       "\"capacity\" is an array of 1, must be a range [low, high]"},
      {"number as range", "[1, 64]", "64",
       "\"capacity\" is 64, must be a range [low, high]"},
      {"range from 0", "[1, 64]", "[0, 64]",
       "\"capacity\" is [0, 64], must be a range [low, high]"},
      {"fraction in a range", "[1, 64]", "[1, 64.5]",
       "\"capacity\" is [1, 64.5], must be a range [low, high]"},
      {"one word as name", "acme.small", "small", "two or more words"},
      {"capitals in the name", "acme.small", "Acme.small", "two or more words"},
      {"a name of Kiln's", "acme.small", "fused_moe.small", "is Kiln's own"},
      {"version 0", "\"version\": 3", "\"version\": 0", "must be within 1.."},
      {"no determinism", "\"deterministic\": true, ", "",
       "lacks the key \"deterministic\""},
      {"axis without values", "[4, 8]", "[]", "must have 1.."},
      {"axis value twice", "[4, 8]", "[4, 4]", "stands twice"},
      {"axis with a taken name", "{\"name\": \"tile\"", "{\"name\": \"hidden\"",
       "has another meaning"},
      {"axis with a taken macro", "{\"name\": \"tile\"", "{\"name\": \"inter\"",
       "has another meaning"},
      {"numerics of no axis", "\"numerics_axes\": [\"tile\"]",
       "\"numerics_axes\": [\"tiles\"]", "\"tiles\" is no axis"},
      {"unknown name", "capacity >= tile", "capacity >= tiles",
       "unknown name \"tiles\""},
      {"no comparison", "capacity >= tile", "capacity", "compares nothing"},
      {"absolute path", "\"path\": \"kernel.cc\"", "\"path\": \"/kernel.cc\"",
       "must stay inside the package's folder"},
      {"path that leaves", "\"path\": \"kernel.cc\"",
       "\"path\": \"sub/../../kernel.cc\"",
       "must stay inside the package's folder"},
      {"strange path", "\"path\": \"kernel.cc\"", "\"path\": \"a b.cc\"",
       "letters, digits"},
      {"path among Kiln's headers", "\"path\": \"kernel.cc\"",
       "\"path\": \"device/half.h\"", "must not begin with device/"},
      {"the manifest as a file", "\"path\": \"kernel.cc\"",
       "\"path\": \"package.json\"", "must not be the manifest itself"},
      {"one file twice", "\"path\": \"sub/more.h\"", "\"path\": \"kernel.cc\"",
       "stands twice"},
      {"source that is not pinned", "\"source\": \"kernel.cc\"",
       "\"source\": \"other.cc\"", "is not one of the package's \"files\""},
      {"entry that is no symbol", "\"entries\": [\"acme_f\"]",
       "\"entries\": [\"acme f\"]", "no name of a C function"},
      {"entry of no program", "\"entry\": \"acme_f\"", "\"entry\": \"acme_g\"",
       "program 0 has acme_f"},
      {"program out of range", "\"label\": \"all\"",
       "\"label\": \"all\", \"program\": 1", "must be within 0..0"},
      {"expression with tokens", "4 * capacity * hidden", "4 * m",
       "m is known at a launch only"},
      {"grid of four", "\"hidden / 128\"", "1, 1, 1", "must have 1..3"},
      {"grid that no launch computes", "\"hidden / 128\"", "\"m / 128\"",
       "a launch cannot compute"},
      {"unknown parameter", "param:out", "param:output",
       "names no parameter of the op; known: x, topk_ids"},
      {"unknown slice", "arena:scratch", "arena:stretch",
       "names no slice of the arena; known: scratch"},
      {"unknown kind of argument", "\"tokens\"", "\"f32:1\"",
       "an argument must be"},
      {"fraction as argument", "\"tokens\"", "1.5", "an argument must be"},
      {"no threads", "min(processors, 2)", "0",
       "\"threads\": expression \"0\" is 0, must be within 1..1024"},
      {"too many threads", "\"min(processors, 2)\"", "1025",
       "\"threads\": expression \"1025\" is 1025, must be within 1..1024"},
      {"threads below 0", "min(processors, 2)", "2 - 3",
       "is -1, must be within 1..1024"},
      {"division by 0", "capacity >= tile", "1/0 == 1",
       "\"conditions\": expression \"1/0 \", at byte 2: divides by 0"},
      {"remainder of 0", "capacity >= tile", "capacity % (4 - 4) == 0",
       "at byte 10: divides by 0"},
      {"rounded division by 0", "capacity >= tile",
       "capacity > 1 + ceil_div(tile, min(0, 1))", "at byte 6: divides by 0"},
      {"overflow", "capacity >= tile", "capacity < 9223372036854775807 * 2",
       "at byte 22: overflows 64 bits"},
      {"a condition that never holds", "capacity >= tile", "2 - 3 > 0",
       "\"2 - 3 > 0\" never holds"},
      {"negative arena", "4 * capacity * hidden", "1 - 2",
       "\"bytes\": expression \"1 - 2\" is -1, must be within 0.."},
      {"negative grid", "\"hidden / 128\"", "-1", "found \"-\""},
      {"grid below 0", "hidden / 128", "1 - 2",
       "\"grid\": expression \"1 - 2\" needs -1 in a launch rule"},
      {"grid of 0", "\"hidden / 128\"", "0",
       "\"grid\": expression \"0\" is 0 for all m, must be at least 1"},
      {"grid of 0 times m", "hidden / 128", "0 * m", "is 0 for all m"},
      {"grid of more blocks than there can be", "hidden / 128", "65536",
       "\"grid\": expression \"65536\" is 65536 at the smallest capacity, 1; "
       "dimension 1 has at most 65535 blocks"},
      {"grid of too many for one token", "hidden / 128", "65000 + m * 536",
       "is 65536 at the smallest capacity, 1; dimension 1"},
      {"grid of too many in z", "\"hidden / 128\"", "1, \"65535 + m\"",
       "dimension 2 has at most 65535 blocks"},
      {"grid of m less something", "hidden / 128", "m - 1",
       "needs -1 in a launch rule"},
      {"argument below 0", "u32:2 * tile", "u32:1 - 2",
       "argument: expression \"1 - 2\" is -1, must be within 0..4294967295"},
      {"argument beyond 32 bits", "u32:2 * tile", "u32:4294967296",
       "must be within 0..4294967295"},
      {"source with own compiler", "\"version\": 3",
       "\"version\": 3, \"compiler\": \"own\"",
       "unknown key \"source\" in program"},
  };

  for (const auto& one : cases) {
    SCOPED_TRACE(one.name);
    PackageFolder folder;
    folder.Change(one.from, one.to);
    EXPECT_THAT(ParsePackageManifest(ReadTestFile(folder.File("package.json")),
                                     "p.json"),
                StatusIs(kInvalid,
                         AllOf(StartsWith("p.json:"), HasSubstr(one.message))));
  }
}

TEST(PackageManifestTest, RefusesABlockThatNoPointMakesLegal) {
  const struct {
    const char* step;
    const char* message;
  } cases[] = {
      {"\"block\": [0]",
       "\"block\": expression \"0\" is 0, must be within 1..1024"},
      {"\"block\": [\"2048 / 1\"]", "is 2048, must be within 1..1024"},
      {"\"block\": [64, \"tile\", 32]",
       "\"block\": 2048 threads exceed the limit of 1024"},
      {"\"block\": [64], \"shared_bytes\": \"0 - 4\"",
       "\"shared_bytes\": expression \"0 - 4\" is -4, must be within 0.."},
  };

  for (const auto& one : cases) {
    SCOPED_TRACE(one.step);
    PackageFolder folder;
    folder.Change("\"backend\": \"cpu\"", "\"backend\": \"cuda\"");
    folder.Change("\"threads\": \"min(processors, 2)\",", "");
    folder.Change("\"label\": \"all\"",
                  absl::StrCat("\"label\": \"all\", ", one.step));
    EXPECT_THAT(Parse(ReadTestFile(folder.File("package.json"))),
                StatusIs(kInvalid,
                         AllOf(StartsWith("p.json:"), HasSubstr(one.message))));
  }
}

TEST(PackageManifestTest, RefusesADigestThatIsNoneButLetsPinFillItIn) {
  std::string text = testing::kPackageText;
  EXPECT_THAT(Parse(text), StatusIs(kInvalid, HasSubstr("kiln package pin")));
  text = absl::StrReplaceAll(text, {{"SHA_SOURCE", ""}, {"SHA_HEADER", "00"}});
  EXPECT_THAT(Parse(text), StatusIs(kInvalid, HasSubstr("64 hexadecimal")));
  ASSERT_OK_AND_ASSIGN(const PackageManifest manifest,
                       ParseUnpinnedPackageManifest(text, "p.json"));
  EXPECT_EQ(PinPackageManifest(
                text, manifest,
                {Sha256(kPackageSource), Sha256(testing::kPackageHeader)}),
            PinnedPackageText());
}

TEST(PackageManifestTest, RefusesMoreThan4096Points) {
  std::string values = "0";
  for (int i = 1; i < 64; ++i) absl::StrAppend(&values, ",", i);
  PackageFolder folder;
  folder.Change("\"values\": [4, 8]", "\"values\": [4, 8, 16]");
  folder.Change(
      "{\"name\": \"unroll\", \"values\": [1]}",
      absl::StrCat("{\"name\": \"u\", \"values\": [", values,
                   "]}, {\"name\": \"v\", \"values\": [", values, "]}"));
  EXPECT_THAT(Parse(ReadTestFile(folder.File("package.json"))),
              StatusIs(kInvalid, HasSubstr("more than 4096 points")));
}

constexpr char kOwn[] =
    R"("compiler": "own", "programs": [{"entries": ["acme_f"], "binaries": [
     {"file": "kernel.cc", "target": "cpu-x86-64-v3",
      "assignment": {"tile": 4}},
     {"file": "sub/more.h", "target": "cpu-x86-64-v3",
      "assignment": {"tile": 8}}]}])";

TEST(PackageManifestTest, ReadsTheBinariesOfAnOwnCompiler) {
  PackageFolder folder;
  folder.Change(
      R"("programs": [{"source": "kernel.cc", "entries": ["acme_f"]}])", kOwn);
  ASSERT_OK_AND_ASSIGN(const PackageManifest manifest,
                       Parse(ReadTestFile(folder.File("package.json"))));
  EXPECT_TRUE(manifest.own_compiler);
  ASSERT_EQ(manifest.programs[0].binaries.size(), 2u);
  EXPECT_EQ(manifest.programs[0].binaries[1].assignment,
            (Assignment{{"tile", 8}}));
}

TEST(PackageManifestTest, RefusesAPointWithoutABinaryOrWithTwo) {
  for (const auto& [from, to, found] :
       {std::tuple{"{\"tile\": 8}", "{\"tile\": 16}", "0 binaries"},
        {"{\"tile\": 8}", "{}", "2 binaries"}}) {
    PackageFolder folder;
    folder.Change(
        R"("programs": [{"source": "kernel.cc", "entries": ["acme_f"]}])",
        kOwn);
    folder.Change(from, to);
    EXPECT_THAT(
        Parse(ReadTestFile(folder.File("package.json"))),
        StatusIs(kInvalid, AllOf(HasSubstr(found), HasSubstr("cpu-x86-64-v3"),
                                 HasSubstr("every point"))));
  }
}

TEST(PackageManifestTest, RefusesABinaryThatNoProgramNames) {
  PackageFolder folder;
  folder.Change(
      R"("programs": [{"source": "kernel.cc", "entries": ["acme_f"]}])", kOwn);
  folder.Change(R"("file": "sub/more.h")", R"("file": "kernel.cc")");
  EXPECT_THAT(Parse(ReadTestFile(folder.File("package.json"))),
              StatusIs(kInvalid, HasSubstr("no program has the binary "
                                           "\"sub/more.h\"")));
}

// ---- folder ----------------------------------------------------------------

TEST(ReadPackageTest, KeepsTheBytesThatItCompared) {
  const PackageFolder folder;
  ASSERT_OK_AND_ASSIGN(const Package package, ReadPackage(folder.path()));
  EXPECT_EQ(package.files.at("kernel.cc"), kPackageSource);
  EXPECT_EQ(package.TemplateName(),
            absl::StrCat("acme.small@", package.digest.ToHex()));
}

TEST(ReadPackageTest, IsAnotherPackageWithAnotherManifest) {
  PackageFolder folder;
  ASSERT_OK_AND_ASSIGN(const Package one, ReadPackage(folder.path()));
  folder.Change("[128, 512]", "[128, 256]");
  ASSERT_OK_AND_ASSIGN(const Package other, ReadPackage(folder.path()));
  EXPECT_NE(one.digest, other.digest);
}

// Every byte, not only the first: each is flipped once.
TEST(ReadPackageTest, RefusesEveryChangedByteOfEveryFile) {
  PackageFolder folder;
  for (const char* name : {"kernel.cc", "sub/more.h"}) {
    const std::string text = ReadTestFile(folder.File(name));
    for (size_t i = 0; i < text.size(); ++i) {
      std::string changed = text;
      changed[i] = static_cast<char>(changed[i] ^ 1);
      folder.Write(name, changed);
      ASSERT_THAT(ReadPackage(folder.path()),
                  StatusIs(absl::StatusCode::kDataLoss,
                           AllOf(HasSubstr(folder.File(name)),
                                 HasSubstr(Sha256(changed).ToHex()),
                                 HasSubstr(Sha256(text).ToHex()),
                                 HasSubstr("kiln package pin"))))
          << name << " byte " << i;
    }
    folder.Write(name, text + " ");
    EXPECT_THAT(ReadPackage(folder.path()),
                StatusIs(absl::StatusCode::kDataLoss, HasSubstr(name)));
    folder.Write(name, text);
  }
  EXPECT_OK(ReadPackage(folder.path()));
}

TEST(ReadPackageTest, RefusesAMissingFile) {
  const PackageFolder folder;
  std::filesystem::remove(folder.File("sub/more.h"));
  EXPECT_THAT(ReadPackage(folder.path()),
              StatusIs(absl::StatusCode::kNotFound,
                       AllOf(HasSubstr("package acme.small"),
                             HasSubstr("sub/more.h"))));
}

TEST(ReadPackageTest, RefusesAMissingManifestAndAMissingFolder) {
  const PackageFolder folder;
  EXPECT_THAT(ReadPackage(folder.File("none")),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("package.json")));
  std::filesystem::remove(folder.File("package.json"));
  EXPECT_THAT(ReadPackage(folder.path()),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("package.json")));
}

TEST(ReadPackageTest, RefusesAFileThatIsASymbolicLink) {
  const PackageFolder folder;
  std::filesystem::rename(folder.File("kernel.cc"), folder.File("real.cc"));
  std::filesystem::create_symlink("real.cc", folder.File("kernel.cc"));
  EXPECT_THAT(ReadPackage(folder.path()),
              StatusIs(kInvalid, AllOf(HasSubstr("kernel.cc"),
                                       HasSubstr("is a symbolic link"))));
}

TEST(ReadPackageTest, RefusesAFolderInsideThatIsASymbolicLink) {
  const PackageFolder folder;
  std::filesystem::rename(folder.File("sub"), folder.File("real"));
  std::filesystem::create_directory_symlink("real", folder.File("sub"));
  EXPECT_THAT(ReadPackage(folder.path()),
              StatusIs(kInvalid, HasSubstr("/sub is a symbolic link")));
}

TEST(ReadPackageTest, RefusesAManifestThatIsASymbolicLink) {
  const PackageFolder folder;
  std::filesystem::rename(folder.File("package.json"), folder.File("real"));
  std::filesystem::create_symlink("real", folder.File("package.json"));
  EXPECT_THAT(ReadPackage(folder.path()),
              StatusIs(kInvalid, HasSubstr("is a symbolic link")));
}

TEST(ReadPackageTest, RefusesAFolderInPlaceOfAFile) {
  const PackageFolder folder;
  std::filesystem::remove(folder.File("kernel.cc"));
  std::filesystem::create_directory(folder.File("kernel.cc"));
  EXPECT_THAT(ReadPackage(folder.path()),
              StatusIs(kInvalid, HasSubstr("not a regular file")));
}

TEST(ReadPackageTest, RefusesASourceThatIncludesWhatIsNotPinned) {
  PackageFolder folder;
  const std::string source =
      absl::StrCat("// One.\n#  include <stdio.h>\n", kPackageSource);
  folder.Write("kernel.cc", source);
  folder.Change(Sha256(kPackageSource).ToHex(), Sha256(source).ToHex());
  EXPECT_THAT(ReadPackage(folder.path()),
              StatusIs(kInvalid, AllOf(HasSubstr("kernel.cc:2: includes"),
                                       HasSubstr("stdio.h"))));
}

TEST(WhyBadIncludeTest, AcceptsPinnedAndDeviceHeadersOnly) {
  const std::vector<std::string> headers = {"sub/more.h"};
  for (const char* good :
       {"#include \"sub/more.h\"\n", "#include \"device/half.h\"  // why\n",
        "int include;\n", "#define include\n", "// #include <x>\n"}) {
    EXPECT_THAT(WhyBadInclude(good, headers), IsEmpty()) << good;
  }
  for (const char* bad :
       {"#include \"more.h\"\n", "#include <sub/more.h>\n",
        "#include \"/sub/more.h\"\n", "#include NAME\n", "#in\\\nclude <x>\n",
        "%:include <x>\n", "# include_next \"x\"\n", "#embed \"x\"\n",
        "#import \"x\"\n", "#include", "\t#\tinclude\t\"device/none.h\"\n"}) {
    EXPECT_THAT(WhyBadInclude(bad, headers), StartsWith("1: includes")) << bad;
  }
}

TEST(PinnedManifestTextTest, PinsTheFilesAsTheyAreAndKeepsTheRest) {
  PackageFolder folder;
  folder.Write("kernel.cc", "int changed;\n");
  ASSERT_OK_AND_ASSIGN(const std::string pinned,
                       PinnedManifestText(folder.path()));
  EXPECT_EQ(pinned, absl::StrReplaceAll(PinnedPackageText(),
                                        {{Sha256(kPackageSource).ToHex(),
                                          Sha256("int changed;\n").ToHex()}}));
  folder.Write("package.json", pinned);
  EXPECT_OK(ReadPackage(folder.path()));
}

TEST(PinnedManifestTextTest, RefusesADigestThatIsWrittenWithEscapes) {
  PackageFolder folder;
  folder.Change(Sha256(kPackageSource).ToHex(), "\\u0030\\u0030");
  EXPECT_THAT(PinnedManifestText(folder.path()), StatusIs(kInvalid));
}

// ---- template --------------------------------------------------------------

class PackageTemplateTest : public ::testing::Test {
 protected:
  PackageTemplateTest() {
    problem_.geometry.hidden = 256;
    problem_.geometry.intermediate = 128;
    problem_.geometry.experts = 4;
    problem_.geometry.top_k = 2;
    problem_.geometry.id_dtype = DType::kI64;
    problem_.geometry.weights.bits = {4, 4, 4};
    problem_.interval = {.m_min = 2, .m_max = 8};
    const absl::StatusOr<Target> target = ParseTarget("cpu-x86-64-v3");
    EXPECT_OK(target);
    problem_.device = AssumedProfile(*target);
    problem_.device.multiprocessors = 8;
  }

  std::shared_ptr<const KernelTemplate> Template() {
    absl::StatusOr<Package> package = ReadPackage(folder_.path());
    EXPECT_OK(package);
    return MakePackageTemplate(*std::move(package));
  }

  PackageFolder folder_;
  Problem problem_;
};

TEST_F(PackageTemplateTest, EnumeratesTheLegalPointsInTheOrderOfTheManifest) {
  const auto from = Template();
  const ParamSpace space = from->Enumerate(problem_, 100);
  EXPECT_THAT(space.points,
              ElementsAre(Assignment{{"tile", 4}, {"unroll", 1}},
                          Assignment{{"tile", 8}, {"unroll", 1}}));
  problem_.interval = {.m_min = 1, .m_max = 4};
  const ParamSpace fewer = from->Enumerate(problem_, 100);
  EXPECT_EQ(fewer.points.size(), 1u);
  ASSERT_EQ(fewer.rejects.size(), 1u);
  EXPECT_EQ(fewer.rejects[0].reason,
            "package acme.small wants capacity >= tile");
}

TEST_F(PackageTemplateTest, MakesTheLaunchPlanOfTheManifest) {
  ASSERT_OK_AND_ASSIGN(
      const PlanBody body,
      Template()->MakeBody(problem_, {{"tile", 4}, {"unroll", 1}}));
  EXPECT_EQ(body.template_version, 3u);
  EXPECT_EQ(body.numerics_class, "acme.small.v3.tile4");
  EXPECT_EQ(body.cpu_threads, 2u);
  EXPECT_EQ(body.tolerance, 2e-3);
  ASSERT_EQ(body.arena.slices.size(), 1u);
  EXPECT_EQ(body.arena.slices[0].bytes, 4u * 8 * 256);
  ASSERT_EQ(body.steps.size(), 1u);
  const Step& step = body.steps[0];
  EXPECT_EQ(step.entry, "acme_f");
  // min(2 m, ceil((2 m + 4) / 4)), 256 / 128 and 1.
  EXPECT_EQ(step.grid[0].Evaluate(1), 2u);
  EXPECT_EQ(step.grid[0].Evaluate(7), 5u);
  EXPECT_EQ(step.grid[1], LaunchDim::Constant(2));
  EXPECT_EQ(step.grid[2], LaunchDim::Constant(1));
  EXPECT_THAT(step.args, ElementsAre(Arg::Param(10), Arg::Arena(0), Arg::U32(8),
                                     Arg::Tokens(), Arg::U64(8)));
}

TEST_F(PackageTemplateTest, RejectsAPointWhoseGridIsEmpty) {
  folder_.Change("\"hidden / 128\"", "\"hidden / 512\"");
  EXPECT_THAT(Template()->MakeBody(problem_, {{"tile", 4}, {"unroll", 1}}),
              StatusIs(kInvalid, AllOf(HasSubstr("package acme.small"),
                                       HasSubstr("step all"),
                                       HasSubstr("\"hidden / 512\" is 0"))));
}

TEST_F(PackageTemplateTest, RejectsAPointThatTheDeviceCannotLaunch) {
  folder_.Change("\"backend\": \"cpu\"", "\"backend\": \"cuda\"");
  folder_.Change("\"threads\": \"min(processors, 2)\",", "");
  folder_.Change("\"label\": \"all\"",
                 "\"label\": \"all\", \"block\": [1, 1, \"16 * tile\"], "
                 "\"shared_bytes\": \"232448 + tile - 4\"");
  ASSERT_OK_AND_ASSIGN(const Target target, ParseTarget("sm_90a"));
  problem_.device = AssumedProfile(target);
  // 64 threads deep and 227 KiB: as much as there can be.
  EXPECT_OK(Template()->MakeBody(problem_, {{"tile", 4}, {"unroll", 1}}));
  EXPECT_THAT(Template()->MakeBody(problem_, {{"tile", 8}, {"unroll", 1}}),
              StatusIs(kInvalid,
                       HasSubstr("128 threads deep exceeds the limit of 64")));
  folder_.Change("16 * tile", "1");
  EXPECT_THAT(Template()->MakeBody(problem_, {{"tile", 8}, {"unroll", 1}}),
              StatusIs(kInvalid, HasSubstr("shared_bytes 232452 exceeds the "
                                           "232448 B of a block on sm_90a")));
}

TEST_F(PackageTemplateTest, MakesUnitsOfItsSourcesAndKilnsHeaders) {
  const auto from = Template();
  const std::vector<SourceUnit> units = from->MakeUnits(
      problem_.geometry, problem_.device.target, {{"tile", 4}, {"unroll", 1}});
  ASSERT_EQ(units.size(), 1u);
  EXPECT_EQ(units[0].name, "acme.small/kernel.cc");
  EXPECT_THAT(units[0].text, AllOf(HasSubstr("#define KILN_HIDDEN 256\n"),
                                   HasSubstr("#define KILN_TILE 4\n"),
                                   ::testing::EndsWith(kPackageSource)));
  EXPECT_TRUE(std::any_of(
      units[0].headers.begin(), units[0].headers.end(),
      [](const auto& header) { return header.first == "sub/more.h"; }));
  EXPECT_TRUE(units[0].binary.empty());
  ASSERT_TRUE(units[0].package.has_value());
}

TEST_F(PackageTemplateTest, DoesNotServeWhatItsManifestLeavesOut) {
  const auto from = Template();
  EXPECT_OK(from->Supports(problem_.geometry, problem_.device.target));
  const auto refuses = [&](auto change, const char* what) {
    Problem problem = problem_;
    change(&problem);
    EXPECT_THAT(
        from->Supports(problem.geometry, problem.device.target),
        StatusIs(absl::StatusCode::kUnimplemented,
                 AllOf(HasSubstr("package acme.small"), HasSubstr(what))));
  };
  refuses([](Problem* p) { p->geometry.hidden = 1024; },
          "hidden 1024, only 128..512");
  refuses([](Problem* p) { p->geometry.weights.bits.up = 3; }, "3 bits");
  refuses([](Problem* p) { p->geometry.weights.codebook = Codebook::kMul1; },
          "codebook mul1");
  refuses([](Problem* p) { p->geometry.weights.shared_scales = true; },
          "shared scales");
  refuses([](Problem* p) { p->geometry.io_dtype = DType::kF16; },
          "io_dtype f16");
  refuses([](Problem* p) { p->geometry.id_dtype = DType::kI32; },
          "id_dtype i32");
  refuses([](Problem* p) { p->geometry.op = Op::kLinear; }, "op linear");
  refuses(
      [](Problem* p) {
        p->device.target = {
            .backend = Backend::kCuda, .level = 90, .arch_specific = true};
      },
      "target sm_90a");
}

TEST_F(PackageTemplateTest, RefusesAnAssignmentThatIsNoneOfItsPoints) {
  const auto from = Template();
  EXPECT_THAT(from->MakeBody(problem_, {{"tile", 5}, {"unroll", 1}}),
              StatusIs(kInvalid, HasSubstr("axis tile is 5")));
  problem_.interval.m_max = 128;
  EXPECT_THAT(from->MakeBody(problem_, {{"tile", 4}, {"unroll", 1}}),
              StatusIs(kInvalid, HasSubstr("serves capacities 1..64")));
}

}  // namespace
}  // namespace kiln
