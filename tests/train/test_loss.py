"""The Forecast loss, its gradient and its metrics against the definition (docs/semantics.md section 11)."""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparda_jax.config import SparseConfig
from sparda_jax.pallas_kernels.block_selection import bits_to_ids
from sparda_jax.train.loss import LossParts, Objective, forecast_loss
from sparda_jax.train.teacher import route
from tests.train.loss_cases import GOLDEN, SMALL, Document, Row, closed_form, drawn, packed
from tests.train.loss_oracle import Grid, differentiable_block_loss, differentiable_loss, trace


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def value_and_gradient(
    arrays: tuple[jax.Array, ...],
    grid: Grid,
    chunk: int,
    key_tile: int,
    objective: Objective = Objective.PUBLISHED,
) -> tuple[jax.Array, LossParts, jax.Array]:
    """The mean loss, its parts, and the gradient of the mean with respect to the student."""

    def loss(student: jax.Array) -> tuple[jax.Array, LossParts]:
        parts = forecast_loss(student, *arrays[1:], grid, objective=objective, chunk=chunk, key_tile=key_tile)
        return parts.loss / parts.weight, parts

    (value, parts), gradient = jax.value_and_grad(loss, has_aux=True)(arrays[0])
    return value, parts, gradient


def run(
    row: Row,
    grid: Grid = SMALL,
    chunk: int = 64,
    key_tile: int = 64,
    objective: Objective = Objective.PUBLISHED,
) -> tuple[float, LossParts, np.ndarray]:
    """Of a row of batch 1; the gradient is [T, H, D] in float64."""
    value, parts, gradient = value_and_gradient(row.arrays, grid, chunk, key_tile, objective)
    return float(value), jax.device_get(parts), np.asarray(gradient, np.float64)[0]


def autodiff(document: Document, grid: Grid) -> tuple[float, np.ndarray]:
    """Loss and gradient of the plain definition in float64."""
    traced = trace(document.student, document.q, document.k, grid)
    with jax.enable_x64(True):
        loss, gradient = jax.value_and_grad(differentiable_loss)(jnp.asarray(document.student), traced, grid)
        return float(loss), np.asarray(gradient)


