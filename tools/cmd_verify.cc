// kiln verify: is a bundle whole, and is it the one that was meant?

#include <algorithm>
#include <cstdio>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "compiler/base/digest.h"
#include "compiler/base/status_macros.h"
#include "tools/bundle_device.h"
#include "tools/bundle_view.h"
#include "tools/cli.h"
#include "tools/signature.h"
#include "tuner/loaded_plan.h"

namespace kiln {
namespace {

// The root covers every byte; this covers what the bytes say about each other.
absl::Status CheckBinaryDigests(const BundleView& bundle) {
  for (uint32_t s = 0; s < bundle.info().section_count; ++s) {
    const kiln_section_info_t section = bundle.Section(s);
    for (uint32_t p = 0; p < section.program_count; ++p) {
      const kiln_program_info_t program = bundle.Program(s, p);
      const Digest found =
          Sha256({static_cast<const char*>(program.data), program.bytes});
      Digest declared;
      std::copy(std::begin(program.binary_digest),
                std::end(program.binary_digest), declared.bytes.begin());
      if (found != declared) {
        return absl::DataLossError(absl::StrCat(
            "program ", p, " of section ", section.target, " hashes to ",
            found.ToHex(), ", the bundle declares ", declared.ToHex()));
      }
    }
  }
  return absl::OkStatus();
}

// What golden replay found.
struct Selftest {
  std::string target;
  std::string device;
  std::vector<kiln_selftest_plan_t> plans;
  kiln_status_t status = KILN_STATUS_OK;
  kiln_error_t error = {};

