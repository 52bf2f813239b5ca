"""A whole run: everything is checked and loaded, trained, and written."""

import contextlib
import dataclasses
import hashlib
import json
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float32
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from sparda_jax.checkpoint import load_model, open_weights
from sparda_jax.checkpoint.atomic import atomic_file
from sparda_jax.config import ModelConfig
from sparda_jax.model import Decoder
from sparda_jax.tokenizer import Tokenizer
from sparda_jax.train.activations import CachedForward, check_rows
from sparda_jax.train.checkpoints import Checkpoints
from sparda_jax.train.config import TrainConfig
from sparda_jax.train.corpus import Corpus, check_tokenizer, load_corpus
from sparda_jax.train.curves import check_plot, draw_curves
from sparda_jax.train.data import Batch, TrainingRows, hold_out, validation_batches
from sparda_jax.train.errors import TrainingError
from sparda_jax.train.fingerprint import base_fingerprint
from sparda_jax.train.flops import peak_flops
from sparda_jax.train.forecast import Start, check_export, export, fresh_weights, query_weights, read_weights
from sparda_jax.train.forward import ForwardPass
from sparda_jax.train.log import RunLog, SilentLog
from sparda_jax.train.mesh import make_mesh
from sparda_jax.train.mixture import PERIOD, read_mixture
from sparda_jax.train.packing import shortest_document
from sparda_jax.train.processes import agreed, first_before_others, is_first, own_rows
from sparda_jax.train.state import TrainState
from sparda_jax.train.trainer import Trainer

CHECKPOINTS, TOKENS, CONFIG_FILE, CURVES = "checkpoints", "tokens", "config.json", "curves.png"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFiles:
    """What a run reads and writes.

    Attributes:
        model: folder of the base, which stays as it is; dtype of its weights, None for the default of `load_model`.
        data, validation: texts or token ids; without the latter, documents of ``data`` are held out.
        mixture: weights of the domains of ``data``, see `read_mixture`.
        out: folder of the run. cache: of tokenised text; None: in ``out``.
        init_forecast: where the weights come from; None: `TrainConfig.start` says.
        export_forecast: the file to write at the end, with the best step's weights; overwrite: also if it exists.
        resume: go on from ``resume_step``, or from the newest checkpoint if that is None.
        print_every: steps between two lines on the console.
        plot: draw the curves at the end.
        activations: folder of what the base computes, for `TrainConfig.layers`.
        peak_tflops: of one device, for the MFU; None: what its data sheet says, if it is known.
    """

    model: Path
    dtype: str | None = None
    data: Sequence[Path]
    validation: Sequence[Path] = ()
    mixture: Sequence[str] = ()
    out: Path
    cache: Path | None = None
    init_forecast: Path | None = None
    export_forecast: Path | None = None
    overwrite: bool = False
    resume: bool = False
    resume_step: int | None = None
    print_every: int = 10
    plot: bool = False
    activations: Path | None = None
    peak_tflops: float | None = None

    def __post_init__(self) -> None:
        if self.export_forecast is not None:
            check_export(self.export_forecast, overwrite=self.overwrite)
        if self.plot:
            check_plot()
        if self.init_forecast is not None and self.resume:
            raise TrainingError("--resume goes on with the weights in --out; it can't be combined with --init-forecast")
        if self.dtype not in (None, "float32", "bfloat16"):
            raise TrainingError(f"--dtype {self.dtype}: use float32 or bfloat16")
        if self.peak_tflops is not None and not self.peak_tflops > 0:
            raise TrainingError(f"--peak-tflops {self.peak_tflops}: it must be positive")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunData:
    """The rows to train on, batches to validate with, and a hash of both."""

    train: TrainingRows
    validation: list[Batch]
    fingerprint: str


