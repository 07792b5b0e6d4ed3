#include "tuner/verifier.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "compiler/base/status_macros.h"
#include "templates/fused_moe/op_mx.h"
#include "templates/fused_moe/op_qsrt.h"

namespace kiln {
namespace {

constexpr uint32_t kRowsMax = 8;
constexpr uint64_t kArenaZoneBytes = 4096;
// What the arena holds before a launch, in turn: large finite numbers and
// indices far outside; zeros and the first of everything; NaN and "no route".
// The last hides what writes "no route" where it must not, so it is not the one
// that the fewest tokens meet.
constexpr std::array<uint8_t, 3> kArenaContents = {0x7B, 0x00, 0xFF};
// Limits of the classes that leave the order of sums open.
constexpr double kStagedRowMax = 1e-3;
constexpr double kStagedCaseMax = 5e-4;
constexpr double kStagedOneTermMax = 2.4e-4;
// Between rows of equal tokens whose binary32 sums had no order.
constexpr double kUnorderedRowMax = 1e-5;

uint32_t Bits(float value) {
  uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

bool IsPoison(float value) { return Bits(value) == 0xFFFFFFFFu; }

// The first place of values[begin..end) with `wrong`, or `end`. Blocks are
// counted before they are searched: counting has no branch, and outputs are
// large and almost always right.
template <typename Predicate>
size_t FindWrong(const std::vector<float>& values, size_t begin, size_t end,
                 Predicate wrong) {
  constexpr size_t kBlock = 4096;
  for (size_t at = begin; at < end; at += kBlock) {
    const size_t stop = std::min(end, at + kBlock);
    uint32_t count = 0;
    for (size_t i = at; i < stop; ++i) count += wrong(values[i]) ? 1 : 0;
    if (count == 0) continue;
    while (!wrong(values[at])) ++at;
    return at;
  }
  return end;
}

// Equal, or both NaN of whatever payload.
bool SameValue(float a, float b) {
  return Bits(a) == Bits(b) || (std::isnan(a) && std::isnan(b));
}

// In full precision. A NaN has a sign in some compilers' constants; which says
// nothing.
std::string Text(double value) {
  return std::isnan(value) ? "nan" : absl::StrFormat("%.9g", value);
}

// The first column where two rows differ, or `width`.
size_t FirstDifference(const float* a, const float* b, size_t width) {
  if (std::memcmp(a, b, width * sizeof(float)) == 0) return width;
  for (size_t i = 0; i < width; ++i) {
    if (!SameValue(a[i], b[i])) return i;
  }
  return width;
}

// Sums over elements whose expected value is finite.
struct Error {
  double difference = 0;
  double norm = 0;
  double got_norm = 0;
  double product = 0;

  void Add(double got, double expected) {
    const double delta = got - expected;
    difference += delta * delta;
    norm += expected * expected;
    got_norm += got * got;
    product += got * expected;
  }

  // 1 where nothing is expected; of zeros for something 0.
  double Cosine() const {
    if (norm == 0) return 1;
    return got_norm == 0 ? 0 : product / std::sqrt(norm * got_norm);
  }

  // Relative Frobenius error. Zeros must be exactly zero.
  double Relative() const {
    if (norm == 0) return difference == 0 ? 0 : INFINITY;
    return std::sqrt(difference / norm);
  }
};

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

// Bytes of the arena that belong to no slice still hold `content`.
absl::Status CheckGaps(OpBench* bench, const VerifyCase& test,
                       const ArenaLayout& layout, uint8_t content,
                       VerifyResult* result) {
  std::string gap;
  for (size_t i = 0; i < layout.slices.size(); ++i) {
    const ArenaSlice& slice = layout.slices[i];
    const uint64_t begin = slice.offset + slice.bytes;
    const uint64_t end =
        std::min(i + 1 < layout.slices.size() ? layout.slices[i + 1].offset
                                              : layout.bytes,
                 begin + 2 * kArenaZoneBytes);
    gap.resize(end - begin);
    RETURN_IF_ERROR(bench->device()->CopyOut(
        gap.data(), static_cast<const char*>(bench->arena().data()) + begin,
        gap.size()));
    const size_t at = gap.find_first_not_of(static_cast<char>(content));
    if (at == std::string::npos) continue;
    Fail(test,
         absl::StrFormat("arena: wrote %d bytes behind the end of slice %s",
                         at + 1, slice.name),
         result);
  }
  return absl::OkStatus();
}

// Rows 0..m-1 of an output, checked one kind of finding at a time.
class RowChecker {
 public:
  RowChecker(OpBench* bench, const VerifyCase& test, const Promise& promise,
             const std::vector<float>& values, VerifyResult* result)
      : bench_(bench),
        test_(test),
        promise_(promise),
        values_(values),
        width_(bench->workload().row_width()),
        result_(result) {}

  // Live elements were written, the others were not.
  void CheckWritten() {
    const size_t live = test_.m * width_;
    size_t at = FindWrong(values_, 0, live, IsPoison);
    if (at < live) {
      Report(at / width_, at % width_, "was not written");
      return;
    }
    at = FindWrong(values_, live, values_.size(),
                   [](float value) { return !IsPoison(value); });
    if (at < values_.size()) {
      Report(at / width_, at % width_,
             "was written, but lies behind the last row");
    }
  }

  // Extreme draws have rows whose answer is not finite; the oracle says which.
  void CheckFinite() {
    if (test_.kind == DrawKind::kExtreme) return;
    const size_t live = test_.m * width_;
    const size_t at = FindWrong(values_, 0, live, [](float value) {
      return (Bits(value) & 0x7F800000u) == 0x7F800000u;
    });
    if (at < live) Report(at / width_, at % width_, "is not finite");
  }

  // Equal tokens have equal rows, wherever they stand.
  void CheckAlike() {
    for (uint32_t row = 0; row < test_.m; ++row) {
      const uint32_t first = FirstAlike(test_.kind, row);
      if (first == row) continue;
      const size_t at = FirstDifference(Row(row), Row(first), width_);
      if (at == width_) continue;
      if (!promise_.bits_repeat &&
          RowDistance(Row(row), Row(first)) <= kUnorderedRowMax) {
        continue;
      }
      Report(row, at,
             absl::StrFormat("is %g, but the equal token %d has %g",
                             Row(row)[at], first, Row(first)[at]));
      return;
    }
  }

  void CheckOracle(int threads) {
    const bool uniform = test_.kind == DrawKind::kUniform;
    const ReferenceMode mode = uniform ? promise_.oracle : promise_.mode;
    const bool one_term = test_.kind == DrawKind::kOneTerm;
    const double row_max = uniform    ? promise_.tolerance
                           : one_term ? promise_.one_term_error_max
                                      : promise_.row_error_max;
    const bool exact = row_max == 0;
    const std::vector<double> expected = bench_->workload().Expected(
        test_.kind, test_.draw, test_.rows, threads, mode);
    double& worst = uniform    ? result_->worst_error
                    : one_term ? result_->worst_one_term_error
                               : result_->worst_staged_error;
    Error all;
    for (size_t i = 0; i < test_.rows.size(); ++i) {
      const uint32_t row = test_.rows[i];
      Error error;
      for (size_t c = 0; c < width_; ++c) {
        const float got = Row(row)[c];
        const double want = expected[i * width_ + c];
        if (exact || !std::isfinite(want)) {
          if (SameValue(got, static_cast<float>(want))) continue;
          Report(row, c,
                 absl::StrCat("is ", Text(got), " instead of ", Text(want)));
          return;
        }
        error.Add(got, want);
        all.Add(got, want);
      }
      // The row that fails counts too, and NaN as no agreement at all.
      const double relative = error.Relative();
      worst = std::max(worst, std::isnan(relative) ? INFINITY : relative);
      if (uniform) {
        const double cosine = error.Cosine();
        result_->worst_cosine =
            std::min(result_->worst_cosine, std::isnan(cosine) ? 0 : cosine);
      }
      // Written so that NaN fails too.
      if (!(relative <= row_max)) {
        Report(
            absl::StrFormat("row %d has relative error %.3g against the %s, "
                            "at most %.3g is allowed",
                            row, relative,
                            mode == ReferenceMode::kFloat64
                                ? "float64 oracle"
                                : "rounding boundaries of its class",
                            row_max));
        return;
      }
    }
    if (uniform || exact || one_term) return;
    if (!(all.Relative() <= promise_.case_error_max)) {
      Report(absl::StrFormat(
          "all rows together have relative error %.3g against the rounding "
          "boundaries of its class, at most %.3g is allowed",
          all.Relative(), promise_.case_error_max));
      return;
    }
    result_->worst_case_error =
        std::max(result_->worst_case_error, all.Relative());
  }

 private:
  const float* Row(uint32_t row) const { return values_.data() + row * width_; }

  // Relative to the second. What is no number in both is no difference; what is
  // in one of them makes it NaN or infinite.
  double RowDistance(const float* row, const float* other) const {
    Error error;
    for (size_t i = 0; i < width_; ++i) {
      if (!std::isfinite(other[i]) && SameValue(row[i], other[i])) continue;
      error.Add(row[i], other[i]);
    }
    return error.Relative();
  }

  void Report(absl::string_view what) { Fail(test_, what, result_); }

  void Report(size_t row, size_t column, absl::string_view what) {
    Report(absl::StrFormat("row %d, column %d %s", row, column, what));
  }

  OpBench* bench_;
  const VerifyCase& test_;
  const Promise& promise_;
  const std::vector<float>& values_;
  const size_t width_;
  VerifyResult* result_;
};

// The cases of one candidate.
class Verification {
 public:
  Verification(OpBench* bench, const LoadedPlan& plan, const PlanBody& body,
               int threads)
      : bench_(bench),
        plan_(plan),
        body_(body),
        promise_(
            PromiseOf(body.numerics_class, body.tolerance, body.deterministic)),
        threads_(threads) {}

  absl::StatusOr<VerifyResult> Run(const std::vector<VerifyCase>& cases) {
    for (const VerifyCase& test : cases) {
      RETURN_IF_ERROR(RunCase(test));
      if (!result_.passed) break;
    }
    ASSIGN_OR_RETURN(const std::string damage, bench_->RestoreInputs());
    if (!damage.empty() && !cases.empty()) {
      Fail(cases.back(), damage, &result_);
    }
    return std::move(result_);
  }

 private:
  absl::StatusOr<std::vector<float>> Launch(
      const VerifyCase& test, const std::vector<uint64_t>& params) {
    const uint8_t content =
        kArenaContents[result_.launches % kArenaContents.size()];
    RETURN_IF_ERROR(bench_->output().Poison());
    RETURN_IF_ERROR(bench_->arena().Poison(content));
    RETURN_IF_ERROR(plan_.Launch(test.m, params, bench_->arena().data(),
                                 bench_->arena().bytes()));
    RETURN_IF_ERROR(bench_->device()->Synchronize());
    ++result_.launches;
    RETURN_IF_ERROR(CheckGaps(bench_, test, body_.arena, content, &result_));
    return CheckOutput(bench_, test, promise_, threads_, &result_);
  }

  absl::Status RunCase(const VerifyCase& test) {
    ASSIGN_OR_RETURN(const size_t inputs,
                     bench_->AddInputs(test.kind, test.draw, test.m));
    const std::vector<uint64_t> params = bench_->Params(inputs);
    ASSIGN_OR_RETURN(const std::vector<float> first, Launch(test, params));
    ASSIGN_OR_RETURN(const std::string damage, bench_->RestoreTokens(inputs));
    if (!damage.empty()) Fail(test, damage, &result_);
    if (!result_.passed || !test.repeat || !body_.deterministic) {
      return absl::OkStatus();
    }
    ASSIGN_OR_RETURN(const std::vector<float> second, Launch(test, params));
    if (FirstDifference(first.data(), second.data(), first.size()) !=
        first.size()) {
      Fail(test,
           "two runs on equal inputs differ, but the candidate claims to be "
           "deterministic",
           &result_);
    }
    return absl::OkStatus();
  }

  OpBench* bench_;
  const LoadedPlan& plan_;
  const PlanBody& body_;
  const Promise promise_;
  const int threads_;
  VerifyResult result_;
};

}  // namespace

std::string VerifyCase::ToString() const {
  return absl::StrCat("m=", m, " ", DrawKindName(kind), " draw ", draw);
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

std::vector<uint32_t> OracleRows(DrawKind kind, uint32_t m, uint32_t count) {
  const bool repeats = FirstAlike(kind, kDistinctTokens) == 0;
  return repeats ? SampleRows(std::min(m, kDistinctTokens), kDistinctTokens)
                 : SampleRows(m, count);
}

std::vector<VerifyCase> VerifyCases(const Interval& interval) {
  const uint32_t low = interval.m_min;
  const uint32_t high = interval.m_max;
  std::vector<VerifyCase> cases;
  const auto add = [&cases](DrawKind kind, uint32_t m, bool repeat) {
    VerifyCase test;
    test.kind = kind;
    test.m = m;
    test.repeat = repeat;
    test.rows = OracleRows(kind, m, kRowsMax);
    cases.push_back(test);
  };
  // The lower edge, a ragged size inside, one less than the capacity.
  if (low < high) add(DrawKind::kRagged, low, false);
  if (high - low >= 2) add(DrawKind::kZipf, low + (high - low) / 2, false);
  if (high - low >= 3) add(DrawKind::kHot, high - 1, false);
  // The capacity itself.
  add(DrawKind::kUniform, high, false);
  add(DrawKind::kOneTerm, high, false);
  add(DrawKind::kRagged, high, true);
  add(DrawKind::kExtreme, high, true);
  return cases;
}

Promise PromiseOf(absl::string_view numerics_class, double tolerance,
                  bool deterministic) {
  Promise promise;
  promise.bits_repeat = deterministic;
  promise.tolerance = tolerance;
  // The rounding boundaries, and the bits of the order of sums that is
  // promised.
  ReferenceMode staged = ReferenceMode::kStaged;
  ReferenceMode sequential = ReferenceMode::kSequential;
  if (absl::StartsWith(numerics_class, MxNumericsClass(MxArm::kDirectRp2))) {
    staged = ReferenceMode::kStagedW4A8Rp2;
    sequential = ReferenceMode::kSequentialW4A8Rp2;
  } else if (absl::StartsWith(numerics_class, "mx.w4a8.") ||
             absl::StartsWith(numerics_class, "qsrt.w4a8.")) {
    staged = promise.oracle = ReferenceMode::kStagedW4A8;
    sequential = ReferenceMode::kSequentialW4A8;
  }
  if (numerics_class == "w4a16.f16.sequential" ||
      numerics_class == MxNumericsClass(MxArm::kSmallM) ||
      numerics_class == MxNumericsClass(MxArm::kDirectRp2) ||
      numerics_class == MxNumericsClass(MxArm::kGrouped) ||
      numerics_class == QsrtNumericsClass(QsrtArm::kW4A16) ||
      numerics_class == QsrtNumericsClass(QsrtArm::kW4A8)) {
    promise.mode = sequential;
    return promise;
  }
  promise.mode = staged;
  const bool known = absl::StartsWith(numerics_class, "w4a16.f16.");
  promise.row_error_max = known ? kStagedRowMax : tolerance;
  promise.case_error_max = known ? kStagedCaseMax : tolerance;
  promise.one_term_error_max = known ? kStagedOneTermMax : tolerance;
  return promise;
}

PlanBody WithArenaZones(const PlanBody& body) {
  PlanBody zoned = body;
  uint64_t moved = 0;
  for (ArenaSlice& slice : zoned.arena.slices) {
    slice.offset += moved;
    moved += kArenaZoneBytes;
  }
  zoned.arena.bytes += moved;
  return zoned;
}

absl::StatusOr<std::vector<float>> CheckOutput(OpBench* bench,
                                               const VerifyCase& test,
                                               const Promise& promise,
                                               int threads,
                                               VerifyResult* result) {
  const size_t width = bench->workload().row_width();
  RETURN_IF_ERROR(CheckZones(bench, test, result));
  const auto capacity =
      static_cast<uint32_t>(bench->output().bytes() / sizeof(float) / width);
  ASSIGN_OR_RETURN(std::vector<float> values, bench->ReadOutput(capacity));
  RowChecker checker(bench, test, promise, values, result);
  checker.CheckWritten();
  checker.CheckFinite();
  checker.CheckAlike();
  checker.CheckOracle(threads);
  values.resize(size_t{test.m} * width);
  return values;
}

absl::StatusOr<VerifyResult> Verify(OpBench* bench, const LoadedPlan& plan,
                                    const PlanBody& body,
                                    const std::vector<VerifyCase>& cases,
                                    int threads) {
  return Verification(bench, plan, body, threads).Run(cases);
}

}  // namespace kiln
