#include "tuner/race_protocol.h"

#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <string>

#include "compiler/spec/plan_key.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/status_matchers.h"
#include "tests/tuner/cpu_programs.h"

namespace kiln {
namespace {

using ::testing::HasSubstr;
using testing::SmallAssignment;
using testing::SmallBody;
using testing::SmallGeometry;
using testing::StatusIs;

// The payload of a whole frame.
std::string PayloadOf(const absl::StatusOr<std::string>& bytes,
                      FrameType type) {
  EXPECT_OK(bytes);
  if (!bytes.ok()) return "";
  FrameParser parser;
  parser.Feed(*bytes);
  absl::StatusOr<std::optional<Frame>> frame = parser.Next();
  EXPECT_OK(frame);
  EXPECT_TRUE(frame.ok() && frame->has_value());
  if (!frame.ok() || !frame->has_value()) return "";
  EXPECT_EQ((*frame)->type, type);
  EXPECT_TRUE(parser.Empty());
  return (*frame)->payload;
}

Program SomeProgram() {
  Program program;
  program.key = {Sha256("pre-image"), "pre-image"};
  program.target = {.backend = Backend::kCpu, .level = 3};
  program.toolchain = {"clang", "19.1.7", Sha256("compiler")};
  program.binary = std::string(
      "\x7F"
      "ELF\0bytes",
      10);
  program.binary_digest = Sha256(program.binary);
  program.kernels = {{.entry = "kiln_fc1",
                      .params = {{0, 8}, {8, 4}},
                      .param_bytes = 12,
                      .registers = 64,
                      .static_shared_bytes = 1024,
                      .local_bytes = 8,
                      .max_threads = 256},
                     Kernel()};
  program.kernels[1].entry = "kiln_fc2";
  return program;
}

RaceResult SomeResult() {
  RaceResult result;
  result.timings.resize(2);
  result.timings[0] = {.outcome = Outcome::kFinished,
                       .reason = "",
                       .worst_error = 1.5e-3,
                       .samples = {{0, 1234.5}, {1, 1e-9}, {2, 7}}};
  result.timings[1] = {.outcome = Outcome::kRejected,
                       .reason = "row 3 is wrong",
                       .worst_error = std::numeric_limits<double>::infinity(),
                       .samples = {}};
  result.noise_floor = 0.0125;
  result.launches = uint64_t{1} << 40;
  result.twin = 0;
  result.twin_samples = {{0, 1230}, {1, 1.25}};
  return result;
}

void ExpectEqual(const RaceResult& got, const RaceResult& expected) {
  const auto equal = [](const std::vector<BlockTime>& a,
                        const std::vector<BlockTime>& b) {
    ASSERT_EQ(a.size(), b.size());
    for (size_t i = 0; i < a.size(); ++i) {
      EXPECT_EQ(a[i].block, b[i].block);
      EXPECT_EQ(a[i].ns, b[i].ns);
    }
  };
  ASSERT_EQ(got.timings.size(), expected.timings.size());
  for (size_t i = 0; i < got.timings.size(); ++i) {
    EXPECT_EQ(got.timings[i].outcome, expected.timings[i].outcome);
    EXPECT_EQ(got.timings[i].reason, expected.timings[i].reason);
    EXPECT_EQ(got.timings[i].worst_error, expected.timings[i].worst_error);
    equal(got.timings[i].samples, expected.timings[i].samples);
  }
  EXPECT_EQ(got.noise_floor, expected.noise_floor);
  EXPECT_EQ(got.launches, expected.launches);
  EXPECT_EQ(got.twin, expected.twin);
  equal(got.twin_samples, expected.twin_samples);
}

RaceJob SomeJob() {
  RaceJob job;
  job.id = 7;
  job.seed = 3;
  job.geometry = SmallGeometry();
  job.target = SomeProgram().target;
  job.interval = {3, 8};
  job.options.seconds_max = 2.5;
  job.options.schedule.blocks_min = 4;
  job.options.schedule.blocks_max = 9;
  job.options.schedule.blocks_unsettled_max = 12;
  job.options.oracle_threads = 3;
  for (const int64_t tile : {4, 16}) {
    Assignment assignment = SmallAssignment();
    assignment["tokens_tile"] = tile;
    Contender& contender = job.contenders.emplace_back();
    absl::StatusOr<PlanBody> body =
        SmallBody(job.geometry, job.interval.m_max, assignment);
    EXPECT_OK(body);
    contender.body = *std::move(body);
    contender.programs = {std::make_shared<const Program>(SomeProgram())};
    contender.digest =
        CandidateDigest(contender.body, {contender.programs[0]->key.digest});
  }
  job.earlier = SomeResult();
  return job;
}

std::shared_ptr<const Program> FindSome(const Digest& key) {
  return key == SomeProgram().key.digest
             ? std::make_shared<const Program>(SomeProgram())
             : nullptr;
}

TEST(RaceProtocolTest, AHelloComesBack) {
  const std::string payload =
      PayloadOf(EncodeRaceHello({Sha256("device"), "NVIDIA H200"}),
                FrameType::kRaceHello);
  ASSERT_OK_AND_ASSIGN(const RaceHello hello, DecodeRaceHello(payload));
  EXPECT_EQ(hello.device, Sha256("device"));
  EXPECT_EQ(hello.name, "NVIDIA H200");
  std::string other = payload;
  other[0] = static_cast<char>(kRaceProtocolVersion + 1);
  EXPECT_THAT(DecodeRaceHello(other),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("speaks protocol")));
}

TEST(RaceProtocolTest, AProgramComesBack) {
  const Program sent = SomeProgram();
  ASSERT_OK_AND_ASSIGN(const Program got,
                       DecodeRaceProgram(PayloadOf(EncodeRaceProgram(sent),
                                                   FrameType::kRaceProgram)));
  EXPECT_EQ(got.key, sent.key);
  EXPECT_EQ(got.target, sent.target);
  EXPECT_EQ(got.toolchain, sent.toolchain);
  EXPECT_EQ(got.binary, sent.binary);
  EXPECT_EQ(got.binary_digest, sent.binary_digest);
  EXPECT_EQ(got.kernels, sent.kernels);
}

TEST(RaceProtocolTest, AJobComesBack) {
  const RaceJob sent = SomeJob();
  ASSERT_OK_AND_ASSIGN(
      const RaceJob got,
      DecodeRaceJob(PayloadOf(EncodeRaceJob(sent), FrameType::kRaceJob),
                    FindSome));
  EXPECT_EQ(got.id, sent.id);
  EXPECT_EQ(got.seed, sent.seed);
  EXPECT_EQ(got.geometry, sent.geometry);
  EXPECT_EQ(got.target, sent.target);
  EXPECT_EQ(got.interval, sent.interval);
  EXPECT_EQ(got.options.seconds_max, sent.options.seconds_max);
  EXPECT_EQ(got.options.schedule.blocks_min, sent.options.schedule.blocks_min);
  EXPECT_EQ(got.options.schedule.blocks_max, sent.options.schedule.blocks_max);
  EXPECT_EQ(got.options.schedule.blocks_unsettled_max,
            sent.options.schedule.blocks_unsettled_max);
  EXPECT_EQ(got.options.oracle_threads, sent.options.oracle_threads);
  ASSERT_EQ(got.contenders.size(), sent.contenders.size());
  for (size_t i = 0; i < got.contenders.size(); ++i) {
    EXPECT_EQ(got.contenders[i].body, sent.contenders[i].body);
    EXPECT_EQ(got.contenders[i].digest, sent.contenders[i].digest);
    ASSERT_EQ(got.contenders[i].programs.size(), 1u);
    EXPECT_EQ(got.contenders[i].programs[0]->key, SomeProgram().key);
  }
  ASSERT_TRUE(got.earlier.has_value());
  ExpectEqual(*got.earlier, *sent.earlier);
}

TEST(RaceProtocolTest, AReportComesBack) {
  const std::string payload =
      PayloadOf(EncodeRaceReport(FrameType::kRaceCheckpoint, {9, SomeResult()}),
                FrameType::kRaceCheckpoint);
  ASSERT_OK_AND_ASSIGN(const RaceReport report, DecodeRaceReport(payload));
  EXPECT_EQ(report.id, 9u);
  ExpectEqual(report.result, SomeResult());
}

TEST(RaceProtocolTest, WhatNoWorkerCanMeanIsRefused) {
  RaceJob job = SomeJob();
  const std::string payload =
      PayloadOf(EncodeRaceJob(job), FrameType::kRaceJob);
  EXPECT_THAT(
      DecodeRaceJob(payload,
                    [](const Digest&) -> std::shared_ptr<const Program> {
                      return nullptr;
                    }),
      StatusIs(absl::StatusCode::kDataLoss, HasSubstr("was not sent")));
  job.earlier->timings.resize(1);
  EXPECT_THAT(DecodeRaceJob(PayloadOf(EncodeRaceJob(job), FrameType::kRaceJob),
                            FindSome),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr("1 timings")));
  job.contenders.clear();
  EXPECT_THAT(DecodeRaceJob(PayloadOf(EncodeRaceJob(job), FrameType::kRaceJob),
                            FindSome),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr("contenders")));
  for (const double ns : {-1.0, std::nan("")}) {
    RaceResult result = SomeResult();
    result.timings[0].samples[1].ns = ns;
    EXPECT_THAT(DecodeRaceReport(PayloadOf(
                    EncodeRaceReport(FrameType::kRaceResult, {1, result}),
                    FrameType::kRaceResult)),
                StatusIs(absl::StatusCode::kDataLoss, HasSubstr("a sample")));
  }
}

