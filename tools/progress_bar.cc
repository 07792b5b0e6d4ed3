#include "tools/progress_bar.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace kiln {
namespace {

// What fits one row: a line that wraps could not be cleared again.
size_t Width() {
  constexpr size_t kWidthMax = 118;
  winsize size = {};
  if (ioctl(STDERR_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col < 2) {
    return kWidthMax;
  }
  return std::min<size_t>(kWidthMax, size.ws_col - 1);
}

}  // namespace

std::string RemainingTime(double elapsed, size_t done, size_t total) {
  if (done == 0 || done >= total) return "";
  return absl::StrFormat(" ETA %.0fs", elapsed / static_cast<double>(done) *
                                           static_cast<double>(total - done));
}

void ProgressBar::Draw(absl::string_view name, double elapsed, size_t done,
                       size_t total, absl::string_view detail) {
  if (elapsed < drawn_) drawn_ = -1;
  // Often enough to look alive, rarely enough to cost nothing.
  if (done != total && drawn_ >= 0 && elapsed - drawn_ < 0.1) return;
  drawn_ = elapsed;
  constexpr size_t kWidth = 24;
  const size_t filled = total == 0 ? kWidth : kWidth * done / total;
  std::string line = absl::StrCat(
      name, " [", std::string(filled, '#'), std::string(kWidth - filled, '.'),
      "] ", done, "/", total, RemainingTime(elapsed, done, total), " ", detail);
  if (const size_t width = Width(); line.size() > width) line.resize(width);
  std::fprintf(stderr, "\r\033[K%s", line.c_str());
  std::fflush(stderr);
  open_ = true;
}

void ProgressBar::Clear() {
  if (open_) std::fprintf(stderr, "\r\033[K");
  open_ = false;
}

}  // namespace kiln
