// The only file that sees Clang, LLVM and LLD headers.

#include "compiler/cc_cpu_codegen.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstddef>
#include <memory>

#include "clang/Basic/Diagnostic.h"
#include "clang/Basic/DiagnosticOptions.h"
#include "clang/Basic/FileManager.h"
#include "clang/CodeGen/CodeGenAction.h"
#include "clang/Frontend/CompilerInstance.h"
#include "clang/Frontend/CompilerInvocation.h"
#include "clang/Frontend/TextDiagnosticPrinter.h"
#include "lld/Common/Driver.h"
#include "llvm/ADT/SmallString.h"
#include "llvm/Config/llvm-config.h"
#include "llvm/IR/LLVMContext.h"
#include "llvm/Support/MemoryBuffer.h"
#include "llvm/Support/TargetSelect.h"
#include "llvm/Support/VirtualFileSystem.h"
#include "llvm/Support/raw_ostream.h"

LLD_HAS_DRIVER(elf)

namespace kiln {
namespace {

// What a compiler calls by itself, also in freestanding code: the four memory
// functions, and fmaf where the target (x86-64-v2) has no such instruction.
// Linked only where a unit needs them.
//
// fmaf: the product of two floats is exact in double; rounding its sum with c
// to odd keeps enough to round once more, correctly, to float (Boldo and
// Melquiond, "Emulation of a FMA and correctly rounded sums", IEEE TC 2008).
constexpr char kSupportName[] = "kiln/compiler_support.c";
constexpr char kSupport[] = R"(
typedef unsigned long size_t;
// A unit's own definition goes first.
#define WEAK __attribute__((weak))
WEAK void *memcpy(void *restrict to, const void *restrict from, size_t n) {
  unsigned char *t = to;
  const unsigned char *f = from;
  for (size_t i = 0; i < n; ++i) t[i] = f[i];
  return to;
}
WEAK void *memmove(void *to, const void *from, size_t n) {
  unsigned char *t = to;
  const unsigned char *f = from;
  if (t < f) {
    for (size_t i = 0; i < n; ++i) t[i] = f[i];
  } else {
    for (size_t i = n; i > 0; --i) t[i - 1] = f[i - 1];
  }
  return to;
}
WEAK void *memset(void *to, int value, size_t n) {
  unsigned char *t = to;
  for (size_t i = 0; i < n; ++i) t[i] = (unsigned char)value;
  return to;
}
WEAK int memcmp(const void *a, const void *b, size_t n) {
  const unsigned char *x = a;
  const unsigned char *y = b;
  for (size_t i = 0; i < n; ++i) {
    if (x[i] != y[i]) return x[i] < y[i] ? -1 : 1;
  }
  return 0;
}
WEAK float fmaf(float a, float b, float c) {
  double product = (double)a * b;
  double sum = product + c;
  // Knuth's two-sum: what the addition lost.
  double part = sum - product;
  double lost = (product - (sum - part)) + (c - part);
  if (lost != 0 && lost - lost == 0) {
    long bits = __builtin_bit_cast(long, sum);
    // An even sum is moved to its odd neighbour on the side of the loss.
    if ((bits & 1) == 0) bits += (lost > 0) == (sum > 0) ? 1 : -1;
    sum = __builtin_bit_cast(double, bits);
  }
  return (float)sum;
}
)";

// An anonymous file of this process. LLD reads and writes files; these have no
// name in any folder and vanish with the process.
class MemoryFile {
 public:
  explicit MemoryFile(const char* label)
      : fd_(memfd_create(label, MFD_CLOEXEC)) {}

  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;

  ~MemoryFile() {
    if (fd_ >= 0) close(fd_);
  }

  int fd() const { return fd_; }

  std::string path() const { return "/proc/self/fd/" + std::to_string(fd_); }

  bool Write(llvm::StringRef bytes) {
    while (!bytes.empty()) {
      const ssize_t wrote = write(fd_, bytes.data(), bytes.size());
      if (wrote <= 0) return false;
      bytes = bytes.drop_front(static_cast<size_t>(wrote));
    }
    return fd_ >= 0;
  }

  bool Read(std::string* bytes) {
    struct stat info;
    if (fd_ < 0 || fstat(fd_, &info) != 0) return false;
    bytes->resize(static_cast<size_t>(info.st_size));
    size_t have = 0;
    while (have < bytes->size()) {
      const ssize_t got = pread(fd_, bytes->data() + have, bytes->size() - have,
                                static_cast<off_t>(have));
      if (got <= 0) return false;
      have += static_cast<size_t>(got);
    }
    return true;
  }

