"""Writes LoRA adapters with random weights for the sample model, in the format of PEFT."""

from __future__ import annotations

import json
import pathlib
import random
import struct

LAYERS, HIDDEN, KV, FEED_FORWARD = 30, 576, 192, 1536
# The numbers of rows and columns of each projection matrix.
MODULES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KV, HIDDEN),
    "self_attn.v_proj": (KV, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (FEED_FORWARD, HIDDEN),
    "mlp.up_proj": (FEED_FORWARD, HIDDEN),
    "mlp.down_proj": (HIDDEN, FEED_FORWARD),
}


def write(directory: pathlib.Path, rank: int, seed: int) -> pathlib.Path:
    """Writes one adapter that changes every projection. Its weights are small, so that the model still generates text."""
    rng = random.Random(seed)
    header, parts, at = {}, [], 0
    for layer in range(LAYERS):
        for module, (rows, columns) in MODULES.items():
            for half, shape in (("lora_A", (rank, columns)), ("lora_B", (rows, rank))):
                count = shape[0] * shape[1]
                # Repeat 997 random numbers, because drawing one for each weight would take seconds per adapter.
                row = [rng.uniform(-0.02, 0.02) for _ in range(997)]
                values = (row * (count // 997 + 1))[:count]
                parts.append(struct.pack(f"<{count}f", *values))
                name = f"base_model.model.model.layers.{layer}.{module}.{half}.weight"
                header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + 4 * count]}
                at += 4 * count
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"".join(parts))
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": sorted(MODULES)}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory
