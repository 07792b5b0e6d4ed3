"""PyTorch operators for entries of a bundle. Imports torch on first use."""

from typing import Any, Callable, Dict, Sequence, Union

from ._runtime import Modules

_libraries: Dict[str, Any] = {}  # torch.library.Library objects must stay alive


def torch_op(modules: Union[Modules, Sequence[Modules]], name: str,
             op: str) -> Callable:
    """Registers the operator `op` ("namespace::name") for entry `name` of
    loaded modules and returns it. `modules`: one set, or one for each device
    of one bundle; the first input's device chooses.

    Called with a list of every input in the entry's order, the output left
    out; the number of tokens is the first input's first size. Allocates the
    output and the arena with torch's allocator and launches on torch's current
    stream, so it may be captured into a CUDA graph, and traces under
    torch.compile: a kernel for meta tensors gives the output's shape. Plans
    are found per call; `m` beyond the bundle raises kiln.DispatchError.

    Needs torch.library (torch 1.13 and later).
    Raises ValueError if the entry has not exactly one output, as last
    parameter, or its shape is not known from the request, or if two sets are
    for the same device or of different bundles.
    """
    import torch

    sets = [modules] if isinstance(modules, Modules) else list(modules)
    by_device = {(s.backend, s.device): s for s in sets}
    if not sets or len(by_device) != len(sets):
        raise ValueError(f"{len(sets)} sets of modules for {len(by_device)} "
                         "devices; pass one for each")
    if len({s.root for s in sets}) != 1:
        raise ValueError("modules are of different bundles; load one bundle "
                         "for each device")
    first = sets[0].find(name, 1)
    last = len(first.params) - 1
    if [p.output for p in first.params] != [False] * last + [True]:
        raise ValueError(f"entry {name} must have one output, its last "
                         "parameter, to become an operator")
    if first.shape(last, 1) is None:
        raise ValueError(f"shape {first.params[last].shape} of entry {name} is "
                         "not known")
    dtype = {"f32": torch.float32, "f16": torch.float16,
             "bf16": torch.bfloat16}[first.params[last].dtype]

    def meta(inputs):
        return inputs[0].new_empty(first.shape(last, inputs[0].shape[0]),
                                   dtype=dtype)

    def launch(inputs):
        m = inputs[0].shape[0]
        device = inputs[0].device
        chosen = by_device.get((device.type, device.index))
        if chosen is None:
            raise TypeError(f"{op}: no modules are loaded for {device}")
        entry = chosen.find(name, m)
        out = meta(inputs)
        arena = None
        if entry.arena_bytes:
            # A base of torch's choice, then the next multiple.
            alignment = entry.arena_alignment
            arena = torch.empty(entry.arena_bytes + alignment,
                                dtype=torch.uint8, device=out.device)
            skip = -arena.data_ptr() % alignment
            arena = arena[skip:skip + entry.arena_bytes]
        stream = (torch.cuda.current_stream(out.device).cuda_stream
                  if out.device.type == "cuda" else 0)
        entry.launch(m, [*inputs, out], arena, stream)
        return out

    namespace, _, operator = op.partition("::")
    if namespace not in _libraries:
        try:
            made = torch.library.Library(namespace, "FRAGMENT")
        except ValueError:  # torch 1.13 knows whole namespaces only
            made = torch.library.Library(namespace, "DEF")
        _libraries[namespace] = made
    library = _libraries[namespace]
    library.define(f"{operator}(Tensor[] inputs) -> Tensor")
    for key in ("CPU", "CUDA"):
        library.impl(operator, launch, key)
    library.impl(operator, meta, "Meta")
    return getattr(getattr(torch.ops, namespace), operator)
