"""A QSRT layer in Python, written from the format's description alone: its
atoms as a file has them, and what it computes in float64. Nothing here is
shared with Kiln's readers, kernels or references.

Axes: a matrix of gate or up is [hidden][intermediate], one of down the other
way round. The intermediate axis is that of the encoder: pairs of two records of
128 channels, of which the first ones of an expert have 2 and 4 bits and the
rest 3 and 3.
"""

import bisect
import math
import random
import statistics
import struct

E4M3 = [(c % 8 / 8 + (c >= 8)) * 2.0 ** max(c // 8 - 7, -6) for c in range(127)]
MIDPOINTS = [(a + b) / 2 for a, b in zip(E4M3, E4M3[1:])]


def e4m3_code(value):
    """Of the nearest number, ties to the even code; a zero has no sign."""
    size = abs(value)
    code = bisect.bisect_left(MIDPOINTS, size)
    if code < len(MIDPOINTS) and size == MIDPOINTS[code] and code % 2:
        code += 1
    return code | 0x80 if value < 0 and code else code


def common_codes():
    """By rank / 16: the code that most of the 16 ranks have, where a rank's is
    that of 1.5 times its quantile of a normal distribution."""
    normal = statistics.NormalDist()
    out = []
    for q in range(4096):
        votes = {}
        for r in range(16 * q, 16 * q + 16):
            code = e4m3_code(1.5 * normal.inv_cdf((r + 0.5) / 65536))
            votes[code] = votes.get(code, 0) + 1
        out.append(min(votes, key=lambda code: (-votes[code], code)))
    return bytes(out)


CODES = common_codes()


def weight_of(state, bits):
    width = 16 - bits
    mask = (1 << width) - 1
    x = state >> bits
    x ^= x >> 11
    x ^= x << 11 & mask
    p = (0x3FA7D929 * x + 0xC928FD8E) % 2 ** 32
    branch = int(f"{state % 2 ** bits:0{bits}b}"[::-1], 2)
    rank = (branch ^ p >> 32 - bits) << width | p & mask
    code = CODES[rank >> 4]
    return -E4M3[code & 0x7F] if code & 0x80 else E4M3[code]


TABLES = {bits: [weight_of(s, bits) for s in range(65536)] for bits in (2, 3, 4)}


def tile_weights(words, bits, table):
    """[k][n] of a tile's 16 * bits words of 16 bits, as bytes; the table has the
    weight of each state."""
    u32 = struct.unpack(f"<{8 * bits}I", words)
    ring = 0
    for word in u32:
        ring = ring << 32 | word
    size = 256 * bits
    ring |= ring << size  # so that a window may begin before the first bit
    out = [[0.0] * 16 for _ in range(16)]
    for p in range(256):
        state = ring >> size - (p + 1) * bits & 0xFFFF
        lane, j = p >> 3, p & 7
        k = 2 * (lane & 3) + (j & 1) + 8 * (j >> 1 & 1)
        n = (lane >> 2) + 8 * (j >> 2)
        out[k][n] = table[state]
    return out


def hadamard(row, size=128):
    """Each aligned piece of `size` elements times the normalised matrix."""
    out = []
    for at in range(0, len(row), size):
        v = row[at:at + size]
        stride = 1
        while stride < size:
            for i in range(size):
                if not i & stride:
                    v[i], v[i + stride] = v[i] + v[i + stride], v[i] - v[i + stride]
            stride *= 2
        out += [value / math.sqrt(size) for value in v]
    return out


def times(row, matrix):
    out = [0.0] * len(matrix[0])
    for value, weights in zip(row, matrix):
        for c, weight in enumerate(weights):
            out[c] += value * weight
    return out


def sigmoid(v):
    return 1 / (1 + math.exp(-v))


def silu(gate, up):
    return gate * sigmoid(gate) * up


def situ(gate, up):
    return 4 * math.tanh(gate / 4) * sigmoid(gate) * 25 * math.tanh(up / 25)


class Layer:
    """hidden: multiple of 128. pairs: of 256 channels. codes: of each expert,
    the pairs with 2 and 4 bits, of gate and up << 4 | of down."""

    def __init__(self, hidden, pairs, codes, layer, seed):
        self.rng = random.Random(seed)
        self.hidden, self.pairs = hidden, pairs
        self.codes, self.layer = codes, layer
        self.gate_suh, self.up_suh = self.scales(hidden, 1), self.scales(hidden, 1)
        small = 1 / math.sqrt(hidden)
        self.down_svh = self.scales(hidden, 1 / math.sqrt(256 * pairs))
        self.experts = []
        for code in codes:
            expert = {"gate_svh": self.scales(256 * pairs, small),
                      "up_svh": self.scales(256 * pairs, small),
                      "down_suh": self.scales(256 * pairs, 1)}
            for name, split in (("gate", code >> 4), ("up", code >> 4),
                                ("down", code & 0xF)):
                expert[name] = [
                    self.record(bits)
                    for pair in range(pairs)
                    for bits in ((2, 4) if pair < split else (3, 3))]
            self.experts.append(expert)

    def scales(self, count, size):
        """As binary16 has them."""
        values = [self.rng.choice((-1, 1)) * self.rng.uniform(0.5, 1.5) * size
                  for _ in range(count)]
        return list(struct.unpack(f"<{count}e", struct.pack(f"<{count}e", *values)))

    def record(self, bits):
        """(bits, tiles by [channel / 16][hidden / 16])."""
        return bits, [[self.rng.randbytes(32 * bits)
                       for _ in range(self.hidden // 16)] for _ in range(8)]

    def atoms(self):
        """By physical slot, the bundles of all experts."""
        slots = 8 * self.pairs
        out = [[b""] * len(self.codes) for _ in range(slots)]
        for e, expert in enumerate(self.experts):
            rotation = (5 * e + self.layer) % self.pairs
            for atom in range(slots):
                pair, stripe = divmod(atom, 8)
                bundle = b""
                for name in ("gate", "up", "down"):
                    for record in (2 * pair, 2 * pair + 1):
                        bundle += b"".join(expert[name][record][1][stripe])
                for table in ("gate_svh", "up_svh", "down_suh"):
                    for record in (2 * pair, 2 * pair + 1):
                        at = 128 * record + 16 * stripe
                        bundle += struct.pack("<16e", *expert[table][at:at + 16])
                out[(atom + 8 * rotation) % slots][e] = bundle
        return [b"".join(row) for row in out]

    def shared_scales(self):
        values = self.gate_suh + self.up_suh + self.down_svh
        return struct.pack(f"<{len(values)}e", *values)

    def matrix(self, expert, name):
        """[hidden][intermediate], or the other way round for down."""
        channels = 256 * self.pairs
        down = name == "down"
        out = [[0.0] * (self.hidden if down else channels)
               for _ in range(channels if down else self.hidden)]
        for record, (bits, stripes) in enumerate(self.experts[expert][name]):
            for stripe, tiles in enumerate(stripes):
                for tile, words in enumerate(tiles):
                    row, column = 16 * tile, 128 * record + 16 * stripe
                    if down:
                        row, column = column, row
                    for k, weights in enumerate(
                            tile_weights(words, bits, TABLES[bits])):
                        out[row + k][column:column + 16] = weights
        return out

    def route(self, expert, x, activation):
        """One expert's row."""
        e = self.experts[expert]

        def project(suh, name, svh):
            rotated = hadamard([a * b for a, b in zip(x, suh)])
            y = hadamard(times(rotated, self.matrix(expert, name)))
            return [a * b for a, b in zip(y, svh)]

        gate = project(self.gate_suh, "gate", e["gate_svh"])
        up = project(self.up_suh, "up", e["up_svh"])
        middle = hadamard([activation(g, u) * s
                           for g, u, s in zip(gate, up, e["down_suh"])])
        y = hadamard(times(middle, self.matrix(expert, "down")))
        return [a * b for a, b in zip(y, self.down_svh)]
