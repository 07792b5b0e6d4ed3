#!/usr/bin/env python3
"""Kernel packages as their authors and users meet them: from a folder to a
race, and every refusal with its exit code, its message and no trace left.

    KILN_BIN_DIR=build/release/bin tests/tools/package_cli_test.py [-v]
"""

import atexit
import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import tempfile
import unittest

BIN = pathlib.Path(
    os.environ.get("KILN_BIN_DIR", "build/release/bin")).resolve()
SOURCE = pathlib.Path(os.environ.get(
    "KILN_SOURCE_DIR", pathlib.Path(__file__).parents[2])).resolve()
DONE, FAILED, USAGE, INCOMPLETE, REFUSED = range(5)

SCRATCH = pathlib.Path(tempfile.mkdtemp(prefix="kiln_package_test."))
atexit.register(shutil.rmtree, SCRATCH, ignore_errors=True)

CPU_EXAMPLE = SOURCE / "tools/examples/package_cpu"
CUDA_EXAMPLE = SOURCE / "tools/examples/package_cuda"

MODEL = SCRATCH / "model.json"
MODEL.write_text(json.dumps({
    "schema": "kiln.model/1", "name": "Small", "requests": [{
        "name": "moe", "op": "fused_moe", "layers": 1, "hidden": 256,
        "intermediate": 128, "experts": 4, "top_k": 2, "activation": "silu",
        "io_dtype": "bf16", "id_dtype": "i32",
        "weights": {"format": "exl3", "codebook": "mcg", "bits": 4},
        "recipe": "w4a16", "capacities": [1, 4]}]}))
CPU = ["--target", "cpu", "--max-candidates", "1"]


def kiln(*words, cache=None):
    command = [str(BIN / "kiln")]
    if cache is not None:
        command += ["--cache", str(SCRATCH / cache)]
    return subprocess.run(command + [str(word) for word in words], text=True,
                          capture_output=True, timeout=900, check=False,
                          env={"PATH": os.environ.get("PATH", ""),
                               "HOME": str(SCRATCH)})


def last_object(done):
    return json.loads(done.stdout.strip().splitlines()[-1])


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def has_cc_cpu():
    return os.access(BIN / "kiln-cc-cpu", os.X_OK)


def has_nvrtc():
    return "library" in json.loads(kiln("--json", "doctor").stdout)["nvrtc"]


class PackageTest(unittest.TestCase):

    def expect(self, done, code, *words):
        text = f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        self.assertEqual(done.returncode, code, text)
        for word in words:
            self.assertIn(str(word), done.stdout + done.stderr)
        return done

    def copy(self, example=CPU_EXAMPLE):
        """A copy of an example that a test may change."""
        folder = pathlib.Path(tempfile.mkdtemp(dir=SCRATCH)) / "package"
        shutil.copytree(example, folder)
        return folder

    def change(self, folder, old, new):
        path = folder / "package.json"
        text = path.read_text()
        self.assertIn(old, text)
        path.write_text(text.replace(old, new))


