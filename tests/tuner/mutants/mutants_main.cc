// kernel_mutants: wrong kernels, made from the templates, before the verifier.
//
//   kernel_mutants [--backend cpu|cuda] [--target TARGET] [--rule TEXT]
//       [--without TEXT] [--spread N] [--jobs N] [--seconds N]
//       [--list | --compile-only] [--verbose]
//
// --rule: only mutants whose name contains TEXT; --without: only the others.
// --spread: N mutants at most, spread over all rules. --seconds: a mutant that
// takes longer never ends and is caught. Exit status: 0 every mutant is caught,
// 1 some are not, 77 this machine cannot run them.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "compiler/nvrtc_worker.h"
#include "tests/tuner/mutants/suite.h"
#include "tuner/device.h"

namespace kiln::testing {
namespace {

constexpr int kSkipped = 77;

struct Options {
  std::string backend = "cpu";
  std::string target = "sm_90a";
  std::string rule;
  std::string without;
  size_t spread = 0;
  int jobs = 2;
  int seconds = 60;
  bool list = false;
  bool compile_only = false;
  bool verbose = false;
};

enum class Fate { kPending, kCaught, kSame, kExcused, kBroken };

struct Subject {
  Mutant mutant;
  Fate fate = Fate::kPending;
  bool differs = false;  // from the original, in some request
  std::string reason;
  const char* request = "";
};

// Every rule keeps its share of `count`, evenly spaced over its places.
void Spread(size_t count, std::vector<Subject>* subjects) {
  std::map<std::string, std::vector<size_t>> by_rule;
  for (size_t i = 0; i < subjects->size(); ++i) {
    by_rule[(*subjects)[i].mutant.rule->rule].push_back(i);
  }
  std::set<size_t> kept;
  size_t rules = by_rule.size();
  size_t left = count;
  std::vector<std::vector<size_t>> groups;
  for (auto& [rule, places] : by_rule) groups.push_back(places);
  std::sort(groups.begin(), groups.end(),
            [](const auto& a, const auto& b) { return a.size() < b.size(); });
  for (const std::vector<size_t>& places : groups) {
    const size_t share = std::min(places.size(), (left + rules - 1) / rules);
    for (size_t n = 0; n < share; ++n) {
      kept.insert(places[n * places.size() / share]);
    }
    left -= share;
    --rules;
  }
  std::vector<Subject> chosen;
  for (const size_t i : kept) chosen.push_back(std::move((*subjects)[i]));
  *subjects = std::move(chosen);
}

absl::StatusOr<MutantSuite> MakeSuite(const Options& options) {
  if (options.backend == "cuda") return CudaSuite(options.target);
  const char* folder = std::getenv("KILN_BIN_DIR");
  return CpuSuite(folder == nullptr ? DefaultCcCpuPath()
                                    : absl::StrCat(folder, "/kiln-cc-cpu"));
}

bool SameCode(const Programs& a, const Programs& b) {
  for (size_t i = 0; i < a.size(); ++i) {
    if ((*a[i])->binary_digest != (*b[i])->binary_digest) return false;
  }
  return true;
}

void Tell(const Subject& subject) {
  std::printf("%s\n    %s [%s] %s\n", subject.mutant.Name().c_str(),
              subject.fate == Fate::kCaught    ? "caught"
              : subject.fate == Fate::kExcused ? "left out"
              : subject.fate == Fate::kSame    ? "same machine code"
              : subject.fate == Fate::kBroken  ? "DOES NOT COMPILE"
                                               : "SURVIVED",
              subject.request, subject.reason.c_str());
}

// One request: compiles the pending subjects and judges those that differ from
// the original.
absl::Status Face(const MutantSuite& suite, const MutantRequest& request,
                  const Options& options, std::vector<Subject>* subjects) {
  std::vector<Subject*> pending;
  std::vector<const Mutant*> mutants;
  for (Subject& subject : *subjects) {
    if (subject.fate != Fate::kPending) continue;
    if (!Contains(suite, request, subject.mutant.rule->file)) continue;
    pending.push_back(&subject);
    mutants.push_back(&subject.mutant);
  }
  const absl::Time begin = absl::Now();
  absl::StatusOr<std::vector<Programs>> programs =
      CompileMutants(suite, request, mutants, options.jobs);
  if (!programs.ok()) return programs.status();
  const absl::Time compiled = absl::Now();
  const Programs& original = programs->front();
  for (const auto& program : original) {
    if (!program.ok()) return program.status();
  }
  std::vector<const Programs*> candidates = {&original};
  std::vector<Subject*> judged;
  for (size_t i = 0; i < pending.size(); ++i) {
    const Programs& own = (*programs)[i + 1];
    const auto broken = std::find_if(own.begin(), own.end(),
                                     [](const auto& p) { return !p.ok(); });
    if (broken != own.end()) {
      pending[i]->fate = Fate::kBroken;
      pending[i]->reason = std::string(broken->status().message());
      continue;
    }
    if (SameCode(original, own)) continue;
    pending[i]->differs = true;
    candidates.push_back(&own);
    judged.push_back(pending[i]);
  }
  if (!options.compile_only) {
    VerdictOptions verdict_options;
    verdict_options.jobs = options.jobs;
    verdict_options.seconds_max = options.seconds;
    const absl::StatusOr<std::vector<Verdict>> verdicts =
        Judge(suite, request, candidates, verdict_options);
    if (!verdicts.ok()) return verdicts.status();
    const Verdict& own = verdicts->front();
    std::printf("request %s: the original %s\n", request.name,
                own.reason.c_str());
    if (own.caught) {
      return absl::InternalError(
          absl::StrCat("the verifier rejects the original: ", own.reason));
    }
    for (size_t i = 0; i < judged.size(); ++i) {
      const Verdict& verdict = (*verdicts)[i + 1];
      judged[i]->request = request.name;
      judged[i]->reason = verdict.reason;
      if (verdict.caught) judged[i]->fate = Fate::kCaught;
      if (options.verbose) Tell(*judged[i]);
    }
  }
  std::printf("request %s: %zu compiled in %.1f s, %zu judged in %.1f s\n",
              request.name, pending.size(),
              absl::ToDoubleSeconds(compiled - begin), judged.size(),
              absl::ToDoubleSeconds(absl::Now() - compiled));
  return absl::OkStatus();
}

int Report(const std::vector<Subject>& subjects, const Options& options) {
  struct Row {
    int made = 0, excused = 0, same = 0, caught = 0, survived = 0, broken = 0;
  };

  std::map<std::string, Row> rows;
  Row all;
  for (const Subject& subject : subjects) {
    for (Row* row : {&rows[subject.mutant.rule->rule], &all}) {
      ++row->made;
      switch (subject.fate) {
        case Fate::kCaught:
          ++row->caught;
          break;
        case Fate::kExcused:
          ++row->excused;
          break;
        case Fate::kBroken:
          ++row->broken;
          break;
        case Fate::kSame:
          ++row->same;
          break;
        case Fate::kPending:
          ++row->survived;
          break;
      }
    }
    const bool bad =
        subject.fate == Fate::kPending || subject.fate == Fate::kBroken;
    if (bad || (options.verbose && subject.fate != Fate::kCaught)) {
      Tell(subject);
    }
  }
  std::printf(
      "| rule | mutants | left out | same code | caught | survived |\n"
      "|---|---|---|---|---|---|\n");
  rows["all"] = all;
  for (const auto& [rule, row] : rows) {
    std::printf("| %s | %d | %d | %d | %d | %d |\n", rule.c_str(), row.made,
                row.excused, row.same, row.caught, row.survived + row.broken);
  }
  return all.survived + all.broken == 0 ? 0 : 1;
}

int Run(const Options& options) {
  const absl::StatusOr<MutantSuite> suite = MakeSuite(options);
  if (!suite.ok()) {
    std::fprintf(stderr, "skipped: %s\n",
                 std::string(suite.status().message()).c_str());
    return kSkipped;
  }
  if (options.backend == "cuda" && !options.list && !options.compile_only &&
      !HasGpu()) {
    std::fprintf(stderr, "skipped: no GPU\n");
    return kSkipped;
  }
  absl::StatusOr<std::vector<Mutant>> mutants = AllMutants(*suite);
  if (!mutants.ok()) {
    std::fprintf(stderr, "error: %s\n",
                 std::string(mutants.status().message()).c_str());
    return 1;
  }
  std::vector<Subject> subjects;
  for (Mutant& mutant : *mutants) {
    Subject subject;
    subject.mutant = std::move(mutant);
    const std::string name = subject.mutant.Name();
    if (absl::StrContains(name, options.rule) &&
        (options.without.empty() ||
         !absl::StrContains(name, options.without))) {
      subjects.push_back(std::move(subject));
    }
  }
  int failures = 0;
  if (options.spread != 0) Spread(options.spread, &subjects);
  for (Subject& subject : subjects) {
    const Excuse* excuse = FindExcuse(subject.mutant, suite->excuses);
    if (excuse == nullptr) continue;
    subject.fate = Fate::kExcused;
    subject.reason = excuse->reason;
  }
  if (options.list) {
    for (const Subject& subject : subjects) {
      std::printf("%s\n", subject.mutant.Name().c_str());
    }
    std::printf("%zu mutants\n", subjects.size());
    return 0;
  }
  for (const MutantRequest& request : suite->originals) {
    std::vector<Subject> none;
    const absl::Status status = Face(*suite, request, options, &none);
    if (!status.ok()) {
      std::fprintf(stderr, "error: %s\n",
                   std::string(status.message()).c_str());
      ++failures;
    }
  }
  for (const MutantRequest& request : suite->requests) {
    const absl::Status status = Face(*suite, request, options, &subjects);
    if (!status.ok()) {
      std::fprintf(stderr, "error: %s\n",
                   std::string(status.message()).c_str());
      return 1;
    }
  }
  for (Subject& subject : subjects) {
    if (subject.fate == Fate::kPending && !subject.differs) {
      subject.fate = Fate::kSame;
    }
  }
  return Report(subjects, options) + failures == 0 ? 0 : 1;
}

int Main(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    const std::string value = i + 1 < argc ? argv[i + 1] : "";
    int number = 0;
    if (flag == "--list") {
      options.list = true;
    } else if (flag == "--compile-only") {
      options.compile_only = true;
    } else if (flag == "--verbose") {
      options.verbose = true;
    } else if (flag == "--backend" && (value == "cpu" || value == "cuda")) {
      options.backend = value;
      ++i;
    } else if (flag == "--target" && !value.empty()) {
      options.target = value;
      ++i;
    } else if (flag == "--rule" && !value.empty()) {
      options.rule = value;
      ++i;
    } else if (flag == "--without" && !value.empty()) {
      options.without = value;
      ++i;
    } else if (flag == "--spread" && absl::SimpleAtoi(value, &number) &&
               number > 0) {
      options.spread = static_cast<size_t>(number);
      ++i;
    } else if (flag == "--seconds" && absl::SimpleAtoi(value, &number) &&
               number > 0) {
      options.seconds = number;
      ++i;
    } else if (flag == "--jobs" && absl::SimpleAtoi(value, &number) &&
               number > 0) {
      options.jobs = number;
      ++i;
    } else {
      std::fprintf(stderr, "wrong argument %s; see the head of %s\n",
                   flag.c_str(), "tests/tuner/mutants/mutants_main.cc");
      return 2;
    }
  }
  return Run(options);
}

}  // namespace
}  // namespace kiln::testing

int main(int argc, char** argv) {
  if (argc > 1 && std::strcmp(argv[1], kiln::kNvrtcWorkerVerb) == 0) {
    return kiln::NvrtcWorkerMain(argc, argv);
  }
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  return kiln::testing::Main(argc, argv);
}
