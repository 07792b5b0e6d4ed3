"""kiln.h as classes. Every structure and number here is one of that header."""

import ctypes
import dataclasses
import enum
from typing import Any, List, Optional, Sequence, Tuple

from ._buffers import CPU, CUDA, buffer_of

_ABI_MAJOR = 1
_ROOT_BYTES = 32


class Status(enum.IntEnum):
    """kiln_status_t without its prefix; runtime/README.md says what to do."""
    OK = 0
    INVALID_ARGUMENT = 1
    STRUCT_SIZE = 2
    CLOSED_HANDLE = 3
    OUT_OF_MEMORY = 4
    SYSTEM = 5
    DRIVER = 6
    FILE_NOT_FOUND = 10
    FILE_UNREADABLE = 11
    BUNDLE_NOT_A_BUNDLE = 12
    BUNDLE_VERSION = 13
    BUNDLE_TRUNCATED = 14
    BUNDLE_DAMAGED = 15
    BUNDLE_MALFORMED = 16
    BUNDLE_LIMIT = 17
    ROOT_MISMATCH = 18
    TARGET_MISSING = 20
    TARGET_MISMATCH = 21
    TARGET_AMBIGUOUS = 22
    NO_DRIVER = 23
    DRIVER_TOO_OLD = 24
    NO_CONTEXT = 25
    DEVICE_LIMIT = 26
    PROGRAM_REFUSED = 27
    KERNEL_MISSING = 28
    PARAMETER_LAYOUT = 29
    PREDICTED_PLANS = 30
    UNQUALIFIED_PLANS = 31
    SELFTEST_MISMATCH = 32
    ENTRY_NOT_FOUND = 40
    ENTRY_FOREIGN = 41
    TOKENS_OUT_OF_RANGE = 42
    PARAMS_MISSING = 43
    PARAMS_SHORT = 44
    PARAM_NULL = 45
    ARENA_MISSING = 46
    ARENA_SHORT = 47
    ARENA_MISALIGNED = 48
    STREAM_NOT_ALLOWED = 49
    PARAM_MISALIGNED = 50


class Error(Exception):
    """A refusal of the runtime."""

    def __init__(self, status: int, message: str, driver_code: int = 0):
        super().__init__(message)
        self.status = (Status(status) if status in Status._value2member_map_
                       else status)
        self.driver_code = driver_code


class UsageError(Error):
    """The call itself is wrong, or memory or the driver failed it."""


class BundleError(Error):
    """The file is not a whole bundle, or not the pinned one."""


class PreflightError(Error):
    """This device, host or driver cannot serve the bundle."""


class DispatchError(Error):
    """This launch is not one that the bundle declares."""


def _error_class(status: int):
    if status < 10:
        return UsageError
    if status < 20:
        return BundleError
    return PreflightError if status < 40 else DispatchError


class _ErrorStruct(ctypes.Structure):
    _fields_ = [("code", ctypes.c_int32), ("driver_code", ctypes.c_int32),
                ("message", ctypes.c_char * 504)]


class _Sized(ctypes.Structure):
    def __init__(self, *args, **kw):
        super().__init__(*args, **kw)
        self.struct_size = ctypes.sizeof(self)


class _OpenOptions(_Sized):
    _fields_ = [("struct_size", ctypes.c_uint32), ("flags", ctypes.c_uint32),
                ("expected_root", ctypes.c_char_p)]


class _BundleInfo(_Sized):
    _fields_ = [("struct_size", ctypes.c_uint32),
                ("format_version", ctypes.c_uint32),
                ("flags", ctypes.c_uint32), ("section_count", ctypes.c_uint32),
                ("bytes", ctypes.c_uint64),
                ("root", ctypes.c_uint8 * _ROOT_BYTES)]


class _SectionInfo(_Sized):
    _fields_ = [("struct_size", ctypes.c_uint32), ("backend", ctypes.c_uint32),
                ("level", ctypes.c_uint32), ("arch_specific", ctypes.c_uint32),
                ("driver_version_min", ctypes.c_uint32),
                ("flags", ctypes.c_uint32), ("entry_count", ctypes.c_uint32),
                ("program_count", ctypes.c_uint32), ("target", ctypes.c_char_p)]


class _EntryInfo(_Sized):
    _fields_ = [("struct_size", ctypes.c_uint32), ("capacity", ctypes.c_uint32),
                ("plan_count", ctypes.c_uint32),
                ("attribute_count", ctypes.c_uint32),
                ("name", ctypes.c_char_p), ("op", ctypes.c_char_p),
                ("geometry", ctypes.c_char_p)]


