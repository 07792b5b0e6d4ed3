#include "compiler/toolchain_probe.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/time/time.h"
#include "compiler/base/digest.h"
#include "compiler/base/file_util.h"
#include "compiler/base/status_macros.h"
#include "compiler/nvrtc_library.h"
#include "compiler/nvrtc_worker.h"

namespace kiln {
namespace {

constexpr absl::string_view kMemoDomain = "kiln.probe/1";
constexpr absl::string_view kContentDomain = "kiln.toolchain/1";
constexpr absl::string_view kNvrtcSonames[] = {"libnvrtc.so.13",
                                               "libnvrtc.so.12"};
// Largest library that is read.
constexpr uint64_t kComponentBytesMax = uint64_t{4} << 30;

// A file's bytes, mapped read-only while this lives.
class MappedFile {
 public:
  static absl::StatusOr<MappedFile> Open(const FileIdentity& file) {
    if (file.bytes == 0 || file.bytes > kComponentBytesMax) {
      return absl::FailedPreconditionError(
          absl::StrCat(file.path, " has ", file.bytes, " bytes, expected 1 to ",
                       kComponentBytesMax));
    }
    const int fd = open(file.path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) return ErrnoStatus(errno, "cannot open", file.path);
    void* data =
        mmap(nullptr, file.bytes, PROT_READ, MAP_PRIVATE | MAP_POPULATE, fd, 0);
    const int code = errno;
    close(fd);
    if (data == MAP_FAILED) return ErrnoStatus(code, "cannot map", file.path);
    return MappedFile(data, file.bytes);
  }

