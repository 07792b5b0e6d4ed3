#!/usr/bin/env python3
"""The command line as its users meet it: every verb on a small model, and
every bad input with its exit code, one clear message, and nothing half-written.

    KILN_BIN_DIR=build/release/bin tests/tools/cli_test.py [-v]
"""

import atexit
import fcntl
import hashlib
import json
import os
import pathlib
import pty
import re
import resource
import shutil
import signal
import sqlite3
import struct
import subprocess
import sys
import tempfile
import termios
import time
import unittest
import xml.etree.ElementTree

BIN = pathlib.Path(
    os.environ.get("KILN_BIN_DIR", "build/release/bin")).resolve()
KILN = BIN / "kiln"
SOURCE = pathlib.Path(os.environ.get(
    "KILN_SOURCE_DIR", pathlib.Path(__file__).parents[2])).resolve()
DONE, FAILED, USAGE, INCOMPLETE, REFUSED = range(5)

SCRATCH = pathlib.Path(tempfile.mkdtemp(prefix="kiln_cli_test."))
atexit.register(shutil.rmtree, SCRATCH, ignore_errors=True)

REQUEST = {
    "name": "moe", "op": "fused_moe", "layers": 2, "hidden": 256,
    "intermediate": 128, "experts": 4, "top_k": 2, "activation": "silu",
    "io_dtype": "bf16", "id_dtype": "i32",
    "weights": {"format": "exl3", "codebook": "mcg", "bits": 4},
    "recipe": "w4a16", "capacities": [1, 4, 8]}

LINEAR = {
    "name": "q_proj", "op": "linear", "layers": 2, "in_features": 256,
    "out_features": 128, "bias": True, "io_dtype": "bf16", "recipe": "w4a16",
    "weights": {"format": "exl3", "codebook": "mcg", "bits": 4},
    "capacities": [1, 4]}


def manifest(*requests):
    return {"schema": "kiln.model/1", "name": "Small",
            "requests": list(requests or [REQUEST])}


def write(name, value):
    path = SCRATCH / name
    path.parent.mkdir(parents=True, exist_ok=True)
    text = value if isinstance(value, str) else json.dumps(value, indent=1)
    path.write_text(text)
    return path


class Result:
    def __init__(self, done):
        self.code = done.returncode
        self.out = done.stdout
        self.err = done.stderr

    def json(self):
        return json.loads(self.out)

    def __str__(self):
        return f"exit {self.code}\nstdout: {self.out}\nstderr: {self.err}"


def kiln(*args, cache="cache", **kwargs):
    """Runs kiln with a cache folder of its own and no environment to help."""
    environment = {"PATH": os.environ.get("PATH", ""), "HOME": str(SCRATCH)}
    for name in ("ASAN_OPTIONS", "TSAN_OPTIONS", "UBSAN_OPTIONS"):
        if name in os.environ:
            environment[name] = os.environ[name]
    words = [str(KILN)]
    if cache is not None:
        words += ["--cache", str(SCRATCH / cache)]
    done = subprocess.run(words + [str(arg) for arg in args], text=True,
                          capture_output=True, timeout=240, check=False,
                          env={**environment, **kwargs.pop("env", {})},
                          **kwargs)
    return Result(done)


def children(pid):
    """Processes that any thread of a process started."""
    found = []
    for task in pathlib.Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(word) for word in task.read_text().split()]
        except OSError:
            continue  # the thread has ended
    return found


def cpu_seconds(pid):
    """What a process has used so far; 0 where it has ended."""
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    user, system = stat.rsplit(")", 1)[1].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def has_cc_cpu():
    return os.access(BIN / "kiln-cc-cpu", os.X_OK)


DOCTOR = kiln("--json", "doctor").json()
SMALL = write("small.json", manifest())
# Flags that plan, prewarm and freeze must agree on.
CPU = ["--target", "cpu", "--max-candidates", "1"]
# One plan per capacity, whatever the samples of this machine are.
FREEZE = ["freeze", SMALL, *CPU, "--keep-intervals", "--allow-unqualified"]


def need_cc_cpu(test):
    return unittest.skipUnless(
        has_cc_cpu(), f"this build has no kiln-cc-cpu in {BIN}")(test)


def need_nvrtc(test):
    return unittest.skipUnless(
        DOCTOR["nvrtc"]["found"],
        f"no NVRTC: {DOCTOR['nvrtc'].get('problem')}")(test)


class CliTest(unittest.TestCase):
    maxDiff = None

    def expect(self, result, code, *words):
        """A failure: its code, and one line on stderr that has all words."""
        self.assertEqual(result.code, code, result)
        lines = [line for line in result.err.splitlines() if line]
        self.assertTrue(lines, f"no message\n{result}")
        self.assertTrue(lines[-1].startswith("kiln: "), result)
        self.assertEqual(sum(line.startswith("kiln: ") for line in lines), 1,
                         f"more than one message\n{result}")
        for word in words:
            self.assertIn(word, lines[-1], result)
        self.assertFalse(lines[-1].endswith("."), result)
        return result

    def refuse(self, code, *words, args, **kwargs):
        """As expect, for commands that must print nothing on stdout."""
        result = self.expect(kiln(*args, **kwargs), code, *words)
        self.assertEqual(result.out, "", result)
        return result


_frozen = {}


def frozen_bundle():
    """Prewarms and freezes the small model once; returns the bundle's path."""
    if not _frozen:
        cold = kiln("--json", "prewarm", SMALL, *CPU, "--budget", "0.05")
        assert cold.code == DONE, cold
        path = SCRATCH / "small.kiln"
        frozen = kiln("--json", *FREEZE, "-o", path)
        assert frozen.code == DONE, frozen
        _frozen.update(cold=cold.json(), freeze=frozen.json(), path=path)
    return _frozen["path"]


# ---- what works --------------------------------------------------------------


@need_cc_cpu
class LinearTest(CliTest):
    """A manifest of both ops from prewarm to report."""

    @classmethod
    def setUpClass(cls):
        cls.manifest = write("mixed.json", manifest(
            LINEAR, {**REQUEST, "capacities": [2]},
            {**LINEAR, "name": "o_proj", "bias": False, "io_dtype": "f16",
             "in_features": 128, "out_features": 384,
             "weights": {"format": "exl3", "codebook": "3inst", "bits": 3},
             "capacities": [17]}))
        cls.bundle = SCRATCH / "mixed.kiln"
        cls.cold = kiln("--json", "prewarm", cls.manifest, *CPU, "--budget",
                        "0.05", cache="mixed")
        assert cls.cold.code == DONE, cls.cold
        frozen = kiln("freeze", cls.manifest, *CPU, "--keep-intervals",
                      "--allow-unqualified", "-o", cls.bundle, cache="mixed")
        assert frozen.code == DONE, frozen

    def test_prewarm_races_both_ops_and_again_does_nothing(self):
        report = self.cold.json()
        self.assertEqual((report["intervals"], report["winners"]), (4, 4))
        self.assertEqual(report["rejects"], 0)
        again = kiln("--json", "prewarm", self.manifest, *CPU, "--budget",
                     "0.05", cache="mixed").json()
        self.assertEqual(again["programs_compiled"], 0)
        self.assertEqual(again["launches"], 0)

    def test_a_manifest_of_linear_alone_is_served(self):
        path = write("alone.json", manifest(LINEAR))
        result = kiln("--json", "plan", path, *CPU, cache="none")
        self.assertEqual(result.code, DONE, result)
        self.assertIn("linear.cpu{", result.out)
        report = kiln("--json", "prewarm", path, *CPU, "--budget", "0.05",
                      cache="mixed").json()
        self.assertEqual((report["winners"], report["launches"]), (2, 0))

    def test_run_checks_every_size(self):
        for entry, sizes in (("q_proj", range(1, 5)), ("moe", (1, 2)),
                             ("o_proj", (1, 15, 16, 17))):
            for tokens in sizes:
                result = kiln("--json", "run", self.bundle, "--entry", entry,
                              "--tokens", tokens, "--check",
                              "--allow-unqualified")
                self.assertEqual(result.code, DONE, result)
                report = result.json()
                self.assertIs(report["passed"], True)
                self.assertIs(report["replayed"], True)
                self.assertGreater(report["worst_error"], 0)
        self.refuse(REFUSED, args=["run", self.bundle, "--entry", "q_proj",
                                   "--tokens", 5, "--allow-unqualified"])

    def test_verify_repeats_the_results_of_freeze(self):
        result = kiln("verify", self.bundle, "--selftest",
                      "--allow-unqualified")
        self.assertEqual(result.code, DONE, result)

    def test_inspect_shows_the_geometry_and_the_parameters(self):
        shown = kiln("--json", "inspect", self.bundle).json()
        entries = {e["name"]: e for e in shown["sections"][0]["entries"]}
        self.assertEqual(
            {name: entry["op"] for name, entry in entries.items()},
            {"moe": "fused_moe", "o_proj": "linear", "q_proj": "linear"})
        self.assertEqual(entries["q_proj"]["geometry"],
                         "linear [256, 128] exl3-mcg K4 w4a16 bf16 bias")
        plan = entries["q_proj"]["plans"][0]
        self.assertTrue(plan["label"].startswith("linear.cpu{"), plan)

    def test_bench_times_both_ops(self):
        result = kiln("--json", "bench", self.bundle, "--blocks", "2",
                      "--allow-unqualified")
        self.assertEqual(result.code, DONE, result)
        rows = {(r["entry"], r["tokens"]): r for r in result.json()["rows"]}
        self.assertEqual(set(rows), {("moe", 2), ("o_proj", 17),
                                     ("q_proj", 1), ("q_proj", 4)})
        row = rows["q_proj", 4]
        # 256 * 128 weights of 4 bits, scales and bias, x and out.
        self.assertAlmostEqual(
            row["bytes_per_s"] * row["ns"] / 1e9,
            256 * 128 / 2 + (256 + 2 * 128) * 2 + 4 * (256 * 2 + 128 * 4))
        self.assertAlmostEqual(row["flops_per_s"] * row["ns"] / 1e9,
                               2 * 256 * 128 * 4)
        self.refuse(REFUSED, "fused_moe only", "linear [256, 128]", args=[
            "bench", self.bundle, "--compare", "torch", "--entry", "q_proj",
            "--allow-unqualified"])
        self.refuse(USAGE, "--max-capacity is 16", 'for entry "o_proj"',
                    "is 17 tokens", args=[
                        "bench", self.bundle, "--entry", "o_proj",
                        "--max-capacity", "16", "--allow-unqualified"])

    def test_explain_replay_and_report_know_it(self):
        result = kiln("--json", "explain", self.manifest, *CPU, "--entry",
                      "q_proj", "--tokens", "3", cache="mixed")
        self.assertEqual(result.code, DONE, result)
        (interval,) = result.json()["intervals"]
        self.assertEqual((interval["m_min"], interval["m_max"]), (2, 4))
        self.assertTrue(interval["winner"].startswith("linear.cpu{"))
        replayed = kiln("replay", cache="mixed")
        self.assertEqual(replayed.code, DONE, replayed)
        self.assertIn("linear [256, 128]", replayed.out)
        page = SCRATCH / "mixed.html"
        result = kiln("report", "-o", page, cache="mixed")
        self.assertEqual(result.code, DONE, result)
        self.assertIn("linear [128, 384]", page.read_text())

    def test_diff_tells_two_bundles_apart(self):
        same = kiln("diff", self.bundle, self.bundle)
        self.assertEqual(same.code, DONE, same)
        other = kiln("diff", frozen_bundle(), self.bundle)
        self.assertEqual(other.code, FAILED, other)
        self.assertIn("q_proj", other.out)


