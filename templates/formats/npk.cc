#include "templates/formats/npk.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "compiler/base/as_text.h"
#include "compiler/base/check.h"
#include "compiler/base/file_util.h"
#include "compiler/base/status_macros.h"
#include "runtime/sha256.h"
#include "templates/formats/coupled_signs.h"
#include "templates/formats/npk_header.h"

namespace kiln {
namespace {

constexpr uint16_t kPlusOne = 0x3C00;   // binary16
constexpr uint16_t kMinusOne = 0xBC00;  // binary16
constexpr uint16_t kExponent = 0x7C00;  // all ones: infinity or NaN
constexpr uint8_t kReservedScale = 255;

// The shape's indices of an element: "[3, 17, 2]".
std::string IndexOf(const SafetensorsTensor& tensor, uint64_t element) {
  std::array<uint64_t, kSafetensorsRankMax> index{};
  for (size_t d = tensor.rank; d-- > 0;) {
    index[d] = element % tensor.dims[d];
    element /= tensor.dims[d];
  }
  return absl::StrCat(
      "[",
      absl::StrJoin(index.begin(),
                    index.begin() + static_cast<ptrdiff_t>(tensor.rank), ", "),
      "]");
}

// Rule V8.
absl::Status CheckUe8m0(const SafetensorsTensor& tensor,
                        std::span<const uint8_t> bytes) {
  const void* found = std::memchr(bytes.data(), kReservedScale, bytes.size());
  if (found == nullptr) return absl::OkStatus();
  const auto at =
      static_cast<uint64_t>(static_cast<const uint8_t*>(found) - bytes.data());
  return NpkRuleError(
      8, absl::StrCat("tensor ", QuoteTensorName(tensor.name),
                      " has the scale 255 at ", IndexOf(tensor, at),
                      ", must be within 0..254"));
}

// Rule V9.
absl::Status CheckHalves(const SafetensorsTensor& tensor,
                         std::span<const uint8_t> bytes) {
  for (size_t i = 0; i < bytes.size(); i += 2) {
    uint16_t bits = 0;
    std::memcpy(&bits, &bytes[i], sizeof(bits));
    if ((bits & kExponent) != kExponent && (bits & 0x7FFF) != 0) continue;
    return NpkRuleError(
        9,
        absl::StrCat("tensor ", QuoteTensorName(tensor.name),
                     " has the binary16 bits 0x", absl::Hex(bits), " at ",
                     IndexOf(tensor, i / 2), ", must be finite and not zero"));
  }
  return absl::OkStatus();
}

// A read-only mapping of a whole file that is no link. Errors name the path.
absl::StatusOr<std::pair<std::shared_ptr<const void>, std::span<const uint8_t>>>
MapFile(const std::string& path) {
  const int fd =
      open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW);
  if (fd < 0 && errno == ELOOP) {
    return Annotate(
        NpkRuleError(3, "is a symbolic link, must be the file itself"), path);
  }
  if (fd < 0) return ErrnoStatus(errno, "cannot open", path);
  struct stat info;
  const bool known = fstat(fd, &info) == 0;
  if (!known || !S_ISREG(info.st_mode) || info.st_size == 0) {
    close(fd);
    return Annotate(NpkRuleError(3, "must be a regular file that is not empty"),
                    path);
  }
  const auto size = static_cast<size_t>(info.st_size);
  void* map = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd, 0);
  const int map_errno = errno;
  close(fd);
  if (map == MAP_FAILED) return ErrnoStatus(map_errno, "cannot map", path);
  return std::pair(
      std::shared_ptr<const void>(
          map, [size](const void* p) { munmap(const_cast<void*>(p), size); }),
      std::span<const uint8_t>(static_cast<const uint8_t*>(map), size));
}

}  // namespace