 private:
  int fd_;
};

// Standard output redirected into a file while it lives: LLD writes to memory
// when its output is "-", and then to standard output.
class StdoutRedirection {
 public:
  explicit StdoutRedirection(int fd) : saved_(dup(STDOUT_FILENO)) {
    llvm::outs().flush();
    ok_ = saved_ >= 0 && dup2(fd, STDOUT_FILENO) >= 0;
  }

  StdoutRedirection(const StdoutRedirection&) = delete;
  StdoutRedirection& operator=(const StdoutRedirection&) = delete;

  ~StdoutRedirection() {
    llvm::outs().flush();
    if (saved_ >= 0) {
      dup2(saved_, STDOUT_FILENO);
      close(saved_);
    }
  }

  bool ok() const { return ok_; }

 private:
  int saved_;
  bool ok_;
};

std::string FirstLine(const std::string& text) {
  return text.substr(0, text.find('\n'));
}

// The first diagnostic that is an error, else the first line.
std::string FirstError(const std::string& log) {
  size_t begin = 0;
  while (begin < log.size()) {
    const std::string line = FirstLine(log.substr(begin));
    if (line.find("error: ") != std::string::npos) return line;
    begin += line.size() + 1;
  }
  return FirstLine(log);
}

std::vector<std::string> FrontendArguments(int level) {
  std::vector<std::string> arguments = {
      "-triple",
      "x86_64-unknown-linux-gnu",
      "-emit-obj",
      "-disable-free",
      "-O3",
      "-vectorize-loops",
      "-vectorize-slp",
      "-target-cpu",
      "x86-64-v" + std::to_string(level),
      "-tune-cpu",
      "generic",
      // Position independent; all but the exports is local after the link.
      "-mrelocation-model",
      "pic",
      "-pic-level",
      "2",
      "-mframe-pointer=none",
      "-mconstructor-aliases",
      "-ffreestanding",
      "-fno-rtti",
      "-fno-threadsafe-statics",
      "-ffunction-sections",
      "-fdata-sections",
      "-ffp-contract=off",
      // Nothing is read from any folder.
      "-nostdsysteminc",
      "-nobuiltininc",
      "-fgnuc-version=4.2.1",
      "-ferror-limit",
      "20",
  };
  if (level >= 4) arguments.push_back("-mprefer-vector-width=512");
  return arguments;
}

// Compiles one text to an object file in memory. False on any error; the
// diagnostics are appended to `log`.
bool CompileObject(const CpuCodegenInput& input,
                   const std::vector<std::string>& language,
                   llvm::SmallString<0>* object, std::string* log) {
  llvm::IntrusiveRefCntPtr<llvm::vfs::InMemoryFileSystem> files(
      new llvm::vfs::InMemoryFileSystem);
  files->setCurrentWorkingDirectory("/");
  files->addFile("/" + input.name, 0,
                 llvm::MemoryBuffer::getMemBufferCopy(input.text, input.name));
  // Headers live below one virtual include folder, found by their names.
  for (const auto& [name, text] : input.headers) {
    files->addFile("/kiln-include/" + name, 0,
                   llvm::MemoryBuffer::getMemBufferCopy(text, name));
  }

  std::vector<std::string> arguments = FrontendArguments(input.level);
  arguments.insert(arguments.end(), language.begin(), language.end());
  arguments.insert(arguments.end(), {"-I", "/kiln-include"});
  arguments.insert(arguments.end(), input.options.begin(), input.options.end());
  // A relative name: it is what diagnostics and __FILE__ show.
  arguments.push_back(input.name);
  std::vector<const char*> raw;
  for (const std::string& argument : arguments) raw.push_back(argument.c_str());

  llvm::raw_string_ostream diagnostics(*log);
  llvm::IntrusiveRefCntPtr<clang::DiagnosticOptions> options(
      new clang::DiagnosticOptions);
  options->ShowColors = 0;
  options->ShowPresumedLoc = 1;  // honour #line
  auto printer =
      std::make_unique<clang::TextDiagnosticPrinter>(diagnostics, &*options);
  llvm::IntrusiveRefCntPtr<clang::DiagnosticsEngine> engine(
      new clang::DiagnosticsEngine(new clang::DiagnosticIDs, options,
                                   printer.get(), /*ShouldOwnClient=*/false));

  clang::CompilerInstance compiler;
  const bool parsed = clang::CompilerInvocation::CreateFromArgs(
      compiler.getInvocation(), raw, *engine);
  if (!parsed) return false;
  compiler.getFrontendOpts().ProgramAction = clang::frontend::EmitObj;
  compiler.createDiagnostics(printer.get(), /*ShouldOwnClient=*/false);
  compiler.createFileManager(files);
  compiler.setOutputStream(
      std::make_unique<llvm::raw_svector_ostream>(*object));

  llvm::LLVMContext context;
  clang::EmitObjAction action(&context);
  const bool ok = compiler.ExecuteAction(action);
  diagnostics.flush();
  return ok && !compiler.getDiagnostics().hasErrorOccurred();
}

// Exports exactly `symbols`; naming one that does not exist is a link error.
std::string VersionScript(const std::vector<std::string>& symbols) {
  std::string script = "{ global:";
  for (const std::string& symbol : symbols) script += " " + symbol + ";";
  return script + " local: *; };\n";
}

void Link(const CpuCodegenInput& input, llvm::StringRef object,
          llvm::StringRef support_object, CpuCodegenOutput* output) {
  MemoryFile program("program"), support("support"), script("exports"),
      linked("linked");
  if (!program.Write(object) || !support.Write(support_object) ||
      !script.Write(VersionScript(input.exports))) {
    output->error = "cannot write the linker's input to memory";
    return;
  }
  const std::string program_path = program.path();
  const std::string support_path = support.path();
  const std::string script_argument = "--version-script=" + script.path();
  const std::vector<const char*> arguments = {
      "ld.lld",
      "-shared",
      "-nostdlib",
      "--no-dependent-libraries",
      "-z",
      "defs",
      "-z",
      "noexecstack",
      "-z",
      "relro",
      "-z",
      "now",
      "-z",
      "text",
      "-z",
      "separate-code",
      "--no-undefined-version",
      "--build-id=none",
      "--hash-style=gnu",
      "--gc-sections",
      "--strip-all",
      "--threads=1",
      "--color-diagnostics=never",
      script_argument.c_str(),
      program_path.c_str(),
      // Taken only when the unit leaves something undefined.
      "--start-lib",
      support_path.c_str(),
      "--end-lib",
      "-o",
      "-",
  };
  std::string messages;
  llvm::raw_string_ostream stream(messages);
  lld::Result result{};
  {
    const StdoutRedirection redirection(linked.fd());
    if (!redirection.ok()) {
      output->error = "cannot redirect the linker's output";
      return;
    }
    result =
        lld::lldMain(arguments, stream, stream, {{lld::Gnu, &lld::elf::link}});
  }
  stream.flush();
  output->reusable = result.canRunAgain;
  // Paths of anonymous files mean nothing to a reader, and their numbers vary.
  for (const auto& [path, name] :
       {std::pair(program_path, input.name),
        std::pair(support_path, std::string(kSupportName)),
        std::pair(script.path(), std::string("exported symbols"))}) {
    for (size_t at = messages.find(path); at != std::string::npos;
         at = messages.find(path, at + name.size())) {
      messages.replace(at, path.size(), name);
    }
  }
  output->log += messages;
  if (result.retCode != 0) {
    output->error = FirstError(messages);
    if (output->error.empty()) output->error = "the linker failed silently";
    return;
  }
  if (!linked.Read(&output->binary) || output->binary.empty()) {
    output->binary.clear();
    output->error = "cannot read the linker's output";
  }
}

}  // namespace

void InitializeCpuCodegen() {
  llvm::InitializeNativeTarget();
  llvm::InitializeNativeTargetAsmPrinter();
  llvm::InitializeNativeTargetAsmParser();
}

std::string CpuCompilerVersion() { return LLVM_VERSION_STRING; }

CpuCodegenOutput CompileForCpu(const CpuCodegenInput& input) {
  CpuCodegenOutput output;
  llvm::SmallString<0> object;
  if (!CompileObject(input, {"-x", "c++", "-std=c++20"}, &object,
                     &output.log)) {
    output.error = FirstError(output.log);
    if (output.error.empty()) output.error = "the compiler failed silently";
    return output;
  }
  CpuCodegenInput support;
  support.name = kSupportName;
  support.text = kSupport;
  support.level = input.level;
  llvm::SmallString<0> support_object;
  // Without -fno-builtin a copy loop inside memcpy would become a memcpy call.
  if (!CompileObject(support, {"-x", "c", "-std=c11", "-fno-builtin"},
                     &support_object, &output.log)) {
    output.error = FirstError(output.log);
    return output;
  }
  Link(input, object, support_object, &output);
  return output;
}

}  // namespace kiln