@need_cc_cpu
class HappyPathTest(CliTest):

    @classmethod
    def setUpClass(cls):
        cls.bundle = frozen_bundle()

    def run_entry(self, *args, file=None):
        return kiln("--json", "run", file or self.bundle, "--entry", "moe",
                    "--allow-unqualified", *args)

    def test_prewarm_reports_what_it_did(self):
        report = _frozen["cold"]
        self.assertEqual(report["requests"], 1)
        self.assertEqual(report["intervals"], 3)
        self.assertGreaterEqual(report["candidates"], 1)
        self.assertGreaterEqual(report["programs_compiled"], 1)
        self.assertEqual(report["programs_reused"], 0)
        self.assertEqual(report["rejects"], 0)
        self.assertGreater(report["launches"], 0)
        self.assertEqual(report["winners"], 3)
        self.assertEqual(report["predicted"], 0)
        self.assertIs(report["complete"], True)
        self.assertGreater(report["seconds"]["total"], 0)

    def test_a_second_prewarm_does_nothing(self):
        result = kiln("--json", "prewarm", SMALL, *CPU)
        self.assertEqual(result.code, DONE, result)
        report = result.json()
        self.assertEqual(report["programs_compiled"], 0)
        self.assertEqual(report["launches"], 0)
        self.assertEqual(report["winners"], 3)
        self.assertIs(report["complete"], True)

    def test_prewarm_in_words_has_a_row_per_interval(self):
        result = kiln("prewarm", SMALL, *CPU)
        self.assertEqual(result.code, DONE, result)
        for interval in ("1..1", "2..4", "5..8"):
            self.assertIn(interval, result.out)
        self.assertIn("3 measured, 0 predicted", result.out)
        self.assertNotIn("\r", result.err, "a bar although stderr is no tty")

    def test_the_cache_follows_the_environment(self):
        for env in ({"KILN_CACHE": str(SCRATCH / "cache")},
                    {"XDG_CACHE_HOME": str(SCRATCH / "xdg")},
                    {}):
            result = kiln("--json", "doctor", cache=None, env=env)
            self.assertEqual(result.code, DONE, result)
            folder = result.json()["cache"]["folder"]
            expected = (env.get("KILN_CACHE")
                        or (f"{env['XDG_CACHE_HOME']}/kiln" if env
                            else f"{SCRATCH}/.cache/kiln"))
            self.assertEqual(folder, expected)

    def test_doctor_says_what_nvml_offers(self):
        nvml = DOCTOR["nvml"]
        self.assertIn("version" if nvml["found"] else "problem", nvml)
        for device in DOCTOR["devices"]:
            self.assertIn("state", device)
        self.assertIn("nvml ", kiln("doctor", cache=None).out)

    def test_a_race_worker_is_not_for_use_by_hand(self):
        result = kiln("race-worker", cache=None)
        self.assertEqual(result.code, USAGE, result)
        self.assertIn("kiln starts it when it needs it", result.err)

    def test_several_devices_are_a_list(self):
        result = kiln("plan", SMALL, *CPU, "--device", "0,1")
        self.assertEqual(result.code, DONE, result)
        for bad in ("0,x", "0,64", "-1"):
            result = kiln("plan", SMALL, *CPU, "--device", bad)
            self.assertEqual(result.code, USAGE, (bad, result))

    def test_freeze_is_reproducible(self):
        other = SCRATCH / "again.kiln"
        result = kiln("--json", *FREEZE, "-o", other)
        self.assertEqual(result.code, DONE, result)
        self.assertEqual(other.read_bytes(), self.bundle.read_bytes())
        self.assertEqual(result.json()["root"], _frozen["freeze"]["root"])
        for key in ("file", "bytes", "entries", "plans", "predicted",
                    "programs"):
            self.assertIn(key, result.json())
        self.assertEqual(result.json()["bytes"], other.stat().st_size)

    def test_freeze_works_from_a_copied_read_only_cache(self):
        shutil.copytree(SCRATCH / "cache", SCRATCH / "cache copy")
        other = SCRATCH / "copy.kiln"
        result = kiln("--cache-mode", "read-only", *FREEZE, "-o", other,
                      cache="cache copy")
        self.assertEqual(result.code, DONE, result)
        self.assertEqual(other.read_bytes(), self.bundle.read_bytes())

    def test_verify_accepts_the_bundle_and_its_root(self):
        root = _frozen["freeze"]["root"]
        for words in ([], ["--root", root]):
            result = kiln("--json", "verify", self.bundle, *words)
            self.assertEqual(result.code, DONE, result)
            report = result.json()
            self.assertEqual(report["root"], root)
            self.assertIs(report["verified"], True)
            self.assertIs(report["predicted"], False)
        self.assertIn(root, kiln("verify", self.bundle).out)

    def test_inspect_shows_everything(self):
        result = kiln("--json", "inspect", self.bundle)
        self.assertEqual(result.code, DONE, result)
        report = result.json()
        self.assertEqual(report["root"], _frozen["freeze"]["root"])
        (section,) = report["sections"]
        self.assertEqual(section["target"], DOCTOR["cpu_target"])
        (entry,) = section["entries"]
        self.assertEqual(entry["name"], "moe")
        self.assertEqual(entry["capacity"], 8)
        spans = [(plan["m_min"], plan["m_max"]) for plan in entry["plans"]]
        self.assertEqual(spans, [(1, 1), (2, 4), (5, 8)])
        for plan in entry["plans"]:
            self.assertEqual(plan["state"], "measured")
            self.assertGreater(plan["evidence"]["median_ns"], 0)
            self.assertEqual(len(plan["params"]), 11)
            for step in plan["steps"]:
                self.assertLess(step["program"], len(section["programs"]))
        text = kiln("inspect", self.bundle)
        self.assertEqual(text.code, DONE, text)
        for word in ("moe", "5..8", "measured", "kiln_moe_cpu_fc1"):
            self.assertIn(word, text.out)

    def test_plan_lists_candidates_and_compiles_nothing(self):
        result = kiln("--json", "plan", SMALL, "--target", "cpu", cache="none")
        self.assertEqual(result.code, DONE, result)
        intervals = result.json()["intervals"]
        self.assertEqual([(i["m_min"], i["m_max"]) for i in intervals],
                         [(1, 1), (2, 4), (5, 8)])
        keys = [i["plan_key"] for i in intervals]
        self.assertEqual(len(set(keys)), 3)
        for interval in intervals:
            labels = [c["label"] for c in interval["candidates"]]
            self.assertGreaterEqual(len(labels), 2)
            self.assertEqual(len(set(labels)), len(labels))
        again = kiln("--json", "plan", SMALL, "--target", "cpu", cache="none")
        self.assertEqual(again.out, result.out)
        text = kiln("plan", SMALL, "--target", "cpu", cache="none")
        self.assertIn("fused_moe.cpu{", text.out)

    def test_run_checks_every_size(self):
        for tokens in (1, 2, 3, 4, 5, 7, 8):
            result = self.run_entry("--tokens", tokens, "--check")
            self.assertEqual(result.code, DONE, result)
            report = result.json()
            self.assertIs(report["passed"], True)
            self.assertIs(report["replayed"], True)
            self.assertGreater(report["worst_error"], 0)
            self.assertLessEqual(report["worst_error"], report["tolerance"])
            self.assertTrue(report["m_min"] <= tokens <= report["m_max"])

    def test_run_takes_a_seed_and_a_target(self):
        errors = set()
        for seed in (1, 2, 3):
            result = self.run_entry("--tokens", 4, "--check", "--seed", seed,
                                    "--target", DOCTOR["cpu_target"])
            self.assertEqual(result.code, DONE, result)
            errors.add(result.json()["worst_error"])
        self.assertEqual(len(errors), 3, "the seed changes nothing")

    def test_run_without_tokens_is_nothing_to_do(self):
        result = kiln("run", self.bundle, "--entry", "moe", "--tokens", 0,
                      "--allow-unqualified")
        self.assertEqual(result.code, DONE, result)
        self.assertIn("nothing to do", result.err)
        check = self.run_entry("--tokens", 0, "--check")
        self.assertEqual(check.code, DONE, check)
        self.assertEqual(check.json()["tokens"], 0)
        self.assertNotIn("passed", check.json())

    def test_a_bundle_moves_to_another_folder(self):
        moved = SCRATCH / "deep" / "er" / "model.kiln"
        moved.parent.mkdir(parents=True)
        shutil.copy(self.bundle, moved)
        result = self.run_entry("--tokens", 3, "--check", file=moved)
        self.assertEqual(result.code, DONE, result)

    def test_progress_keeps_to_one_row_of_a_narrow_terminal(self):
        master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", 24, 40, 0, 0))
        done = subprocess.run(
            [KILN, "--cache-mode", "off", "prewarm", SMALL, *CPU, "--budget",
             "0.05"], stdout=subprocess.DEVNULL, stderr=slave, timeout=240,
            check=False)
        os.close(slave)
        drawn = b""
        while True:
            try:
                drawn += os.read(master, 65536)
            except OSError:  # all was read, and the other end is closed
                break
        os.close(master)
        self.assertEqual(done.returncode, DONE, drawn)
        # A note is a line of its own; another test may be racing.
        rows = [row for row in drawn.decode().split("\r\033[K")
                if not row.endswith("\r\n")]
        self.assertTrue(any(row.startswith("race [") for row in rows), drawn)
        self.assertLess(max(map(len, rows)), 40, drawn)

    def test_stop_after_ends_early_and_says_so(self):
        for stage in ("resolve", "lookup", "enumerate", "compile"):
            result = kiln("--json", "prewarm", SMALL, "--target", "cpu",
                          "--max-candidates", 2, "--max-capacity", 1,
                          "--stop-after", stage, cache="stopped")
            self.assertEqual(result.code, DONE, result)
            report = result.json()
            self.assertEqual(report["stopped_after"], stage)
            self.assertIs(report["complete"], False)
            self.assertEqual(report["launches"], 0)

    def test_compile_only_is_predicted_and_freeze_wants_consent(self):
        words = [SMALL, *CPU, "--compile-only"]
        result = kiln("--json", "prewarm", *words, cache="predicted")
        self.assertEqual(result.code, DONE, result)
        self.assertEqual(result.json()["predicted"], 3)
        self.assertEqual(result.json()["launches"], 0)
        self.assertIn("predicted", result.err)
        file = SCRATCH / "predicted.kiln"
        self.refuse(REFUSED, "predicted", "--allow-predicted",
                    args=["freeze", *words, "--allow-unqualified", "-o", file],
                    cache="predicted")
        self.assertFalse(file.exists(), "a refused freeze left a file")
        allowed = kiln("--json", "freeze", *words, "--allow-unqualified",
                       "--allow-predicted", "-o", file, cache="predicted")
        self.assertEqual(allowed.code, DONE, allowed)
        self.assertIs(kiln("--json", "verify", file).json()["predicted"], True)
        self.expect(self.run_entry("--tokens", 1, file=file), REFUSED,
                    "predicted")
        self.assertEqual(
            self.run_entry("--tokens", 1, "--check", "--allow-predicted",
                           file=file).code, DONE)


class DoctorTest(CliTest):

    def test_prints_one_object_with_the_promised_keys(self):
        for key in ("cpu_target", "nvrtc", "devices", "sqlite", "cache"):
            self.assertIn(key, DOCTOR)
        self.assertRegex(DOCTOR["cpu_target"], r"^cpu-x86-64-v[234]$")

    def test_creates_no_cache(self):
        result = kiln("doctor", cache="never made")
        self.assertEqual(result.code, DONE, result)
        self.assertFalse((SCRATCH / "never made").exists())
        self.assertIn("never made", result.out)

    def test_says_what_still_works_without_compilers(self):
        result = kiln("--nvrtc", "/nonexistent/libnvrtc.so", "--cc-cpu",
                      "/nonexistent/cc", "doctor")
        self.assertEqual(result.code, DONE, result)
        self.assertIn("without it sm_* targets cannot be compiled", result.out)
        self.assertIn("without it CPU targets cannot be compiled", result.out)


class ModelsTest(CliTest):

    def test_every_model_in_the_tree_plans(self):
        targets = [(["--target", DOCTOR["cpu_target"]], has_cc_cpu()),
                   (["--target", "sm_90a", "--target", "sm_120a"],
                    DOCTOR["nvrtc"]["found"])]
        if not any(possible for _, possible in targets):
            self.skipTest("no compiler at all")
        for model in sorted((SOURCE / "tests/data/models").glob("*.json")):
            for words, possible in targets:
                if not possible:
                    continue
                result = kiln("--json", "plan", model, *words, cache="none")
                self.assertEqual(result.code, DONE, result)
                for interval in result.json()["intervals"]:
                    self.assertGreaterEqual(len(interval["candidates"]), 2)


