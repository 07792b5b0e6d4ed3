#include "compiler/spec/program.h"

#include "absl/strings/str_cat.h"
#include "compiler/base/check.h"

namespace kiln {

Toolchain ToolchainOf(const SourceUnit& unit, const Toolchain& compiler) {
  if (unit.binary.empty()) return compiler;
  KILN_CHECK(unit.package.has_value());
  return {.name = "package",
          .version = unit.package->Short(),
          .content = *unit.package};
}

ProgramKey MakeProgramKey(const SourceUnit& unit, const Target& target,
                          const Toolchain& compiler) {
  const Toolchain toolchain = ToolchainOf(unit, compiler);
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
  // Only where they are set, so that other programs keep their keys.
  if (unit.package.has_value()) encoder.Hash("package", *unit.package);
  if (!unit.binary.empty()) encoder.Hash("binary", Sha256(unit.binary));
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
