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
void WaitForSignal(const sigset_t& signals, const std::string& outcome) {
  int number = 0;
  if (sigwait(&signals, &number) != 0) return;
  RemoveUnfinishedFiles();
  // A terminal may show a bar, and the ^C behind it.
  std::fprintf(stderr, "%skiln: interrupted; %s\n",
               isatty(STDERR_FILENO) != 0 ? "\n" : "", outcome.c_str());
  signal(number, SIG_DFL);
  pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);
  kill(getpid(), number);
}

}  // namespace

void EndCleanlyWhenInterrupted(const std::string& outcome) {
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
  std::thread(WaitForSignal, signals, outcome).detach();
}

}  // namespace kiln
