#include "compiler/nvrtc_library.h"

#include <dirent.h>
#include <dlfcn.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "compiler/base/file_util.h"
#include "compiler/base/status_macros.h"

namespace kiln {
namespace {

// Symbols of internal linkage else carry a random number and the process id.
constexpr char kSymbolSeed[] = "-frandom-seed=kiln";

// Types of nvrtc.h: results are an enum whose zero is success; programs are
// opaque pointers.
using NvrtcResult = int;
using NvrtcProgram = struct NvrtcProgramTag*;
constexpr NvrtcResult kNvrtcSuccess = 0;
constexpr NvrtcResult kNvrtcErrorCompilation = 6;

// The entry points that Kiln uses.
struct NvrtcTable {
  const char* (*get_error_string)(NvrtcResult);
  NvrtcResult (*version)(int*, int*);
  NvrtcResult (*create_program)(NvrtcProgram*, const char* source,
                                const char* name, int headers,
                                const char* const* texts,
                                const char* const* names);
  NvrtcResult (*destroy_program)(NvrtcProgram*);
  NvrtcResult (*compile_program)(NvrtcProgram, int, const char* const*);
  NvrtcResult (*get_cubin_size)(NvrtcProgram, size_t*);
  NvrtcResult (*get_cubin)(NvrtcProgram, char*);
  NvrtcResult (*get_log_size)(NvrtcProgram, size_t*);
  NvrtcResult (*get_log)(NvrtcProgram, char*);
};

constexpr absl::string_view kBuiltinsPrefix = "libnvrtc-builtins.so.";

std::string FolderOf(const std::string& path) {
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : path.substr(0, slash);
}

template <typename Function>
absl::Status Resolve(void* handle, const char* symbol, Function* function) {
  void* address = dlsym(handle, symbol);
  if (address == nullptr) {
    return absl::FailedPreconditionError(absl::StrCat(
        "libnvrtc lacks ", symbol, "; CUDA 12 or newer is needed"));
  }
  *function = reinterpret_cast<Function>(address);
  return absl::OkStatus();
}

absl::Status ResolveAll(void* handle, NvrtcTable* t) {
  RETURN_IF_ERROR(Resolve(handle, "nvrtcGetErrorString", &t->get_error_string));
  RETURN_IF_ERROR(Resolve(handle, "nvrtcVersion", &t->version));
  RETURN_IF_ERROR(Resolve(handle, "nvrtcCreateProgram", &t->create_program));
  RETURN_IF_ERROR(Resolve(handle, "nvrtcDestroyProgram", &t->destroy_program));
  RETURN_IF_ERROR(Resolve(handle, "nvrtcCompileProgram", &t->compile_program));
  RETURN_IF_ERROR(Resolve(handle, "nvrtcGetCUBINSize", &t->get_cubin_size));
  RETURN_IF_ERROR(Resolve(handle, "nvrtcGetCUBIN", &t->get_cubin));
  RETURN_IF_ERROR(Resolve(handle, "nvrtcGetProgramLogSize", &t->get_log_size));
  return Resolve(handle, "nvrtcGetProgramLog", &t->get_log);
}

// ptxas adds its own run time to the log; without that line equal compiles have
// equal logs.
std::string StableLog(absl::string_view log) {
  std::vector<absl::string_view> kept;
  for (const absl::string_view line : absl::StrSplit(log, '\n')) {
    if (absl::StrContains(line, "Compile time = ")) continue;
    kept.push_back(line);
  }
  std::string text = absl::StrJoin(kept, "\n");
  while (!text.empty() && (text.back() == '\n' || text.back() == '\0')) {
    text.pop_back();
  }
  return text;
}

// InvalidArgument unless every #include of `text` names a header of the unit.
// NVRTC would open an absolute path, and the file's bytes would be in no key.
absl::Status CheckIncludes(const SourceUnit& unit, absl::string_view name,
                           absl::string_view text) {
  int number = 0;
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    ++number;
    line = absl::StripLeadingAsciiWhitespace(line);
    if (!absl::ConsumePrefix(&line, "#")) continue;
    line = absl::StripLeadingAsciiWhitespace(line);
    if (!absl::ConsumePrefix(&line, "include")) continue;
    line = absl::StripAsciiWhitespace(line);
    const size_t end = line.find_first_of("\">", 1);
    const bool quoted =
        end != absl::string_view::npos && (line[0] == '"' || line[0] == '<');
    const absl::string_view wanted = quoted ? line.substr(1, end - 1) : line;
    if (quoted &&
        std::any_of(unit.headers.begin(), unit.headers.end(),
                    [&](const auto& one) { return one.first == wanted; })) {
      continue;
    }
    return absl::InvalidArgumentError(absl::StrCat(
        name, "(", number, "): includes ", wanted,
        ", which is no header of the unit; it has ", unit.headers.size()));
  }
  return absl::OkStatus();
}

absl::Status CheckIncludes(const SourceUnit& unit) {
  RETURN_IF_ERROR(CheckIncludes(unit, unit.name, unit.text));
  for (const auto& [name, text] : unit.headers) {
    RETURN_IF_ERROR(CheckIncludes(unit, name, text));
  }
  return absl::OkStatus();
}

class NvrtcCompiler : public WorkerCompiler {
 public:
  NvrtcCompiler(const NvrtcTable& table, WorkerHello hello)
      : nvrtc_(table), hello_(std::move(hello)) {}