# ---- what is refused ---------------------------------------------------------


def changed(**fields):
    request = json.loads(json.dumps(REQUEST))
    for key, value in fields.items():
        if value is None:
            del request[key]
        elif key in ("bits", "codebook", "format"):
            request["weights"][key] = value
        else:
            request[key] = value
    return manifest(request)


BAD_MANIFESTS = {
    "an unknown key of a request": (changed(colour="red"), ["colour"]),
    "an unknown key at the top":
        ({**manifest(), "requets": []}, ["requets"]),
    "a missing key": (changed(hidden=None), ["hidden"]),
    "another schema": ({**manifest(), "schema": "kiln.model/2"},
                       ["kiln.model/2", "kiln.model/1"]),
    "no requests": ({**manifest(), "requests": []}, ["requests"]),
    "hidden 0": (changed(hidden=0), ["hidden", "0"]),
    "hidden -128": (changed(hidden=-128), ["hidden", "-128"]),
    "hidden no multiple of 128": (changed(hidden=200), ["200", "128"]),
    "intermediate no multiple of 128":
        (changed(intermediate=192), ["192", "128"]),
    "huge hidden": (changed(hidden=1 << 40), ["hidden"]),
    "hidden beyond 64 bits": (changed(hidden=1 << 70), []),
    "hidden as text": (changed(hidden="256"), ["hidden"]),
    "hidden as a fraction": (changed(hidden=256.5), ["256.5"]),
    "no experts": (changed(experts=0), ["experts"]),
    "huge experts": (changed(experts=100000), ["experts", "100000"]),
    "top_k 0": (changed(top_k=0), ["top_k"]),
    "top_k above experts": (changed(top_k=5), ["top_k", "5", "4"]),
    "0 bits": (changed(bits=0), ["bits", "0"]),
    "9 bits": (changed(bits=9), ["bits", "9", "8"]),
    "9 bits for one projection":
        (changed(bits={"gate": 4, "up": 9, "down": 4}), ["9"]),
    "bits for two projections":
        (changed(bits={"gate": 4, "up": 4}), ["down"]),
    "an unknown codebook": (changed(codebook="mcg2"), ["mcg2", "mcg"]),
    "an unknown format": (changed(format="gguf"), ["gguf", "exl3"]),
    "an unknown op": (changed(op="attention"), ["attention"]),
    "an unknown recipe": (changed(recipe="w2a2"), ["w2a2"]),
    "an unknown activation": (changed(activation="relu"), ["relu"]),
    "an unknown dtype": (changed(io_dtype="f64"), ["f64"]),
    "an unknown id dtype": (changed(id_dtype="i16"), ["i16"]),
    "unsorted capacities": (changed(capacities=[4, 1]), ["capacit"]),
    "duplicate capacities": (changed(capacities=[1, 4, 4]), ["capacit", "4"]),
    "no capacities": (changed(capacities=[]), ["capacit"]),
    "capacity 0": (changed(capacities=[0, 1]), ["0"]),
    "huge capacity": (changed(capacities=[1, 1 << 31]), ["2147483648"]),
    "an empty name": (changed(name=""), ["name"]),
    "duplicate names": (manifest(REQUEST, REQUEST), ["moe"]),
    "one geometry with two lists of capacities":
        (manifest(REQUEST, {**REQUEST, "name": "b", "capacities": [2]}),
         ["capacit"]),
    "no JSON": ("{", []),
    "an empty file": ("", []),
    "a duplicate key": ('{"schema": "kiln.model/1", "schema": "x"}',
                        ["schema"]),
    "deep nesting": ("[" * 100000, []),
}


class BadManifestTest(CliTest):

    def test_each_is_a_usage_error_with_its_place(self):
        # These need no compiler: the manifest is read first.
        for name, (value, words) in BAD_MANIFESTS.items():
            with self.subTest(name):
                path = write("bad.json", value)
                for verb in (["plan"], ["prewarm"], ["freeze", "-o",
                                                     SCRATCH / "bad.kiln"]):
                    result = self.refuse(USAGE, *words, args=[
                        verb[0], path, "--target", "cpu", *verb[1:]])
                    if "two lists" not in name:
                        self.assertRegex(
                            result.err, r"kiln: \S*bad\.json:\d+:\d+: ")
                self.assertFalse((SCRATCH / "bad.kiln").exists())

    def test_the_place_is_that_of_the_value(self):
        text = json.dumps(changed(hidden=200), indent=1)
        line = next(number for number, row in enumerate(text.splitlines(), 1)
                    if '"hidden"' in row)
        column = text.splitlines()[line - 1].index("200") + 1
        path = write("place.json", text)
        self.refuse(USAGE, f"place.json:{line}:{column}: ",
                    args=["plan", path, "--target", "cpu"])

    def test_a_missing_manifest_is_named(self):
        for verb in (["plan"], ["prewarm"],
                     ["freeze", "-o", SCRATCH / "bad.kiln"]):
            result = self.refuse(USAGE, "absent.json", "No such file", args=[
                verb[0], SCRATCH / "absent.json", "--target", "cpu", *verb[1:]])
            self.assertNotIn("\n", result.err.strip())

    def test_a_folder_is_no_manifest(self):
        self.refuse(USAGE, "not a regular file",
                    args=["plan", SCRATCH, "--target", "cpu"])

    @need_cc_cpu
    def test_a_limit_below_every_capacity_is_named(self):
        path = write("large.json", changed(capacities=[16, 32]))
        self.refuse(USAGE, "capacit", args=[
            "plan", path, "--target", "cpu", "--max-capacity", 8])


class UsageTest(CliTest):

    def test_mistakes_are_usage_errors(self):
        run = ["run", "x.kiln", "--entry", "moe"]
        cases = [
            ([], ["subcommand"]),
            (["frobnicate"], ["frobnicate"]),
            (["--frobnicate"], ["--frobnicate"]),
            (["plan"], ["required"]),
            (["plan", SMALL], ["--target"]),
            (["plan", SMALL, "--target"], ["--target"]),
            (["plan", SMALL, "--target", "cpu", "--frob"], ["--frob"]),
            (["plan", SMALL, "extra", "--target", "cpu"], ["extra"]),
            (["plan", SMALL, "--target", "sm_42"], ["sm_42", "sm_90a"]),
            (["plan", SMALL, "--target", "sm_90A"], ["sm_90A"]),
            (["plan", SMALL, "--target", "sm_80a"], ["sm_80a"]),
            (["plan", SMALL, "--target", "cpu-x86-64-v5"], ["v5"]),
            (["plan", SMALL, "--target", ""], ['""']),
            (["plan", SMALL, "--target", "cpu", "--max-candidates", "0"],
             ["--max-candidates"]),
            (["plan", SMALL, "--target", "cpu", "--max-capacity", "0"],
             ["--max-capacity"]),
            (["prewarm", SMALL, "--target", "cpu", "--jobs", "0"], ["--jobs"]),
            (["prewarm", SMALL, "--target", "cpu", "--jobs", "-1"],
             ["--jobs"]),
            (["prewarm", SMALL, "--target", "cpu", "--jobs", "many"],
             ["--jobs"]),
            *((["plan", SMALL, "--target", "cpu", "--max-arena", size],
               ["--max-arena"]) for size in ("0", "-1", "2TiB", "much")),
            (["prewarm", SMALL, "--target", "cpu", "--budget", "-1"],
             ["--budget"]),
            (["prewarm", SMALL, "--target", "cpu", "--compile-timeout", "0"],
             ["--compile-timeout"]),
            (["prewarm", SMALL, "--target", "cpu", "--stop-after", "lunch"],
             ["lunch", "compile"]),
            (["freeze", SMALL, "--target", "cpu"], ["--output"]),
            (["--cache-mode", "rw", "plan", SMALL, "--target", "cpu"],
             ["rw", "read-only"]),
            (run, ["--tokens"]),
            ([*run, "--tokens", "-1"], ["--tokens"]),
            ([*run, "--tokens", "two"], ["--tokens"]),
            ([*run, "--tokens", "1e3"], ["--tokens"]),
            (["run", "x.kiln", "--tokens", "1"], ["--entry"]),
            ([*run, "--tokens", "1", "--seed", "-1"], ["--seed"]),
            ([*run, "--tokens", "1", "--seed", str(1 << 64)], ["--seed"]),
            *((["prewarm", SMALL, "--target", "cpu", option, value],
               [option, value])
              for option in ("--budget", "--compile-timeout")
              for value in ("nan", "inf", "0", "1e300")),
            *((["cache", "gc", "--max-age", value], ["--max-age"])
              for value in ("nan", "inf", "-1", "1e300")),
            *((["cache", "gc", "--max-bytes", value], ["--max-bytes"])
              for value in ("-1", str((1 << 64) - 1), "-5KB", "5X", "1e3",
                            "nan", "")),
            (["verify"], ["file"]),
            (["verify", SMALL, "--root", "xyz"], ["64 hex digits"]),
        ]
        for args, words in cases:
            with self.subTest(" ".join(str(arg) for arg in args)):
                self.refuse(USAGE, *words, args=args)

    @need_cc_cpu
    def test_numbers_are_decimal_with_leading_zeros_too(self):
        def planned(*args):
            result = kiln("--json", "plan", SMALL, "--target", "cpu", *args)
            self.assertEqual(result.code, DONE, result)
            return [len(interval["candidates"])
                    for interval in result.json()["intervals"]]
        self.assertEqual(planned("--max-candidates", "010"), [10] * 3)
        self.assertEqual(planned("--max-candidates", "3", "--device", "08,1"),
                         [3] * 3)
        self.assertEqual(planned("--max-candidates", "3", "--max-capacity",
                                 "0004"), [3] * 2)
        self.refuse(REFUSED, "exceeds the limit of 10", args=[
            "plan", SMALL, "--target", "cpu", "--max-arena", "010"])
        self.refuse(REFUSED, "exceeds the limit of 1024", args=[
            "plan", SMALL, "--target", "cpu", "--max-arena", "01KiB"])
        for size in ("4 KiB", "4k", "4KB", "4Ki", "4096b", "4096"):
            self.refuse(REFUSED, "exceeds the limit of 4096", args=[
                "plan", SMALL, "--target", "cpu", "--max-arena", size])
        for option in ("--max-candidates", "--max-capacity", "--max-arena",
                       "--device"):
            for value in ("0x4", "1_0", "1'0", "+1", " 1", "0b1", "0o1", "1.0"):
                with self.subTest(f"{option} {value}"):
                    self.refuse(USAGE, option, f'"{value}"', args=[
                        "plan", SMALL, "--target", "cpu", option, value])

    def test_what_would_be_passed_over_is_refused(self):
        gc = ["cache", "gc", "--max-age", "1"]
        for option, needed, args in (
                *((words[0], "--manifest", [*gc, *words]) for words in (
                    ["--max-arena", "1MiB"], ["--target", "cpu"],
                    ["--max-candidates", "1"], ["--max-capacity", "1"],
                    ["--exhaustive"], ["--warm-l2"], ["--device", "1"],
                    ["--keep-numerics", "x"], ["--package", "x"],
                    ["--compile-only"])),
                ("--signature", "--key", ["verify", "x.kiln", "--signature",
                                          "x"]),
                ("--python", "--compare", ["bench", "x.kiln", "--python", "p"]),
                ("--output", "file", ["sign", "--new-key", "--key", "k", "-o",
                                      "s"])):
            with self.subTest(option):
                self.refuse(USAGE, f"{option} requires", needed, args=args)

    def test_an_empty_value_is_never_the_default(self):
        # As where a script's variable is unset; all of these mean something
        # else when they are left out, or another place.
        plan = [SMALL, "--target", "cpu"]
        cases = {
            "--cache": ["doctor", "--cache", ""],
            "--nvrtc": ["doctor", "--nvrtc", ""],
            "--cc-cpu": ["doctor", "--cc-cpu", ""],
            "--root": ["verify", "x.kiln", "--root", ""],
            "--key": ["verify", "x.kiln", "--key", ""],
            "--signature": ["verify", "x.kiln", "--key", "k",
                            "--signature", ""],
            "--digest": ["cache", "import", "x", "--digest", ""],
            "--prefer": ["cache", "merge", "x", "--prefer", ""],
            "--manifest": ["cache", "gc", "--max-age", "1", "--manifest", ""],
            "--bundle": ["cache", "gc", "--max-age", "1", "--bundle", ""],
            "--keep-numerics": ["plan", *plan, "--keep-numerics", ""],
            "--shard": ["prewarm", *plan, "--shard", ""],
            "--stop-after": ["prewarm", *plan, "--stop-after", ""],
            "--target": ["run", "x.kiln", "--entry", "moe", "--tokens", "1",
                         "--target", ""],
            "--entry": ["bench", "x.kiln", "--entry", ""],
            "--compare": ["bench", "x.kiln", "--compare", ""],
            "--python": ["bench", "x.kiln", "--python", ""],
            "--output": ["describe", "x", "--output", ""],
            "--tp": ["describe", "x", "--tp", ""],
            "--layer": ["prepare", "x", "-o", "y", "--layer", ""],
            "--format": ["encode", "x", "-o", "y", "--format", ""],
            "file": ["sign", "", "--new-key", "--key", "k"],
            "folders": ["cache", "merge", ""],
            "checkpoint": ["describe", ""],
        }
        for option, args in cases.items():
            with self.subTest(option):
                self.refuse(USAGE, option, args=args)
                if option.startswith("--"):  # in one word
                    joined = [f"{option}=" if arg == option else arg
                              for arg in args if arg != ""]
                    self.refuse(USAGE, option, args=joined)

    def test_help_and_version_succeed(self):
        for args in (["--help"], ["--version"], ["prewarm", "--help"],
                     ["run", "-h"]):
            result = kiln(*args)
            self.assertEqual(result.code, DONE, result)
            self.assertNotEqual(result.out, "")
            self.assertEqual(result.err, "")
        self.assertIn("Exit codes", kiln("--help").out)

    def test_results_that_cannot_be_written_are_no_success(self):
        for args in (["--json", "doctor"], ["--help"], ["--version"],
                     ["plan", SMALL, "--target", "sm_90a"]):
            if args[0] == "plan" and not DOCTOR["nvrtc"]["found"]:
                continue
            for shell in ("exec \"$@\" >/dev/full", "exec \"$@\" >&-"):
                with self.subTest(f"{args} {shell}"):
                    done = subprocess.run(
                        ["sh", "-c", shell, "sh", KILN, "--cache",
                         SCRATCH / "cache", *args], text=True, timeout=60,
                        stderr=subprocess.PIPE, check=False)
                    self.assertEqual(done.returncode, FAILED, done.stderr)
                    self.assertIn("cannot write to stdout", done.stderr)

    def test_json_names_files_that_are_no_utf_8(self):
        name = os.fsencode(SCRATCH) + b"/caf\xe9"
        done = subprocess.run([KILN, "--json", "--cache", name, "doctor"],
                              capture_output=True, timeout=60, check=False)
        self.assertEqual(done.returncode, DONE, done.stderr)
        self.assertTrue(json.loads(done.stdout)["cache"]["folder"].endswith(
            "caf\ufffd"))