def run(config: TrainConfig, files: RunFiles, console: Console) -> TrainState:
    """Trains on all devices of all processes, until the configured step or until SIGTERM or Ctrl-C.

    Raises:
        TrainingError, CheckpointError, ConfigError, TokenizerError, OSError: the message says why, and nothing that was
            written before is lost.
    """
    description = open_weights(files.model).config
    config.check_model(description)
    mesh = make_mesh(jax.devices(), fsdp=config.fsdp, sequence=config.sequence_shards)
    config.check_devices(jax.device_count())
    if (config.layers is None) != (files.activations is None):
        raise TrainingError("layers that train on their own need a folder for activations, and only they")
    if config.layers is not None:
        check_rows(mesh)
    if files.resume and not (files.out / CHECKPOINTS).is_dir():
        raise TrainingError(f"{files.out} holds no checkpoint; start without --resume, or name the --out of a run")
    check_tokenizer(Tokenizer.from_pretrained(files.model), description)
    data = load_data(config, description, files, console)
    base = load_model(files.model, dtype=files.dtype)
    base_hash = base_fingerprint(base)
    identity = config.identity() | {"base": base_hash, "data": data.fingerprint}
    forward = _make_forward(config, files, base, mesh, base_hash)
    if isinstance(forward, CachedForward):
        rows = min(data.train.packing.num_rows, config.steps * config.batch_size)
        gigabytes = forward.bytes_of_row(config.seq_len) / 1e9
        console.print(
            f"{files.activations}: {gigabytes:.3g} GB for each of {rows:,} rows, and of those to validate with"
        )
    weights = _first_weights(config, files, base)
    del base  # its arrays are on the mesh now
    with (
        Checkpoints(files.out / CHECKPOINTS, keep=config.keep, identity=identity) as checkpoints,
        _open_log(config, files, console) as log,
        _stop_on_signal(console) as should_stop,
    ):
        trainer = Trainer(
            config,
            forward,
            data.train,
            data.validation,
            report=log,
            should_stop=agreed(should_stop),
            peak_flops=_peak_flops(files),
        )
        state = _first_state(files, trainer, weights, checkpoints)
        if is_first():
            _record_config(config, files)
        log.begin(int(state.step))
        if int(state.step) >= config.steps:
            console.print(f"nothing to train: {int(state.step)} steps are done; a larger --steps goes on")
        state = trainer.run(state, checkpoints)
        log.end()
        _finish(config, files, console, trainer, forward.config, state, checkpoints)
        return state


def load_data(config: TrainConfig, model: ModelConfig, files: RunFiles, console: Console) -> RunData:
    """Tokenises what is not yet, sets documents aside and packs the others.

    Raises:
        TrainingError: there is no text that anything can be learnt from.
    """
    shortest = shortest_document(model.sparse)
    corpus = _tokenise(files.data, files, console)
    mixture = read_mixture(files.mixture, corpus.domains)
    split = hold_out(corpus, shortest, 0 if files.validation else config.validation_rows)
    checked, documents = corpus, split.validation
    if files.validation:
        checked = _tokenise(files.validation, files, console)
        documents = np.arange(len(checked.lengths))
    rows = TrainingRows(
        corpus,
        split.train,
        seq_len=config.seq_len,
        sparse=model.sparse,
        seed=config.seed,
        batch_rows=config.micro_batch_size,
        mixture=mixture,
        process=jax.process_index(),
        num_processes=jax.process_count(),
    )
    batches: list[Batch] = []
    if len(documents) and config.validation_rows:
        batches = validation_batches(
            checked,
            documents,
            seq_len=config.seq_len,
            sparse=model.sparse,
            batch_rows=config.micro_batch_size,
            max_rows=config.validation_rows,
        )
    found = sum(int((batch.segments[:, 0] > 0).sum()) for batch in batches)
    too_few = config.validation_rows and not found
    why = f" (of ten documents of {shortest} tokens or more one is held out; --validation names others)"
    pieces = rows.packing.pieces
    console.print(
        f"{len(corpus.lengths)} documents, {corpus.tokens.size:,} tokens: {rows.packing.num_rows:,} rows of "
        f"{config.seq_len}, {rows.filled:.0%} full; {pieces.dropped_tokens:,} tokens in pieces of less than {shortest} "
        f"left out; validation documents: {found}{why if too_few else ''}"
    )
    if mixture:
        parts = (f"{name} {mixture[name] / PERIOD:.1%} of {count:,} rows" for name, count in rows.domain_rows.items())
        console.print(f"mixture: {', '.join(parts)}")
    held_out = hashlib.sha256(f"{corpus.fingerprint} {checked.fingerprint} {documents.tolist()}".encode())
    if mixture:
        held_out.update(json.dumps(mixture, sort_keys=True).encode())
    shares = [own_rows(batch) for batch in batches]
    return RunData(train=rows, validation=shares, fingerprint=held_out.hexdigest()[:16])


