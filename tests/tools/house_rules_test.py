#!/usr/bin/env python3
"""Breaks each rule of tools/house_rules.py in a small tree of its own."""

import importlib.util
import os
import subprocess
import sys
import tempfile
import unittest

SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)),
                      "..", "..", "tools", "house_rules.py")
sys.dont_write_bytecode = True
_SPEC = importlib.util.spec_from_file_location("house_rules", SCRIPT)
house_rules = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(house_rules)


def header(path, body=""):
    guard = "KILN_" + path.upper().replace("/", "_").replace(".", "_") + "_"
    return (f"// What {path} is for.\n\n#ifndef {guard}\n#define {guard}\n\n"
            f"{body}\n#endif  // {guard}\n")


# A tree that keeps every rule and has one pair of files per box.
CLEAN = {
    "CMakeLists.txt": "add_subdirectory(runtime)\n",
    "runtime/CMakeLists.txt": "kiln_library(SRCS sha256.cc driver.cc)\n",
    "runtime/bundle_format.h": header("runtime/bundle_format.h"),
    "runtime/sha256.h": header("runtime/sha256.h"),
    "runtime/sha256.cc": '#include "runtime/sha256.h"\n',
    "runtime/kiln.h": header("runtime/kiln.h", "#include <stdint.h>\n"),
    "runtime/driver.h": header("runtime/driver.h"),
    "runtime/driver.cc": '#include "runtime/driver.h"\n\n'
                         '#include "runtime/bundle_format.h"\n',
    "compiler/CMakeLists.txt":
        "kiln_library(SRCS base/digest.cc spec/plan.cc pool.cc\n"
        "  bundle_writer.cc cc_cpu_codegen.cc)\n",
    "compiler/base/digest.h": header("compiler/base/digest.h"),
    "compiler/base/digest.cc": '#include "compiler/base/digest.h"\n\n'
                               '#include "runtime/sha256.h"\n',
    "compiler/spec/plan.h": header("compiler/spec/plan.h",
                                   '#include "absl/status/status.h"\n'
                                   '#include "compiler/base/digest.h"\n'),
    "compiler/spec/plan.cc": '#include "compiler/spec/plan.h"\n',
    "compiler/pool.h": header("compiler/pool.h"),
    "compiler/pool.cc": '#include "compiler/pool.h"\n\n'
                        '#include "compiler/spec/plan.h"\n',
    "compiler/bundle_writer.h": header("compiler/bundle_writer.h"),
    "compiler/bundle_writer.cc": '#include "compiler/bundle_writer.h"\n\n'
                                 '#include "runtime/bundle_format.h"\n',
    "compiler/cc_cpu_codegen.cc": '#include "llvm/IR/Module.h"\n',
    "templates/CMakeLists.txt": "kiln_library(SRCS registry.cc)\n"
                                "kiln_embed(FILES op/cuda.cu op/cpu.cc)\n",
    "templates/registry.h": header("templates/registry.h"),
    "templates/registry.cc": '#include "templates/registry.h"\n',
    "templates/device/half.h": header("device/half.h"),
    "templates/op/cuda.cu": '#include "device/half.h"\n',
    "templates/op/cpu.cc": '#include "cpu/core.h"\n#include "device/half.h"\n',
    "templates/cpu/core.h": header("templates/cpu/core.h"),
    "cache/CMakeLists.txt": "kiln_library(SRCS sqlite_db.cc plan_cache.cc)\n",
    "cache/plan_cache.h": header("cache/plan_cache.h"),
    "cache/plan_cache.cc": '#include "cache/plan_cache.h"\n',
    "cache/sqlite_db.cc": "#include <sqlite3.h>\n",
    "tuner/CMakeLists.txt":
        "foreach(unit IN ITEMS planner racer)\n"
        "  kiln_library(SRCS ${unit}.cc)\nendforeach()\n"
        "kiln_library(SRCS ${CMAKE_CURRENT_SOURCE_DIR}/prewarm.cc)\n",
    "tuner/planner.h": header("tuner/planner.h"),
    "tuner/planner.cc": '#include "tuner/planner.h"\n\n'
                        '#include "templates/registry.h"\n',
    "tuner/racer.h": header("tuner/racer.h"),
    "tuner/racer.cc": '#include "tuner/racer.h"\n\n'
                      '#include "compiler/bundle_writer.h"\n'
                      '#include "runtime/kiln.h"\n',
    "tuner/prewarm.h": header("tuner/prewarm.h"),
    "tuner/prewarm.cc": '#include "tuner/prewarm.h"\n\n'
                        '#include "cache/plan_cache.h"\n'
                        '#include "compiler/pool.h"\n'
                        '#include "tuner/planner.h"\n'
                        '#include "tuner/racer.h"\n',
    "tools/CMakeLists.txt": "kiln_executable(SRCS kiln.cc)\n",
    "tools/kiln.cc": '#include <CLI/CLI.hpp>\n\n#include <cstdlib>\n\n'
                     '#include "tuner/prewarm.h"\n\n'
                     'int main() { return std::getenv("HOME") == nullptr; }\n',
    "tests/CMakeLists.txt": "kiln_test(SRCS kiln_test.cc)\n",
    "tests/kiln_test.cc": '#include <gtest/gtest.h>\n\n'
                          '#include "runtime/driver.h"\n',
}