class _LoadOptions(_Sized):
    _fields_ = [("struct_size", ctypes.c_uint32), ("flags", ctypes.c_uint32),
                ("target", ctypes.c_char_p), ("context", ctypes.c_void_p),
                ("cpu_threads", ctypes.c_uint32), ("reserved", ctypes.c_uint32),
                ("driver", ctypes.c_void_p)]


class _ModulesInfo(_Sized):
    _fields_ = [("struct_size", ctypes.c_uint32), ("backend", ctypes.c_uint32),
                ("section", ctypes.c_uint32), ("entry_count", ctypes.c_uint32),
                ("program_count", ctypes.c_uint32),
                ("cpu_threads", ctypes.c_uint32),
                ("root", ctypes.c_uint8 * _ROOT_BYTES),
                ("target", ctypes.c_char_p)]


class _ParamInfo(_Sized):
    _fields_ = [("struct_size", ctypes.c_uint32), ("output", ctypes.c_uint32),
                ("offset", ctypes.c_uint32), ("bytes", ctypes.c_uint32),
                ("name", ctypes.c_char_p), ("dtype", ctypes.c_char_p),
                ("shape", ctypes.c_char_p)]


class _SelftestResult(_Sized):
    _fields_ = [("struct_size", ctypes.c_uint32), ("passed", ctypes.c_uint32),
                ("computed", ctypes.c_uint32),
                ("not_deterministic", ctypes.c_uint32),
                ("no_digest", ctypes.c_uint32)]


_HANDLE = ctypes.c_void_p
_U32 = ctypes.c_uint32
_U64 = ctypes.c_uint64
_TEXT = ctypes.c_char_p
_BACKENDS = {1: CUDA, 2: CPU}
_ITEM_BYTES = {"bf16": 2, "f16": 2, "f32": 4, "i16": 2, "i32": 4, "i64": 8,
               "u8": 1, "u16": 2, "u32": 4, "i8": 1}


# Types in which a buffer of a declared type may come besides its own: 16 bits
# for numbers that array libraries lack, and trellis words two by two. Bytes are
# memory without a type.
_ALSO_TAKEN = {"bf16": ("i16", "u16"), "f16": ("i16", "u16"),
               "i16": ("u16", "i32", "u32")}


class Runtime:
    """libkiln_runtime.so, of the ABI that this package was written for."""

    def __init__(self, library: str = "libkiln_runtime.so.1"):
        self._lib = ctypes.CDLL(library)
        major, minor = _U32(), _U32()
        self._lib.kiln_runtime_version.restype = None
        self._lib.kiln_runtime_version(ctypes.byref(major), ctypes.byref(minor))
        if major.value != _ABI_MAJOR:
            raise ImportError(f"{library} has ABI {major.value}, this package "
                              f"needs {_ABI_MAJOR}")
        self.version = (major.value, minor.value)
        pointer = ctypes.POINTER
        for name, *types in (
                ("kiln_bundle_open_file", _TEXT, pointer(_OpenOptions),
                 pointer(_HANDLE)),
                ("kiln_bundle_close", _HANDLE),
                ("kiln_bundle_info", _HANDLE, pointer(_BundleInfo)),
                ("kiln_bundle_section", _HANDLE, _U32, pointer(_SectionInfo)),
                ("kiln_bundle_entry", _HANDLE, _U32, _U32, pointer(_EntryInfo)),
                ("kiln_bundle_attribute", _HANDLE, _U32, _U32, _U32,
                 pointer(_TEXT), pointer(_TEXT)),
                ("kiln_modules_load", _HANDLE, pointer(_LoadOptions),
                 pointer(_HANDLE)),
                ("kiln_modules_unload", _HANDLE),
                ("kiln_modules_info", _HANDLE, pointer(_ModulesInfo)),
                ("kiln_modules_selftest", _HANDLE, ctypes.c_void_p,
                 pointer(_SelftestResult)),
                ("kiln_entry_find", _HANDLE, _TEXT, _U64, pointer(_HANDLE)),
                ("kiln_entry_arena_size", _HANDLE, pointer(_U64),
                 pointer(_U64)),
                ("kiln_entry_params", _HANDLE, pointer(_U32), pointer(_U32)),
                ("kiln_entry_param", _HANDLE, _U32, pointer(_ParamInfo)),
                ("kiln_launch", _HANDLE, _HANDLE, _U64, ctypes.c_void_p,
                 ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t,
                 ctypes.c_void_p)):
            function = getattr(self._lib, name)
            function.restype = ctypes.c_int32
            function.argtypes = [*types, pointer(_ErrorStruct)]

    def call(self, name: str, *arguments: Any) -> None:
        """Calls a function of kiln.h; raises what it refuses."""
        error = _ErrorStruct()
        status = getattr(self._lib, name)(*arguments, ctypes.byref(error))
        if status != Status.OK:
            raise _error_class(status)(
                status, error.message.decode("ascii", "replace"),
                error.driver_code)

    def open(self, path: str, root: Optional[bytes] = None) -> "Bundle":
        """Reads and verifies a bundle. `root`: the 32 bytes it must have.
        Raises BundleError."""
        return Bundle(self, path, root)


