// One-term draws of layers that multiply x by suh and rotate it by H128: after
// that, one channel of each token is not zero.

#ifndef KILN_TEMPLATES_FUSED_MOE_ONE_TERM_H_
#define KILN_TEMPLATES_FUSED_MOE_ONE_TERM_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "compiler/spec/request.h"

namespace kiln {

// Gives the first Hadamard block of each row of both tables, binary16 [..][H],
// the same values, 1 or -1.
void SetOneTermScales(size_t hidden, std::string* gate_suh,
                      std::string* up_suh);

// Channel of x of a token of one-term draws.
//   gate_suh: as SetOneTermScales left it. ids: of the token; one is active.
double OneTermValue(const RequestGeometry& geometry, absl::string_view gate_suh,
                    const std::vector<int64_t>& ids, uint32_t token,
                    int64_t channel);

}  // namespace kiln

#endif  // KILN_TEMPLATES_FUSED_MOE_ONE_TERM_H_
