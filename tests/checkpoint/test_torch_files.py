"""PyTorch files, made by PyTorch 2.13 (tests/data/torch_fixtures.py), read without it."""

import shutil
import zipfile
import zlib
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from sparda_jax.checkpoint import CheckpointError, load_model
from sparda_jax.checkpoint.tensor_files import open_tensors

from .checkpoints import BFLOAT16

DATA = Path(__file__).parent.parent / "data"


def pattern(name: str, *shape: int) -> np.ndarray:
    count = int(np.prod(shape))
    values = (np.arange(count) * 7919 + zlib.crc32(name.encode())) % 251 - 125
    return (values / 512).astype(np.float32).reshape(shape).astype(BFLOAT16)


def read(path: Path) -> dict[str, np.ndarray]:
    return {name: entry.read() for name, entry in open_tensors(path).entries.items()}


def test_dtypes_strides_offsets_and_parameters() -> None:
    values = read(DATA / "torch_tensors.pt")
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    assert values["bf16"].dtype == BFLOAT16
    assert np.array_equal(values["bf16"].view(np.int16), (np.arange(128) * 517 - 2**15).astype(np.int16))
    assert values["f16"].tobytes() == np.array([1.5, -0.0, 6e-8], np.float16).tobytes()
    assert np.array_equal(values["f32"], base)
    assert np.array_equal(values["transposed"], base.T)
    assert np.array_equal(values["sliced"], base[1:3, 2:5])
    assert np.array_equal(values["parameter"], base[0] + 0.5)
    assert values["long"].tolist() == [0, 1, 2]


def test_values_are_a_read_only_view_of_the_file() -> None:
    value = read(DATA / "torch_tensors.pt")["f32"]
    assert not value.flags.writeable
    assert not value.flags.owndata


def test_sharded_bin_files_load_as_the_model() -> None:
    model = load_model(DATA / "torch_sharded", dtype=jnp.bfloat16)
    prefix = "model.layers.1.self_attn."
    rows = [pattern(f"{prefix}{name}_proj.weight", size, 32) for name, size in (("q", 32), ("k", 16), ("v", 16))]
    assert np.array_equal(model.layers[1].self_attn.qkvf_proj.kernel[...], np.concatenate(rows).T)
    down = pattern("model.layers.1.mlp.down_proj.weight", 32, 48)  # saved with the strides of a transpose
    assert np.array_equal(model.layers[1].mlp.down_proj.kernel[...], down.T)
    assert np.array_equal(model.embed_tokens[...], pattern("model.embed_tokens.weight", 48, 32))


def test_trainer_dictionary_gives_the_weights_and_lists_the_rest() -> None:
    files = open_tensors(DATA / "torch_trainer.pt")
    names = {f"model.layers.{layer}.self_attn.q_future_proj.weight" for layer in range(3)}
    names.add("model.layers.0.self_attn.q_curr_proj.weight")  # "module." is stripped
    assert files.entries.keys() == names
    assert all(np.array_equal(entry.read(), pattern(name, 32, 64)) for name, entry in files.entries.items())
    assert files.metadata["step"] == 2000
    assert files.metadata["base_model_path"] == "openbmb/MiniCPM4.1-8B"
    assert files.metadata["sparse_config"]["window_size"] == 1024
    assert {"optimizer_state_dict", "rng_state", "scheduler_state_dict"} <= set(files.foreign)


def test_a_pickle_that_would_run_something_is_refused_by_name() -> None:
    with pytest.raises(
        CheckpointError, match=r"torch_command\.pt: the pickle asks for posix\.system, which is refused"
    ):
        open_tensors(DATA / "torch_command.pt")


def test_the_legacy_format_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"torch_legacy\.pt is in PyTorch's legacy format .* save it again"):
        open_tensors(DATA / "torch_legacy.pt")


def test_a_tar_file_is_called_legacy_too(tmp_path: Path) -> None:
    path = tmp_path / "old.pt"
    path.write_bytes(b"\0" * 257 + b"ustar" + b"\0" * 300)
    with pytest.raises(CheckpointError, match="legacy format"):
        open_tensors(path)


def test_a_file_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cut.pt"
    path.write_bytes((DATA / "torch_tensors.pt").read_bytes()[:-700])
    with pytest.raises(CheckpointError, match=r"cut\.pt is no whole file of torch\.save .* fetch it again"):
        open_tensors(path)


def repack(target: Path, change: dict[str, bytes | None], compression: int = zipfile.ZIP_STORED) -> Path:
    """The fixture with members replaced (None: left out, a new name: added)."""
    with zipfile.ZipFile(DATA / "torch_tensors.pt") as source, zipfile.ZipFile(target, "w", compression) as out:
        root = source.namelist()[0].split("/")[0]
        contents = {name: source.read(name) for name in source.namelist()}
        for name, content in (contents | {f"{root}/{key}": value for key, value in change.items()}).items():
            if content is not None:
                out.writestr(name, content)
    return target


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data/0": b"\0" * 10}, r"storage '0' has 10 bytes, its tensor asks for 256"),
        ({"data/0": None}, r"storage '0' is missing"),
        ({"constants.pkl": b""}, "is a TorchScript program"),
        ({"byteorder": b"big"}, "big-endian"),
        ({"data.pkl": None}, r"not one of torch\.save"),
        ({"data.pkl": b"\x80\x02}q\x00X"}, "its pickle cannot be read"),
    ],
)
def test_damaged_archives_are_refused(tmp_path: Path, change: dict[str, bytes | None], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(repack(tmp_path / "changed.pt", change))


def test_a_compressed_archive_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is compressed"):
        read(repack(tmp_path / "packed.pt", {}, zipfile.ZIP_DEFLATED))


def test_a_tensor_that_reaches_outside_of_its_storage_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(DATA / "torch_tensors.pt") as archive:
        name = next(n for n in archive.namelist() if n.endswith("data.pkl"))
        content = archive.read(name)
    longer = content.replace(b"K\x80\x85", b"K\x81\x85", 1)  # shape (128,) -> (129,)
    assert longer != content
    with pytest.raises(CheckpointError, match=r"shape \(129,\) is not within its 128 elements"):
        read(repack(tmp_path / "longer.pt", {"data.pkl": longer}))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = shutil.copytree(DATA / "torch_sharded", tmp_path / "model")
    (folder / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(CheckpointError, match=r"lacks shards .*: pytorch_model-00002-of-00002\.bin"):
        open_tensors(folder)
