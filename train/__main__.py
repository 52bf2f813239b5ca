"""``python -m sparda_jax.train``: trains the Forecast of a frozen model; ``... retokenise`` makes data fit a model."""

from pathlib import Path
from typing import Annotated, Any

import jax
import typer
from rich.console import Console
from typer.core import TyperGroup

from sparda_jax.checkpoint import CheckpointError, open_weights
from sparda_jax.config import ConfigError
from sparda_jax.tokenizer import Tokenizer, TokenizerError
from sparda_jax.train.config import TrainConfig
from sparda_jax.train.divergence import Objective
from sparda_jax.train.errors import TrainingError
from sparda_jax.train.forecast import Start
from sparda_jax.train.processes import is_first, join
from sparda_jax.train.retokenise import report
from sparda_jax.train.retokeniser import Retokeniser
from sparda_jax.train.run import RunFiles, run

PROGRAMS = "programs"


class _TrainsByDefault(TyperGroup):
    """Arguments that begin with no command's name are those of ``train``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args if args[:1] and args[0] in self.commands else ["train", *args])


app = typer.Typer(add_completion=False, rich_markup_mode=None, cls=_TrainsByDefault)


@app.command()
def train(
    model: Annotated[Path, typer.Option(help="Folder of the base model (Hugging Face, or converted); it stays as is.")],
    data: Annotated[
        list[Path], typer.Option(help="A .txt, .jsonl or .parquet file, an MDS data set, or a folder of them.")
    ],
    out: Annotated[Path, typer.Option(help="Folder of the run: checkpoints, metrics, tokenised text.")],
    validation: Annotated[
        list[Path] | None, typer.Option(help="Texts to validate with. Without: documents are held out of --data.")
    ] = None,
    mix: Annotated[
        list[str] | None,
        typer.Option(help="NAME=WEIGHT for each domain of --data, or prolong: the published ones. Without: as found."),
    ] = None,
    validation_rows: Annotated[
        int, typer.Option(help="Documents to validate with, at most; 0: none.")
    ] = TrainConfig.validation_rows,
    seq_len: Annotated[int | None, typer.Option(help="Tokens of a row. Without: the model's whole context.")] = None,
    batch_size: Annotated[int, typer.Option(help="Rows of a step, over all devices.")] = TrainConfig.batch_size,
    micro_batch_size: Annotated[
        int | None, typer.Option(help="Rows that go through the model together. Without: as many as devices can share.")
    ] = None,
    fsdp: Annotated[int, typer.Option(help="Devices that share one copy of the base.")] = TrainConfig.fsdp,
    sequence_shards: Annotated[
        int, typer.Option(help="Devices of a process that share a row.")
    ] = TrainConfig.sequence_shards,
    steps: Annotated[int, typer.Option(help="Optimiser steps.")] = TrainConfig.steps,
    learning_rate: Annotated[float, typer.Option(help="After the warm-up.")] = TrainConfig.learning_rate,
    final_learning_rate: Annotated[
        float, typer.Option(help="Where the cosine ends.")
    ] = TrainConfig.final_learning_rate,
    warmup_steps: Annotated[int, typer.Option(help="At most a tenth of --steps.")] = TrainConfig.warmup_steps,
    weight_decay: Annotated[float, typer.Option(help="Of AdamW.")] = TrainConfig.weight_decay,
    max_grad_norm: Annotated[float, typer.Option(help="Clip to this norm; 0: never.")] = TrainConfig.max_grad_norm,
    seed: Annotated[int, typer.Option(help="Of random weights and of the order of rows.")] = TrainConfig.seed,
    dtype: Annotated[
        str | None, typer.Option(help="Of the base: bfloat16 or float32. Without: bfloat16 on a GPU.")
    ] = None,
    save_every: Annotated[int, typer.Option(help="Steps from checkpoint to checkpoint.")] = TrainConfig.save_every,
    keep: Annotated[int, typer.Option(help="Newest checkpoints to keep, besides the best.")] = TrainConfig.keep,
    print_every: Annotated[int, typer.Option(help="Steps from line to line on the console.")] = RunFiles.print_every,
    init_forecast: Annotated[
        Path | None, typer.Option(help="Start from this Forecast (.safetensors, .pt, or a folder with one).")
    ] = None,
    start: Annotated[
        Start, typer.Option(help="Without --init-forecast: the base's own queries, averaged over a group; or random.")
    ] = TrainConfig.start,
    objective: Annotated[
        Objective,
        typer.Option(
            help="published: every query alike; blocks: above all those that look for one block; "
            "chosen: published without the rest."
        ),
    ] = TrainConfig.objective,
    export_forecast: Annotated[
        Path | None, typer.Option(help="At the end, write the best step's Forecast: .safetensors or .pt.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing --export-forecast.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in --out.")] = False,
    resume_step: Annotated[
        int | None, typer.Option(help="Go on from this step; checkpoints of later ones are removed.")
    ] = None,
    cache: Annotated[Path | None, typer.Option(help="Folder for tokenised text. Without: in --out.")] = None,
    coordinator: Annotated[
        str | None, typer.Option(help="Of a run of several processes: host:port where the first one listens.")
    ] = None,
    num_processes: Annotated[
        int | None, typer.Option(help="With --coordinator; without: what Slurm or MPI says.")
    ] = None,
    process_id: Annotated[
        int | None, typer.Option(help="This process, from 0; without: what Slurm or MPI says.")
    ] = None,
    activations: Annotated[
        Path | None,
        typer.Option(help="Train each layer on its own, from what the base computes once and this folder keeps."),
    ] = None,
    layers: Annotated[
        str | None, typer.Option(help="With --activations: these only, comma-separated. Without: all.")
    ] = None,
    peak_tflops: Annotated[
        float | None, typer.Option(help="Of one device, for the MFU. Without: its data sheet's in bf16, if known.")
    ] = None,
    plot: Annotated[bool, typer.Option("--plot", help="At the end, draw curves.png (needs matplotlib).")] = False,
) -> None:
    """Train the Forecast of a frozen model on text, on all devices of this process, or of all with --coordinator.

    ``python -m sparda_jax.train retokenise`` makes data of another tokenizer fit.
    """
    try:
        if coordinator is not None:
            join(coordinator, num_processes, process_id)
        elif num_processes is not None or process_id is not None:
            raise TrainingError("--num-processes and --process-id need --coordinator HOST:PORT")
        if layers is not None and activations is None:
            raise TrainingError("--layers needs --activations FOLDER")
        _keep_programs(out / PROGRAMS)
        description = open_weights(model).config
        config = TrainConfig(
            seq_len=description.max_position_embeddings if seq_len is None else seq_len,
            batch_size=batch_size,
            micro_batch_size=max(jax.device_count() // max(sequence_shards, 1), 1)
            if micro_batch_size is None
            else micro_batch_size,
            steps=steps,
            learning_rate=learning_rate,
            final_learning_rate=final_learning_rate,
            warmup_steps=warmup_steps,
            weight_decay=weight_decay,
            max_grad_norm=max_grad_norm,
            seed=seed,
            save_every=save_every,
            keep=keep,
            validation_rows=validation_rows,
            start=start,
            objective=objective,
            fsdp=fsdp,
            sequence_shards=sequence_shards,
            layers=None if activations is None else _layers(layers, description.num_layers),
        )
        files = RunFiles(
            model=model,
            dtype=dtype,
            data=data,
            validation=validation or (),
            mixture=mix or (),
            out=out,
            cache=cache,
            init_forecast=init_forecast,
            export_forecast=export_forecast,
            overwrite=overwrite,
            resume=resume or resume_step is not None,
            resume_step=resume_step,
            print_every=print_every,
            plot=plot,
            activations=activations,
            peak_tflops=peak_tflops,
        )
        run(config, files, Console(quiet=not is_first()))
    except (TrainingError, CheckpointError, ConfigError, TokenizerError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error


@app.command("retokenise")
def retokenise_command(
    src: Annotated[list[Path], typer.Argument(help="What --data takes: texts, or ids of another tokenizer.")],
    dst: Annotated[Path, typer.Argument(help="Folder to write into: a data set for each domain.")],
    tokenizer: Annotated[Path, typer.Option(help="Folder of the model or tokenizer whose ids are made.")],
    source_tokenizer: Annotated[
        Path | None, typer.Option(help="Folder of the tokenizer that made the ids in SRC; texts need none.")
    ] = None,
) -> None:
    """Make token ids for a model from texts or from another tokenizer's ids, in MDS shards; documents stay apart.

    A call that was interrupted goes on when it is made again.
    """
    try:
        source = None if source_tokenizer is None else Tokenizer.from_pretrained(source_tokenizer)
        report(src, dst, Retokeniser(Tokenizer.from_pretrained(tokenizer), source), Console())
    except (TrainingError, CheckpointError, TokenizerError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error


def _layers(text: str | None, count: int) -> tuple[int, ...]:
    if text is None:
        return tuple(range(count))
    try:
        return tuple(sorted(int(part) for part in text.split(",")))
    except ValueError:
        raise TrainingError(f"--layers {text}: give whole numbers, separated by commas") from None


def _keep_programs(folder: Path) -> None:
    """A GPU's compiler picks the fastest of several kernels by measuring, and may pick another the next time: a resumed
    run takes the programs of the one that it goes on with, so that it goes on bit for bit.
    """
    if jax.default_backend() != "cpu" and not jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", str(folder.absolute()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


if __name__ == "__main__":
    app()
