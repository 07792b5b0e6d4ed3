#include "tools/interrupt.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <thread>

#include "compiler/base/unfinished_files.h"

namespace kiln {
namespace {

// A thread and not a handler: a handler could not take the lock that keeps
// other threads from writing more.
void WaitForSignal(const sigset_t& signals) {
  int number = 0;
  if (sigwait(&signals, &number) != 0) return;
  RemoveUnfinishedFiles();
  std::fprintf(stderr, "\nkiln: interrupted; what was unfinished is removed\n");
  signal(number, SIG_DFL);
  pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);
  kill(getpid(), number);
}

}  // namespace

void RemoveUnfinishedFilesWhenInterrupted() {
  sigset_t signals;
  sigemptyset(&signals);
  for (const int number : {SIGINT, SIGTERM, SIGHUP}) {
    struct sigaction action;
    if (sigaction(number, nullptr, &action) == 0 &&
        action.sa_handler != SIG_IGN) {
      sigaddset(&signals, number);
    }
  }
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  std::thread(WaitForSignal, signals).detach();
}

}  // namespace kiln
