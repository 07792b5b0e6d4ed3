"""Frozen Kiln bundles from Python: kiln.h through ctypes, nothing compiled.

    import kiln
    runtime = kiln.Runtime()                      # libkiln_runtime.so.1
    with runtime.open("model.kiln") as bundle:
        modules = bundle.load(target="cpu")       # preflight: before serving
    modules.selftest()                            # golden replay, if you like
    entry = modules.find("moe", tokens)
    arena = torch.empty(...)                      # entry.arena_bytes, 256-aligned
    entry.launch(tokens, [x, ids, ..., out], arena)

A refusal is a kiln.Error with the runtime's own text; `error.status` is one of
kiln.Status. Buffers are torch tensors or anything else with data_ptr(), arrays
with __cuda_array_interface__ or __array_interface__, DLPack producers, objects
with the buffer protocol, or plain addresses. Their type, shape, size, device and
layout are checked where they can tell. See kiln.torch_op for a PyTorch custom operator.
"""

from ._buffers import Buffer, aligned_buffer
from ._runtime import (Bundle, BundleError, DispatchError, Entry, Error,
                       Modules, Param, PreflightError, Runtime, Selftest,
                       Status, UsageError)
from ._torch import torch_op

__all__ = [
    "Buffer", "Bundle", "BundleError", "DispatchError", "Entry", "Error",
    "Modules", "Param", "PreflightError", "Runtime", "Selftest", "Status",
    "UsageError", "aligned_buffer", "torch_op",
]
