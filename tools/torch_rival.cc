#include "tools/torch_rival.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cmath>
#include <csignal>
#include <cstring>
#include <nlohmann/json.hpp>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "compiler/base/status_macros.h"

extern char** environ;

namespace kiln {

absl::StatusOr<std::unique_ptr<TorchRival>> TorchRival::Start(
    const std::string& python, const RequestGeometry& geometry,
    const DeviceProfile& device, int ordinal) {
  if (geometry.op != Op::kFusedMoe) {
    return absl::UnimplementedError(absl::StrCat(
        "PyTorch is compared with entries of fused_moe only, found ",
        geometry.ToString(), "; name another entry by --entry"));
  }
  const bool gpu = device.target.backend == Backend::kCuda;
  const nlohmann::json spec = {
      {"hidden", geometry.hidden},
      {"intermediate", geometry.intermediate},
      {"experts", geometry.experts},
      {"top_k", geometry.top_k},
      {"device", gpu ? absl::StrCat("cuda:", ordinal) : std::string("cpu")},
      {"threads", device.multiprocessors},
      {"seed", 1}};
  // A child that dies must not take this process along.
  std::signal(SIGPIPE, SIG_IGN);
  std::array<int, 2> in{};
  std::array<int, 2> out{};
  if (pipe2(in.data(), O_CLOEXEC) != 0) {
    return absl::UnavailableError(absl::StrCat("pipe: ", std::strerror(errno)));
  }
  if (pipe2(out.data(), O_CLOEXEC) != 0) {
    close(in[0]);
    close(in[1]);
    return absl::UnavailableError(absl::StrCat("pipe: ", std::strerror(errno)));
  }
  std::unique_ptr<TorchRival> rival(new TorchRival);
  rival->to_ = fdopen(in[1], "w");
  rival->from_ = fdopen(out[0], "r");
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, in[0], STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, out[1], STDOUT_FILENO);
  std::string script = TorchScript().at(0).second;
  std::string argument = spec.dump();
  std::string program = python;
  std::string flag = "-c";
  std::array<char*, 5> arguments = {program.data(), flag.data(), script.data(),
                                    argument.data(), nullptr};
  const int failed = posix_spawnp(&rival->pid_, program.c_str(), &actions,
                                  nullptr, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  close(in[0]);
  close(out[1]);
  if (failed != 0) {
    rival->pid_ = -1;
    return absl::UnavailableError(
        absl::StrCat("cannot start ", python, ": ", std::strerror(failed),
                     "; name a Python with PyTorch by --python"));
  }
  ASSIGN_OR_RETURN(rival->description_, rival->ReadLine());
  return rival;
}

TorchRival::~TorchRival() {
  // End of input ends it.
  if (to_ != nullptr) std::fclose(to_);
  if (from_ != nullptr) std::fclose(from_);
  if (pid_ > 0) waitpid(pid_, nullptr, 0);
}

absl::StatusOr<std::string> TorchRival::ReadLine() {
  std::array<char, 512> line{};
  if (std::fgets(line.data(), line.size(), from_) == nullptr) {
    return absl::UnavailableError(
        "the process that runs PyTorch ended; its last words are on stderr. "
        "Name a Python with PyTorch by --python");
  }
  return std::string(absl::StripSuffix(line.data(), "\n"));
}

absl::StatusOr<double> TorchRival::Time(uint32_t m, uint32_t draws) {
  std::fprintf(to_, "time %u %u\n", m, draws);
  std::fflush(to_);
  ASSIGN_OR_RETURN(const std::string line, ReadLine());
  double ns = 0;
  if (!absl::SimpleAtod(line, &ns) || !(ns > 0) || !std::isfinite(ns)) {
    return absl::UnavailableError(
        absl::StrCat("PyTorch answered \"", line, "\", expected nanoseconds"));
  }
  return ns;
}

}  // namespace kiln
