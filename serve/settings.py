"""What the command line sets, checked before anything is loaded or bound."""

import dataclasses
import json
import math
import os
import re
from pathlib import Path
from typing import Any, Literal

from sparda_jax.assets import BUNDLED_MODEL

DType = Literal["auto", "bfloat16", "float32"]
HostDType = Literal["auto", "int8", "fp8"]
# Decode lanes, where the planner's search ends, too.
MAX_LANES = 4096
# As browsers write it: lower case, no path.
_ORIGIN = r"\*|[a-z][a-z0-9+.-]*://[^/\\?#@\sA-Z]+"


class SettingsError(ValueError):
    """An option that can't be used; the message names it, its value and the way out."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """One server's options; the command line's help says what each means.

    Attributes:
        mode: None: sparda if there is a Forecast, else sparse.
        max_active: decode lanes; None: as many as fit into memory, 16 at most on a GPU and 4 on a CPU.
        slots: blocks of a lane in device memory, per layer and KV head; None: as many as fit.
        host_pool_gib: size of the host pool; None: every lane at its full length.
        kv_host_dtype: what the host pool keeps of keys and values; auto: what the device has.
        copy_ctas: thread blocks of the kernel that fetches; None: the fewest that are about as fast as the best number.
        prefix_cache: whether finished blocks serve later prompts that begin alike.
        sample_every: every so many decode steps one is sampled for /metrics; 0: none; None: see ``memory.py``.
        prefill_tokens: tokens of a prompt that are prefilled between two decode steps, at most; None: what suits the
            platform.
        deterministic: an answer's bits depend on nothing that ran before or beside it.
        park_after: tokens after which a request gives up its lane if another one waits for it.
        api_key: what clients must send; None: nothing.
        cors_origins: web pages whose scripts may ask, or ``*``.
        profile: where profiles go; None: there are none.
        profile_seconds: how long one may take.
        warm_up_len: buckets up to this many tokens are compiled before the server is ready; None: all.
    """

    model: Path = BUNDLED_MODEL
    model_name: str | None = None
    mode: str | None = None
    max_model_len: int | None = None
    forecast: Path | None = None
    long_context: bool = False
    dtype: DType = "auto"
    host: str = "127.0.0.1"
    port: int = 8000
    max_active: int | None = None
    slots: int | None = None
    host_pool_gib: float | None = None
    kv_host_dtype: HostDType = "auto"
    copy_ctas: int | None = None
    prefix_cache: bool = True
    sample_every: int | None = None
    prefill_tokens: int | None = None
    deterministic: bool = False
    park_after: int = 256
    max_queue: int = 64
    warm_up_len: int | None = None
    drain_seconds: float = 30.0
    stuck_seconds: float = 300.0
    request_seconds: float = 3600.0
    access_log: bool = False
    log_format: Literal["text", "json"] = "text"
    api_key: str | None = dataclasses.field(default=None, repr=False)
    cors_origins: tuple[str, ...] = ()
    max_body_mib: int = 32
    upload_seconds: float = 60.0
    profile: Path | None = None
    profile_seconds: float = 10.0

    def __post_init__(self) -> None:
        rules = (
            (
                "--max-model-len",
                self.max_model_len,
                self.max_model_len is None or self.max_model_len >= 2,
                "at least 2",
            ),
            ("--port", self.port, 0 <= self.port <= 65535, "from 0 (any free one) to 65535"),
            (
                "--max-active",
                self.max_active,
                self.max_active is None or 1 <= self.max_active <= MAX_LANES,
                f"from 1 to {MAX_LANES}",
            ),
            ("--slots", self.slots, self.slots is None or self.slots >= 1, "at least 1"),
            (
                "--host-pool-gib",
                self.host_pool_gib,
                self.host_pool_gib is None or (math.isfinite(self.host_pool_gib) and self.host_pool_gib > 0),
                "a finite number above 0",
            ),
            ("--copy-ctas", self.copy_ctas, self.copy_ctas is None or self.copy_ctas >= 1, "at least 1"),
            (
                "--sample-every",
                self.sample_every,
                self.sample_every is None or self.sample_every == 0 or self.sample_every >= 2,
                "0 (never) or at least 2",
            ),
            (
                "--prefill-tokens",
                self.prefill_tokens,
                self.prefill_tokens is None or self.prefill_tokens >= 1,
                "at least 1",
            ),
            ("--park-after", self.park_after, self.park_after >= 1, "at least 1"),
            ("--max-queue", self.max_queue, self.max_queue >= 0, "0 or more"),
            (
                "--warm-up-len",
                self.warm_up_len,
                self.warm_up_len is None or self.warm_up_len >= 0,
                "0 (no warm-up) or more",
            ),
            ("--drain-seconds", self.drain_seconds, _is_duration(self.drain_seconds), "a finite number, 0 or more"),
            ("--stuck-seconds", self.stuck_seconds, _is_duration(self.stuck_seconds), "a finite number, 0 or more"),
            (
                "--request-seconds",
                self.request_seconds,
                _is_duration(self.request_seconds) and self.request_seconds > 0,
                "a finite number above 0",
            ),
            ("--model-name", self.model_name, self.model_name != "", "a name"),
            ("--max-body-mib", self.max_body_mib, self.max_body_mib >= 1, "at least 1"),
            (
                "--upload-seconds",
                self.upload_seconds,
                _is_duration(self.upload_seconds) and self.upload_seconds > 0,
                "a finite number above 0",
            ),
            (
                "--profile-seconds",
                self.profile_seconds,
                _is_duration(self.profile_seconds) and self.profile_seconds > 0,
                "a finite number above 0",
            ),
            (
                "--api-key",
                "(not shown)",
                self.api_key is None or re.fullmatch(r"[!-~]+", self.api_key),
                "printable ASCII without spaces, which a header can carry",
            ),
            *(
                (
                    "--cors-origin",
                    origin,
                    re.fullmatch(_ORIGIN, origin),
                    "* or like https://example.org, without a path",
                )
                for origin in self.cors_origins
            ),
        )
        for option, value, holds, rule in rules:
            if not holds:
                raise SettingsError(f"{option} {value} is not allowed: it must be {rule}")
        if self.deterministic and self.sample_every:
            raise SettingsError(
                f"--sample-every {self.sample_every} is not allowed with --deterministic: sampled steps are another "
                "program, which may round otherwise; leave one of them out"
            )
        if self.deterministic and self.kv_host_dtype != "auto":
            raise SettingsError(
                f"--kv-host-dtype {self.kv_host_dtype} is not allowed with --deterministic: a block that was on the "
                "host comes back rounded, and which ones were depends on what else was asked; leave one of them out"
            )
        for option, path, there in (
            ("--model", self.model, self.model.is_dir()),
            ("--forecast", self.forecast, self.forecast is None or self.forecast.is_file()),
        ):
            if not there:
                wanted = "the folder of a checkpoint" if option == "--model" else "a Forecast file"
                found = "is not one" if path is not None and path.exists() else "does not exist"
                raise SettingsError(f"{option} {path} {found}; give {wanted}")

        if self.profile is not None:
            try:
                self.profile.mkdir(parents=True, exist_ok=True)
                writable = os.access(self.profile, os.W_OK | os.X_OK)
            except OSError:
                writable = False
            if not writable:
                raise SettingsError(f"--profile {self.profile} can't be written; give a folder that can")

    @property
    def served_name(self) -> str:
        """The name that requests use."""
        return self.model_name or self.model.resolve().name


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingDefaults:
    """The sampling of requests that do not say, and where it comes from."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    source: str = "OpenAI's defaults"

    @classmethod
    def from_pretrained(cls, folder: Path) -> "SamplingDefaults":
        """From ``generation_config.json``; ``"do_sample": false`` means greedy. Without the file: OpenAI's defaults.

        Raises:
            SettingsError: the file is broken or a value in it is out of range.
        """
        file = folder / "generation_config.json"
        if not file.is_file():
            return cls()
        try:
            data: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise SettingsError(f"{file} is not valid JSON: {error}") from error
        if data.get("do_sample") is False:
            return cls(temperature=0.0, source=f"{file.name}: do_sample=false")
        given = {name: data[name] for name in ("temperature", "top_p", "top_k") if data.get(name) is not None}
        allowed = {
            "temperature": lambda v: 0 <= v <= 2,
            "top_p": lambda v: 0 < v <= 1,
            "top_k": lambda v: v >= 0 and v == int(v),
        }
        for name, value in given.items():
            if not isinstance(value, int | float) or not allowed[name](value):
                raise SettingsError(f"{file}: {name}={value!r} is out of range; correct the file")
        return cls(**given, source=file.name) if given else cls()


def _is_duration(value: float) -> bool:
    return math.isfinite(value) and value >= 0
