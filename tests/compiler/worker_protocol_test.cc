#include "compiler/worker_protocol.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/support/status_matchers.h"

namespace kiln {
namespace {

using ::kiln::testing::StatusIs;
using ::testing::HasSubstr;
using ::testing::SizeIs;

constexpr size_t kHeaderBytes = 8;

WorkerHello SampleHello() {
  return {.compiler = "nvrtc",
          .version = "13.0",
          .components = {{.path = "/lib/libnvrtc.so.13",
                          .bytes = 109338064,
                          .mtime_ns = -5,
                          .inode = 42},
                         {.path = "/lib/libnvrtc-builtins.so.13.0"}}};
}

WorkerJob SampleJob() {
  WorkerJob job;
  job.id = uint64_t{1} << 40;
  job.target = *ParseTarget("sm_90a");
  job.unit = {.name = "fused_moe/cuda.cu",
              .template_version = 3,
              .compute_dtype = "f16",
              .text = std::string("a\0b", 3),
              .headers = {{"device/half.h", "half"}, {"device/x.h", ""}},
              .entries = {"fc1", "fc2"},
              .options = {"--maxrregcount=128"}};
  return job;
}

WorkerResult SampleResult() {
  return {.id = 7,
          .status = absl::OkStatus(),
          .binary = "ELF",
          .log = "ptxas info",
          .seconds = 0.25,
          .last = true};
}

// The payload of a frame that an encoder made.
std::string Payload(const absl::StatusOr<std::string>& frame) {
  return frame.value().substr(kHeaderBytes);
}

TEST(WorkerProtocolTest, HelloSurvivesTheWire) {
  EXPECT_THAT(DecodeHello(Payload(EncodeHello(SampleHello()))),
              testing::IsOkAndHolds(SampleHello()));
}

TEST(WorkerProtocolTest, JobSurvivesTheWire) {
  const WorkerJob job = SampleJob();
  ASSERT_OK_AND_ASSIGN(const WorkerJob got, DecodeJob(Payload(EncodeJob(job))));
  EXPECT_EQ(got.id, job.id);
  EXPECT_EQ(got.target, job.target);
  EXPECT_EQ(got.unit, job.unit);
}

TEST(WorkerProtocolTest, ResultSurvivesTheWire) {
  ASSERT_OK_AND_ASSIGN(const WorkerResult got,
                       DecodeResult(Payload(EncodeResult(SampleResult()))));
  EXPECT_EQ(got.id, 7u);
  EXPECT_OK(got.status);
  EXPECT_EQ(got.binary, "ELF");
  EXPECT_EQ(got.log, "ptxas info");
  EXPECT_EQ(got.seconds, 0.25);
  EXPECT_TRUE(got.last);
}

TEST(WorkerProtocolTest, RejectKeepsItsCodeAndMessage) {
  WorkerResult result = SampleResult();
  result.status = absl::InvalidArgumentError("no such type");
  result.binary.clear();
  ASSERT_OK_AND_ASSIGN(const WorkerResult got,
                       DecodeResult(Payload(EncodeResult(result))));
  EXPECT_THAT(got.status,
              StatusIs(absl::StatusCode::kInvalidArgument, "no such type"));
}

TEST(WorkerProtocolTest, FailureKeepsItsCodeAndMessage) {
  EXPECT_THAT(
      DecodeFailure(Payload(EncodeFailure(absl::NotFoundError("gone")))),
      StatusIs(absl::StatusCode::kNotFound, "gone"));
}

TEST(WorkerProtocolTest, RefusesAnotherVersion) {
  std::string payload = Payload(EncodeHello(SampleHello()));
  payload[0] = 9;
  EXPECT_THAT(DecodeHello(payload),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("protocol 9, this build speaks 1")));
}

TEST(WorkerProtocolTest, RefusesAnOkResultWithoutBinary) {
  WorkerResult result = SampleResult();
  result.binary.clear();
  EXPECT_THAT(DecodeResult(Payload(EncodeResult(result))),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr("empty")));
}

TEST(WorkerProtocolTest, CutsLogsThatAreTooLong) {
  WorkerResult result = SampleResult();
  result.log = std::string(kLogBytesMax + 1000, 'x');
  ASSERT_OK_AND_ASSIGN(const WorkerResult got,
                       DecodeResult(Payload(EncodeResult(result))));
  EXPECT_EQ(got.log.size(), kLogBytesMax);
}

TEST(WorkerProtocolTest, RefusesMessagesThatExceedAFrame) {
  WorkerJob job = SampleJob();
  job.unit.text.assign(kFrameBytesMax, 'x');
  EXPECT_THAT(EncodeJob(job), StatusIs(absl::StatusCode::kResourceExhausted,
                                       HasSubstr("at most 67108864")));
}

