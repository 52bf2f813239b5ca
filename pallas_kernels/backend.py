"""Which implementation of an operation runs: one rule for all of them, and how kernels run where there is no GPU.

The device that a program is meant for is the abstract device of the mesh in force, or else the first device. The mesh
is part of JAX's trace caches, so a kernel that was traced for one target is never used for another one:
``with jax.sharding.use_abstract_mesh(H200)`` traces on a CPU exactly what an H200 would run.
"""

import contextlib
import contextvars
import dataclasses
import enum
import re
from collections.abc import Collection, Iterator

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh, get_abstract_mesh, use_abstract_mesh


class Backend(enum.StrEnum):
    """An implementation of an operation."""

    REFERENCE = "reference"
    """The definition in plain jnp; runs anywhere."""
    TRITON = "triton"
    """Pallas kernels lowered through Triton: any NVIDIA GPU since Ampere; interpreted on a CPU."""
    MOSAIC_GPU = "mosaic_gpu"
    """Pallas kernels with TMA and wgmma: Hopper only; interpreted on a CPU as far as the interpreter goes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """What the choice looks at of the device that a program is meant for."""

    platform: str
    device_kind: str


H200 = AbstractMesh((), (), abstract_device=AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132))
"""A mesh that makes an H200 the target: for compiling without one and for the Mosaic interpreter."""

# The fastest backend of each operation on an H200 (docs/performance.md); an operation that is not named has no kernels.
MEASURED_BEST = {
    "block_selection": Backend.TRITON,
    "residency": Backend.TRITON,
    "record_copy": Backend.MOSAIC_GPU,
    "sparse_attention": Backend.MOSAIC_GPU,
    "block_sparse_attention": Backend.MOSAIC_GPU,
    "token_append": Backend.TRITON,
    "between_attentions": Backend.MOSAIC_GPU,
    "fine_softmax": Backend.TRITON,
}

# H100, H200, H20, H800 and GH200 by name: an abstract device has no compute capability.
_HOPPER = re.compile(r"\bG?H[128]00|\bH20\b")


def target() -> Target:
    """The device that a program traced here is meant for."""
    device = get_abstract_mesh().abstract_device or jax.devices()[0]
    return Target(platform=device.platform, device_kind=device.device_kind)


def choose_backend(
    backend: str | None,
    operation: str,
    *,
    available: Collection[Backend] = tuple(Backend),
    device: Target | None = None,
) -> Backend:
    """The backend that runs an operation.

    A named backend is taken. Otherwise a CPU gets the reference, a Hopper GPU the fastest of `MEASURED_BEST`, any other
    GPU Triton; and where that one is not available, the next of Triton and the reference that is.

    Args:
        backend: the caller's wish: a name of `Backend`, or None for the rule.
        operation: the operation's folder in `pallas_kernels`.
        available: what the operation can run with the operands at hand; the reference always belongs to it.
        device: what the program is meant for; `target()` if left out.

    Raises:
        ValueError: ``backend`` is no name of a backend, is not available, or needs another GPU.
    """
    device = device or target()
    hopper = device.platform == "gpu" and _HOPPER.search(device.device_kind) is not None
    if backend is not None:
        if backend not in list(Backend):
            raise ValueError(
                f"backend={backend!r} of {operation} is unknown: use one of {', '.join(Backend)}, or None."
            )
        if backend not in available:
            usable = ", ".join(b for b in Backend if b in available)
            raise ValueError(f"backend={backend!r} of {operation} does not take these operands: use one of {usable}.")
        if backend == Backend.MOSAIC_GPU and device.platform == "gpu" and not hopper:
            raise ValueError(
                f"backend={backend!r} of {operation} needs a Hopper GPU, and this is {device.device_kind}: use triton."
            )
        return Backend(backend)
    if device.platform != "gpu":
        return Backend.REFERENCE
    best = MEASURED_BEST.get(operation, Backend.REFERENCE)
    if best == Backend.MOSAIC_GPU and not hopper:
        best = Backend.TRITON
    return next(b for b in (best, Backend.TRITON, Backend.REFERENCE) if b in available)


def interpreting() -> bool:
    """Whether kernels traced here have to be interpreted: ``pl.pallas_call(..., interpret=interpreting())``."""
    return target().platform != "gpu"


_interprets_mosaic = contextvars.ContextVar("_interprets_mosaic", default=False)


def interprets_mosaic() -> bool:
    """Whether this is inside of `mosaic_interpreter`, on a machine without a GPU."""
    return _interprets_mosaic.get()


@contextlib.contextmanager
def mosaic_interpreter() -> Iterator[None]:
    """Around the call of a Mosaic kernel: it is interpreted where there is no GPU, and compiled where there is one.

    The interpreter wants to know a GPU's properties, so in this context the target is an H200.
    """
    if not interpreting():
        yield
        return
    before = _interprets_mosaic.set(True)
    try:
        with use_abstract_mesh(H200), plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
            yield
    finally:
        _interprets_mosaic.reset(before)
