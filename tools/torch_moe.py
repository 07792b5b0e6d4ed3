#!/usr/bin/env python3
"""Times PyTorch's bf16 mixture of experts next to `kiln bench --compare torch`.

Started by kiln with one JSON argument; answers one line per line of input:

    time M DRAWS    nanoseconds per call, over DRAWS routings of M tokens

One call is the whole layer: sort by expert, gather, gate and up, SiLU, down,
weighted sum. On a GPU with torch._grouped_mm the products are grouped matrix
products and the calls one captured graph; elsewhere each active expert is a
matrix product of its own.
"""

import json
import sys
import time

import torch

DTYPE = torch.bfloat16


class Moe:
    def __init__(self, spec):
        self.device = torch.device(spec["device"])
        self.on_gpu = self.device.type == "cuda"
        self.grouped = self.on_gpu and hasattr(torch, "_grouped_mm")
        self.experts = spec["experts"]
        self.top_k = spec["top_k"]
        self.hidden = spec["hidden"]
        self.inter = spec["intermediate"]
        torch.manual_seed(spec["seed"])
        if not self.on_gpu:
            torch.set_num_threads(spec["threads"])
        # Half as many random numbers as weights would do; the values do not
        # matter, but zeros would let the clock rise.
        shape = (self.experts, self.hidden, 2 * self.inter)
        self.w1 = torch.empty(shape, dtype=DTYPE, device=self.device)
        self.w1.normal_(std=self.hidden ** -0.5)
        shape = (self.experts, self.inter, self.hidden)
        self.w2 = torch.empty(shape, dtype=DTYPE, device=self.device)
        self.w2.normal_(std=self.inter ** -0.5)
        self.prepared = {}

    def inputs(self, m):
        x = torch.randn(m, self.hidden, device=self.device).to(DTYPE)
        scores = torch.rand(m, self.experts, device=self.device)
        ids = scores.topk(self.top_k, dim=1).indices
        weights = torch.rand(m, self.top_k, device=self.device)
        return x, ids, weights

    def call(self, x, ids, weights):
        flat = ids.flatten()
        order = torch.argsort(flat, stable=True)
        rows = order // self.top_k
        gathered = x[rows]
        if self.grouped:
            counts = torch.zeros(self.experts, dtype=torch.int32,
                                 device=self.device)
            counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
            ends = torch.cumsum(counts, 0, dtype=torch.int32)
            both = torch._grouped_mm(gathered, self.w1, offs=ends)
            gate, up = both.chunk(2, dim=1)
            act = torch.nn.functional.silu(gate) * up
            out = torch._grouped_mm(act, self.w2, offs=ends)
        else:
            out = torch.empty(len(order), self.hidden, dtype=DTYPE,
                              device=self.device)
            counts = torch.bincount(flat, minlength=self.experts).tolist()
            begin = 0
            for expert, count in enumerate(counts):
                if count == 0:
                    continue
                part = slice(begin, begin + count)
                both = gathered[part] @ self.w1[expert]
                gate, up = both.chunk(2, dim=1)
                act = torch.nn.functional.silu(gate) * up
                out[part] = act @ self.w2[expert]
                begin += count
        scaled = out.float() * weights.flatten()[order].unsqueeze(1)
        result = torch.zeros(x.shape[0], self.hidden, device=self.device)
        return result.index_add_(0, rows, scaled)

    def prepare(self, m, draws):
        """The calls of all draws as one function that returns nanoseconds."""
        sets = [self.inputs(m) for _ in range(draws)]

        def run():
            for one in sets:
                self.call(*one)

        if not self.on_gpu:
            def timed():
                begin = time.perf_counter_ns()
                run()
                return (time.perf_counter_ns() - begin) / draws
            timed()
            return timed
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                run()
        side.synchronize()
        replay = run
        if self.grouped:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()
            replay = graph.replay
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)

        def timed():
            torch.cuda.synchronize()
            begin.record()
            replay()
            end.record()
            torch.cuda.synchronize()
            return begin.elapsed_time(end) * 1e6 / draws
        timed()
        return timed


def main():
    spec = json.loads(sys.argv[1])
    with torch.inference_mode():
        moe = Moe(spec)
        how = "grouped_mm" if moe.grouped else "one product per expert"
        print(f"torch {torch.__version__} {moe.device} bf16 {how}", flush=True)
        for line in sys.stdin:
            verb, m, draws = line.split()
            if verb != "time":
                raise SystemExit(f"unknown request {verb}")
            key = (int(m), int(draws))
            if key not in moe.prepared:
                # One size at a time: graphs keep their memory.
                moe.prepared = {key: moe.prepare(*key)}
            print(moe.prepared[key](), flush=True)


if __name__ == "__main__":
    main()
