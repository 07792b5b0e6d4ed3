#include "tuner/race_worker.h"

#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "compiler/base/available_memory.h"
#include "compiler/base/file_util.h"
#include "compiler/base/status_macros.h"
#include "compiler/worker_channel.h"
#include "tuner/launch_watch.h"
#include "tuner/op_bench.h"
#include "tuner/race_protocol.h"

namespace kiln {
namespace {

absl::StatusOr<RaceSite> ParseArguments(int argc, char** argv) {
  if (argc != 5) {
    return absl::InvalidArgumentError(
        absl::StrCat("usage: ", kRaceWorkerVerb, " TARGET ORDINAL PROCESSORS"));
  }
  RaceSite site;
  ASSIGN_OR_RETURN(site.target, ParseTarget(argv[2]));
  if (!absl::SimpleAtoi(argv[3], &site.ordinal)) {
    return absl::InvalidArgumentError(
        absl::StrCat("ordinal is \"", argv[3], "\", must be a number"));
  }
  for (const absl::string_view text :
       absl::StrSplit(argv[4], ',', absl::SkipEmpty())) {
    int processor = 0;
    if (!absl::SimpleAtoi(text, &processor) || processor < 0 ||
        processor >= CPU_SETSIZE) {
      return absl::InvalidArgumentError(
          absl::StrCat("processor is \"", text, "\""));
    }
    site.processors.push_back(processor);
  }
  return site;
}

absl::StatusOr<LaunchWatch*> MapWatch() {
  struct stat info;
  if (fstat(kRaceWatchDescriptor, &info) != 0 ||
      info.st_size < static_cast<off_t>(sizeof(LaunchWatch))) {
    return absl::FailedPreconditionError(
        "a race worker was started without its launch watch");
  }
  void* memory = mmap(nullptr, sizeof(LaunchWatch), PROT_READ | PROT_WRITE,
                      MAP_SHARED, kRaceWatchDescriptor, 0);
  if (memory == MAP_FAILED) {
    return ErrnoStatus(errno, "cannot map", "the launch watch");
  }
  return static_cast<LaunchWatch*>(memory);
}

absl::Status Bind(const std::vector<int>& processors) {
  if (processors.empty()) return absl::OkStatus();
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int processor : processors) {
    CPU_SET(static_cast<size_t>(processor), &set);
  }
  if (sched_setaffinity(0, sizeof(set), &set) != 0) {
    return ErrnoStatus(errno, "cannot bind the race worker to processors",
                       absl::StrJoin(processors, ","));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Device>> OpenDevice(const RaceSite& site) {
  return site.target.backend == Backend::kCpu
             ? OpenCpuDevice(site.target)
             : OpenCudaDevice(site.ordinal, site.target);
}

class RaceServer {
 public:
  RaceServer(int channel, LaunchWatch* watch, std::unique_ptr<Device> device)
      : channel_(channel), watch_(watch), device_(std::move(device)) {
    device_->set_watch(watch_);
  }

  absl::Status Serve() {
    RETURN_IF_ERROR(
        Reply(EncodeRaceHello({.device = MeasureIdentity(device_->profile()),
                               .name = device_->profile().name})));
    FrameParser parser;
    while (open_) {
      ASSIGN_OR_RETURN(const std::optional<Frame> frame,
                       ReceiveFrame(channel_, &parser));
      if (!frame.has_value()) break;
      RETURN_IF_ERROR(Handle(*frame));
    }
    return absl::OkStatus();
  }

 private:
  absl::Status Handle(const Frame& frame) {
    switch (frame.type) {
      case FrameType::kRaceProgram: {
        ASSIGN_OR_RETURN(Program program, DecodeRaceProgram(frame.payload));
        const Digest key = program.key.digest;
        programs_[key] = std::make_shared<const Program>(std::move(program));
        return absl::OkStatus();
      }
      case FrameType::kRacePrepare: {
        ASSIGN_OR_RETURN(const RacePrepare prepare,
                         DecodeRacePrepare(frame.payload));
        RETURN_IF_ERROR(MakeBench(prepare.plan.geometry, prepare.seed));
        return Reply(FrameWriter().Finish(FrameType::kRacePrepared));
      }
      case FrameType::kRaceJob:
        return RunJob(frame.payload);
      default:
        return absl::DataLossError(absl::StrCat(
            "race worker received a frame of type ",
            static_cast<uint32_t>(frame.type), ", which it does not answer"));
    }
  }

  // Keeps the bench of the last request: intervals of one request follow each
  // other.
  absl::Status MakeBench(const RequestGeometry& geometry, uint64_t seed) {
    if (bench_ != nullptr && bench_->geometry() == geometry && seed_ == seed) {
      return absl::OkStatus();
    }
    // The old weights go first: both may not fit.
    bench_.reset();
    ASSIGN_OR_RETURN(bench_, OpBench::Create(device_.get(), geometry, seed));
    seed_ = seed;
    return absl::OkStatus();
  }

  absl::Status RunJob(absl::string_view payload) {
    ASSIGN_OR_RETURN(
        RaceJob job, DecodeRaceJob(payload, [this](const Digest& key) {
          const auto found = programs_.find(key);
          return found != programs_.end() ? found->second : nullptr;
        }));
    RETURN_IF_ERROR(MakeBench(job.geometry, job.seed));
    RaceOptions options = job.options;
    options.about_to_run = [this](size_t contender) {
      watch_->BeginTurn(contender);
    };
    options.checkpoint = [this, &job](const RaceResult& result) {
      Reply(EncodeRaceReport(FrameType::kRaceCheckpoint,
                             {.id = job.id, .result = result}))
          .IgnoreError();
    };
    if (job.earlier.has_value()) options.earlier = &*job.earlier;
    ASSIGN_OR_RETURN(RaceResult result,
                     Race(bench_.get(), job.interval, job.contenders, options));
    watch_->EndTurns();
    return Reply(EncodeRaceReport(FrameType::kRaceResult,
                                  {.id = job.id, .result = std::move(result)}));
  }

  absl::Status Reply(const absl::StatusOr<std::string>& frame) {
    RETURN_IF_ERROR(frame.status());
    if (!SendFrame(channel_, frame)) open_ = false;
    return absl::OkStatus();
  }

  int channel_;
  LaunchWatch* watch_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<OpBench> bench_;
  uint64_t seed_ = 0;
  std::map<Digest, std::shared_ptr<const Program>> programs_;
  bool open_ = true;
};

absl::Status Serve(const RaceSite& site, int channel) {
  ASSIGN_OR_RETURN(LaunchWatch * watch, MapWatch());
  ASSIGN_OR_RETURN(std::unique_ptr<Device> device, OpenDevice(site));
  // Afterwards, because the device is the same whatever part of it is used.
  RETURN_IF_ERROR(Bind(site.processors));
  // Never destroyed: after a failure, memory that a candidate wrote to must not
  // decide how this process ends.
  auto* server = new RaceServer(channel, watch, std::move(device));
  try {
    return server->Serve();
  } catch (const std::exception& error) {
    // Which says nothing about the candidate that ran.
    return ExhaustedStatus(error);
  }
}

}  // namespace

std::vector<std::string> RaceWorkerArguments(const RaceSite& site) {
  return {kRaceWorkerVerb, site.target.ToString(), absl::StrCat(site.ordinal),
          absl::StrJoin(site.processors, ",")};
}

int RaceWorkerMain(int argc, char** argv) {
  const int channel = TakeWorkerChannel();
  if (channel < 0) return 2;
  EndWithParent();
  const absl::StatusOr<RaceSite> site = ParseArguments(argc, argv);
  const absl::Status status = site.ok() ? Serve(*site, channel) : site.status();
  if (!status.ok()) SendFrame(channel, EncodeFailure(status));
  _exit(status.ok() ? 0 : 1);
}

}  // namespace kiln