  WorkerHello Hello() const override { return hello_; }

  WorkerResult Compile(const WorkerJob& job) override {
    WorkerResult result;
    if (job.target.backend != Backend::kCuda) {
      result.status = absl::InvalidArgumentError(absl::StrCat(
          "NVRTC does not generate code for ", job.target.ToString()));
      return result;
    }
    result.status = CheckIncludes(job.unit);
    if (!result.status.ok()) return result;
    std::vector<const char*> names, texts;
    for (const auto& [name, text] : job.unit.headers) {
      names.push_back(name.c_str());
      texts.push_back(text.c_str());
    }
    NvrtcProgram program = nullptr;
    result.status =
        Check(nvrtc_.create_program(
                  &program, job.unit.text.c_str(), job.unit.name.c_str(),
                  static_cast<int>(names.size()), texts.data(), names.data()),
              "nvrtcCreateProgram");
    if (!result.status.ok()) return result;
    CompileProgram(program, job, &result);
    nvrtc_.destroy_program(&program);
    return result;
  }

 private:
  absl::Status Check(NvrtcResult code, absl::string_view call) const {
    if (code == kNvrtcSuccess) return absl::OkStatus();
    return absl::InternalError(
        absl::StrCat(call, " failed: ", nvrtc_.get_error_string(code)));
  }

  void CompileProgram(NvrtcProgram program, const WorkerJob& job,
                      WorkerResult* result) const {
    std::vector<std::string> options = NvrtcFixedOptions();
    if (absl::StartsWith(hello_.version, "12.")) {
      std::erase(options, kSymbolSeed);  // unknown there
    }
    options.push_back(
        absl::StrCat("--gpu-architecture=", job.target.ToString()));
    options.insert(options.end(), job.unit.options.begin(),
                   job.unit.options.end());
    std::vector<const char*> arguments;
    for (const std::string& option : options) {
      arguments.push_back(option.c_str());
    }
    const NvrtcResult code = nvrtc_.compile_program(
        program, static_cast<int>(arguments.size()), arguments.data());
    result->log = StableLog(ReadLog(program));
    if (code == kNvrtcErrorCompilation) {
      // The first line of the log carries file, line and reason.
      result->status = absl::InvalidArgumentError(absl::StrCat(
          job.unit.name, " does not compile for ", job.target.ToString(), ": ",
          std::vector<std::string>(absl::StrSplit(result->log, '\n'))[0]));
      return;
    }
    result->status = Check(code, "nvrtcCompileProgram");
    if (!result->status.ok()) return;
    size_t bytes = 0;
    result->status =
        Check(nvrtc_.get_cubin_size(program, &bytes), "nvrtcGetCUBINSize");
    if (!result->status.ok()) return;
    result->binary.resize(bytes);
    result->status = Check(nvrtc_.get_cubin(program, result->binary.data()),
                           "nvrtcGetCUBIN");
    if (result->status.ok() && bytes == 0) {
      result->status = absl::InternalError("nvrtcGetCUBIN gave an empty cubin");
    }
    if (!result->status.ok()) result->binary.clear();
  }