def _device_of(context: int) -> int:
    """The driver's number of a context's device, 0 for the current context.
    It is also torch's: both hide the same devices."""
    driver = ctypes.CDLL("libcuda.so.1")
    ordinal = ctypes.c_int()
    codes = []
    if context:
        codes.append(driver.cuCtxPushCurrent_v2(ctypes.c_void_p(context)))
    codes.append(driver.cuCtxGetDevice(ctypes.byref(ordinal)))
    if context and codes[0] == 0:
        codes.append(driver.cuCtxPopCurrent_v2(
            ctypes.byref(ctypes.c_void_p())))
    for code in codes:
        if code != 0:
            raise UsageError(Status.DRIVER, "the driver does not name the "
                             f"context's device: CUresult {code}", code)
    return ordinal.value


class _Handle:
    """Owner of a C handle; also a context manager."""

    def __init__(self, runtime: Runtime, release: str):
        self._runtime = runtime
        self._release = release
        self._handle = _HANDLE()

    def close(self) -> None:
        if self._handle:
            handle, self._handle = self._handle, _HANDLE()
            self._runtime.call(self._release, handle)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def __del__(self):
        if getattr(self, "_handle", None):
            try:
                self.close()
            except Error:
                pass  # nobody is left to be told


class Bundle(_Handle):
    """A verified file. Modules loaded from it outlive it."""

    def __init__(self, runtime: Runtime, path: str, root: Optional[bytes]):
        super().__init__(runtime, "kiln_bundle_close")
        options = _OpenOptions()
        if root is not None:
            if len(root) != _ROOT_BYTES:
                raise ValueError(f"root has {len(root)} bytes, needs 32")
            self._root = ctypes.create_string_buffer(bytes(root), _ROOT_BYTES)
            options.expected_root = ctypes.cast(self._root, _TEXT)
        runtime.call("kiln_bundle_open_file", str(path).encode(),
                     ctypes.byref(options), ctypes.byref(self._handle))
        info = _BundleInfo()
        runtime.call("kiln_bundle_info", self._handle, ctypes.byref(info))
        self.root = bytes(info.root)
        self.nbytes = info.bytes
        self._sections = info.section_count

    @property
    def targets(self) -> List[str]:
        return [self._section(i).target.decode() for i in
                range(self._sections)]

    def _section(self, index: int) -> _SectionInfo:
        info = _SectionInfo()
        self._runtime.call("kiln_bundle_section", self._handle, index,
                           ctypes.byref(info))
        return info

    def load(self, target: Optional[str] = None, context: int = 0,
             cpu_threads: int = 0, allow_predicted: bool = False,
             allow_unqualified: bool = False) -> "Modules":
        """Loads one section, or raises PreflightError. `context`: a CUcontext
        as an integer; 0 is the current one."""
        options = _LoadOptions()
        options.flags = int(allow_predicted) | int(allow_unqualified) << 1
        options.target = None if target is None else target.encode()
        options.context = context or None
        options.cpu_threads = cpu_threads
        return Modules(self._runtime, self, options)

    def geometries(self, section: int) -> dict:
        """Attributes of every entry of a section, by entry name."""
        out = {}
        for index in range(self._section(section).entry_count):
            entry = _EntryInfo()
            self._runtime.call("kiln_bundle_entry", self._handle, section,
                               index, ctypes.byref(entry))
            attributes = {}
            for a in range(entry.attribute_count):
                name, value = _TEXT(), _TEXT()
                self._runtime.call("kiln_bundle_attribute", self._handle,
                                   section, index, a, ctypes.byref(name),
                                   ctypes.byref(value))
                attributes[name.value.decode()] = value.value.decode()
            out[entry.name.decode()] = attributes
        return out


@dataclasses.dataclass(frozen=True)
class Param:
    """One slot of an entry's parameter block."""
    name: str
    dtype: str
    shape: str  # "[m, hidden]"
    output: bool


