// Importer of the public sidecar schema that NPK-1 descends from: one file of a
// layer and a rank becomes an NPK-1 sidecar. Streams are the same; the rows of
// the FC1 scales stand up before gate there, gate before up here.
//
// Source: prepared-weights specification, section A.7; the metadata's keys and
// values are those of the schema's public validator
// (brandonmmusic-max/glm53-hadamard-shapleymcg-kld, coupled P8 contract).

#ifndef KILN_TEMPLATES_FORMATS_NPK_IMPORT_H_
#define KILN_TEMPLATES_FORMATS_NPK_IMPORT_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "compiler/base/digest.h"
#include "templates/formats/npk.h"

namespace kiln {

inline constexpr char kP8Schema[] = "glm53-p8-coupled-h512-h128-tp4-rank.v1";

// Ranks of the schema.
inline constexpr int64_t kP8Ranks = 4;

// "p8-layer-003-tp4-rank-0.safetensors".
std::string P8FileName(int64_t layer, int64_t rank);

// SHA-256 of the transform that such a file must name.
Digest P8TransformDigest();

struct NpkImport {
  std::string path;  // of the NPK-1 sidecar
  NpkMetadata metadata;
};

// Reads `path`, checks what the schema binds (words, geometry, digests of all
// tensors and of the signs), and writes `output`/NpkFileName(...), which obeys
// rules V1 to V13. Nothing is written unless all of it is right.
//   model_id: of the sidecar.
//   Errors: InvalidArgument with the key or the tensor, the value and what must
//   be; those of reading and writing files.
absl::StatusOr<NpkImport> ImportP8Sidecar(const std::string& path,
                                          const std::string& model_id,
                                          const std::string& output);

}  // namespace kiln

#endif  // KILN_TEMPLATES_FORMATS_NPK_IMPORT_H_
