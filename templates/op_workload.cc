#include "templates/op_workload.h"

#include <algorithm>

#include "compiler/base/check.h"

namespace kiln {

absl::string_view DrawKindName(DrawKind kind) {
  switch (kind) {
    case DrawKind::kUniform:
      return "uniform";
    case DrawKind::kRagged:
      return "ragged";
    case DrawKind::kZipf:
      return "zipf";
    case DrawKind::kHot:
      return "hot";
    case DrawKind::kExtreme:
      return "extreme";
    case DrawKind::kOneTerm:
      return "one-term";
  }
  KILN_UNREACHABLE();
}

std::vector<double> OpWorkload::Expected(DrawKind kind, uint32_t draw,
                                         std::span<const uint32_t> rows,
                                         int threads, ReferenceMode mode) {
  const auto key = [&](uint32_t row) {
    return RowKey{kind, draw, mode, FirstAlike(kind, row)};
  };
  std::vector<int64_t> missing;
  for (const uint32_t row : rows) {
    const int64_t first = key(row).row;
    if (expected_.count(key(row)) == 0 &&
        std::find(missing.begin(), missing.end(), first) == missing.end()) {
      missing.push_back(first);
    }
  }
  if (!missing.empty()) {
    const std::vector<double> result =
        Evaluate(kind, draw, missing, threads, mode);
    for (size_t i = 0; i < missing.size(); ++i) {
      const auto begin =
          result.begin() + static_cast<std::ptrdiff_t>(i * row_width_);
      expected_[key(static_cast<uint32_t>(missing[i]))] = std::vector<double>(
          begin, begin + static_cast<std::ptrdiff_t>(row_width_));
    }
  }
  std::vector<double> out;
  out.reserve(rows.size() * row_width_);
  for (const uint32_t row : rows) {
    const std::vector<double>& values = expected_.at(key(row));
    out.insert(out.end(), values.begin(), values.end());
  }
  return out;
}

}  // namespace kiln