class MissingThingsTest(CliTest):

    def test_links_in_a_circle_are_bad_input_everywhere(self):
        loop = SCRATCH / "loop"
        loop.symlink_to(loop)
        plan = ["plan", SMALL, "--target", "cpu"]
        for args in (["plan", loop, "--target", "cpu"],
                     [*plan, "--package", loop], [*plan, "--keep-numerics", loop],
                     ["--cc-cpu", loop, *plan],
                     ["describe", loop], ["package", "check", loop],
                     ["prepare", loop, "-o", SCRATCH / "out", "--layer", "0"],
                     ["encode", loop, "-o", SCRATCH / "out"],
                     ["verify", loop], ["inspect", loop], ["diff", loop, loop],
                     ["bench", loop], ["sign", loop, "--key", "k"],
                     ["run", loop, "--entry", "moe", "--tokens", "1"]):
            with self.subTest(" ".join(map(str, args))):
                self.refuse(USAGE, str(loop), args=args)
        for args in (["cache", "stats"], ["prewarm", SMALL, "--target", "cpu"]):
            self.refuse(USAGE, str(loop), args=args, cache="loop")
        # So are names that no file can have.
        self.refuse(USAGE, "x" * 80, args=["verify", "x" * 300])
        self.refuse(USAGE, "x" * 300, args=["plan", "x" * 300, "--target", "cpu"])

    def test_files_that_are_too_large_are_bad_input(self):
        folder = SCRATCH / "large"
        folder.mkdir()
        for name in ("package.json", "config.json", "model.json"):
            with open(folder / name, "wb") as out:
                out.truncate(1 << 30)
        for args in (["package", "check", folder], ["package", "pin", folder],
                     ["describe", folder],
                     ["plan", folder / "model.json", "--target", "cpu"],
                     ["plan", SMALL, "--target", "cpu", "--package", folder]):
            with self.subTest(" ".join(map(str, args))):
                self.refuse(USAGE, "has 1073741824 bytes, at most", args=args)

    def test_missing_nvrtc_is_one_clear_error(self):
        file = SCRATCH / "no_nvrtc.kiln"
        for verb in (["plan"], ["prewarm"], ["prewarm", "--compile-only"],
                     ["freeze", "-o", file]):
            self.refuse(USAGE, "sm_90a", "/nonexistent", args=[
                "--nvrtc", "/nonexistent/libnvrtc.so.13", verb[0], SMALL,
                "--target", "sm_90a", *verb[1:]], cache="no nvrtc")
        self.assertFalse(file.exists())

    @need_cc_cpu
    def test_memory_for_a_huge_request_is_one_clear_error(self):
        large = write("large.json", manifest({
            **REQUEST, "name": "huge", "hidden": 32768, "intermediate": 65536,
            "experts": 1024, "capacities": [1]},
            {**REQUEST, "capacities": [1]}))
        # Three matrices of 4 bits a weight, on the host and on the device.
        least = 3 * 32768 * 65536 * 1024 // 2 * 2
        done = kiln("--json", "prewarm", large, *CPU, cache="large")
        self.assertEqual(done.code, INCOMPLETE, done)
        self.assertIn("huge m<=1: no race: the weights of fused_moe H32768 "
                      "I65536 E1024", done.err)
        self.assertIn("are available; free some", done.err)
        needed = int(re.search(r"needs (\d+) bytes", done.err)[1])
        self.assertGreater(needed, least)
        self.assertLess(needed, 1.01 * least)
        # The other request is tuned all the same.
        plans = {plan["requests"][0]: plan for plan in done.json()["plans"]}
        self.assertIn(f"needs {needed} bytes", plans["huge"]["problem"])
        self.assertEqual(plans["moe"]["state"], "raced")

    def test_what_is_no_nvrtc_is_refused(self):
        text = write("libnvrtc.so.13", "this is no library")
        result = self.expect(
            kiln("--nvrtc", text, "prewarm", SMALL, "--target", "sm_90a",
                 "--compile-only", cache="no nvrtc"), FAILED, "libnvrtc")
        self.assertEqual(result.out, "")

    def test_missing_cc_cpu_is_one_clear_error(self):
        for verb in (["plan"], ["prewarm"],
                     ["freeze", "-o", SCRATCH / "no_cc.kiln"]):
            self.refuse(USAGE, "cpu-x86-64", "/nonexistent/cc", args=[
                "--cc-cpu", "/nonexistent/cc", verb[0], SMALL, "--target",
                "cpu", *verb[1:]], cache="no cc")
        self.assertFalse((SCRATCH / "no_cc.kiln").exists())

    def expect_compiled(self, request, template, bits):
        """Both arms of a request for every kind of GPU; bits: of theirs."""
        name = request["name"]
        path = write(name + ".json", manifest(request))
        for target in ("sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a"):
            done = kiln("--json", "prewarm", path, "--target", target,
                        "--max-candidates", "2", "--compile-only", cache=name)
            self.assertEqual(done.code, DONE, done)
            report = done.json()
            self.assertEqual(report["rejects"], 0, report)
            self.assertEqual(
                [(plan["m_max"], plan["state"], plan["winner"].split(",")[0])
                 for plan in report["plans"]],
                [(m, "predicted", f"{template}{{activation_bits={b}")
                 for m, b in zip((4, 9), bits)], report)

    @need_nvrtc
    def test_trellis_mx_compiles_both_arms_for_gpu_targets(self):
        self.expect_compiled(
            {**REQUEST, "name": "mx", "hidden": 512, "recipe": "w4a8",
             "weights": {"format": "trellis_mx", "bits": 5, "limit": "10"},
             "smallm_max_tokens": 4, "capacities": [4, 9]},
            "fused_moe.mx_cuda", (16, 8))

    @need_nvrtc
    def test_the_direct_arm_compiles_for_gpu_targets(self):
        self.expect_compiled(
            {**REQUEST, "name": "mx-direct", "hidden": 512, "recipe": "w4a8",
             "weights": {"format": "trellis_mx", "bits": 3, "limit": "10"},
             "direct_max_tokens": 4, "remainder": "rp2", "capacities": [4, 9]},
            "fused_moe.mx_cuda", (8, 8))

    @need_nvrtc
    def test_identity_layers_compile_all_arms_for_gpu_targets(self):
        for name, limits, bits in (
                ("mx-id", {"smallm_max_tokens": 4}, (16, 8)),
                ("mx-id-direct", {"direct_max_tokens": 4, "remainder": "rp2"},
                 (8, 8))):
            self.expect_compiled(
                {**REQUEST, "name": name, "hidden": 640, "recipe": "w4a8",
                 "weights": {"format": "trellis_mx", "bits": 4, "limit": "10",
                             "boundary": "identity"},
                 **limits, "capacities": [4, 9]},
                "fused_moe.mx_cuda", bits)

    # Two candidates are one of each way to decode.
    @need_nvrtc
    def test_qsrt_compiles_both_arms_for_gpu_targets(self):
        self.expect_compiled(
            {**REQUEST, "name": "qsrt", "intermediate": 256, "recipe": "w4a8",
             "weights": {"format": "qsrt", "pairs": "p24_p33",
                         "scales": "per_expert"},
             "decode_max_tokens": 4, "capacities": [4, 9]},
            "fused_moe.qsrt_cuda", (8, 16))

    @need_nvrtc
    def test_without_a_gpu_plans_are_predicted_and_incomplete(self):
        if DOCTOR["devices"]:
            self.skipTest("this machine has a GPU")
        words = [SMALL, "--target", "sm_90a", "--max-candidates", "1"]
        result = kiln("--json", "prewarm", *words, cache="no gpu")
        self.assertEqual(result.code, INCOMPLETE, result)
        report = result.json()
        self.assertEqual(report["winners"], 0)
        self.assertEqual(report["predicted"], 3)
        self.assertIn("predicted", result.err)
        only = kiln("--json", "prewarm", *words, "--compile-only",
                    cache="no gpu")
        self.assertEqual(only.code, DONE, only)
        self.assertEqual(only.json()["programs_compiled"], 0)
        file = SCRATCH / "no_gpu.kiln"
        freeze = ["freeze", *words, "--allow-unqualified", "-o", file]
        self.refuse(REFUSED, "moe", "sm_90a", "predicted", args=freeze,
                    cache="no gpu")
        self.assertFalse(file.exists())
        allowed = kiln(*freeze, "--allow-predicted", cache="no gpu")
        self.assertEqual(allowed.code, DONE, allowed)
        self.expect(kiln("run", file, "--entry", "moe", "--tokens", "1",
                         "--allow-predicted", "--allow-unqualified"), REFUSED,
                    "sm_90a")
        self.expect(kiln("run", file, "--entry", "moe", "--tokens", "1",
                         "--target", "sm_90a"), REFUSED)

    def test_freeze_before_prewarm_is_incomplete(self):
        if not has_cc_cpu():
            self.skipTest("this build has no kiln-cc-cpu")
        file = SCRATCH / "early.kiln"
        self.refuse(INCOMPLETE, "moe m 1..1", "kiln prewarm", args=[
            "freeze", SMALL, *CPU, "-o", file], cache="empty")
        self.assertFalse(file.exists())


