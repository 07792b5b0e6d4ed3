// The explicit list of kernel templates. A new template is one line here; see
// templates/README.md.

#ifndef KILN_TEMPLATES_REGISTRY_H_
#define KILN_TEMPLATES_REGISTRY_H_

#include <string>
#include <utility>
#include <vector>

#include "compiler/base/digest.h"
#include "compiler/spec/kernel_template.h"

namespace kiln {

// All templates, in a fixed order. They live for the whole process.
const std::vector<const KernelTemplate*>& AllTemplates();

// Those for the geometry's op and format of weights on `backend`.
std::vector<const KernelTemplate*> TemplatesFor(const RequestGeometry& geometry,
                                                Backend backend);

// The template named `name`, or null.
const KernelTemplate* FindTemplate(absl::string_view name);

// Text of a file under templates/ as it was when Kiln was built, by its path
// relative to templates/, for example "fused_moe/cuda.cu". Aborts on an unknown
// name: names are compiled in.
const std::string& TemplateText(absl::string_view name);

// Every device header as (virtual name, text), sorted by name.
const std::vector<std::pair<std::string, std::string>>& DeviceHeaders();

// Device headers for a CUDA kernel, without those for CPU targets alone, and
// the named files under templates/.
std::vector<std::pair<std::string, std::string>> CudaHeaders(
    const std::vector<std::string>& files);

// Every device header with what CPU kernels share beyond them: the headers
// under cpu/.
const std::vector<std::pair<std::string, std::string>>& CpuHeaders();

// Digest over all device headers and the named files under templates/.
Digest TemplateSourcesDigest(const std::vector<std::string>& files);

}  // namespace kiln

#endif  // KILN_TEMPLATES_REGISTRY_H_
