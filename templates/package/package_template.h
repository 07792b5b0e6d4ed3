// A package as a KernelTemplate: its axes and launch plan for a problem, and
// its sources or binaries as units.

#ifndef KILN_TEMPLATES_PACKAGE_PACKAGE_TEMPLATE_H_
#define KILN_TEMPLATES_PACKAGE_PACKAGE_TEMPLATE_H_

#include <memory>

#include "compiler/spec/kernel_template.h"
#include "templates/package/package.h"

namespace kiln {

// The template owns the package. Its points race in the order in which their
// axes list the values, the last axis varying fastest.
std::shared_ptr<const KernelTemplate> MakePackageTemplate(Package package);

}  // namespace kiln

#endif  // KILN_TEMPLATES_PACKAGE_PACKAGE_TEMPLATE_H_
