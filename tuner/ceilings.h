// Ceilings: what a device can do at best, as `kiln doctor --measure` found it,
// and the floors that follow for a piece of work. Pure values.

#ifndef KILN_TUNER_CEILINGS_H_
#define KILN_TUNER_CEILINGS_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "compiler/base/digest.h"
#include "compiler/spec/device_profile.h"
#include "compiler/spec/plan.h"
#include "compiler/spec/request.h"

namespace kiln {

// A codebook and the bits per weight.
using TrellisRate = std::pair<Codebook, int>;

// How decoding and multiplying compare with reading, in steps of a third of an
// octave.
struct BalanceSteps {
  double decode = 0;
  double mma = 0;

  bool operator==(const BalanceSteps&) const = default;
};

struct Ceilings {
  double read_bytes_per_s = 0;  // memory, streaming
  double mma_flops_per_s = 0;   // f16 operands, two per multiply and add
  // Trellis weights that the whole device decodes to f16 per second.
  std::map<TrellisRate, double> decode_weights_per_s;
  // The same where the matrix unit adds up the codebook's parts; empty on
  // devices whose templates have no such mode.
  std::map<TrellisRate, double> hash_weights_per_s;
  int64_t measured_unix = 0;
  // Those of an earlier measurement, where KeepBalanceOf kept them.
  std::optional<BalanceSteps> kept_balance = std::nullopt;

  bool operator==(const Ceilings&) const = default;

  // BalanceSteps as text: "decode 5 mma 13". The cost model goes by this alone,
  // so that two measurements of one kind of device, which differ by a few
  // percent, nearly always lead to the same candidates. Empty when nothing was
  // measured.
  std::string Balance() const;

  // Keeps the balance of an earlier measurement of the device where both of its
  // ratios are within a whole step of it: next to where steps meet, the least
  // noise would move it otherwise, and every key of a plan with it.
  void KeepBalanceOf(const Ceilings& before);

  // The ceilings that Balance() stands for, with a bandwidth of 1.
  Ceilings Rounded() const;

 private:
  // Exact; absent when something was not measured.
  std::optional<BalanceSteps> Steps() const;
  // What Balance() says.
  std::optional<BalanceSteps> RoundedSteps() const;
};

// JSON with sorted keys. The inverse refuses what is not a positive finite
// number or names an unknown codebook, with DataLoss.
std::string CeilingsToJson(const Ceilings& ceilings);
absl::StatusOr<Ceilings> CeilingsFromJson(absl::string_view text);

// Under what the cache's memo keeps the ceilings of such a device: the fields
// of its measure identity. The second form takes them from the fields of a
// stored plan's key.
std::string CeilingsKey(const DeviceProfile& device);
std::string CeilingsKey(const std::vector<CanonicalField>& fields);

// Decode rate of the nearest measured number of bits; 0 when the codebook was
// not measured.
double DecodeRate(const std::map<TrellisRate, double>& rates, Codebook codebook,
                  int bits);

// What one call must do at least.
struct Work {
  double bytes = 0;           // read and written once: weights, x, out
  double flops = 0;           // of live rows
  double weights = 0;         // decoded once per active expert
  double decode_seconds = 0;  // of these
  double experts = 0;         // active
};

// Work of m tokens that use `experts` experts.
Work WorkOf(const RequestGeometry& geometry, uint32_t m, double experts,
            const Ceilings& ceilings, bool summed_by_mma);

// Least time for a piece of work. Matrix instructions hardly overlap with the
// instructions that decode, so the two add up; reading overlaps with both.
struct Floor {
  double bytes_s = 0;
  double decode_s = 0;
  double mma_s = 0;

  double Seconds() const;
  // "bytes", "decode" or "mma": the largest part of the larger side.
  absl::string_view Bound() const;
};

// 0 in a part whose ceiling was not measured.
Floor FloorOf(const Work& work, const Ceilings& ceilings);

// Whether candidates of the class let the matrix unit add up the codebook.
bool IsSummedByMma(absl::string_view numerics_class);

}  // namespace kiln

#endif  // KILN_TUNER_CEILINGS_H_