absl::StatusOr<NpkSidecar> NpkSidecar::Parse(std::span<const uint8_t> file,
                                             const NpkOpenOptions& options) {
  NpkSidecar sidecar;
  RETURN_IF_ERROR(sidecar.CheckHeader(file));
  RETURN_IF_ERROR(sidecar.CheckPins(options.pins));
  if (options.values) {
    RETURN_IF_ERROR(sidecar.CheckValues(file, options.pins.file));
  }
  return sidecar;
}

absl::StatusOr<NpkSidecar> NpkSidecar::Open(const std::string& path,
                                            const NpkOpenOptions& options) {
  ASSIGN_OR_RETURN(auto mapped, MapFile(path));
  absl::StatusOr<NpkSidecar> sidecar = Parse(mapped.second, options);
  if (!sidecar.ok()) return Annotate(sidecar.status(), path);
  sidecar->mapping_ = std::move(mapped.first);
  return sidecar;
}

absl::Status NpkSidecar::CheckHeader(std::span<const uint8_t> file) {
  ASSIGN_OR_RETURN(const NpkHeader header, ParseNpkHeader(file));
  metadata_ = header.metadata;
  digests_ = header.digests;
  signs_ = header.signs;
  const std::vector<SafetensorsTensor> tensors = NpkTensorsOf(metadata_);
  for (size_t i = 0; i < tensors.size(); ++i) {
    tensors_[i] =
        file.subspan(header.data_begin + tensors[i].begin, tensors[i].bytes());
  }
  return absl::OkStatus();
}

absl::Status NpkSidecar::CheckPins(const NpkPins& pins) const {
  const auto differs = [](absl::string_view what, const std::string& found,
                          const std::string& wanted) {
    return NpkRuleError(12, absl::StrCat("\"", what, "\" is ", found,
                                         ", the caller wants ", wanted));
  };
  if (pins.layer.has_value() && *pins.layer != metadata_.layer) {
    return differs("layer", absl::StrCat(metadata_.layer),
                   absl::StrCat(*pins.layer));
  }
  if (pins.rank.has_value() && *pins.rank != metadata_.rank) {
    return differs("rank", absl::StrCat(metadata_.rank),
                   absl::StrCat(*pins.rank));
  }
  if (pins.bits.has_value() && *pins.bits != metadata_.bits) {
    return differs("bits", absl::StrCat(metadata_.bits),
                   absl::StrCat(*pins.bits));
  }
  if (pins.design.has_value() && *pins.design != metadata_.design) {
    return differs("design_sha256", metadata_.design.ToHex(),
                   pins.design->ToHex());
  }
  if (pins.encoder.has_value() && *pins.encoder != metadata_.encoder) {
    return differs("encoder_sha256", metadata_.encoder.ToHex(),
                   pins.encoder->ToHex());
  }
  return absl::OkStatus();
}

absl::Status CheckNpkValues(
    const NpkMetadata& metadata,
    std::span<const std::span<const uint8_t>, kNpkTensors> tensors) {
  const std::vector<SafetensorsTensor> places = NpkTensorsOf(metadata);
  for (const NpkTensor which : {NpkTensor::kW13Scale, NpkTensor::kW2Scale}) {
    const auto i = static_cast<size_t>(which);
    RETURN_IF_ERROR(CheckUe8m0(places[i], tensors[i]));
  }
  if (metadata.boundary == NpkBoundary::kIdentity) return absl::OkStatus();
  for (const NpkTensor which :
       {NpkTensor::kGateUpSuh, NpkTensor::kInnerScales, NpkTensor::kDownSvh}) {
    const auto i = static_cast<size_t>(which);
    RETURN_IF_ERROR(CheckHalves(places[i], tensors[i]));
  }
  const std::span<const uint8_t> draws =
      tensors[static_cast<size_t>(NpkTensor::kSignDraw)];
  for (size_t e = 0; e < draws.size(); ++e) {
    if (draws[e] <= kSignDrawMax) continue;
    return NpkRuleError(10, absl::StrCat("tensor \"sign_draw\" has ", draws[e],
                                         " at [", e, "], must be within 0..7"));
  }
  return absl::OkStatus();
}

