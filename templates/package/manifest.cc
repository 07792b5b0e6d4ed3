#include "templates/package/manifest.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "compiler/base/status_macros.h"
#include "compiler/spec/grid_limits.h"
#include "compiler/spec/json_reader.h"
#include "compiler/spec/manifest.h"
#include "compiler/spec/object_reader.h"
#include "templates/fused_moe/op.h"

namespace kiln {
namespace {

constexpr absl::string_view kSchema = "kiln.package/1";

// Longest "sha256" that pin replaces, in bytes.
constexpr size_t kUnpinnedBytesMax = 256;

// Names of expressions that are no size of the op.
constexpr absl::string_view kCapacity = "capacity";
constexpr absl::string_view kProcessors = "processors";

template <typename T>
using Words = std::vector<std::pair<absl::string_view, T>>;

bool IsLower(char c) {
  return absl::ascii_islower(static_cast<unsigned char>(c));
}

bool IsDigit(char c) {
  return absl::ascii_isdigit(static_cast<unsigned char>(c));
}

bool IsAlnum(char c) {
  return absl::ascii_isalnum(static_cast<unsigned char>(c));
}

// [a-z][a-z0-9_]*
bool IsPlainWord(absl::string_view text) {
  return !text.empty() && text.size() <= kPackageNameBytesMax &&
         IsLower(text[0]) && std::all_of(text.begin(), text.end(), [](char c) {
           return IsLower(c) || IsDigit(c) || c == '_';
         });
}

// [A-Za-z_][A-Za-z0-9_]*
bool IsSymbol(absl::string_view text) {
  return !text.empty() && text.size() <= kPackagePathBytesMax &&
         !IsDigit(text[0]) && std::all_of(text.begin(), text.end(), [](char c) {
           return IsAlnum(c) || c == '_';
         });
}

// Why a path may not name a file of a package; empty when it may.
std::string WhyBadPath(absl::string_view path) {
  if (path.empty() || path.size() > kPackagePathBytesMax) {
    return absl::StrCat("must have 1..", kPackagePathBytesMax, " bytes");
  }
  for (const char c : path) {
    if (!IsAlnum(c) && c != '_' && c != '-' && c != '.' && c != '/') {
      return "may contain letters, digits and _ - . / only";
    }
  }
  for (const absl::string_view part : absl::StrSplit(path, '/')) {
    if (part.empty() || part == "." || part == "..") {
      return "must stay inside the package's folder: no \"..\", no \".\", no "
             "\"/\" at either end";
    }
  }
  if (absl::StartsWith(path, "device/")) {
    return "must not begin with device/, where Kiln's own headers are";
  }
  return path == "package.json" ? "must not be the manifest itself" : "";
}

// What the manifest of one package may name, and reading it member by member.
class Parser {
 public:
  Parser(absl::string_view file, bool pinned) : file_(file), pinned_(pinned) {}

  absl::StatusOr<PackageManifest> Run(const JsonNode& root) {
    const ObjectReader reader(file_, root, "the package");
    RETURN_IF_ERROR(reader.CheckKeys(
        {"schema", "name", "version", "op", "backend", "serves", "axes",
         "conditions", "compute_dtype", "deterministic", "numerics_axes",
         "threads", "files", "compiler", "programs", "arena", "steps"}));
    RETURN_IF_ERROR(reader.Word<bool>("schema", {{kSchema, true}}).status());
    RETURN_IF_ERROR(ParseIdentity(reader));
    RETURN_IF_ERROR(ParseServes(reader));
    RETURN_IF_ERROR(ParseAxes(reader));
    RETURN_IF_ERROR(ParseConditions(reader));
    RETURN_IF_ERROR(ParseNumerics(reader));
    RETURN_IF_ERROR(ParseThreads(reader));
    RETURN_IF_ERROR(ParseFiles(reader));
    RETURN_IF_ERROR(ParsePrograms(reader));
    RETURN_IF_ERROR(CheckEveryFileIsUsed(reader));
    RETURN_IF_ERROR(ParseArena(reader));
    RETURN_IF_ERROR(ParseSteps(reader));
    return std::move(out_);
  }

 private:
  // The items of a list of `low` to `high`; none where the key may be missing
  // and is.
  absl::StatusOr<std::vector<const JsonNode*>> List(const ObjectReader& reader,
                                                    absl::string_view key,
                                                    size_t low, size_t high) {
    std::vector<const JsonNode*> items;
    if (low == 0 && reader.Optional(key) == nullptr) return items;
    ASSIGN_OR_RETURN(const JsonNode* node,
                     reader.Required(key, JsonNode::Kind::kArray));
    if (node->items.size() < low || node->items.size() > high) {
      return reader.Refuse(key, *node,
                           absl::StrCat("must have ", low, "..", high));
    }
    for (const JsonNode& item : node->items) items.push_back(&item);
    return items;
  }

