#!/usr/bin/env python3
"""A process that starts with everything compiled: N kernels loaded and launched
once each, by Kiln from a bundle, by CuPy and by Triton from their warm disk
caches. Fresh processes in turn, the same context and buffers in each.

    warm_cache.py LIBRARY BUNDLE [--kernels N] [--rounds R] [--json FILE]

LIBRARY is libkiln_runtime.so; BUNDLE comes from scale_bundle. Systems that are
not importable are left out and named. Prints medians and their ratio to Kiln's.
"""

import argparse
import ctypes
import importlib.util
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

WIDTH, TOKENS = 96, 8
SOURCE = """
extern "C" __global__ void scale(const float* x, float* out, unsigned n) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = 2.0f * x[i] + %d.0f;
}
"""


class Clock:
    """Milliseconds of each phase, counted from the start of the process."""

    def __init__(self, started):
        self.last = started
        self.phases = {}

    def mark(self, phase):
        now = time.monotonic()
        self.phases[phase] = (now - self.last) * 1e3
        self.last = now


def check(code, what):
    if code != 0:
        sys.exit(f"{what} fails with CUresult {code}")


def make_context():
    """The primary context of device 0, current; what the libraries use too."""
    driver = ctypes.CDLL("libcuda.so.1")
    context = ctypes.c_void_p()
    check(driver.cuInit(0), "cuInit")
    check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0),
          "cuDevicePrimaryCtxRetain")
    check(driver.cuCtxSetCurrent(context), "cuCtxSetCurrent")
    return driver


def allocate(driver, nbytes):
    memory = ctypes.c_uint64()
    check(driver.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(nbytes)),
          "cuMemAlloc")
    check(driver.cuMemsetD8_v2(memory, ctypes.c_ubyte(0),
                               ctypes.c_size_t(nbytes)), "cuMemsetD8")
    return memory.value


def run_kiln(arguments, clock):
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] /
                           "runtime" / "python"))
    import kiln
    clock.mark("import")
    driver = make_context()
    nbytes = WIDTH * 64 * 4
    x, out = allocate(driver, nbytes), allocate(driver, nbytes)
    arena = allocate(driver, 1 << 20)
    check(driver.cuCtxSynchronize(), "cuCtxSynchronize")
    clock.mark("context")
    runtime = kiln.Runtime(arguments.library)
    with runtime.open(arguments.bundle) as bundle:
        modules = bundle.load(target="cuda")
    clock.mark("load")
    scratch = kiln.Buffer(arena, 1 << 20, "cuda")
    for i in range(arguments.kernels):
        modules.find(f"scale{1000 + i}", TOKENS).launch(
            TOKENS, [kiln.Buffer(x, nbytes, "cuda"),
                     kiln.Buffer(out, nbytes, "cuda")], scratch)
    check(driver.cuCtxSynchronize(), "cuCtxSynchronize")
    clock.mark("first launches")


def run_cupy(arguments, clock):
    import cupy
    clock.mark("import")
    make_context()
    cupy.cuda.Device(0).use()
    x = cupy.zeros(TOKENS * WIDTH, dtype=cupy.float32)
    out = cupy.zeros_like(x)
    cupy.cuda.runtime.deviceSynchronize()
    clock.mark("context")
    # Loading is part of the first launch.
    for i in range(arguments.kernels):
        kernel = cupy.RawKernel(SOURCE % i, "scale")
        kernel((8,), (96,), (x, out, cupy.uint32(x.size)))
    cupy.cuda.runtime.deviceSynchronize()
    clock.mark("first launches")


def run_triton(arguments, clock):
    import torch
    import triton
    import triton.language as tl
    clock.mark("import")
    make_context()
    x = torch.zeros(TOKENS * WIDTH, device="cuda")
    out = torch.zeros_like(x)
    torch.cuda.synchronize()
    clock.mark("context")
    globals()["tl"] = tl  # the kernel looks its names up here

    for i in range(arguments.kernels):
        triton_scale(triton)[(8,)](x, out, x.numel(), TAG=i, BLOCK=128)
    torch.cuda.synchronize()
    clock.mark("first launches")


_TRITON = []