MEASURED = "| m | us |\n|---|---|\n| 1 | 2.5 |\n| 2 | 31 us |\n| 4 | 1.3 x |\n"

# name, path, text to append (a path that CLEAN lacks is a new file), and the
# start of the one line that must come out.
BROKEN = [
    ("runtime sees the compiler side", "runtime/driver.cc",
     '#include "compiler/base/digest.h"\n',
     "runtime/driver.cc:4: runtime must not depend on base"),
    ("format sees the runtime", "runtime/sha256.cc",
     '#include "runtime/driver.h"\n',
     "runtime/sha256.cc:2: format must not depend on runtime"),
    ("base sees spec", "compiler/base/digest.cc",
     '#include "compiler/spec/plan.h"\n',
     "compiler/base/digest.cc:4: base must not depend on spec"),
    ("base sees the runtime", "compiler/base/digest.cc",
     '#include "runtime/driver.h"\n',
     "compiler/base/digest.cc:4: base must not depend on runtime"),
    ("spec sees templates", "compiler/spec/plan.cc",
     '#include "templates/registry.h"\n',
     "compiler/spec/plan.cc:2: spec must not depend on templates"),
    ("compiler sees templates", "compiler/pool.cc",
     '#include "templates/registry.h"\n',
     "compiler/pool.cc:4: compiler must not depend on templates"),
    ("compiler sees the cache", "compiler/pool.cc",
     '#include "cache/plan_cache.h"\n',
     "compiler/pool.cc:4: compiler must not depend on cache"),
    ("compiler sees the bundle writer", "compiler/pool.cc",
     '#include "compiler/bundle_writer.h"\n',
     "compiler/pool.cc:4: compiler must not depend on bundle_writer"),
    ("bundle writer sees the runtime", "compiler/bundle_writer.cc",
     '#include "runtime/kiln.h"\n',
     "compiler/bundle_writer.cc:4: bundle_writer must not depend on runtime"),
    ("templates see the tuner", "templates/registry.cc",
     '#include "tuner/planner.h"\n',
     "templates/registry.cc:2: templates must not depend on planner"),
    ("cache sees the compiler", "cache/plan_cache.cc",
     '#include "compiler/pool.h"\n',
     "cache/plan_cache.cc:2: cache must not depend on compiler"),
    ("planner sees the racer", "tuner/planner.cc",
     '#include "tuner/racer.h"\n',
     "tuner/planner.cc:4: planner must not depend on racer"),
    ("planner sees the runtime", "tuner/planner.cc",
     '#include "runtime/kiln.h"\n',
     "tuner/planner.cc:4: planner must not depend on runtime"),
    ("racer sees the cache", "tuner/racer.cc",
     '#include "cache/plan_cache.h"\n',
     "tuner/racer.cc:5: racer must not depend on cache"),
    ("racer sees the compiler", "tuner/racer.cc",
     '#include "compiler/pool.h"\n',
     "tuner/racer.cc:5: racer must not depend on compiler"),
    ("prewarm sees the tests", "tuner/prewarm.cc",
     '#include "tests/support/fake.h"\n',
     "tuner/prewarm.cc:7: tests/support/fake.h is not a path from the root"),
    ("a file of no box", "tuner/surprise.cc", "int surprise = 0;\n",
     "tuner/surprise.cc:1: belongs to no box"),
    ("a relative include", "compiler/pool.cc", '#include "pool.h"\n',
     "compiler/pool.cc:4: pool.h is not a path from the root"),
    ("SQLite outside its wrapper", "cache/plan_cache.cc",
     "#include <sqlite3.h>\n",
     "cache/plan_cache.cc:2: must not include sqlite3.h"),
    ("LLVM outside its worker", "compiler/pool.cc",
     '#include "llvm/IR/Module.h"\n',
     "compiler/pool.cc:4: must not include llvm/IR/Module.h"),
    ("LLVM in angles", "compiler/pool.cc", "#include <clang/AST/AST.h>\n",
     "compiler/pool.cc:4: must not include clang/AST/AST.h"),
    ("a toolkit header in a kernel", "templates/op/cuda.cu",
     "#include <cuda_fp16.h>\n",
     "templates/op/cuda.cu:2: must not include cuda_fp16.h"),
    ("the driver's header", "runtime/driver.cc", "#include <cuda.h>\n",
     "runtime/driver.cc:4: must not include cuda.h"),
    ("NVRTC's header", "compiler/pool.cc", "#include <nvrtc.h>\n",
     "compiler/pool.cc:4: must not include nvrtc.h"),
    ("a host header in device code", "templates/device/half.h",
     "#include <cstdint>\n",
     "templates/device/half.h:8: device code includes cstdint"),
    ("a host header in a CPU kernel", "templates/op/cpu.cc",
     '#include "templates/registry.h"\n',
     "templates/op/cpu.cc:3: device code includes templates/registry.h"),
    ("a CPU kernel's header in a GPU kernel", "templates/op/cuda.cu",
     '#include "cpu/core.h"\n',
     "templates/op/cuda.cu:2: device code includes cpu/core.h"),
    ("Abseil in the runtime", "runtime/driver.cc",
     '#include "absl/status/status.h"\n',
     "runtime/driver.cc:4: must not include absl/status/status.h"),
    ("test library in a product", "compiler/pool.cc",
     "#include <gtest/gtest.h>\n",
     "compiler/pool.cc:4: must not include gtest/gtest.h"),
    ("regex header", "tools/kiln.cc", "#include <regex>\n",
     "tools/kiln.cc:8: must not include regex"),
    ("environment outside tools", "compiler/pool.cc",
     'const char* home = std::getenv("HOME");\n',
     "compiler/pool.cc:4: getenv(: environment variables"),
    ("a shell", "tools/kiln.cc", 'int made = system("make");\n',
     "tools/kiln.cc:8: system(: no shell is started"),
    ("std::regex", "tools/kiln.cc", 'std::regex word("x");\n',
     "tools/kiln.cc:8: std::regex"),
    ("rand", "tuner/racer.cc", "int r = rand();\n",
     "tuner/racer.cc:5: rand(: random numbers come from a seed"),
    ("fork", "compiler/pool.cc", "int p = fork();\n",
     "compiler/pool.cc:4: fork(: processes are spawned"),
    ("using namespace", "compiler/pool.cc", "using namespace std;\n",
     "compiler/pool.cc:4: using namespace"),
    ("a long line", "compiler/pool.cc", "int " + "x" * 76 + ";\n",
     "compiler/pool.cc:4: 81 columns, at most 80"),
    ("a long line of a script", "tools/x.py", "#" * 101 + "\n",
     "tools/x.py:1: 101 columns, at most 100"),
    ("a tab", "compiler/pool.cc", "\tint x;\n", "compiler/pool.cc:4: tab"),
    ("white space at the end", "compiler/pool.cc", "int x; \n",
     "compiler/pool.cc:4: white space at the end"),
    ("a carriage return", "tools/notes.md", "a\r\nb\n",
     "tools/notes.md:1: carriage return"),
    ("no line end", "compiler/pool.cc", "int x;",
     "compiler/pool.cc:4: no line end at the end"),
    ("a leftover", "compiler/pool.cc", "// TO" "DO: later\n",
     "compiler/pool.cc:4: leftover: TO" "DO"),
    ("a leftover in prose", "tools/notes.md", "This is a place" "holder.\n",
     "tools/notes.md:1: leftover: place" "holder"),
    ("a skip without a reason", "tests/kiln_test.cc",
     "if (none) GTEST_SKIP();\n",
     "tests/kiln_test.cc:4: GTEST_SKIP(): a skip says why"),
    ("a skip without a reason in Python", "tests/x_test.py",
     'self.skipTest("")\n', "tests/x_test.py:1: skipTest(\"\"): a skip says"),
    ("a decorator without a reason", "tests/x_test.py",
     "@unittest.skip\ndef test_x(self):\n    pass\n",
     "tests/x_test.py:1: @unittest.skip: a skip says why"),
    ("a condition without a reason", "tests/x_test.py",
     "@unittest.skipIf(GPUS < 2, '')\n",
     "tests/x_test.py:1: @unittest.skipIf(GPUS < 2, ''): a skip says why"),
    ("numbers without a date", "tools/notes.md",
     "On an AMD EPYC, `kiln bench`:\n\n" + MEASURED,
     "tools/notes.md:3: a table of measured numbers; its section must say a "
     "date"),
    ("numbers without a device", "tools/notes.md",
     "2026-11, `kiln bench`:\n\n" + MEASURED,
     "tools/notes.md:3: a table of measured numbers; its section must say a "
     "device"),
    ("numbers without a command", "tools/notes.md",
     "One NVIDIA H200, 2026-11-30:\n\n" + MEASURED,
     "tools/notes.md:3: a table of measured numbers; its section must say a "
     "command"),
    ("numbers of another section", "tools/notes.md",
     "One NVIDIA H200, 2026-11-30, `kiln bench`:\n\n# Costs\n" + MEASURED,
     "tools/notes.md:4: a table of measured numbers; its section must say a "
     "date"),
    ("a merge mark", "tools/notes.md", "<" * 7 + " HEAD\n",
     "tools/notes.md:1: leftover: <<<<<<<"),
    ("a machine's path", "compiler/pool.cc",
     'const char* kPath = "/ho' 'me/someone/x";\n',
     "compiler/pool.cc:4: absolute path of a machine: /home"),
    ("a machine's path in a script", "tools/x.sh", "cp a /t" "mp/b\n",
     "tools/x.sh:1: absolute path of a machine: /tmp"),
    ("a foreign guard", "compiler/other.h",
     header("compiler/wrong.h"),
     "compiler/other.h:1: header guard is not KILN_COMPILER_OTHER_H_"),
    ("a header without a purpose", "compiler/other.h",
     header("compiler/other.h").split("\n", 2)[2],
     "compiler/other.h:1: starts without a comment"),
    ("a header that nobody includes", "compiler/other.h",
     header("compiler/other.h"),
     "compiler/other.h:1: no file includes this header"),
    ("a source that nobody builds", "compiler/other.cc", "int x;\n",
     "compiler/other.cc:1: no CMakeLists.txt builds this file"),
    ("globbed sources", "compiler/CMakeLists.txt", "file(GLOB all *.cc)\n",
     "compiler/CMakeLists.txt:3: file(GLOB all *.cc): sources are listed"),
    ("global includes", "compiler/CMakeLists.txt", "include_directories(.)\n",
     "compiler/CMakeLists.txt:3: include_directories(.)"),
    ("the CUDA toolkit", "compiler/CMakeLists.txt",
     "find_package(CUDAToolkit)\n",
     "compiler/CMakeLists.txt:3: find_package(CUDAToolkit)"),
]