  absl::StatusOr<std::vector<std::string>> Texts(const ObjectReader& reader,
                                                 absl::string_view key,
                                                 size_t low) {
    ASSIGN_OR_RETURN(const std::vector<const JsonNode*> items,
                     List(reader, key, low, kPackageListMax));
    std::vector<std::string> texts;
    for (const JsonNode* item : items) {
      if (item->kind != JsonNode::Kind::kString) {
        return reader.Refuse(key, *item, "must be a list of strings");
      }
      if (std::find(texts.begin(), texts.end(), item->text) != texts.end()) {
        return reader.Refuse(key, *item, "stands twice");
      }
      texts.push_back(item->text);
    }
    return texts;
  }

  template <typename T>
  absl::Status WordList(const ObjectReader& reader, absl::string_view key,
                        const Words<T>& words, std::vector<T>* out) {
    ASSIGN_OR_RETURN(const std::vector<std::string> texts,
                     Texts(reader, key, 1));
    for (size_t i = 0; i < texts.size(); ++i) {
      bool known = false;
      for (const auto& [spelling, meaning] : words) {
        if (spelling != texts[i]) continue;
        out->push_back(meaning);
        known = true;
      }
      if (known) continue;
      const std::string all =
          absl::StrJoin(words, ", ", [](std::string* to, const auto& word) {
            absl::StrAppend(to, "\"", word.first, "\"");
          });
      return reader.Refuse(key, reader.Optional(key)->items[i],
                           absl::StrCat("must be one of ", all));
    }
    return absl::OkStatus();
  }

  // An expression, or a whole number.
  absl::StatusOr<Expression> ParseExpression(const JsonNode& node,
                                             absl::string_view what,
                                             bool launch) {
    std::string text;
    if (node.kind == JsonNode::Kind::kInteger) {
      text = absl::StrCat(node.integer);
    } else if (node.kind == JsonNode::Kind::kString) {
      text = node.text;
    } else {
      return JsonError(file_, node,
                       absl::StrCat(what,
                                    " must be an expression or a whole "
                                    "number, found ",
                                    JsonExcerpt(node)));
    }
    absl::StatusOr<Expression> parsed = Expression::Parse(text, names_, launch);
    RETURN_IF_ERROR(At(node, what, parsed.status()));
    return parsed;
  }

  // An expression for a size within [low, high]. One that no name can change is
  // held against them here, others are at each point.
  absl::StatusOr<Expression> ParseSize(const JsonNode& node,
                                       absl::string_view what, int64_t low,
                                       int64_t high) {
    ASSIGN_OR_RETURN(Expression size, ParseExpression(node, what, false));
    if (size.IsFixed()) {
      RETURN_IF_ERROR(At(node, what, size.Within({}, low, high).status()));
    }
    return size;
  }

  // An error about the expression at a node, with its place.
  absl::Status At(const JsonNode& node, absl::string_view what,
                  const absl::Status& status) {
    if (status.ok()) return status;
    return JsonError(file_, node, absl::StrCat(what, ": ", status.message()));
  }

  absl::Status ParseIdentity(const ObjectReader& reader) {
    ASSIGN_OR_RETURN(out_.name, reader.Text("name"));
    const std::vector<std::string> parts = absl::StrSplit(out_.name, '.');
    if (parts.size() < 2 || out_.name.size() > kPackageNameBytesMax ||
        !std::all_of(parts.begin(), parts.end(), [](const std::string& part) {
          return IsPlainWord(part);
        })) {
      return reader.Refuse(
          "name", *reader.Optional("name"),
          absl::StrCat("must be two or more words of a-z, 0-9 and _ with dots "
                       "between, such as \"acme.scalar\", of at most ",
                       kPackageNameBytesMax, " bytes"));
    }
    for (const Op op : {Op::kFusedMoe, Op::kLinear}) {
      if (parts.front() == OpName(op)) {
        return reader.Refuse(
            "name", *reader.Optional("name"),
            absl::StrCat("is Kiln's own: templates of this "
                         "build begin with ",
                         parts.front(), "; begin with a name of yours"));
      }
    }
    ASSIGN_OR_RETURN(const int64_t version,
                     reader.Integer("version", 1, 1000000));
    out_.version = static_cast<uint32_t>(version);
    ASSIGN_OR_RETURN(out_.op,
                     reader.Word<Op>("op", {{"fused_moe", Op::kFusedMoe}}));
    ASSIGN_OR_RETURN(out_.backend, reader.Word<Backend>(
                                       "backend", {{"cpu", Backend::kCpu},
                                                   {"cuda", Backend::kCuda}}));
    ASSIGN_OR_RETURN(
        out_.compute_dtype,
        reader.Word<std::string>("compute_dtype", {{"f16", "f16"},
                                                   {"bf16", "bf16"},
                                                   {"f32", "f32"},
                                                   {"f64", "f64"}}));
    ASSIGN_OR_RETURN(out_.deterministic, reader.Bool("deterministic"));
    for (const auto& [name, value] : GeometryValues({})) names_.insert(name);
    return absl::OkStatus();
  }

