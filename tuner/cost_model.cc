#include "tuner/cost_model.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "templates/op_contract.h"

namespace kiln {
namespace {

// More rows than a tile ever has: one tile per active expert.
constexpr uint32_t kWholeExpert = 1u << 30;

// Rows that a candidate multiplies a decoded weight with.
uint32_t RowsOf(const PlanBody& body, Backend backend) {
  const auto tile = body.assignment.find("tokens_tile");
  if (tile != body.assignment.end() && tile->second > 0) {
    return static_cast<uint32_t>(tile->second);
  }
  // The narrowest side of a matrix instruction; a processor has none.
  return backend == Backend::kCuda ? 8 : 1;
}

double Blocks(const Step& step, uint32_t m) {
  double blocks = 1;
  for (const LaunchDim& dim : step.grid) {
    blocks *= static_cast<double>(dim.Evaluate(m));
  }
  return blocks;
}

// How many of the op's matrices a step multiplies with.
double MatricesOf(const Step& step, const OpWork& op) {
  return static_cast<double>(std::count_if(
      op.matrices.begin(), op.matrices.end(), [&](const OpMatrix& matrix) {
        return std::find(step.args.begin(), step.args.end(),
                         Arg::Param(matrix.slot)) != step.args.end();
      }));
}

// Rounds of the device that the blocks take, relative to full ones.
double Waves(double blocks, double slots) {
  if (!(blocks >= 1)) return 1;
  return std::ceil(blocks / slots) * slots / blocks;
}

}  // namespace

double Prediction::Time() const {
  return std::max(floor.bytes_s, (floor.decode_s + floor.mma_s) * waves);
}

double ExpectedExperts(const RequestGeometry& geometry, uint32_t m) {
  return ContractOf(geometry).TilesExpected(geometry, kWholeExpert, m);
}

Prediction Predict(const Problem& problem, const PlanBody& body,
                   const Ceilings& ceilings) {
  const RequestGeometry& geometry = problem.geometry;
  const Backend backend = problem.device.target.backend;
  const uint32_t m = problem.interval.m_max;
  const uint32_t rows = RowsOf(body, backend);
  const double experts = ExpectedExperts(geometry, m);
  const OpContract& contract = ContractOf(geometry);
  const OpWork op = contract.Work(geometry);
  const double tiles = contract.TilesExpected(geometry, rows, m);
  Work work = WorkOf(geometry, m, experts, ceilings,
                     IsSummedByMma(body.numerics_class));
  // What a tile does, it does for itself.
  if (experts > 0) work.decode_seconds *= tiles / experts;
  work.flops = 0;
  for (const OpMatrix& matrix : op.matrices) {
    work.flops += 2 * matrix.weights * tiles * rows;
  }
  Prediction prediction;
  prediction.floor = FloorOf(work, ceilings);
  double slots = std::max(1, problem.device.multiprocessors);
  double threads = 1;  // share of the processors that take part
  if (backend == Backend::kCpu && body.cpu_threads > 0) {
    threads = slots / body.cpu_threads;
    slots = body.cpu_threads;
  }
  // Launches are sized for the most tiles that m tokens can make; those that
  // stay empty end at once.
  const auto possible =
      static_cast<double>(contract.TilesMax(geometry, rows, m));
  const double filled = std::min(1.0, tiles / std::max(1.0, possible));
  double weighted = 0;
  double weight = 0;
  for (const Step& step : body.steps) {
    const double share = MatricesOf(step, op);
    if (share == 0) continue;
    weighted += share * Waves(Blocks(step, m) * filled, slots);
    weight += share;
  }
  if (weight > 0) prediction.waves = weighted / weight;
  prediction.waves = std::max(1.0, prediction.waves * threads);
  return prediction;
}

std::string PruneReason(const Prediction& prediction, double best) {
  return absl::StrFormat("%s%s takes %.2f x the best prediction, beyond %.2f x",
                         kPrunedPrefix, prediction.Bound(),
                         prediction.Time() / best, kPruneFactor);
}

}  // namespace kiln
