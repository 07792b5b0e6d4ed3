#include "templates/formats/npk_reference.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "compiler/base/check.h"
#include "device/half.h"
#include "templates/formats/npk_decode.h"
#include "templates/fused_moe/mx_reference.h"

namespace kiln {
namespace {

MxExpert ExpertAt(const NpkSidecar& sidecar, int64_t expert,
                  ReferenceMode mode) {
  const NpkMetadata& m = sidecar.metadata();
  MxExpert::Weights w;
  w.gate = DecodeNpkMatrix(sidecar, NpkMatrix::kGate, expert);
  w.up = DecodeNpkMatrix(sidecar, NpkMatrix::kUp, expert);
  w.down = DecodeNpkMatrix(sidecar, NpkMatrix::kDown, expert);
  if (m.boundary == NpkBoundary::kCoupled) {
    const auto e = static_cast<size_t>(expert);
    const size_t inner = 6 * static_cast<size_t>(m.intermediate);
    w.suh = NpkHalves(sidecar.tensor(NpkTensor::kGateUpSuh));
    w.svh = NpkHalves(sidecar.tensor(NpkTensor::kDownSvh));
    w.inner = NpkHalves(
        sidecar.tensor(NpkTensor::kInnerScales).subspan(e * inner, inner));
    w.signs = NpkSigns(m, sidecar.tensor(NpkTensor::kSignDraw)[e]);
  }
  return MxExpert(std::move(w), m.LimitValue(), mode);
}

int64_t ExpertOf(const NpkProblem& p, int64_t route) {
  int64_t id = p.topk_ids[route];
  if (p.expert_map != nullptr) {
    if (id < 0 || id >= p.expert_map_size) return -1;
    id = p.expert_map[id];
  }
  return id >= 0 && id < p.weights->metadata().experts ? id : -1;
}

}  // namespace

void NpkReferenceRows(const NpkProblem& problem, std::span<const int64_t> rows,
                      ReferenceMode mode, double* out) {
  const NpkMetadata& m = problem.weights->metadata();
  const auto hidden = static_cast<size_t>(m.hidden);
  const auto top_k = static_cast<size_t>(problem.top_k);
  for (const int64_t row : rows) {
    KILN_CHECK(row >= 0 && row < problem.tokens);
  }
  // Each expert is decoded once, its routes are kept until they are summed in
  // the router's order.
  std::vector<std::vector<double>> routes(rows.size() * top_k);
  for (int64_t e = 0; e < m.experts; ++e) {
    std::vector<size_t> own;
    for (size_t i = 0; i < routes.size(); ++i) {
      const int64_t route =
          rows[i / top_k] * problem.top_k + static_cast<int64_t>(i % top_k);
      if (ExpertOf(problem, route) == e) own.push_back(i);
    }
    if (own.empty()) continue;
    const MxExpert expert = ExpertAt(*problem.weights, e, mode);
    for (const size_t i : own) {
      const uint16_t* x =
          problem.x + static_cast<size_t>(rows[i / top_k]) * hidden;
      std::vector<double> a(hidden);
      for (size_t c = 0; c < hidden; ++c) {
        a[c] = MxInput(kd::bf16_to_f32(x[c]), mode);
      }
      routes[i] = expert.Run(std::move(a));
    }
  }
  for (size_t r = 0; r < rows.size(); ++r) {
    const std::span<double> sum(out + r * hidden, hidden);
    std::fill(sum.begin(), sum.end(), 0.0);
    for (size_t j = 0; j < top_k; ++j) {
      const std::vector<double>& route = routes[r * top_k + j];
      if (route.empty()) continue;
      MxAddRoute(problem.topk_weights[static_cast<size_t>(rows[r]) * top_k + j],
                 route, mode, sum);
    }
    // The identity boundary has nothing behind the routes.
    if (m.boundary == NpkBoundary::kCoupled) MxFinish(mode, sum);
  }
}

}  // namespace kiln
