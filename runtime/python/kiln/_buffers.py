"""Addresses of what callers call arrays."""

import ctypes
import dataclasses
from typing import Any, Optional, Tuple

CPU, CUDA = "cpu", "cuda"


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A contiguous piece of memory. None: the object could not tell."""
    address: int
    nbytes: Optional[int] = None
    device: Optional[str] = None  # "cpu" or "cuda"
    index: Optional[int] = None  # of several CUDA devices
    dtype: Optional[str] = None  # "f16"; bytes, "u8", are of any type
    shape: Optional[Tuple[int, ...]] = None


_KINDS = {"int": "i", "uint": "u", "float": "f", "bfloat": "bf"}


def _torch_dtype(dtype: Any) -> Optional[str]:
    """torch.bfloat16 is "bf16"; a type that no bundle has keeps its name."""
    if dtype is None:
        return None
    name = str(dtype).rpartition(".")[2]
    kind = name.rstrip("0123456789")
    return _KINDS[kind] + name[len(kind):] if kind in _KINDS else name


def _typestr_dtype(typestr: str) -> str:
    """"<f2" is "f16", and void of two bytes, an extension's type, 16 bits."""
    order, kind, size = typestr[0], typestr[1], int(typestr[2:])
    kind = "u" if kind in "VbS" else kind
    return f"{kind}{8 * size}" + (" big-endian" if order == ">" else "")


def _format_dtype(code: str, size: int) -> str:
    """Of a format of the buffer protocol: "H" is "u16"."""
    order, code = code[:-1], code[-1]
    kind = ("i" if code in "hilqn" else "f" if code in "efd"
            else "u" if code in "cbBHILQN?" else code)
    return f"{kind}{8 * size}" + (" big-endian" if order in (">", "!") else "")


class _DLTensor(ctypes.Structure):
    # dlpack.h, DLTensor; a fact of the DLPack ABI (v0.8 and v1.x alike).
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_DL_DEVICES = {1: CPU, 2: CUDA, 3: CPU, 13: CUDA}  # host, pinned, managed


def _dlpack(value: Any) -> Buffer:
    device_type = int(value.__dlpack_device__()[0])
    # -1: no synchronisation; the launch goes to the stream the caller names.
    capsule = (value.__dlpack__(stream=-1) if device_type in (2, 13)
               else value.__dlpack__())
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype = ctypes.c_void_p
    pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    # Not consumed: the capsule frees what it holds when it goes, and the
    # memory stays with `value`.
    tensor = _DLTensor.from_address(pointer(capsule, b"dltensor"))
    kind = {0: "i", 1: "u", 2: "f", 4: "bf"}.get(tensor.code, "type ")
    count = 1
    for axis in reversed(range(tensor.ndim)):
        size = tensor.shape[axis]
        if tensor.strides and size > 1 and tensor.strides[axis] != count:
            raise ValueError("buffer is not contiguous in row-major order")
        count *= size
    return Buffer((tensor.data or 0) + tensor.byte_offset,
                  count * ((tensor.bits * tensor.lanes + 7) // 8),
                  _DL_DEVICES.get(tensor.device_type, "other"),
                  tensor.device_id if tensor.device_type == 2 else None,
                  f"{kind}{tensor.bits}" + (f"x{tensor.lanes}" if
                                            tensor.lanes != 1 else ""),
                  tuple(tensor.shape[:tensor.ndim]))


def _interface(interface: dict, device: str) -> Buffer:
    if interface.get("strides") is not None:
        count = int(interface["typestr"][2:])
        for size, stride in zip(reversed(interface["shape"]),
                                reversed(interface["strides"])):
            if size > 1 and stride != count:
                raise ValueError("buffer is not contiguous in row-major order")
            count *= size
    count = int(interface["typestr"][2:])
    for size in interface["shape"]:
        count *= size
    return Buffer(int(interface["data"][0]), count, device, None,
                  _typestr_dtype(interface["typestr"]),
                  tuple(interface["shape"]))


def buffer_of(value: Any) -> Buffer:
    """The memory behind `value`, which the caller keeps alive.

    Raises ValueError for one that is not contiguous, TypeError for an object
    that is none of the kinds named in the package's documentation.
    """
    if isinstance(value, Buffer):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return Buffer(value)
    if callable(getattr(value, "data_ptr", None)):
        if hasattr(value, "is_contiguous") and not value.is_contiguous():
            raise ValueError("buffer is not contiguous in row-major order")
        nbytes = (value.numel() * value.element_size()
                  if hasattr(value, "element_size") else None)
        device = getattr(value, "device", None)
        return Buffer(int(value.data_ptr()), nbytes,
                      getattr(device, "type", None),
                      getattr(device, "index", None),
                      _torch_dtype(getattr(value, "dtype", None)),
                      tuple(value.shape) if hasattr(value, "shape") else None)
    if hasattr(value, "__cuda_array_interface__"):
        return _interface(value.__cuda_array_interface__, CUDA)
    if hasattr(value, "__array_interface__"):
        return _interface(value.__array_interface__, CPU)
    if hasattr(value, "__dlpack__"):
        return _dlpack(value)
    try:
        view = memoryview(value)
    except TypeError:
        raise TypeError(
            f"{type(value).__name__} has no data_ptr(), array interface, "
            "DLPack or buffer; pass a tensor or an address") from None
    if not view.c_contiguous:
        raise ValueError("buffer is not contiguous in row-major order")
    if view.readonly:
        raise ValueError(
            f"{type(value).__name__} is read-only memory without an address; "
            "pass a bytearray, an array or a tensor")
    flat = (ctypes.c_char * view.nbytes).from_buffer(view)
    return Buffer(ctypes.addressof(flat), view.nbytes, CPU, None,
                  _format_dtype(view.format, view.itemsize), view.shape)


class _Aligned:
    """Zeroed host memory at a multiple of `alignment`."""

    def __init__(self, nbytes: int, alignment: int):
        self._memory = (ctypes.c_char * (nbytes + alignment))()
        start = ctypes.addressof(self._memory)
        self._address = (start + alignment - 1) // alignment * alignment
        self._nbytes = nbytes

    def data_ptr(self) -> int:
        return self._address

    def numel(self) -> int:
        return self._nbytes

    def element_size(self) -> int:
        return 1


def aligned_buffer(nbytes: int, alignment: int = 256) -> _Aligned:
    """Host memory for an arena or a tensor, for engines without an array
    library. Has data_ptr()."""
    return _Aligned(max(int(nbytes), 1), alignment)
