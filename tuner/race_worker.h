// The life of a race worker process. Kiln starts workers itself; they are not
// for use by hand.

#ifndef KILN_TUNER_RACE_WORKER_H_
#define KILN_TUNER_RACE_WORKER_H_

#include <string>
#include <vector>

#include "compiler/spec/target.h"

namespace kiln {

// The first argument that makes `kiln` a race worker.
inline constexpr char kRaceWorkerVerb[] = "race-worker";

// Where a worker races.
struct RaceSite {
  Target target;
  int ordinal = 0;  // of the GPU, by the driver's number
  // Processors that a worker of a CPU target is bound to; empty: all.
  std::vector<int> processors = {};
};

// Arguments of a worker for `site`, without argv[0].
std::vector<std::string> RaceWorkerArguments(const RaceSite& site);

// Opens the device and answers races from standard input, which must be the
// socket described in race_protocol.h, until it ends. Ends the process with
// code 0 when the stream ended and 1 after a failure that was reported; returns
// 2 when it was not started as a worker.
int RaceWorkerMain(int argc, char** argv);

}  // namespace kiln

#endif  // KILN_TUNER_RACE_WORKER_H_
