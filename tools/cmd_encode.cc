#include "tools/cmd_encode.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "compiler/base/status_macros.h"
#include "templates/formats/encoder_checkpoint.h"
#include "templates/formats/npk_checkpoint.h"
#include "tools/interrupt.h"
#include "tools/progress_bar.h"

namespace kiln {
namespace {

absl::StatusOr<Bits> ParseBits(const std::string& text) {
  std::vector<int> numbers;
  for (const absl::string_view part : absl::StrSplit(text, ',')) {
    int number = 0;
    if (!absl::SimpleAtoi(part, &number) || number < 1 || number > 8) {
      numbers.clear();
      break;
    }
    numbers.push_back(number);
  }
  if (numbers.size() == 1) numbers.resize(3, numbers[0]);
  if (numbers.size() != 3) {
    return absl::InvalidArgumentError(
        absl::StrCat("--bits is \"", text, "\", must be a number within 1..8, ",
                     "or three as in 4,4,5"));
  }
  return Bits{.gate = numbers[0], .up = numbers[1], .down = numbers[2]};
}

absl::StatusOr<Codebook> ParseCodebook(const std::string& text) {
  for (const Codebook known :
       {Codebook::k3Inst, Codebook::kMcg, Codebook::kMul1}) {
    if (text == CodebookName(known)) return known;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("--codebook is \"", text, "\", must be 3inst, mcg or mul1"));
}

// What only the other format has must not be passed over in silence.
absl::Status CheckOptionsOfFormat(const EncodeCommand& command) {
  const auto check = [&](absl::string_view option, absl::string_view format,
                         bool given) -> absl::Status {
    if (!given || command.format == format) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat(option, " is an option of --format ", format,
                     ", and the format is ", command.format));
  };
  RETURN_IF_ERROR(check("--codebook", "exl3", command.codebook.has_value()));
  RETURN_IF_ERROR(check("--tp", "npk1", command.tensor_parallel.has_value()));
  RETURN_IF_ERROR(check("--boundary", "npk1", command.boundary.has_value()));
  return check("--limit", "npk1", command.limit.has_value());
}

// Tiles on stderr: a bar that redraws itself on a terminal, else a line for
// every tenth.
class EncodeBar {
 public:
  void Update(uint64_t done, uint64_t total, const std::string& detail) {
    const double elapsed = absl::ToDoubleSeconds(absl::Now() - begin_);
    if (terminal_) {
      bar_.Draw("encode", elapsed, done, total, "");
      return;
    }
    const uint64_t tenth = done * 10 / total;
    if (tenth == tenth_) return;
    tenth_ = tenth;
    std::fprintf(stderr, "encode %d0%%%s %s\n", static_cast<int>(tenth),
                 RemainingTime(elapsed, done, total).c_str(), detail.c_str());
  }

  void Clear() { bar_.Clear(); }

 private:
  const bool terminal_ = isatty(STDERR_FILENO) != 0;
  const absl::Time begin_ = absl::Now();
  uint64_t tenth_ = 0;
  ProgressBar bar_;
};

}  // namespace

absl::StatusOr<int> RunEncode(const GlobalOptions& global,
                              const EncodeCommand& command) {
  EndCleanlyWhenInterrupted(kUnfinishedIsRemoved);
  const int threads =
      command.threads != 0
          ? command.threads
          : std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  EncodeBar bar;
  const EncodeProgress progress = [&](uint64_t done, uint64_t total,
                                      const std::string& detail) {
    bar.Update(done, total, detail);
  };
  EncodedCheckpoint encoded;
  if (command.format == "exl3") {
    RETURN_IF_ERROR(CheckOptionsOfFormat(command));
    EncodeOptions options;
    ASSIGN_OR_RETURN(options.bits, ParseBits(command.bits));
    ASSIGN_OR_RETURN(options.codebook,
                     ParseCodebook(command.codebook.value_or("mcg")));
    options.seed = command.seed;
    options.threads = threads;
    options.progress = progress;
    ASSIGN_OR_RETURN(
        encoded, EncodeCheckpoint(command.checkpoint, command.output, options));
  } else if (command.format == "npk1") {
    RETURN_IF_ERROR(CheckOptionsOfFormat(command));
    NpkCheckpointOptions options;
    if (!absl::SimpleAtoi(command.bits, &options.bits) || options.bits < 2 ||
        options.bits > 5) {
      return absl::InvalidArgumentError(
          absl::StrCat("--bits is \"", command.bits,
                       "\", must be a number within 2..5 for npk1"));
    }
    const std::string boundary = command.boundary.value_or("coupled");
    if (boundary != "coupled" && boundary != "identity") {
      return absl::InvalidArgumentError(absl::StrCat(
          "--boundary is \"", boundary, "\", must be coupled or identity"));
    }
    options.boundary =
        boundary == "coupled" ? NpkBoundary::kCoupled : NpkBoundary::kIdentity;
    options.ranks = command.tensor_parallel.value_or(1);
    options.limit = command.limit.value_or("inf");
    options.seed = command.seed;
    options.threads = threads;
    options.progress = progress;
    ASSIGN_OR_RETURN(encoded, EncodeNpkCheckpoint(command.checkpoint,
                                                  command.output, options));
  } else {
    return absl::InvalidArgumentError(absl::StrCat(
        "--format is \"", command.format, "\", must be exl3 or npk1"));
  }
  bar.Clear();
  if (global.json) {
    nlohmann::ordered_json out;
    out["folder"] = command.output;
    out["bytes"] = encoded.bytes;
    out["matrices"] = encoded.matrices;
    out["weights"] = encoded.weights;
    out["relative_error"] = encoded.relative_error;
    out["worst"] = encoded.worst;
    out["worst_relative_error"] = encoded.worst_error;
    PrintJson(out, 1);
    return kExitDone;
  }
  std::printf(
      "%s  %s  %llu matrices  squared error %.4g of the weights' energy, at "
      "most %.4g (%s)\n",
      command.output.c_str(), FormatBytes(encoded.bytes).c_str(),
      static_cast<unsigned long long>(encoded.matrices), encoded.relative_error,
      encoded.worst_error, encoded.worst.c_str());
  return kExitDone;
}

}  // namespace kiln