@need_cc_cpu
class CacheTest(CliTest):

    def user_without_privileges(self):
        """Arguments that run kiln as somebody other than root."""
        SCRATCH.chmod(0o755)
        if os.geteuid() != 0:
            return {}
        who = {"user": 65534, "group": 65534, "extra_groups": []}
        try:
            subprocess.run([KILN, "--version"], check=True,
                           capture_output=True, **who)
        except (OSError, subprocess.SubprocessError) as error:
            self.skipTest(f"root may do anything, and another user cannot "
                          f"start kiln: {error}")
        return who

    def test_too_few_threads_set_no_candidate_aside(self):
        if (os.cpu_count() or 1) < 2:
            self.skipTest("a plan for one processor starts no thread")
        who = self.user_without_privileges()
        folder = SCRATCH / "threads"
        folder.mkdir()
        folder.chmod(0o777)
        words = ["--json", "prewarm", SMALL, *CPU, "--budget", "0.05"]
        compiled = kiln(*words, "--stop-after", "compile", cache="threads",
                        **who)
        self.assertEqual(compiled.code, DONE, compiled)
        self.expect(kiln(*words, cache="threads", **who,
                         preexec_fn=lambda: resource.setrlimit(
                             resource.RLIMIT_NPROC, (1, 1))),
                    FAILED, "Resource temporarily unavailable")
        stats = kiln("--json", "cache", "stats", cache="threads", **who)
        self.assertEqual(stats.json()["tables"]["reject"]["rows"], 0)
        self.assertEqual(kiln(*words, cache="threads", **who).code, DONE)

    def test_a_cache_folder_that_cannot_be_is_named(self):
        inside = SMALL / "cache"
        self.refuse(USAGE, "small.json", args=[
            "--cache", inside, "prewarm", SMALL, *CPU], cache=None)

    def test_without_a_home_no_folder_is_guessed(self):
        for home in ({"HOME": ""}, {"HOME": "", "XDG_CACHE_HOME": ""}):
            self.refuse(USAGE, "--cache", "HOME", args=["plan", SMALL, *CPU],
                        cache=None, env=home)
            # An unset variable of a script, say.
            self.refuse(USAGE, "--cache", args=["--cache", "", "cache", "stats"],
                        cache=None)
            result = kiln("--cache-mode", "off", "plan", SMALL, *CPU,
                          cache=None, env=home)
            self.assertEqual(result.code, DONE, result)
            self.assertEqual(kiln("doctor", cache=None, env=home).code, DONE)

    def test_no_winner_without_a_default_that_may_compile_next_time(self):
        one = write("one.json", changed(capacities=[1]))
        words = ["--cache", str(SCRATCH / "stopped"), "--json", "prewarm",
                 str(one), "--target", "cpu", "--max-candidates", "3",
                 "--budget", "0.05", "--jobs", "1"]
        # The compiler was probed before, so that the only child is a worker. The
        # limit leaves the other programs time on a busy machine.
        kiln(*words[2:], "--stop-after", "enumerate", cache="stopped")
        with subprocess.Popen([KILN, *words, "--compile-timeout", "10"],
                              text=True, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE) as run:
            worker = None
            while worker is None and run.poll() is None:
                for pid in children(run.pid):
                    # Past its start and well into its first program, the
                    # default's.
                    if cpu_seconds(pid) >= 0.3:
                        worker = pid
                        os.kill(worker, signal.SIGSTOP)
                time.sleep(0.005)
            out, err = run.communicate(timeout=120)
        self.assertEqual(run.returncode, INCOMPLETE, err)
        (plan,) = json.loads(out)["plans"]
        self.assertEqual(plan["state"], "none", plan)
        self.assertIn("default", plan["problem"])
        again = kiln(*words[2:], cache="stopped")
        self.assertEqual(again.code, DONE, again)
        self.assertEqual(again.json()["programs_compiled"], 1)
        self.assertEqual(again.json()["plans"][0]["rejected"], 0)

    def test_too_little_memory_sets_no_candidate_aside(self):
        def limit():
            resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
        try:
            subprocess.run([KILN, "--version"], check=True,
                           capture_output=True, preexec_fn=limit)
        except (OSError, subprocess.SubprocessError) as error:
            self.skipTest(f"kiln does not start in 8 GiB: {error}")
        huge = write("huge.json", manifest({
            **REQUEST, "hidden": 65536, "experts": 8, "top_k": 8,
            "weights": {"format": "exl3", "codebook": "mcg", "bits": 1},
            "capacities": [65536]}))
        for _ in range(2):
            done = kiln("prewarm", huge, *CPU, cache="huge",
                        preexec_fn=limit)
            self.assertEqual(done.code, INCOMPLETE, done)
            self.assertIn("no race: a buffer of a launch: needs", done.err)
        stats = kiln("--json", "cache", "stats", cache="huge").json()
        self.assertEqual(stats["tables"]["reject"]["rows"], 0)

    def test_a_read_only_folder_is_one_clear_error(self):
        folder = SCRATCH / "locked"
        folder.mkdir()
        folder.chmod(0o555)
        who = self.user_without_privileges()
        self.refuse(FAILED, "locked", "--cache-mode",
                    args=["prewarm", SMALL, *CPU], cache="locked", **who)
        # It only reads.
        planned = kiln("plan", SMALL, *CPU, cache="locked", **who)
        self.assertEqual(planned.code, DONE, planned)
        self.assertEqual(list(folder.iterdir()), [])

    def test_a_foreign_file_in_its_place_is_left_alone(self):
        folder = SCRATCH / "foreign"
        folder.mkdir()
        (folder / "index.db").write_text("my diary\n" * 100)
        self.refuse(REFUSED, "index.db", args=["prewarm", SMALL, *CPU],
                    cache="foreign")
        self.assertEqual((folder / "index.db").read_text(),
                         "my diary\n" * 100)

    def test_read_only_mode_makes_nothing(self):
        self.expect(kiln("--cache-mode", "read-only", "prewarm", SMALL, *CPU,
                         cache="not made"), REFUSED, "read-only")
        self.assertFalse((SCRATCH / "not made").exists())


