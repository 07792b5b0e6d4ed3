// What a verb that works for a long time does when it is interrupted.

#ifndef KILN_TOOLS_INTERRUPT_H_
#define KILN_TOOLS_INTERRUPT_H_

#include <string>

namespace kiln {

// Of verbs that write files and keep nothing else.
inline constexpr char kUnfinishedIsRemoved[] = "what was unfinished is removed";

// From now on SIGINT, SIGTERM and SIGHUP remove files that are unfinished, say
// `outcome` in a line on stderr, and end the process as by the signal: 130 in a
// shell for SIGINT. Those that are ignored stay so. Once, before other threads
// are started; only for processes whose children do not inherit blocked signals
// (those of WorkerProcess do not).
void EndCleanlyWhenInterrupted(const std::string& outcome);

}  // namespace kiln

#endif  // KILN_TOOLS_INTERRUPT_H_
