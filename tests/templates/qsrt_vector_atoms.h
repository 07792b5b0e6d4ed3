// The extent of atoms of a vector file qsrt_atoms_v1*.json.

#ifndef KILN_TESTS_TEMPLATES_QSRT_VECTOR_ATOMS_H_
#define KILN_TESTS_TEMPLATES_QSRT_VECTOR_ATOMS_H_

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "nlohmann/json.hpp"
#include "templates/formats/qsrt_extent.h"

namespace kiln::testing {

// Holds what its extent points into, so it stays where it is.
class QsrtVectorAtoms {
 public:
  // e: "extent" of the file.
  explicit QsrtVectorAtoms(const nlohmann::json& e)
      : decoded_(absl::Base64Unescape(e.at("payload_base64").get<std::string>(),
                                      &payload_)) {
    for (const nlohmann::json& expert : e.at("experts")) {
      ids_.push_back(expert.at("expert_id"));
      codes_.push_back(expert.at("format_code"));
    }
    extent_.hidden = e.at("H");
    // The file has no tables of the hidden side: ones.
    for (int64_t i = 0; i < extent_.hidden; ++i) {
      table_ += std::string("\0\x3C", 2);
    }
    const auto bytes = [](const std::string& text) {
      return std::span<const uint8_t>(
          reinterpret_cast<const uint8_t*>(text.data()), text.size());
    };
    extent_.atom_slots = e.at("atom_slots");
    extent_.experts_per_layer = e.at("experts_per_layer");
    extent_.rotation_multiplier = e.at("rotation_multiplier");
    extent_.layer = e.at("layer_index");
    extent_.first_slot = e.at("first_atom_slot");
    extent_.payload = bytes(payload_);
    extent_.row_stride =
        ids_.size() * e.at("atom_bundle_bytes").get<uint64_t>();
    extent_.expert_ids = ids_;
    extent_.format_codes = codes_;
    extent_.gate_suh = extent_.up_suh = extent_.down_svh = bytes(table_);
  }

  QsrtVectorAtoms(const QsrtVectorAtoms&) = delete;
  QsrtVectorAtoms& operator=(const QsrtVectorAtoms&) = delete;

  // Whether the payload was base64.
  bool decoded() const { return decoded_; }

  const std::vector<int64_t>& ids() const { return ids_; }

  const QsrtExtent& extent() const { return extent_; }

 private:
  std::string payload_;
  bool decoded_;
  std::string table_;
  std::vector<int64_t> ids_, codes_;
  QsrtExtent extent_;
};

}  // namespace kiln::testing

#endif  // KILN_TESTS_TEMPLATES_QSRT_VECTOR_ATOMS_H_
