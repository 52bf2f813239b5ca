"""Every tensor of the files against every tensor of the model: all differences at once."""

import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np

from sparda_jax.checkpoint.errors import CheckpointError
from sparda_jax.checkpoint.mapping import (
    EMBEDDING,
    FORECAST_NAME,
    HARMLESS,
    LM_HEAD,
    UNSUPPORTED,
    Parameter,
    SourceTensor,
    decoder_parameters,
)
from sparda_jax.checkpoint.tensor_files import TensorEntry, TensorFiles
from sparda_jax.config import ModelConfig

_DTYPES = ("bfloat16", "float16", "float32")
_WAY_OUT = "Nothing was converted or loaded: fetch the checkpoint again, or use the config.json that belongs to it."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Accounted:
    """A checkpoint whose tensors are exactly those of the model.

    Attributes:
        parameters: of the decoder, with the Forecast when there is one.
        entries: tensor name -> where it is.
        dropped: left out, since they follow from others or are no tensors.
    """

    parameters: tuple[Parameter, ...]
    entries: Mapping[str, TensorEntry]
    dropped: tuple[str, ...]


def compare(wanted: Iterable[SourceTensor], entries: Mapping[str, TensorEntry]) -> list[str]:
    """What is missing, misshaped or of a dtype that is not read, one line each."""
    problems = []
    for tensor in wanted:
        entry = entries.get(tensor.name)
        if entry is None:
            problems.append(f"missing: {tensor.name} {list(tensor.shape)}")
            continue
        if entry.shape != tensor.shape:
            problems.append(f"misshaped: {tensor.name} is {list(entry.shape)}, the model asks for {list(tensor.shape)}")
        if entry.dtype not in _DTYPES:
            problems.append(f"wrong dtype: {tensor.name} is {entry.dtype}; only {', '.join(_DTYPES)} are read")
    return problems


def unexpected(names: Iterable[str]) -> list[str]:
    """A line for each name that the model does not have, with the reason where a related model has it."""
    problems = []
    for name in names:
        reason = next((reason for pattern, reason in UNSUPPORTED if pattern.search(name)), None)
        problems.append(f"unsupported: {name}: {reason}" if reason else f"unexpected: {name}")
    return problems


def account(files: TensorFiles, config: ModelConfig, *, has_forecast: bool) -> Accounted:
    """Checks that the files hold the model's tensors and nothing else.

    Args:
        files: of the base model and, with ``has_forecast``, of the Forecast.
        config: from the ``config.json`` beside them.
        has_forecast: whether the parameters shall hold a Forecast.

    Raises:
        CheckpointError: with the full list: missing, unexpected, misshaped, wrong dtype, duplicate, unsupported, and a
            tied head that differs from the embeddings.
    """
    parameters = decoder_parameters(config, has_forecast=has_forecast)
    tensors = [tensor for parameter in parameters for tensor in parameter.tensors]
    known = {tensor.name for tensor in tensors}
    problems = list(files.problems) + compare(tensors, files.entries)
    dropped = [*files.foreign, *(name for name in files.entries if HARMLESS.search(name))]
    if config.tie_word_embeddings and LM_HEAD in files.entries:
        dropped.append(LM_HEAD)
        if not _same_bits(files.entries[LM_HEAD], files.entries.get(EMBEDDING)):
            problems.append(
                f"tied head: config.json says tie_word_embeddings=true, but {LM_HEAD} differs from {EMBEDDING}; "
                "set it to false if the head was trained on its own"
            )
    problems += unexpected(name for name in files.entries if name not in known and name not in dropped)
    for parameter in parameters:
        dtypes = {t.name: files.entries[t.name].dtype for t in parameter.tensors if t.name in files.entries}
        base = {name: dtype for name, dtype in dtypes.items() if not FORECAST_NAME.search(name)}
        if len(set(base.values())) > 1 and set(base.values()) <= set(_DTYPES):
            mixture = ", ".join(f"{name} is {dtype}" for name, dtype in base.items())
            problems.append(f"wrong dtype: {mixture}; they are joined, so they must agree")
    if problems:
        raise CheckpointError.listing(files.label, problems, _WAY_OUT)
    return Accounted(parameters=parameters, entries={n: files.entries[n] for n in known}, dropped=tuple(dropped))


def _same_bits(first: TensorEntry, second: TensorEntry | None) -> bool:
    if second is None or first.shape != second.shape or first.dtype != second.dtype or first.dtype not in _DTYPES:
        return False
    bits = f"u{np.dtype(first.read().dtype).itemsize}"
    return bool(np.array_equal(first.read().view(bits), second.read().view(bits)))
