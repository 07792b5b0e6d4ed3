#!/usr/bin/env python3
"""Measures the runtime on this machine's GPU and writes the receipt:

    tools/runtime_receipt.py

in a tree that is built (build/release), or in a pack that `tools/dev gpu-pack`
made. Runs the runtime's GPU tests once, its timings beside the raw driver calls
several times, and its start-up beside CuPy's and Triton's warm caches where
those can be imported. Writes tests/qualification/runtime/TARGET.json; copy it
back into the tree. Exit code 1: a test failed, and nothing is written; or a
goal is missed, and the receipt says so.

--without-device leaves out all that needs a GPU. The result is no receipt of a
device, so it needs an --output of its own.
"""

import argparse
import datetime
import hashlib
import json
import os
import pathlib
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import xml.etree.ElementTree

SCHEMA = "kiln.runtime/1"
NOT_COVERED = ("results of kernels other than the small ones of these tests, "
               "other devices and drivers, engines")
HERE = pathlib.Path(__file__).resolve().parents[1]
RECEIPTS = pathlib.Path("tests") / "qualification" / "runtime"

# What tests/runtime/runtime_gpu_test.cc records of each run, and the most that
# is allowed (None: told for comparison).
MEASURES = {
    "load_ms": 50,  # open, verify and load 256 programs, context up
    "load_raw_ms": None,
    "load_over_raw": 1.3,
    "open_ms": None,
    "root_ms": None,
    "find_ns": 20,
    "launch_ns": None,  # of two steps
    "launch_raw_ns": None,
    "launch_minus_raw_ns": 100,
    "raw_minus_raw_ns": None,  # the control: how far apart equal things are
    "packed_minus_raw_ns": None,
    "get_current_ns": None,
}
TIMINGS = "RuntimeGpuTest.CostsLittleMoreThanTheDriver"
# The same of tests/bench/runtime_bench.cc, whose driver does nothing.
HOST_GOALS_NS = {"Find": 20, "LaunchWithoutDriver": 100}
KERNELS = 32  # of warm_cache.py


def sources(root):
    """The files of the runtime and of what measures it."""
    return sorted([p for p in (root / "runtime").iterdir()
                   if p.suffix in (".cc", ".h", ".inc", ".map")] +
                  [root / "runtime" / "CMakeLists.txt",
                   root / "tests" / "runtime" / "runtime_gpu_test.cc",
                   root / "tests" / "bench" / "runtime_bench.cc"])


def source_digest(root):
    """SHA-256 over their names and bytes."""
    digest = hashlib.sha256()
    for path in sources(root):
        name = path.relative_to(root).as_posix()
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{name} {content}\n".encode())
    return digest.hexdigest()


def call(command, **options):
    """Runs a command; its stdout, or exits with its output."""
    done = subprocess.run([str(part) for part in command], check=False,
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True, **options)
    if done.returncode != 0:
        sys.exit(f"{shlex.join(map(str, command))}: exit code "
                 f"{done.returncode}\n{done.stderr}{done.stdout}")
    return done.stdout


def measure_host(build, environment):
    """Nanoseconds of the runtime's own part, and what the build says of
    itself."""
    text = call([build / "tests" / "runtime_bench", "--benchmark_format=json",
                 "--benchmark_repetitions=5",
                 "--benchmark_report_aggregates_only=true",
                 "--benchmark_min_time=0.2"], env=environment)
    report = json.loads(text)
    factor = {"ns": 1, "us": 1e3, "ms": 1e6, "s": 1e9}
    # Of the processor: the runtime waits for nothing here, others may.
    times = {row["run_name"]: row["cpu_time"] * factor[row["time_unit"]]
             for row in report["benchmarks"]
             if row["aggregate_name"] == "median"}
    return times, report["context"]


def gpu_cases(build, environment, folder, only=None):
    """The test cases of runtime_gpu_test as it reports them."""
    report = folder / "report.xml"  # only XML says why a test was skipped
    # ctest and the pack run it without sharding or shuffling, too.
    call([build / "tests" / "runtime_gpu_test",
          f"--gtest_output=xml:{report}"] +
         ([f"--gtest_filter={only}"] if only else []), env=environment)
    cases = []
    for case in xml.etree.ElementTree.parse(report).iter("testcase"):
        if case.get("status") != "run":
            continue
        skip = case.find("skipped")
        cases.append({"name": case.get("name"),
                      "skipped": None if skip is None else reason_of(case, skip),
                      **{p.get("name"): p.get("value")
                         for p in case.iter("property")}})
    return cases


def reason_of(case, skip):
    """What a test says of its skip, without the place in the source text."""
    _, _, reason = skip.get("message", "").partition("\n")
    if not reason.strip():
        sys.exit(f"{case.get('name')} was skipped and does not say why: "
                 "GTEST_SKIP() << a reason")
    return reason.strip()


