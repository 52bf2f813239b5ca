"""Four layers of MiniCPM4.1-8B's shape with random weights, sharded: 2.9 GiB through the converter."""

import json
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

LAYERS, HIDDEN, FFN, VOCAB, KV = 4, 4096, 16384, 73448, 256
CONFIG = {
    "model_type": "minicpm",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "scale_emb": 12,
    "scale_depth": 1.4,
    "dim_model_base": 256,
}
LARGEST = 2 * VOCAB * HIDDEN
RUN = """
import resource, sys
from sparda_jax.convert import app
try:
    app(sys.argv[1:])
finally:
    print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def _write(folder: Path) -> None:
    """One shard for the embeddings, the head and each layer, with an index; bf16 bits at random, finite."""
    rng = np.random.default_rng(0)
    weight_map: dict[str, str] = {}

    def shard(name: str, shapes: dict[str, tuple[int, ...]]) -> None:
        tensors = {
            key: rng.integers(0x3800, 0x3D00, shape, np.uint16).view(ml_dtypes.bfloat16)
            for key, shape in shapes.items()
        }
        save_file(tensors, folder / name)
        weight_map.update(dict.fromkeys(shapes, name))

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    shard("embed.safetensors", {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)})
    shard("head.safetensors", {"lm_head.weight": (VOCAB, HIDDEN)})
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        shapes: dict[str, tuple[int, ...]] = {
            f"{prefix}{norm}.weight": (HIDDEN,) for norm in ("input_layernorm", "post_attention_layernorm")
        }
        shapes |= {f"{prefix}self_attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qo"}
        shapes |= {f"{prefix}self_attn.{name}_proj.weight": (KV, HIDDEN) for name in "kv"}
        shapes |= {f"{prefix}mlp.{name}_proj.weight": (FFN, HIDDEN) for name in ("gate", "up")}
        shard(f"layer{layer}.safetensors", shapes | {f"{prefix}mlp.down_proj.weight": (HIDDEN, FFN)})
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.slow
def test_converts_in_a_few_times_its_largest_tensor(tmp_path: Path) -> None:
    _write(tmp_path / "source")
    started = time.perf_counter()
    command = [sys.executable, "-c", RUN, str(tmp_path / "source"), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(f"{time.perf_counter() - started:.1f} s", done.stdout)
    assert done.returncode == 0, done.stderr
    assert f"{9 * LAYERS + 3} tensors, every one accounted for" in done.stdout
    peak = int(done.stdout.split("peak ")[1])
    assert peak < 4 * LARGEST, f"{peak / LARGEST:.1f} times the largest tensor"
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert len(manifest["tensors"]) == 9 * LAYERS + 3
