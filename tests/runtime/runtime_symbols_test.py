#!/usr/bin/env python3
"""libkiln_runtime.so needs libc only, exports kiln.h only, and is small.

    runtime_symbols_test.py SOURCE_ROOT libkiln_runtime.so
"""

import os
import re
import subprocess
import sys
import tempfile
import unittest

ROOT, LIBRARY = sys.argv[1], sys.argv[2]
BYTES_MAX = 256 * 1024


def run(*command):
    return subprocess.run(command, check=True, capture_output=True,
                          text=True).stdout


def read(path):
    with open(os.path.join(ROOT, path), encoding="utf-8") as handle:
        return handle.read()


class RuntimeSymbolsTest(unittest.TestCase):

    def test_needs_libc_only(self):
        needed = re.findall(r"\(NEEDED\).*\[(.*)\]",
                            run("readelf", "-d", LIBRARY))
        self.assertLessEqual(set(needed),
                             {"libc.so.6", "ld-linux-x86-64.so.2"})
        self.assertIn("libc.so.6", needed)

    def test_every_refusal_is_explained_and_tested(self):
        names = set(re.findall(r"KILN_STATUS_(\w+) = [1-9]",
                               read("runtime/kiln.h")))
        self.assertGreater(len(names), 30)
        table = read("runtime/README.md")
        folder = os.path.join(ROOT, "tests")
        tests = "".join(
            read(os.path.join("tests", area, name))
            for area in ("runtime", "tools")
            for name in os.listdir(os.path.join(folder, area))
            if name.endswith((".cc", ".py")))
        for name in sorted(names):
            self.assertRegex(table, rf"`{name}` \d+", "runtime/README.md")
            self.assertRegex(tests, rf"\bKILN_STATUS_{name}\b", "no test")

    def test_every_kind_of_bad_input_has_its_test(self):
        section = read("runtime/README.md").split("## Bad input")[1]
        rows = [row.split("|") for row in section.split("## ")[0].splitlines()
                if row.startswith("| ")][1:]
        self.assertGreater(len(rows), 10)
        folder = os.path.join(ROOT, "tests", "runtime")
        tests = read("tests/tools/bundle_tools_test.py") + "".join(
            read(os.path.join("tests/runtime", name))
            for name in os.listdir(folder) if name.endswith("_test.cc"))
        for row in rows:
            names = re.findall(r"`(\w+)`", row[3])
            self.assertTrue(names, row)
            for name in names:
                self.assertRegex(tests, rf"(def {name}\(|TEST(_[FP])?\(\w+,\s*{name}\))",
                                 row[1])

    def exported(self):
        lines = run("nm", "-D", "--defined-only", LIBRARY).splitlines()
        names = {line.split()[-1].split("@")[0] for line in lines}
        return names - {"KILN_1.0", "KILN_1.1"}

    def test_exports_are_the_list(self):
        listed = set(re.findall(r"^\s+(kiln_\w+);", read("runtime/kiln.map"),
                                re.MULTILINE))
        self.assertEqual(self.exported(), listed)

    def test_the_list_is_the_header(self):
        declared = set(re.findall(r"^KILN_API [\w* ]*?(kiln_\w+)\(",
                                  read("runtime/kiln.h"), re.MULTILINE))
        self.assertGreater(len(declared), 20)
        self.assertEqual(self.exported(), declared)

    def test_is_small(self):
        with tempfile.TemporaryDirectory() as folder:
            stripped = os.path.join(folder, "stripped.so")
            run("strip", "-o", stripped, LIBRARY)
            self.assertLessEqual(os.path.getsize(stripped), BYTES_MAX)

    def test_uses_no_cplusplus_library_and_no_environment(self):
        undefined = run("nm", "-D", "--undefined-only", LIBRARY)
        for banned in ("_Z", "__cxa_throw", "__gxx_personality", "getenv",
                       "printf", "stderr", "stdout"):
            self.assertNotRegex(undefined, rf"\b{banned}", banned)

    def test_the_file_has_the_version_of_the_header(self):
        header = read("runtime/kiln.h")
        version = ".".join(re.search(
            rf"KILN_RUNTIME_ABI_{part} (\d+)", header)[1]
            for part in ("MAJOR", "MINOR"))
        self.assertTrue(os.path.realpath(LIBRARY).endswith(f".so.{version}"),
                        os.path.realpath(LIBRARY))

    def test_the_start_up_code_of_the_readme_compiles(self):
        section = read("runtime/README.md").split("## Start-up\n")[1]
        code = section.split("```c\n")[1].split("```")[0]
        self.assertIn("kiln_bundle_open_file(", code)
        engine = """
#include <stdint.h>
#include <stdio.h>
typedef struct CUctx_st* CUcontext;
static void *x, *topk_ids, *topk_weights, *out, *arena;
static struct CUstream_st* stream;
static uint64_t m;
"""
        with tempfile.TemporaryDirectory() as folder:
            os.mkdir(os.path.join(folder, "kiln"))
            for name, text in (("kiln/kiln.h", read("runtime/kiln.h")),
                               ("engine.c", engine + code)):
                with open(os.path.join(folder, name), "w",
                          encoding="utf-8") as handle:
                    handle.write(text)
            run("cc", "-std=c11", "-Wall", "-Wextra", "-Werror",
                "-fsyntax-only", f"-I{folder}",
                os.path.join(folder, "engine.c"))

    def test_an_engine_author_finds_it_from_the_first_page(self):
        # README -> a table on its first screen -> the section -> the code.
        first = read("README.md").splitlines()[:32]
        row = [line for line in first if "engine" in line and
               "](#in-an-engine)" in line and "](runtime/README.md" in line]
        self.assertEqual(len(row), 1, first)
        self.assertIn("\n## In an engine\n", read("README.md"))
        for path in re.findall(r"\]\(([\w/.]+?)(?:#[\w-]+)?\)",
                               "\n".join(first)):
            self.assertTrue(os.path.exists(os.path.join(ROOT, path)), path)
        for anchor in re.findall(r"runtime/README.md#([\w-]+)",
                                 "\n".join(first)):
            self.assertIn(f"\n## {anchor.capitalize()}\n",
                          read("runtime/README.md"))

    def test_stack_is_not_executable(self):
        stack = [line for line in
                 run("readelf", "-lW", LIBRARY).splitlines()
                 if "GNU_STACK" in line]
        self.assertEqual(len(stack), 1)
        self.assertIn("RW ", stack[0])


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