@dataclasses.dataclass(frozen=True)
class Selftest:
    """How many plans golden replay found right, and how many it skipped."""
    passed: int
    not_deterministic: int
    no_digest: int


class Modules(_Handle):
    """One section, loaded. Launches may come from any thread. `device`: the
    driver's number of the CUDA device, None on the CPU."""

    def __init__(self, runtime: Runtime, bundle: Bundle,
                 options: _LoadOptions):
        super().__init__(runtime, "kiln_modules_unload")
        runtime.call("kiln_modules_load", bundle._handle,
                     ctypes.byref(options), ctypes.byref(self._handle))
        info = _ModulesInfo()
        runtime.call("kiln_modules_info", self._handle, ctypes.byref(info))
        self.backend = _BACKENDS[info.backend]
        self.device: Optional[int] = None
        if self.backend == CUDA:
            self.device = _device_of(options.context or 0)
        self.target = info.target.decode()
        self.root = bytes(info.root)
        self._geometries = bundle.geometries(info.section)
        self._entries = {}

    def close(self) -> None:
        self._entries.clear()
        super().close()

    def selftest(self) -> Selftest:
        """Golden replay, before serving: runs every plan that has a digest
        once and compares its output with that of freeze. Raises PreflightError
        (Status.SELFTEST_MISMATCH) when one differs. Allocates every buffer of
        the largest entry meanwhile."""
        result = _SelftestResult()
        self._runtime.call("kiln_modules_selftest", self._handle, None,
                           ctypes.byref(result))
        return Selftest(result.passed, result.not_deterministic,
                        result.no_digest)

    def find(self, name: str, m: int) -> "Entry":
        """The plan that serves `m` tokens; raises DispatchError."""
        if m < 0:
            raise ValueError(f"m is {m}")
        handle = _HANDLE()
        self._runtime.call("kiln_entry_find", self._handle, name.encode(), m,
                           ctypes.byref(handle))
        entry = self._entries.get(handle.value)
        if entry is None:
            entry = Entry(self, name, handle)
            self._entries[handle.value] = entry
        return entry


