#include "compiler/spec/plan_key.h"

#include <algorithm>
#include <bit>
#include <cstdint>

namespace kiln {
namespace {

void EncodeTerm(absl::string_view name, const LaunchTerm& term,
                CanonicalEncoder* encoder) {
  encoder->Begin(name)
      .Number("mul", term.mul)
      .Number("add", term.add)
      .Number("div", term.div)
      .End();
}

void EncodeStep(const Step& step, CanonicalEncoder* encoder) {
  encoder->Begin("step")
      .Number("program", step.program)
      .Text("entry", step.entry);
  for (const LaunchDim& dim : step.grid) {
    EncodeTerm("a", dim.a, encoder);
    EncodeTerm("b", dim.b, encoder);
  }
  for (const uint32_t threads : step.block) {
    encoder->Number("threads", threads);
  }
  encoder->Number("dynamic_shared_bytes", step.dynamic_shared_bytes);
  for (const Arg& arg : step.args) {
    encoder->Number("kind", static_cast<int64_t>(arg.kind))
        .Number("value", static_cast<int64_t>(arg.value));
  }
  encoder->End();
}

}  // namespace

Digest CandidateDigest(const PlanBody& body,
                       const std::vector<Digest>& programs) {
  CanonicalEncoder encoder("kiln.candidate/1");
  encoder.Text("template", body.template_name)
      .Number("template_version", body.template_version);
  encoder.Begin("assignment");
  for (const auto& [axis, value] : body.assignment) {
    encoder.Number(axis, value);
  }
  encoder.End()
      .Text("numerics_class", body.numerics_class)
      .Number("tolerance_bits", std::bit_cast<int64_t>(body.tolerance))
      .Flag("deterministic", body.deterministic)
      .Number("cpu_threads", body.cpu_threads);
  for (const ParamDecl& param : body.params) {
    encoder.Text("param", param.name)
        .Text("dtype", param.dtype)
        .Text("shape", param.shape)
        .Flag("output", param.output);
  }
  encoder.Number("arena_bytes", static_cast<int64_t>(body.arena.bytes));
  for (const ArenaSlice& slice : body.arena.slices) {
    encoder.Number("slice_offset", static_cast<int64_t>(slice.offset))
        .Number("slice_bytes", static_cast<int64_t>(slice.bytes));
  }
  for (const Step& step : body.steps) EncodeStep(step, &encoder);
  // Only where it is set, so that other candidates keep their keys.
  if (body.overlapped) encoder.Flag("overlapped", true);
  for (const Digest& program : programs) encoder.Hash("program", program);
  return encoder.digest();
}

PlanKey MakePlanKey(const RequestGeometry& geometry, const Interval& interval,
                    const DeviceProfile& device, const CandidateSpace& space) {
  CanonicalEncoder encoder("kiln.measure/1");
  geometry.Encode(&encoder);
  encoder.Begin("interval")
      .Number("m_min", interval.m_min)
      .Number("m_max", interval.m_max)
      .End();
  device.Encode(&encoder);
  encoder.Number("measurement_policy", kMeasurementPolicyVersion);
  std::vector<TemplateIdentity> templates = space.templates;
  std::sort(templates.begin(), templates.end());
  encoder.Begin("candidates")
      .Number("limit", space.candidates_max)
      .Number("arena_bytes_max", static_cast<int64_t>(space.arena_bytes_max))
      .Text("balance", space.balance)
      .Text("numerics_class", space.numerics_class)
      .Flag("warm_l2", space.warm_l2);
  for (const TemplateIdentity& identity : templates) {
    encoder.Begin(identity.name)
        .Number("version", identity.version)
        .Hash("sources", identity.sources)
        .End();
  }
  encoder.Begin("compiler")
      .Text("name", space.toolchain.name)
      .Text("version", space.toolchain.version)
      .Hash("content", space.toolchain.content)
      .End()
      .End();
  PlanKey key;
  key.preimage = encoder.bytes();
  key.digest = Sha256(key.preimage);
  return key;
}

}  // namespace kiln
