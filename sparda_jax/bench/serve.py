"""``python -m sparda_jax.bench serve``: requests over HTTP at a given rate, whether the server keeps up or not."""

import asyncio
import dataclasses
import math
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from sparda_jax.bench._load_client import OK, Outcome, Target, TargetError, client, find_target, send_all
from sparda_jax.bench._load_plan import Span, Workload, plan
from sparda_jax.bench._load_rows import Limits, Measured, draw, rows
from sparda_jax.bench._options import at_least, check_writable
from sparda_jax.bench._report import print_rows, write_json
from sparda_jax.bench.plot import check_picture, figure

console = Console(soft_wrap=True, width=None if sys.stdout.isatty() else 200)
METHOD = (
    "Open loop: Poisson arrivals, lengths and token ids are drawn from the seed before the first request, and each is "
    "sent when it is due. Prompts are ids of a sample text that the server tokenised, in random order, behind the "
    "shared prefix; greedy streams of exactly the length asked for, end-of-sequence tokens ignored. Times begin when a "
    "request was due, so they include what the client was late by (sent late). First token: the first event with text, "
    "so a token that is no whole character yet is not seen. Per output token: from there to the last event with text, "
    "over the tokens between, as the server counts them. Rates: over the seconds from the start to the end of the last "
    "request; tokens of answered requests only. goodput: requests answered within both limits. Percentiles: of those "
    "answered. One rate after another, each with a seed one higher than the one before, on an idle server that keeps "
    "its cache: a command that is run twice finds its prompts there."
)


def serve(
    url: Annotated[str, typer.Option(help="The server; if it wants a key, set SPARDA_API_KEY.")] = (
        "http://127.0.0.1:8000"
    ),
    rate: Annotated[str, typer.Option(help="Requests per second, comma-separated: one run for each.")] = "4",
    duration: Annotated[float, typer.Option(help="Seconds in which the requests of a run arrive.")] = 60.0,
    prompt_tokens: Annotated[
        str, typer.Option(help="Tokens of a prompt behind the shared prefix: a number, or LEAST:MOST.")
    ] = "1024:8192",
    output_tokens: Annotated[str, typer.Option(help="Tokens of an answer: a number, or LEAST:MOST.")] = "64:256",
    shared_prefix: Annotated[int, typer.Option(help="Tokens that every prompt begins with.")] = 0,
    ttft_slo: Annotated[
        float | None, typer.Option(help="Milliseconds to the first token that goodput allows; any if left out.")
    ] = None,
    tpot_slo: Annotated[
        float | None, typer.Option(help="Milliseconds per output token that goodput allows; any if left out.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of arrivals, lengths and tokens; another one, other prompts.")] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds after which a request counts as failed.")] = 600.0,
    json_out: Annotated[Path | None, typer.Option("--json", help="Also write the results here.")] = None,
    picture: Annotated[Path | None, typer.Option("--plot", help="Also draw them: .png or .svg.")] = None,
    commit: Annotated[str | None, typer.Option(help="The commit to record where git can't tell.")] = None,
) -> None:
    """Load a server over HTTP at a given rate: first tokens, tokens, whole answers, goodput, failures."""
    check_writable(json_out)
    check_picture(picture)
    if picture:
        figure()  # so that a missing matplotlib is told before the load
    at_least("--shared-prefix", shared_prefix, 0)
    at_least("--seed", seed, 0)
    for option, value in (("--duration", duration), ("--timeout", timeout)):
        _positive(option, value)
    for option, value in (("--ttft-slo", ttft_slo), ("--tpot-slo", tpot_slo)):
        if value is not None:
            _positive(option, value)
    prompt, output = Span.parse("--prompt-tokens", prompt_tokens), Span.parse("--output-tokens", output_tokens)
    workloads = [
        Workload(
            rate=each,
            duration=duration,
            prompt=prompt,
            output=output,
            shared_prefix=shared_prefix,
            seed=seed + number,
        )
        for number, each in enumerate(_rates(rate))
    ]
    try:
        target, measured = asyncio.run(_measure(url, workloads, timeout))
    except TargetError as error:
        raise typer.BadParameter(f"--url {url}: {error}.") from None
    limits = Limits(first=ttft_slo, per_token=tpot_slo)
    found = [row for run in measured for row in rows(run, limits)]
    device = target.about.get("device") or "a device that the server does not name"
    print_rows(found, console, device=device)
    if json_out is not None:
        details = {
            "server": {"url": url, "model": target.model, **target.about},
            "workloads": [dataclasses.asdict(workload) for workload in workloads],
            "requests": [[dataclasses.asdict(outcome) for outcome in run.outcomes] for run in measured],
        }
        write_json(
            json_out, found, what="the server over HTTP", method=METHOD, commit=commit, device=device, details=details
        )
    if picture is not None:
        draw(picture, measured, limits, f"{target.model} on {device}, seed {seed}")
    if not any(outcome.status == OK for run in measured for outcome in run.outcomes):
        raise typer.Exit(1)


async def _measure(url: str, workloads: list[Workload], timeout: float) -> tuple[Target, list[Measured]]:
    measured = []
    async with client(url, os.environ.get("SPARDA_API_KEY")) as http:
        target = await find_target(http)
        longest, limit = max(workload.longest for workload in workloads), target.max_model_len
        if limit is not None and longest > limit:
            raise TargetError(
                f"it takes {limit} tokens, and the longest request has {longest}: lower --shared-prefix, "
                "--prompt-tokens or --output-tokens"
            )
        for workload in workloads:
            planned = plan(workload, target.vocabulary)
            if not planned:
                raise TargetError(f"no request is due within --duration {workload.duration:g}: raise it or --rate")
            _say(f"{workload.rate:g} requests/s for {workload.duration:g} s: {len(planned)} requests")
            outcomes, seconds = await send_all(http, planned, model=target.model, timeout=timeout)
            measured.append(Measured(workload=workload, outcomes=outcomes, seconds=seconds))
            _say(f"over after {seconds:.1f} s, {_failures(outcomes)} failed")
    return target, measured


def _failures(outcomes: list[Outcome]) -> int:
    return sum(outcome.status != OK for outcome in outcomes)


def _say(line: str) -> None:
    console.print(line, markup=False, highlight=False)


def _positive(option: str, value: float) -> float:
    if not (math.isfinite(value) and value > 0):
        raise typer.BadParameter(f"{option} {value:g}: it must be a finite number above 0.")
    return value


def _rates(text: str) -> list[float]:
    try:
        return [_positive("--rate", float(part)) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"--rate {text!r}: give numbers, separated by commas.") from None