def relative_error(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


class TestGoldenNumbers:
    """The published definition has clamps, which make 1.6e-7 of each of these numbers."""

    @pytest.mark.parametrize(
        ("name", "dtype", "entry_tolerance"),
        [("G1", "float64", 1e-6), ("G2", "float64", 1e-6), ("G3", "float64", 1e-6), ("G2", "float32", 5e-6)],
    )
    def test_loss_and_gradient(self, name: str, dtype: str, entry_tolerance: float):
        golden = GOLDEN[name]
        with jax.enable_x64(dtype == "float64"):
            row = packed([closed_form(golden.length)], dtype=dtype)
            value, parts, gradient = run(row, golden.grid, chunk=48)
        assert parts.loss.dtype == dtype
        np.testing.assert_allclose(value, golden.loss, rtol=1e-6)
        np.testing.assert_allclose(np.linalg.norm(gradient), golden.gradient_norm, rtol=1e-6)
        np.testing.assert_allclose(gradient.sum(), golden.gradient_sum, rtol=1e-6)
        np.testing.assert_allclose(gradient[golden.length - 56, 1, 3], golden.gradient_entry, rtol=entry_tolerance)
        assert parts.pairs == 2 * golden.length
        assert parts.supervised_pairs == golden.supervised_pairs


class TestGradient:
    @settings(max_examples=10)
    @given(seed=st.integers(0, 1000))
    def test_equals_autodiff_of_the_definition(self, seed: int):
        document = drawn(seed, 150)
        loss, gradient = autodiff(document, SMALL)
        value, _, ours = run(packed([document]))
        np.testing.assert_allclose(value, loss, rtol=2e-6)
        assert relative_error(ours, gradient) < 3e-6

    @pytest.mark.slow
    def test_equals_autodiff_on_the_deployed_grid(self):
        document = drawn(1, 650)
        grid = Grid(kernel_size=32, kernel_stride=16, block_size=64, local_blocks=1, num_selected_blocks=5)
        loss, gradient = autodiff(document, grid)
        sparse = SparseConfig(window_size=64, topk=4)
        value, _, ours = value_and_gradient(packed([document], grid).arrays, sparse, 256, 128)
        np.testing.assert_allclose(value, loss, rtol=2e-6)
        assert relative_error(np.asarray(ours[0]), gradient) < 3e-6

    def test_equals_finite_differences(self):
        with jax.enable_x64(True):
            row = packed([drawn(2, 150)], dtype="float64")
            _, _, gradient = run(row)
            rng = np.random.default_rng(3)
            for _ in range(4):
                direction = rng.normal(size=row.arrays[0].shape)
                ends = []
                for step in (1e-4, -1e-4):
                    moved = Row(arrays=(row.arrays[0] + step * direction, *row.arrays[1:]), places=row.places)
                    ends.append(run(moved)[0])
                np.testing.assert_allclose((ends[0] - ends[1]) / 2e-4, np.sum(direction * gradient), rtol=1e-5)

    def test_flows_to_the_student_only_and_from_the_loss_only(self):
        row = packed([drawn(4, 150)])

        def everything(student: jax.Array, q: jax.Array, k: jax.Array, loss_weight: float) -> jax.Array:
            parts = forecast_loss(student, q, k, *row.arrays[3:], SMALL, chunk=64, key_tile=64)
            return loss_weight * parts.loss + parts.quality.student_mass + parts.quality.free_mass

        gradients = jax.grad(everything, argnums=(0, 1, 2))
        student, q, k = gradients(*row.arrays[:3], 3.0)
        _, parts, mean_gradient = run(row)
        np.testing.assert_allclose(student[0], 3 * mean_gradient * parts.pairs, rtol=1e-5, atol=1e-9)
        assert not np.asarray(q).any()
        assert not np.asarray(k).any()
        assert not np.asarray(gradients(*row.arrays[:3], 0.0)[0]).any()

    def test_a_far_off_student_still_learns(self):
        """Probabilities below float32's smallest number: the loss is large, and the gradient is not lost."""
        document = drawn(5, 150)
        far = Document(student=100 * document.student, q=document.q, k=document.k)
        traced = trace(far.student, far.q, far.k, SMALL)
        assert 0 < traced.student[:, 140:, 0].min() < 1e-50
        loss, gradient = autodiff(far, SMALL)
        value, _, ours = run(packed([far]))
        assert math.isfinite(loss)
        np.testing.assert_allclose(value, loss, rtol=1e-5)
        assert relative_error(ours, gradient) < 1e-4

    def test_bfloat16_is_near_float64(self):
        document = drawn(7, 150)
        row = packed([document], dtype="bfloat16")
        rounded = [np.asarray(x[0], np.float64) for x in row.arrays[:3]]
        same = Document(student=rounded[0], q=rounded[1], k=rounded[2])
        loss, gradient = autodiff(same, SMALL)
        value, parts, ours = value_and_gradient(row.arrays, SMALL, 64, 64)
        assert (parts.loss.dtype, ours.dtype) == (jnp.float32, jnp.bfloat16)
        ours = np.asarray(ours[0], np.float64)
        np.testing.assert_allclose(value, loss, rtol=1e-2)
        cosine = np.sum(ours * gradient) / np.linalg.norm(ours) / np.linalg.norm(gradient)
        assert cosine > 0.999


class TestBlocks:
    """The objective over blocks (section 11.8)."""

    @pytest.mark.parametrize("seed", [40, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (41, 42))])
    def test_equals_autodiff_of_the_definition(self, seed: int):
        document = drawn(seed, 150)
        traced = trace(document.student, document.q, document.k, SMALL)
        with jax.enable_x64(True):
            loss, gradient = jax.value_and_grad(differentiable_block_loss)(jnp.asarray(document.student), traced, SMALL)
            loss, gradient = float(loss), np.asarray(gradient)
        value, parts, ours = run(packed([document]), objective=Objective.BLOCKS)
        np.testing.assert_allclose(value, loss, rtol=2e-6)
        assert relative_error(ours, gradient) < 3e-6
        # Blocks 0 .. 5 leave no choice, so learning starts in block 6.
        assert not ours[:96].any()
        assert parts.supervised_pairs == 2 * (150 - 96)
        assert parts.pairs == 300

    def test_packed_documents_are_as_alone(self):
        documents = [drawn(43, 160), drawn(44, 5), drawn(45, 131)]
        row = packed(documents, after=21)
        _, parts, gradient = run(row, chunk=48, key_tile=32, objective=Objective.BLOCKS)
        length = row.arrays[4].shape[1]
        pieces = [packed([d], after=length - len(d)) for d in documents]
        alone = [run(piece, chunk=48, key_tile=32, objective=Objective.BLOCKS) for piece in pieces]
        np.testing.assert_allclose(parts.loss, sum(float(p.loss) for _, p, _ in alone), rtol=1e-6)
        np.testing.assert_allclose(parts.weight, sum(float(p.weight) for _, p, _ in alone), rtol=1e-6)
        assert alone[1][1].weight == 0
        for place, document, (_, part, theirs) in zip(row.places, documents, alone, strict=True):
            here = gradient[place : place + len(document)] * parts.weight
            if part.weight:
                np.testing.assert_allclose(here, theirs[: len(document)] * part.weight, rtol=1e-4, atol=1e-6)
            else:
                assert not here.any()

    def test_far_off_students_and_sharp_teachers_stay_finite(self):
        document = drawn(46, 150)
        extreme = Document(student=1e3 * document.student, q=1e4 * document.q, k=document.k)
        value, _, gradient = run(packed([extreme]), objective=Objective.BLOCKS)
        assert math.isfinite(value)
        assert np.isfinite(gradient).all()
        assert gradient.any()

    def test_learning_puts_the_largest_block_first(self):
        """A free student per query, fitted for some steps, chooses nearly all the mass that two blocks can have."""
        document = drawn(47, 250, head_dim=64)
        row = packed([document])
        optimizer = optax.adam(0.2)
        student = jnp.asarray(np.random.default_rng(48).normal(size=row.arrays[0].shape), jnp.float32)
        state = optimizer.init(student)
        shares = []
        for _ in range(40):
            arrays = (student, *row.arrays[1:])
            _, parts, gradient = value_and_gradient(arrays, SMALL, 250, 256, Objective.BLOCKS)
            updates, state = optimizer.update(gradient, state)
            student = student + jnp.asarray(updates)
            shares.append(float(parts.quality.student_mass / parts.quality.teacher_mass))
        assert shares[0] < 0.7
        assert shares[-1] > 0.95


