"""Makes the `torch_*` files beside it with PyTorch 2.13; run by hand, not by the tests."""

import collections
import json
import os
import random
import zlib
from pathlib import Path

import numpy as np
import torch  # pyright: ignore[reportMissingImports]

HERE = Path(__file__).parent
CONFIG = {
    "model_type": "llama",
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}


class RunsACommand:
    def __reduce__(self) -> tuple:
        return os.system, ("exit 1",)


def pattern(name: str, *shape: int) -> torch.Tensor:
    """Values that bfloat16 holds exactly, and that a test can make again without PyTorch."""
    count = int(np.prod(shape))
    values = (np.arange(count) * 7919 + zlib.crc32(name.encode())) % 251 - 125
    return torch.from_numpy((values / 512).astype(np.float32)).reshape(shape).to(torch.bfloat16)


def tensors() -> None:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    bits = (torch.arange(128) * 517 - 2**15).to(torch.int16)
    state = collections.OrderedDict(
        bf16=bits.view(torch.bfloat16),
        f16=torch.tensor([1.5, -0.0, 6e-8], dtype=torch.float16),
        f32=base,
        transposed=base.t(),
        sliced=base[1:3, 2:5],
        parameter=torch.nn.Parameter(base[0] + 0.5),
        long=torch.arange(3),
    )
    torch.save(state, HERE / "torch_tensors.pt")
    torch.save(state, HERE / "torch_legacy.pt", _use_new_zipfile_serialization=False)
    torch.save({"weights": {"a": base}, "other": RunsACommand()}, HERE / "torch_command.pt")


def trainer() -> None:
    """The dictionary that the reference's trainer writes (docs/semantics.md section 8.3)."""
    names = [f"model.layers.{layer}.self_attn.q_future_proj.weight" for layer in range(3)]
    names.append("model.layers.0.self_attn.q_curr_proj.weight")
    state = collections.OrderedDict((f"module.{name}", pattern(name, 32, 64)) for name in names)
    linear = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(linear.parameters(), lr=1e-3)
    linear(torch.ones(4)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    generator = np.random.RandomState(0).get_state()
    content = {
        "step": 2000,
        "micro_batches_seen": 8000,
        "gradient_accumulation_steps": 4,
        "world_size": 8,
        "model_state_dict": state,
        "optimizer_state_dict": optimizer.state_dict(),
        "indexer_optimizer_state_dict": optimizer.state_dict(),
        "scheduler_state_dict": scheduler.state_dict(),
        "sparse_config": {"window_size": 1024, "topk": 64, "dense_len": 4096, "use_q_future_for_topk": True},
        "base_model_path": "openbmb/MiniCPM4.1-8B",
        "rng_state": {
            "python": random.Random(0).getstate(),
            "numpy": generator,
            "torch": torch.get_rng_state()[:16].clone(),
        },
        "rng_state_by_rank": None,
    }
    torch.save(content, HERE / "torch_trainer.pt")


def sharded() -> None:
    folder = HERE / "torch_sharded"
    folder.mkdir(exist_ok=True)
    hidden, ffn, vocab = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["vocab_size"]
    shapes = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        shapes |= {f"{prefix}.{name}layernorm.weight": (hidden,) for name in ("input_", "post_attention_")}
        shapes |= {f"{prefix}.self_attn.{name}_proj.weight": (hidden, hidden) for name in "qo"}
        shapes |= {f"{prefix}.self_attn.{name}_proj.weight": (hidden // 2, hidden) for name in "kv"}
        shapes |= {f"{prefix}.mlp.{name}_proj.weight": (ffn, hidden) for name in ("gate", "up")}
        shapes |= {f"{prefix}.mlp.down_proj.weight": (hidden, ffn)}
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}
    state = {name: pattern(name, *shape) for name, shape in shapes.items()}
    down = "model.layers.1.mlp.down_proj.weight"
    state[down] = state[down].t().contiguous().t()  # saved with the strides of a transpose
    files = [f"pytorch_model-0000{i}-of-00002.bin" for i in (1, 2)]
    placed = {name: files[i % 2] for i, name in enumerate(state)}
    for file in files:
        torch.save({name: state[name] for name in state if placed[name] == file}, folder / file)
    index = {"metadata": {"total_size": sum(2 * t.numel() for t in state.values())}, "weight_map": placed}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index, indent=1) + "\n")
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1) + "\n")


if __name__ == "__main__":
    tensors()
    trainer()
    sharded()