# The same text where it is allowed, or where it is no code.
FINE = [
    ("getenv in a test", "tests/kiln_test.cc", 'auto* x = getenv("X");\n'),
    ("a shell in a test", "tests/kiln_test.cc", 'int made = system("true");\n'),
    ("a comment about getenv", "compiler/pool.cc",
     "// getenv() and rand() and system() are not called.\n"),
    ("a string with a call", "compiler/pool.cc",
     'const char* text = "system(x) // not a comment";\n'),
    ("a source inside a raw string", "compiler/pool.cc",
     'const char* text = R"X(\n#include "no/such.h"\nrand();\n)X";\n'),
    ("names that end alike", "compiler/pool.cc",
     "int x = operand(1) + file_system(2) + strand(3);\n"),
    ("numbers with their origin", "tools/notes.md",
     "One NVIDIA H200, 2026-11-30, `kiln bench`:\n\n" + MEASURED),
    ("numbers that nobody measured", "tools/notes.md",
     "| rate | bits |\n|---|---|\n| 1.25 | 10 |\n| 2.25 | 18 |\n"),
    ("a skip with its reason", "tests/kiln_test.cc",
     'if (none) {\n  GTEST_SKIP()\n      << "no GPU";\n}\n'),
    ("skips with their reasons in Python", "tests/x_test.py",
     'self.skipTest(f"no {what}")\n@unittest.skipIf(GPUS < 2, "one GPU")\n'),
    ("a path in documentation", "tools/notes.md", "See /t" "mp/x.\n"),
    ("a long address", "compiler/pool.cc",
     "// https://example.com/" + "x" * 80 + "\n"),
    ("eighty letters of two bytes", "compiler/pool.cc",
     "// " + "\u00e9" * 77 + "\n"),
]