  absl::StatusOr<SizeRange> ParseRange(const ObjectReader& reader,
                                       absl::string_view key) {
    SizeRange range;
    const JsonNode* node = reader.Optional(key);
    if (node == nullptr) return range;
    const std::vector<JsonNode>& ends = node->items;
    if (node->kind != JsonNode::Kind::kArray || ends.size() != 2 ||
        ends[0].kind != JsonNode::Kind::kInteger ||
        ends[1].kind != JsonNode::Kind::kInteger || ends[0].integer < 1 ||
        ends[1].integer < ends[0].integer) {
      const std::string found =
          ends.size() == 2 ? absl::StrCat("[", JsonExcerpt(ends[0]), ", ",
                                          JsonExcerpt(ends[1]), "]")
                           : JsonExcerpt(*node);
      return reader.Error(
          *node, absl::StrCat("\"", key, "\" is ", found,
                              ", must be a range [low, high] of whole numbers, "
                              "1 <= low <= high; [64, 64] is 64 alone"));
    }
    range.low = ends[0].integer;
    range.high = ends[1].integer;
    return range;
  }

  absl::Status ParseServes(const ObjectReader& package) {
    ASSIGN_OR_RETURN(const JsonNode* node,
                     package.Required("serves", JsonNode::Kind::kObject));
    const ObjectReader reader(file_, *node, "\"serves\"");
    RETURN_IF_ERROR(reader.CheckKeys(
        {"recipes", "formats", "codebooks", "bits", "scales", "activations",
         "io_dtypes", "id_dtypes", "targets", "hidden", "intermediate",
         "experts", "top_k", "capacity"}));
    ServedGeometries& serves = out_.serves;
    RETURN_IF_ERROR(WordList<Recipe>(
        reader, "recipes", {{"w4a16", Recipe::kW4A16}}, &serves.recipes));
    RETURN_IF_ERROR(WordList<WeightFormat>(
        reader, "formats", {{"exl3", WeightFormat::kExl3}}, &serves.formats));
    RETURN_IF_ERROR(WordList<Codebook>(reader, "codebooks",
                                       {{"3inst", Codebook::k3Inst},
                                        {"mcg", Codebook::kMcg},
                                        {"mul1", Codebook::kMul1}},
                                       &serves.codebooks));
    RETURN_IF_ERROR(WordList<bool>(reader, "scales",
                                   {{"shared", true}, {"per_expert", false}},
                                   &serves.shared_scales));
    RETURN_IF_ERROR(WordList<Activation>(reader, "activations",
                                         {{"silu", Activation::kSilu}},
                                         &serves.activations));
    RETURN_IF_ERROR(WordList<DType>(
        reader, "io_dtypes", {{"bf16", DType::kBf16}, {"f16", DType::kF16}},
        &serves.io_dtypes));
    RETURN_IF_ERROR(WordList<DType>(
        reader, "id_dtypes", {{"i32", DType::kI32}, {"i64", DType::kI64}},
        &serves.id_dtypes));
    ASSIGN_OR_RETURN(const std::vector<const JsonNode*> bits,
                     List(reader, "bits", 1, 8));
    for (const JsonNode* item : bits) {
      ASSIGN_OR_RETURN(const int64_t rate,
                       reader.IntegerOf(*item, "bits", 1, 8));
      serves.bits.push_back(rate);
    }
    ASSIGN_OR_RETURN(const std::vector<std::string> targets,
                     Texts(reader, "targets", 0));
    for (const std::string& text : targets) {
      ASSIGN_OR_RETURN(const Target target,
                       TargetOf(*reader.Optional("targets"), text));
      serves.targets.push_back(target);
    }
    for (const char* name : {"hidden", "intermediate", "experts", "top_k"}) {
      ASSIGN_OR_RETURN(const SizeRange range, ParseRange(reader, name));
      if (range != SizeRange()) serves.sizes.push_back({name, range});
    }
    ASSIGN_OR_RETURN(serves.capacity, ParseRange(reader, "capacity"));
    return absl::OkStatus();
  }

  absl::StatusOr<Target> TargetOf(const JsonNode& node,
                                  const std::string& text) {
    const absl::StatusOr<Target> target = ParseTarget(text);
    if (!target.ok()) {
      return JsonError(file_, node, target.status().message());
    }
    if (target->backend != out_.backend) {
      return JsonError(file_, node,
                       absl::StrCat("target ", text, " is not of backend ",
                                    BackendName(out_.backend)));
    }
    return *target;
  }

