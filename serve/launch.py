"""From settings to a running server."""

import os
import socket
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx
from rich.console import Console

from sparda_jax.checkpoint import open_weights
from sparda_jax.library import SparDA
from sparda_jax.model import abstract_decoder
from sparda_jax.profiling import Profiler
from sparda_jax.selection import Mode
from sparda_jax.serve.access import Access
from sparda_jax.serve.api import ServerInfo, create_app
from sparda_jax.serve.engine import SWITCH_SECONDS, Engine
from sparda_jax.serve.logs import configure
from sparda_jax.serve.memory import make_executor, plan_server, prefix_salt, settle_chunks
from sparda_jax.serve.page import Placement
from sparda_jax.serve.report import Report, curl
from sparda_jax.serve.server import Server, bind, leave, url_of
from sparda_jax.serve.settings import SamplingDefaults, Settings, SettingsError
from sparda_jax.serve.warm_up import warm_up
from sparda_jax.tokenizer import Tokenizer


def load(settings: Settings) -> Report:
    """Checks the checkpoint as far as it can be without reading tensors, loads it, and plans the memory.

    Raises:
        SettingsError, ConfigError, CheckpointError, TokenizerError: it can't be served; the message says why.
    """
    served = [mode for mode in Mode if mode.in_lanes]
    if settings.mode is not None and settings.mode not in served:
        raise SettingsError(f"--mode {settings.mode} is not served; use one of {', '.join(served)}")
    sampling = SamplingDefaults.from_pretrained(settings.model)
    tokenizer = Tokenizer.from_pretrained(settings.model)
    weights = open_weights(settings.model, forecast=settings.forecast)
    if tokenizer.vocab_size > weights.config.vocab_size:
        raise SettingsError(
            f"--model {settings.model}: the tokenizer has {tokenizer.vocab_size} ids, the model only "
            f"{weights.config.vocab_size}; they do not belong together"
        )
    default = Mode.SPARSE if weights.forecast is None else Mode.SPARDA
    model = SparDA.from_pretrained(
        settings.model,
        mode=settings.mode or default,
        max_model_len=settings.max_model_len,
        dtype=None if settings.dtype == "auto" else jnp.dtype(settings.dtype),
        forecast=settings.forecast,
        long_context=settings.long_context,
    )
    shapes = abstract_decoder(model.config, has_forecast=weights.forecast is not None, dtype=model.runner.dtype)
    device = jax.local_devices()[0]
    settle_chunks(model.runner, settings)
    plan, limits = plan_server(model.runner, settings)
    ids = [*model.config.eos_token_ids, tokenizer.eos_token_id]
    eos = dict.fromkeys(token_id for token_id in ids if token_id is not None)
    return Report(
        settings=settings,
        runner=model.runner,
        tokenizer=model.tokenizer,
        sampling=sampling,
        plan=plan,
        limits=limits,
        num_parameters=sum(leaf.size for leaf in jax.tree.leaves(nnx.state(shapes))),
        eos_token_ids=tuple(eos),
        device=device,
    )


def keep_programs() -> None:
    """Compiled GPU programs are kept between starts, unless JAX has been told where, or not, to keep them.

    Those of a CPU are not: one of another kind might not run them.
    """
    if jax.default_backend() == "gpu" and jax.config.jax_compilation_cache_dir is None:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(home / "sparda_jax" / "programs"))


def serve(settings: Settings, console: Console) -> None:
    """Binds, loads, prints what will run, warms up, serves until a signal, and leaves the process.

    Raises:
        SettingsError, ConfigError, CheckpointError, TokenizerError: nothing was served; the message says why.
    """
    configure(settings.log_format, access_log=settings.access_log)
    with bind(settings.host, settings.port) as listener:
        _serve(settings, console, listener)


def _serve(settings: Settings, console: Console, listener: socket.socket) -> None:
    url = url_of(listener, settings.host)
    keep_programs()
    sys.setswitchinterval(SWITCH_SECONDS)
    report = load(settings)
    report.print(console)
    salt = prefix_salt(report.runner, settings.served_name)
    executor = make_executor(report.runner, report.plan, report.limits, settings, salt)
    plan, shape = executor.lanes.plan, executor.lanes.shape
    if shape.slots_per_lane < shape.max_blocks:
        ctas = plan.copies.ctas or "the kernel's own number"
        console.print(f"fetch {plan.fetch.value}, thread blocks of a copy: {ctas} (--copy-ctas)")
    started = time.monotonic()
    ready = threading.Event()
    failures: list[BaseException] = []

    longest = report.runner.max_model_len if settings.warm_up_len is None else settings.warm_up_len

    def prepare() -> None:
        warm_up(executor, longest, console)

    def on_ready() -> None:
        ready.set()
        console.print(
            f"[bold]ready[/bold] after {time.monotonic() - started:.1f} s: {url}/v1 as {settings.served_name}"
        )
        console.print(f"a page with live numbers: {url}/")
        # Not wrapped, so that it can be pasted.
        console.print(curl(url, report), soft_wrap=True, highlight=False, markup=False)

    def on_failure(error: BaseException) -> None:
        failures.append(error)
        if not ready.is_set():  # later on the server stays, to say on /health what happened
            server.should_exit = True

    engine = Engine(
        executor,
        eos_token_ids=report.eos_token_ids,
        max_queue=settings.max_queue,
        quantum=settings.park_after,
        stuck_seconds=settings.stuck_seconds,
        request_seconds=settings.request_seconds,
        warm_up=prepare,
        on_ready=on_ready,
        on_failure=on_failure,
    )
    info = ServerInfo(
        model=settings.served_name,
        mode=report.runner.mode.value,
        vocab_size=report.runner.config.vocab_size,
        temperature=report.sampling.temperature,
        top_p=report.sampling.top_p,
        top_k=report.sampling.top_k,
    )
    access = Access(
        api_key=settings.api_key,
        cors_origins=settings.cors_origins,
        max_body_mib=settings.max_body_mib,
        upload_seconds=settings.upload_seconds,
    )
    kept = settings.kv_host_dtype
    placement = Placement(
        device=report.device.device_kind,
        slots_per_lane=shape.slots_per_lane,
        blocks_per_lane=shape.max_blocks,
        kv_host_dtype=report.runner.dtype.name if kept == "auto" else kept,
    )
    profiler = None
    if settings.profile is not None:
        profiler = Profiler(settings.profile, max_seconds=settings.profile_seconds)
    server = Server(create_app(engine, report.tokenizer, info, access, placement, profiler), engine, settings)
    engine.start()
    server.run_until_signal(listener)
    if profiler is not None:
        profiler.close()
    leave(1 if failures else 0, engine)