def triton_scale(triton):
    if not _TRITON:
        _TRITON.append(triton.jit(_triton_scale))
    return _TRITON[0]


def _triton_scale(x, out, n, TAG: "tl.constexpr", BLOCK: "tl.constexpr"):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # noqa: F821
    inside = at < n
    tl.store(out + at, 2.0 * tl.load(x + at, mask=inside) + TAG,  # noqa: F821
             mask=inside)


SYSTEMS = {"kiln": run_kiln, "cupy": run_cupy, "triton": run_triton}
NEEDS = {"kiln": (), "cupy": ("cupy",), "triton": ("torch", "triton")}


def child(arguments):
    clock = Clock(arguments.started)
    clock.mark("interpreter")
    SYSTEMS[arguments.system](arguments, clock)
    versions = {name: sys.modules[name].__version__
                for name in NEEDS[arguments.system]}
    print(json.dumps({"phases": clock.phases, "versions": versions}))


def start(arguments, system, environment):
    done = subprocess.run(
        [sys.executable, __file__, arguments.library, arguments.bundle,
         "--kernels", str(arguments.kernels), "--system", system, "--started",
         repr(time.monotonic())], env=environment, capture_output=True,
        text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{system}: {done.stderr.strip()[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library")
    parser.add_argument("bundle")
    parser.add_argument("--kernels", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", help="write the medians here, too")
    parser.add_argument("--system", choices=SYSTEMS, help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.system:
        child(arguments)
        return
    with tempfile.TemporaryDirectory() as cache:
        environment = dict(os.environ, CUPY_CACHE_DIR=f"{cache}/cupy",
                           TRITON_CACHE_DIR=f"{cache}/triton",
                           CUDA_CACHE_PATH=f"{cache}/driver")
        systems, versions, not_measured = [], {}, {}
        for system, modules in NEEDS.items():
            missing = [m for m in modules
                       if importlib.util.find_spec(m) is None]
            if missing:
                not_measured[system] = f"{missing[0]} is not installed"
                print(f"{system}: not measured, {not_measured[system]}")
                continue
            try:
                cold = start(arguments, system, environment)
            except RuntimeError as error:
                not_measured[system] = str(error)
                print(f"{system}: not measured, {error}")
                continue
            systems.append(system)
            versions[system] = cold["versions"]
            print(f"{system}: first process, caches empty: "
                  f"{sum(cold['phases'].values()):.0f} ms")
        runs = {system: [] for system in systems}
        for turn in range(arguments.rounds):
            order = systems if turn % 2 == 0 else systems[::-1]
            for system in order:
                runs[system].append(
                    start(arguments, system, environment)["phases"])
    work = ("load", "first launches")
    medians = {}
    for system, phases in runs.items():
        row = {phase: statistics.median(p[phase] for p in phases)
               for phase in phases[0]}
        total = statistics.median(sum(p.values()) for p in phases)
        loaded = statistics.median(
            sum(p.get(phase, 0) for phase in work) for p in phases)
        medians[system] = (total, loaded)
        print(f"{system}: process start to last first launch {total:.1f} ms; "
              f"context up, {arguments.kernels} kernels loaded and launched "
              f"{loaded:.2f} ms ({loaded / arguments.kernels:.3f} each); " +
              ", ".join(f"{k} {v:.2f}" for k, v in row.items()))
    for system in medians:
        if system != "kiln" and "kiln" in medians:
            total, loaded = (a / b for a, b in
                             zip(medians[system], medians["kiln"]))
            print(f"{system} / kiln: process start {total:.2f}, loading with "
                  f"the context up {loaded:.1f}")
    if arguments.json:
        report = {"kernels": arguments.kernels, "rounds": arguments.rounds,
                  "systems": {}, "not_measured": not_measured}
        for system, (total, loaded) in medians.items():
            row = {"process_ms": total, "loaded_ms": loaded,
                   "versions": versions[system]}
            if system != "kiln" and "kiln" in medians:
                row["process_over_kiln"] = total / medians["kiln"][0]
                row["loaded_over_kiln"] = loaded / medians["kiln"][1]
            report["systems"][system] = row
        with open(arguments.json, "w", encoding="utf-8") as out:
            json.dump(report, out)


if __name__ == "__main__":
    main()
