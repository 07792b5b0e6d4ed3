#!/usr/bin/env python3
"""Checks rules of the source tree that no compiler checks. Run as a test.

    tools/house_rules.py [ROOT]

Prints one line "path:line: what is wrong" per violation and exits 1 if there
is any. The rules:

  layering    include lines follow the dependency graph below; nothing else
  includes    some headers belong to one wrapper, or to nobody
  calls       functions that this project does not use, or only in some places
  words       nothing unfinished stays behind
  skips       a test that skips itself says why
  numbers     a table of measured numbers stands below what measured them, on
              which device, and when
  paths       no absolute path of one machine
  layout      column limits, white space, line ends, header guards, a first
              line that says what a header is for
  orphans     every source is built, every header is included
"""

import os
import re
import sys

# A box may include itself and, transitively, the boxes on its right.
BOXES = {
    "format": [],
    "runtime": ["format"],
    "base": ["format"],  # the shared SHA-256
    "spec": ["base"],
    "bundle_writer": ["spec", "format"],
    "cache": ["spec"],
    "compiler": ["spec"],
    "templates": ["spec"],
    "planner": ["templates", "spec"],
    "racer": ["templates", "bundle_writer", "spec", "runtime"],
    "prewarm": ["planner", "racer", "compiler", "cache", "bundle_writer"],
    "tools": ["prewarm"],
    "tests": ["tools"],
}

# The first pattern that matches a path names its box.
BOX_OF_PATH = [(re.compile(pattern), box) for pattern, box in [
    (r"runtime/(bundle_format\.h|bundle_root\.cc|sha256\.(h|cc))$", "format"),
    (r"runtime/", "runtime"),
    (r"compiler/base/", "base"),
    (r"compiler/spec/", "spec"),
    (r"compiler/bundle_(attributes|writer)", "bundle_writer"),
    (r"compiler/", "compiler"),
    (r"templates/", "templates"),
    (r"cache/", "cache"),
    (r"tuner/(ceilings|planner|cost_model)", "planner"),
    (r"tuner/(device|elimination|launch_watch|loaded_plan|nvml|op_bench|"
     r"plan_bench|race_schedule|racer|selection|verifier)", "racer"),
    (r"tuner/(attach|bundle_check|capacity_curve|conclusion|explain|freeze|"
     r"kept_numerics|measure_ceilings|prewarm|qualification|race_|recheck|"
     r"remote_racer|report|stored_plans)", "prewarm"),
    (r"tools/", "tools"),
    (r"tests/", "tests"),
]]

# Header pattern, the only paths that may include it, and why.
OWNED_HEADERS = [(re.compile(header), re.compile(paths), reason)
                 for header, paths, reason in [
    (r"sqlite3\.h$", r"(cache/sqlite_(db|vfs)|tests/support/fault_fs)\.cc$",
     "only cache/sqlite_db.cc and sqlite_vfs.cc see SQLite"),
    (r"xxhash\.h$", r"cache/checksum\.cc$",
     "only cache/checksum.cc sees xxHash"),
    (r"(llvm|clang|lld|llvm-c|clang-c)/", r"compiler/cc_cpu[^/]*\.cc$",
     "only compiler/cc_cpu*.cc sees LLVM"),
    (r"(cuda|cuda_[a-z0-9_]+|nvrtc|nvJitLink|cudart[^/]*)\.(h|hpp)$", r"$^",
     "the toolkit is opened at run time; a build must not need its headers"),
    (r"regex$", r"$^", "std::regex recurses on its input"),
    (r"(gtest|gmock|benchmark)/", r"tests/", "test libraries stay in tests/"),
    (r"CLI/", r"tools/", "the command line is parsed in tools/"),
    (r"(absl|nlohmann)/", r"(?!runtime/)", "the runtime needs libc only"),
]]

