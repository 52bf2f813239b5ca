"""Inputs of the loss: the closed forms of the golden numbers, drawn documents, and documents packed in one row."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from tests.train.loss_oracle import Grid

SMALL = Grid()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Document:
    """One document in float64: ``student`` and ``k`` [T, H, D], ``q`` [T, H, G, D]."""

    student: np.ndarray
    q: np.ndarray
    k: np.ndarray

    def __len__(self) -> int:
        return len(self.k)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Golden:
    """What the published definition gives for `closed_form` (with its clamps, routed in float64)."""

    length: int
    num_selected: int
    loss: float
    gradient_norm: float
    gradient_sum: float
    gradient_entry: float
    windows: int
    supervised_blocks: int
    supervised_pairs: int
    last_selection: tuple[int, ...]
    last_kl: float

    @property
    def grid(self) -> Grid:
        return Grid(num_selected_blocks=self.num_selected)


GOLDEN = {
    "G1": Golden(
        length=256,
        num_selected=6,
        loss=0.5199707793880638,
        gradient_norm=0.0034567195373420064,
        gradient_sum=-0.010702980900250885,
        gradient_entry=1.5130545423937334e-05,
        windows=63,
        supervised_blocks=733,
        supervised_pairs=384,
        last_selection=(0, 1, 9, 13, 14, 15),
        last_kl=0.34107903013375357,
    ),
    "G2": Golden(
        length=250,
        num_selected=6,
        loss=0.5215747668741485,
        gradient_norm=0.003496533978871323,
        gradient_sum=-0.009586814387903013,
        gradient_entry=8.153099583074974e-05,
        windows=61,
        supervised_blocks=709,
        supervised_pairs=372,
        last_selection=(0, 10, 12, 13, 14, 15),
        last_kl=1.0297544793216742,
    ),
    "G3": Golden(
        length=256,
        num_selected=5,
        loss=0.3678454249399018,
        gradient_norm=0.0034075826606013862,
        gradient_sum=-0.01363214200729947,
        gradient_entry=5.6163259217933364e-05,
        windows=63,
        supervised_blocks=384,
        supervised_pairs=384,
        last_selection=(0, 1, 13, 14, 15),
        last_kl=0.01497454158971586,
    ),
}


def closed_form(length: int) -> Document:
    """The inputs of the golden numbers: 2 KV heads, 4 query heads each, 16 channels."""
    t = np.arange(length)[:, None, None]
    i = np.arange(16)
    kv, heads = np.arange(2)[:, None], np.arange(8)[:, None]
    q = 3 * np.sin(0.37 * t + 1.3 * heads + 0.71 * i + 0.05 * t * i)
    return Document(
        student=1.5 * np.sin(0.19 * t + 0.7 * kv + 0.41 * i + 0.043 * t * i),
        q=q.reshape(length, 2, 4, 16),
        k=np.cos(0.23 * t + 0.9 * kv + 0.53 * i + 0.031 * t * i),
    )


def drawn(seed: int, length: int, *, kv_heads: int = 2, group: int = 2, head_dim: int = 8) -> Document:
    """Normal values, the queries wide enough that some blocks matter much more than others."""
    rng = np.random.default_rng(seed)
    return Document(
        student=rng.normal(size=(length, kv_heads, head_dim)),
        q=2.5 * rng.normal(size=(length, kv_heads, group, head_dim)),
        k=rng.normal(size=(length, kv_heads, head_dim)),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """Documents one after the other as arguments of `forecast_loss`, batch 1; between them padding that holds NaN.

    Attributes:
        arrays: student, q, k, positions, valid. places: the token at which each document starts.
    """

    arrays: tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]
    places: tuple[int, ...]


def packed(
    documents: list[Document], grid: Grid = SMALL, dtype: jax.typing.DTypeLike = jnp.float32, after: int = 0
) -> Row:
    """Each document from a multiple of the block on; ``after`` more tokens of padding at the end."""
    places, end = [], 0
    for document in documents:
        places.append(-(-end // grid.block_size) * grid.block_size)
        end = places[-1] + len(document)
    length = end + after
    first = documents[0]
    student, k = (np.full((length, *first.k.shape[1:]), np.nan) for _ in range(2))
    q = np.full((length, *first.q.shape[1:]), np.nan)
    # Padding goes on counting, which only `valid` tells apart from a document.
    positions, valid = np.arange(length, dtype=np.int32), np.zeros(length, bool)
    for place, document in zip(places, documents, strict=True):
        rows = slice(place, place + len(document))
        student[rows], q[rows], k[rows] = document.student, document.q, document.k
        positions[place:] = np.arange(length - place)
        valid[rows] = True
    student, q, k = (jnp.asarray(x[None], dtype) for x in (student, q, k))
    return Row(arrays=(student, q, k, jnp.asarray(positions[None]), jnp.asarray(valid[None])), places=tuple(places))
