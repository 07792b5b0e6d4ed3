#!/usr/bin/env python3
"""tools/runtime_receipt.py: on this machine without its GPU part, and whole with
programs that stand in for the GPU's.

    runtime_receipt_test.py BUILD_FOLDER
"""

import contextlib
import importlib.util
import io
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
import unittest.mock

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(sys.argv.pop(1)).resolve()



def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


runtime_receipt = load(ROOT / "tools" / "runtime_receipt.py")
warm_cache = load(ROOT / "tests" / "bench" / "warm_cache.py")

# The n-th run of the timings has n times these.
VALUES = {"load_ms": 3, "load_raw_ms": 2.5, "load_over_raw": 0.4, "open_ms": 1,
          "root_ms": 0.5, "find_ns": 7, "launch_ns": 7000,
          "launch_raw_ns": 6950, "launch_minus_raw_ns": 50,
          "raw_minus_raw_ns": -1, "packed_minus_raw_ns": -60,
          "get_current_ns": 9}

GPU_TEST = """#!{python}
import pathlib, sys
import xml.etree.ElementTree as xml
options = dict(a.split("=", 1) for a in sys.argv[1:])
only = options.get("--gtest_filter")
count = pathlib.Path(__file__).with_suffix(".count")
timings = {{"device": "NVIDIA Imaginary", "target": "sm_90a",
           "driver_version": "13000"}}
if only:
    n = int(count.read_text()) + 1 if count.exists() else 1
    count.write_text(str(n))
    timings.update({{k: "%.9g" % (v * n) for k, v in {values!r}.items()}})
report = xml.Element("testsuites")
suite = xml.SubElement(report, "testsuite")
def case(name, status="run", skip=None, **properties):
    one = xml.SubElement(suite, "testcase", name=name, status=status)
    if skip is not None:
        xml.SubElement(one, "skipped", message="a_test.cc:7\\n" + skip)
    for key, value in properties.items():
        xml.SubElement(one, "property", name=key, value=value)
case("CostsLittleMoreThanTheDriver", skip="no device" if {skip} else None,
     **timings)
if not only:
    case("OnTwoDevices", skip={why!r})
    case("Other", "notrun")
xml.ElementTree(report).write(options["--gtest_output"].removeprefix("xml:"))
sys.exit({code})
"""

BENCH = """#!{python}
import json
print(json.dumps({{
    "context": {{"kiln_sources": "aa" * 32, "kiln_compiler": "g++ 1"}},
    "benchmarks": [
        {{"run_name": name, "aggregate_name": kind, "cpu_time": time,
         "time_unit": unit}}
        for name, time, unit in (("Find", 8.5, "ns"), ("Root", 2, "us"),
                                 ("LaunchWithoutDriver", 30, "ns"))
        for kind in ("mean", "median")]}}))
"""


