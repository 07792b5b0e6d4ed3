"""fused_moe over EXL3 weights in float64 torch, written from the format's
description alone: nothing here is shared with Kiln's kernels or references.

Tensors are in the order of the entry's parameters, without the output.
"""

import math

import torch

MCG = 0xCBAC1FED


def make_inputs(request, m, seed):
    """Random tensors on the CPU. Some routes are inactive; with two tokens and
    more, the last token has no active route at all."""
    rng = torch.Generator().manual_seed(seed)
    hidden, inter = request["hidden"], request["intermediate"]
    experts, top_k = request["experts"], request["top_k"]
    words = 16 * request["weights"]["bits"]

    def uniform(*shape):
        return torch.rand(*shape, generator=rng)

    def trellis(rows, columns):
        return torch.randint(-32768, 32768,
                             (experts, rows // 16, columns // 16, words),
                             generator=rng).to(torch.int16)

    def scales(size, factor):
        sign = torch.randint(0, 2, (experts, size), generator=rng) * 2 - 1
        return (sign * (uniform(experts, size) + 0.5) * factor).half()

    x = torch.randn(m, hidden, generator=rng).to(
        {"bf16": torch.bfloat16, "f16": torch.float16}[request["io_dtype"]])
    ids = torch.randint(-1, experts + 1, (m, top_k), generator=rng)
    if m > 1:
        ids[-1] = experts
    ids[0, 0] = experts - 1
    ids = ids.to({"i32": torch.int32, "i64": torch.int64}[request["id_dtype"]])
    weights = uniform(m, top_k)
    # Rows of unit variance stay so through every product.
    small = 1 / math.sqrt(hidden)
    return [x, ids, weights,
            trellis(hidden, inter), trellis(hidden, inter),
            trellis(inter, hidden),
            scales(hidden, 1), scales(hidden, 1),
            torch.cat([scales(inter, small), scales(inter, small),
                       scales(inter, 1)], 1).contiguous(),
            scales(hidden, 1 / math.sqrt(inter))]


def decode(trellis):
    """Weights [E][K][N] of i16 words [E][K/16][N/16][16 * bits]."""
    experts, tiles_k, tiles_n, count = trellis.shape
    bits = count // 16
    words = trellis.to(torch.int64) & 0xffff
    # The stream is most significant bit first in 32-bit words, the file's
    # 16-bit halves of each are the other way round.
    words = words.reshape(experts, tiles_k, tiles_n, count // 2, 2).flip(-1)
    stream = words.reshape(experts, tiles_k, tiles_n, count, 1)
    stream = stream >> torch.arange(15, -1, -1) & 1
    stream = stream.reshape(experts, tiles_k, tiles_n, 16 * count)
    # A state is the 16 bits that end with its symbol, on a ring.
    position = torch.arange(256)
    state = torch.zeros(experts, tiles_k, tiles_n, 256, dtype=torch.int64)
    for bit in range(16):
        at = ((position + 1) * bits - 16 + bit) % (256 * bits)
        state |= stream[..., at] << (15 - bit)
    pair = ((state * MCG) & 0x8fff8fff) ^ 0x3b603b60
    value = sum(half.to(torch.int16).view(torch.float16).double()
                for half in (pair & 0xffff, pair >> 16)).half().double()
    lane, j = position >> 3, position & 7
    k = 2 * (lane & 3) + (j & 1) + 8 * (j >> 1 & 1)
    n = (lane >> 2) + 8 * (j >> 2)
    tiles = torch.empty(experts, tiles_k, tiles_n, 16, 16, dtype=torch.float64)
    tiles[..., k, n] = value
    return tiles.transpose(2, 3).reshape(experts, 16 * tiles_k, 16 * tiles_n)


def hadamard(rows):
    """Each aligned piece of 128 elements times the normalised matrix."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(7):
        matrix = torch.cat([torch.cat([matrix, matrix], 1),
                            torch.cat([matrix, -matrix], 1)])
    pieces = rows.reshape(*rows.shape[:-1], -1, 128) @ matrix
    return pieces.reshape(rows.shape) / math.sqrt(128)


def reference(tensors):
    """The output [m][H] in float64, without the intermediate roundings."""
    x, ids, weights, gate, up, down, *scales = [t.cpu() for t in tensors]
    gate, up, down = decode(gate), decode(up), decode(down)
    gate_suh, up_suh, rotations, down_svh = [t.double() for t in scales]
    inter = down.shape[1]
    rows = x.half().double()
    out = torch.zeros(x.shape, dtype=torch.float64)
    for expert in range(gate.shape[0]):
        gate_svh, up_svh, down_suh = rotations[expert].split(inter)
        g = hadamard(hadamard(rows * gate_suh[expert]) @ gate[expert])
        u = hadamard(hadamard(rows * up_suh[expert]) @ up[expert])
        a = torch.nn.functional.silu(g * gate_svh) * (u * up_svh)
        y = hadamard(hadamard(a * down_suh) @ down[expert]) * down_svh[expert]
        share = (weights.double() * (ids == expert)).sum(1, keepdim=True)
        out += share * y
    return out


def worst_error(out, expected):
    """Largest error of a row, relative to that row's norm; a row that should
    be zero counts whole."""
    difference = (out.cpu().double() - expected).norm(dim=1)
    norm = expected.norm(dim=1)
    return (difference / torch.where(norm > 0, norm, torch.ones_like(norm))
            ).nan_to_num(nan=math.inf).max().item()