class Entry:
    """One plan of loaded modules; valid until they are closed."""

    def __init__(self, modules: Modules, name: str, handle: _HANDLE):
        self.modules = modules
        self.name = name
        self._handle = handle
        self._runtime = modules._runtime
        arena, alignment, count = _U64(), _U64(), _U32()
        self._runtime.call("kiln_entry_arena_size", handle,
                           ctypes.byref(arena), ctypes.byref(alignment))
        self._runtime.call("kiln_entry_params", handle, ctypes.byref(count),
                           None)
        self.arena_bytes = arena.value
        self.arena_alignment = alignment.value
        self.params: Tuple[Param, ...] = tuple(
            self._param(i) for i in range(count.value))

    def _param(self, index: int) -> Param:
        info = _ParamInfo()
        self._runtime.call("kiln_entry_param", self._handle, index,
                           ctypes.byref(info))
        return Param(info.name.decode(), info.dtype.decode(),
                     info.shape.decode(), info.output != 0)

    def shape(self, index: int, m: int) -> Optional[Tuple[int, ...]]:
        """Shape of a parameter for `m` tokens (torch's symbolic integers are
        fine), or None if its text uses a
        word that is no attribute of the request."""
        words = self.modules._geometries.get(self.name, {})
        sizes = []
        for term in self.params[index].shape.strip("[]").split(","):
            size = 1
            for factor in term.split("*"):
                for n, word in enumerate(factor.split("/")):
                    word = word.strip()
                    value = m if word == "m" else words.get(word, word)
                    if isinstance(value, str):
                        if not value.isdigit():
                            return None
                        value = int(value)
                    size = size * value if n == 0 else size // value
            sizes.append(size)
        return tuple(sizes)

    def param_bytes(self, index: int, m: int) -> Optional[int]:
        """Bytes of a parameter for `m` tokens, or None if unknown."""
        return self._bytes_of(index, self.shape(index, m))

    def _bytes_of(self, index: int, shape) -> Optional[int]:
        item = _ITEM_BYTES.get(self.params[index].dtype)
        if shape is None or item is None:
            return None
        for size in shape:
            item *= size
        return item

    def launch(self, m: int, params: Sequence[Any], arena: Any = None,
               stream: int = 0) -> None:
        """Enqueues the plan (CUDA: on `stream`, a CUstream as an integer or
        anything with cuda_stream) or runs it (CPU). The buffers must stay alive
        until the launch has completed. Raises DispatchError for what the
        bundle does not declare; TypeError or ValueError for buffers of
        another type, shape, size, device or layout, and for an output or an
        arena that overlaps another buffer. A buffer of one dimension is flat
        memory; others have the declared shape, or more tokens."""
        if m == 0:
            # Nothing is looked at, as in C.
            self._runtime.call("kiln_launch", self.modules._handle,
                               self._handle, 0, None, 0, None, 0, None)
            return
        buffers = [buffer_of(p) for p in params]
        extents = [self._check(index, m, buffer) for index, buffer
                   in enumerate(buffers[:len(self.params)])]
        block = (ctypes.c_uint64 * max(len(buffers), 1))(
            *[b.address for b in buffers])
        scratch = None if arena is None else buffer_of(arena)
        if scratch is not None:
            self._check_place("arena", scratch.device, scratch.index)
        self._check_overlap(buffers, extents, scratch)
        if hasattr(stream, "cuda_stream"):
            self._check_place("stream", CUDA, getattr(
                getattr(stream, "device", None), "index", None))
        # An address alone has no size; the caller answers for it.
        scratch_bytes = (0 if scratch is None else self.arena_bytes
                         if scratch.nbytes is None else scratch.nbytes)
        self._runtime.call(
            "kiln_launch", self.modules._handle, self._handle, m,
            ctypes.cast(block, ctypes.c_void_p), 8 * len(buffers),
            None if scratch is None else scratch.address, scratch_bytes,
            getattr(stream, "cuda_stream", stream) or None)

    def _check_place(self, what: str, device: Optional[str],
                     index: Optional[int]) -> None:
        backend, ordinal = self.modules.backend, self.modules.device
        if device not in (None, backend):
            raise TypeError(f"{what} is on {device}, the modules run on "
                            f"{backend}")
        if None not in (index, ordinal) and index != ordinal:
            raise TypeError(f"{what} is on {device}:{index}, the modules run "
                            f"on {backend}:{ordinal}")

    def _check(self, index: int, m: int, buffer) -> int:
        """How many of its bytes a launch may touch, as far as is known."""
        param, shape = self.params[index], self.shape(index, m)
        self._check_place(f"parameter {param.name}", buffer.device,
                          buffer.index)
        self._check_type(param, buffer)
        self._check_shape(param, shape, m, buffer)
        wanted = self._bytes_of(index, shape)
        if None not in (wanted, buffer.nbytes) and buffer.nbytes < wanted:
            raise ValueError(
                f"parameter {param.name} has {buffer.nbytes} bytes, "
                f"{param.dtype} {param.shape} needs {wanted} at m = {m}")
        return wanted or buffer.nbytes or 0

    def _check_type(self, param: Param, buffer) -> None:
        taken = (param.dtype, *_ALSO_TAKEN.get(param.dtype, ()), "u8", None)
        if param.dtype in _ITEM_BYTES and buffer.dtype not in taken:
            raise TypeError(f"parameter {param.name} is {buffer.dtype}, must "
                            f"be {param.dtype}")

    def _check_shape(self, param: Param, wanted, m: int, buffer) -> None:
        item = _ITEM_BYTES.get(param.dtype)
        if (wanted is None or item is None or buffer.shape is None or
                len(buffer.shape) == 1):
            return
        # Of the last dimension, its bytes: words may come two by two.
        found = list(buffer.shape)
        count = 1
        for size in found:
            count *= size
        if found and count and buffer.nbytes is not None:
            found[-1] = found[-1] * (buffer.nbytes // count) / item
        if (param.shape.startswith("[m,") and len(found) == len(wanted) and
                found[0] > m):
            found[0] = m
        if found != list(wanted):
            raise ValueError(
                f"parameter {param.name} has the shape {list(buffer.shape)}, "
                f"must have {list(wanted)} ({param.shape}) at m = {m}, or one "
                "dimension")

    def _check_overlap(self, buffers, extents, scratch) -> None:
        """Outputs and scratch are written while the rest is read."""
        # Name, first byte, byte behind, whether it is written.
        places = [(f"parameter {param.name}", buffer.address,
                   buffer.address + extent, param.output)
                  for param, buffer, extent
                  in zip(self.params, buffers, extents)]
        if scratch is not None:
            places.append(("arena", scratch.address,
                           scratch.address + self.arena_bytes, True))
        for what, begin, end, written in places:
            for other, first, behind, _ in places if written else ():
                if other is not what and begin < behind and first < end:
                    raise ValueError(
                        f"{what}, which is written, overlaps {other}: bytes "
                        f"{begin:#x}..{end:#x} and {first:#x}..{behind:#x}")
