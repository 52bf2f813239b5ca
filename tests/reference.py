"""Writes docs/reference.md from the code: every command's options, and the paths and fields of the server.

``python -m tests.reference`` prints it; ``make reference`` writes it.
"""

import enum
import inspect
import json
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import typer

from sparda_jax.bench.serve import serve as bench_serve
from sparda_jax.convert import convert
from sparda_jax.plan import plan
from sparda_jax.profiling import Profiler
from sparda_jax.serve import protocol
from sparda_jax.serve.__main__ import main as serve
from sparda_jax.serve.access import GUARDED
from sparda_jax.serve.api import ServerInfo, create_app
from sparda_jax.serve.engine import Engine
from sparda_jax.train.__main__ import retokenise_command, train
from tests.serve.fakes import TOKENIZER, FakeRunner

# What whoever runs a server calls; the other commands have --help.
COMMANDS = {
    "serve": serve,
    "plan": plan,
    "convert": convert,
    "train": train,
    "train retokenise": retokenise_command,
    "bench serve": bench_serve,
}
_INTRODUCTION = """\
# Reference

Written by `make reference` from the code; a test fails when the two differ. What fields mean stands in
[serve/README.md](../serve/README.md), how to run a server in [operating.md](operating.md). Where no default is shown,
the text beside it says what holds, or there is none.
"""
_KINDS = {bool: "flag", int: "whole number", float: "number", str: "text", Path: "path"}


def reference() -> str:
    """The whole page, in Markdown."""
    return "\n".join([_INTRODUCTION, "## Commands", "", *_commands(), "## HTTP", "", *_paths()]).rstrip() + "\n"


def options(command: str) -> set[str]:
    """Every spelling of every option of one of `COMMANDS`."""
    return {name for option in _command(COMMANDS[command]).params for name in (*option.opts, *option.secondary_opts)}


def openapi() -> dict[str, Any]:
    """The schema of a server whose model is called m."""
    engine = Engine(FakeRunner(), eos_token_ids=[])
    profiler = Profiler(Path(), max_seconds=1)
    return create_app(
        engine, TOKENIZER, ServerInfo(model="m", mode="sparse", vocab_size=9), profiler=profiler
    ).openapi()


def _commands() -> Iterator[str]:
    for name, function in COMMANDS.items():
        kinds = typing.get_type_hints(function)
        rows = [_option(option, kinds[option.name]) for option in _command(function).params]
        yield from (f"### `python -m sparda_jax.{name}`", "", _cell(inspect.getdoc(function) or ""), "")
        yield from _table(("option", "values", "default", ""), rows)


def _command(function: Callable[..., Any]) -> Any:
    app = typer.Typer(add_completion=False)
    app.command()(function)
    return typer.main.get_command(app)


def _option(option: Any, kind: Any) -> tuple[str, str, str, str]:
    """A row of the table; ``kind`` is the annotation of the function's argument."""
    is_option = option.param_type_name == "option"
    names = (
        ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts)) if is_option else option.name.upper()
    )
    if option.envvar:
        names += f", in the environment `{option.envvar}`"
    if option.required:
        default = "required"
    elif kind is bool:  # of a pair the one that holds; a flag alone is off
        default = f"`{(option.opts if option.default else option.secondary_opts)[0]}`" if option.secondary_opts else ""
    else:
        default = "" if option.default is None else f"`{option.default}`"
    return names, _values(kind), default, _cell(option.help or "")


def _values(kind: Any) -> str:
    parts = typing.get_args(kind)
    if types.NoneType in parts:  # it says that the default is None, no more
        return " or ".join(_values(part) for part in parts if part is not types.NoneType)
    if typing.get_origin(kind) is typing.Literal:
        return ", ".join(f"`{choice}`" for choice in parts)
    if typing.get_origin(kind) is list:
        return f"{_KINDS[parts[0]]}, repeatable"
    if issubclass(kind, enum.Enum):
        return ", ".join(f"`{choice.value}`" for choice in kind)
    return _KINDS[kind]


def _paths() -> Iterator[str]:
    for path, methods in openapi()["paths"].items():
        for method, operation in methods.items():
            key = " With `--api-key`: `Authorization: Bearer KEY`." if path.startswith(GUARDED) else ""
            yield from (f"### `{method.upper()} {path}`", "", _cell(operation["description"]) + key, "")
            if "requestBody" in operation:
                yield from _fields(operation["requestBody"]["content"]["application/json"]["schema"])
    yield from ("### Fields that change nothing or are not built", "")
    yield from (f"Accepted and ignored: {_names(protocol.IGNORED)}.", "")
    yield f"Refused unless they say “off”: {_names(protocol._OFF)}."


def _fields(body: dict[str, Any]) -> Iterator[str]:
    rows = []
    for name, field in body["properties"].items():
        given = field.get("default")
        default = "required" if name in body.get("required", ()) else "" if given is None else f"`{json.dumps(given)}`"
        rows.append((f"`{name}`", "the model's name" if name == "model" else _type(field), default))
    yield from _table(("field", "values", "default"), sorted(rows, key=lambda row: row[2] != "required"))


def _type(field: dict[str, Any]) -> str:
    """A schema in a few words."""
    if "anyOf" in field:
        return " or ".join(_type(kind) for kind in field["anyOf"] if kind != {"type": "null"})
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if "properties" in field:
        return "{" + "; ".join(f"`{name}`: {_type(part)}" for name, part in field["properties"].items()) + "}"
    kind = field.get("type", "any")
    if kind == "array":
        return f"list of {_type(field['items'])}" + _bracketed(field, {"minItems": "≥", "maxItems": "≤"}, "of them")
    if kind == "string":
        return "string" + _bracketed(field, {"minLength": "≥", "maxLength": "≤"}, "characters")
    bounds = _limits(field, {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"})
    return f"{kind}, {bounds}" if bounds else kind


def _bracketed(field: dict[str, Any], signs: dict[str, str], noun: str) -> str:
    limits = _limits(field, signs)
    return f" ({limits} {noun})" if limits else ""


def _limits(field: dict[str, Any], signs: dict[str, str]) -> str:
    return ", ".join(f"{sign} {field[name]:g}" for name, sign in signs.items() if name in field)


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    for row in (head, ["---"] * len(head), *rows):
        yield f"| {' | '.join(row)} |"
    yield ""


def _cell(text: str) -> str:
    """Text of a docstring or help on one line, which can't end a table's cell."""
    return " ".join(text.split()).replace("``", "`").replace("|", "\\|")


if __name__ == "__main__":
    print(reference(), end="")