# Pattern in code (comments and strings removed), paths where it is allowed.
BANNED_CALLS = [(re.compile(pattern), re.compile(paths), reason)
                for pattern, paths, reason in [
    (r"\b(secure_)?getenv\s*\(", r"(tools|tests)/",
     "environment variables are read in tools/ only"),
    (r"\b(system|popen)\s*\(", r"tests/", "no shell is started"),
    (r"\bv?fork\s*\(", r"tests/", "processes are spawned, never forked"),
    (r"\bstd::(regex|random_device)\b", r"$^",
     "input or entropy must not decide time or results"),
    (r"\b(s?rand|rand_r|drand48)\s*\(", r"$^",
     "random numbers come from a seed that is a parameter"),
    (r"\b(strcpy|strcat|sprintf|gets|strtok|tmpnam|mktemp)\s*\(", r"$^",
     "unbounded or racy C function"),
    (r"\busing\s+namespace\b", r"$^", "using namespace"),
]]

BANNED_CMAKE = [(re.compile(pattern, re.IGNORECASE), reason)
                for pattern, reason in [
    (r"\bfile\s*\(\s*GLOB", "sources are listed, not globbed"),
    (r"^\s*(include_directories|add_definitions|link_directories)\s*\(",
     "settings belong to a target"),
    (r"find_package\s*\(\s*CUDA", "a build must not need the CUDA toolkit"),
]]

# ctest -V and receipts show the reason.
SKIP_WITHOUT_REASON = re.compile(
    r"\bGTEST_SKIP\s*\(\s*\)(?!\s*<<)|"
    r"\bskipTest\(\s*(f?([\"'])\2)?\s*\)|"
    r"@unittest\.skip\s*$|"
    r"@unittest\.skip(If|Unless)?\([^()]*?(f?([\"'])\5)\s*\)", re.MULTILINE)

# A cell that was measured, as a rule: a fraction, or a number with a unit.
MEASURED_CELL = re.compile(
    r"[<>~]?[\d,]*(\.\d+( ?(us|ms|ns|s|x|%|[GTM]?B/s|[GT]FLOP/s))?|"
    r"\d ?(us|ms|ns|s|x|%|[GTM]?B/s|[GT]FLOP/s))( each)?")
MEASURED_CELLS_MIN = 3  # in a table of measured numbers
# What its section must have said by then.
ORIGINS = [(re.compile(pattern), what) for pattern, what in [
    (r"\b20\d\d-\d\d(-\d\d)?\b", "a date, 2026-11-30 or 2026-11"),
    (r"\b(H[12]00|GPU|EPYC|Xeon|Ryzen|Core|processor)\b",
     "a device by its name"),
    (r"`[^`]*(\bkiln |_harness\b|_bench\b|_test\b|\btools/|\btests/)[^`]*`",
     "a command or program in backticks"),
]]

LEFTOVERS = re.compile(
    r"\b(TODO|FIXME|XXX|HACK|WIP)\b|"
    r"\b([Pp]laceholder|PLACEHOLDER|[Ss]tub(bed)?|STUB|[Ww]orkplace)\b|"
    r"^(<{7}|={7}|>{7})( |$)")
MACHINE_PATH = re.compile(r"(?<![\w.$}/*-])/(work|home|root|tmp|Users|mnt)(?=[/\s\"'`,;:)]|$)")

CPP = (".h", ".cc", ".c", ".cu", ".inc")
SCRIPTS = (".py", ".sh", ".cmake")
FOLDERS = ["cache", "compiler", "runtime", "templates", "tests", "tools",
           "tuner", ".ci"]
# Made elsewhere, or made by tests on purpose.
SKIPPED = ("tests/data/", "tests/golden/", "tests/fuzz/corpus/",
           "tests/qualification/")
# This file names what it forbids, and its test breaks every rule.
EXEMPT_FROM_WORDS = ("tools/house_rules.py", "tests/tools/house_rules_test.py")

# Libraries whose headers are written in quotes.
EXTERNAL = ("absl/", "clang/", "gmock/", "gtest/", "lld/", "llvm/", "nlohmann/")