  MappedFile(MappedFile&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(other.bytes_) {}

  MappedFile& operator=(MappedFile&&) = delete;

  ~MappedFile() {
    if (data_ != nullptr) munmap(data_, bytes_);
  }

  absl::string_view contents() const {
    return absl::string_view(static_cast<const char*>(data_), bytes_);
  }

 private:
  MappedFile(void* data, size_t bytes) : data_(data), bytes_(bytes) {}

  void* data_;
  size_t bytes_;
};

// `options`: what Kiln itself always adds to the compiler's command line.
absl::StatusOr<Digest> HashContent(const std::vector<FileIdentity>& components,
                                   absl::string_view options) {
  CanonicalEncoder encoder(kContentDomain);
  encoder.Text("options", options);
  for (const FileIdentity& component : components) {
    ASSIGN_OR_RETURN(const MappedFile file, MappedFile::Open(component));
    encoder.Hash("file", Sha256(file.contents()));
  }
  return encoder.digest();
}

// "13.0.88" from the release text that every CUDA compiler carries, "Cuda
// compilation tools, release 13.0, V13.0.88"; empty when there is none.
std::string ReleaseVersion(absl::string_view library) {
  constexpr absl::string_view kMark = "Cuda compilation tools, release ";
  const size_t at = library.find(kMark);
  if (at == absl::string_view::npos) return "";
  absl::string_view text = library.substr(at, 128);
  text = text.substr(0, text.find('\0'));
  const size_t v = text.rfind(", V");
  if (v == absl::string_view::npos) return "";
  text.remove_prefix(v + 3);
  for (const char c : text) {
    if ((c < '0' || c > '9') && c != '.') return "";
  }
  return std::string(text);
}

std::string MemoKey(absl::string_view compiler, absl::string_view options,
                    const FileIdentity& file) {
  CanonicalEncoder encoder(kMemoDomain);
  encoder.Text("compiler", compiler)
      .Text("options", options)
      .Text("path", file.path)
      .Number("bytes", static_cast<int64_t>(file.bytes))
      .Number("mtime_ns", file.mtime_ns)
      .Number("inode", static_cast<int64_t>(file.inode));
  return encoder.bytes();
}

std::string MemoValue(const CompilerSetup& setup) {
  CanonicalEncoder encoder(kMemoDomain);
  encoder.Text("name", setup.toolchain.name)
      .Text("version", setup.toolchain.version)
      .Hash("content", setup.toolchain.content);
  for (const FileIdentity& file : setup.components) {
    encoder.Text("path", file.path)
        .Number("bytes", static_cast<int64_t>(file.bytes))
        .Number("mtime_ns", file.mtime_ns)
        .Number("inode", static_cast<int64_t>(file.inode));
  }
  return encoder.bytes();
}

// Fills toolchain and components from a memo value. False when it is damaged or
// any component is no longer the file it was.
bool FromMemo(absl::string_view value, CompilerSetup* setup) {
  const absl::StatusOr<CanonicalRecord> record = DecodeCanonical(value);
  if (!record.ok() || record->domain != kMemoDomain) return false;
  const std::vector<CanonicalField>& fields = record->fields;
  if (fields.size() < 7 || fields.size() % 4 != 3) return false;
  const absl::StatusOr<Digest> content = Digest::FromHex(fields[2].value);
  if (!content.ok()) return false;
  std::vector<FileIdentity> components;
  for (size_t i = 3; i < fields.size(); i += 4) {
    absl::StatusOr<FileIdentity> now = IdentifyFile(fields[i].value);
    if (!now.ok() || now->path != fields[i].value ||
        fields[i + 1].value != absl::StrCat(static_cast<int64_t>(now->bytes)) ||
        fields[i + 2].value != absl::StrCat(now->mtime_ns) ||
        fields[i + 3].value != absl::StrCat(static_cast<int64_t>(now->inode))) {
      return false;
    }
    components.push_back(*std::move(now));
  }
  setup->toolchain = {
      .name = fields[0].value, .version = fields[1].value, .content = *content};
  setup->components = std::move(components);
  return true;
}

bool Recall(ProbeMemo* memo, absl::string_view key, CompilerSetup* setup) {
  if (memo == nullptr) return false;
  const std::optional<std::string> value = memo->Lookup(key);
  return value.has_value() && FromMemo(*value, setup);
}

// /usr/local/cuda-13.0/lib64 before /usr/local/cuda-12.9/lib64.
std::vector<std::string> VersionedCudaFolders() {
  std::vector<std::pair<std::vector<int>, std::string>> found;
  if (DIR* entries = opendir("/usr/local")) {
    while (const dirent* entry = readdir(entries)) {
      absl::string_view version = entry->d_name;
      if (!absl::ConsumePrefix(&version, "cuda-")) continue;
      std::vector<int> numbers;
      for (const absl::string_view part : absl::StrSplit(version, '.')) {
        int number = 0;
        if (!absl::SimpleAtoi(part, &number)) break;
        numbers.push_back(number);
      }
      found.emplace_back(numbers,
                         absl::StrCat("/usr/local/", entry->d_name, "/lib64"));
    }
    closedir(entries);
  }
  std::sort(found.rbegin(), found.rend());
  std::vector<std::string> folders;
  for (auto& [numbers, folder] : found) folders.push_back(std::move(folder));
  return folders;
}

}  // namespace

absl::StatusOr<std::string> FindNvrtc(const NvrtcProbeOptions& options) {
  if (!options.library.empty()) return options.library;
  std::vector<std::string> folders = options.folders;
  folders.push_back("/usr/local/cuda/lib64");
  for (std::string& folder : VersionedCudaFolders()) {
    folders.push_back(std::move(folder));
  }
  for (const char* folder :
       {"/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib"}) {
    folders.push_back(folder);
  }
  for (const std::string& folder : folders) {
    for (const absl::string_view soname : kNvrtcSonames) {
      std::string path = absl::StrCat(folder, "/", soname);
      if (access(path.c_str(), R_OK) == 0) return path;
    }
  }
  return absl::NotFoundError(absl::StrCat(
      "libnvrtc.so.13 and libnvrtc.so.12 are in none of ",
      absl::StrJoin(folders, ", "), "; name the library with --nvrtc PATH"));
}

absl::StatusOr<CompilerSetup> ProbeNvrtc(const NvrtcProbeOptions& options,
                                         ProbeMemo* memo) {
  ASSIGN_OR_RETURN(const std::string library, FindNvrtc(options));
  CompilerSetup setup;
  setup.backend = Backend::kCuda;
  // All components at once: an exchanged builtins library is another toolchain.
  ASSIGN_OR_RETURN(setup.components, NvrtcComponents(library));
  const FileIdentity main = setup.components[0];
  setup.command = {.executable = options.worker,
                   .arguments = {kNvrtcWorkerVerb, "--nvrtc", main.path}};
  const std::string fixed_options = absl::StrJoin(NvrtcFixedOptions(), " ");
  const std::string key = MemoKey("nvrtc", fixed_options, main);
  CompilerSetup known = setup;
  if (Recall(memo, key, &known) && known.components == setup.components) {
    return known;
  }
  setup.toolchain.name = "nvrtc";
  ASSIGN_OR_RETURN(setup.toolchain.content,
                   HashContent(setup.components, fixed_options));
  ASSIGN_OR_RETURN(const MappedFile file, MappedFile::Open(main));
  setup.toolchain.version = ReleaseVersion(file.contents());
  if (setup.toolchain.version.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat(main.path, " carries no CUDA release text"));
  }
  if (memo != nullptr) memo->Store(key, MemoValue(setup));
  return setup;
}

absl::StatusOr<CompilerSetup> ProbeCcCpu(const std::string& executable,
                                         ProbeMemo* memo) {
  CompilerSetup setup;
  setup.backend = Backend::kCpu;
  ASSIGN_OR_RETURN(const FileIdentity self, IdentifyFile(executable));
  setup.command = {.executable = self.path, .arguments = {}};
  // Its options are part of the executable.
  const std::string key = MemoKey("clang", "", self);
  if (Recall(memo, key, &setup)) return setup;

  ASSIGN_OR_RETURN(const std::unique_ptr<WorkerProcess> worker,
                   WorkerProcess::Start(setup.command));
  ASSIGN_OR_RETURN(WorkerHello hello,
                   AwaitHello(worker.get(), absl::Seconds(60)));
  setup.toolchain.name = hello.compiler;
  setup.toolchain.version = hello.version;
  setup.components = std::move(hello.components);
  ASSIGN_OR_RETURN(setup.toolchain.content, HashContent(setup.components, ""));
  if (memo != nullptr) memo->Store(key, MemoValue(setup));
  return setup;
}

std::string DefaultCcCpuPath() {
  char path[PATH_MAX];
  const ssize_t bytes = readlink("/proc/self/exe", path, sizeof(path));
  if (bytes <= 0) return "kiln-cc-cpu";
  const std::string self(path, static_cast<size_t>(bytes));
  return absl::StrCat(self.substr(0, self.rfind('/')), "/kiln-cc-cpu");
}

}  // namespace kiln