absl::Status NpkSidecar::CheckValues(std::span<const uint8_t> file,
                                     const std::optional<Digest>& pin) const {
  RETURN_IF_ERROR(CheckNpkValues(metadata_, tensors_));
  const std::vector<SafetensorsTensor> tensors = NpkTensorsOf(metadata_);
  if (metadata_.boundary == NpkBoundary::kCoupled) {
    const std::span<const uint8_t> draws = tensor(NpkTensor::kSignDraw);
    if (const Digest found = NpkSignsDigest(metadata_, draws);
        found != signs_) {
      return NpkRuleError(
          10, absl::StrCat("\"sha256.signs\" is ", signs_.ToHex(),
                           ", the regenerated signs have ", found.ToHex()));
    }
  }
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Digest found = Sha256(AsText(tensors_[i]));
    if (found == digests_[i]) continue;
    return NpkRuleError(
        11, absl::StrCat("tensor ", QuoteTensorName(tensors[i].name),
                         " has the SHA-256 ", found.ToHex(),
                         ", the metadata say ", digests_[i].ToHex()));
  }
  if (!pin.has_value()) return absl::OkStatus();
  const Digest found = Sha256(AsText(file));
  if (found == *pin) return absl::OkStatus();
  return NpkRuleError(11,
                      absl::StrCat("the file has the SHA-256 ", found.ToHex(),
                                   ", the caller wants ", pin->ToHex()));
}

absl::Status CheckNpkRanks(std::span<const NpkSidecar* const> ranks) {
  if (ranks.empty()) return NpkRuleError(14, "there is no rank");
  const NpkSidecar& first = *ranks[0];
  const NpkMetadata& wanted = first.metadata();
  std::vector<bool> seen(ranks.size(), false);
  for (const NpkSidecar* other : ranks) {
    const NpkMetadata& found = other->metadata();
    NpkMetadata alike = found;
    alike.rank = wanted.rank;
    if (alike != wanted) {
      // The header names the field: the two differ in one of its lines.
      const std::array<Digest, kNpkTensors> none{};
      const size_t count = NpkTensorsOf(wanted).size();
      const size_t other_count = NpkTensorsOf(alike).size();
      const std::string a = MakeNpkHead(wanted, {none.data(), count}, Digest());
      const std::string b =
          MakeNpkHead(alike, {none.data(), other_count}, Digest());
      const auto at = static_cast<size_t>(
          std::mismatch(a.begin() + 8, a.end(), b.begin() + 8, b.end()).first -
          a.begin());
      const auto field = [at](const std::string& text) {
        const size_t begin = text.rfind(",\"", at);
        return text.substr(begin + 1, text.find(',', at) - begin - 1);
      };
      return NpkRuleError(
          14, absl::StrCat("rank ", found.rank, " has ", field(b), ", rank ",
                           wanted.rank, " has ", field(a)));
    }
    const auto rank = static_cast<size_t>(found.rank);
    if (rank >= ranks.size() || seen[rank] ||
        ranks.size() != static_cast<size_t>(wanted.world_size)) {
      return NpkRuleError(
          14, absl::StrCat("there are ", ranks.size(), " files, rank ",
                           found.rank, " among them, must be one of each of ",
                           wanted.world_size, " ranks"));
    }
    seen[rank] = true;
    for (const NpkTensor which :
         {NpkTensor::kGateUpSuh, NpkTensor::kDownSvh, NpkTensor::kSignDraw}) {
      const std::span<const uint8_t> a = first.tensor(which);
      const std::span<const uint8_t> b = other->tensor(which);
      if (std::equal(a.begin(), a.end(), b.begin(), b.end())) continue;
      const SafetensorsTensor tensor =
          NpkTensorsOf(wanted)[static_cast<size_t>(which)];
      const auto at = static_cast<uint64_t>(
          std::mismatch(a.begin(), a.end(), b.begin()).first - a.begin());
      return NpkRuleError(
          14,
          absl::StrCat(
              "tensor ", QuoteTensorName(tensor.name), " of rank ", found.rank,
              " differs from that of rank ", wanted.rank, " at ",
              IndexOf(tensor, at / (StoredTypeBits(tensor.type) / 8))));
    }
  }
  return absl::OkStatus();
}