class TestRowsWithLittleToLearn:
    def test_early_rows_count_and_learn_nothing(self):
        _, parts, gradient = run(packed([drawn(8, 150)]))
        # Blocks 0 .. 3 are forced, so learning starts in block 4.
        assert not gradient[:64].any()
        assert np.abs(gradient[64:]).sum(axis=(1, 2)).min() > 0
        assert parts.pairs == 300
        assert parts.supervised_pairs == 2 * 86

    def test_a_short_document_has_no_loss(self):
        value, parts, gradient = run(packed([drawn(9, 60)], after=90))
        assert value == 0
        assert not gradient.any()
        assert parts.pairs == 120
        assert parts.supervised_pairs == 0
        assert parts.quality.pairs == 0

    def test_nothing_is_free_where_every_place_is_forced(self):
        value, parts, gradient = run(packed([drawn(10, 150)]), Grid(num_selected_blocks=4))
        assert value == 0
        assert not gradient.any()
        assert parts.quality.teacher_blocks == 0

    def test_more_places_than_blocks(self):
        document, grid = drawn(11, 150), Grid(num_selected_blocks=40)
        loss, gradient = autodiff(document, grid)
        value, parts, ours = run(packed([document], grid), grid)
        np.testing.assert_allclose(value, loss, rtol=2e-6)
        assert relative_error(ours, gradient) < 3e-6
        assert parts.quality.pairs == 0

    def test_rows_shorter_than_a_window_are_refused(self):
        row = packed([drawn(12, 7)])
        with pytest.raises(ValueError, match="q_len=7"):
            forecast_loss(*row.arrays, SMALL)

    def test_a_teacher_that_underflows_gives_no_nan(self):
        document = drawn(13, 150)
        sharp = Document(student=document.student, q=1e4 * document.q, k=document.k)
        value, parts, gradient = run(packed([sharp]))
        assert math.isfinite(value)
        assert np.isfinite(gradient).all()
        assert all(np.isfinite(x) for x in jax.tree.leaves(parts.quality))

    def test_a_nan_in_the_student_shows(self):
        document = drawn(14, 150)
        student = document.student.copy()
        student[140, 0, 0] = np.nan
        value, _, _ = run(packed([Document(student=student, q=document.q, k=document.k)]))
        assert math.isnan(value)


