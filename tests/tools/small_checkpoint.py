"""Small checkpoints for the tests of kiln describe, prepare and encode."""

import hashlib
import json
import os
import random
import struct
import subprocess
import tempfile
import unittest

BIN = os.path.abspath(os.environ.get("KILN_BIN_DIR", "build/release/bin"))
KILN = os.path.join(BIN, "kiln")
HAS_COMPILER = os.path.exists(os.path.join(BIN, "kiln-cc-cpu"))
HIDDEN, INTERMEDIATE, EXPERTS, LAYERS = 128, 256, 4, 3


def write_safetensors(path, tensors, metadata=None):
    header, data = {}, b""
    if metadata:
        header["__metadata__"] = metadata
    for name, (dtype, shape, payload) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape,
                        "data_offsets": [len(data), len(data) + len(payload)]}
        data += payload
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    if "_qsrt_format_section" in tensors:
        text = text.ljust(4088)  # the header's one length
    with open(path, "wb") as handle:
        handle.write(struct.pack("<Q", len(text)) + text + data)


def halves(*shape):
    count = 1
    for size in shape:
        count *= size
    return ("F16", list(shape), struct.pack("<e", 0.5) * count)


def write_btx(folder, codebook="mcg", pair_kinds=None):
    """Layer 0 of one layer, at 3 bits or at pairs of rates of 6 bits."""
    slots = INTERMEDIATE // 32
    row = EXPERTS * 3 * (HIDDEN // 16) * 32 * 6
    tensors = {"atoms": ("U8", [slots, row], os.urandom(slots * row)),
               "rotations": halves(slots, EXPERTS, 3, 32)}
    for name in ("gate_suh", "up_suh", "down_svh"):
        tensors[name] = halves(HIDDEN)
    rates = {"structure": "uniform", "bits": 3}
    if pair_kinds:
        rates = {"structure": "per_expert_pair", "pair_kinds": pair_kinds}
        for name in ("rates_fc1", "rates_fc2"):
            tensors[name] = ("U8", [slots // 8, EXPERTS], b"\x33" * EXPERTS)
    path = os.path.join(folder, "btx-layer-00000.safetensors")
    write_safetensors(path, tensors, {
        "schema": "btx-atoms-v1", "codebook": codebook, "layer": "0",
        "num_experts": str(EXPERTS), "hidden_size": str(HIDDEN),
        "intermediate_size": str(INTERMEDIATE), "atom_channels": "32"})
    with open(path, "rb") as handle:
        digest = hashlib.sha256(handle.read()).hexdigest()
    manifest = {
        "kind": "btx-manifest", "schema": "btx-atoms-v1", "codebook": codebook,
        "geometry": {"num_experts": EXPERTS, "hidden_size": HIDDEN,
                     "intermediate_size": INTERMEDIATE, "atom_channels": 32,
                     "atom_slots": slots, "moe_layer_indices": [0]},
        "rates": rates,
        "hadamard": {"coupled": False, "per_expert_input_rotations": False},
        "layout": {"atom_row_alignment": 64, "extent_alignment_slots": 4},
        "layers": {"0": {"file": os.path.basename(path), "sha256": digest}}}
    if codebook == "mcg":
        manifest["codebook_seed"] = 0xCBAC1FED
    with open(os.path.join(folder, "btx-manifest.json"), "w") as handle:
        json.dump(manifest, handle)
    write_config(folder)


def write_qsrt(folder):
    """Layer 7, of Kimi-K3's schema."""
    # Random trellis data, and scales that are finite.
    atom = (os.urandom(36 * HIDDEN) + struct.pack("<e", 0.5) * 96) * EXPERTS
    write_qsrt_layer(folder, 7, b"\x01\x10\x00\x11",
                     struct.pack("<e", 0.5) * 3 * HIDDEN,
                     [atom] * (INTERMEDIATE // 32))


def write_qsrt_layer(folder, layer, codes, scales, atoms):
    """codes: of the experts. scales: w1.suh, w3.suh and w2.svh. atoms: of each
    slot, the bundles of all experts."""
    experts, slots, payload = len(codes), len(atoms), len(atoms[0])
    stride = (payload + 4095) // 4096 * 4096
    tensors = {
        "_qsrt_format_section": ("U8", [4096], codes.ljust(4096, b"\0")),
        "_qsrt_shared_scale_section": ("U8", [4096],
                                       scales.ljust(4096, b"\0")),
        "qsrt_atoms": ("U8", [slots, stride],
                       b"".join(a.ljust(stride, b"\0") for a in atoms))}
    numbers = {
        "version": 1, "layer": layer, "profile_id": 1, "experts": experts,
        "compressed_experts": experts, "x4t_experts": 0,
        "intermediate_channels": 32 * slots, "latent_channels": len(scales) // 6,
        "atom_channels": 32, "atom_slots": slots,
        "atom_bundle_bytes": payload // experts,
        "atom_slot_payload_bytes": payload, "atom_slot_stride_bytes": stride,
        "alignment_bytes": 4096}
    write_safetensors(
        os.path.join(folder, f"qsrt-layer-{layer:03}.safetensors"), tensors,
        {"format": "pt", "schema": "kquant_kimi_k3_qsrt_atoms_v1",
         "encoding": "qsrt_sqg_e4m3"} | {k: str(v) for k, v in numbers.items()})


def exl3(key, rows, columns, bits):
    return {
        key + ".trellis": ("I16", [rows // 16, columns // 16, 16 * bits],
                           os.urandom(rows * columns * bits // 8)),
        key + ".suh": ("F16", [rows], struct.pack("<e", 0.5) * rows),
        key + ".svh": ("F16", [columns], struct.pack("<e", -0.25) * columns),
        key + ".mcg": ("I32", [], struct.pack("<I", 0xCBAC1FED)),
    }


def write_checkpoint(folder):
    """Three layers in two shards; the last layer has another rate."""
    write_config(folder, layers=LAYERS)
    weight_map = {}
    for shard, layers in enumerate([[0, 1], [2]]):
        tensors = {}
        for layer in layers:
            for expert in range(EXPERTS):
                key = f"model.layers.{layer}.mlp.experts.{expert}."
                bits = 3 if layer == 2 else 4
                tensors |= exl3(key + "gate_proj", HIDDEN, INTERMEDIATE, bits)
                tensors |= exl3(key + "up_proj", HIDDEN, INTERMEDIATE, bits)
                tensors |= exl3(key + "down_proj", INTERMEDIATE, HIDDEN, bits)
        name = f"model-{shard}.safetensors"
        write_safetensors(os.path.join(folder, name), tensors)
        weight_map |= {tensor: name for tensor in tensors}
    with open(os.path.join(folder, "model.safetensors.index.json"),
              "w") as handle:
        json.dump({"metadata": {}, "weight_map": weight_map}, handle)


DENSE = {"self_attn.q_proj": (256, 512), "self_attn.k_proj": (256, 256),
         "self_attn.v_proj": (256, 256), "self_attn.o_proj": (512, 256),
         "mlp.gate_proj": (256, 768), "mlp.up_proj": (256, 768),
         "mlp.down_proj": (768, 256)}


def write_dense_config(folder, layers):
    """config.json of Qwen2 with the shapes of DENSE."""
    with open(os.path.join(folder, "config.json"), "w") as handle:
        json.dump({"model_type": "qwen2", "hidden_act": "silu",
                   "hidden_size": 256, "intermediate_size": 768,
                   "num_attention_heads": 4, "num_key_value_heads": 2,
                   "head_dim": 128, "vocab_size": 300,
                   "num_hidden_layers": layers, "torch_dtype": "bfloat16"},
                  handle)


def write_dense_checkpoint(folder):
    """Two layers at 4 bits with biases of the queries, and a head at 6; the
    products of the last layer are at 3 bits."""
    write_dense_config(folder, layers=2)
    tensors = exl3("lm_head", 256, 384, 6)
    for layer in range(2):
        for name, (rows, columns) in DENSE.items():
            key = f"model.layers.{layer}.{name}"
            bits = 3 if layer == 1 and name == "mlp.down_proj" else 4
            tensors |= exl3(key, rows, columns, bits)
        tensors[f"model.layers.{layer}.self_attn.q_proj.bias"] = halves(512)
    write_safetensors(os.path.join(folder, "model.safetensors"), tensors)


def write_real_dense_checkpoint(folder):
    """One layer of DENSE in bf16, with a bias of the queries."""
    os.makedirs(folder)
    write_dense_config(folder, layers=1)
    rng = random.Random(11)

    def numbers(*shape):
        count = 1
        for size in shape:
            count *= size
        return ("BF16", list(shape),
                bfloat16([rng.gauss(0, 0.05) for _ in range(count)]))

    tensors = {"model.layers.0.self_attn.q_proj.bias": numbers(512)}
    for name, (rows, columns) in DENSE.items():
        tensors[f"model.layers.0.{name}.weight"] = numbers(columns, rows)
    write_safetensors(os.path.join(folder, "model.safetensors"), tensors)


def write_config(folder, hidden=HIDDEN, intermediate=INTERMEDIATE,
                 experts=EXPERTS, layers=1, **more):
    """config.json of Qwen3-MoE, two routes for each token where it can."""
    config = {"model_type": "qwen3_moe", "hidden_act": "silu",
              "hidden_size": hidden, "moe_intermediate_size": intermediate,
              "num_experts": experts,
              "num_experts_per_tok": min(2, experts),
              "num_hidden_layers": layers, "torch_dtype": "bfloat16"} | more
    with open(os.path.join(folder, "config.json"), "w") as handle:
        json.dump(config, handle)


def bfloat16(values):
    """Their bytes, cut: the upper halves of binary32."""
    floats = struct.pack(f"<{len(values)}f", *values)
    return b"".join(floats[i + 2:i + 4] for i in range(0, len(floats), 4))


def from_bfloat16(data):
    wide = b"".join(b"\0\0" + data[i:i + 2] for i in range(0, len(data), 2))
    return struct.unpack(f"<{len(data) // 2}f", wide)


def write_real_checkpoint(folder, hidden=128, intermediate=128, experts=2,
                          layers=1, seed=7):
    """Layers of bf16 weights, Gaussian. Returns the tensors."""
    os.makedirs(folder)
    write_config(folder, hidden, intermediate, experts, layers)
    rng = random.Random(seed)

    def matrix(rows, columns):
        return ("BF16", [rows, columns],
                bfloat16([rng.gauss(0, 0.05) for _ in range(rows * columns)]))

    tensors = {"model.embed_tokens.weight": matrix(4, hidden)}
    for layer in range(layers):
        for expert in range(experts):
            key = f"model.layers.{layer}.mlp.experts.{expert}."
            tensors[key + "gate_proj.weight"] = matrix(intermediate, hidden)
            tensors[key + "up_proj.weight"] = matrix(intermediate, hidden)
            tensors[key + "down_proj.weight"] = matrix(hidden, intermediate)
    write_safetensors(os.path.join(folder, "model.safetensors"), tensors)
    return tensors


class CliTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.checkpoint = self.folder.name

    def at(self, *names):
        return os.path.join(self.folder.name, *names)

    def kiln(self, *arguments, code=0):
        done = subprocess.run(
            [KILN, "--cache", self.at("cache"), *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            check=False)
        self.assertEqual(done.returncode, code, done.stderr)
        return done