INCLUDE = re.compile(r'^\s*#\s*include\s*(?:"([^"]+)"|<([^>]+)>)')
RAW_STRING = re.compile(r'R"([^\s()\\]{0,16})\((.*?)\)\1"', re.DOTALL)
STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)*\'')


def closure(box):
    seen = set()
    todo = [box]
    while todo:
        for below in BOXES[todo.pop()]:
            if below not in seen:
                seen.add(below)
                todo.append(below)
    return seen


ALLOWED = {box: closure(box) | {box} for box in BOXES}


def box_of(path):
    for pattern, box in BOX_OF_PATH:
        if pattern.match(path):
            return box
    return None


def without_raw_strings(text):
    return RAW_STRING.sub(lambda m: '""' + "\n" * m.group().count("\n"), text)


def code_lines(text):
    """Lines with comments and the contents of strings blanked out."""
    text = without_raw_strings(text)
    text = STRING.sub(lambda m: '""' + "\n" * m.group().count("\n"), text)
    text = re.sub(r"/\*.*?\*/", lambda m: "\n" * m.group().count("\n"), text,
                  flags=re.DOTALL)
    return re.sub(r"//[^\n]*", "", text).split("\n")


# Virtual names, or how they begin, of headers that kernels of fused_moe over
# TrellisMX and QSRT weights share.
MOE_HEADERS = ("fused_moe/mx_", "fused_moe/code_", "fused_moe/cpu_",
               "fused_moe/situ.h", "fused_moe/sqg_", "formats/npk_law.h")