  absl::Status ParseAxes(const ObjectReader& package) {
    ASSIGN_OR_RETURN(const std::vector<const JsonNode*> items,
                     List(package, "axes", 0, kPackageAxesMax));
    // "KILN_HIDDEN" and the like are taken.
    const std::string prelude = FusedMoePrelude({});
    size_t points = 1;
    for (const JsonNode* item : items) {
      const ObjectReader reader(file_, *item, "axis");
      RETURN_IF_ERROR(reader.CheckKeys({"name", "values"}));
      Axis axis;
      ASSIGN_OR_RETURN(axis.name, reader.Text("name"));
      const JsonNode& name = *reader.Optional("name");
      if (!IsPlainWord(axis.name)) {
        return reader.Refuse("name", name, "must be of a-z, 0-9 and _");
      }
      if (axis.name == "m" || axis.name == "min" || axis.name == "max" ||
          axis.name == "ceil_div" || axis.name == kCapacity ||
          axis.name == kProcessors || names_.count(axis.name) != 0 ||
          absl::StrContains(
              prelude,
              absl::StrCat("KILN_", absl::AsciiStrToUpper(axis.name), " "))) {
        return reader.Refuse("name", name,
                             "has another meaning; choose another name");
      }
      ASSIGN_OR_RETURN(const std::vector<const JsonNode*> values,
                       List(reader, "values", 1, kPackageAxisValuesMax));
      for (const JsonNode* value : values) {
        ASSIGN_OR_RETURN(const int64_t number,
                         reader.IntegerOf(*value, "values", 0, 1 << 30));
        if (std::find(axis.values.begin(), axis.values.end(), number) !=
            axis.values.end()) {
          return reader.Refuse("values", *value, "stands twice");
        }
        axis.values.push_back(number);
      }
      points *= axis.values.size();
      if (points > kPackagePointsMax) {
        return reader.Error(
            *item, absl::StrCat("the axes have more than ", kPackagePointsMax,
                                " points together"));
      }
      names_.insert(axis.name);
      out_.axes.push_back(std::move(axis));
    }
    // From here on, expressions are of a plan: one capacity on one device.
    names_.insert(std::string(kCapacity));
    names_.insert(std::string(kProcessors));
    return absl::OkStatus();
  }

  absl::Status ParseConditions(const ObjectReader& reader) {
    ASSIGN_OR_RETURN(const std::vector<std::string> texts,
                     Texts(reader, "conditions", 0));
    for (size_t i = 0; i < texts.size(); ++i) {
      const JsonNode& node = reader.Optional("conditions")->items[i];
      absl::StatusOr<Condition> parsed = Condition::Parse(texts[i], names_);
      RETURN_IF_ERROR(At(node, "\"conditions\"", parsed.status()));
      if (parsed->IsFixed() && !*parsed->Holds({})) {
        return JsonError(file_, node,
                         absl::StrCat("\"conditions\": ", JsonQuote(texts[i]),
                                      " never holds, so that no point is "
                                      "legal; compare something with a name"));
      }
      out_.conditions.push_back(*std::move(parsed));
    }
    return absl::OkStatus();
  }

  bool IsAxis(absl::string_view name) const {
    return std::any_of(out_.axes.begin(), out_.axes.end(),
                       [&](const Axis& axis) { return axis.name == name; });
  }

  // Without the key every axis counts.
  absl::Status ParseNumerics(const ObjectReader& reader) {
    if (reader.Optional("numerics_axes") == nullptr) {
      for (const Axis& axis : out_.axes) {
        out_.numerics_axes.push_back(axis.name);
      }
    } else {
      ASSIGN_OR_RETURN(out_.numerics_axes, Texts(reader, "numerics_axes", 0));
    }
    for (const std::string& name : out_.numerics_axes) {
      if (!IsAxis(name)) {
        return reader.Refuse("numerics_axes", *reader.Optional("numerics_axes"),
                             absl::StrCat(JsonQuote(name), " is no axis"));
      }
    }
    std::sort(out_.numerics_axes.begin(), out_.numerics_axes.end());
    return absl::OkStatus();
  }

  absl::Status ParseThreads(const ObjectReader& reader) {
    const JsonNode* node = reader.Optional("threads");
    if (out_.backend == Backend::kCuda) {
      return node == nullptr
                 ? absl::OkStatus()
                 : reader.Refuse("threads", *node, "is for CPU packages only");
    }
    if (node == nullptr) {
      ASSIGN_OR_RETURN(out_.threads,
                       Expression::Parse(kProcessors, names_, false));
      return absl::OkStatus();
    }
    ASSIGN_OR_RETURN(out_.threads,
                     ParseSize(*node, "\"threads\"", 1, kPackageThreadsMax));
    return absl::OkStatus();
  }

