"""The bundled model's geometry and training recipe."""

import dataclasses
from typing import Any

from sparda_jax.pretrain.batches import LossWeights
from sparda_jax.pretrain.contents import TaskMix
from sparda_jax.pretrain.facts import Spelling
from sparda_jax.selection import Mode

DENSE, SPARSE, SPARDA = Mode.DENSE, Mode.SPARSE, Mode.SPARDA


def hf_config(vocab_size: int, bos_token_id: int, eos_token_ids: list[int]) -> dict[str, Any]:
    """``config.json`` of the bundled model: a MiniCPM4.1-style decoder of 11 M parameters."""
    return {
        "architectures": ["MiniCPMForCausalLM"],
        "model_type": "minicpm",
        "vocab_size": vocab_size,
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_act": "silu",
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.05,
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "scale_emb": 12,
        "dim_model_base": 256,
        "scale_depth": 1.4,
        "tie_word_embeddings": True,
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_ids,
        "torch_dtype": "bfloat16",
        "sparse_config": {
            "kernel_size": 32,
            "kernel_stride": 16,
            "block_size": 64,
            "init_blocks": 1,
            "window_size": 512,
            "topk": 16,
            "dense_len": 1536,
        },
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase:
    """A stretch of training at one sequence length.

    Attributes:
        seq_len: tokens of a sequence. tokens: of the whole phase, in millions.
        modes: how its steps attend, in turn.
    """

    seq_len: int
    tokens: float
    modes: tuple[Mode, ...] = (DENSE,)

    def mode_of(self, step: int) -> Mode:
        return self.modes[step % len(self.modes)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """Optimiser and schedule: AdamW, linear warm-up, cosine decay.

    Attributes:
        phases: stretches of training, in order.
        batch_tokens: tokens of a step.
        routing_weight: scale of the loss of routing.py for the model's own selector.
        foresight_weight: its scale for the Forecast, which is then trained, and the layers before it to make it right.
        text_fraction: share of the rows that are plain text; the others hold recall documents.
        long_fraction: share of the recall rows that one document fills.
        answer_weight: loss weight of an answer's words around its values, the echoed key among them.
        spelling: how hard keys and values are to copy.
        mix: which recall documents are drawn how often.
    """

    phases: tuple[Phase, ...]
    batch_tokens: int = 65536
    peak_learning_rate: float = 2e-3
    final_learning_rate: float = 2e-4
    warmup_steps: int = 200
    weight_decay: float = 0.1
    beta2: float = 0.95
    max_grad_norm: float = 1.0
    routing_weight: float = 0.0
    foresight_weight: float = 0.0
    text_fraction: float = 0.5
    long_fraction: float = 0.6
    answer_weight: float = LossWeights.answer
    spelling: Spelling = dataclasses.field(default_factory=Spelling)
    mix: TaskMix = dataclasses.field(default_factory=TaskMix)
    seed: int = 0

    def steps(self, phase: Phase) -> int:
        return max(1, round(phase.tokens * 1e6 / self.batch_tokens))

    def scaled(self, factor: float) -> "Recipe":
        """The same recipe with every phase ``factor`` times as long."""
        return dataclasses.replace(
            self, phases=tuple(dataclasses.replace(p, tokens=p.tokens * factor) for p in self.phases)
        )

    @property
    def total_steps(self) -> int:
        return sum(self.steps(phase) for phase in self.phases)


# First stage: from random weights, the last quarter mostly sparse.
PRETRAINING = Recipe(
    phases=(
        Phase(seq_len=512, tokens=80),
        Phase(seq_len=2048, tokens=150),
        Phase(seq_len=4096, tokens=120),
        Phase(seq_len=8192, tokens=70),
        Phase(seq_len=4096, tokens=70, modes=(SPARSE, SPARSE, SPARSE, SPARSE, DENSE)),
        Phase(seq_len=8192, tokens=70, modes=(SPARSE, SPARSE, SPARSE, SPARSE, DENSE)),
        Phase(seq_len=16384, tokens=20, modes=(SPARSE, DENSE)),
    ),
)

# Second stage: from the weights of the first, sparse in every layer, with the routing loss. A larger routing weight or
# learning rate makes the loss chase a teacher that moves with it (docs/performance.md, "A large weight for long").
ADAPTATION = Recipe(
    phases=(
        Phase(seq_len=4096, tokens=72, modes=(SPARSE,)),
        Phase(seq_len=8192, tokens=46, modes=(SPARSE,)),
    ),
    peak_learning_rate=5e-4,
    final_learning_rate=3e-5,
    warmup_steps=50,
    routing_weight=0.1,
    text_fraction=0.4,
    long_fraction=0.8,
)

# Third stage: from the weights of the second, whose wrong answers were misspelt ones: a held-out word that begins like
# a known one, a digit lost among equal digits. Invented words and numbers of few digits leave nothing to guess from.
REFINEMENT = Recipe(
    phases=(
        Phase(seq_len=4096, tokens=160, modes=(SPARSE, SPARSE, SPARSE, DENSE)),
        Phase(seq_len=16384, tokens=24, modes=(SPARSE, DENSE)),
        Phase(seq_len=8192, tokens=70, modes=(SPARSE, SPARSE, SPARSE, DENSE)),
        Phase(seq_len=4096, tokens=60, modes=(SPARSE, SPARSE, SPARSE, DENSE)),
    ),
    peak_learning_rate=6e-4,
    final_learning_rate=2e-5,
    warmup_steps=50,
    routing_weight=0.1,
    text_fraction=0.35,
    long_fraction=0.7,
    answer_weight=4.0,
    spelling=Spelling(invented_words=0.35, few_digits=0.35),
)

# Fourth stage: from the weights of the third and a Forecast that was trained on them. What a layer looks for has to be
# known a layer earlier; a model that was trained without a Forecast does not always know it by then.
FORESIGHT = dataclasses.replace(
    REFINEMENT,
    phases=(
        Phase(seq_len=4096, tokens=80, modes=(SPARDA, SPARSE, SPARDA, DENSE)),
        Phase(seq_len=8192, tokens=80, modes=(SPARDA, SPARSE)),
    ),
    peak_learning_rate=5e-4,
    foresight_weight=0.3,
)

# Its second half: the first leaves sparse recall lower than it found it (docs/performance.md).
SETTLING = dataclasses.replace(
    FORESIGHT,
    phases=(
        Phase(seq_len=4096, tokens=24, modes=(SPARDA, DENSE)),
        Phase(seq_len=8192, tokens=80, modes=(SPARDA, SPARSE)),
    ),
    peak_learning_rate=2e-4,
    final_learning_rate=1e-5,
    foresight_weight=0.1,
)