def _tokenise(paths: Sequence[Path], files: RunFiles, console: Console) -> Corpus:
    cache = files.cache or files.out / TOKENS
    columns = (TextColumn("tokenise"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    with first_before_others("tokens"), Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("")
        return load_corpus(
            paths, files.model, cache, progress=lambda done, total: bar.update(task, completed=done, total=total)
        )


def _make_forward(config: TrainConfig, files: RunFiles, base: Decoder, mesh: Mesh, base_hash: str) -> ForwardPass:
    if config.layers is None or files.activations is None:
        return ForwardPass(base, mesh, objective=config.objective)
    folder = files.activations / base_hash.replace(" ", "-")
    return CachedForward(base, mesh, folder, config.layers, objective=config.objective)


def _peak_flops(files: RunFiles) -> float | None:
    """Of this process's devices, whose rows it counts."""
    devices = jax.local_devices()
    return peak_flops(devices) if files.peak_tflops is None else 1e12 * files.peak_tflops * len(devices)


def _first_weights(config: TrainConfig, files: RunFiles, base: Decoder) -> Float32[np.ndarray, "layers hidden outputs"]:
    if files.init_forecast is not None:
        return read_weights(files.init_forecast, base.config)
    return query_weights(base) if config.start is Start.QUERIES else fresh_weights(base.config, config.seed)


def _first_state(
    files: RunFiles,
    trainer: Trainer,
    weights: Float32[np.ndarray, "layers hidden outputs"],
    checkpoints: Checkpoints,
) -> TrainState:
    if checkpoints.steps and not files.resume:
        raise TrainingError(
            f"{files.out} holds a run up to step {checkpoints.steps[-1]}; --resume goes on with it, or give another "
            "--out"
        )
    state = trainer.initial_state(jnp.asarray(weights))
    if files.resume:
        state = checkpoints.restore(files.resume_step, state)
        checkpoints.drop_after(int(state.step))
    return state


def _finish(
    config: TrainConfig,
    files: RunFiles,
    console: Console,
    trainer: Trainer,
    model: ModelConfig,
    state: TrainState,
    checkpoints: Checkpoints,
) -> None:
    step, target = int(state.step), files.export_forecast
    if step < config.steps:
        console.print(f"stopped after step {step}; --resume goes on from there")
    elif target is not None:
        best = checkpoints.best_step
        if best is not None and best != step:
            state = checkpoints.restore(best, state)
        weights, base = np.asarray(state.weights), describe_path(files.model)
        if not is_first():
            return
        export(target, weights, model, step=int(state.step), base=base, overwrite=files.overwrite)
        console.print(f"{target}: the Forecast of step {int(state.step)}")
    if files.plot and is_first():
        draw_curves(files.out, files.out / CURVES)


def _open_log(config: TrainConfig, files: RunFiles, console: Console) -> RunLog | SilentLog:
    if not is_first():
        return SilentLog()
    return RunLog(files.out, steps=config.steps, console=console, print_every=files.print_every)


def _record_config(config: TrainConfig, files: RunFiles) -> None:
    content = dataclasses.asdict(config) | {"model": describe_path(files.model), "devices": jax.device_count()}
    with atomic_file(files.out / CONFIG_FILE, overwrite=True) as temporary:
        temporary.write_text(json.dumps(content, indent=1) + "\n")


def describe_path(path: Path) -> str:
    """How a model's folder is recorded: in a Hugging Face cache ``ORG/NAME``, else by its last part."""
    parts = path.absolute().parts
    if len(parts) >= 3 and parts[-2] == "snapshots" and parts[-3].startswith("models--"):
        return parts[-3].removeprefix("models--").replace("--", "/")
    return path.absolute().name


@contextlib.contextmanager
def _stop_on_signal(console: Console) -> Iterator[Callable[[], bool]]:
    """Gives a function that says whether SIGTERM or Ctrl-C came; the second Ctrl-C ends the process at once."""
    came: list[int] = []

    def note(number: int, _frame: object) -> None:
        came.append(number)
        console.print("stopping after this step, with a checkpoint")
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: bool(came)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