@need_cc_cpu
class CareTest(CliTest):
    """explain, cache and --shard on the small model."""

    @classmethod
    def setUpClass(cls):
        cls.bundle = frozen_bundle()

    def test_explain_shows_the_winner_and_its_rivals(self):
        result = kiln("--json", "explain", SMALL, *CPU, "--entry", "moe",
                      "--tokens", "3")
        self.assertEqual(result.code, DONE, result)
        (interval,) = result.json()["intervals"]
        self.assertEqual((interval["m_min"], interval["m_max"]), (2, 4))
        self.assertEqual(interval["state"], "measured")
        self.assertGreater(interval["provenance"]["created_unix"], 0)
        self.assertTrue(interval["provenance"]["host"])
        verdicts = [c["verdict"] for c in interval["candidates"]]
        # The limit of one candidate leaves all others out, and says so.
        self.assertEqual([v for v in verdicts if v != "pruned"], ["won"])
        self.assertGreater(interval["evidence"]["pruned"], 0)
        for candidate in interval["candidates"][1:]:
            self.assertEqual(candidate["verdict"], "pruned")
            self.assertIn("predicted to be faster", candidate["reason"])
        self.assertTrue(interval["candidates"][0]["numerics_class"])
        words = kiln("explain", SMALL, *CPU, "--entry", "moe", "--tokens", "3")
        self.assertEqual(words.code, DONE, words)
        self.assertIn(interval["winner"], words.out)
        self.assertIn("noise floor", words.out)
        made = time.strftime(
            "%Y-%m-%d %H:%M:%S UTC",
            time.gmtime(interval["provenance"]["created_unix"]))
        self.assertIn(f'made     {made} on "{os.uname().nodename}"', words.out)

    def test_explain_names_the_field_that_makes_a_miss(self):
        result = kiln("--json", "explain", SMALL, "--target", "cpu",
                      "--max-candidates", "2", "--entry", "moe",
                      "--tokens", "3")
        self.assertEqual(result.code, INCOMPLETE, result)
        (interval,) = result.json()["intervals"]
        self.assertEqual(interval["state"], "none")
        self.assertEqual(
            interval["nearest"]["differences"],
            [{"field": "candidates/limit", "stored": "1", "wanted": "2"}])
        words = kiln("explain", SMALL, "--target", "cpu", "--max-candidates",
                     "2", "--entry", "moe", "--tokens", "3")
        self.assertEqual(words.code, INCOMPLETE, words)
        self.assertIn("candidates/limit", words.out)

    def test_candidates_that_all_failed_are_told_and_not_to_prewarm_again(self):
        # No launch of it is over in a millisecond.
        large = write("slow.json", changed(hidden=4096, intermediate=2048,
                                           capacities=[256]))
        done = kiln("--json", "prewarm", large, *CPU, "--launch-timeout",
                    "0.001", cache="slow")
        self.assertEqual(done.code, INCOMPLETE, done)
        words = ["moe m 1..256", "its only candidate was rejected", "at race: ",
                 "longer than 0.001 s", "kiln cache gc"]
        frozen = self.refuse(INCOMPLETE, *words, "kiln explain", args=[
            "freeze", large, *CPU, "-o", SCRATCH / "slow.kiln"], cache="slow")
        self.assertNotIn("same manifest", frozen.err)
        self.refuse(INCOMPLETE, "1 of 1", *words, args=[
            "cache", "export", large, *CPU, "-o", SCRATCH / "slow.kilncache"],
                    cache="slow")
        explain = ["explain", large, *CPU, "--entry", "moe", "--tokens", "1"]
        result = kiln("--json", *explain, cache="slow")
        self.assertEqual(result.code, INCOMPLETE, result)
        (interval,) = result.json()["intervals"]
        self.assertEqual(interval["competing"], 1)
        (rejected,) = interval["rejected"]
        self.assertEqual(rejected["stage"], "race")
        self.assertIn("longer than 0.001 s", rejected["reason"])
        self.assertIn(rejected["label"], interval["advice"])
        text = kiln(*explain, cache="slow")
        self.assertEqual(text.code, INCOMPLETE, text)
        self.assertIn("1 of 1 candidates were rejected", text.out)
        self.assertIn("its only candidate was rejected", text.out)
        self.assertNotIn("same manifest", text.out)

    def test_plans_of_before_a_measurement_are_told(self):
        shutil.copytree(SCRATCH / "cache", SCRATCH / "measured")
        measured = kiln("doctor", "--measure", "--target", "cpu",
                        cache="measured")
        self.assertEqual(measured.code, DONE, measured)
        self.assertIn("plans that were made before no longer answer",
                      measured.out)
        words = ["before kiln doctor --measure found this device's balance",
                 "run kiln prewarm again"]
        self.refuse(INCOMPLETE, "moe m 1..1", *words, "kiln explain", args=[
            *FREEZE, "-o", SCRATCH / "measured.kiln"], cache="measured")
        self.assertFalse((SCRATCH / "measured.kiln").exists())
        text = kiln("explain", SMALL, *CPU, "--entry", "moe", "--tokens", "1",
                    cache="measured")
        self.assertEqual(text.code, INCOMPLETE, text)
        for word in (*words, "candidates/balance  (empty)"):
            self.assertIn(word, text.out)

    def test_explain_refuses_what_the_manifest_lacks(self):
        self.refuse(USAGE, '"nope"', "moe", args=[
            "explain", SMALL, *CPU, "--entry", "nope", "--tokens", "1"])
        self.refuse(REFUSED, "1..8", "9", args=[
            "explain", SMALL, *CPU, "--entry", "moe", "--tokens", "9"])

    def test_freeze_merges_what_replay_says(self):
        """Intervals of the bundle: explicit, gap-free, equal to replay's."""
        file = SCRATCH / "merged.kiln"
        for cap in ("0", "0.01", "10"):
            frozen = kiln("--json", "freeze", SMALL, *CPU, "--regret-cap", cap,
                          "--allow-unqualified", "-o", file)
            self.assertEqual(frozen.code, DONE, frozen)
            shown = kiln("--json", "inspect", file).json()
            (entry,) = shown["sections"][0]["entries"]
            spans = [(p["m_min"], p["m_max"]) for p in entry["plans"]]
            self.assertEqual(spans[0][0], 1)
            self.assertEqual(spans[-1][1], 8)
            for left, right in zip(spans, spans[1:]):
                self.assertEqual(left[1] + 1, right[0])
            self.assertEqual(frozen.json()["plans"] + frozen.json()["merged"],
                             3)
            replayed = kiln("--json", "replay", "--regret-cap", cap)
            self.assertEqual(replayed.code, DONE, replayed)
            curves = [c for c in replayed.json()["curves"]
                      if c["segments"][-1]["m_max"] == 8]
            self.assertIn(spans, [[(s["m_min"], s["m_max"])
                                   for s in curve["segments"]]
                                  for curve in curves])
        for tokens in (1, 5, 8):
            result = kiln("run", file, "--entry", "moe", "--tokens", tokens,
                          "--check", "--allow-unqualified")
            self.assertEqual(result.code, DONE, result)
        self.refuse(USAGE, "fraction", args=[
            "freeze", SMALL, *CPU, "--regret-cap", "-1", "-o", file])

    def test_curves_of_other_limits_are_told_apart(self):
        shutil.copytree(SCRATCH / "cache", SCRATCH / "limits")
        alone = kiln("replay", cache="limits")
        self.assertNotIn("candidates/limit", alone.out)
        more = kiln("prewarm", SMALL, "--target", "cpu", "--max-candidates",
                    "2", "--budget", "0.05", cache="limits")
        self.assertEqual(more.code, DONE, more)
        replayed = kiln("replay", cache="limits")
        page = SCRATCH / "limits.html"
        self.assertEqual(kiln("report", "-o", page, cache="limits").code, DONE)
        for limit in (1, 2):
            self.assertIn(f"bf16 i32, candidates/limit {limit}\n", replayed.out)
            self.assertIn(f"<p>candidates/limit {limit}</p>", page.read_text())
        curves = kiln("--json", "replay", cache="limits").json()["curves"]
        self.assertEqual({curve["apart_by"] for curve in curves},
                         {"candidates/limit 1", "candidates/limit 2"})

    def test_bench_prints_times_and_rates(self):
        result = kiln("--json", "bench", self.bundle, "--blocks", "3",
                      "--max-capacity", "4", "--allow-unqualified",
                      cache="no ceilings")
        self.assertEqual(result.code, DONE, result)
        self.assertIn("doctor --measure", result.err)
        report = result.json()
        self.assertEqual([row["tokens"] for row in report["rows"]], [1, 4])
        for row in report["rows"]:
            self.assertGreater(row["ns"], 0)
            self.assertGreaterEqual(row["noise_floor"], 0)
            self.assertGreater(row["bytes_per_s"], 0)
            self.assertGreater(row["flops_per_s"], 0)
            self.assertNotIn("fraction", row)
            # Processors do not say at which clock they run.
            self.assertNotIn("clock_mhz", row)
        self.assertEqual(report["l2"], "cold")
        self.assertFalse((SCRATCH / "no ceilings").exists())
        words = kiln("bench", self.bundle, "--blocks", "2",
                     "--allow-unqualified", "--warm-l2")
        self.assertEqual(words.code, DONE, words)
        self.assertIn("warm L2", words.out)
        self.assertRegex(words.out, r"noise +MHz +floor")
        self.refuse(USAGE, "must be torch", args=[
            "bench", self.bundle, "--compare", "cublas"])
        for more in ([], ["--max-capacity", "4"]):
            nope = self.refuse(
                USAGE, 'no entry "nope" for cpu-x86-64-v', "it has moe",
                args=["bench", self.bundle, "--allow-unqualified", "--entry",
                      "nope", *more])
            self.assertNotIn("tokens", nope.err)

    def test_bench_compares_with_torch_or_says_why_not(self):
        args = ["--json", "bench", self.bundle, "--blocks", "2",
                "--allow-unqualified", "--compare", "torch", "--python"]
        self.refuse(FAILED, "--python", args=[*args, SCRATCH / "no python"])
        python = "/usr/bin/python3"
        if subprocess.run([python, "-c", "import torch"], check=False,
                          stderr=subprocess.DEVNULL).returncode != 0:
            self.skipTest(f"{python} has no PyTorch")
        result = kiln(*args, python)
        self.assertEqual(result.code, DONE, result)
        report = result.json()
        self.assertIn("torch", report["rival"])
        for row in report["rows"]:
            self.assertGreater(row["torch_ns"], 0)
            self.assertAlmostEqual(row["torch_ratio"],
                                   row["torch_ns"] / row["ns"])

    def test_keep_numerics_admits_the_class_of_the_bundle(self):
        keep = ["--keep-numerics", self.bundle]
        result = kiln("--json", "prewarm", SMALL, *CPU, *keep, "--budget",
                      "0.05", cache="kept")
        self.assertEqual(result.code, DONE, result)
        explained = kiln("--json", "explain", SMALL, *CPU, *keep, "--entry",
                         "moe", "--tokens", "3", cache="kept")
        self.assertEqual(explained.code, DONE, explained)
        (interval,) = explained.json()["intervals"]
        self.assertEqual(interval["kept_numerics"], interval["numerics_class"])
        words = kiln("explain", SMALL, *CPU, *keep, "--entry", "moe",
                     "--tokens", "3", cache="kept")
        self.assertIn("bit-identical repeats", words.out)
        # Without the option it is another question.
        missed = kiln("--json", "explain", SMALL, *CPU, "--entry", "moe",
                      "--tokens", "3", cache="kept")
        self.assertEqual(missed.code, INCOMPLETE, missed)
        (interval,) = missed.json()["intervals"]
        self.assertEqual([d["field"] for d in
                          interval["nearest"]["differences"]],
                         ["candidates/numerics_class"])
        # What the bundle does not cover is refused.
        more = write("kept_more.json", manifest({**REQUEST, "capacities": [1, 4, 8, 16]}))
        self.refuse(REFUSED, "at most 8 tokens", args=[
            "prewarm", more, *CPU, *keep], cache="kept")
        other = write("kept_other.json", manifest({**REQUEST, "name": "other"}))
        self.refuse(REFUSED, "no such entry", args=[
            "prewarm", other, *CPU, *keep], cache="kept")

    def test_recheck_finds_no_winner_slower_than_the_default(self):
        result = kiln("--json", "prewarm", SMALL, *CPU, "--recheck")
        self.assertEqual(result.code, DONE, result)
        recheck = result.json()["recheck"]
        # One candidate: the default has won everywhere.
        self.assertEqual(recheck["default_won"], 3)
        self.assertEqual(recheck["slower"], 0)
        self.refuse(USAGE, "--stop-after", args=[
            "prewarm", SMALL, *CPU, "--recheck", "--stop-after", "compile"])

    def test_report_is_one_well_formed_page(self):
        page = SCRATCH / "report.html"
        result = kiln("--json", "report", "-o", page)
        self.assertEqual(result.code, DONE, result)
        self.assertEqual(result.json()["plans"], 3)
        self.assertEqual(result.json()["bytes"], page.stat().st_size)
        root = xml.etree.ElementTree.parse(page).getroot()
        svg = root.findall(".//{http://www.w3.org/2000/svg}svg")
        self.assertEqual(len(svg), 1)
        names = {element.tag.rpartition("}")[2] for element in svg[0].iter()}
        self.assertLessEqual({"line", "text", "path", "circle", "rect"}, names)
        for element in svg[0].iter():
            for name in ("x", "y", "x1", "y1", "x2", "y2", "cx", "cy", "r",
                         "width", "height"):
                if name in element.attrib:
                    self.assertTrue(0 <= float(element.attrib[name]) <= 1100,
                                    element.attrib)
        texts = [e.text for e in svg[0].iter() if e.text]
        for capacity in REQUEST["capacities"]:
            self.assertIn(str(capacity), texts)
        self.assertTrue(any(text.endswith("s") and text[0].isdigit()
                            for text in texts), "no unit on the axis")
        first = page.read_bytes()
        self.assertEqual(kiln("report", "-o", page).code, DONE)
        self.assertEqual(page.read_bytes(), first)

    def test_report_of_nothing_says_so(self):
        page = SCRATCH / "none.html"
        result = kiln("report", "-o", page, "--target", "sm_90a")
        self.assertEqual(result.code, DONE, result)
        self.assertIn("no measured plans for sm_90a", page.read_text())
        xml.etree.ElementTree.parse(page)
        result = kiln("report", "-o", page, cache="never made")
        self.assertEqual(result.code, DONE, result)
        self.assertIn("The cache has no measured plans.", page.read_text())
        self.assertFalse((SCRATCH / "never made").exists())

    def test_no_output_replaces_what_is_read(self):
        shutil.copytree(SCRATCH / "cache", SCRATCH / "inputs")
        model = write("inputs.json", manifest())
        index = SCRATCH / "inputs" / "index.db"
        link = SCRATCH / "inputs.link"
        link.symlink_to(index)
        before = index.read_bytes()
        for args in (["freeze", model, *CPU, "--allow-unqualified", "-o", index],
                     ["freeze", model, *CPU, "--allow-unqualified", "-o", link],
                     ["freeze", model, *CPU, "--allow-unqualified", "-o", model],
                     ["report", "-o", index], ["report", "-o", link],
                     ["cache", "export", model, *CPU, "-o", index],
                     ["cache", "export", model, *CPU, "-o", model]):
            with self.subTest(" ".join(map(str, args))):
                self.refuse(USAGE, "replace", args=args, cache="inputs")
        self.assertEqual(index.read_bytes(), before)
        self.assertEqual(json.loads(model.read_text()), manifest())

    def test_report_refuses_bad_targets_and_folders(self):
        self.refuse(USAGE, "sm_9", args=[
            "report", "-o", SCRATCH / "r.html", "--target", "sm_9"])
        nowhere = SCRATCH / "nowhere" / "r.html"
        self.refuse(USAGE, "nowhere", args=["report", "-o", nowhere])
        self.assertFalse((SCRATCH / "r.html").exists())

    def test_stats_and_check_of_a_whole_cache(self):
        result = kiln("--json", "cache", "stats")
        self.assertEqual(result.code, DONE, result)
        self.assertGreater(result.json()["tables"]["plan"]["rows"], 0)
        self.assertEqual(result.json()["tables"]["lease"]["rows"], 0)
        self.assertEqual(kiln("cache", "stats").code, DONE)
        result = kiln("--json", "cache", "check")
        self.assertEqual(result.code, DONE, result)
        self.assertEqual(result.json()["findings"], [])

    def test_check_finds_damage_and_repairs_it(self):
        shutil.copytree(SCRATCH / "cache", SCRATCH / "hurt")
        path = SCRATCH / "hurt" / "index.db"
        data = bytearray(path.read_bytes())
        at = data.index(b"fused_moe.cpu{")
        data[at] ^= 1
        path.write_bytes(data)
        result = kiln("--json", "cache", "check", cache="hurt")
        self.assertEqual(result.code, REFUSED, result)
        self.assertTrue(result.json()["findings"])
        result = kiln("--json", "cache", "check", "--repair", cache="hurt")
        self.assertEqual(result.code, DONE, result)
        self.assertTrue(result.json()["dropped"])
        self.assertEqual(kiln("cache", "check", cache="hurt").code, DONE)

    def test_export_import_and_freeze_again(self):
        file = SCRATCH / "small.kilncache"
        result = kiln("--json", "cache", "export", SMALL, *CPU, "-o", file)
        self.assertEqual(result.code, DONE, result)
        digest = result.json()["digest"]
        self.assertEqual(result.json()["plans"], 3)
        self.expect(kiln("cache", "import", file, "--digest", "0" * 64,
                         cache="imported"), REFUSED, digest, "0" * 64)
        result = kiln("--json", "cache", "import", file, "--digest", digest,
                      cache="imported")
        self.assertEqual(result.code, DONE, result)
        self.assertEqual(result.json()["plans_added"], 3)
        again = SCRATCH / "imported.kiln"
        result = kiln(*FREEZE, "-o", again, cache="imported")
        self.assertEqual(result.code, DONE, result)
        self.assertEqual(again.read_bytes(), self.bundle.read_bytes())
        data = bytearray(file.read_bytes())
        data[data.index(b"fused_moe.cpu{")] ^= 1
        file.write_bytes(data)
        self.expect(kiln("cache", "import", file, cache="untouched"), REFUSED,
                    "damaged", "nothing was imported")

    def test_export_of_what_is_missing_is_incomplete(self):
        file = SCRATCH / "absent.kilncache"
        self.refuse(INCOMPLETE, "3 of 3", "kiln prewarm",
                    args=["cache", "export", SMALL, *CPU, "-o", file],
                    cache="empty_export")
        self.assertFalse(file.exists())

    def test_shards_merge_to_a_cache_that_freezes(self):
        folders = []
        for shard in ("1/3", "2/3", "3/3"):
            folders.append(SCRATCH / f"shard{shard[0]}")
            result = kiln("--json", "prewarm", SMALL, *CPU, "--budget", "0.05",
                          "--shard", shard, cache=folders[-1].name)
            self.assertEqual(result.code, DONE, result)
            self.assertEqual(result.json()["intervals"], 1)
        result = kiln("--json", "cache", "merge", *folders, cache="joined")
        self.assertEqual(result.code, DONE, result)
        self.assertEqual(
            sum(m["plans_added"] for m in result.json()["merged"]), 3)
        result = kiln(*FREEZE, "-o", SCRATCH / "joined.kiln",
                      cache="joined")
        self.assertEqual(result.code, DONE, result)
        for shard in ("0/3", "4/3", "1", "a/b", "1/0", "-1/2"):
            self.refuse(USAGE, "--shard", shard, args=[
                "prewarm", SMALL, *CPU, f"--shard={shard}"])

    def looks(self):
        """Commands that only look."""
        return [["plan", SMALL, *CPU],
                ["explain", SMALL, *CPU, "--entry", "moe", "--tokens", "3"],
                ["cache", "stats"], ["replay"], ["doctor"],
                ["report", "-o", SCRATCH / "look.html"],
                ["cache", "gc", "--max-age", "0", "--dry-run"],
                ["cache", "export", SMALL, *CPU, "-o", SCRATCH / "look.out"]]

    def test_looking_touches_nothing(self):
        def snapshot():
            folder = SCRATCH / "cache"
            return {path.name: (path.stat().st_mtime_ns, path.stat().st_ino,
                                path.read_bytes())
                    for path in folder.iterdir()}, folder.stat().st_mtime_ns
        before = snapshot()
        for command in self.looks():
            result = kiln(*command)
            self.assertEqual(result.code, DONE, f"{command} {result}")
            self.assertEqual(snapshot(), before, command)

    def test_looking_for_a_cache_makes_none(self):
        for command in self.looks():
            kiln(*command, cache="never made")
            self.assertFalse((SCRATCH / "never made").exists(), command)

    def test_what_is_refused_makes_no_cache(self):
        for code, command in (
                (INCOMPLETE, [*FREEZE, "-o", SCRATCH / "never made.kiln"]),
                (USAGE, ["--cc-cpu", "/nonexistent/cc", "prewarm", SMALL, *CPU]),
                (USAGE, ["--cc-cpu", "/nonexistent/cc", "doctor", "--measure",
                         "--target", "cpu"])):
            self.refuse(code, args=command, cache="never made")
            self.assertFalse((SCRATCH / "never made").exists(), command)

    def test_a_merge_with_a_missing_source_takes_none(self):
        self.expect(kiln("cache", "merge", SCRATCH / "cache",
                         SCRATCH / "nowhere", cache="joined3"),
                    USAGE, "nowhere")
        self.assertFalse((SCRATCH / "joined3").exists())

    def test_merge_needs_a_cache_to_take_from(self):
        self.expect(kiln("cache", "merge", SCRATCH / "nowhere",
                         cache="joined2"), USAGE, "nowhere")
        self.expect(kiln("cache", "merge", SCRATCH / "cache", "--prefer", "me",
                         cache="joined2"), USAGE, "--prefer", '"me"')

    def test_gc_keeps_what_is_new_and_what_is_named(self):
        self.refuse(USAGE, "--max-bytes", "--max-age", args=["cache", "gc"])
        result = kiln("--json", "cache", "gc", "--max-age", "0", "--manifest",
                      SMALL, *CPU, "--bundle", self.bundle, "--dry-run")
        self.assertEqual(result.code, DONE, result)
        self.assertEqual(result.json()["removed"], [])
        self.assertEqual(result.json()["plans_kept"], 3)
        self.expect(kiln("cache", "gc", "--max-bytes", "1KB"), INCOMPLETE,
                    "within the last hour")
        self.assertEqual(kiln("cache", "check").code, DONE)