class RuntimeReceiptTest(unittest.TestCase):

    def setUp(self):
        scratch = tempfile.mkdtemp(prefix="kiln_runtime_receipt_test.")
        self.addCleanup(shutil.rmtree, scratch, ignore_errors=True)
        self.folder = pathlib.Path(scratch)
        self.output = self.folder / "made" / "receipt.json"

    def stand_ins(self, skip=False, code=0, why="one device only"):
        """A build folder whose programs say what VALUES says."""
        build = self.folder / "build"
        (build / "tests").mkdir(parents=True)
        (build / "lib").mkdir()
        (build / "lib" / "libkiln_runtime.so.1").write_bytes(b"library")
        for name, text in (
                ("runtime_gpu_test", GPU_TEST.format(
                    python=sys.executable, values=VALUES, skip=skip, why=why,
                    code=code)),
                ("runtime_bench", BENCH.format(python=sys.executable)),
                ("scale_bundle", "#!/bin/sh\n: > $2\n")):
            path = build / "tests" / name
            path.write_text(text)
            path.chmod(0o755)
        return build

    def make(self, build, *arguments, warm=None):
        """Exit code and text; only warm_cache.py is not really called."""
        really = runtime_receipt.call
        warm = warm or {"systems": {"kiln": {"loaded_ms": 9.5}},
                        "not_measured": {"cupy": "cupy is not installed"}}

        def call(command, **options):
            command = [str(part) for part in command]
            if not any(part.endswith("warm_cache.py") for part in command):
                return really(command, **options)
            self.assertTrue(pathlib.Path(command[3]).exists())
            pathlib.Path(command[-1]).write_text(json.dumps(warm))
            return ""

        text = io.StringIO()
        with unittest.mock.patch.object(runtime_receipt, "call", call), \
                contextlib.redirect_stdout(text), \
                contextlib.redirect_stderr(io.StringIO()):
            code = runtime_receipt.main(
                ["--build", str(build), "-o", str(self.output), *arguments])
        return code, text.getvalue()

    def test_this_build_without_a_device(self):
        code, text = self.make(BUILD, "--without-device")
        receipt = json.loads(self.output.read_text())
        self.assertEqual(receipt["schema"], "kiln.runtime/1")
        self.assertIsNone(receipt["device"])
        self.assertNotIn("results", receipt)
        # The digest that was built in is the digest of the sources here.
        self.assertEqual(receipt["sources"],
                         runtime_receipt.source_digest(ROOT))
        self.assertRegex(receipt["toolchain"], r"^(g\+\+|.*Clang) \d+\.")
        self.assertRegex(receipt["library"]["sha256"], "^[0-9a-f]{64}$")
        self.assertIn("--without-device", receipt["command"])
        results = receipt["host_results"]
        self.assertLessEqual({"Find_ns", "LaunchWithoutDriver_ns",
                              "LoadWithoutDriver_ns", "Root_ns"}, set(results))
        for result in results.values():
            self.assertGreater(result["median"], 0)
        missed = [r for r in results.values() if not r.get("met", True)]
        self.assertEqual(code, 1 if missed else 0)
        self.assertEqual(text.count("MISSED"), len(missed))

    def test_a_receipt_of_a_device_holds_every_run(self):
        code, text = self.make(self.stand_ins(), "--runs", "3")
        receipt = json.loads(self.output.read_text())
        self.assertEqual(code, 0, text)
        self.assertEqual(receipt["device"], {
            "device": "NVIDIA Imaginary", "target": "sm_90a",
            "driver_version": 13000})
        self.assertEqual(receipt["tests"],
                         {"passed": 1, "skipped": [
                             {"name": "OnTwoDevices",
                              "why": "one device only"}]})
        self.assertEqual(set(receipt["results"]), set(VALUES))
        self.assertEqual(receipt["results"]["find_ns"], {
            "median": 14, "runs": [7, 14, 21], "goal": 20, "met": True})
        self.assertEqual(receipt["results"]["launch_minus_raw_ns"]["runs"],
                         [50, 100, 150])
        self.assertNotIn("goal", receipt["results"]["open_ms"])
        self.assertEqual(receipt["host_results"]["Root_ns"]["median"], 2000)
        self.assertEqual(receipt["sources"], "aa" * 32)
        self.assertIn("other devices", receipt["not_covered"])
        self.assertEqual(receipt["warm_cache"]["systems"]["kiln"],
                         {"loaded_ms": 9.5})

    def test_every_receipt_of_the_tree_says_what_it_does_not_claim(self):
        folder = ROOT / "tests" / "qualification"
        receipts = [receipt for path in sorted(folder.rglob("*.json"))
                    if isinstance(receipt := json.loads(path.read_text()), dict)
                    and "device" in receipt]
        self.assertGreaterEqual(len(receipts), 3)
        for receipt in receipts:
            self.assertRegex(receipt["not_covered"], "other devices",
                             f'{receipt["schema"]} of {receipt["device"]}')

    def test_the_readme_states_the_numbers_of_the_receipt(self):
        """Both tables of runtime/README.md that name it, number by number."""
        receipt = json.loads((ROOT / "tests" / "qualification" / "runtime" /
                              "sm_90a.json").read_text())
        readme = (ROOT / "runtime" / "README.md").read_text()
        tables = {cells[1].strip(): [cell.strip() for cell in cells[2:-1]]
                  for cells in (line.split("|") for line in readme.splitlines()
                                if line.startswith("| "))}
        median = {name: result["median"]
                  for name, result in receipt["results"].items()}
        goal = {name: result.get("goal")
                for name, result in receipt["results"].items()}
        ms = "{:.1f} ms".format
        ns = "{:.0f} ns".format
        raw = median["launch_raw_ns"] / 1000
        for row, cells in (
                ("open, verify and load 256 programs (1.9 MiB), context up",
                 [f'{goal["load_ms"]} ms', ms(median["load_ms"])]),
                ("the same, in units of raw `cuModuleLoadData`, "
                 "`cuModuleGetFunction`, `cuFuncLoad`",
                 [f'{goal["load_over_raw"]}', f'{median["load_over_raw"]:.2f}']),
                ("of it open and verify; hashing alone",
                 ["", f'{ms(median["open_ms"])}; {ms(median["root_ms"])}']),
                (f"`kiln_launch` of two steps, less raw ({raw:.1f} us)",
                 [f'{goal["launch_minus_raw_ns"]} ns',
                  ns(median["launch_minus_raw_ns"])]),
                ("control: raw less raw", ["", ns(median["raw_minus_raw_ns"])]),
                ("of it `cuCtxGetCurrent`", ["", ns(median["get_current_ns"])]),
                ("`kiln_entry_find`", [f'{goal["find_ns"]} ns',
                                       f'{median["find_ns"]:.1f} ns'])):
            self.assertEqual(tables.get(row), cells, row)
        self.assertIn(f'one {receipt["device"]["device"]}, driver ', readme)
        self.assertIn(f'{receipt["date"]}, `tests/qualification/runtime/'
                      'sm_90a.json`', readme)
        for system, row in (("kiln", "Kiln, 32 programs of two kernels each"),
                            ("cupy", "CuPy `RawKernel`, warm disk cache"),
                            ("triton", "Triton, warm disk cache")):
            found = receipt["warm_cache"]["systems"][system]
            process, loaded = tables[row]
            self.assertRegex(process, rf', {found["process_ms"]:.0f} ms')
            self.assertRegex(loaded, rf', {found["loaded_ms"]:.1f} ms|'
                             rf', {found["loaded_ms"]:.0f} ms')

    def test_a_missed_goal_is_written_and_told(self):
        code, text = self.make(self.stand_ins(), "--runs", "5")
        self.assertEqual(code, 1)
        results = json.loads(self.output.read_text())["results"]
        self.assertEqual({n for n, r in results.items() if r.get("met") is False},
                         {"find_ns", "launch_minus_raw_ns"})
        self.assertIn("find_ns: 21, at most 20 wanted -- MISSED", text)

    def test_nothing_is_written_when_a_test_fails(self):
        with self.assertRaisesRegex(SystemExit, "exit code 1"):
            self.make(self.stand_ins(code=1))
        self.assertFalse(self.output.exists())

    def test_nothing_is_written_without_a_device(self):
        with self.assertRaisesRegex(SystemExit, "--without-device"):
            self.make(self.stand_ins(skip=True))
        self.assertFalse(self.output.exists())

    def test_nothing_is_written_of_a_skip_without_a_reason(self):
        with self.assertRaisesRegex(SystemExit, "OnTwoDevices was skipped and "
                                    "does not say why"):
            self.make(self.stand_ins(why=""))
        self.assertFalse(self.output.exists())

    def test_this_builds_test_says_why_it_skips(self):
        cases = runtime_receipt.gpu_cases(BUILD, None, self.folder)
        self.assertGreater(len(cases), 5)
        for case in cases:
            if case["skipped"] is not None:
                self.assertRegex(case["skipped"], "device|capability")

    def test_nothing_is_written_when_start_up_was_not_measured(self):
        with self.assertRaisesRegex(SystemExit, "no such library"):
            self.make(self.stand_ins(),
                      warm={"systems": {},
                            "not_measured": {"kiln": "no such library"}})
        self.assertFalse(self.output.exists())

    def test_warm_cache_names_what_it_could_not_measure(self):
        report = self.folder / "warm.json"
        done = subprocess.run(
            [sys.executable, str(ROOT / "tests" / "bench" / "warm_cache.py"),
             str(self.folder / "no-library.so"), "no.kiln", "--kernels", "1",
             "--rounds", "1", "--json", str(report)],
            capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        found = json.loads(report.read_text())
        self.assertNotIn("kiln", found["systems"])
        self.assertRegex(found["not_measured"]["kiln"],
                         "libcuda|cuInit|no-library")
        self.assertEqual(set(found["systems"]) | set(found["not_measured"]),
                         {"kiln", "cupy", "triton"})

    def test_warm_cache_reports_medians_and_ratios(self):
        report = self.folder / "warm.json"
        turns = {"kiln": [30, 10, 20], "cupy": [90, 40, 20]}

        def start(_, system, __):
            if system not in turns:
                raise RuntimeError("no such thing")
            # The first call fills the caches.
            ms = 1000 if system not in started else turns[system].pop()
            started.add(system)
            return {"phases": {"interpreter": 5, "load": ms},
                    "versions": {system: "1"}}

        started = set()
        with unittest.mock.patch.object(warm_cache, "start", start), \
                unittest.mock.patch.object(
                    warm_cache, "NEEDS", {"kiln": (), "cupy": (),
                                          "triton": ()}), \
                unittest.mock.patch.object(sys, "argv", [
                    "warm_cache.py", "library", "bundle", "--kernels", "4",
                    "--rounds", "3", "--json", str(report)]), \
                contextlib.redirect_stdout(io.StringIO()):
            warm_cache.main()
        self.assertEqual(json.loads(report.read_text()), {
            "kernels": 4, "rounds": 3,
            "not_measured": {"triton": "no such thing"},
            "systems": {
                "kiln": {"process_ms": 25, "loaded_ms": 20,
                         "versions": {"kiln": "1"}},
                "cupy": {"process_ms": 45, "loaded_ms": 40,
                         "versions": {"cupy": "1"}, "process_over_kiln": 1.8,
                         "loaded_over_kiln": 2}}})

    def test_the_gpu_test_records_what_is_wanted(self):
        text = (ROOT / "tests" / "runtime" / "runtime_gpu_test.cc").read_text()
        recorded = set(re.findall(r'\bRecord\("(\w+)"', text)) | set(
            re.findall(r'std::tuple\{"[^"]*",\s*"(\w+_ns)"', text))
        self.assertEqual(recorded, set(runtime_receipt.MEASURES))
        self.assertEqual(recorded, set(VALUES))
        for name in ("device", "target", "driver_version"):
            self.assertIn(f'RecordProperty("{name}"', text)

    def test_a_change_of_a_source_changes_the_digest(self):
        tree = self.folder / "tree"
        for name in ("runtime", "tests/runtime", "tests/bench"):
            shutil.copytree(ROOT / name, tree / name)
        before = runtime_receipt.source_digest(tree)
        self.assertEqual(before, runtime_receipt.source_digest(ROOT))
        with open(tree / "runtime" / "launch.cc", "a", encoding="utf-8") as out:
            out.write("\n")
        self.assertNotEqual(runtime_receipt.source_digest(tree), before)

    def test_the_receipts_of_the_tree_are_whole(self):
        sources = runtime_receipt.source_digest(ROOT)
        for path in (ROOT / runtime_receipt.RECEIPTS).glob("*.json"):
            receipt = json.loads(path.read_text())
            self.assertEqual(receipt["schema"], runtime_receipt.SCHEMA)
            self.assertEqual(f"{receipt['device']['target']}.json", path.name)
            self.assertEqual(set(receipt["results"]),
                             set(runtime_receipt.MEASURES))
            state = ("holds" if receipt["sources"] == sources else
                     "stale: the runtime changed since, run "
                     "tools/runtime_receipt.py on such a device")
            print(f"{path.name} of {receipt['date']}: {state}")


if __name__ == "__main__":
    unittest.main()
