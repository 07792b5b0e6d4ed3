#!/usr/bin/env python3
"""Collects the GPU tests for a machine without CMake (tools/dev gpu-pack).

Reads `ctest --show-only=json-v1` on standard input; copies and strips the test
programs into PACK/tests and writes PACK/run-tests, which runs each one as
ctest would, with the paths of the pack. Tests in Python keep their place, and
find the folders in PYTHON_FOLDERS and the libraries of their arguments there.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys

PYTHON_FOLDERS = ("tests/tools", "runtime/python")

HEAD = """#!/usr/bin/env bash
# Runs the GPU tests of this folder. Needs an NVIDIA driver and, for the tests
# that compile, libnvrtc.so.13 or .12 where `bin/kiln doctor` finds it.
# Arguments, if any, are names of tests.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")" || exit
export KILN_SOURCE_DIR=$PWD KILN_BIN_DIR=$PWD/bin
failed=()
ran=0
skipped=0
run() {
  local name=$1
  shift
  if (( ${#wanted[@]} > 0 )) && [[ " ${wanted[*]} " != *" $name "* ]]; then
    return
  fi
  echo "== $name"
  local code=0
  "$@" </dev/null || code=$?
  if (( code == 77 )); then
    skipped=$((skipped + 1))
    return
  fi
  ran=$((ran + 1))
  (( code == 0 )) || failed+=("$name (exit code $code)")
}
wanted=("$@")
"""

TAIL = """echo "== $ran programs ran, ${#failed[@]} failed, $skipped skipped"
(( ran + skipped > 0 )) || { echo "no such test" >&2; exit 2; }
(( ${#failed[@]} == 0 )) && exit
printf 'failed: %s\\n' "${failed[@]}" >&2
exit 1
"""


def strip(program, pack, folder):
    """Copies it into a folder of the pack; returns its place there."""
    copy = os.path.join(folder, os.path.basename(program))
    os.makedirs(os.path.join(pack, folder), exist_ok=True)
    subprocess.run(["strip", "-o", os.path.join(pack, copy), program],
                   check=True)
    return copy


def python_command(root, pack, script, arguments):
    for source in PYTHON_FOLDERS:
        shutil.copytree(os.path.join(root, source), os.path.join(pack, source),
                        dirs_exist_ok=True,
                        ignore=shutil.ignore_patterns("__pycache__",
                                                      "*_test.py"))
    copy = os.path.relpath(script, root)
    os.makedirs(os.path.join(pack, os.path.dirname(copy)), exist_ok=True)
    shutil.copy(script, os.path.join(pack, copy))
    return ["python3", copy] + [
        "./" + strip(a, pack, "lib") if ".so" in os.path.basename(a) else a
        for a in arguments]


def main():
    root, pack = sys.argv[1:3]
    lines = []
    for test in json.load(sys.stdin)["tests"]:
        if "command" not in test:
            sys.exit(f"{test['name']} is not built")
        program, *arguments = test["command"]
        if os.path.basename(program).startswith("python"):
            command = python_command(root, pack, arguments[0],
                                     arguments[1:])
        else:
            # The pack stands in for the source folder: what an argument names
            # there comes along.
            for argument in arguments:
                if argument.startswith(root + "/") and os.path.isdir(argument):
                    shutil.copytree(
                        argument,
                        os.path.join(pack, os.path.relpath(argument, root)),
                        dirs_exist_ok=True)
            command = ["./" + strip(program, pack, "tests")] + [
                a.replace(root + "/", "") for a in arguments]
        lines.append(shlex.join(["run", test["name"], *command]))
    if not lines:
        sys.exit("no test has the label gpu")
    script = os.path.join(pack, "run-tests")
    with open(script, "w", encoding="utf-8") as out:
        out.write(HEAD + "\n".join(lines) + "\n" + TAIL)
    os.chmod(script, 0o755)


if __name__ == "__main__":
    main()
