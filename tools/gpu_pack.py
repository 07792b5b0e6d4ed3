#!/usr/bin/env python3
"""Collects the GPU tests for a machine without CMake (tools/dev gpu-pack).

Reads `ctest --show-only=json-v1` on standard input; copies and strips the test
programs into PACK/tests and writes PACK/run-tests, which runs each one as
ctest would, with the paths of the pack.
"""

import json
import os
import shlex
import subprocess
import sys

HEAD = """#!/usr/bin/env bash
# Runs the GPU tests of this folder. Needs an NVIDIA driver and, for the tests
# that compile, libnvrtc.so.13 or .12 where `bin/kiln doctor` finds it.
# Arguments, if any, are names of tests.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")" || exit
export KILN_SOURCE_DIR=$PWD KILN_BIN_DIR=$PWD/bin
failed=()
ran=0
run() {
  local name=$1
  shift
  if (( ${#wanted[@]} > 0 )) && [[ " ${wanted[*]} " != *" $name "* ]]; then
    return
  fi
  echo "== $name"
  ran=$((ran + 1))
  "$@" </dev/null || failed+=("$name (exit code $?)")
}
wanted=("$@")
"""

TAIL = """echo "== $ran programs ran, ${#failed[@]} failed"
(( ran > 0 )) || { echo "no such test" >&2; exit 2; }
(( ${#failed[@]} == 0 )) && exit
printf 'failed: %s\\n' "${failed[@]}" >&2
exit 1
"""


def main():
    root, pack = sys.argv[1:3]
    lines = []
    for test in json.load(sys.stdin)["tests"]:
        if "command" not in test:
            sys.exit(f"{test['name']} is not built")
        program, *arguments = test["command"]
        copy = os.path.join("tests", os.path.basename(program))
        subprocess.run(["strip", "-o", os.path.join(pack, copy), program],
                       check=True)
        # Data is named relative to the source folder, which the pack stands in
        # for.
        arguments = [a.replace(root + "/", "") for a in arguments]
        lines.append(shlex.join(["run", test["name"], "./" + copy] + arguments))
    if not lines:
        sys.exit("no test has the label gpu")
    script = os.path.join(pack, "run-tests")
    with open(script, "w", encoding="utf-8") as out:
        out.write(HEAD + "\n".join(lines) + "\n" + TAIL)
    os.chmod(script, 0o755)


if __name__ == "__main__":
    main()
