#include "templates/linear/op.h"

#include "absl/strings/str_cat.h"
#include "compiler/base/check.h"

namespace kiln {
namespace {

// KILN_CODEBOOK of the device headers.
int CodebookNumber(Codebook codebook) {
  switch (codebook) {
    case Codebook::k3Inst:
      return 0;
    case Codebook::kMcg:
      return 1;
    case Codebook::kMul1:
      return 2;
  }
  KILN_UNREACHABLE();
}

}  // namespace

uint32_t LinearSlotOf(const RequestGeometry& geometry, LinearParam param) {
  KILN_CHECK(geometry.linear.bias || param != LinearParam::kBias);
  if (param == LinearParam::kOut && !geometry.linear.bias) {
    return static_cast<uint32_t>(LinearParam::kBias);
  }
  return static_cast<uint32_t>(param);
}

std::vector<ParamDecl> LinearParams(const RequestGeometry& geometry) {
  std::vector<ParamDecl> params = {
      {"x", std::string(DTypeName(geometry.io_dtype)), "[m, in_features]",
       false},
      {"w", "i16",
       absl::StrCat("[in_features/16, out_features/16, ",
                    16 * geometry.linear.bits, "]"),
       false},
      {"suh", "f16", "[in_features]", false},
      {"svh", "f16", "[out_features]", false}};
  if (geometry.linear.bias) {
    params.push_back({"bias", "f16", "[out_features]", false});
  }
  params.push_back({"out", "f32", "[m, out_features]", true});
  return params;
}

std::vector<uint64_t> LinearBytes(const RequestGeometry& geometry,
                                  uint32_t tokens) {
  const auto in = static_cast<uint64_t>(geometry.linear.in_features);
  const auto out = static_cast<uint64_t>(geometry.linear.out_features);
  const uint64_t m = tokens;
  std::vector<uint64_t> bytes = {
      m * in * DTypeBytes(geometry.io_dtype),
      // 256 weights of a tile take 32 bytes per bit.
      in * out / 8 * static_cast<uint64_t>(geometry.linear.bits), in * 2,
      out * 2};
  if (geometry.linear.bias) bytes.push_back(out * 2);
  bytes.push_back(m * out * 4);
  return bytes;
}

std::string LinearPrelude(const RequestGeometry& geometry) {
  std::string out;
  const auto define = [&out](absl::string_view name, int64_t value) {
    absl::StrAppend(&out, "#define KILN_", name, " ", value, "\n");
  };
  define("IN", geometry.linear.in_features);
  define("OUT", geometry.linear.out_features);
  define("CODEBOOK", CodebookNumber(geometry.weights.codebook));
  define("BITS", geometry.linear.bits);
  define("X_BF16", geometry.io_dtype == DType::kBf16 ? 1 : 0);
  define("BIAS", geometry.linear.bias ? 1 : 0);
  return out;
}

}  // namespace kiln
