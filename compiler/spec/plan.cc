#include "compiler/spec/plan.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "compiler/base/check.h"

namespace kiln {
namespace {

uint64_t EvaluateTerm(const LaunchTerm& term, uint32_t m) {
  // At most 2^64 - 2^33 + 2^32: no overflow.
  const uint64_t scaled = uint64_t{term.mul} * m + term.add;
  return scaled / term.div + (scaled % term.div != 0 ? 1 : 0);
}

uint64_t AlignUp(uint64_t value, uint64_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

absl::Status Broken(const Plan& plan, absl::string_view what) {
  return absl::InternalError(
      absl::StrCat("plan ", plan.body.Label(), ": ", what));
}

}  // namespace

uint64_t LaunchDim::Evaluate(uint32_t m) const {
  return std::min(EvaluateTerm(a, m), EvaluateTerm(b, m));
}

uint32_t ArgBytes(ArgKind kind) {
  switch (kind) {
    case ArgKind::kParam:
    case ArgKind::kArena:
    case ArgKind::kU64:
      return 8;
    case ArgKind::kTokens:
    case ArgKind::kU32:
      return 4;
  }
  KILN_UNREACHABLE();
}

std::vector<uint32_t> ArgOffsets(const std::vector<Arg>& args) {
  std::vector<uint32_t> offsets;
  uint32_t offset = 0;
  for (const Arg& arg : args) {
    const uint32_t bytes = ArgBytes(arg.kind);
    offset = static_cast<uint32_t>(AlignUp(offset, bytes));
    offsets.push_back(offset);
    offset += bytes;
  }
  return offsets;
}

uint32_t ArenaLayout::Add(absl::string_view name, uint64_t slice_bytes) {
  slices.push_back(
      {.name = std::string(name), .offset = bytes, .bytes = slice_bytes});
  bytes = AlignUp(bytes + slice_bytes, kArenaAlignment);
  return static_cast<uint32_t>(slices.size() - 1);
}

std::string AssignmentText(const Assignment& assignment) {
  return absl::StrJoin(assignment, ",", absl::PairFormatter("="));
}

std::string PlanBody::Label() const {
  constexpr size_t kDigits = 12;
  const size_t at = template_name.find('@');
  const std::string name = at == std::string::npos
                               ? template_name
                               : template_name.substr(0, at + 1 + kDigits);
  return absl::StrCat(name, "{", AssignmentText(assignment), "}");
}

absl::Status ValidatePlan(const Plan& plan) {
  const PlanBody& body = plan.body;
  if (plan.interval.m_min < 1 || plan.interval.m_min > plan.interval.m_max) {
    return Broken(plan, absl::StrCat("interval ", plan.interval.m_min, "..",
                                     plan.interval.m_max, " is empty"));
  }
  if (body.steps.empty()) return Broken(plan, "no steps");
  if (body.overlapped &&
      (plan.target.backend != Backend::kCuda || plan.target.level < 90)) {
    return Broken(plan, "overlapped steps need CUDA and sm_90");
  }
  if (body.arena.bytes > kArenaBytesMax ||
      body.arena.bytes % kArenaAlignment != 0) {
    return Broken(plan, absl::StrCat("arena of ", body.arena.bytes,
                                     " bytes is too large or not a multiple "
                                     "of 256"));
  }
  uint64_t end = 0;
  for (const ArenaSlice& slice : body.arena.slices) {
    if (slice.offset % kArenaAlignment != 0 || slice.offset < end ||
        slice.bytes > body.arena.bytes ||
        slice.offset > body.arena.bytes - slice.bytes) {
      return Broken(plan, absl::StrCat("arena slice ", slice.name,
                                       " is misaligned, overlaps, or lies "
                                       "outside the arena"));
    }
    end = slice.offset + slice.bytes;
  }
  for (const Step& step : body.steps) {
    if (step.program >= plan.programs.size()) {
      return Broken(plan,
                    absl::StrCat("step ", step.label, " uses program ",
                                 step.program, " of ", plan.programs.size()));
    }
    if (step.entry.empty()) {
      return Broken(plan, absl::StrCat("step ", step.label, " has no entry"));
    }
    for (const LaunchDim& dim : step.grid) {
      if (dim.a.div == 0 || dim.b.div == 0) {
        return Broken(plan, absl::StrCat("step ", step.label, " divides by 0"));
      }
    }
    for (const uint32_t threads : step.block) {
      if (threads == 0) {
        return Broken(plan,
                      absl::StrCat("step ", step.label, " has an empty block"));
      }
    }
    for (const Arg& arg : step.args) {
      const bool in_range =
          arg.kind == ArgKind::kParam   ? arg.value < body.params.size()
          : arg.kind == ArgKind::kArena ? arg.value < body.arena.slices.size()
          : arg.kind == ArgKind::kU32   ? arg.value <= 0xFFFFFFFFu
                                        : true;
      if (!in_range) {
        return Broken(
            plan, absl::StrCat("step ", step.label,
                               " has an argument out of range: ", arg.value));
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace kiln