class TestInvariances:
    @pytest.mark.parametrize("cut", [(37, 32), (512, 2048)])
    def test_chunks_and_tiles_change_nothing(self, cut: tuple[int, int]):
        row = packed([drawn(15, 150)])
        value, parts, gradient = run(row)
        other_value, other_parts, other_gradient = run(row, chunk=cut[0], key_tile=cut[1])
        np.testing.assert_allclose(other_value, value, rtol=1e-6)
        assert relative_error(other_gradient, gradient) < 2e-6
        np.testing.assert_array_equal(other_parts.blocks, parts.blocks)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), other_parts.quality, parts.quality)

    def test_packed_documents_are_as_alone(self):
        """Their losses add up, whatever stands between them."""
        # The first one fills its last block, so that the next one follows at once.
        documents = [drawn(16, 160), drawn(17, 5), drawn(18, 131)]
        row = packed(documents, after=21)
        _, parts, gradient = run(row, chunk=48, key_tile=32)
        gradient = gradient * parts.pairs
        length = row.arrays[4].shape[1]
        alone = [run(packed([d], after=length - len(d)), chunk=48, key_tile=32) for d in documents]
        np.testing.assert_allclose(parts.loss, sum(float(p.loss) for _, p, _ in alone), rtol=1e-6)
        assert parts.pairs == 2 * (160 + 5 + 131)
        assert parts.supervised_pairs == sum(p.supervised_pairs for _, p, _ in alone)
        assert parts.quality.teacher_hits == sum(p.quality.teacher_hits for _, p, _ in alone)
        assert parts.quality.selector_hits == sum(p.quality.selector_hits for _, p, _ in alone)
        np.testing.assert_allclose(
            parts.quality.student_mass, sum(float(p.quality.student_mass) for _, p, _ in alone), rtol=1e-5
        )
        for place, document, (_, part, theirs) in zip(row.places, documents, alone, strict=True):
            here = gradient[place : place + len(document)]
            np.testing.assert_allclose(here, theirs[: len(document)] * part.pairs, rtol=1e-4, atol=1e-6)
        outside = np.ones(len(gradient), bool)
        for place, document in zip(row.places, documents, strict=True):
            outside[place : place + len(document)] = False
        assert not gradient[outside].any()

    def test_a_batch_is_the_sum_of_its_rows(self):
        rows = [packed([drawn(seed, 150)]) for seed in (19, 20)]
        both = tuple(jnp.concatenate(pair) for pair in zip(rows[0].arrays, rows[1].arrays, strict=True))
        _, parts, gradient = value_and_gradient(both, SMALL, 64, 64)
        alone = [run(row) for row in rows]
        np.testing.assert_allclose(parts.loss, sum(float(p.loss) for _, p, _ in alone), rtol=1e-6)
        for number, (_, _, theirs) in enumerate(alone):
            np.testing.assert_allclose(2 * gradient[number], theirs, rtol=1e-4, atol=1e-8)

    def test_blocks_are_those_of_route(self):
        row = packed([drawn(21, 141)], after=9)
        _, parts, _ = run(row)
        ids = route(*row.arrays[1:], SMALL, chunk=64, key_tile=64)
        np.testing.assert_array_equal(bits_to_ids(jnp.asarray(parts.blocks), ids.shape[-1]), ids)

    def test_runs_where_a_mesh_types_its_arrays(self):
        """Loops must start from what is distributed as their results are; a mesh of one device asks for it as well."""
        row = packed([drawn(22, 150)])
        mesh = jax.make_mesh((1,), ("data",))
        spec = jax.sharding.PartitionSpec("data")

        def summed(*arrays: jax.Array) -> jax.Array:
            parts = forecast_loss(*arrays, SMALL, chunk=64, key_tile=64)
            return jax.lax.psum(parts.loss, "data")

        mapped = jax.jit(
            jax.shard_map(summed, mesh=mesh, in_specs=spec, out_specs=jax.sharding.PartitionSpec(), check_vma=True)
        )
        placed = jax.device_put(row.arrays, jax.sharding.NamedSharding(mesh, spec))
        _, parts, _ = run(row)
        np.testing.assert_allclose(mapped(*placed), parts.loss, rtol=1e-6)
        np.testing.assert_allclose(value_and_gradient(placed, SMALL, 64, 64)[1].loss, parts.loss, rtol=1e-6)