def measure_device(build, environment, runs, folder):
    """(What device, counts of tests, values of each measure by run)."""
    cases = gpu_cases(build, environment, folder)
    skipped = [{"name": c["name"], "why": c["skipped"]}
               for c in sorted(cases, key=lambda c: c["name"]) if c["skipped"]]
    passed = len(cases) - len(skipped)
    if passed == 0:
        sys.exit("no test of tests/runtime_gpu_test ran: no NVIDIA device of "
                 "compute capability 9.0 here; --without-device measures the "
                 "rest")
    values = {name: [] for name in MEASURES}
    device = {}
    for _ in range(runs):
        (case,) = gpu_cases(build, environment, folder, TIMINGS)
        for name, list_ in values.items():
            if name not in case:
                sys.exit(f"{TIMINGS} of {build} does not record {name}; build "
                         "it from the tree that this script is from")
            list_.append(float(case[name]))
        device = {name: case[name] for name in ("device", "target")}
        device["driver_version"] = int(case["driver_version"])
    return device, {"passed": passed, "skipped": skipped}, values


def judge(values, goals):
    """The measures with their goals and whether the median meets them."""
    out = {}
    for name, each in values.items():
        out[name] = {"median": statistics.median(each), "runs": each}
        if goals.get(name) is not None:
            out[name]["goal"] = goals[name]
            out[name]["met"] = out[name]["median"] <= goals[name]
    return out


def library_of(build):
    for path in sorted((build / "lib").glob("libkiln_runtime.so*")):
        return path.resolve()
    sys.exit(f"no libkiln_runtime.so in {build / 'lib'}")


def processor():
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()


def main(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, help="folder with tests/ "
                        "and lib/; default: this pack, or build/release")
    parser.add_argument("-o", "--output", type=pathlib.Path)
    parser.add_argument("--runs", type=int, default=6)
    parser.add_argument("--without-device", action="store_true")
    # For the build.
    parser.add_argument("--list-sources", action="store_true",
                        help=argparse.SUPPRESS)
    parser.add_argument("--write-digest", type=pathlib.Path,
                        help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.list_sources:
        print(";".join(str(path) for path in sources(HERE)))
        return 0
    if arguments.write_digest:
        arguments.write_digest.write_text(
            "// What runtime_bench was built from.\n"
            "extern const char* const kRuntimeSources;\n"
            f"const char* const kRuntimeSources = \"{source_digest(HERE)}\";\n",
            encoding="utf-8")
        return 0
    if arguments.runs < 1:
        parser.error("--runs must be at least 1")
    if arguments.without_device and arguments.output is None:
        parser.error("--without-device needs --output")
    packed = (HERE / "tests" / "runtime_gpu_test").exists()
    build = (arguments.build or
             (HERE if packed else HERE / "build" / "release")).resolve()
    environment = dict(os.environ, KILN_SOURCE_DIR=str(HERE))

    host, context = measure_host(build, environment)
    library = library_of(build)
    receipt = {
        "schema": SCHEMA,
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["tools/runtime_receipt.py", *argv]),
        # Of the sources that the measured programs were built from.
        "sources": context["kiln_sources"],
        "toolchain": context["kiln_compiler"],
        "library": {"sha256": hashlib.sha256(library.read_bytes()).hexdigest(),
                    "bytes": library.stat().st_size},
        "host": {"processor": processor(), "threads": os.cpu_count(),
                 "system": f"{platform.system()} {platform.release()}"},
        "device": None,
        "host_results": judge({f"{name}_ns": [time]
                               for name, time in host.items()},
                              {f"{name}_ns": goal
                               for name, goal in HOST_GOALS_NS.items()}),
    }
    results = [receipt["host_results"]]
    output = arguments.output
    if not arguments.without_device:
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            device, tests, values = measure_device(
                build, environment, arguments.runs, folder)
            bundle = folder / "scale.kiln"
            call([build / "tests" / "scale_bundle", KERNELS, bundle],
                 env=environment)
            report = folder / "warm_cache.json"
            print(call([sys.executable, HERE / "tests" / "bench" /
                        "warm_cache.py", library, bundle, "--kernels", KERNELS,
                        "--rounds", 3, "--json", report], env=environment),
                  file=sys.stderr)
            warm = json.loads(report.read_text(encoding="utf-8"))
            if "kiln" not in warm["systems"]:
                sys.exit(f"warm_cache.py: {warm['not_measured']['kiln']}")
        receipt["device"] = device
        receipt["tests"] = tests
        receipt["results"] = judge(values, MEASURES)
        receipt["warm_cache"] = warm
        results.append(receipt["results"])
        receipt["not_covered"] = NOT_COVERED
        output = output or HERE / RECEIPTS / f"{device['target']}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(receipt, indent=1) + "\n", encoding="utf-8")
    missed = 0
    for table in results:
        for name, result in table.items():
            goal = f", at most {result['goal']} wanted" if "goal" in result \
                else ""
            fails = not result.get("met", True)
            missed += fails
            print(f"{name}: {result['median']:.6g}{goal}"
                  f"{' -- MISSED' if fails else ''}")
    print(f"written: {output}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
