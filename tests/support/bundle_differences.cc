#include "tests/support/bundle_differences.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "runtime/bundle_format.h"
#include "runtime/kiln.h"
#include "tests/support/tiny_bundle.h"

namespace kiln::testing {
namespace {

Plan& P(BundleSection* section) { return section->entries[0].plans[2]; }

Program* Edit(BundleSection* section, size_t index) {
  auto program = std::make_shared<Program>(*section->programs[index]);
  Program* edited = program.get();
  section->programs[index] = program;
  return edited;
}

}  // namespace

const std::vector<BundleDifference>& BundleDifferences() {
  static const auto& differences = *new std::vector<BundleDifference>{
      {"driver_version_min",
       [](BundleSection* s) { s->driver_version_min = 12050; }},
      {"flags",
       [](BundleSection* s) { P(s).evidence.state = PlanState::kPredicted; }},
      {"flags",
       [](BundleSection* s) { s->unqualified_templates = {"fused_moe.cuda"}; }},
      {"entries", [](BundleSection* s) { s->entries.pop_back(); }},
      {"name", [](BundleSection* s) { s->entries[0].name = "zoe"; }},
      {"geometry", [](BundleSection* s) { s->entries[0].geometry.top_k = 3; }},
      {"geometry",
       [](BundleSection* s) { s->entries[0].geometry.weights.bits.up = 1; }},
      {"m_min", [](BundleSection* s) { P(s).interval.m_min = 6; }},
      {"capacity", [](BundleSection* s) { P(s).interval.m_max = 65; }},
      {"plans",
       [](BundleSection* s) {
         s->entries[0].plans.erase(s->entries[0].plans.begin());
       }},
      {"arena_bytes", [](BundleSection* s) { P(s).body.arena.bytes += 256; }},
      {"template_version",
       [](BundleSection* s) { ++P(s).body.template_version; }},
      {"template_name",
       [](BundleSection* s) { P(s).body.template_name = "x"; }},
      {"label", [](BundleSection* s) { P(s).body.assignment["tile"] = 9; }},
      {"numerics_class",
       [](BundleSection* s) { P(s).body.numerics_class = "x"; }},
      {"tolerance", [](BundleSection* s) { P(s).body.tolerance = 0.02000001; }},
      {"deterministic",
       [](BundleSection* s) { P(s).body.deterministic = false; }},
      {"overlapped", [](BundleSection* s) { P(s).body.overlapped = true; }},
      {"median_ns",
       [](BundleSection* s) { P(s).evidence.median_ns = 1250.25; }},
      {"default_median_ns",
       [](BundleSection* s) { P(s).evidence.default_median_ns = 1; }},
      {"noise_floor", [](BundleSection* s) { P(s).evidence.noise_floor = 1; }},
      {"worst_error",
       [](BundleSection* s) { P(s).evidence.worst_error = 0.00110000001; }},
      {"samples", [](BundleSection* s) { ++P(s).evidence.samples; }},
      {"candidates", [](BundleSection* s) { ++P(s).evidence.candidates; }},
      {"parameter 1, name",
       [](BundleSection* s) { P(s).body.params[1].name = "y"; }},
      {"parameter 1, dtype",
       [](BundleSection* s) { P(s).body.params[1].dtype = "y"; }},
      {"parameter 1, shape",
       [](BundleSection* s) { P(s).body.params[1].shape = "y"; }},
      {"parameter 1, output",
       [](BundleSection* s) { P(s).body.params[1].output = false; }},
      {"bytes_per_token",
       [](BundleSection* s) { s->entries[0].buffers[1].bytes_per_token += 4; }},
      {"element_bytes",
       [](BundleSection* s) { s->entries[0].buffers[0].element_bytes = 4; }},
      {"buffer bytes",
       [](BundleSection* s) { s->entries[0].buffers[0].bytes = 2; }},
      {"fill a", [](BundleSection* s) { s->entries[0].buffers[0].a = 1; }},
      {"fill b", [](BundleSection* s) { s->entries[0].buffers[0].b = 1; }},
      {"golden digest",
       [](BundleSection* s) {
         s->entries[0].golden[P(s).interval] = Sha256("other");
       }},
      {"arena slice 1, name",
       [](BundleSection* s) { P(s).body.arena.slices[1].name = "y"; }},
      {"arena slice 1, offset",
       [](BundleSection* s) { P(s).body.arena.slices[1].offset += 256; }},
      {"arena slice 1, bytes",
       [](BundleSection* s) { --P(s).body.arena.slices[1].bytes; }},
      {"steps", [](BundleSection* s) { P(s).body.steps.pop_back(); }},
      {"step 1, label",
       [](BundleSection* s) { P(s).body.steps[1].label = "y"; }},
      {"step 1, kernel",
       [](BundleSection* s) { P(s).body.steps[1].entry = "y"; }},
      {"step 1, program",
       [](BundleSection* s) { P(s).body.steps[1].program = 0; }},
      {"step 1, grid 0 term 1 add",
       [](BundleSection* s) { ++P(s).body.steps[1].grid[0].b.add; }},
      {"step 1, grid 0 term 0 mul",
       [](BundleSection* s) { ++P(s).body.steps[1].grid[0].a.mul; }},
      {"step 1, grid 2 term 0 div",
       [](BundleSection* s) { ++P(s).body.steps[1].grid[2].a.div; }},
      {"step 1, block 1",
       [](BundleSection* s) { ++P(s).body.steps[1].block[1]; }},
      {"step 0, dynamic_shared_bytes",
       [](BundleSection* s) { ++P(s).body.steps[0].dynamic_shared_bytes; }},
      {"step 0, arguments",
       [](BundleSection* s) { P(s).body.steps[0].args.pop_back(); }},
      {"argument 3, value",
       [](BundleSection* s) { ++P(s).body.steps[0].args[3].value; }},
      {"argument 0, kind",
       [](BundleSection* s) { P(s).body.steps[0].args[0] = Arg::Arena(0); }},
      {"binary", [](BundleSection* s) { Edit(s, 0)->binary += 'x'; }},
      {"binary digest",
       [](BundleSection* s) { Edit(s, 0)->binary_digest = Sha256("x"); }},
      {"toolchain",
       [](BundleSection* s) { Edit(s, 0)->toolchain.version = "13.1"; }},
      {"toolchain digest",
       [](BundleSection* s) { Edit(s, 0)->toolchain.content = Sha256("x"); }},
      {"kernels",
       [](BundleSection* s) {
         Program* program = Edit(s, 0);
         program->kernels.push_back(program->kernels[0]);
       }},
      {"kernel fc1, registers",
       [](BundleSection* s) { ++Edit(s, 0)->kernels[0].registers; }},
      {"kernel fc1, local_bytes",
       [](BundleSection* s) { ++Edit(s, 0)->kernels[0].local_bytes; }},
      {"kernel fc1, static_shared_bytes",
       [](BundleSection* s) { ++Edit(s, 0)->kernels[0].static_shared_bytes; }},
      {"kernel fc1, max_threads",
       [](BundleSection* s) { ++Edit(s, 0)->kernels[0].max_threads; }},
      {"kernel fc1, param_bytes",
       [](BundleSection* s) { ++Edit(s, 0)->kernels[0].param_bytes; }},
      {"kernel fc1, parameter offset",
       [](BundleSection* s) { ++Edit(s, 0)->kernels[0].params[2].offset; }},
      {"kernel fc1, parameter bytes",
       [](BundleSection* s) { ++Edit(s, 0)->kernels[0].params[2].bytes; }},
  };
  return differences;
}

namespace {

bool IsAccepted(const std::string& bytes) {
  kiln_bundle_t* bundle = nullptr;
  const kiln_status_t status = kiln_bundle_open_memory(
      bytes.data(), bytes.size(), nullptr, &bundle, nullptr);
  kiln_bundle_close(bundle, nullptr);
  return status == KILN_STATUS_OK;
}

}  // namespace

void ForEachAcceptedChange(
    const std::string& bytes,
    const std::function<void(const std::string& changed, uint32_t table,
                             size_t offset)>& visit) {
  kiln_format_header_t header;
  std::memcpy(&header, bytes.data(), sizeof(header));
  const kiln_format_table_t& strings = header.tables[KILN_FORMAT_TABLE_STRINGS];
  std::vector<kiln_format_text_t> texts;
  for (uint32_t at = 0; at < strings.count;) {
    const auto length =
        static_cast<uint32_t>(std::strlen(bytes.data() + strings.offset + at));
    texts.push_back({.offset = at, .bytes = length});
    at += length + 1;
  }
  const auto consider = [&](std::string changed, uint32_t table,
                            size_t offset) {
    if (changed == bytes) return;
    RepairRoot(&changed);
    if (IsAccepted(changed)) visit(changed, table, offset);
  };
  for (uint32_t table = 0; table < KILN_FORMAT_TABLE_COUNT; ++table) {
    const kiln_format_table_t& place = header.tables[table];
    const size_t end = place.offset + size_t{place.count} * place.record_bytes;
    for (size_t at = place.offset; at < end; ++at) {
      for (const int change : {0x01, 0x40}) {
        std::string changed = bytes;
        changed[at] = static_cast<char>(changed[at] ^ change);
        consider(std::move(changed), table, at);
      }
    }
    if (table == KILN_FORMAT_TABLE_STRINGS) continue;
    // Texts lie at multiples of 4; what looks like one is taken for one.
    for (size_t at = place.offset; at + sizeof(kiln_format_text_t) <= end;
         at += 4) {
      kiln_format_text_t current;
      std::memcpy(&current, &bytes[at], sizeof(current));
      const auto is_current = [&](const kiln_format_text_t& text) {
        return text.offset == current.offset && text.bytes == current.bytes;
      };
      if (std::none_of(texts.begin(), texts.end(), is_current)) continue;
      // Not the same ones everywhere: all of them take minutes.
      for (size_t i = at / 4 % 7; i < texts.size(); i += 7) {
        std::string changed = bytes;
        std::memcpy(&changed[at], &texts[i], sizeof(texts[i]));
        consider(std::move(changed), table, at);
      }
    }
  }
}

}  // namespace kiln::testing
