#!/usr/bin/env python3
"""Qualifies the templates of a target on this machine's device.

Runs tests/qualification/suite.v1.json, as far as its requests are for ops and
formats that templates of the target serve: prewarm verifies every candidate of
every request against the float64 oracle, freeze packs the winners, and
`kiln run --check` launches each entry through the runtime at the edges and
inside of its intervals, once directly and once replayed with changed inputs and
routes. Writes the receipt, which `kiln freeze` looks up. A template of which a
candidate is wrong is named and left out, and the exit code is 1; the others get
their receipt.

    tools/qualify.py --kiln build/release/bin/kiln --target sm_90a \
        -o tests/qualification/sm_90a.json

Build Kiln again afterwards: receipts are compiled in. A receipt names its suite
with the SHA-256 of the file; one of another suite than that of the build
qualifies nothing. Exit code 2: an argument, or a suite that is none.
"""

import argparse
import concurrent.futures
import datetime
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile

SUITE = "suite.v1.json"
SUITE_VERSION = 1
# Candidates per interval and template. A GPU machine compiles many at once.
CANDIDATES = {"cuda": 16, "cpu": 4}
# What requests of so many experts are asked for beyond their own capacities, so
# that candidates for many rows per expert are verified too.
MORE_ROWS = {"cuda": {8: [700], 1: [700, 1100]}, "cpu": {}}
# Launches of the bundle at a time; on a GPU most of each is starting up.
CHECKERS = {"cuda": 8, "cpu": 1}


class SuiteError(Exception):
    """What is wrong with a suite."""


