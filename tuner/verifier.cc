#include "tuner/verifier.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "compiler/base/status_macros.h"

namespace kiln {
namespace {

constexpr uint32_t kRowsMax = 8;
// Contents of the arena before a first and a repeated run.
constexpr uint8_t kArenaFirst = 0xFF;
constexpr uint8_t kArenaRepeat = 0x00;

bool IsPoison(float value) {
  uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits == 0xFFFFFFFFu;
}

// Relative Frobenius error of one row. A row of zeros must be exactly zero.
double RowError(const float* got, const double* expected, size_t width) {
  double difference = 0;
  double norm = 0;
  for (size_t i = 0; i < width; ++i) {
    const double delta = static_cast<double>(got[i]) - expected[i];
    difference += delta * delta;
    norm += expected[i] * expected[i];
  }
  if (norm == 0) return difference == 0 ? 0 : INFINITY;
  return std::sqrt(difference / norm);
}

void Fail(const VerifyCase& test, absl::string_view what,
          VerifyResult* result) {
  if (!result->passed) return;
  result->passed = false;
  result->reason = absl::StrCat(test.ToString(), ": ", what);
}

absl::Status CheckZones(OpBench* bench, const VerifyCase& test,
                        VerifyResult* result) {
  for (const auto& [name, buffer] :
       {std::pair{"output", &bench->output()}, {"arena", &bench->arena()}}) {
    ASSIGN_OR_RETURN(const std::string damage, buffer->FindDamage());
    if (!damage.empty()) Fail(test, absl::StrCat(name, ": ", damage), result);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<float>> LaunchOnce(
    OpBench* bench, const LoadedPlan& plan, const VerifyCase& test,
    const std::vector<uint64_t>& params, uint8_t arena, double tolerance,
    int threads, VerifyResult* result) {
  RETURN_IF_ERROR(bench->output().Poison());
  RETURN_IF_ERROR(bench->arena().Poison(arena));
  RETURN_IF_ERROR(plan.Launch(test.m, params, bench->arena().data(),
                              bench->arena().bytes()));
  RETURN_IF_ERROR(bench->device()->Synchronize());
  ++result->launches;
  return CheckOutput(bench, test, tolerance, threads, result);
}

absl::Status RunCase(OpBench* bench, const LoadedPlan& plan,
                     const PlanBody& body, const VerifyCase& test, int threads,
                     VerifyResult* result) {
  ASSIGN_OR_RETURN(const size_t inputs,
                   bench->AddInputs(test.routing, test.draw, test.m));
  const std::vector<uint64_t> params = bench->Params(inputs);
  ASSIGN_OR_RETURN(const std::vector<float> first,
                   LaunchOnce(bench, plan, test, params, kArenaFirst,
                              body.tolerance, threads, result));
  ASSIGN_OR_RETURN(const std::string damage, bench->RestoreTokens());
  if (!damage.empty()) Fail(test, damage, result);
  if (!result->passed || !test.repeat || !body.deterministic) {
    return absl::OkStatus();
  }
  ASSIGN_OR_RETURN(const std::vector<float> second,
                   LaunchOnce(bench, plan, test, params, kArenaRepeat,
                              body.tolerance, threads, result));
  if (std::memcmp(first.data(), second.data(), first.size() * sizeof(float)) !=
      0) {
    Fail(test,
         "two runs on equal inputs differ, but the candidate claims to be "
         "deterministic",
         result);
  }
  return absl::OkStatus();
}

}  // namespace

std::string VerifyCase::ToString() const {
  return absl::StrCat("m=", m,
                      routing == Routing::kRagged ? " ragged" : " uniform",
                      " routes, draw ", draw);
}

std::vector<uint32_t> SampleRows(uint32_t m, uint32_t count) {
  std::set<uint32_t> rows;
  if (m <= count) {
    for (uint32_t row = 0; row < m; ++row) rows.insert(row);
    return {rows.begin(), rows.end()};
  }
  for (const uint32_t row : {0u, m - 1, 5u, 7u, m - m % 8 - 1, 16u}) {
    if (row < m && rows.size() < count) rows.insert(row);
  }
  for (uint32_t i = 1; rows.size() < count; ++i) {
    rows.insert(static_cast<uint32_t>(uint64_t{i} * 0x9E3779B1u % m));
  }
  return {rows.begin(), rows.end()};
}

std::vector<VerifyCase> VerifyCases(const Interval& interval) {
  // Edges, a ragged size inside, and one less than the capacity.
  const uint32_t low = interval.m_min;
  const uint32_t high = interval.m_max;
  std::set<uint32_t> sizes = {low, high};
  if (high - low >= 2) sizes.insert(low + (high - low) / 2);
  if (high - low >= 8) sizes.insert(high - 1);
  std::vector<VerifyCase> cases;
  uint32_t draw = 0;
  for (const uint32_t m : sizes) {
    VerifyCase test;
    test.m = m;
    test.draw = draw;
    test.routing = draw % 2 == 0 ? Routing::kUniform : Routing::kRagged;
    test.rows = SampleRows(m, kRowsMax);
    cases.push_back(test);
    ++draw;
  }
  // The capacity itself with both kinds of routes, repeated.
  VerifyCase last = cases.back();
  last.routing =
      last.routing == Routing::kUniform ? Routing::kRagged : Routing::kUniform;
  last.draw = draw;
  cases.push_back(last);
  for (VerifyCase& test : cases) {
    test.repeat = test.m == high;
  }
  return cases;
}

absl::StatusOr<std::vector<float>> CheckOutput(OpBench* bench,
                                               const VerifyCase& test,
                                               double tolerance, int threads,
                                               VerifyResult* result) {
  const auto width = static_cast<size_t>(bench->geometry().hidden);
  RETURN_IF_ERROR(CheckZones(bench, test, result));
  const auto capacity =
      static_cast<uint32_t>(bench->output().bytes() / sizeof(float) / width);
  ASSIGN_OR_RETURN(std::vector<float> values, bench->ReadOutput(capacity));
  for (size_t i = 0; i < values.size(); ++i) {
    const size_t row = i / width;
    const bool live = row < test.m;
    if (live ? std::isfinite(values[i]) : IsPoison(values[i])) continue;
    Fail(test,
         !live ? absl::StrFormat("row %d, column %d was written, but lies "
                                 "behind the last row",
                                 row, i % width)
         : IsPoison(values[i])
             ? absl::StrFormat("row %d, column %d was not written", row,
                               i % width)
             : absl::StrFormat("row %d, column %d is not finite", row,
                               i % width),
         result);
    break;
  }
  values.resize(size_t{test.m} * width);
  const std::vector<double> expected =
      bench->workload().Expected(test.routing, test.draw, test.rows, threads);
  for (size_t i = 0; i < test.rows.size(); ++i) {
    const double error = RowError(values.data() + test.rows[i] * width,
                                  expected.data() + i * width, width);
    // Written so that NaN fails too.
    if (!(error <= tolerance)) {
      Fail(test,
           absl::StrFormat("row %d has relative error %.3g against the "
                           "float64 oracle, at most %.3g is allowed",
                           test.rows[i], error, tolerance),
           result);
      break;
    }
    result->worst_error = std::max(result->worst_error, error);
  }
  return values;
}

absl::StatusOr<VerifyResult> Verify(OpBench* bench, const LoadedPlan& plan,
                                    const PlanBody& body,
                                    const std::vector<VerifyCase>& cases,
                                    int threads) {
  VerifyResult result;
  for (const VerifyCase& test : cases) {
    RETURN_IF_ERROR(RunCase(bench, plan, body, test, threads, &result));
    if (!result.passed) break;
  }
  ASSIGN_OR_RETURN(const std::string damage, bench->RestoreConstants());
  if (!damage.empty() && !cases.empty()) Fail(cases.back(), damage, &result);
  return result;
}

}  // namespace kiln
