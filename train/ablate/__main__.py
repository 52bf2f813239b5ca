"""``python -m sparda_jax.train.ablate NAME``: what one choice in the Forecast is worth, all else equal."""

from pathlib import Path
from typing import Annotated

import jax
import typer
from rich.console import Console

from sparda_jax.assets import BUNDLED_MODEL
from sparda_jax.bench._options import check_writable, whole_numbers
from sparda_jax.bench.plot import check_picture
from sparda_jax.checkpoint import CheckpointError, open_weights
from sparda_jax.config import ConfigError
from sparda_jax.pretrain.tasks import EVAL_KINDS
from sparda_jax.tokenizer import TokenizerError
from sparda_jax.train.ablate.cases import Ablation
from sparda_jax.train.ablate.config import AblateConfig
from sparda_jax.train.ablate.plot import draw
from sparda_jax.train.ablate.run import run_ablation, write_record
from sparda_jax.train.config import TrainConfig
from sparda_jax.train.errors import TrainingError
from sparda_jax.train.forecast import Start

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def ablate(
    ablation: Annotated[Ablation, typer.Argument(help="What is compared.")],
    out: Annotated[Path, typer.Option(help="Folder of what is trained and measured; shared by all ablations.")],
    model: Annotated[Path, typer.Option(help="A checkpoint folder.")] = BUNDLED_MODEL,
    data: Annotated[
        list[Path] | None, typer.Option(help="Texts or token ids to train on, as `python -m sparda_jax.train` takes.")
    ] = None,
    validation: Annotated[list[Path] | None, typer.Option(help="Texts to validate with; else some of --data.")] = None,
    prompts_data: Annotated[
        Path, typer.Option(help="Folder that `python -m sparda_jax.pretrain.prepare` wrote, for the questions.")
    ] = Path(".data/pretrain"),
    seq_len: Annotated[int, typer.Option(help="Tokens of a row.")] = 8192,
    batch_size: Annotated[int, typer.Option(help="Rows of a step.")] = 16,
    micro_batch_size: Annotated[int, typer.Option(help="Rows at a time.")] = 1,
    steps: Annotated[int, typer.Option(help="Of every variant.")] = 100,
    learning_rate: Annotated[float, typer.Option(help="After the warm-up.")] = 1e-3,
    final_learning_rate: Annotated[float, typer.Option(help="Where the cosine ends.")] = 1e-5,
    warmup_steps: Annotated[int, typer.Option(help="Linear from 0.")] = 10,
    validation_rows: Annotated[int, typer.Option(help="Documents to validate with, at most.")] = 32,
    save_every: Annotated[int, typer.Option(help="Steps from checkpoint to checkpoint.")] = 50,
    start: Annotated[Start, typer.Option(help="What every variant begins with.")] = Start.QUERIES,
    activations: Annotated[
        Path | None, typer.Option(help="Folder for what the base computes for each row, once for all variants.")
    ] = None,
    kinds: Annotated[str, typer.Option(help=f"Questions: {', '.join(EVAL_KINDS)}.")] = "single,multikey",
    lengths: Annotated[str, typer.Option(help="Tokens of a prompt, comma-separated.")] = "4096,8192",
    prompts: Annotated[int, typer.Option(help="Questions of each kind and length; 0: none.")] = 100,
    seed: Annotated[int, typer.Option(help="Of the rows' order, and of the questions.")] = 42,
    rows: Annotated[str, typer.Option(help="Labels of rows, separated by '/', if not all.")] = "",
    throughput: Annotated[
        Path | None, typer.Option(help="For `predictor`: what `python -m sparda_jax.bench decode --json` wrote.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16 or float32. Without: bfloat16 on a GPU.")] = None,
    json_out: Annotated[Path | None, typer.Option("--json", help="Where the result goes.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw it: .png or .svg.")] = None,
    commit: Annotated[str | None, typer.Option(help="The commit to record where git can't tell.")] = None,
) -> None:
    """Train the variants of an ablation, measure them, and write rows and a picture.

    What --out holds already is not done again, so a call that was stopped goes on when it is made again.
    """
    check_writable(json_out)
    check_picture(plot)
    if throughput is not None and ablation is not Ablation.PREDICTOR:
        raise typer.BadParameter("--throughput belongs to the ablation `predictor`.")
    console = Console(soft_wrap=True)
    try:
        layers = open_weights(model).config.num_layers
        training = None
        if data:
            training = TrainConfig(
                seq_len=seq_len,
                batch_size=batch_size,
                micro_batch_size=max(jax.device_count(), micro_batch_size),
                steps=steps,
                learning_rate=learning_rate,
                final_learning_rate=final_learning_rate,
                warmup_steps=warmup_steps,
                seed=seed,
                save_every=save_every,
                keep=1,
                validation_rows=validation_rows,
                start=start,
                layers=None if activations is None else tuple(range(layers)),
            )
        config = AblateConfig(
            model=model,
            dtype=dtype,
            data=tuple(data or ()),
            validation=tuple(validation or ()),
            training=training,
            activations=activations,
            prompts_data=prompts_data,
            kinds=tuple(kinds.split(",")),
            lengths=tuple(whole_numbers("--lengths", lengths)),
            prompts=prompts,
            seed=seed,
            out=out,
        )
        only = rows.split("/") if rows else []
        record = run_ablation(ablation, config, console, only=only, throughput=throughput, commit=commit)
    except (TrainingError, CheckpointError, ConfigError, TokenizerError, OSError, ValueError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    if json_out is not None:
        write_record(record, json_out)
    if plot is not None:
        draw(record, plot)


if __name__ == "__main__":
    app()
