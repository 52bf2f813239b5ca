"""The decode step, compiled for an H200: one CUDA graph, everything in place, the fetch free to run beside a layer."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from sparda_jax.cache.host_dtype import KvHostDtype, host_record
from sparda_jax.cache.state import CacheShape, empty_state
from sparda_jax.config import ModelConfig, RopeConfig, SparseConfig
from sparda_jax.decode_plan import GPU_OPTIONS, DecodePlan, Fetch
from sparda_jax.lane_step import state_first, step_and_sample
from sparda_jax.model import abstract_decoder
from sparda_jax.sampling import SamplingParams, SamplingState
from sparda_jax.selection import Mode
from tests.h200.harness import Compiled, compile_for_h200, needs_compiler, pinned_host

pytestmark = needs_compiler
LANES, LAYERS = 4, 3
# The attention geometry of MiniCPM4.1-8B around a narrow model.
CONFIG = ModelConfig(
    vocab_size=4096,
    hidden_size=512,
    intermediate_size=1024,
    num_layers=LAYERS,
    num_heads=32,
    num_kv_heads=2,
    head_dim=128,
    max_position_embeddings=32768,
    rms_norm_eps=1e-6,
    initializer_range=0.02,
    embedding_scale=12.0,
    residual_scale=0.25,
    logit_divisor=2.0,
    tie_word_embeddings=True,
    bos_token_id=1,
    eos_token_ids=(2,),
    rope=RopeConfig(theta=10000.0),
    sparse=SparseConfig(dense_len=6144),
)
LOGITS = f"f32[{LANES},{CONFIG.vocab_size}]"
SHAPE = CacheShape(lanes=LANES, max_blocks=512, num_blocks=LANES * 512, slots_per_lane=128)


@functools.cache
def compiled(
    mode: Mode, fetch: Fetch, *, compares: bool = False, kv_host_dtype: KvHostDtype = KvHostDtype.AUTO
) -> Compiled:
    plan = DecodePlan(mode=mode, fetch=fetch, compares=compares)
    graphdef, weights = nnx.split(abstract_decoder(CONFIG, has_forecast=True, dtype=jnp.bfloat16))
    channels = mode.partial_channels(CONFIG)
    state = jax.eval_shape(lambda: empty_state(CONFIG, SHAPE, jnp.bfloat16, partial_channels=channels))
    record = host_record((2 * CONFIG.sparse.block_size, CONFIG.head_dim), jnp.dtype(jnp.bfloat16), kv_host_dtype)
    pool = (SHAPE.num_blocks * CONFIG.num_kv_heads, *record.shape)
    pools = tuple(pinned_host(pool, record.dtype) for _ in range(LAYERS))
    ids = jax.ShapeDtypeStruct((LANES,), jnp.int32)
    sampling = jax.eval_shape(lambda: SamplingState.of([SamplingParams(seed=1)] * LANES))
    step = state_first(functools.partial(step_and_sample, graphdef, plan))
    return compile_for_h200(step, weights, state, pools, ids, ids, sampling, flags=GPU_OPTIONS, donate_argnums=1)


def copies(program: Compiled) -> list[str]:
    """Large copies in a step whose requests are greedy and have no penalties; the others begin with the logits' own."""
    large = program.copies(1 << 12)
    assert len(large) <= 1
    return [copy for copy in large if LOGITS not in copy]


def small_copies(program: Compiled) -> list[str]:
    """All but that one, and the zeros that the semaphores of each layer's products begin with."""
    return [
        copy
        for copy in program.copies(1)
        if LOGITS not in copy and not re.search(r"s32\[\d\]\{0\} copy\(%broadcast", copy)
    ]


@pytest.mark.parametrize(
    ("mode", "fetch", "kv_host_dtype"),
    [
        (Mode.SPARDA, Fetch.AHEAD, KvHostDtype.AUTO),
        pytest.param(Mode.SPARSE, Fetch.IN_TURN, KvHostDtype.AUTO, marks=pytest.mark.slow),
        pytest.param(Mode.INFINIGEN, Fetch.AHEAD, KvHostDtype.AUTO, marks=pytest.mark.slow),
        pytest.param(Mode.SPARDA, Fetch.AHEAD, KvHostDtype.INT8, marks=pytest.mark.slow),
        pytest.param(Mode.SPARDA, Fetch.AHEAD, KvHostDtype.FP8, marks=pytest.mark.slow),
    ],
)
def test_a_step_is_one_graph_in_place(mode: Mode, fetch: Fetch, kv_host_dtype: KvHostDtype) -> None:
    program = compiled(mode, fetch, kv_host_dtype=kv_host_dtype)
    assert program.launches == ["kCommandBuffer"]
    # Neither slots nor pages nor pools are copied; what is, is a few numbers per lane. InfiniGen's partial keys are
    # scored where they lie: gathered, those of one layer alone would be 16 MiB of temporaries.
    assert copies(program) == []
    # Not even those, as a rule: what a step only passes on stays where it is.
    assert len(small_copies(program)) < LAYERS
    stats = program.memory_stats
    held = LANES * SHAPE.max_blocks * CONFIG.num_kv_heads * 2 * 64 * 128 * 2
    assert stats.alias_size_in_bytes > held, "the state is updated where it is"
    assert stats.temp_size_in_bytes < 4 << 20
    assert stats.host_temp_size_in_bytes == 0
    assert stats.host_output_size_in_bytes == 0
    assert [kernel for kernel in program.kernels if kernel.spilled] == []


