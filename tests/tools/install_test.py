#!/usr/bin/env python3
"""`cmake --install`, and engines built against what it installs: through
find_package, through pkg-config, shared and static, in C and C++.

    install_test.py BUILD_FOLDER
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

from small_bundle import SOURCE, make

BUILD = pathlib.Path(sys.argv.pop(1)).resolve()


def run(*command, **options):
    done = subprocess.run([str(part) for part in command], text=True,
                          capture_output=True, check=False, **options)
    if done.returncode != 0:
        raise AssertionError(f"{command} exits {done.returncode}:\n"
                             f"{done.stdout}{done.stderr}")
    return done.stdout


class InstallTest(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        scratch = tempfile.mkdtemp(prefix="kiln_install_test.")
        cls.addClassCleanup(shutil.rmtree, scratch, ignore_errors=True)
        cls.folder = pathlib.Path(scratch)
        installed = cls.folder / "first"
        run("cmake", "--install", BUILD, "--prefix", installed)
        # An installed tree may be moved.
        cls.prefix = cls.folder / "moved"
        installed.rename(cls.prefix)
        cls.lib = next(p.parent for p in cls.prefix.rglob("libkiln_runtime.a"))
        # Outside the tree, so that nothing of it is found by accident.
        cls.examples = cls.folder / "examples"
        shutil.copytree(SOURCE / "tools" / "examples", cls.examples)
        build = cls.folder / "build"
        run("cmake", "-S", cls.examples, "-B", build,
            f"-DCMAKE_PREFIX_PATH={cls.prefix}",
            "-DCMAKE_C_FLAGS=-Wall -Wextra -Werror",
            "-DCMAKE_CXX_FLAGS=-Wall -Wextra -Werror")
        run("cmake", "--build", build)
        cls.engines = [build / "engine_c", build / "engine_cpp",
                       build / "engine_static"]
        cls.bundle = make(cls.folder, "tiny")
        cls.predicted = make(cls.folder, "predicted", predicted=True)

    def engine(self, engine, *arguments, env=None):
        return subprocess.run(
            [str(engine), *map(str, arguments)], text=True, env=env,
            capture_output=True, check=False, timeout=60)

    def test_installs_what_an_engine_needs_and_nothing_else(self):
        names = {p.relative_to(self.prefix).as_posix()
                 for p in self.prefix.rglob("*") if not p.is_dir()}
        lib = self.lib.relative_to(self.prefix).as_posix()
        package = f"{lib}/cmake/kiln_runtime/kiln_runtime-config"
        self.assertLessEqual(
            {"include/kiln/kiln.h", f"{lib}/libkiln_runtime.a",
             f"{lib}/libkiln_runtime.so", f"{lib}/libkiln_runtime.so.1",
             f"{lib}/pkgconfig/kiln_runtime.pc", f"{package}.cmake",
             f"{package}-version.cmake",
             "share/kiln/python/kiln/__init__.py"}, names)
        self.assertEqual({n for n in names if n.endswith((".h", ".hpp"))},
                         {"include/kiln/kiln.h"})
        # No path of the build leaks into what is installed.
        for name in names:
            if name.endswith((".cmake", ".pc", ".h")):
                self.assertNotIn(str(BUILD),
                                 (self.prefix / name).read_text(), name)

    def test_the_engines_agree(self):
        for tokens in (1, 3, 4):
            sums = set()
            for engine in self.engines:
                done = self.engine(engine, self.bundle, "moe", tokens,
                                   "--allow-unqualified")
                self.assertEqual(done.returncode, 0, done.stderr)
                sums.add(done.stdout)
            self.assertEqual(len(sums), 1, sums)
            self.assertNotEqual(float(sums.pop()), 0)

    def test_refusals_reach_the_user(self):
        damaged = self.folder / "damaged.kiln"
        data = bytearray(self.bundle.read_bytes())
        data[len(data) // 2] ^= 1
        damaged.write_bytes(data)
        consent = "--allow-unqualified"
        for arguments, status in (
                ((self.folder / "absent", "moe", 1, consent),
                 "KILN_STATUS_FILE_NOT_FOUND"),
                ((damaged, "moe", 1, consent), "KILN_STATUS_BUNDLE_DAMAGED"),
                ((self.predicted, "moe", 1, consent),
                 "KILN_STATUS_PREDICTED_PLANS"),
                ((self.bundle, "dense", 1, consent),
                 "KILN_STATUS_ENTRY_NOT_FOUND"),
                ((self.bundle, "moe", 5, consent),
                 "KILN_STATUS_TOKENS_OUT_OF_RANGE")):
            for engine in self.engines:
                done = self.engine(engine, *arguments)
                self.assertIn(done.returncode, (1, 3), done.stdout)
                self.assertIn(status, done.stderr)
                self.assertEqual(done.stdout, "")

    def test_the_python_package_finds_the_installed_library(self):
        script = f"""
import sys
sys.path.insert(0, {str(self.prefix / 'share' / 'kiln' / 'python')!r})
sys.dont_write_bytecode = True
import kiln
runtime = kiln.Runtime({str(self.lib / 'libkiln_runtime.so.1')!r})
with runtime.open({str(self.bundle)!r}) as bundle:
    print(bundle.root.hex(), *bundle.targets)
"""
        root, target = run(sys.executable, "-c", script).split()
        self.assertEqual(len(root), 64)
        self.assertTrue(target.startswith("cpu-x86-64-v"))

    def test_pkg_config(self):
        if shutil.which("pkg-config") is None:
            self.skipTest("pkg-config is not installed")
        environment = dict(os.environ,
                           PKG_CONFIG_PATH=str(self.lib / "pkgconfig"))

        def flags(*arguments):
            return run("pkg-config", *arguments, "kiln_runtime",
                       env=environment).split()

        source = self.examples / "engine.c"
        shared = self.folder / "engine_pc"
        run("cc", "-std=c11", source, "-o", shared, *flags("--cflags", "--libs"))
        done = self.engine(shared, self.bundle, "moe", 2, "--allow-unqualified",
                           env=dict(os.environ, LD_LIBRARY_PATH=str(self.lib)))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(flags("--modversion")[0], r"^1\.\d+$")
        # The archive alone: no shared library of Kiln's at run time.
        static = self.folder / "engine_pc_static"
        run("cc", "-std=c11", source, "-o", static,
            *flags("--cflags"), self.lib / "libkiln_runtime.a",
            *[f for f in flags("--static", "--libs-only-l", "--libs-only-other")
              if f != "-lkiln_runtime"])
        other = self.engine(static, self.bundle, "moe", 2,
                            "--allow-unqualified")
        self.assertEqual(other.returncode, 0, other.stderr)
        self.assertEqual(other.stdout, done.stdout)
        needed = re.findall(r"\(NEEDED\).*\[(.*)\]",
                            run("readelf", "-d", static))
        self.assertLessEqual(set(needed),
                             {"libc.so.6", "ld-linux-x86-64.so.2"})

    def test_start_up_takes_less_than_40_lines(self):
        for name, begin, end in (("engine.c", "static int Start(", "\n}\n"),
                                 ("engine_cpp.cc", "  Engine(const char* path,",
                                  "\n  }\n")):
            text = (self.examples / name).read_text()
            start = text.index(begin)
            lines = text[start:text.index(end, start)].count("\n") + 2
            self.assertLess(lines, 40, name)
            self.assertGreater(lines, 5, name)


if __name__ == "__main__":
    unittest.main()