  absl::Status ParseFiles(const ObjectReader& package) {
    ASSIGN_OR_RETURN(const std::vector<const JsonNode*> items,
                     List(package, "files", 1, kPackageFilesMax));
    for (const JsonNode* item : items) {
      const ObjectReader reader(file_, *item, "file");
      RETURN_IF_ERROR(reader.CheckKeys({"path", "sha256"}));
      PackageFile file;
      ASSIGN_OR_RETURN(file.path, reader.Text("path"));
      if (const std::string why = WhyBadPath(file.path); !why.empty()) {
        return reader.Refuse("path", *reader.Optional("path"), why);
      }
      for (const PackageFile& other : out_.files) {
        if (other.path == file.path) {
          return reader.Refuse("path", *reader.Optional("path"),
                               "stands twice");
        }
      }
      if (reader.Optional("sha256") == nullptr) {
        return reader.Error(
            *item, absl::StrCat("file ", JsonQuote(file.path),
                                " lacks the key \"sha256\"; write \"sha256\": "
                                "\"\" and run kiln package pin"));
      }
      ASSIGN_OR_RETURN(const std::string text, reader.Text("sha256"));
      const JsonNode& value = *reader.Optional("sha256");
      const absl::StatusOr<Digest> digest = Digest::FromHex(text);
      if (digest.ok()) {
        file.sha256 = *digest;
      } else if (pinned_) {
        return reader.Refuse("sha256", value,
                             "must be 64 hexadecimal digits; kiln package pin "
                             "fills them in");
      } else if (text.size() > kUnpinnedBytesMax ||
                 !std::all_of(text.begin(), text.end(), IsAlnum)) {
        return reader.Refuse("sha256", value,
                             "must be \"\" or hexadecimal digits");
      }
      file.line = value.line;
      file.column = value.column;
      file.written_bytes = text.size();
      out_.files.push_back(std::move(file));
    }
    return absl::OkStatus();
  }

  // The path of a file that the package pins.
  absl::StatusOr<std::string> PinnedPath(const ObjectReader& reader,
                                         absl::string_view key) {
    ASSIGN_OR_RETURN(const std::string path, reader.Text(key));
    for (const PackageFile& file : out_.files) {
      if (file.path == path) return path;
    }
    return reader.Refuse(key, *reader.Optional(key),
                         "is not one of the package's \"files\"");
  }

  absl::Status ParsePrograms(const ObjectReader& package) {
    if (package.Optional("compiler") != nullptr) {
      ASSIGN_OR_RETURN(
          out_.own_compiler,
          package.Word<bool>("compiler", {{"kiln", false}, {"own", true}}));
    }
    ASSIGN_OR_RETURN(const std::vector<const JsonNode*> items,
                     List(package, "programs", 1, kPackageListMax));
    for (const JsonNode* item : items) {
      const ObjectReader reader(file_, *item, "program");
      PackageProgram program;
      if (out_.own_compiler) {
        RETURN_IF_ERROR(reader.CheckKeys({"binaries", "entries"}));
        RETURN_IF_ERROR(ParseBinaries(reader, &program));
      } else {
        RETURN_IF_ERROR(reader.CheckKeys({"source", "entries"}));
        ASSIGN_OR_RETURN(program.source, PinnedPath(reader, "source"));
      }
      ASSIGN_OR_RETURN(program.entries, Texts(reader, "entries", 1));
      for (const std::string& entry : program.entries) {
        if (!IsSymbol(entry)) {
          return reader.Refuse(
              "entries", *reader.Optional("entries"),
              absl::StrCat(JsonQuote(entry), " is no name of a C function"));
        }
      }
      std::sort(program.entries.begin(), program.entries.end());
      out_.programs.push_back(std::move(program));
    }
    if (out_.own_compiler) return CheckEveryPointHasABinary(package);
    return absl::OkStatus();
  }

  absl::Status ParseBinaries(const ObjectReader& package_program,
                             PackageProgram* program) {
    ASSIGN_OR_RETURN(const std::vector<const JsonNode*> items,
                     List(package_program, "binaries", 1, kPackageFilesMax));
    for (const JsonNode* item : items) {
      const ObjectReader reader(file_, *item, "binary");
      RETURN_IF_ERROR(reader.CheckKeys({"file", "target", "assignment"}));
      PackageBinary binary;
      ASSIGN_OR_RETURN(binary.file, PinnedPath(reader, "file"));
      ASSIGN_OR_RETURN(const std::string target, reader.Text("target"));
      ASSIGN_OR_RETURN(binary.target,
                       TargetOf(*reader.Optional("target"), target));
      if (const JsonNode* node = reader.Optional("assignment")) {
        if (node->kind != JsonNode::Kind::kObject) {
          return reader.Refuse("assignment", *node,
                               "must be an object of axes and values");
        }
        for (const JsonNode::Member& member : node->members) {
          if (!IsAxis(member.key)) {
            return JsonError(
                file_, member.line, member.column,
                absl::StrCat(JsonQuote(member.key), " is no axis"));
          }
          ASSIGN_OR_RETURN(
              binary.assignment[member.key],
              reader.IntegerOf(member.value, member.key, 0, 1 << 30));
        }
      }
      program->binaries.push_back(std::move(binary));
    }
    return absl::OkStatus();
  }