def test_each_layer_waits_on_zeros_of_its_own() -> None:
    """The CTAs of a layer's products count each other; a count that was left over would let them read too early."""
    hlo = compiled(Mode.SPARDA, Fetch.AHEAD).hlo
    call = r'custom-call\(([^)]*)\), custom_call_target="mosaic_gpu_v2"[^\n]*op_name="[^"]*/between_attentions/'
    counters = [operands.split(", ")[-1].split("*/")[-1] for operands in re.findall(call, hlo)]
    assert len(counters) == len(set(counters)) == LAYERS
    for counter in counters:
        made = re.search(rf"^ +{re.escape(counter)} = s32\[\d\]\{{0\}} (.*)$", hlo, re.MULTILINE)
        assert made is not None
        assert "broadcast" in made.group(1), "zeros, or a copy of them"


@pytest.mark.slow
def test_a_sampled_step_is_one_graph_in_place() -> None:
    """The selections of the layers' own queries, beside those that are attended to."""
    program = compiled(Mode.SPARDA, Fetch.AHEAD, compares=True)
    assert program.launches == ["kCommandBuffer"]
    assert copies(program) == []
    assert len(small_copies(program)) < LAYERS
    assert program.memory_stats.temp_size_in_bytes < 8 << 20, "a group's scores are more than a Forecast's"


@pytest.mark.parametrize(
    ("mode", "kv_host_dtype"),
    [
        (Mode.SPARDA, KvHostDtype.AUTO),
        pytest.param(Mode.INFINIGEN, KvHostDtype.AUTO, marks=pytest.mark.slow),
        pytest.param(Mode.SPARDA, KvHostDtype.INT8, marks=pytest.mark.slow),
    ],
)
def test_a_fetch_waits_for_its_plan_and_the_fetch_before(mode: Mode, kv_host_dtype: KvHostDtype) -> None:
    """In the graph nothing else leads to it, and a layer's kernels lie between its plan and its reader."""
    assert GPU_OPTIONS["xla_gpu_command_buffer_scheduling_mode"] == "CONCURRENT"
    program = compiled(mode, Fetch.AHEAD, kv_host_dtype=kv_host_dtype)
    node = r"^ +(\d+): (\w+) +\[(?:prev=(\d+)[^|]*|source *)\| (?:next=(\d+)[^\]]*|sink *)\] (\S+)"
    nodes = re.findall(node, program.thunks, re.MULTILINE)
    # Mosaic kernels are custom calls without a name here, in the order of the scheduled HLO.
    mosaic = iter(re.findall(r'custom_call_target="mosaic_gpu_v2".*?op_name="[^"]*/(\w+)/mpmd_map', program.hlo))
    names = {int(number): next(mosaic) if kind == "kCustomCall" else name for number, kind, _, _, name in nodes}
    assert next(mosaic, None) is None
    plans = [number for number, name in names.items() if name.startswith("plan_residency")]
    # Of its edges a node shows the nearest.
    fetches = {
        int(number): (before, int(after)) for number, _, before, after, _ in nodes if "copy" in names[int(number)]
    }
    fetches = {number: edges for number, edges in fetches.items() if names[number] == "copy_records"}
    assert len(fetches) == len(plans) == LAYERS
    first, *others = fetches
    assert all(int(fetches[number][0]) in {*plans, *fetches} for number in others)
    # Layer 0 reads what it fetches at once; for the others a layer's attention and products come in between.
    assert names[fetches[first][1]] in ("write_token", "slot_attention_parts")
    for plan, number in zip(plans[1:], others, strict=True):
        between = [names[n] for n in range(plan, fetches[number][1])]
        assert "slot_attention_combine" in between
