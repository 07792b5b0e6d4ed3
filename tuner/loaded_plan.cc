#include "tuner/loaded_plan.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "compiler/base/status_macros.h"
#include "compiler/bundle_writer.h"

namespace kiln {
namespace {

constexpr char kEntryName[] = "candidate";

}  // namespace

absl::Status RuntimeStatus(kiln_status_t status, const kiln_error_t& error) {
  if (status == KILN_STATUS_OK) return absl::OkStatus();
  const std::string message =
      absl::StrCat(error.message, " (", kiln_status_name(status), ")");
  switch (status) {
    case KILN_STATUS_OUT_OF_MEMORY:
      return absl::ResourceExhaustedError(message);
    case KILN_STATUS_FILE_NOT_FOUND:
      return absl::NotFoundError(message);
    case KILN_STATUS_BUNDLE_NOT_A_BUNDLE:
    case KILN_STATUS_BUNDLE_VERSION:
    case KILN_STATUS_BUNDLE_TRUNCATED:
    case KILN_STATUS_BUNDLE_DAMAGED:
    case KILN_STATUS_BUNDLE_MALFORMED:
    case KILN_STATUS_BUNDLE_LIMIT:
    case KILN_STATUS_ROOT_MISMATCH:
      return absl::DataLossError(message);
    case KILN_STATUS_TOKENS_OUT_OF_RANGE:
      return absl::OutOfRangeError(message);
    case KILN_STATUS_SYSTEM:
      return absl::UnavailableError(message);
    case KILN_STATUS_DRIVER:
      return absl::InternalError(message);
    default:
      return absl::FailedPreconditionError(message);
  }
}

absl::StatusOr<LoadedPlan> LoadedPlan::Open(Device* device,
                                            kiln_bundle_t* bundle,
                                            const std::string& name,
                                            uint32_t flags) {
  LoadedPlan plan;
  plan.device_ = device;
  plan.name_ = name;
  const std::string target = device->profile().target.ToString();
  kiln_load_options_t options = {};
  options.struct_size = sizeof(options);
  options.flags = flags;
  options.target = target.c_str();
  options.context = device->context();
  kiln_error_t error = {};
  const RunningLaunch loading(device->watch());
  RETURN_IF_ERROR(RuntimeStatus(
      kiln_modules_load(bundle, &options, &plan.modules_, &error), error));
  return plan;
}

absl::StatusOr<LoadedPlan> LoadedPlan::Load(
    Device* device, const RequestGeometry& geometry, uint32_t capacity,
    const PlanBody& body,
    const std::vector<std::shared_ptr<const Program>>& programs) {
  Plan plan;
  plan.geometry = geometry;
  plan.target = device->profile().target;
  plan.interval = {.m_min = 1, .m_max = capacity};
  plan.body = body;
  for (const auto& program : programs) {
    plan.programs.push_back(program->key.digest);
  }
  BundleSection section;
  section.target = plan.target;
  section.entries.push_back(
      {.name = kEntryName, .geometry = geometry, .plans = {plan}});
  section.programs = programs;
  ASSIGN_OR_RETURN(const std::string bytes,
                   WriteBundle({section}, {.allow_predicted = true}));
  kiln_bundle_t* bundle = nullptr;
  kiln_error_t error = {};
  RETURN_IF_ERROR(
      RuntimeStatus(kiln_bundle_open_memory(bytes.data(), bytes.size(), nullptr,
                                            &bundle, &error),
                    error));
  absl::StatusOr<LoadedPlan> loaded =
      Open(device, bundle, kEntryName,
           KILN_LOAD_ALLOW_PREDICTED | KILN_LOAD_ALLOW_UNQUALIFIED);
  if (!loaded.ok()) {
    kiln_bundle_close(bundle, nullptr);
    return loaded.status();
  }
  loaded->bundle_ = bundle;
  RETURN_IF_ERROR(loaded->Find(1));
  return loaded;
}

LoadedPlan::LoadedPlan(LoadedPlan&& other) noexcept {
  *this = std::move(other);
}

LoadedPlan& LoadedPlan::operator=(LoadedPlan&& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(name_, other.name_);
  std::swap(bundle_, other.bundle_);
  std::swap(modules_, other.modules_);
  std::swap(entry_, other.entry_);
  return *this;
}

LoadedPlan::~LoadedPlan() {
  if (modules_ != nullptr) kiln_modules_unload(modules_, nullptr);
  if (bundle_ != nullptr) kiln_bundle_close(bundle_, nullptr);
}

absl::Status LoadedPlan::Find(uint64_t m) {
  kiln_error_t error = {};
  return RuntimeStatus(
      kiln_entry_find(modules_, name_.c_str(), m, &entry_, &error), error);
}

absl::StatusOr<uint64_t> LoadedPlan::ArenaBytes() const {
  uint64_t bytes = 0;
  kiln_error_t error = {};
  RETURN_IF_ERROR(RuntimeStatus(
      kiln_entry_arena_size(entry_, &bytes, nullptr, &error), error));
  return bytes;
}

absl::Status LoadedPlan::Launch(uint32_t m, const std::vector<uint64_t>& params,
                                void* arena, uint64_t arena_bytes) const {
  kiln_error_t error = {};
  const RunningLaunch running(device_->watch());
  return RuntimeStatus(kiln_launch(modules_, entry_, m, params.data(),
                                   params.size() * sizeof(uint64_t), arena,
                                   arena_bytes, device_->stream(), &error),
                       error);
}

}  // namespace kiln
