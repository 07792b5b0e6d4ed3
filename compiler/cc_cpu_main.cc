// kiln-cc-cpu: the worker process that compiles C++ for the CPU. Kiln starts
// it; see worker_protocol.h.

#include <link.h>

#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "compiler/base/status_macros.h"
#include "compiler/cc_cpu_codegen.h"
#include "compiler/worker_loop.h"
#include "compiler/worker_protocol.h"

namespace kiln {
namespace {

class CpuCompiler : public WorkerCompiler {
 public:
  explicit CpuCompiler(WorkerHello hello) : hello_(std::move(hello)) {}

  WorkerHello Hello() const override { return hello_; }

  bool Reusable() const override { return reusable_; }

  WorkerResult Compile(const WorkerJob& job) override {
    WorkerResult result;
    if (job.target.backend != Backend::kCpu) {
      result.status = absl::InvalidArgumentError(absl::StrCat(
          "kiln-cc-cpu does not generate code for ", job.target.ToString()));
      return result;
    }
    CpuCodegenInput input;
    input.name = job.unit.name;
    input.text = job.unit.text;
    input.headers = job.unit.headers;
    input.options = job.unit.options;
    input.level = job.target.level;
    for (const std::string& entry : job.unit.entries) {
      input.exports.push_back(entry);
      input.exports.push_back(absl::StrCat(entry, "_args_bytes"));
    }
    CpuCodegenOutput output = CompileForCpu(input);
    reusable_ = output.reusable;
    result.log = std::move(output.log);
    result.binary = std::move(output.binary);
    if (!output.error.empty()) {
      result.binary.clear();
      result.status = absl::InvalidArgumentError(
          absl::StrCat(job.unit.name, " does not compile for ",
                       job.target.ToString(), ": ", output.error));
    }
    return result;
  }

 private:
  const WorkerHello hello_;
  bool reusable_ = true;
};

// Paths of this executable and of the Clang and LLVM libraries that the dynamic
// loader really mapped, in a fixed order.
absl::StatusOr<WorkerHello> MakeHello() {
  WorkerHello hello;
  hello.compiler = "clang";
  hello.version = CpuCompilerVersion();
  ASSIGN_OR_RETURN(FileIdentity self, IdentifyFile("/proc/self/exe"));
  hello.components.push_back(std::move(self));
  for (const char* stem : {"/libclang-cpp.so", "/libLLVM"}) {
    struct Search {
      const char* stem;
      std::string path;
    } search{stem, {}};

    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void* data) {
          auto* found = static_cast<Search*>(data);
          if (absl::StrContains(info->dlpi_name, found->stem)) {
            found->path = info->dlpi_name;
          }
          return 0;
        },
        &search);
    // Absent when the library is linked statically: then this executable has
    // it.
    if (search.path.empty()) continue;
    ASSIGN_OR_RETURN(FileIdentity library, IdentifyFile(search.path));
    hello.components.push_back(std::move(library));
  }
  return hello;
}

absl::StatusOr<std::unique_ptr<WorkerCompiler>> MakeCompiler() {
  ASSIGN_OR_RETURN(WorkerHello hello, MakeHello());
  InitializeCpuCodegen();
  return std::make_unique<CpuCompiler>(std::move(hello));
}

}  // namespace
}  // namespace kiln

int main() { return kiln::ServeCompiler(kiln::MakeCompiler); }