def write(root, files):
    for path, text in files.items():
        place = os.path.join(root, path)
        os.makedirs(os.path.dirname(place), exist_ok=True)
        with open(place, "w", encoding="utf-8", newline="") as handle:
            handle.write(text)


def run(files):
    """The program as a whole, on a tree of these files."""
    with tempfile.TemporaryDirectory() as root:
        write(root, files)
        return subprocess.run([sys.executable, SCRIPT, root], text=True,
                              capture_output=True, check=False)


def violations(files):
    """The lines that the program would print."""
    with tempfile.TemporaryDirectory() as root:
        write(root, files)
        return [f"{path}:{line}: {what}"
                for path, line, what in house_rules.Tree(root).check()]


def changed(path, text):
    files = dict(CLEAN)
    files[path] = files.get(path, "") + text
    return files


class HouseRulesTest(unittest.TestCase):

    def test_clean_tree_passes(self):
        result = run(CLEAN)
        self.assertEqual(result.stdout, f"{len(CLEAN)} files keep the rules\n")
        self.assertEqual(result.returncode, 0)

    def test_a_broken_rule_fails_the_run(self):
        _, path, text, expected = BROKEN[0]
        result = run(changed(path, text))
        self.assertEqual(result.returncode, 1)
        self.assertTrue(result.stdout.startswith(expected), result.stdout)

    def test_each_broken_rule_is_named(self):
        for name, path, text, expected in BROKEN:
            with self.subTest(name):
                lines = violations(changed(path, text))
                self.assertTrue(
                    any(line.startswith(expected) for line in lines),
                    f"expected {expected!r} in: {lines}")

    def test_allowed_text_passes(self):
        for name, path, text in FINE:
            with self.subTest(name):
                self.assertEqual(violations(changed(path, text)), [])

    def test_empty_tree_is_an_error(self):
        result = run({"README.md": "nothing\n"})
        self.assertNotEqual(result.returncode, 0)
        self.assertIn("no source files found", result.stderr)

    def test_binary_text_is_named(self):
        with tempfile.TemporaryDirectory() as root:
            os.makedirs(os.path.join(root, "tools"))
            with open(os.path.join(root, "tools", "x.py"), "wb") as handle:
                handle.write(b"\xff\xfe")
            with open(os.path.join(root, "tools", "y.h"), "w",
                      encoding="utf-8") as handle:
                handle.write("")
            result = subprocess.run([sys.executable, SCRIPT, root], text=True,
                                    capture_output=True, check=False)
            self.assertIn("tools/x.py:1: is not UTF-8 text", result.stdout)


if __name__ == "__main__":
    unittest.main()
