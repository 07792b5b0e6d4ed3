#include "tests/tuner/bad_programs.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "compiler/base/check.h"

namespace kiln::testing {
namespace {

// Where the deed is done: in the first kernel on the CPU, in the product on the
// GPU.
constexpr char kCpuPlace[] = "u32 tiles = 0;\n";
constexpr char kCudaPlace[] =
    "constexpr u32 kBlocks = 2 * kInter / kChannels;\n";

// What the kernel does before its own work. Programs have no C library, so
// system calls are made by hand: getpid is 39, kill 62, exit_group 231.
std::string TextOf(Deed deed, bool cuda) {
  switch (deed) {
    case Deed::kNone:
      return "";
    case Deed::kSpins:
      // A GPU that cannot stop a kernel of a killed process must get it back.
      if (cuda) {
        return "unsigned long long spun_from, spun_to;\n"
               "asm volatile(\"mov.u64 %0, %globaltimer;\" : "
               "\"=l\"(spun_from));\n"
               "do asm volatile(\"mov.u64 %0, %globaltimer;\" : "
               "\"=l\"(spun_to));\n"
               "while (spun_to - spun_from < 20000000000ull);\n";
      }
      return "for (volatile u32 spin = 1; spin != 0;) spin = 1;\n";
    case Deed::kSegfaults:
      return "*reinterpret_cast<volatile u32*>(8ull) = 1;\n";
    case Deed::kAborts:
      return "{ long r = 39; asm volatile(\"syscall\" : \"+a\"(r) :"
             " : \"rcx\", \"r11\", \"memory\");\n"
             "asm volatile(\"syscall\" : : \"a\"(62L), \"D\"(r), \"S\"(6L)"
             " : \"rcx\", \"r11\", \"memory\"); }\n";
    case Deed::kExits:
      return "asm volatile(\"syscall\" : : \"a\"(231L), \"D\"(3L)"
             " : \"rcx\", \"r11\", \"memory\");\n";
    case Deed::kTraps:
      return cuda ? "asm volatile(\"trap;\");\n" : "__builtin_trap();\n";
    case Deed::kSegfaultsLate:
    case Deed::kSpinsLate:
      return absl::StrCat(
          "static u32 calls = 0;\nif (++calls >= 60) {\n",
          TextOf(deed == Deed::kSpinsLate ? Deed::kSpins : Deed::kSegfaults,
                 cuda),
          "}\n");
  }
  KILN_UNREACHABLE();
}

}  // namespace

SourceUnit Misbehaving(SourceUnit unit, Deed deed) {
  const bool cuda = unit.text.find(kCudaPlace) != std::string::npos;
  const std::string place = cuda ? kCudaPlace : kCpuPlace;
  const int changes = absl::StrReplaceAll(
      {{place, absl::StrCat(place, TextOf(deed, cuda))}}, &unit.text);
  KILN_CHECK(changes == 1);
  return unit;
}

}  // namespace kiln::testing
