// A worker process's side of its channel to Kiln.

#ifndef KILN_COMPILER_WORKER_CHANNEL_H_
#define KILN_COMPILER_WORKER_CHANNEL_H_

#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "compiler/worker_frame.h"

namespace kiln {

// Moves the stream socket that is standard input and output to a descriptor of
// its own, so that nothing that is printed can reach it, and returns it; -1,
// with a message, when standard input is no socket. For the first lines of a
// worker.
int TakeWorkerChannel();

// From now on the parent's death kills this process, whatever it is doing, it
// leaves no core file, and when memory runs out it goes before its parent. A
// parent that died before shows as the end of the channel.
void EndWithParent();

// Blocks until the frame is sent. False when the peer is gone or `frame` is no
// frame.
bool SendFrame(int channel, const absl::StatusOr<std::string>& frame);

// Blocks until one whole frame is there. nullopt at the end of the stream;
// DataLoss as FrameParser::Next.
absl::StatusOr<std::optional<Frame>> ReceiveFrame(int channel,
                                                  FrameParser* parser);

}  // namespace kiln

#endif  // KILN_COMPILER_WORKER_CHANNEL_H_