// Every shorter payload is refused, and no changed byte does harm.
TEST(RaceProtocolTest, DamageIsRefusedOrHarmless) {
  const std::string job =
      PayloadOf(EncodeRaceJob(SomeJob()), FrameType::kRaceJob);
  const std::string program =
      PayloadOf(EncodeRaceProgram(SomeProgram()), FrameType::kRaceProgram);
  const std::string report =
      PayloadOf(EncodeRaceReport(FrameType::kRaceResult, {1, SomeResult()}),
                FrameType::kRaceResult);
  const auto decode = [](const std::string& name, absl::string_view payload) {
    if (name == "job") return DecodeRaceJob(payload, FindSome).status();
    if (name == "program") return DecodeRaceProgram(payload).status();
    return DecodeRaceReport(payload).status();
  };
  std::minstd_rand random(1);
  for (const auto& [name, payload] : std::map<std::string, std::string>{
           {"job", job}, {"program", program}, {"report", report}}) {
    for (size_t size = 0; size < payload.size(); size += 1 + size / 64) {
      EXPECT_THAT(decode(name, absl::string_view(payload).substr(0, size)),
                  StatusIs(absl::StatusCode::kDataLoss))
          << name << " of " << size << " bytes";
    }
    for (int round = 0; round < 2000; ++round) {
      std::string damaged = payload;
      damaged[random() % damaged.size()] ^=
          static_cast<char>(1 << random() % 8);
      const absl::Status status = decode(name, damaged);
      EXPECT_TRUE(status.ok() || absl::IsDataLoss(status)) << status;
    }
  }
}

}  // namespace
}  // namespace kiln