  size_t Count(uint32_t outcome) const {
    return static_cast<size_t>(std::count_if(
        plans.begin(), plans.end(), [&](const kiln_selftest_plan_t& plan) {
          return plan.outcome == outcome;
        }));
  }
};

absl::string_view OutcomeName(uint32_t outcome) {
  switch (outcome) {
    case KILN_SELFTEST_PASSED:
      return "passed";
    case KILN_SELFTEST_FAILED:
      return "FAILED";
    case KILN_SELFTEST_NOT_DETERMINISTIC:
      return "skipped: not deterministic";
    default:
      return "skipped: no digest, frozen without the device";
  }
}

// A plan that gives another digest is in the result; anything else that goes
// wrong is an error.
absl::StatusOr<Selftest> RunSelftest(const BundleView& bundle,
                                     const VerifyCommand& command) {
  ASSIGN_OR_RETURN(const std::unique_ptr<Device> device,
                   OpenDeviceFor(bundle, command.target, command.device));
  Selftest out;
  out.target = device->profile().target.ToString();
  out.device = device->profile().name;
  kiln_load_options_t load = {};
  load.struct_size = sizeof(load);
  if (command.allow_predicted) load.flags |= KILN_LOAD_ALLOW_PREDICTED;
  if (command.allow_unqualified) load.flags |= KILN_LOAD_ALLOW_UNQUALIFIED;
  load.target = out.target.c_str();
  load.context = device->context();
  kiln_modules_t* modules = nullptr;
  RETURN_IF_ERROR(RuntimeStatus(
      kiln_modules_load(bundle.handle(), &load, &modules, &out.error),
      out.error));
  kiln_selftest_options_t options = {};
  options.struct_size = sizeof(options);
  options.report = [](void* user, const kiln_selftest_plan_t* plan) {
    static_cast<std::vector<kiln_selftest_plan_t>*>(user)->push_back(*plan);
  };
  options.user = &out.plans;
  out.status = kiln_modules_selftest(modules, &options, nullptr, &out.error);
  kiln_modules_unload(modules, nullptr);
  if (out.status != KILN_STATUS_SELFTEST_MISMATCH) {
    RETURN_IF_ERROR(RuntimeStatus(out.status, out.error));
  }
  return out;
}

void Print(const BundleView& bundle, const Selftest& selftest) {
  std::printf("golden replay on %s (%s)\n", selftest.target.c_str(),
              selftest.device.c_str());
  std::vector<std::vector<std::string>> rows = {
      {"  entry", "m", "ran with", "expected", "found", "outcome"}};
  for (uint32_t s = 0; s < bundle.info().section_count; ++s) {
    if (bundle.Section(s).target != selftest.target) continue;
    for (const kiln_selftest_plan_t& plan : selftest.plans) {
      const kiln_plan_info_t info = bundle.Plan(s, plan.entry, plan.plan);
      const auto digest = [](const uint8_t* bytes) {
        const std::string hex =
            ToHex({reinterpret_cast<const char*>(bytes), 6});
        return hex == "000000000000" ? std::string("-") : hex;
      };
      rows.push_back({absl::StrCat("  ", bundle.Entry(s, plan.entry).name),
                      absl::StrCat(info.m_min, "..", info.m_max),
                      plan.m == 0 ? "-" : absl::StrCat(plan.m),
                      digest(plan.expected), digest(plan.found),
                      std::string(OutcomeName(plan.outcome))});
    }
  }
  std::printf("%s", FormatTable(rows).c_str());
}

}  // namespace

absl::StatusOr<int> RunVerify(const GlobalOptions& global,
                              const VerifyCommand& command) {
  std::optional<Digest> root;
  if (!command.root.empty()) {
    ASSIGN_OR_RETURN(root, Digest::FromHex(command.root));
  }
  ASSIGN_OR_RETURN(const BundleView bundle,
                   BundleView::Open(command.file, root));
  RETURN_IF_ERROR(CheckBinaryDigests(bundle));
  std::string signer;
  if (!command.key.empty()) {
    const std::string signature = command.signature.empty()
                                      ? absl::StrCat(command.file, ".sig")
                                      : command.signature;
    ASSIGN_OR_RETURN(signer,
                     CheckSignature(bundle.Root(), signature, command.key));
  } else if (!command.signature.empty()) {
    return absl::InvalidArgumentError(
        "--signature needs --key, the public key to check it with");
  }
  std::optional<Selftest> selftest;
  if (command.selftest) {
    ASSIGN_OR_RETURN(selftest, RunSelftest(bundle, command));
  }
  const bool predicted = (bundle.info().flags & KILN_CONTAINS_PREDICTED) != 0;
  if (global.json) {
    nlohmann::ordered_json out;
    out["file"] = command.file;
    out["root"] = bundle.Root().ToHex();
    out["bytes"] = bundle.info().bytes;
    out["format_version"] = bundle.info().format_version;
    out["sections"] = bundle.info().section_count;
    out["predicted"] = predicted;
    if (!signer.empty()) out["signed_by"] = signer;
    out["verified"] = true;
    if (selftest.has_value()) {
      out["selftest"] = {
          {"target", selftest->target},
          {"device", selftest->device},
          {"passed", selftest->Count(KILN_SELFTEST_PASSED)},
          {"failed", selftest->Count(KILN_SELFTEST_FAILED)},
          {"not_deterministic",
           selftest->Count(KILN_SELFTEST_NOT_DETERMINISTIC)},
          {"no_digest", selftest->Count(KILN_SELFTEST_NO_DIGEST)}};
    }
    PrintJson(out);
  } else {
    std::printf("%s: whole, format %u, %s, %u sections%s\nroot %s\n",
                command.file.c_str(), bundle.info().format_version,
                FormatBytes(bundle.info().bytes).c_str(),
                bundle.info().section_count,
                predicted ? ", contains predicted plans" : "",
                bundle.Root().ToHex().c_str());
    if (!signer.empty()) std::printf("signed by %s\n", signer.c_str());
    if (selftest.has_value()) Print(bundle, *selftest);
  }
  if (!selftest.has_value()) return kExitDone;
  if (selftest->status != KILN_STATUS_OK) {
    std::fprintf(stderr, "kiln: %s\n", selftest->error.message);
    return kExitRefused;
  }
  if (selftest->Count(KILN_SELFTEST_PASSED) == 0) {
    std::fprintf(stderr, "kiln: nothing was tested: %s\n",
                 selftest->Count(KILN_SELFTEST_NOT_DETERMINISTIC) != 0
                     ? "repeats of the plans may differ, so that there is "
                       "nothing to compare with"
                     : "no plan has a golden digest; freeze where the device "
                       "is");
    return kExitIncomplete;
  }
  return kExitDone;
}

}  // namespace kiln