class Tree:
    """The files of the source tree, read once."""

    def __init__(self, root):
        self.root = root
        self.texts = {}
        self.violations = []
        names = [n for n in sorted(os.listdir(root))
                 if os.path.isfile(os.path.join(root, n))]
        for name in names:
            if name.endswith((".txt", ".json", ".md")):
                self.read(name)
        for folder in FOLDERS:
            for at, folders, files in os.walk(os.path.join(root, folder)):
                folders[:] = sorted(f for f in folders if f != "__pycache__")
                for name in sorted(files):
                    path = os.path.relpath(os.path.join(at, name), root)
                    if not path.startswith(SKIPPED):
                        self.read(path)

    def read(self, path):
        try:
            with open(os.path.join(self.root, path), encoding="utf-8",
                      newline="") as handle:
                self.texts[path] = handle.read()
        except UnicodeDecodeError:
            self.complain(path, 1, "is not UTF-8 text")

    def complain(self, path, line, what):
        self.violations.append((path, line, what))

    def check(self):
        cpp = [p for p in self.texts if p.endswith(CPP)]
        for path, text in self.texts.items():
            self.check_layout(path, text)
            self.check_words(path, text)
            self.check_skips(path, text)
            if path.endswith(".md"):
                self.check_numbers(path, text)
        for path in cpp:
            self.check_includes(path)
            self.check_calls(path)
            if path.endswith(".h"):
                self.check_header(path)
        for path in self.texts:
            if path.endswith(("CMakeLists.txt", ".cmake")):
                self.check_cmake(path)
        self.check_orphans(cpp)
        return sorted(self.violations)

    # Layering.

    def resolve(self, path, include):
        """The file that a quoted include names, or None."""
        if include in self.texts:
            return include
        # Device headers have the virtual name "device/x.h" for every compiler,
        # what CPU or CUDA kernels share "cpu/x.h" or "cuda/x.h", and what
        # kernels of fused_moe share those of MOE_HEADERS.
        if include.startswith(("device/", "cpu/", "cuda/", *MOE_HEADERS)):
            return "templates/" + include
        return None

    def check_includes(self, path):
        box = box_of(path)
        if box is None:
            self.complain(path, 1, "belongs to no box: add it to BOX_OF_PATH "
                          "in tools/house_rules.py")
            return
        kernel = ()  # virtual folders that code for a device may include from
        if re.match(r"templates/fused_moe/(mx|qsrt)_cpu\.cc$|"
                    r"templates/fused_moe/(code_row|mx_(block|boundary|fragment|scales|"
                    r"vector|warp)|cpu_(operand|routes)|situ|"
                    r"sqg_(fragment|table|vector))\.h$|"
                    r"templates/formats/npk_law\.h$", path):
            kernel = ("device/", *MOE_HEADERS)
        elif re.match(r"templates/fused_moe/(mx|qsrt)_(cuda|qmma)\.cu$|"
                      r"templates/fused_moe/code_product\.h$", path):
            kernel = ("cuda/", "device/", *MOE_HEADERS)
        elif re.match(r"templates/device/|tools/examples/package_[^/]+/", path):
            kernel = ("device/",)
        elif re.match(r"templates/[^/]+/[^/]*\.cu$|templates/cuda/", path):
            kernel = ("cuda/", "device/")
        elif re.match(r"templates/[^/]+/cpu[^/]*\.cc$|"
                      r"templates/cpu/trellis_product\.h$", path):
            kernel = ("cpu/", "device/")
        lines = without_raw_strings(self.texts[path]).split("\n")
        for number, line in enumerate(lines, 1):
            match = INCLUDE.match(line)
            if not match:
                continue
            quoted, angled = match.groups()
            name = quoted or angled
            for header, owners, reason in OWNED_HEADERS:
                if header.match(name) and not owners.match(path):
                    self.complain(path, number,
                                  f"must not include {name}: {reason}")
            if kernel and (angled or not quoted.startswith(kernel)):
                self.complain(path, number, f"device code includes {name}: only "
                              f"headers under {' and '.join(kernel)} exist for "
                              "its compilers")
            if not quoted or quoted.startswith(EXTERNAL):
                continue
            target = self.resolve(path, quoted)
            if target is None:
                self.complain(path, number, f"{quoted} is not a path from the "
                              "root of the tree")
                continue
            target_box = box_of(target)
            if target_box is not None and target_box not in ALLOWED[box]:
                self.complain(path, number, f"{box} must not depend on "
                              f"{target_box} ({quoted})")

    # Calls, words, layout.

    def check_calls(self, path):
        for number, line in enumerate(code_lines(self.texts[path]), 1):
            for pattern, allowed, reason in BANNED_CALLS:
                match = pattern.search(line)
                if match and not allowed.match(path):
                    self.complain(path, number,
                                  f"{match.group().strip()}: {reason}")

    def check_words(self, path, text):
        if path in EXEMPT_FROM_WORDS:
            return
        documentation = path.endswith(".md")
        for number, line in enumerate(text.split("\n"), 1):
            match = LEFTOVERS.search(line)
            if match:
                self.complain(path, number, f"leftover: {match.group().strip()}")
            match = MACHINE_PATH.search(line)
            if match and not documentation:
                self.complain(path, number, "absolute path of a machine: "
                              f"{match.group()}")

    def check_skips(self, path, text):
        if path in EXEMPT_FROM_WORDS or not path.endswith(CPP + (".py",)):
            return
        for match in SKIP_WITHOUT_REASON.finditer(text):
            self.complain(path, text[:match.start()].count("\n") + 1,
                          f"{match.group().strip()}: a skip says why")

    def check_numbers(self, path, text):
        section, table = [], []
        for number, line in enumerate([*text.split("\n"), ""], 1):
            if line.startswith("|"):
                table.append(line)
                continue
            cells = [cell.strip() for row in table for cell in row.split("|")]
            if sum(MEASURED_CELL.fullmatch(cell) is not None
                   for cell in cells) >= MEASURED_CELLS_MIN:
                for pattern, what in ORIGINS:
                    if not pattern.search("\n".join(section)):
                        self.complain(path, number - len(table), "a table of "
                                      "measured numbers; its section must say "
                                      f"{what} before it")
            table = []
            section = [line] if line.startswith("#") else [*section, line]

    def check_layout(self, path, text):
        cpp = path.endswith(CPP)
        script = path.endswith(SCRIPTS) or text.startswith("#!")
        columns = 80 if cpp else 100 if script else None
        if "\r" in text:
            self.complain(path, text[:text.index("\r")].count("\n") + 1,
                          "carriage return")
        if text and not text.endswith("\n") and not path.endswith(".json"):
            self.complain(path, text.count("\n") + 1, "no line end at the end")
        if not cpp and not script:
            return
        for number, line in enumerate(text.split("\n"), 1):
            if line != line.rstrip():
                self.complain(path, number, "white space at the end of the line")
            if cpp and "\t" in line:
                self.complain(path, number, "tab")
            if len(line) > columns and not re.match(
                    r"\s*(#\s*(include|ifndef|define|endif)\b|//.*https?://)", line):
                self.complain(path, number, f"{len(line)} columns, at most "
                              f"{columns}")

    def check_header(self, path):
        text = self.texts[path]
        if not text.startswith(("//", "/*")):
            self.complain(path, 1, "starts without a comment that says what it "
                          "is for")
        # The virtual name again: device/x.h for templates/device/x.h.
        name = re.sub(r"^templates/device/", "device/", path)
        guard = "KILN_" + re.sub(r"[^A-Z0-9]", "_", name.upper()) + "_"
        match = re.search(r"^#ifndef (\w+)\n#define (\w+)\n", text, re.MULTILINE)
        if not match or match.groups() != (guard, guard):
            self.complain(path, 1, f"header guard is not {guard}")
        elif not re.search(r"^#endif */[/*] *" + guard, text, re.MULTILINE):
            self.complain(path, text.count("\n"), "the last #endif does not "
                          f"name {guard}")

    def check_cmake(self, path):
        for number, line in enumerate(self.texts[path].split("\n"), 1):
            code = line.split("#", 1)[0]
            for pattern, reason in BANNED_CMAKE:
                if pattern.search(code):
                    self.complain(path, number, f"{code.strip()}: {reason}")

    # Orphans.

    def check_orphans(self, cpp):
        built = set()
        for path, text in self.texts.items():
            if not path.endswith("CMakeLists.txt"):
                continue
            folder = os.path.dirname(path)
            text = re.sub(r"#[^\n]*", "", text)
            words = [re.sub(r"\$\{CMAKE(_CURRENT)?_SOURCE_DIR\}/", "", word)
                     for word in re.findall(r"[^\s()\"]+", text)]
            for word in words:
                built.add(os.path.normpath(os.path.join(folder, word)))
                built.add(os.path.normpath(word))
            # foreach(unit IN ITEMS a b) ... SRCS ${unit}_test.cc.
            for word in words:
                variable = re.search(r"\$\{(\w+)\}", word)
                if variable:
                    for other in words:
                        built.add(os.path.normpath(os.path.join(
                            folder, word.replace(variable.group(), other))))
        included = set()
        for path in cpp:
            for line in self.texts[path].split("\n"):
                match = INCLUDE.match(line)
                if match and match.group(1):
                    target = self.resolve(path, match.group(1))
                    if target is not None and target != path:
                        included.add(target)
        for path in cpp:
            if path in built or path in included:
                continue
            if path.endswith((".h", ".inc")):
                # The public header is for engines; nobody here must use it.
                if path != "runtime/kiln.h":
                    self.complain(path, 1, "no file includes this header")
            else:
                self.complain(path, 1, "no CMakeLists.txt builds this file")


def main():
    root = sys.argv[1] if len(sys.argv) > 1 else os.path.dirname(
        os.path.dirname(os.path.abspath(__file__)))
    tree = Tree(root)
    if not any(path.endswith(CPP) for path in tree.texts):
        sys.exit(f"{root}: no source files found")
    violations = tree.check()
    for path, line, what in violations:
        print(f"{path}:{line}: {what}")
    if violations:
        sys.exit(1)
    print(f"{len(tree.texts)} files keep the rules")


if __name__ == "__main__":
    main()