class AuthorTest(PackageTest):
    """kiln package check and pin."""

    def test_check_shows_what_the_examples_offer(self):
        for example, backend, source in ((CPU_EXAMPLE, "cpu", "moe.cc"),
                                         (CUDA_EXAMPLE, "cuda", "moe.cu")):
            out = json.loads(self.expect(
                kiln("--json", "package", "check", example), DONE).stdout)
            self.assertEqual(out["backend"], backend)
            self.assertEqual(out["points"], 2)
            self.assertEqual(out["files"], {source: sha256(example / source)})
            self.assertEqual(out["template"],
                             f"{out['name']}@{out['digest']}")

    def test_a_changed_byte_is_refused_until_it_is_pinned(self):
        folder = self.copy()
        before = json.loads(
            kiln("--json", "package", "check", folder).stdout)["digest"]
        source = folder / "moe.cc"
        pinned = sha256(source)
        source.write_text(source.read_text() + "// One more line.\n")
        self.expect(kiln("package", "check", folder), REFUSED, source, pinned,
                    sha256(source), "kiln package pin")
        manifest = (folder / "package.json").read_text()
        done = self.expect(kiln("--json", "package", "pin", folder), DONE)
        self.assertEqual((folder / "package.json").read_text(),
                         manifest.replace(pinned, sha256(source)))
        self.assertNotEqual(json.loads(done.stdout)["digest"], before)
        self.expect(kiln("package", "check", folder), DONE)

    def test_pin_leaves_a_malformed_manifest_alone(self):
        folder = self.copy()
        self.change(folder, '"version": 1', '"version": 0')
        text = (folder / "package.json").read_text()
        self.expect(kiln("package", "pin", folder), USAGE,
                    f"{folder}/package.json:4:", "must be within 1..")
        self.assertEqual((folder / "package.json").read_text(), text)

    def test_pin_leaves_a_manifest_with_a_missing_file_alone(self):
        folder = self.copy()
        (folder / "moe.cc").unlink()
        text = (folder / "package.json").read_text()
        self.expect(kiln("package", "pin", folder), USAGE, folder / "moe.cc")
        self.assertEqual((folder / "package.json").read_text(), text)

    def test_help_tells_of_packages(self):
        self.expect(kiln("--help"), DONE, "package")
        self.expect(kiln("package", "--help"), DONE, "check", "pin")
        for verb in ("plan", "prewarm", "explain", "freeze"):
            self.expect(kiln(verb, "--help"), DONE, "--package")


