#include "tuner/qualification.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "compiler/base/check.h"
#include "compiler/base/status_macros.h"
#include "compiler/spec/json_reader.h"

namespace kiln {
namespace {

constexpr absl::string_view kSchema = "kiln.qualification/1";

absl::StatusOr<std::string> TextOf(const JsonNode& object,
                                   absl::string_view key,
                                   absl::string_view file) {
  const JsonNode* value = object.Find(key);
  if (value == nullptr || value->kind != JsonNode::Kind::kString) {
    return JsonError(file, object, absl::StrCat("\"", key, "\" is no string"));
  }
  return value->text;
}

}  // namespace

absl::StatusOr<QualificationReceipt> ParseReceipt(absl::string_view text,
                                                  absl::string_view file) {
  ASSIGN_OR_RETURN(const JsonNode root, ParseJson(text, file));
  ASSIGN_OR_RETURN(const std::string schema, TextOf(root, "schema", file));
  if (schema != kSchema) {
    return JsonError(file, root, absl::StrCat("\"schema\" is not ", kSchema));
  }
  QualificationReceipt receipt;
  ASSIGN_OR_RETURN(const std::string target, TextOf(root, "target", file));
  ASSIGN_OR_RETURN(receipt.target, ParseTarget(target));
  ASSIGN_OR_RETURN(receipt.device, TextOf(root, "device", file));
  ASSIGN_OR_RETURN(receipt.date, TextOf(root, "date", file));
  ASSIGN_OR_RETURN(receipt.not_covered, TextOf(root, "not_covered", file));
  if (receipt.not_covered.empty()) {
    return JsonError(file, root,
                     "\"not_covered\" is empty; a receipt says what its suite "
                     "does not claim");
  }
  if (const JsonNode* suite = root.Find("suite"); suite != nullptr) {
    receipt.suite.emplace();
    ASSIGN_OR_RETURN(receipt.suite->name, TextOf(*suite, "name", file));
    ASSIGN_OR_RETURN(const std::string content, TextOf(*suite, "sha256", file));
    ASSIGN_OR_RETURN(receipt.suite->content, Digest::FromHex(content));
  }
  const JsonNode* templates = root.Find("templates");
  if (templates == nullptr || templates->kind != JsonNode::Kind::kArray ||
      templates->items.empty()) {
    return JsonError(file, root, "\"templates\" is no list of templates");
  }
  for (const JsonNode& item : templates->items) {
    TemplateIdentity identity;
    ASSIGN_OR_RETURN(identity.name, TextOf(item, "name", file));
    const JsonNode* version = item.Find("version");
    if (version == nullptr || version->kind != JsonNode::Kind::kInteger ||
        version->integer < 1 || version->integer > 1000000) {
      return JsonError(file, item, "\"version\" is no template version");
    }
    identity.version = static_cast<uint32_t>(version->integer);
    ASSIGN_OR_RETURN(const std::string sources, TextOf(item, "sources", file));
    ASSIGN_OR_RETURN(identity.sources, Digest::FromHex(sources));
    receipt.templates.push_back(std::move(identity));
  }
  return receipt;
}

const std::vector<QualificationReceipt>& Receipts() {
  static const auto* const receipts = [] {
    auto* result = new std::vector<QualificationReceipt>;
    for (const auto& [name, text] : EmbeddedReceipts()) {
      absl::StatusOr<QualificationReceipt> receipt = ParseReceipt(text, name);
      KILN_CHECK(receipt.ok());
      result->push_back(*std::move(receipt));
    }
    return result;
  }();
  return *receipts;
}

const SuiteIdentity& TreeSuite() {
  static const auto* const suite = [] {
    const auto& [name, text] = EmbeddedSuite().front();
    return new SuiteIdentity{name, Sha256(text)};
  }();
  return *suite;
}

bool IsOfTreeSuite(const QualificationReceipt& receipt) {
  return !receipt.suite.has_value() ||
         receipt.suite->content == TreeSuite().content;
}

bool IsQualified(const TemplateIdentity& identity, const Target& target,
                 const std::vector<QualificationReceipt>& receipts) {
  return std::any_of(
      receipts.begin(), receipts.end(),
      [&](const QualificationReceipt& receipt) {
        return receipt.target == target && IsOfTreeSuite(receipt) &&
               std::find(receipt.templates.begin(), receipt.templates.end(),
                         identity) != receipt.templates.end();
      });
}

}  // namespace kiln
