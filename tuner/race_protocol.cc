#include "tuner/race_protocol.h"

#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "compiler/base/status_macros.h"

namespace kiln {
namespace {

constexpr uint32_t kKernelsMax = 256;
constexpr uint32_t kParamsMax = 256;
constexpr uint32_t kSamplesMax = 1u << 20;
// Where a result says that there is none.
constexpr uint32_t kAbsent = 0;
constexpr uint32_t kPresent = 1;

void Write(const Digest& digest, FrameWriter* out) {
  out->Text(digest.AsBytes());
}

Digest ReadDigest(FrameReader* in) {
  const absl::StatusOr<Digest> digest = Digest::FromBytes(in->Text());
  if (digest.ok()) return *digest;
  in->Fail(digest.status().message());
  return {};
}

Target ReadTarget(FrameReader* in) {
  const absl::StatusOr<Target> target = ParseTarget(in->Text());
  if (target.ok()) return *target;
  in->Fail(target.status().message());
  return {};
}

Plan ReadPlan(FrameReader* in) {
  absl::StatusOr<Plan> plan = PlanFromJson(in->Text());
  if (plan.ok()) return *std::move(plan);
  in->Fail(plan.status().message());
  return {};
}

bool ReadFlag(FrameReader* in, absl::string_view name) {
  const uint32_t value = in->U32();
  if (value > kPresent) in->Fail(absl::StrCat(name, " is ", value));
  return value == kPresent;
}

double ReadFinite(FrameReader* in, absl::string_view name) {
  const double value = in->F64();
  // Errors may be infinite, but nothing is negative or NaN.
  if (!(value >= 0)) in->Fail(absl::StrCat(name, " is ", value));
  return value;
}

void Write(const std::vector<BlockTime>& samples, FrameWriter* out) {
  out->U32(static_cast<uint32_t>(samples.size()));
  for (const BlockTime& sample : samples) {
    out->U32(sample.block).F64(sample.ns);
  }
}

std::vector<BlockTime> ReadSamples(FrameReader* in) {
  std::vector<BlockTime> samples;
  const uint32_t count = in->Count(kSamplesMax, "samples");
  for (uint32_t i = 0; i < count && in->ok(); ++i) {
    BlockTime& sample = samples.emplace_back();
    sample.block = in->U32();
    sample.ns = ReadFinite(in, "a sample");
  }
  return samples;
}

void Write(const RaceResult& result, FrameWriter* out) {
  out->U32(static_cast<uint32_t>(result.timings.size()));
  for (const Timing& timing : result.timings) {
    out->U32(static_cast<uint32_t>(timing.outcome))
        .Text(absl::string_view(timing.reason).substr(0, kLogBytesMax))
        .F64(timing.worst_error);
    Write(timing.samples, out);
  }
  out->F64(result.noise_floor).U64(result.launches).U64(result.twin);
  Write(result.twin_samples, out);
  out->U32(result.blocks).U32(result.discarded).F64(result.seconds);
}

RaceResult ReadResult(FrameReader* in) {
  RaceResult result;
  const uint32_t count = in->Count(kContendersMax, "timings");
  for (uint32_t i = 0; i < count && in->ok(); ++i) {
    Timing& timing = result.timings.emplace_back();
    const uint32_t outcome = in->U32();
    if (outcome > static_cast<uint32_t>(Outcome::kRejected)) {
      in->Fail(absl::StrCat("an outcome is ", outcome));
    }
    timing.outcome = static_cast<Outcome>(outcome);
    timing.reason = in->Text();
    timing.worst_error = ReadFinite(in, "an error");
    timing.samples = ReadSamples(in);
  }
  result.noise_floor = ReadFinite(in, "the noise floor");
  result.launches = in->U64();
  result.twin = in->U64();
  result.twin_samples = ReadSamples(in);
  result.blocks = in->U32();
  result.discarded = in->U32();
  result.seconds = ReadFinite(in, "the time taken");
  return result;
}

}  // namespace

Digest MeasureIdentity(const DeviceProfile& profile) {
  CanonicalEncoder encoder("kiln.device/1");
  profile.Encode(&encoder);
  return encoder.digest();
}

absl::StatusOr<std::string> EncodeRaceHello(const RaceHello& hello) {
  FrameWriter out;
  out.U32(kRaceProtocolVersion);
  Write(hello.device, &out);
  return out.Text(hello.name).Finish(FrameType::kRaceHello);
}

absl::StatusOr<RaceHello> DecodeRaceHello(absl::string_view payload) {
  FrameReader in(payload);
  const uint32_t version = in.U32();
  if (version != kRaceProtocolVersion) {
    return absl::FailedPreconditionError(absl::StrCat(
        "race worker speaks protocol ", version, ", this build speaks ",
        kRaceProtocolVersion, "; use one build for both"));
  }
  RaceHello hello;
  hello.device = ReadDigest(&in);
  hello.name = in.Text();
  RETURN_IF_ERROR(in.Finish("race hello"));
  return hello;
}

absl::StatusOr<std::string> EncodeRaceProgram(const Program& program) {
  FrameWriter out;
  Write(program.key.digest, &out);
  out.Text(program.key.preimage)
      .Text(program.target.ToString())
      .Text(program.toolchain.name)
      .Text(program.toolchain.version);
  Write(program.toolchain.content, &out);
  out.Text(program.binary);
  out.U32(static_cast<uint32_t>(program.kernels.size()));
  for (const Kernel& kernel : program.kernels) {
    out.Text(kernel.entry).U32(static_cast<uint32_t>(kernel.params.size()));
    for (const KernelParam& param : kernel.params) {
      out.U32(param.offset).U32(param.bytes);
    }
    out.U32(kernel.param_bytes)
        .U32(kernel.registers)
        .U32(kernel.static_shared_bytes)
        .U32(kernel.local_bytes)
        .U32(kernel.max_threads);
  }
  return out.Finish(FrameType::kRaceProgram);
}

absl::StatusOr<Program> DecodeRaceProgram(absl::string_view payload) {
  FrameReader in(payload);
  Program program;
  program.key.digest = ReadDigest(&in);
  program.key.preimage = in.Text();
  program.target = ReadTarget(&in);
  program.toolchain.name = in.Text();
  program.toolchain.version = in.Text();
  program.toolchain.content = ReadDigest(&in);
  program.binary = in.Text();
  program.binary_digest = Sha256(program.binary);
  const uint32_t kernels = in.Count(kKernelsMax, "kernels");
  for (uint32_t i = 0; i < kernels && in.ok(); ++i) {
    Kernel& kernel = program.kernels.emplace_back();
    kernel.entry = in.Text();
    const uint32_t params = in.Count(kParamsMax, "parameters");
    for (uint32_t j = 0; j < params && in.ok(); ++j) {
      KernelParam& param = kernel.params.emplace_back();
      param.offset = in.U32();
      param.bytes = in.U32();
    }
    kernel.param_bytes = in.U32();
    kernel.registers = in.U32();
    kernel.static_shared_bytes = in.U32();
    kernel.local_bytes = in.U32();
    kernel.max_threads = in.U32();
  }
  RETURN_IF_ERROR(in.Finish("race program"));
  return program;
}

absl::StatusOr<std::string> EncodeRacePrepare(const RacePrepare& prepare) {
  return FrameWriter()
      .Text(PlanToJson(prepare.plan))
      .U64(prepare.seed)
      .Finish(FrameType::kRacePrepare);
}

absl::StatusOr<RacePrepare> DecodeRacePrepare(absl::string_view payload) {
  FrameReader in(payload);
  RacePrepare prepare;
  prepare.plan = ReadPlan(&in);
  prepare.seed = in.U64();
  RETURN_IF_ERROR(in.Finish("race preparation"));
  return prepare;
}

absl::StatusOr<std::string> EncodeRaceJob(const RaceJob& job) {
  FrameWriter out;
  out.U64(job.id)
      .U64(job.seed)
      .F64(job.options.seconds_max)
      .F64(job.options.schedule.error)
      .U32(job.options.schedule.blocks_min)
      .U32(job.options.schedule.blocks_max)
      .U32(job.options.schedule.blocks_unsettled_max)
      .U32(job.options.schedule.batch_blocks)
      .U32(static_cast<uint32_t>(job.options.schedule.batch_max))
      .U32(job.options.warm_l2 ? kPresent : kAbsent)
      .U32(static_cast<uint32_t>(job.options.oracle_threads))
      .U32(static_cast<uint32_t>(job.contenders.size()));
  Plan plan;
  plan.geometry = job.geometry;
  plan.target = job.target;
  plan.interval = job.interval;
  for (const Contender& contender : job.contenders) {
    plan.body = contender.body;
    plan.programs.clear();
    for (const auto& program : contender.programs) {
      plan.programs.push_back(program->key.digest);
    }
    out.Text(PlanToJson(plan));
    Write(contender.digest, &out);
  }
  out.U32(job.earlier.has_value() ? kPresent : kAbsent);
  if (job.earlier.has_value()) Write(*job.earlier, &out);
  return out.Finish(FrameType::kRaceJob);
}

absl::StatusOr<RaceJob> DecodeRaceJob(
    absl::string_view payload,
    const std::function<std::shared_ptr<const Program>(const Digest&)>& find) {
  FrameReader in(payload);
  RaceJob job;
  job.id = in.U64();
  job.seed = in.U64();
  job.options.seconds_max = ReadFinite(&in, "the time limit");
  ScheduleOptions& schedule = job.options.schedule;
  schedule.error = in.F64();
  schedule.blocks_min = in.U32();
  schedule.blocks_max = in.U32();
  schedule.blocks_unsettled_max = in.U32();
  schedule.batch_blocks = in.U32();
  schedule.batch_max = in.U32();
  if (!(schedule.error > 0 && schedule.error < 1) || schedule.blocks_max < 1 ||
      schedule.blocks_unsettled_max < schedule.blocks_max ||
      schedule.batch_max < 2) {
    in.Fail("its schedule cannot be kept");
  }
  job.options.warm_l2 = ReadFlag(&in, "the mark of a warm L2");
  const uint32_t threads = in.U32();
  if (threads < 1 || threads > 1u << 16) {
    in.Fail(absl::StrCat(threads, " oracle threads"));
  }
  job.options.oracle_threads = static_cast<int>(threads);
  const uint32_t count = in.Count(kContendersMax, "contenders");
  if (count == 0) in.Fail("it has no contenders");
  for (uint32_t i = 0; i < count && in.ok(); ++i) {
    Plan plan = ReadPlan(&in);
    if (i == 0) {
      job.geometry = plan.geometry;
      job.target = plan.target;
      job.interval = plan.interval;
    } else if (plan.geometry != job.geometry || plan.target != job.target ||
               plan.interval != job.interval) {
      in.Fail("its contenders answer different requests");
    }
    Contender& contender = job.contenders.emplace_back();
    contender.body = std::move(plan.body);
    for (const Digest& key : plan.programs) {
      contender.programs.push_back(find(key));
      if (contender.programs.back() == nullptr) {
        in.Fail(absl::StrCat("program ", key.Short(), " was not sent"));
      }
    }
    contender.digest = ReadDigest(&in);
  }
  if (ReadFlag(&in, "the mark of an earlier result")) {
    job.earlier = ReadResult(&in);
    if (job.earlier->timings.size() != job.contenders.size()) {
      in.Fail(absl::StrCat("its earlier result has ",
                           job.earlier->timings.size(), " timings for ",
                           job.contenders.size(), " contenders"));
    }
  }
  RETURN_IF_ERROR(in.Finish("race job"));
  return job;
}

absl::StatusOr<std::string> EncodeRaceReport(FrameType type,
                                             const RaceReport& report) {
  FrameWriter out;
  out.U64(report.id);
  Write(report.result, &out);
  return out.Finish(type);
}

absl::StatusOr<RaceReport> DecodeRaceReport(absl::string_view payload) {
  FrameReader in(payload);
  RaceReport report;
  report.id = in.U64();
  report.result = ReadResult(&in);
  RETURN_IF_ERROR(in.Finish("race report"));
  return report;
}

}  // namespace kiln