  std::string ReadLog(NvrtcProgram program) const {
    size_t bytes = 0;
    if (nvrtc_.get_log_size(program, &bytes) != kNvrtcSuccess) return "";
    std::string log(bytes, '\0');
    if (nvrtc_.get_log(program, log.data()) != kNvrtcSuccess) return "";
    return log;
  }

  const NvrtcTable nvrtc_;
  const WorkerHello hello_;
};

}  // namespace

absl::StatusOr<std::vector<FileIdentity>> NvrtcComponents(
    const std::string& library) {
  ASSIGN_OR_RETURN(FileIdentity main, IdentifyFile(library));
  const std::string folder = FolderOf(main.path);
  std::vector<FileIdentity> builtins;
  DIR* entries = opendir(folder.c_str());
  if (entries == nullptr) return ErrnoStatus(errno, "cannot list", folder);
  while (const dirent* entry = readdir(entries)) {
    absl::string_view version = entry->d_name;
    double number = 0;
    if (!absl::ConsumePrefix(&version, kBuiltinsPrefix) ||
        !absl::SimpleAtod(version.substr(0, version.find('.')), &number)) {
      continue;
    }
    absl::StatusOr<FileIdentity> file =
        IdentifyFile(absl::StrCat(folder, "/", entry->d_name));
    if (file.ok()) builtins.push_back(*std::move(file));
  }
  closedir(entries);
  const auto by_path = [](const FileIdentity& a, const FileIdentity& b) {
    return a.path < b.path;
  };
  std::sort(builtins.begin(), builtins.end(), by_path);
  builtins.erase(std::unique(builtins.begin(), builtins.end()), builtins.end());
  if (builtins.empty()) {
    return absl::NotFoundError(
        absl::StrCat(kBuiltinsPrefix, "* is not beside ", main.path,
                     "; NVRTC needs both from one installation"));
  }
  std::vector<FileIdentity> components = {std::move(main)};
  components.insert(components.end(), builtins.begin(), builtins.end());
  return components;
}

absl::StatusOr<std::unique_ptr<WorkerCompiler>> OpenNvrtc(
    const std::string& library) {
  WorkerHello hello;
  hello.compiler = "nvrtc";
  ASSIGN_OR_RETURN(hello.components, NvrtcComponents(library));
  const std::string& path = hello.components[0].path;
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("cannot load ", path, ": ", dlerror()));
  }
  NvrtcTable table;
  RETURN_IF_ERROR(ResolveAll(handle, &table));
  int major = 0;
  int minor = 0;
  if (table.version(&major, &minor) != kNvrtcSuccess) {
    return absl::FailedPreconditionError(
        absl::StrCat(path, " does not tell its version"));
  }
  hello.version = absl::StrCat(major, ".", minor);
  // NVRTC opens its builtins by name on first use. Loaded here by path, they
  // are the ones that the toolchain digest covers.
  const std::string builtins =
      absl::StrCat(FolderOf(path), "/", kBuiltinsPrefix, hello.version);
  if (dlopen(builtins.c_str(), RTLD_NOW | RTLD_LOCAL) == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("cannot load ", builtins, ": ", dlerror()));
  }
  return std::make_unique<NvrtcCompiler>(table, std::move(hello));
}

std::vector<std::string> NvrtcFixedOptions() {
  return {
      "--std=c++20",
      // Kernels write every fused multiply-add that they mean.
      "--fmad=false",
      // Headers come from memory only.
      "--no-source-include",
      // Registers, spills and stack of each kernel go to the log.
      "--ptxas-options=-v",
      kSymbolSeed,
  };
}

}  // namespace kiln
