"""Small models that have something to learn, random corpora, and runs of the trainer."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from sparda_jax.config import ModelConfig
from sparda_jax.model import Decoder
from sparda_jax.train import mesh
from sparda_jax.train.checkpoints import Checkpoints
from sparda_jax.train.config import TrainConfig
from sparda_jax.train.corpus import Corpus
from sparda_jax.train.data import Batch, TrainingRows, validation_batches
from sparda_jax.train.forecast import fresh_weights
from sparda_jax.train.forward import ForwardPass
from sparda_jax.train.loss import Objective
from sparda_jax.train.metrics import Record
from sparda_jax.train.state import TrainState
from sparda_jax.train.trainer import Trainer

SEQ_LEN = 512
VOCAB = 64


@functools.cache
def tiny_model(layers: int = 2, num_heads: int = 4, num_kv_heads: int = 2) -> Decoder:
    """Selects 4 of up to 8 blocks, 3 of them always. Queries and keys are large, so attention is far from uniform."""
    data: dict[str, Any] = {
        "model_type": "minicpm",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": 16,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.2,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "scale_emb": 1.0,
        "scale_depth": 1.4,
        "dim_model_base": 32,
        "sparse_config": {"init_blocks": 1, "window_size": 64, "topk": 3, "dense_len": -1},
    }
    config = ModelConfig.from_hf(data)
    model = Decoder(config, has_forecast=False, dtype=jax.numpy.float32, rngs=nnx.Rngs(0))
    for layer in model.layers:
        kernel = layer.self_attn.qkvf_proj.kernel
        kernel[...] = kernel[...].at[:, : (num_heads + num_kv_heads) * 16].mul(1.5)
    return model


def random_corpus(lengths: Sequence[int] = (), seed: int = 0) -> Corpus:
    """Documents of random tokens, of these lengths or of 24 random ones."""
    rng = np.random.default_rng(seed)
    starts = np.cumsum([0, *(lengths or rng.integers(220, 700, 24))]).astype(np.int64)
    return Corpus(
        tokens=rng.integers(0, VOCAB, starts[-1]).astype(np.uint16), starts=starts, fingerprint=f"random {seed}"
    )


def topical_corpus(documents: int, seed: int) -> Corpus:
    """Documents of a row's length in which each 32 tokens are mostly one token: a mean of keys says something."""
    rng = np.random.default_rng(seed)
    tokens = np.repeat(rng.integers(0, VOCAB, documents * SEQ_LEN // 32), 32)
    noise = rng.random(tokens.size) < 0.2
    tokens[noise] = rng.integers(0, VOCAB, noise.sum())
    starts = np.arange(documents + 1, dtype=np.int64) * SEQ_LEN
    return Corpus(tokens=tokens.astype(np.uint16), starts=starts, fingerprint=f"topical {seed}")


def make_config(**changes: Any) -> TrainConfig:
    values: dict[str, Any] = {"seq_len": SEQ_LEN, "batch_size": 2, "micro_batch_size": 2, "steps": 4, "save_every": 2}
    values |= {"warmup_steps": 0, "seed": 7, **changes}
    return TrainConfig(**values)


def make_rows(config: TrainConfig, model: Decoder, corpus: Corpus | None = None) -> TrainingRows:
    corpus = corpus or random_corpus()
    return TrainingRows(
        corpus,
        np.arange(len(corpus.lengths)),
        seq_len=config.seq_len,
        sparse=model.config.sparse,
        seed=config.seed,
        batch_rows=config.micro_batch_size,
    )


def make_validation(config: TrainConfig, model: Decoder, corpus: Corpus | None = None) -> list[Batch]:
    corpus = corpus or random_corpus((500, 300, 400, 600), seed=1)
    return validation_batches(
        corpus,
        np.arange(4),
        seq_len=config.seq_len,
        sparse=model.config.sparse,
        batch_rows=config.micro_batch_size,
        max_rows=4,
    )


def make_mesh(devices: int = 1, **axes: int) -> Mesh:
    return mesh.make_mesh(jax.devices()[:devices], **axes)


def forward_pass(*, objective: Objective = Objective.PUBLISHED, **model: int) -> ForwardPass:
    """One process compiles each model's programs once."""
    return _forward_pass(objective, **model)


@functools.cache
def _forward_pass(objective: Objective, **model: int) -> ForwardPass:
    return ForwardPass(tiny_model(**model), make_mesh(), objective=objective)


@dataclasses.dataclass(kw_only=True)
class Run:
    """A run and what it reported."""

    state: TrainState
    records: list[Record]
    steps: Sequence[int]
    best_step: int | None


def run_training(
    folder: Path,
    config: TrainConfig,
    *,
    resume: bool = False,
    resume_step: int | None = None,
    validation: Sequence[Batch] = (),
    weights: np.ndarray | None = None,
    rows: TrainingRows | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    on_record: Callable[[Record], None] = lambda record: None,
    forward: ForwardPass | None = None,
    peak_flops: float | None = None,
    **model: int,
) -> Run:
    """Trains a tiny model, from the beginning or from a checkpoint in ``folder``."""
    base = tiny_model(**model)
    records: list[Record] = []

    def report(record: Record) -> None:
        records.append(record)
        on_record(record)

    trainer = Trainer(
        config,
        forward or forward_pass(objective=config.objective, **model),
        rows or make_rows(config, base),
        validation,
        report=report,
        should_stop=should_stop,
        peak_flops=peak_flops,
    )
    with Checkpoints(folder, keep=config.keep, identity=config.identity()) as checkpoints:
        state = trainer.initial_state(
            jnp.asarray(fresh_weights(base.config, config.seed) if weights is None else weights)
        )
        if resume:
            state = checkpoints.restore(resume_step, state)
        state = trainer.run(state, checkpoints)
        return Run(state=state, records=records, steps=checkpoints.steps, best_step=checkpoints.best_step)


def leaves(state: TrainState) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state)]