class RefusalTest(PackageTest):
    """Before anything is compiled, and without a trace."""

    VERBS = {
        "plan": ["plan", MODEL, *CPU],
        "prewarm": ["prewarm", MODEL, *CPU],
        "freeze": ["freeze", MODEL, *CPU, "-o", SCRATCH / "refused.kiln"],
        "explain": ["explain", MODEL, *CPU, "--entry", "moe", "--tokens", "1"],
        "gc": ["cache", "gc", "--max-age", "1", "--manifest", MODEL, *CPU],
        "export": ["cache", "export", MODEL, *CPU, "-o",
                   SCRATCH / "refused.db"],
    }

    def refuse(self, folder, code, *words):
        """Every verb that takes packages refuses this one."""
        for name, verb in self.VERBS.items():
            with self.subTest(verb=name):
                done = kiln(*verb, "--package", folder, cache="refused")
                self.expect(done, code, *words)
                self.assertEqual(done.stdout, "")
                self.assertTrue(done.stderr.startswith("kiln: "), done.stderr)
        for trace in ("refused/index.db", "refused.kiln", "refused.db"):
            self.assertFalse((SCRATCH / trace).exists(), trace)

    def test_a_changed_byte(self):
        folder = self.copy()
        source = folder / "moe.cc"
        data = bytearray(source.read_bytes())
        data[len(data) // 2] ^= 1
        source.write_bytes(data)
        self.refuse(folder, REFUSED, source, sha256(source))

    def test_a_missing_file(self):
        folder = self.copy()
        (folder / "moe.cc").unlink()
        self.refuse(folder, USAGE, folder / "moe.cc", "No such file")

    def test_a_missing_folder(self):
        self.refuse(SCRATCH / "nowhere", USAGE, "nowhere/package.json")

    def test_an_unknown_key(self):
        folder = self.copy()
        self.change(folder, '"version": 1', '"version": 1, "author": "me"')
        self.refuse(folder, USAGE, f"{folder}/package.json:4:", "author")

    def test_text_that_is_no_json(self):
        folder = self.copy()
        (folder / "package.json").write_text('{"schema": ')
        self.refuse(folder, USAGE, f"{folder}/package.json:1:")

    def test_an_unknown_op(self):
        folder = self.copy()
        self.change(folder, '"fused_moe"', '"attention"')
        self.refuse(folder, USAGE, '"attention"', '"fused_moe"')

    def test_a_path_that_leaves_the_folder(self):
        folder = self.copy()
        self.change(folder, '"path": "moe.cc"', '"path": "../moe.cc"')
        self.refuse(folder, USAGE, "must stay inside the package's folder")

    def test_a_symbolic_link(self):
        folder = self.copy()
        (folder / "moe.cc").rename(folder.parent / "moe.cc")
        (folder / "moe.cc").symlink_to(folder.parent / "moe.cc")
        self.refuse(folder, USAGE, folder / "moe.cc", "is a symbolic link")

    def test_the_name_of_a_template(self):
        folder = self.copy()
        self.change(folder, '"example.scalar"', '"fused_moe.cpu"')
        self.refuse(folder, USAGE, "fused_moe.cpu", "Kiln's own")

    def test_an_expression_that_no_launch_computes(self):
        folder = self.copy()
        self.change(folder, '"grid": ["m"]', '"grid": ["m * m"]')
        self.refuse(folder, USAGE, "m * m", "a launch cannot compute")

    def test_an_include_that_is_not_pinned(self):
        folder = self.copy()
        source = folder / "moe.cc"
        source.write_text("#include <math.h>\n" + source.read_text())
        self.expect(kiln("package", "pin", folder), USAGE, f"{source}:1:")
        self.refuse(folder, USAGE, f"{source}:1: includes #include <math.h>")

    def test_one_package_twice(self):
        folder = self.copy()
        done = kiln("plan", MODEL, *CPU, "--package", folder, "--package",
                    CPU_EXAMPLE)
        self.expect(done, USAGE, "example.scalar", folder, CPU_EXAMPLE)

    def prebuilt(self, target="sm_90a", entries=("scale", "add"),
                 arg="u32:hidden"):
        folder = pathlib.Path(tempfile.mkdtemp(dir=SCRATCH))
        binary = folder / "scale.cubin"
        shutil.copy(SOURCE / "tests/data/runtime/scale_sm_90a.cubin", binary)
        manifest = json.loads((CUDA_EXAMPLE / "package.json").read_text())
        manifest.update({
            "name": "acme.prebuilt", "compiler": "own", "axes": [],
            "conditions": [],
            "files": [{"path": binary.name, "sha256": sha256(binary)}],
            "programs": [{"entries": list(entries), "binaries": [
                {"file": binary.name, "target": target}]}],
            "arena": [{"name": "scratch", "bytes": "4 * capacity * hidden"}],
            "steps": [{"label": "scale", "entry": "scale", "grid": ["m"],
                       "block": [128],
                       "args": ["param:x", "arena:scratch", "tokens", arg,
                                "u64:7"]}]})
        (folder / "package.json").write_text(json.dumps(manifest, indent=1))
        return folder

    def test_a_sound_binary_is_none_of_these(self):
        self.expect(kiln("package", "check", self.prebuilt()), DONE,
                    "its own compiler")

    def test_a_binary_for_another_architecture(self):
        self.refuse(self.prebuilt(target="sm_100a"), USAGE, "scale.cubin",
                    "cubin is for sm_90a; expected sm_100a")

    def test_a_binary_without_an_entry(self):
        self.refuse(self.prebuilt(entries=("scale", "add", "sum")), USAGE,
                    "scale.cubin", "sum")

    def test_a_binary_with_another_parameter_layout(self):
        self.refuse(self.prebuilt(arg="u64:hidden"), USAGE, "scale.cubin",
                    "argument 3 has 8 bytes", "declares 4 bytes")


class CpuTest(PackageTest):
    """The example in a real race."""

    @classmethod
    def setUpClass(cls):
        if not has_cc_cpu():
            raise unittest.SkipTest("this build has no kiln-cc-cpu")

    def test_a_package_without_use_says_why(self):
        verbs = ((["plan", MODEL, *CPU], DONE),
                 (["prewarm", MODEL, *CPU, "--stop-after", "resolve"], DONE),
                 (["explain", MODEL, *CPU, "--entry", "moe", "--tokens", "1"],
                  INCOMPLETE),
                 (["freeze", MODEL, *CPU, "-o", SCRATCH / "idle.kiln"],
                  INCOMPLETE),
                 (["cache", "export", MODEL, *CPU, "-o",
                   SCRATCH / "idle.kilncache"], INCOMPLETE))
        for old, new, why in (
                ('"bf16", "f16"', '"f16"', "does not serve io_dtype bf16 (moe m 1..1 "
                 "on cpu-x86-64-v"),
                ('"capacity": [1, 64]', '"capacity": [2, 3]',
                 "serves capacities 2..3, not 1 (moe m 1..1 on "),
                ("hidden % channels == 0", "hidden == 1024",
                 "wants hidden == 1024 (moe m 1..1 on "),
                ('"grid": ["top_k * m"]', '"grid": ["top_k * m - 8"]',
                 "step rotate: ")):
            folder = self.copy()
            self.change(folder, old, new)
            for verb, code in verbs:
                with self.subTest(why, verb=verb[0]):
                    done = self.expect(
                        kiln(*verb, "--package", folder, "--package",
                             CUDA_EXAMPLE, cache="idle"), code)
                    lines = [line for line in done.stderr.splitlines()
                             if line.startswith("package ")]
                    self.assertEqual(len(lines), 2, done.stderr)
                    self.assertIn("package example.scalar offers no candidate "
                                  "to any request: " , lines[0])
                    self.assertIn(why, lines[0])
                    self.assertIn("example.threads", lines[1])
                    self.assertIn("does not serve target cpu-", lines[1])
        # One that serves an interval has a use.
        folder = self.copy()
        self.change(folder, '"capacity": [1, 64]', '"capacity": [2, 64]')
        for verb, code in verbs:
            done = self.expect(kiln(*verb, "--package", folder, cache="idle"),
                               code)
            self.assertNotIn("package example", done.stderr)

    def test_the_example_competes_and_keys_keep_its_plans_apart(self):
        options = [MODEL, *CPU, "--package", CPU_EXAMPLE]
        plan = json.loads(self.expect(
            kiln("--json", "plan", *options, cache="cpu"), DONE).stdout)
        digest = json.loads(kiln("--json", "package", "check",
                                 CPU_EXAMPLE).stdout)["digest"]
        label = f"example.scalar@{digest[:12]}{{channels=128}}"
        for interval in plan["intervals"]:
            self.assertIn(label, [c["label"] for c in interval["candidates"]])
        report = last_object(self.expect(
            kiln("--json", "prewarm", *options, "--budget", "0.2",
                 cache="cpu"), DONE))
        self.assertTrue(report["complete"])
        self.assertEqual(report["rejects"], 0)
        out = json.loads(self.expect(
            kiln("--json", "explain", *options, "--entry", "moe", "--tokens",
                 "3", cache="cpu"), DONE).stdout)
        row = [c for c in out["intervals"][0]["candidates"]
               if c["label"] == label]
        self.assertEqual(len(row), 1)
        self.assertGreater(row[0]["samples"], 0)
        self.assertLess(row[0]["worst_error"], 1e-5)
        # Without the package the plan is another one, and explain says why.
        done = self.expect(kiln("explain", MODEL, *CPU, "--entry", "moe",
                                "--tokens", "3", cache="cpu"), INCOMPLETE)
        self.assertIn(f"candidates/example.scalar@{digest}/sources",
                      done.stdout)
        again = last_object(kiln("--json", "prewarm", *options, cache="cpu"))
        self.assertEqual((again["programs_compiled"], again["launches"]),
                         (0, 0))


class CudaTest(PackageTest):

    def test_the_example_compiles_and_is_inspected_for_sm_90a(self):
        if not has_nvrtc():
            self.skipTest("no NVRTC on this machine")
        report = last_object(self.expect(
            kiln("--json", "prewarm", MODEL, "--target", "sm_90a",
                 "--max-candidates", "1", "--compile-only", "--package",
                 CUDA_EXAMPLE, cache="cuda"), DONE))
        self.assertEqual(report["rejects"], 0)
        plan = json.loads(kiln("--json", "plan", MODEL, "--target", "sm_90a",
                               "--max-candidates", "1", "--compile-only",
                               "--package", CUDA_EXAMPLE,
                               cache="cuda").stdout)
        keys = {program for interval in plan["intervals"]
                for candidate in interval["candidates"]
                for program in candidate["programs"]
                if candidate["label"].startswith("example.threads@")}
        self.assertEqual(len(keys), 1)


if __name__ == "__main__":
    unittest.main()