TEST(WorkerProtocolTest, RefusesUnitsWithTooManyHeaders) {
  WorkerJob job = SampleJob();
  job.unit.headers.assign(300, {"h", ""});
  EXPECT_THAT(EncodeJob(job), StatusIs(absl::StatusCode::kResourceExhausted,
                                       HasSubstr("300 headers")));
}

TEST(WorkerProtocolTest, EveryTruncationIsDataLoss) {
  const std::string hello = Payload(EncodeHello(SampleHello()));
  const std::string job = Payload(EncodeJob(SampleJob()));
  const std::string result = Payload(EncodeResult(SampleResult()));
  for (size_t i = 4; i < hello.size(); ++i) {
    EXPECT_THAT(DecodeHello(hello.substr(0, i)),
                StatusIs(absl::StatusCode::kDataLoss));
  }
  for (size_t i = 0; i < job.size(); ++i) {
    EXPECT_THAT(DecodeJob(job.substr(0, i)),
                StatusIs(absl::StatusCode::kDataLoss));
  }
  for (size_t i = 0; i < result.size(); ++i) {
    EXPECT_THAT(DecodeResult(result.substr(0, i)),
                StatusIs(absl::StatusCode::kDataLoss));
  }
  EXPECT_THAT(DecodeJob(job + "x"), StatusIs(absl::StatusCode::kDataLoss));
}

// A count of 2^32 - 1 in four bytes must not reserve room for as many.
TEST(WorkerProtocolTest, DamagedPayloadsNeverCrash) {
  std::mt19937 random(1);
  const std::string payloads[] = {Payload(EncodeHello(SampleHello())),
                                  Payload(EncodeJob(SampleJob())),
                                  Payload(EncodeResult(SampleResult()))};
  for (int round = 0; round < 3000; ++round) {
    std::string bytes = payloads[round % 3];
    for (int i = 0; i < 3; ++i) {
      bytes[random() % bytes.size()] =
          static_cast<char>(random() % 3 == 0 ? 0xFF : random());
    }
    static_cast<void>(DecodeHello(bytes));
    static_cast<void>(DecodeFailure(bytes));
    static_cast<void>(DecodeJob(bytes));
    static_cast<void>(DecodeResult(bytes));
  }
}

TEST(FrameParserTest, CutsAStreamIntoFramesWhateverItsPieces) {
  const std::string stream =
      EncodeHello(SampleHello()).value() + EncodeResult(SampleResult()).value();
  for (size_t piece = 1; piece <= stream.size(); piece += 7) {
    FrameParser parser;
    std::vector<Frame> frames;
    for (size_t at = 0; at < stream.size(); at += piece) {
      parser.Feed(absl::string_view(stream).substr(at, piece));
      for (;;) {
        ASSERT_OK_AND_ASSIGN(std::optional<Frame> frame, parser.Next());
        if (!frame.has_value()) break;
        frames.push_back(*std::move(frame));
      }
    }
    ASSERT_THAT(frames, SizeIs(2));
    EXPECT_EQ(frames[0].type, FrameType::kHello);
    EXPECT_EQ(frames[1].type, FrameType::kResult);
    EXPECT_OK(DecodeResult(frames[1].payload));
    EXPECT_TRUE(parser.Empty());
  }
}

TEST(FrameParserTest, RefusesAnUnknownTypeAndAnExcessiveLength) {
  FrameParser unknown;
  unknown.Feed(absl::string_view("\x63\0\0\0\0\0\0\0", 8));
  EXPECT_THAT(unknown.Next(),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr("type 99")));
  FrameParser excessive;
  excessive.Feed(absl::string_view("\x04\0\0\0\xFF\xFF\xFF\xFF", 8));
  EXPECT_THAT(excessive.Next(), StatusIs(absl::StatusCode::kDataLoss,
                                         HasSubstr("4294967295 bytes")));
}

TEST(IdentifyFileTest, FollowsLinksAndNoticesChanges) {
  const std::string folder = ::testing::TempDir();
  const std::string file = absl::StrCat(folder, "/kiln_identity_", getpid());
  const std::string link = file + "_link";
  std::ofstream(file) << "1234";
  ASSERT_EQ(symlink(file.c_str(), link.c_str()), 0);
  ASSERT_OK_AND_ASSIGN(const FileIdentity direct, IdentifyFile(file));
  ASSERT_OK_AND_ASSIGN(const FileIdentity linked, IdentifyFile(link));
  EXPECT_EQ(direct, linked);
  EXPECT_EQ(direct.bytes, 4u);
  std::ofstream(file, std::ios::app) << "5";
  ASSERT_OK_AND_ASSIGN(const FileIdentity changed, IdentifyFile(file));
  EXPECT_NE(changed, direct);
  unlink(link.c_str());
  unlink(file.c_str());
  EXPECT_THAT(IdentifyFile(file), StatusIs(absl::StatusCode::kNotFound));
  EXPECT_THAT(IdentifyFile(folder),
              StatusIs(absl::StatusCode::kFailedPrecondition));
}

}  // namespace
}  // namespace kiln