# ---- caches that somebody changed --------------------------------------------

# The pre-images of row digests, as cache/row_codec.cc has them: columns that
# are text or bytes (T) and numbers (N).
PROVENANCE = (("N", "created_unix"), ("T", "host_name"), ("T", "device_name"),
              ("T", "tool_version"))
SEALED = {
    "program": (("T", "key"), ("T", "target"), ("T", "toolchain_name"),
                ("T", "toolchain_version"), ("T", "toolchain_content"),
                ("T", "binary_digest"), ("T", "kernels"), ("T", "log"),
                ("N", "compile_seconds"), *PROVENANCE),
    "reject": (("T", "key"), ("T", "preimage"), ("T", "stage"),
               ("T", "reason"), ("T", "log"), *PROVENANCE),
    "plan": (("T", "key"), ("T", "plan"), ("N", "measurements"), *PROVENANCE),
}


def row_digest(table, row):
    def counted(data):
        return struct.pack("<I", len(data)) + data
    encoded = counted(f"kiln.cache.{table}/1".encode())
    for tag, name in SEALED[table]:
        value = row[name]
        encoded += tag.encode() + counted(name.encode())
        if tag == "T":
            encoded += counted(value if isinstance(value, bytes)
                               else value.encode())
        else:
            encoded += struct.pack("<d" if isinstance(value, float) else "<q",
                                   value)
    return hashlib.sha256(encoded).digest()


class CacheFile:
    """A copy of a cache, and its rows behind Kiln's back."""

    def __init__(self, name, source="cache"):
        self.name = name
        self.folder = SCRATCH / name
        self.path = self.folder / "index.db"
        shutil.copytree(SCRATCH / source, self.folder)

    def bytes(self):
        return self.path.read_bytes()

    def run(self, sql, *values):
        database = sqlite3.connect(self.path)
        database.row_factory = sqlite3.Row
        with database:
            rows = [dict(row) for row in database.execute(sql, values)]
        database.close()
        return rows

    def change(self, table, row, **values):
        """Other values in a row, with a digest that fits. Without a checksum,
        as an older schema's row, the digest is what counts."""
        row = {**row, **values}
        if "checksum" in row:
            row["checksum"] = None
        assert row_digest(table, row) != row["row_digest"]
        row["row_digest"] = row_digest(table, row)
        names = [name for name in row if name != "id"]
        self.run(f"UPDATE {table} SET {', '.join(n + ' = ?' for n in names)} "
                 "WHERE id = ?", *(row[n] for n in names), row["id"])

    def age(self, days):
        """As if all had been made, and used for the last time, then."""
        self.run("DELETE FROM plan_use")
        for table in SEALED:
            for row in self.run(f"SELECT * FROM {table}"):
                self.change(table, row, created_unix=row["created_unix"] -
                            days * 86400)


