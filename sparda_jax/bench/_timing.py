"""GPU time of one call, from replays of a program that makes many."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

SAMPLES = 9
SAMPLE_SECONDS = 0.03
COMPILER_OPTIONS = {"xla_gpu_command_buffer_scheduling_mode": "SERIALIZE"}
"""The graph runs one kernel after the other."""
METHOD = (
    f"median of {SAMPLES} samples; a sample replays, for about {SAMPLE_SECONDS * 1e3:.0f} ms and without waiting in "
    "between, a jitted program of many dependent calls, which XLA makes one CUDA graph; "
    "its time over the number of calls, launches included. No call finds its data in the L2 cache."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chain:
    """A program of many calls, each of which depends on the one before.

    Attributes:
        step: ``(state, shared, inputs) -> (state, output)``, one call.
        state: arrays that a call replaces, all in one memory; an empty pytree for a pure operation. They are donated,
            so a chain can be timed only once.
        shared: arrays that every call reads.
        inputs: what a call reads alone; the calls take them in turn. A host that passes thousands of arrays would be
            slower than the GPU, so there are few, and what does not change is shared.
        num_calls: calls of the program.
    """

    step: Callable[[Any, Any, Any], tuple[Any, Any]]
    state: Any
    shared: Any
    inputs: Sequence[Any]
    num_calls: int

    def calls(self, state: Any, shared: Any, inputs: Sequence[Any]) -> tuple[Any, jax.Array]:
        """All calls, each after the one before; and a number of every output, so that XLA drops no call.

        All outputs themselves would be more arrays than the host can make while the GPU runs short calls.
        """
        outputs: list[Any] = []
        for call in range(self.num_calls):
            own = inputs[call % len(inputs)]
            if outputs:
                own, outputs[-1] = jax.lax.optimization_barrier((own, outputs[-1]))
            state, output = self.step(state, shared, own)
            outputs.append(output)
        leaves = [leaf for leaf in jax.tree.leaves(outputs) if leaf.size]
        numbers = [leaf.ravel()[0].astype(jnp.float32) for leaf in leaves]
        return state, jnp.stack(numbers or [jnp.float32(0)])


def seconds_per_call(chain: Chain) -> float:
    """The chain's GPU time per call: see `METHOD`."""
    inputs = tuple(chain.inputs)
    # The state stays in the memory that it came from, which may be the host's.
    kept = next((leaf.sharding for leaf in jax.tree.leaves(chain.state)), None)
    program = jax.jit(chain.calls, donate_argnums=0, out_shardings=(kept, None), compiler_options=COMPILER_OPTIONS)
    state = chain.state

    def replay(times: int) -> float:
        nonlocal state
        outputs = None
        start = time.perf_counter()
        for _ in range(times):
            state, outputs = program(state, chain.shared, inputs)
        jax.block_until_ready((state, outputs))
        return time.perf_counter() - start

    replay(2)
    replays = max(2, round(SAMPLE_SECONDS / (replay(2) / 2)))
    return statistics.median(replay(replays) for _ in range(SAMPLES)) / (replays * chain.num_calls)