class TestQuality:
    def test_a_student_that_is_the_only_query_chooses_as_the_selector(self):
        document = drawn(23, 150, group=1)
        same = Document(student=document.q[:, :, 0], q=document.q, k=document.k)
        _, parts, _ = run(packed([same]))
        quality = parts.quality
        assert quality.selector_blocks > 0
        assert quality.selector_hits == quality.selector_blocks
        np.testing.assert_allclose(quality.student_mass, quality.selector_mass, rtol=1e-6)
        assert quality.student_mass < quality.teacher_mass < quality.free_mass

    @pytest.mark.parametrize("seed", [24, 25])
    def test_equals_a_count_by_hand(self, seed: int):
        document = drawn(seed, 150)
        traced = trace(document.student, document.q, document.k, SMALL)
        compressed, scale = traced.compressed, np.sqrt(8)
        counts, mass = collections.Counter[str](), collections.defaultdict[str, float](float)
        for head, query in np.ndindex(2, 150):
            own = query // 16
            if own + 1 <= 6:
                continue
            ended = [j for j in range(compressed.shape[1]) if 4 * j + 8 <= query + 1]
            raw = compressed[head, ended] @ document.student[query, head]
            logits = compressed[head, ended] @ document.q[query, head].T / scale
            weights = np.exp(logits - logits.max(axis=0))
            chosen = {
                "teacher": set(np.flatnonzero(traced.supervised[head, query])),
                "student": _best(raw, own),
                "selector": _best((weights / weights.sum(axis=0)).sum(axis=1), own),
            }
            counts["pairs"] += 1
            for name in ("teacher", "selector"):
                counts[f"{name}_blocks"] += len(chosen[name])
                counts[f"{name}_hits"] += len(chosen[name] & chosen["student"])
            # Fine key i ends with token i + 1.
            of_block = np.bincount(np.arange(1, 150) // 16, traced.fine[head, query] / 2)
            mass["free_mass"] += of_block[1 : own - 2].sum()
            for name, blocks in chosen.items():
                mass[f"{name}_mass"] += of_block[sorted(blocks)].sum()
        quality = run(packed([document]))[1].quality
        assert len(counts) + len(mass) == len(dataclasses.fields(quality))
        assert {name: int(getattr(quality, name)) for name in counts} == counts
        for name, value in mass.items():
            np.testing.assert_allclose(getattr(quality, name), value, rtol=1e-5)

    def test_learning_the_loss_improves_the_choice(self):
        """A free student per query, fitted for some steps, comes to choose what the teacher chose."""
        row = packed([drawn(26, 250, head_dim=64)])
        optimizer = optax.adam(0.2)
        student = jnp.asarray(np.random.default_rng(27).normal(size=row.arrays[0].shape), jnp.float32)
        state = optimizer.init(student)
        losses, recalls = [], []
        for _ in range(40):
            value, parts, gradient = value_and_gradient((student, *row.arrays[1:]), SMALL, 250, 256)
            updates, state = optimizer.update(gradient, state)
            student = student + jnp.asarray(updates)
            losses.append(float(value))
            recalls.append(float(parts.quality.teacher_hits / parts.quality.teacher_blocks))
        assert losses[-1] < 0.05 * losses[0]
        # It can't reach 1: windows of unselected blocks are only told their sum.
        assert recalls[-1] > 2 * recalls[0]


def _best(scores: np.ndarray, own: int) -> set[int]:
    """The two best free blocks of a query in block ``own`` with 6 places, by its scores of the windows that it sees."""
    pooled = {b: scores[max(4 * b - 1, 0) : 4 * b + 4].max() for b in range(1, own - 2)}
    return set(sorted(pooled, key=lambda b: (-pooled[b], b))[:2])


class TestMemory:
    def test_nothing_has_a_query_and_a_key_axis_of_full_length(self):
        """No array of the compiled program is as large as queries times windows, nor as a tenth of it."""
        length, sparse = 8192, SparseConfig(window_size=64, topk=4)
        shapes = ((1, length, 1, 8), (1, length, 1, 2, 8), (1, length, 1, 8))
        floats = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        ints = jax.ShapeDtypeStruct((1, length), jnp.int32), jax.ShapeDtypeStruct((1, length), jnp.bool_)
        compiled = value_and_gradient.lower((*floats, *ints), sparse, 64, 512).compile()
        sizes = [math.prod(shape) for shape in _shapes(str(compiled.as_text()))]
        assert length * 8 in sizes
        assert max(sizes) < length * (length // 16) / 10
        memory = compiled.memory_analysis()
        assert memory is not None
        assert memory.temp_size_in_bytes < 8 * 2**20


def _shapes(hlo: str) -> list[Sequence[int]]:
    """Of all arrays in an HLO text."""
    return [[int(n) for n in dims.split(",")] for dims in re.findall(r"\b(?:pred|[fsu]\d+|bf16)\[([\d,]+)\]", hlo)]