  // For each target that any binary is for: exactly one in every program.
  absl::Status CheckEveryPointHasABinary(const ObjectReader& package) {
    std::set<Target> targets;
    for (const PackageProgram& program : out_.programs) {
      for (const PackageBinary& binary : program.binaries) {
        targets.insert(binary.target);
      }
    }
    const JsonNode& place = *package.Optional("programs");
    for (const Target& target : targets) {
      for (const Assignment& point : PackagePoints(out_.axes)) {
        for (size_t i = 0; i < out_.programs.size(); ++i) {
          const size_t found = CountBinaries(out_.programs[i], target, point);
          if (found == 1) continue;
          return JsonError(
              file_, place.items[i],
              absl::StrCat("program ", i, " has ", found, " binaries for ",
                           target.ToString(), " at {", AssignmentText(point),
                           "}, must have one for every point of the axes"));
        }
      }
    }
    return absl::OkStatus();
  }

  static size_t CountBinaries(const PackageProgram& program,
                              const Target& target, const Assignment& point) {
    return static_cast<size_t>(
        std::count_if(program.binaries.begin(), program.binaries.end(),
                      [&](const PackageBinary& binary) {
                        return binary.target == target &&
                               std::includes(point.begin(), point.end(),
                                             binary.assignment.begin(),
                                             binary.assignment.end());
                      }));
  }

  // A binary that no program names was meant for something. Sources may have
  // headers.
  absl::Status CheckEveryFileIsUsed(const ObjectReader& package) {
    if (!out_.own_compiler) return absl::OkStatus();
    std::set<std::string> used;
    for (const PackageProgram& program : out_.programs) {
      for (const PackageBinary& binary : program.binaries) {
        used.insert(binary.file);
      }
    }
    for (size_t i = 0; i < out_.files.size(); ++i) {
      if (used.count(out_.files[i].path) != 0) continue;
      return JsonError(file_, package.Optional("files")->items[i],
                       absl::StrCat("no program has the binary ",
                                    JsonQuote(out_.files[i].path)));
    }
    return absl::OkStatus();
  }

  absl::Status ParseArena(const ObjectReader& package) {
    ASSIGN_OR_RETURN(const std::vector<const JsonNode*> items,
                     List(package, "arena", 0, kPackageListMax));
    for (const JsonNode* item : items) {
      const ObjectReader reader(file_, *item, "arena slice");
      RETURN_IF_ERROR(reader.CheckKeys({"name", "bytes"}));
      PackageSlice slice;
      ASSIGN_OR_RETURN(slice.name, reader.Text("name"));
      if (!IsPlainWord(slice.name)) {
        return reader.Refuse("name", *reader.Optional("name"),
                             "must be of a-z, 0-9 and _");
      }
      for (const PackageSlice& other : out_.arena) {
        if (other.name == slice.name) {
          return reader.Refuse("name", *reader.Optional("name"),
                               "stands twice");
        }
      }
      if (reader.Optional("bytes") == nullptr) {
        return reader.Error(*item, "arena slice lacks the key \"bytes\"");
      }
      ASSIGN_OR_RETURN(slice.bytes,
                       ParseSize(*reader.Optional("bytes"), "\"bytes\"", 0,
                                 kPackageSliceBytesMax));
      out_.arena.push_back(std::move(slice));
    }
    return absl::OkStatus();
  }

  absl::Status ParseSteps(const ObjectReader& package) {
    ASSIGN_OR_RETURN(const std::vector<const JsonNode*> items,
                     List(package, "steps", 1, kPackageListMax));
    for (const JsonNode* item : items) {
      ASSIGN_OR_RETURN(PackageStep step, ParseStep(*item));
      out_.steps.push_back(std::move(step));
    }
    return absl::OkStatus();
  }

