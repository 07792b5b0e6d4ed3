// A bar on stderr that redraws itself, for terminals.

#ifndef KILN_TOOLS_PROGRESS_BAR_H_
#define KILN_TOOLS_PROGRESS_BAR_H_

#include <cstddef>
#include <string>

#include "absl/strings/string_view.h"

namespace kiln {

// " ETA 12s" for work of equally long units; empty while nothing can be said.
//   elapsed: seconds since the first unit began.
std::string RemainingTime(double elapsed, size_t done, size_t total);

// Not thread-safe.
class ProgressBar {
 public:
  ProgressBar() = default;
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  ~ProgressBar() { Clear(); }

  // Draws "name [####....] done/total ETA detail" over what stands there, at
  // most ten times a second. An `elapsed` that went back starts another bar.
  void Draw(absl::string_view name, double elapsed, size_t done, size_t total,
            absl::string_view detail);

  // Leaves an empty line, for other text.
  void Clear();

 private:
  double drawn_ = -1;  // seconds into the work; negative: not yet
  bool open_ = false;
};

}  // namespace kiln

#endif  // KILN_TOOLS_PROGRESS_BAR_H_
