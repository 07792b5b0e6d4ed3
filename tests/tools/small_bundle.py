"""Bundles of small models for this machine, made by kiln itself."""

import hashlib
import json
import os
import pathlib
import subprocess

BIN = pathlib.Path(
    os.environ.get("KILN_BIN_DIR", "build/release/bin")).resolve()
KILN = BIN / "kiln"
SOURCE = pathlib.Path(os.environ.get(
    "KILN_SOURCE_DIR", pathlib.Path(__file__).parents[2])).resolve()

REQUEST = {
    "name": "moe", "op": "fused_moe", "layers": 1, "hidden": 128,
    "intermediate": 128, "experts": 4, "top_k": 2, "activation": "silu",
    "io_dtype": "bf16", "id_dtype": "i32",
    "weights": {"format": "exl3", "codebook": "mcg", "bits": 4},
    "recipe": "w4a16", "capacities": [1, 4]}


def kiln(*arguments):
    """Runs a verb; the caller looks at returncode, stdout and stderr."""
    return subprocess.run([str(KILN), *map(str, arguments)],
                          capture_output=True, text=True, check=False)


def make(folder, name, *requests, predicted=False, target="cpu"):
    """Prewarms and freezes the requests with a cache of their own, and returns
    the bundle's path. `predicted`: only compiles, so that no plan ever ran."""
    folder = pathlib.Path(folder)
    manifest = folder / f"{name}.json"
    manifest.write_text(json.dumps(
        {"schema": "kiln.model/1", "name": name,
         "requests": list(requests or [REQUEST])}))
    bundle = folder / f"{name}.kiln"
    planning = [manifest, "--target", target, "--max-candidates", "1"]
    if predicted:
        planning.append("--compile-only")
    freeze = ["freeze", *planning, "-o", bundle, "--allow-unqualified",
              "--keep-intervals"]
    if predicted:
        freeze.append("--allow-predicted")
    # Exit code 3, "incomplete", is fine where no plan is wanted to be measured.
    for verb, codes in ((["prewarm", *planning, "--budget", "0.1"],
                         (0, 3) if predicted else (0,)), (freeze, (0,))):
        done = kiln("--cache", folder / f"{name}.cache", *verb)
        if done.returncode not in codes:
            raise RuntimeError(f"kiln {verb[0]} exits {done.returncode}: "
                               f"{done.stdout}{done.stderr}")
    return bundle


def repair_root(data):
    """Puts the right root into the bytes of a bundle that were changed: RFC
    6962 over leaves of 64 KiB, the root's own place as zero."""
    data[24:56] = bytes(32)

    def tree(leaves):
        if len(leaves) == 1:
            return leaves[0]
        k = 1
        while k * 2 < len(leaves):
            k *= 2
        return hashlib.sha256(b"\1" + tree(leaves[:k]) +
                              tree(leaves[k:])).digest()

    data[24:56] = tree([hashlib.sha256(b"\0" + bytes(data[i:i + 65536])).digest()
                        for i in range(0, len(data), 65536)])
