// The corpora of the fuzz targets of layers are valid layers: from refused ones
// alone a fuzzer would never reach the code behind the checks.

#include <gtest/gtest.h>

#include <fstream>
#include <iterator>

#include "templates/formats/btx_layer.h"
#include "templates/formats/describe.h"
#include "templates/formats/npk_import.h"
#include "templates/formats/prepare.h"
#include "templates/formats/qsrt_layer.h"
#include "tests/fuzz/layer_checks.h"
#include "tests/fuzz/memory_file.h"
#include "tests/support/checkpoint_writer.h"
#include "tests/support/golden.h"
#include "tests/support/status_matchers.h"

namespace kiln {
namespace {

using ::kiln::testing::MemoryFile;

std::string CorpusFile(const std::string& name) {
  std::ifstream in(testing::SourcePath("tests/fuzz/corpus/" + name),
                   std::ios::binary);
  EXPECT_TRUE(in.good()) << name;
  return std::string(std::istreambuf_iterator<char>(in), {});
}

TEST(LayerCorpusTest, EveryBtxFileHasNativeTensors) {
  for (const char* name : {"uniform_mcg", "pairs", "coupled", "fp16"}) {
    SCOPED_TRACE(name);
    const std::string input = CorpusFile(std::string("btx/") + name);
    const size_t line = input.find('\n');
    ASSERT_OK_AND_ASSIGN(BtxManifest manifest,
                         ParseBtxManifest(input.substr(0, line), "m"));
    std::string bytes;
    ASSERT_TRUE(testing::MakeLayerFile(input.substr(line + 1), 0, &bytes));
    MemoryFile file;
    file.Write(bytes);
    manifest.layers.at(1) = {.file = file.name(), .sha256 = Sha256(bytes)};
    ASSERT_OK_AND_ASSIGN(BtxLayer layer,
                         BtxLayer::Open(MemoryFile::kFolder, manifest, 1));
    // The coupled file has two halves; the others are one extent.
    const int64_t end =
        manifest.coupled ? manifest.intermediate / 2 : manifest.intermediate;
    ASSERT_OK_AND_ASSIGN(const std::unique_ptr<TrellisSource> source,
                         TrellisFromBtx({0, end}, &layer));
    testing::CheckStreams(source.get());
  }
}

TEST(LayerCorpusTest, EveryQsrtFileIsReadToItsEnd) {
  for (const char* name : {"kimi", "fruit", "x4t"}) {
    SCOPED_TRACE(name);
    std::string bytes;
    ASSERT_TRUE(testing::MakeLayerFile(CorpusFile(std::string("qsrt/") + name),
                                       4088, &bytes));
    const testing::TestFolder folder;
    folder.Write(QsrtLayerFileName(3), bytes);
    ASSERT_OK_AND_ASSIGN(QsrtLayer layer, QsrtLayer::Open(folder.path(), 3));
    ASSERT_OK(layer.Validate());
    const auto source = TrellisFromQsrtLayer({0, 256}, &layer);
    EXPECT_EQ(source.ok(), std::string(name) != "x4t") << source.status();
    if (source.ok()) testing::CheckStreams(source->get());
  }
}

TEST(LayerCorpusTest, EveryExl3FileIsDescribedAndPrepared) {
  for (const char* name : {"mcg", "legacy_3inst", "mixtral_mul1", "qwen2"}) {
    SCOPED_TRACE(name);
    const std::string input = CorpusFile(std::string("exl3/") + name);
    const size_t line = input.find('\n');
    std::string bytes;
    ASSERT_TRUE(testing::MakeLayerFile(input.substr(line + 1), 0, &bytes));
    const testing::TestFolder folder;
    folder.Write("config.json", input.substr(0, line));
    folder.Write("model.safetensors", bytes);
    ASSERT_OK(DescribeCheckpoint(folder.path(), {}));
    ASSERT_OK(PrepareLayer(folder.path(), folder.At("out"), {.layer = 0}));
  }
}

TEST(LayerCorpusTest, TheP8FileIsImported) {
  std::string bytes;
  ASSERT_TRUE(testing::MakeLayerFile(CorpusFile("p8/valid"), 0, &bytes));
  const testing::TestFolder folder;
  ASSERT_OK(
      ImportP8Sidecar(folder.Write("p8", bytes), "glm", folder.At("out")));
}

}  // namespace
}  // namespace kiln