  absl::StatusOr<PackageStep> ParseStep(const JsonNode& node) {
    const ObjectReader reader(file_, node, "step");
    const bool cuda = out_.backend == Backend::kCuda;
    RETURN_IF_ERROR(
        cuda ? reader.CheckKeys({"label", "program", "entry", "grid", "block",
                                 "shared_bytes", "args"})
             : reader.CheckKeys({"label", "program", "entry", "grid", "args"}));
    PackageStep step;
    ASSIGN_OR_RETURN(step.label, reader.Text("label"));
    if (!IsPlainWord(step.label)) {
      return reader.Refuse("label", *reader.Optional("label"),
                           "must be of a-z, 0-9 and _");
    }
    if (reader.Optional("program") != nullptr) {
      ASSIGN_OR_RETURN(
          const int64_t program,
          reader.Integer("program", 0,
                         static_cast<int64_t>(out_.programs.size()) - 1));
      step.program = static_cast<size_t>(program);
    }
    ASSIGN_OR_RETURN(step.entry, reader.Text("entry"));
    const std::vector<std::string>& entries =
        out_.programs[step.program].entries;
    if (!std::binary_search(entries.begin(), entries.end(), step.entry)) {
      return reader.Refuse("entry", *reader.Optional("entry"),
                           absl::StrCat("program ", step.program, " has ",
                                        absl::StrJoin(entries, ", ")));
    }
    RETURN_IF_ERROR(ParseGrid(reader, &step.grid));
    if (cuda) {
      RETURN_IF_ERROR(ParseBlock(reader, &step.block));
      if (const JsonNode* shared = reader.Optional("shared_bytes")) {
        ASSIGN_OR_RETURN(
            step.shared_bytes,
            ParseSize(*shared, "\"shared_bytes\"", 0, kPackageSharedBytesMax));
      }
    }
    ASSIGN_OR_RETURN(const std::vector<const JsonNode*> args,
                     List(reader, "args", 1, kPackageListMax));
    for (const JsonNode* arg : args) {
      ASSIGN_OR_RETURN(PackageArg parsed, ParseArg(*arg));
      step.args.push_back(std::move(parsed));
    }
    return step;
  }

  // One to three dimensions, each by `parse`; those left out are 1.
  template <typename ParseOne>
  absl::Status ParseDims(const ObjectReader& reader, absl::string_view key,
                         const ParseOne& parse,
                         std::array<Expression, 3>* out) {
    ASSIGN_OR_RETURN(const std::vector<const JsonNode*> dims,
                     List(reader, key, 1, 3));
    for (size_t d = 0; d < out->size(); ++d) {
      if (d < dims.size()) {
        ASSIGN_OR_RETURN((*out)[d], parse(*dims[d]));
      } else {
        ASSIGN_OR_RETURN((*out)[d], Expression::Parse("1", names_, false));
      }
    }
    return absl::OkStatus();
  }

  absl::Status ParseGrid(const ObjectReader& reader,
                         std::array<Expression, 3>* out) {
    constexpr absl::string_view kGrid = "\"grid\"";
    const auto tokens_max = static_cast<uint32_t>(
        std::min<int64_t>(out_.serves.capacity.high, kCapacityMax));
    const auto tokens_min = static_cast<uint32_t>(
        std::clamp<int64_t>(out_.serves.capacity.low, 1, kCapacityMax));
    size_t d = 0;  // the dimension
    const auto parse = [&](const JsonNode& node) -> absl::StatusOr<Expression> {
      const uint64_t blocks_max = kGridMax[d++];
      ASSIGN_OR_RETURN(Expression dim, ParseExpression(node, kGrid, true));
      if (!dim.IsFixed()) return dim;
      const absl::StatusOr<LaunchDim> launch = dim.Dim({});
      RETURN_IF_ERROR(At(node, kGrid, launch.status()));
      // Fewer tokens give no more blocks.
      if (launch->Evaluate(tokens_max) == 0) {
        return JsonError(
            file_, node,
            absl::StrCat(kGrid, ": expression ", JsonQuote(dim.text()),
                         " is 0 for all m, must be at least 1"));
      }
      const uint64_t least = launch->Evaluate(tokens_min);
      if (least <= blocks_max) return dim;
      return JsonError(
          file_, node,
          absl::StrCat(kGrid, ": expression ", JsonQuote(dim.text()), " is ",
                       least, " at the smallest capacity, ", tokens_min,
                       "; dimension ", d - 1, " has at most ", blocks_max,
                       " blocks"));
    };
    return ParseDims(reader, "grid", parse, out);
  }

  absl::Status ParseBlock(const ObjectReader& reader,
                          std::array<Expression, 3>* out) {
    int64_t threads = 1;  // of the dimensions that are fixed
    const auto parse = [&](const JsonNode& node) -> absl::StatusOr<Expression> {
      ASSIGN_OR_RETURN(Expression dim,
                       ParseSize(node, "\"block\"", 1, kPackageThreadsMax));
      if (dim.IsFixed()) {
        ASSIGN_OR_RETURN(const int64_t n, dim.Number({}));
        threads *= n;
      }
      if (threads <= kPackageThreadsMax) return dim;
      return JsonError(
          file_, node,
          absl::StrCat("\"block\": ", threads, " threads exceed the limit of ",
                       kPackageThreadsMax));
    };
    return ParseDims(reader, "block", parse, out);
  }