@need_cc_cpu
class ChangedCacheTest(CliTest):

    @classmethod
    def setUpClass(cls):
        cls.bundle = frozen_bundle()

    def test_the_rows_are_sealed_as_this_file_has_it(self):
        cache = CacheFile("sealed")
        for table in ("program", "plan"):
            rows = cache.run(f"SELECT * FROM {table}")
            self.assertTrue(rows)
            for row in rows:
                self.assertEqual(row["row_digest"], row_digest(table, row))

    def test_a_damaged_program_is_reported_and_made_again(self):
        cache = CacheFile("flipped")
        program = cache.run("SELECT * FROM program ORDER BY id")[0]
        (blob,) = cache.run("SELECT * FROM blob WHERE digest = ?",
                            program["binary_digest"])
        data = bytearray(blob["data"])
        data[len(data) // 2] ^= 1
        cache.run("UPDATE blob SET data = ? WHERE id = ?", bytes(data),
                  blob["id"])
        self.expect(kiln("cache", "export", SMALL, *CPU, "-o",
                         SCRATCH / "flipped.kilncache", cache=cache.name),
                    REFUSED, program["key"].hex(), "prewarm again")
        self.assertFalse((SCRATCH / "flipped.kilncache").exists())
        file = SCRATCH / "flipped.kiln"
        result = kiln(*FREEZE, "-o", file, cache=cache.name)
        self.expect(result, INCOMPLETE, "run kiln prewarm again")
        self.assertIn(f"program {program['key'].hex()} in {cache.path} is "
                      "damaged: binary has digest", result.err)
        self.assertIn("moved to quarantine", result.err)
        self.assertFalse(file.exists())
        again = kiln("--json", "prewarm", SMALL, *CPU, "--budget", "0.05",
                     cache=cache.name)
        self.assertEqual(again.code, DONE, again)
        self.assertEqual(again.json()["programs_compiled"], 1)
        self.assertEqual(kiln("cache", "check", cache=cache.name).code, DONE)
        (mended,) = cache.run("SELECT * FROM blob WHERE digest = ?",
                              program["binary_digest"])
        self.assertEqual(mended["data"], blob["data"], "another binary")
        self.assertEqual(kiln(*FREEZE, "-o", file, cache=cache.name).code, DONE)

    def rivals(self, name):
        """Two caches with different binaries under one key, and the key."""
        ours = CacheFile(f"{name} ours")
        theirs = CacheFile(f"{name} theirs")
        row = theirs.run("SELECT * FROM program ORDER BY id")[0]
        (blob,) = theirs.run("SELECT * FROM blob WHERE digest = ?",
                             row["binary_digest"])
        data = blob["data"] + b"1"
        digest = hashlib.sha256(data).digest()
        theirs.run("INSERT INTO blob (digest, data) VALUES (?, ?)", digest,
                   data)
        theirs.change("program", row, binary_digest=digest)
        self.assertEqual(kiln("cache", "check", cache=theirs.name).code, DONE)
        return ours, theirs, row, digest

    def test_conflicts_are_shown_and_never_guessed(self):
        ours, theirs, row, digest = self.rivals("rival")
        before = ours.bytes()
        key = row["key"].hex()
        result = kiln("--json", "cache", "merge", theirs.folder,
                      cache=ours.name)
        self.expect(result, REFUSED, "1 keys", "--prefer")
        (merged,) = result.json()["merged"]
        self.assertFalse(merged["stored"])
        (conflict,) = merged["conflicts"]
        self.assertEqual((conflict["table"], conflict["key"]),
                         ("program", key))
        self.assertIn(row["binary_digest"].hex(), conflict["ours"])
        self.assertIn(digest.hex(), conflict["theirs"])
        words = kiln("cache", "merge", theirs.folder, cache=ours.name)
        for word in (key, row["binary_digest"].hex(), digest.hex(),
                     "nothing stored"):
            self.assertIn(word, words.out)
        for prefer in ("ours", "theirs"):
            self.assertEqual(kiln("cache", "merge", theirs.folder, "--prefer",
                                  prefer, "--dry-run", cache=ours.name).code,
                             DONE)
        self.assertEqual(ours.bytes(), before)

        def merge(prefer):
            result = kiln("cache", "merge", theirs.folder, "--prefer", prefer,
                          cache=ours.name)
            self.assertEqual(result.code, DONE, result)
            self.assertEqual(kiln("cache", "check", cache=ours.name).code,
                             DONE)
            (now,) = ours.run("SELECT * FROM program WHERE key = ?",
                              row["key"])
            return now["binary_digest"]
        self.assertEqual(merge("ours"), row["binary_digest"])
        self.assertEqual(merge("theirs"), digest)

    def test_gc_removes_what_is_old_and_keeps_its_roots(self):
        cache = CacheFile("old")
        cache.age(100)
        before = cache.bytes()

        def gc(*args):
            result = kiln("--json", "cache", "gc", "--max-age", "30", *args,
                          cache=cache.name)
            self.assertEqual(result.code, DONE, result)
            return result.json()
        all_rows = gc("--dry-run")
        self.assertEqual(
            sum(row["table"] == "plan" for row in all_rows["removed"]), 3)
        self.assertEqual({row["reason"] for row in all_rows["removed"]},
                         {"age"})
        self.assertEqual(all_rows["plans_kept"], 0)
        for roots in (["--manifest", SMALL, *CPU], ["--bundle", self.bundle]):
            kept = gc("--dry-run", *roots)
            self.assertEqual((kept["removed"], kept["plans_kept"]), ([], 3),
                             roots)
        self.assertEqual(cache.bytes(), before, "a dry run wrote")
        one = write("one_root.json", changed(capacities=[1]))
        removed = gc("--manifest", one, *CPU)
        self.assertEqual(removed["plans_kept"], 1)
        self.assertLess(removed["bytes_after"], removed["bytes_before"])
        self.assertEqual(kiln("cache", "check", cache=cache.name).code, DONE)
        self.assertEqual(
            kiln("freeze", one, *CPU, "--allow-unqualified", "-o",
                 SCRATCH / "one_root.kiln", cache=cache.name).code, DONE)
        self.refuse(INCOMPLETE, "run kiln prewarm", cache=cache.name,
                    args=[*FREEZE, "-o", SCRATCH / "old.kiln"])

    def test_an_export_has_the_chosen_models_alone(self):
        one = write("chosen.json", changed(capacities=[1]))
        file = SCRATCH / "chosen.kilncache"
        result = kiln("--json", "cache", "export", one, *CPU, "-o", file)
        self.assertEqual(result.code, DONE, result)
        self.assertEqual(result.json()["plans"], 1)
        self.assertEqual(kiln("cache", "import", file, cache="chosen").code,
                         DONE)
        stats = kiln("--json", "cache", "stats", cache="chosen").json()
        self.assertEqual(stats["tables"]["plan"]["rows"], 1)
        self.assertEqual(kiln("freeze", one, *CPU, "--allow-unqualified", "-o",
                              SCRATCH / "chosen.kiln", cache="chosen").code,
                         DONE)

    def test_an_export_does_not_replace_its_own_cache(self):
        cache = CacheFile("own")
        before = cache.bytes()
        for path in (cache.path, cache.folder / ".." / "own" / "index.db"):
            self.refuse(USAGE, "the cache itself", cache="own", args=[
                "cache", "export", SMALL, *CPU, "-o", path])
        self.assertEqual(cache.bytes(), before)

    def test_no_changed_export_is_imported_unseen(self):
        file = SCRATCH / "carried.kilncache"
        made = kiln("--json", "cache", "export", SMALL, *CPU, "-o", file)
        self.assertEqual(made.code, DONE, made)
        digest = made.json()["digest"]
        whole = file.read_bytes()
        bad = SCRATCH / "bad.kilncache"

        def take(data, code, *args):
            bad.write_bytes(data)
            result = kiln("cache", "import", bad, *args, cache="taken")
            if code is not None:
                self.assertEqual(result.code, code, result)
            return result
        for length in (0, 1, 99, 100, 4095, 4096, 5000, len(whole) // 2,
                       len(whole) - 4096, len(whole) - 1):
            with self.subTest(f"cut to {length}"):
                take(whole[:length], REFUSED)
        self.assertFalse((SCRATCH / "taken").exists())
        for at in range(0, len(whole), len(whole) // 40):
            with self.subTest(f"flipped at {at}"):
                data = bytearray(whole)
                data[at] ^= 0x10
                take(data, REFUSED, "--digest", digest)
                # Without the digest, bytes that nothing uses may differ.
                result = take(data, None)
                self.assertIn(result.code, (DONE, REFUSED), result)
                if result.code == DONE:
                    self.assertEqual(
                        kiln("cache", "check", cache="taken").code, DONE)
        take(b"", REFUSED)
        self.refuse(USAGE, "is a folder", "merge", cache="taken",
                    args=["cache", "import", SCRATCH])
        self.refuse(USAGE, "absent.kilncache", cache="taken",
                    args=["cache", "import", SCRATCH / "absent.kilncache"])
        self.refuse(USAGE, "into itself", cache="cache", args=[
            "cache", "import", SCRATCH / "cache" / "index.db"])
        self.refuse(USAGE, "into itself", cache="cache", args=[
            "cache", "merge", SCRATCH / "cache"])

    def test_what_is_no_cache_is_refused_by_every_verb(self):
        def text(path):
            path.write_text("my diary\n" * 100)

        def foreign(path):
            database = sqlite3.connect(path)
            database.execute("CREATE TABLE bookmarks (url TEXT)")
            database.close()

        def newer(path):
            shutil.copy(SCRATCH / "cache" / "index.db", path)
            database = sqlite3.connect(path)
            database.execute("PRAGMA user_version = 99")
            database.close()

        def cut(path):
            path.write_bytes((SCRATCH / "cache" / "index.db")
                             .read_bytes()[:5000])
        for make, word in ((text, "not a Kiln cache"), (foreign, "0x00000000"),
                           (newer, "schema 99"), (cut, "malformed"),
                           (pathlib.Path.mkdir, "not a regular file"),
                           (os.mkfifo, "not a regular file")):
            folder = SCRATCH / f"no cache {make.__name__}"
            folder.mkdir()
            path = folder / "index.db"
            make(path)
            before = path.read_bytes() if path.is_file() else None
            for args in (["prewarm", SMALL, *CPU], ["cache", "stats"],
                         ["cache", "check"], ["cache", "check", "--repair"],
                         ["cache", "gc", "--max-age", "1"], ["replay"],
                         ["cache", "export", SMALL, *CPU, "-o",
                          SCRATCH / "never.kilncache"]):
                with self.subTest(f"{make.__name__} {args[:2]}"):
                    self.refuse(REFUSED, word, "index.db", args=args,
                                cache=folder.name)
            with self.subTest(f"{make.__name__} merge"):
                self.refuse(REFUSED, word, args=["cache", "merge", folder],
                            cache="joined4")
            self.assertEqual([entry.name for entry in folder.iterdir()],
                             ["index.db"])
            if before is not None:
                self.assertEqual(path.read_bytes(), before)

    def test_where_no_cache_is_none_is_made_and_nothing_is_whole(self):
        for args in (["check"], ["check", "--repair"],
                     ["gc", "--max-age", "1"]):
            result = kiln("cache", *args, cache="mistyped")
            self.assertEqual(result.code, DONE, result)
            self.assertIn("no cache at", result.err)
            self.assertNotIn("is whole", result.out)
            self.assertFalse((SCRATCH / "mistyped").exists())
        for args in (["stats"], ["check"], ["gc", "--max-age", "1"]):
            self.refuse(USAGE, SMALL.name, cache=SMALL.name,
                        args=["cache", *args])

    def test_paths_need_not_be_utf_8(self):
        folder = os.fsencode(SCRATCH) + b"/caf\xe9"
        shutil.copytree(SCRATCH / "cache", os.fsdecode(folder))
        for args in (["cache", "stats"], ["cache", "check"],
                     ["cache", "export", SMALL, *CPU, "-o",
                      os.fsdecode(folder + b"/out\xff")],
                     ["cache", "merge", SCRATCH / "cache"]):
            done = subprocess.run(
                [KILN, "--json", "--cache", folder, *args],
                capture_output=True, timeout=60, check=False)
            self.assertEqual(done.returncode, DONE, done)
            json.loads(done.stdout.decode())
        self.assertTrue(os.path.exists(folder + b"/out\xff"))


@need_cc_cpu
class BadBundleTest(CliTest):

    @classmethod
    def setUpClass(cls):
        cls.bundle = frozen_bundle()
        cls.data = cls.bundle.read_bytes()

    def commands(self, file):
        return (["verify", file], ["inspect", file],
                ["run", file, "--entry", "moe", "--tokens", "1"])

    def damaged(self, data):
        path = SCRATCH / "damaged.kiln"
        path.write_bytes(data)
        return path

    def test_every_truncation_is_refused(self):
        size = len(self.data)
        for length in (0, 1, 7, 8, 63, 64, 100, size // 2, size - 64, size - 1):
            path = self.damaged(self.data[:length])
            for args in self.commands(path):
                self.refuse(REFUSED, args=args)

    def test_every_flip_is_refused(self):
        size = len(self.data)
        for at in [*range(0, 256, 17), *range(256, size, size // 40), size - 1]:
            data = bytearray(self.data)
            data[at] ^= 0x10
            self.refuse(REFUSED, args=["verify", self.damaged(data)])

    def test_bytes_behind_the_end_are_refused(self):
        self.refuse(REFUSED,
                    args=["verify", self.damaged(self.data + bytes(64))])

    def test_another_root_is_refused(self):
        other = "0" * 63 + "1"
        self.refuse(REFUSED, other, _frozen["freeze"]["root"],
                    args=["verify", self.bundle, "--root", other])

    def test_a_missing_bundle_is_named(self):
        for args in self.commands(SCRATCH / "absent.kiln"):
            self.refuse(USAGE, "absent.kiln", args=args)

    def test_what_is_no_bundle_is_refused(self):
        for args in self.commands(SMALL):
            self.refuse(REFUSED, "not a kiln bundle", args=args)

    def test_sizes_beyond_the_capacity_are_refused(self):
        for tokens in (9, 1 << 31, 1 << 32, (1 << 32) + 1, 1 << 40):
            self.refuse(REFUSED, str(tokens), "capacity 8", "moe", args=[
                "run", self.bundle, "--entry", "moe", "--tokens", tokens,
                "--allow-unqualified"])

    def test_an_unknown_entry_is_refused_with_the_known_ones(self):
        for tokens in (0, 1):
            self.refuse(REFUSED, "'nope'", "'moe'", args=[
                "run", self.bundle, "--entry", "nope", "--tokens", tokens,
                "--allow-unqualified"])

    def test_a_target_the_bundle_lacks_is_refused(self):
        self.refuse(REFUSED, "sm_90a", args=[
            "run", self.bundle, "--entry", "moe", "--tokens", "1", "--target",
            "sm_90a"])

    def test_freeze_into_a_missing_folder_leaves_nothing(self):
        file = SCRATCH / "no such folder" / "x.kiln"
        self.refuse(USAGE, "no such folder", args=[
            *FREEZE, "-o", file])
        self.assertFalse(file.parent.exists())

    def test_a_refused_freeze_leaves_the_old_file(self):
        file = SCRATCH / "old.kiln"
        file.write_bytes(b"old")
        more = write("more.json", changed(capacities=[1, 4, 8, 9]))
        self.refuse(INCOMPLETE, "9..9", args=[
            "freeze", more, *CPU, "--allow-unqualified", "-o", file])
        self.assertEqual(file.read_bytes(), b"old")
        self.assertEqual([p.name for p in SCRATCH.glob("old.kiln*")],
                         ["old.kiln"], "a temporary file is left")


if __name__ == "__main__":
    if not os.access(KILN, os.X_OK):
        sys.exit(f"{KILN} is not built")
    unittest.main()
