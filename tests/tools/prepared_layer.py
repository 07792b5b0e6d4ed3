"""What kiln prepare wrote, as buffers of a launch. Who imports this has the
runtime's Python package on its path."""

import ctypes
import json
import struct

import kiln


def read_prepared(path, names):
    """The bytes of these tensors of a safetensors file."""
    with open(path, "rb") as handle:
        data = handle.read()
    length = struct.unpack_from("<Q", data)[0]
    header = json.loads(data[8:8 + length])
    out = {}
    for name in names:
        begin, end = header[name]["data_offsets"]
        out[name] = data[8 + length + begin:8 + length + end]
    return out


def aligned(data):
    buffer = kiln.aligned_buffer(len(data))
    ctypes.memmove(buffer.data_ptr(), bytes(data), len(data))
    return buffer
