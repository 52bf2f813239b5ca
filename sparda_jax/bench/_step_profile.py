"""What a JAX profile says of decode steps: the kernels and copies of each, and what each of them is for."""

import dataclasses
import enum
import re
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

from jax.profiler import ProfileData

from sparda_jax.decode_plan import GRAPHS_IN_PROFILES


class ProfileError(ValueError):
    """A profile that no step can be drawn from."""


class Kind(enum.StrEnum):
    """What a kernel is for."""

    ATTENTION = "attention"
    PRODUCT = "products"
    SELECTION = "selection"
    PLAN = "plan"
    APPEND = "append"
    SMALL = "small kernels"
    FETCH = "fetch"


# The first that is found in a name decides. A Triton kernel without a name of its own is called "kernel"; in a decode
# step these were the selection's.
_KINDS = {
    Kind.FETCH: r"copy_records|memcpyh2d",
    Kind.ATTENTION: r"attention(?!s)",
    Kind.APPEND: r"append_token|finish_window|write_token",
    Kind.PLAN: r"plan_residency",
    Kind.SELECTION: r"forecast_scores|infllm_|top_blocks|sort|^kernel(__\d+)?$",
    Kind.PRODUCT: r"between_attentions|gemm|nvjet|cublas|cutlass",
}


def kind_of(name: str) -> Kind:
    """What a kernel of this name is for; one that is not known is a small kernel, as XLA's fusions are."""
    return next((kind for kind, names in _KINDS.items() if re.search(names, name.lower())), Kind.SMALL)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    """A kernel or copy on the device.

    Attributes:
        name: the kernel's.
        start, end: µs after any moment that all events of a profile share.
    """

    name: str
    start: float
    end: float

    @property
    def kind(self) -> Kind:
        return kind_of(self.name)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profile:
    """The decode steps of a profile.

    Attributes:
        made_on: the device's name and the version of JAX, such as "NVIDIA H200, jax 0.11.2".
        steps: for each step its events, by start.
    """

    made_on: str
    steps: tuple[tuple[Event, ...], ...]


def read_profile(path: Path) -> Profile:
    """Reads a ``.xplane.pb`` file, or the only one below a folder.

    Raises:
        ProfileError: there is no such file, or several, or none of a GPU's decode steps is in it as a CUDA graph.
    """
    try:
        data = ProfileData.from_file(str(_file(path)))
    except (RuntimeError, ValueError) as error:
        raise ProfileError(f"{path} is no profile: {error}") from None
    return decode_steps(data, path)


def decode_steps(data: Any, path: Path) -> Profile:
    """The steps in a profile of one GPU: what one launch of a graph ran, if it is decode that it ran.

    Args:
        data: a `jax.profiler.ProfileData`.
        path: what messages call it.

    Raises:
        ProfileError: none is in it.
    """
    devices = [plane for plane in data.planes if plane.name.startswith("/device:GPU:")]
    devices = [plane for plane in devices if any(True for line in plane.lines for _ in line.events)]
    if len(devices) != 1:
        hint = " (a CPU's profile has no lanes of a GPU)" if not devices else ""
        raise ProfileError(f"{path} shows {len(devices)} GPUs at work{hint}: profile a decode step on one.")
    launches: defaultdict[object, list[Event]] = defaultdict(list)
    with warnings.catch_warnings():
        # jaxlib's type of statistics names no module, which Python 3.12 and later tell once.
        warnings.simplefilter("ignore", DeprecationWarning)
        for line in devices[0].lines:
            for event in line.events:
                # All kernels of a graph carry the number of its launch.
                launch = dict(event.stats).get("correlation_id")
                launches[launch].append(Event(name=event.name, start=event.start_ns / 1e3, end=event.end_ns / 1e3))
        about = {key: value for plane in data.planes for key, value in plane.stats}
    steps = [tuple(sorted(events, key=lambda event: (event.start, event.end))) for events in launches.values()]
    steps = [step for step in steps if {Kind.ATTENTION, Kind.PRODUCT, Kind.APPEND} <= {event.kind for event in step}]
    if not steps:
        raise ProfileError(
            f"{path} shows no decode step that is one CUDA graph: write it with `bench decode --profile`, a server's "
            f"--profile while it decodes, or XLA_FLAGS=--{GRAPHS_IN_PROFILES}=true."
        )
    return Profile(
        made_on=f"{about.get('gpu_device_name', 'GPU')}, jax {about.get('jax_version', 'unknown')}",
        steps=tuple(sorted(steps, key=lambda step: step[0].start)),
    )


def _file(path: Path) -> Path:
    if path.is_file():
        return path
    found = sorted(path.rglob("*.xplane.pb"))
    if len(found) != 1:
        raise ProfileError(f"{path} holds {len(found)} profiles (*.xplane.pb): name one of them, or a folder with one.")
    return found[0]
