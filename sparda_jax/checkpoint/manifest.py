"""``manifest.json`` of a converted checkpoint: what it was made from and the hash of every tensor."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparda_jax.checkpoint.errors import CheckpointError
from sparda_jax.checkpoint.mapping import Parameter
from sparda_jax.checkpoint.tensor_files import read_json

MANIFEST_FILE = "manifest.json"
FORMAT_VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorRecord:
    """One tensor of the source.

    Attributes:
        file: it came from; empty for a Forecast tensor filled with zeros.
        shape: in PyTorch's layout.
        dtype, sha256: of the source, over its bytes in row-major order.
        stored_dtype, stored_sha256: as stored here; they differ only where a Forecast was cast to the dtype of q_proj.
    """

    file: str
    shape: tuple[int, ...]
    dtype: str
    sha256: str
    stored_dtype: str
    stored_sha256: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contents of ``manifest.json``.

    Attributes:
        format_version: of the folder's layout.
        sparda_jax_version: that wrote it.
        source: ``name`` of the source and, when it is a Hugging Face snapshot, its ``revision``.
        config: the source's ``config.json``.
        sparse_config: the block selection after merging ``config.json`` and the Forecast's own.
        forecast: None, or where it came from: ``file``, ``step``, ``base_model_path``, ``sparse_config``,
            ``zero_filled`` and ``ignored``.
        tensors: by Hugging Face name.
        dropped: what the source had besides.
    """

    format_version: int
    sparda_jax_version: str
    source: Mapping[str, str | None]
    config: Mapping[str, Any]
    sparse_config: Mapping[str, Any]
    forecast: Mapping[str, Any] | None
    tensors: Mapping[str, TensorRecord]
    dropped: tuple[str, ...]

    def write(self, folder: Path) -> None:
        content = json.dumps(dataclasses.asdict(self), indent=1)
        (folder / MANIFEST_FILE).write_text(content + "\n")

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Reads and checks the structure of a folder's manifest.

        Raises:
            CheckpointError: not a manifest, or of a newer format.
        """
        data = read_json(folder / MANIFEST_FILE)
        if data.get("format_version") != FORMAT_VERSION:
            raise CheckpointError(
                f"{folder}: the manifest has format_version={data.get('format_version')!r}, this version of sparda_jax "
                f"reads {FORMAT_VERSION}; convert the source again"
            )
        try:
            tensors = {
                name: TensorRecord(**{**record, "shape": tuple(record["shape"])})
                for name, record in data["tensors"].items()
            }
            if not isinstance(data["forecast"], dict | None):
                raise TypeError("forecast is neither an object nor null")
            return cls(**{**data, "tensors": tensors, "dropped": tuple(data["dropped"])})
        except (TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{folder}: {MANIFEST_FILE} is incomplete ({error}); convert again") from error

    def check(self, folder: Path, parameters: tuple[Parameter, ...]) -> None:
        """Compares the recorded tensors with those of the model that the folder's ``config.json`` describes.

        Raises:
            CheckpointError: with the full list of differences.
        """
        wanted = {tensor.name: tensor.shape for parameter in parameters for tensor in parameter.tensors}
        problems = [f"missing: {name} {list(shape)}" for name, shape in wanted.items() if name not in self.tensors]
        problems += [f"unexpected: {name}" for name in self.tensors if name not in wanted]
        problems += [
            f"misshaped: {name} is {list(self.tensors[name].shape)}, config.json asks for {list(shape)}"
            for name, shape in wanted.items()
            if name in self.tensors and self.tensors[name].shape != shape
        ]
        if problems:
            way_out = "config.json was changed, or is another model's: convert again."
            raise CheckpointError.listing(str(folder), problems, way_out)
