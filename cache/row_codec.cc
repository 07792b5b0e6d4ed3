#include "cache/row_codec.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "compiler/base/check.h"
#include "compiler/base/digest.h"
#include "compiler/base/status_macros.h"

namespace kiln {
namespace {

constexpr size_t kSampleBytes = 12;

// SQLite keeps neither the sign of zero nor the payload of a NaN.
int64_t RealBits(double value) {
  if (std::isnan(value)) return -1;
  if (value == 0) return 0;
  return std::bit_cast<int64_t>(value);
}

void Encode(const ProvenanceColumns& row, CanonicalEncoder* encoder) {
  encoder->Number("created_unix", row.created_unix)
      .Text("host_name", row.host_name)
      .Text("device_name", row.device_name)
      .Text("tool_version", row.tool_version);
}

// Take what they name from the front of `text`, or return false. By hand, since
// every look-up of a program comes by here.
bool Take(char c, absl::string_view* text) {
  if (text->empty() || text->front() != c) return false;
  text->remove_prefix(1);
  return true;
}

bool TakeNumber(absl::string_view* text, uint32_t* value) {
  uint64_t sum = 0;
  size_t digits = 0;
  for (; digits < text->size(); ++digits) {
    const char c = (*text)[digits];
    if (c < '0' || c > '9') break;
    sum = sum * 10 + static_cast<uint64_t>(c - '0');
    if (sum > std::numeric_limits<uint32_t>::max()) return false;
  }
  text->remove_prefix(digits);
  *value = static_cast<uint32_t>(sum);
  return digits > 0;
}

bool TakeParams(absl::string_view* text, std::vector<KernelParam>* params) {
  if (Take('-', text)) return true;
  do {
    KernelParam& param = params->emplace_back();
    if (!TakeNumber(text, &param.offset) || !Take(':', text) ||
        !TakeNumber(text, &param.bytes)) {
      return false;
    }
  } while (Take(',', text));
  return true;
}

bool ParseKernel(absl::string_view line, Kernel* kernel) {
  const size_t entry = line.find(' ');
  if (entry == 0 || entry == absl::string_view::npos) return false;
  kernel->entry = std::string(line.substr(0, entry));
  line.remove_prefix(entry);
  for (uint32_t* field :
       {&kernel->registers, &kernel->static_shared_bytes, &kernel->local_bytes,
        &kernel->max_threads, &kernel->param_bytes}) {
    if (!Take(' ', &line) || !TakeNumber(&line, field)) return false;
  }
  return Take(' ', &line) && TakeParams(&line, &kernel->params) && line.empty();
}

}  // namespace

std::string EncodeRow(const ProgramColumns& row) {
  CanonicalEncoder encoder("kiln.cache.program/1");
  encoder.Text("key", row.key)
      .Text("target", row.target)
      .Text("toolchain_name", row.toolchain_name)
      .Text("toolchain_version", row.toolchain_version)
      .Text("toolchain_content", row.toolchain_content)
      .Text("binary_digest", row.binary_digest)
      .Text("kernels", row.kernels)
      .Text("log", row.log)
      .Number("compile_seconds", RealBits(row.compile_seconds));
  Encode(row.provenance, &encoder);
  return std::move(encoder).bytes();
}

std::string EncodeRow(const RejectColumns& row) {
  CanonicalEncoder encoder("kiln.cache.reject/1");
  encoder.Text("key", row.key)
      .Text("preimage", row.preimage)
      .Text("stage", row.stage)
      .Text("reason", row.reason)
      .Text("log", row.log);
  Encode(row.provenance, &encoder);
  return std::move(encoder).bytes();
}

std::string EncodeRow(const PlanColumns& row) {
  CanonicalEncoder encoder("kiln.cache.plan/1");
  encoder.Text("key", row.key)
      .Text("plan", row.plan)
      .Number("measurements", row.measurements);
  Encode(row.provenance, &encoder);
  return std::move(encoder).bytes();
}

std::string EncodeRow(const MeasurementColumns& row) {
  CanonicalEncoder encoder("kiln.cache.measurement/1");
  encoder.Text("plan_key", row.plan_key)
      .Number("position", row.position)
      .Text("label", row.label)
      .Text("candidate", row.candidate)
      .Text("verdict", row.verdict)
      .Text("reason", row.reason)
      .Number("worst_error", RealBits(row.worst_error))
      .Number("regret", RealBits(row.regret))
      .Text("numerics_class", row.numerics_class)
      .Number("arena_bytes", row.arena_bytes)
      .Number("registers", row.registers)
      .Text("samples", row.samples);
  return std::move(encoder).bytes();
}

std::string EncodeRow(const PlanUseColumns& row) {
  return CanonicalEncoder("kiln.cache.plan_use/1")
      .Text("plan_key", row.plan_key)
      .Number("used_unix", row.used_unix)
      .bytes();
}

std::string EncodeRow(const MemoColumns& row) {
  CanonicalEncoder encoder("kiln.cache.memo/1");
  encoder.Text("key", row.key).Text("value", row.value);
  return std::move(encoder).bytes();
}

std::string EncodeRow(const LeaseColumns& row) {
  CanonicalEncoder encoder("kiln.cache.lease/1");
  encoder.Text("key", row.key)
      .Text("boot", row.boot)
      .Number("pid", row.pid)
      .Number("start_ticks", row.start_ticks)
      .Number("token", row.token)
      .Number("expires_unix", row.expires_unix);
  return std::move(encoder).bytes();
}

absl::StatusOr<std::string> KernelsToText(const std::vector<Kernel>& kernels) {
  std::string text;
  for (const Kernel& kernel : kernels) {
    if (kernel.entry.empty()) {
      return absl::InvalidArgumentError("kernel entry is empty");
    }
    for (const char c : kernel.entry) {
      if (c <= ' ' || c == 0x7F) {
        return absl::InvalidArgumentError(
            absl::StrCat("kernel entry \"", kernel.entry,
                         "\" has a space or control character"));
      }
    }
    absl::StrAppend(&text, kernel.entry, " ", kernel.registers, " ",
                    kernel.static_shared_bytes, " ", kernel.local_bytes, " ",
                    kernel.max_threads, " ", kernel.param_bytes, " ");
    if (kernel.params.empty()) text += "-";
    for (size_t i = 0; i < kernel.params.size(); ++i) {
      absl::StrAppend(&text, i == 0 ? "" : ",", kernel.params[i].offset, ":",
                      kernel.params[i].bytes);
    }
    text += "\n";
  }
  return text;
}

absl::StatusOr<std::vector<Kernel>> KernelsFromText(absl::string_view text) {
  std::vector<Kernel> kernels;
  while (!text.empty()) {
    const size_t end = text.find('\n');
    const absl::string_view line = text.substr(0, end);
    if (end == absl::string_view::npos ||
        !ParseKernel(line, &kernels.emplace_back())) {
      return absl::DataLossError(
          absl::StrCat("kernel line is malformed: \"", line, "\""));
    }
    text.remove_prefix(end + 1);
  }
  return kernels;
}

std::string SamplesToBytes(const std::vector<Sample>& samples) {
  static_assert(std::endian::native == std::endian::little);
  std::string bytes(samples.size() * kSampleBytes, '\0');
  char* out = bytes.data();
  for (const Sample& sample : samples) {
    std::memcpy(out, &sample.block, 4);
    std::memcpy(out + 4, &sample.ns, 8);
    out += kSampleBytes;
  }
  return bytes;
}

absl::StatusOr<std::vector<Sample>> SamplesFromBytes(absl::string_view bytes) {
  if (bytes.size() % kSampleBytes != 0) {
    return absl::DataLossError(absl::StrCat("samples have ", bytes.size(),
                                            " bytes, expected a multiple of ",
                                            kSampleBytes));
  }
  std::vector<Sample> samples(bytes.size() / kSampleBytes);
  for (size_t i = 0; i < samples.size(); ++i) {
    const char* in = bytes.data() + i * kSampleBytes;
    std::memcpy(&samples[i].block, in, 4);
    std::memcpy(&samples[i].ns, in + 4, 8);
  }
  return samples;
}

}  // namespace kiln