def run(command, accepted=(0,)):
    """Runs a command, or exits with its stderr."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              text=True, errors="replace", check=False)
    except OSError as error:
        sys.exit(f"{command[0]} cannot be started: {error.strerror}")
    if done.returncode not in accepted:
        sys.exit(f"{' '.join(command)}: exit code {done.returncode}\n"
                 f"{done.stderr}{done.stdout}")
    return done


def call(command):
    return run(command).stdout


def wrong_templates(notes):
    """Templates of candidates that prewarm rejected or set aside."""
    return set(re.findall(r"(?:rejected|set aside) (\w+\.\w+)\{", notes))


def last_object(text):
    return json.loads(text.strip().splitlines()[-1])


def ask_doctor(kiln):
    """What kiln doctor says; exits where the program is no kiln."""
    try:
        doctor = last_object(call(kiln + ["doctor"]))
        return doctor["devices"] and doctor or {**doctor, "devices": []}
    except (ValueError, IndexError, KeyError, TypeError):
        sys.exit(f"{kiln[0]} is no kiln of this version: its doctor does not "
                 "print the object that is expected")


def check_request(request, where):
    """SuiteError unless it has what is read here; kiln checks the rest."""
    def fault(text):
        raise SuiteError(f"{where} {text}")
    if not isinstance(request, dict):
        fault("is no object")
    for key in ("name", "op"):
        if not isinstance(request.get(key), str):
            fault(f'has no text as "{key}"')
    weights = request.get("weights")
    if not isinstance(weights, dict) or not isinstance(weights.get("format"),
                                                       str):
        fault('has no "weights" with a "format"')
    capacities = request.get("capacities")
    if not isinstance(capacities, list) or not capacities or not all(
            type(capacity) is int and capacity > 0 for capacity in capacities):
        fault('has no list of capacities, whole numbers above 0')
    if "experts" in request and type(request["experts"]) is not int:
        fault('has no whole number as "experts"')


def read_suite(path):
    """The manifest of a suite, and what the receipt says of its file."""
    try:
        with open(path, "rb") as handle:
            data = handle.read()
    except OSError as error:
        raise SuiteError(f"cannot be read: {error.strerror}") from error
    try:
        manifest = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise SuiteError(f"is no JSON: {error}") from error
    requests = manifest.get("requests") if isinstance(manifest, dict) else None
    if not isinstance(requests, list) or not requests:
        raise SuiteError('has no list of "requests"')
    for number, request in enumerate(requests):
        check_request(request, f"has a fault: request {number}")
    return manifest, {"name": os.path.basename(path),
                      "sha256": hashlib.sha256(data).hexdigest()}


def sizes(capacities):
    """Edges of every interval and one size inside."""
    chosen, previous = set(), 0
    for capacity in capacities:
        chosen |= {previous + 1, (previous + 1 + capacity) // 2, capacity}
        previous = capacity
    return sorted(chosen)


def write_manifest(path, manifest, requests):
    with open(path, "w", encoding="utf-8") as out:
        json.dump({**manifest, "requests": requests}, out)


def with_more_rows(request, capacities):
    """The request with further capacities, where they cost little to verify."""
    if request["op"] != "fused_moe" or request["weights"]["format"] != "exl3":
        return request
    more = capacities.get(request.get("experts"), [])
    return {**request, "capacities": request["capacities"] + more}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kiln", required=True)
    parser.add_argument("--target", required=True)
    parser.add_argument("-o", "--output", required=True)
    parser.add_argument("--suite", help="suite, or a folder that holds " + SUITE,
                        default=os.path.join(
                            os.path.dirname(os.path.abspath(__file__)), "..",
                            "tests", "qualification"))
    arguments = parser.parse_args()
    if shutil.which(arguments.kiln) is None:
        parser.error(f"{arguments.kiln} is no program")
    # Known at once, not after the work of minutes.
    if not arguments.output or os.path.isdir(arguments.output):
        parser.error(f"-o: \"{arguments.output}\" names no file")
    output_folder = os.path.dirname(os.path.abspath(arguments.output))
    if not os.access(output_folder, os.W_OK):
        parser.error(f"-o: cannot write into {output_folder}")

    suite_file = (os.path.join(arguments.suite, SUITE)
                  if os.path.isdir(arguments.suite) else arguments.suite)
    try:
        manifest, identity = read_suite(suite_file)
    except SuiteError as error:
        parser.error(f"--suite: {suite_file} {error}")
    if (os.path.exists(arguments.output)
            and os.path.samefile(arguments.output, suite_file)):
        parser.error(f"-o: the receipt would replace {suite_file}")
    with tempfile.TemporaryDirectory() as folder:
        kiln = [arguments.kiln, "--json", "--cache",
                os.path.join(folder, "cache")]
        bundle = os.path.join(folder, "suite.kiln")
        backend = "cuda" if arguments.target.startswith("sm_") else "cpu"
        doctor = ask_doctor(kiln)
        if backend == "cuda" and not doctor["devices"]:
            sys.exit(f"no device of target {arguments.target} on this machine")
        served = {(template["op"], template["format"])
                  for template in doctor["templates"]
                  if template["backend"] == backend}
        requests = [with_more_rows(r, MORE_ROWS[backend])
                    for r in manifest["requests"]
                    if (r["op"], r["weights"]["format"]) in served]
        if not requests:
            sys.exit(f"{suite_file} has no request that a template for "
                     f"{backend} targets serves")
        suite = os.path.join(folder, SUITE)
        write_manifest(suite, manifest, requests)
        options = [suite, "--target", arguments.target,
                   "--max-candidates", str(CANDIDATES[backend])]
        # Exit code 3: a request has no plan.
        warmed = run(kiln + ["prewarm", *options, "--budget", "0.05"], (0, 3))
        prewarm = last_object(warmed.stdout)
        wrong = wrong_templates(warmed.stderr)
        if wrong:
            print(f"not qualified: {', '.join(sorted(wrong))}\n"
                  f"{warmed.stderr}", file=sys.stderr)
        elif not prewarm["complete"] or prewarm["rejects"]:
            sys.exit(f"not qualified: {prewarm['rejects']} rejects\n"
                     f"{warmed.stderr}")
        if prewarm["predicted"]:
            sys.exit(f"no device of target {arguments.target} on this machine")
        planless = {name for plan in prewarm["plans"] if "winner" not in plan
                    for name in plan["requests"]}
        requests = [r for r in requests if r["name"] not in planless]
        if not requests:
            sys.exit("not qualified: no request has a plan\n" + warmed.stderr)
        write_manifest(suite, manifest, requests)
        planned = json.loads(call(kiln + ["plan", *options]))
        reached = {candidate["label"].split("{")[0]
                   for interval in planned["intervals"]
                   for candidate in interval["candidates"]}
        passed = [{key: template[key] for key in ("name", "version", "sources")}
                  for template in doctor["templates"]
                  if template["backend"] == backend
                  and template["name"] in reached - wrong]
        if not passed:
            sys.exit("not qualified: no template passed")
        # Every interval keeps its winner, so that every winner is launched.
        call(kiln + ["freeze", *options, "--keep-intervals",
                     "--allow-unqualified", "-o", bundle])
        launches = [(request["name"], tokens) for request in requests
                    for tokens in sizes(request["capacities"])]
        with concurrent.futures.ThreadPoolExecutor(CHECKERS[backend]) as pool:
            runs = list(pool.map(
                lambda launch: last_object(call(
                    kiln + ["run", bundle, "--entry", launch[0], "--tokens",
                            str(launch[1]), "--check",
                            "--allow-unqualified"])), launches))
    worst = max(row["worst_error"] for row in runs)
    device, target = runs[-1]["device"], runs[-1]["target"]
    compiler = doctor["nvrtc" if backend == "cuda" else "cc_cpu"]
    devices = [d for d in doctor["devices"] if d["name"] == device]
    receipt = {
        "schema": "kiln.qualification/1",
        "target": target,
        "suite_version": SUITE_VERSION,
        "suite": identity,
        "date": datetime.date.today().isoformat(),
        "device": device,
        "driver_version": devices[0]["driver_version"] if devices else 0,
        "compiler": {"version": compiler["version"],
                     "content": compiler["content"]},
        # Those that have candidates for a request on this target.
        "templates": passed,
        "requests": len(requests),
        "intervals": prewarm["intervals"],
        "candidates_verified": prewarm["candidates"],
        "launches": prewarm["launches"],
        "bundle_checks": len(runs),
        "worst_error": max(worst, max(p["worst_error"]
                                      for p in prewarm["plans"]
                                      if "winner" in p)),
        "not_covered": "timing, other devices of the target, compute-sanitizer",
    }
    with open(arguments.output, "w", encoding="utf-8") as out:
        json.dump(receipt, out, indent=1)
        out.write("\n")
    print(json.dumps(receipt))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
