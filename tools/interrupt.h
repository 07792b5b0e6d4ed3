// What a verb that writes for a long time does when it is interrupted.

#ifndef KILN_TOOLS_INTERRUPT_H_
#define KILN_TOOLS_INTERRUPT_H_

namespace kiln {

// From now on SIGINT, SIGTERM and SIGHUP remove what is unfinished before they
// end the process, as by the signal. Those that are ignored stay so. Once,
// before other threads are started; not for processes that start others, which
// would inherit blocked signals.
void RemoveUnfinishedFilesWhenInterrupted();

}  // namespace kiln

#endif  // KILN_TOOLS_INTERRUPT_H_
