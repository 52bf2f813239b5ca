"""``python -m sparda_jax.serve``: an OpenAI-compatible server for one model."""

from pathlib import Path
from typing import Annotated, Literal

import typer

app = typer.Typer(add_completion=False, rich_markup_mode=None)

ServedMode = Literal["dense", "sparse", "sparda", "sparda-decode-only", "infinigen", "random"]


@app.command()
def main(
    model: Annotated[
        Path | None, typer.Option(help="Hugging Face or converted checkpoint; the bundled model when left out.")
    ] = None,
    mode: Annotated[
        ServedMode | None,
        typer.Option(
            help="How the blocks that a token reads are chosen; if left out, sparda with a Forecast and sparse without."
        ),
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(help="Longest sequence in tokens, prompt and answer; the model's own limit if left out."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for every interface.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 for any free one.")] = 8000,
    model_name: Annotated[
        str | None, typer.Option(help="Name that requests use; the folder's name if left out.")
    ] = None,
    forecast: Annotated[
        Path | None, typer.Option(help="Forecast file for the sparda modes, in place of the checkpoint's own.")
    ] = None,
    long_context: Annotated[
        bool, typer.Option("--long-context", help="Use the published 128K LongRoPE factors (MiniCPM4.1 only).")
    ] = False,
    dtype: Annotated[
        Literal["auto", "bfloat16", "float32"], typer.Option(help="auto: bfloat16 on a GPU, float32 on a CPU.")
    ] = "auto",
    max_active: Annotated[
        int | None,
        typer.Option(
            "--max-active",
            "--batch",
            help="Decode lanes: sequences in one step; what fits, up to 16 on a GPU and 4 on a CPU, if left out.",
        ),
    ] = None,
    slots: Annotated[
        int | None,
        typer.Option(help="Blocks in device memory per lane, layer and KV head; as many as fit if left out."),
    ] = None,
    host_pool_gib: Annotated[
        float | None, typer.Option(help="Size of the pinned host pool; all lanes at full length if left out.")
    ] = None,
    kv_host_dtype: Annotated[
        Literal["auto", "int8", "fp8"],
        typer.Option(help="Keys and values on the host; int8 and fp8 (a scale per row) take half of bfloat16's bytes."),
    ] = "auto",
    copy_ctas: Annotated[
        int | None,
        typer.Option(help="Thread blocks of the kernel that fetches blocks; timed at start if left out."),
    ] = None,
    prefix_cache: Annotated[
        bool,
        typer.Option("--prefix-cache/--no-prefix-cache", help="Keep finished blocks for prompts that begin alike."),
    ] = True,
    sample_every: Annotated[
        int | None,
        typer.Option(
            help="Every so many decode steps, one is compared with the layers' own selections and the next one timed, "
            "for /metrics; 0: never. 1000 on a GPU and 0 on a CPU if left out."
        ),
    ] = None,
    prefill_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens of a prompt that are prefilled between two decode steps, at most: more for throughput, fewer "
            "for even token times. 4096 on a GPU and 128 on a CPU if left out."
        ),
    ] = None,
    deterministic: Annotated[
        bool,
        typer.Option(
            "--deterministic",
            help="A request gives the same bits whatever was asked before or runs beside it: chunks of one size, "
            "prefixes reused in whole chunks only, no sampled steps.",
        ),
    ] = False,
    park_after: Annotated[
        int, typer.Option(help="Tokens after which a request gives up its lane if another one waits for it.")
    ] = 256,
    max_queue: Annotated[int, typer.Option(help="Sequences that may wait; more are refused with 429.")] = 64,
    warm_up_len: Annotated[
        int | None,
        typer.Option(help="Compile for sequences up to this many tokens before being ready; all if left out."),
    ] = None,
    drain_seconds: Annotated[
        float, typer.Option(help="How long requests may still take after SIGTERM or Ctrl-C.")
    ] = 30.0,
    stuck_seconds: Annotated[
        float, typer.Option(help="A single step that takes longer turns /health into 503.")
    ] = 300.0,
    request_seconds: Annotated[float, typer.Option(help="A request that takes longer in all fails.")] = 3600.0,
    access_log: Annotated[bool, typer.Option("--access-log", help="Log every request.")] = False,
    log_format: Annotated[
        Literal["text", "json"], typer.Option(help="Log lines for people, or one JSON object a line.")
    ] = "text",
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="SPARDA_API_KEY",
            help="Token that /v1, /tokenize, /detokenize and profiles ask for; open if left out. Better set in the "
            "environment: a command line can be read by every user of the machine.",
        ),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(help="Origin whose web pages may ask this server, such as https://example.org; repeatable."),
    ] = None,
    max_body_mib: Annotated[int, typer.Option(help="Larger request bodies are refused with 413.")] = 32,
    upload_seconds: Annotated[
        float, typer.Option(help="A request body that takes longer to arrive is refused with 408.")
    ] = 60.0,
    profile: Annotated[
        Path | None,
        typer.Option(
            help="Folder for JAX profiles, which POST /start_profile begins and /stop_profile ends; without it there "
            "are no such paths."
        ),
    ] = None,
    profile_seconds: Annotated[float, typer.Option(help="A profile that takes longer ends by itself.")] = 10.0,
) -> None:
    """Serve a model over HTTP: /v1/chat/completions, /v1/completions, /v1/models as OpenAI's; /health and /metrics."""
    # Only now, so that --help does not wait for JAX.
    from sparda_jax.checkpoint import CheckpointError
    from sparda_jax.config import ConfigError
    from sparda_jax.serve.launch import serve
    from sparda_jax.serve.logs import start_console
    from sparda_jax.serve.settings import Settings, SettingsError
    from sparda_jax.tokenizer import TokenizerError

    try:
        chosen = {} if model is None else {"model": model}
        settings = Settings(
            mode=mode,
            max_model_len=max_model_len,
            host=host,
            port=port,
            model_name=model_name,
            forecast=forecast,
            long_context=long_context,
            dtype=dtype,
            max_active=max_active,
            slots=slots,
            host_pool_gib=host_pool_gib,
            kv_host_dtype=kv_host_dtype,
            copy_ctas=copy_ctas,
            prefix_cache=prefix_cache,
            sample_every=sample_every,
            prefill_tokens=prefill_tokens,
            deterministic=deterministic,
            park_after=park_after,
            request_seconds=request_seconds,
            max_queue=max_queue,
            warm_up_len=warm_up_len,
            drain_seconds=drain_seconds,
            stuck_seconds=stuck_seconds,
            access_log=access_log,
            log_format=log_format,
            api_key=api_key,
            cors_origins=tuple(cors_origin or ()),
            max_body_mib=max_body_mib,
            upload_seconds=upload_seconds,
            profile=profile,
            profile_seconds=profile_seconds,
            **chosen,
        )
        serve(settings, start_console(log_format))
    except (SettingsError, ConfigError, CheckpointError, TokenizerError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error


if __name__ == "__main__":
    app()