std::vector<uint16_t> NpkSigns(const NpkMetadata& metadata, int draw) {
  KILN_CHECK(draw >= 0 && draw <= kSignDrawMax);
  const auto local = static_cast<size_t>(metadata.intermediate);
  const auto first = static_cast<size_t>(metadata.first_atom() * kNpkAtom);
  std::vector<uint16_t> signs(3 * local, kPlusOne);
  if (draw == 0) return signs;
  // Sequences are drawn at their global length and cut.
  const auto global = static_cast<size_t>(metadata.intermediate_global);
  size_t at = 0;
  for (const SignAxis axis : {SignAxis::kPre, SignAxis::kPost}) {
    const size_t width = axis == SignAxis::kPre ? 2 : 1;
    const std::vector<int8_t> drawn =
        CoupledSigns(static_cast<uint8_t>(draw), axis, width * global);
    for (size_t i = 0; i < width * local; ++i) {
      signs[at++] = drawn[width * first + i] > 0 ? kPlusOne : kMinusOne;
    }
  }
  return signs;
}

Digest NpkSignsDigest(const NpkMetadata& metadata,
                      std::span<const uint8_t> draws) {
  std::string bytes;
  for (int draw = 0; draw <= kSignDrawMax; ++draw) {
    if (std::find(draws.begin(), draws.end(), draw) == draws.end()) continue;
    absl::StrAppend(&bytes, AsText(NpkSigns(metadata, draw)));
  }
  return Sha256(bytes);
}

std::string NpkFileName(int64_t layer, int64_t rank, int64_t world_size) {
  return absl::StrFormat("npk1-layer-%05d-rank-%d-of-%d.safetensors", layer,
                         rank, world_size);
}

absl::Status WriteNpkSidecar(const std::string& path,
                             const NpkMetadata& metadata,
                             const NpkPieces& pieces) {
  const std::vector<SafetensorsTensor> tensors = NpkTensorsOf(metadata);
  std::vector<Digest> digests;
  std::string draws;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto which = static_cast<NpkTensor>(i);
    kiln_sha256_t hash;
    kiln_sha256_init(&hash);
    uint64_t bytes = 0;
    RETURN_IF_ERROR(
        pieces(which, [&](std::span<const uint8_t> piece) -> absl::Status {
          bytes += piece.size();
          kiln_sha256_update(&hash, piece.data(), piece.size());
          if (which == NpkTensor::kSignDraw)
            absl::StrAppend(&draws, AsText(piece));
          return absl::OkStatus();
        }));
    if (bytes != tensors[i].bytes()) {
      return absl::InvalidArgumentError(
          absl::StrCat("tensor ", QuoteTensorName(tensors[i].name), " has ",
                       bytes, " bytes, must have ", tensors[i].bytes()));
    }
    kiln_sha256_final(&hash, digests.emplace_back().bytes.data());
  }
  const Digest signs = NpkSignsDigest(
      metadata, {reinterpret_cast<const uint8_t*>(draws.data()), draws.size()});
  PendingFile file(path);
  RETURN_IF_ERROR(file.Append(MakeNpkHead(metadata, digests, signs)));
  for (size_t i = 0; i < tensors.size(); ++i) {
    RETURN_IF_ERROR(
        pieces(static_cast<NpkTensor>(i), [&](std::span<const uint8_t> piece) {
          return file.Append(AsText(piece));
        }));
  }
  return file.Commit();
}

}  // namespace kiln
