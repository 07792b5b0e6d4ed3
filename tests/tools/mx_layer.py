"""A TrellisMX layer in Python, written from the format's description alone:
the weights of an NPK-1 sidecar, and what each arm computes with them in float64,
rounding what the arm rounds in front of a product and behind it. Nothing here
is shared with Kiln's readers, kernels or references.
"""

import math
import operator
import random
import struct

from prepared_layer import read_prepared
from qsrt_layer import E4M3, e4m3_code, hadamard, sigmoid, tile_weights


def shifted(value, right):
    """value / 2^right to the nearest whole number, ties to even."""
    if right <= 0:
        return value << -right
    half, rest = 1 << right - 1, value & (1 << right) - 1
    out = value >> right
    return out + 1 if rest > half or (rest == half and out % 2) else out


def law(state):
    """The E4M3 byte of a state, in whole numbers."""
    word = (state * 0xCBAC1FED & 0x8FFF8FFF) ^ 0x3B603B60
    total = 0
    for half in (word & 0xFFFF, word >> 16):
        size = 1024 + (half & 1023) << (half >> 10 & 3)
        total += -size if half >> 15 else size
    size = abs(total)
    if size == 0:
        return 0
    drop = max(size.bit_length() - 11, 0)
    size = shifted(size, drop) << drop
    exponent = size.bit_length() - 13
    if exponent < -6:
        code = shifted(size, 3)
    else:
        mantissa = shifted(size, size.bit_length() - 4)
        if mantissa == 16:
            mantissa, exponent = 8, exponent + 1
        code = exponent + 7 << 3 | mantissa - 8
    return code | 0x80 if total < 0 and code else code


LAW = bytes(map(law, range(65536)))
WEIGHTS = [-E4M3[code & 0x7F] if code & 0x80 else E4M3[code] for code in LAW]


def signs(draw, axis, count):
    """Of MT19937, seeded by one word; draw 0 has none."""
    if draw == 0:
        return [1.0] * count
    seed = (0x6A09E667F3BCC909 * draw + 0xBB67AE8584CAA73B * axis) % 2 ** 63
    state = [seed % 2 ** 32]
    for i in range(1, 624):
        last = state[-1] ^ state[-1] >> 30
        state.append((1812433253 * last + i) % 2 ** 32)
    twister = random.Random()
    twister.setstate((3, (*state, 624), None))
    return [1.0 if twister.getrandbits(32) & 1 else -1.0 for _ in range(count)]


def half(values):
    """To binary16."""
    return list(struct.unpack(f"<{len(values)}e",
                              struct.pack(f"<{len(values)}e", *values)))


def mxfp8(values):
    """Blocks of 32 to E4M3 under one power of two, of amax / 448 rounded up."""
    out = []
    for at in range(0, len(values), 32):
        block = values[at:at + 32]
        amax, = struct.unpack("<f", struct.pack("<f", max(map(abs, block))))
        mantissa, exponent = math.frexp(
            *struct.unpack("<f", struct.pack("<f", amax / 448)))
        scale = 2.0 ** (exponent - (mantissa == 0.5)) if amax else 1.0
        for value in block:
            code = e4m3_code(value / scale)
            out.append(math.copysign(E4M3[code & 0x7F] * scale, value))
    return out


def scaled(values, factors):
    return list(map(operator.mul, values, factors))


def product(matrix, x):
    """Binary16, as all products leave their sums."""
    return half([sum(map(operator.mul, row, x)) for row in matrix])


class Layer:
    """A sidecar with the coupled boundary of the only rank of a layer."""

    def __init__(self, path, hidden, intermediate, experts, bits, limit):
        self.hidden, self.inter = hidden, intermediate
        self.experts, self.bits, self.limit = experts, bits, limit
        tensors = read_prepared(path, (
            "w13_stream", "w2_stream", "w13_scale", "w2_scale", "gate_up_suh",
            "inner_scales", "down_svh", "sign_draw"))
        self.tensors = tensors
        self.suh = self.halves("gate_up_suh")
        self.svh = self.halves("down_svh")
        inner = self.halves("inner_scales")
        self.gate, self.up, self.down, self.inner, self.signs = [], [], [], [], []
        for e in range(experts):
            size = hidden * intermediate // 32
            gate_up = tensors["w13_scale"][2 * e * size:2 * (e + 1) * size]
            self.gate.append(self.matrix("w13_stream", e, intermediate, hidden,
                                         gate_up[:size]))
            self.up.append(self.matrix("w13_stream", experts + e, intermediate,
                                       hidden, gate_up[size:]))
            self.down.append(self.matrix("w2_stream", e, hidden, intermediate,
                                         tensors["w2_scale"][
                                             e * size:(e + 1) * size]))
            at = 3 * intermediate * e
            self.inner.append([inner[at + i:at + i + intermediate] for i in (
                0, intermediate, 2 * intermediate)])
            draw = tensors["sign_draw"][e]
            self.signs.append((signs(draw, 1, 2 * intermediate),
                               signs(draw, 2, intermediate)))

    def halves(self, name):
        data = self.tensors[name]
        return list(struct.unpack(f"<{len(data) // 2}e", data))

    def matrix(self, name, index, rows, columns, scales):
        """[out][in] of the stream's matrix `index`."""
        out = [[0.0] * columns for _ in range(rows)]
        tile_bytes = 32 * self.bits
        at = index * rows * columns // 256 * tile_bytes
        for k in range(0, columns, 16):
            for n in range(0, rows, 16):
                words = self.tensors[name][at:at + tile_bytes]
                at += tile_bytes
                tile = tile_weights(words, self.bits, WEIGHTS)
                for i in range(16):
                    out[n + i][k:k + 16] = [line[i] for line in tile]
        for n, row in enumerate(out):
            for k in range(0, columns, 32):
                scale = 2.0 ** (scales[(n * columns + k) // 32] - 127)
                row[k:k + 32] = [value * scale for value in row[k:k + 32]]
        return out

    def token(self, x, ids, weights, operand):
        """One row of the output. operand: what the arm rounds activations to,
        `half` or `mxfp8`."""
        a = scaled(hadamard(half(x), 512), self.suh)
        a = operand(hadamard(a))
        total = [0.0] * self.hidden
        for expert, weight in zip(ids, weights):
            if 0 <= expert < self.experts:
                route = self.route(expert, a, operand)
                total = [t + weight * v for t, v in zip(total, route)]
        return hadamard(total, 512)

    def route(self, e, a, operand):
        def interleaved(gate, up):
            out = []
            for at in range(0, self.inter, 32):
                out += gate[at:at + 32] + up[at:at + 32]
            return out

        gate_svh, up_svh, down_suh = self.inner[e]
        before, behind = self.signs[e]
        r = hadamard(interleaved(product(self.gate[e], a),
                                 product(self.up[e], a)))
        r = hadamard(scaled(r, interleaved(gate_svh, up_svh)))
        r = scaled(r, before)
        middle = []
        for gate, up in zip(r[0::2], r[1::2]):
            gate = min(gate, self.limit)
            up = max(-self.limit, min(up, self.limit))
            middle.append(gate * sigmoid(gate) * up)
        middle = scaled(hadamard(scaled(middle, behind)), down_suh)
        d = product(self.down[e], operand(hadamard(middle)))
        return scaled(hadamard(d), self.svh)
