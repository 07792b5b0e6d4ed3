// scale_bundle N FILE: a bundle of N small sm_90a programs, for warm_cache.py.

#include "tests/support/scale_bundle.h"

#include <cstdio>
#include <cstdlib>

#include "compiler/base/file_util.h"
#include "compiler/bundle_writer.h"

int main(int argc, char** argv) {
  const int copies = argc == 3 ? std::atoi(argv[1]) : 0;
  if (copies < 1 || copies > 65536) {
    std::fprintf(stderr, "usage: scale_bundle N FILE\n");
    return 2;
  }
  const absl::StatusOr<std::string> bytes =
      kiln::WriteBundle({kiln::testing::ScaleSection(copies, true)});
  const absl::Status written =
      bytes.ok() ? kiln::WriteFileAtomically(argv[2], *bytes) : bytes.status();
  if (written.ok()) return 0;
  std::fprintf(stderr, "scale_bundle: %s\n", written.ToString().c_str());
  return 1;
}