  // "tokens", "param:NAME", "arena:NAME", "u32:EXPRESSION", "u64:EXPRESSION".
  absl::StatusOr<PackageArg> ParseArg(const JsonNode& node) {
    constexpr absl::string_view kRule =
        "an argument must be \"tokens\", \"param:NAME\", \"arena:NAME\", "
        "\"u32:EXPRESSION\" or \"u64:EXPRESSION\", found ";
    PackageArg arg;
    if (node.kind != JsonNode::Kind::kString) {
      return JsonError(file_, node, absl::StrCat(kRule, JsonExcerpt(node)));
    }
    if (node.text == "tokens") return arg;
    const std::pair<absl::string_view, absl::string_view> parts =
        absl::StrSplit(node.text, absl::MaxSplits(':', 1));
    const auto& [kind, rest] = parts;
    std::vector<std::string> known;
    if (kind == "param") {
      arg.kind = ArgKind::kParam;
      for (const ParamDecl& param : FusedMoeParams({})) {
        known.push_back(param.name);
      }
    } else if (kind == "arena") {
      arg.kind = ArgKind::kArena;
      for (const PackageSlice& slice : out_.arena) known.push_back(slice.name);
    } else if (kind == "u32" || kind == "u64") {
      const bool is_u32 = kind == "u32";
      arg.kind = is_u32 ? ArgKind::kU32 : ArgKind::kU64;
      JsonNode value = node;
      value.text = std::string(rest);
      ASSIGN_OR_RETURN(arg.value, ParseSize(value, "argument", 0,
                                            is_u32 ? UINT32_MAX : INT64_MAX));
      return arg;
    } else {
      return JsonError(file_, node, absl::StrCat(kRule, JsonExcerpt(node)));
    }
    const auto found = std::find(known.begin(), known.end(), rest);
    if (found == known.end()) {
      return JsonError(
          file_, node,
          absl::StrCat("argument ", JsonExcerpt(node), " names no ",
                       arg.kind == ArgKind::kParam ? "parameter of the op"
                                                   : "slice of the arena",
                       "; known: ", absl::StrJoin(known, ", ")));
    }
    arg.index = static_cast<size_t>(found - known.begin());
    return arg;
  }

  absl::string_view file_;
  const bool pinned_;
  std::set<std::string> names_;  // of expressions
  PackageManifest out_;
};

absl::StatusOr<PackageManifest> Parse(absl::string_view text,
                                      absl::string_view file, bool pinned) {
  if (text.size() > kPackageManifestBytesMax) {
    return JsonError(
        file, 1, 1,
        absl::StrCat("the manifest has ", text.size(), " bytes, at most ",
                     kPackageManifestBytesMax, " are accepted"));
  }
  ASSIGN_OR_RETURN(const JsonNode root, ParseJson(text, file));
  return Parser(file, pinned).Run(root);
}

}  // namespace

ExpressionValues GeometryValues(const RequestGeometry& geometry) {
  const Bits& bits = geometry.weights.bits;
  return {
      {"hidden", geometry.hidden},   {"intermediate", geometry.intermediate},
      {"experts", geometry.experts}, {"top_k", geometry.top_k},
      {"bits_gate", bits.gate},      {"bits_up", bits.up},
      {"bits_down", bits.down}};
}

absl::StatusOr<PackageManifest> ParsePackageManifest(absl::string_view text,
                                                     absl::string_view file) {
  return Parse(text, file, true);
}

absl::StatusOr<PackageManifest> ParseUnpinnedPackageManifest(
    absl::string_view text, absl::string_view file) {
  return Parse(text, file, false);
}

std::string PinPackageManifest(absl::string_view text,
                               const PackageManifest& manifest,
                               const std::vector<Digest>& digests) {
  std::vector<std::string> lines = absl::StrSplit(text, '\n');
  // From the last to the first: a line may hold several.
  for (size_t i = manifest.files.size(); i-- > 0;) {
    const PackageFile& file = manifest.files[i];
    // The column is that of the quote in front.
    lines[file.line - 1].replace(file.column, file.written_bytes,
                                 digests[i].ToHex());
  }
  return absl::StrJoin(lines, "\n");
}

std::vector<Assignment> PackagePoints(const std::vector<Axis>& axes) {
  std::vector<Assignment> points = {{}};
  for (const Axis& axis : axes) {
    std::vector<Assignment> longer;
    for (const Assignment& point : points) {
      for (const int64_t value : axis.values) {
        longer.push_back(point);
        longer.back()[axis.name] = value;
      }
    }
    points = std::move(longer);
  }
  return points;
}

}  // namespace kiln
