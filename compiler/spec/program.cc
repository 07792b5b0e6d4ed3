#include "compiler/spec/program.h"

#include "absl/strings/str_cat.h"

namespace kiln {

ProgramKey MakeProgramKey(const SourceUnit& unit, const Target& target,
                          const Toolchain& toolchain) {
  CanonicalEncoder encoder("kiln.build/1");
  encoder.Text("target", target.ToString())
      .Text("compute_dtype", unit.compute_dtype)
      .Begin("compiler")
      .Text("name", toolchain.name)
      .Text("version", toolchain.version)
      .Hash("content", toolchain.content)
      .End()
      .Begin("template")
      .Text("source", unit.name)
      .Number("version", unit.template_version)
      .End();
  encoder.Begin("options");
  for (const std::string& option : unit.options) {
    encoder.Text("option", option);
  }
  encoder.End().Begin("entries");
  for (const std::string& entry : unit.entries) encoder.Text("entry", entry);
  encoder.End().Begin("sources");
  // Bytes enter as digests: a pre-image stays small, and a differing header is
  // named by the path of its field.
  encoder.Hash(unit.name, Sha256(unit.text));
  for (const auto& [name, text] : unit.headers) {
    encoder.Hash(name, Sha256(text));
  }
  encoder.End();
  ProgramKey key;
  key.preimage = encoder.bytes();
  key.digest = Sha256(key.preimage);
  return key;
}

const Kernel* Program::FindKernel(absl::string_view entry) const {
  for (const Kernel& kernel : kernels) {
    if (kernel.entry == entry) return &kernel;
  }
  return nullptr;
}

}  // namespace kiln
