// Messages between Kiln and a race worker: the process in which candidates are
// verified and timed, so that one that hangs or crashes takes nothing with it.
//
// A race worker inherits one stream socket as standard input and output, and a
// LaunchWatch in shared memory as descriptor 3. It sends one RaceHello, then
// answers each RacePrepare with an empty RacePrepared, and each RaceJob with
// any number of checkpoints and one result; programs have no answer. A Failure
// ends the worker. Frames and their rules are in compiler/worker_frame.h.

#ifndef KILN_TUNER_RACE_PROTOCOL_H_
#define KILN_TUNER_RACE_PROTOCOL_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "compiler/base/digest.h"
#include "compiler/spec/device_profile.h"
#include "compiler/spec/plan.h"
#include "compiler/spec/program.h"
#include "compiler/worker_frame.h"
#include "tuner/racer.h"

namespace kiln {

// Moves whenever a message of this file changes.
inline constexpr uint32_t kRaceProtocolVersion = 2;
// Descriptor of the shared LaunchWatch.
inline constexpr int kRaceWatchDescriptor = 3;
inline constexpr uint32_t kContendersMax = 4096;

// The worker has opened its device.
struct RaceHello {
  // Digest of the profile's measure identity.
  Digest device;
  std::string name;  // marketing name
};

// Digest over what DeviceProfile::Encode adds.
Digest MeasureIdentity(const DeviceProfile& profile);

// A plan of the request that will be raced first. The worker makes its bench at
// once, so that weights are there when the race comes.
struct RacePrepare {
  Plan plan;
  uint64_t seed = 1;  // of weights and inputs
};

struct RaceJob {
  uint64_t id = 0;
  uint64_t seed = 1;
  RequestGeometry geometry;
  Target target;
  Interval interval;
  // At least one. Programs travel as keys; the worker has them all.
  std::vector<Contender> contenders;
  // Functions and `earlier` do not travel.
  RaceOptions options;
  std::optional<RaceResult> earlier;
};

// A checkpoint, or the result: what is known about the contenders of a job.
struct RaceReport {
  uint64_t id = 0;
  RaceResult result;
};

// Whole frames, ready to be sent. Too large is ResourceExhausted.
absl::StatusOr<std::string> EncodeRaceHello(const RaceHello& hello);
absl::StatusOr<std::string> EncodeRaceProgram(const Program& program);
absl::StatusOr<std::string> EncodeRacePrepare(const RacePrepare& prepare);
absl::StatusOr<std::string> EncodeRaceJob(const RaceJob& job);
// type: kRaceCheckpoint or kRaceResult.
absl::StatusOr<std::string> EncodeRaceReport(FrameType type,
                                             const RaceReport& report);

// Payload parsers. DataLoss for anything that the encoders cannot have written;
// FailedPrecondition for a hello of another version.
absl::StatusOr<RaceHello> DecodeRaceHello(absl::string_view payload);
absl::StatusOr<Program> DecodeRaceProgram(absl::string_view payload);
absl::StatusOr<RacePrepare> DecodeRacePrepare(absl::string_view payload);
// Programs of the contenders are found by `find`, which returns null for a key
// that it does not know.
absl::StatusOr<RaceJob> DecodeRaceJob(
    absl::string_view payload,
    const std::function<std::shared_ptr<const Program>(const Digest&)>& find);
absl::StatusOr<RaceReport> DecodeRaceReport(absl::string_view payload);

}  // namespace kiln

#endif  // KILN_TUNER_RACE_PROTOCOL_H_
