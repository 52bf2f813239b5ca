"""Checks of what a ``config.json`` says: JSON gives whatever its author wrote, so nothing is used unseen."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Beyond these a file is broken; taken at its word, such a size would end in a hang or in an unrelated error.
_LARGEST = {int: 2**31 - 1, float: 3e38}
_WORDS = {
    int: f"it must be a whole number of at most {2**31 - 1}, written without quotes or decimals",
    float: "it must be a finite number, written without quotes",
}


class ConfigError(ValueError):
    """A configuration that is wrong or not supported; the message names the field, the value and the way out."""


def check(condition: bool, field: str, value: object, rule: str) -> None:
    """Raises a :class:`ConfigError` unless ``condition`` holds."""
    if not condition:
        shown = repr(value)
        raise ConfigError(f"{field}={shown if len(shown) <= 200 else shown[:200] + '...'} is not supported: {rule}")


def check_number(field: str, value: object, kind: type[int] | type[float]) -> None:
    """``value`` is an int (or a float, if that is the ``kind``), finite and of a size that a model may have."""
    allowed = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
    check(allowed and abs(value) <= _LARGEST[kind], field, value, _WORDS[kind])  # pyright: ignore[reportArgumentType]


def check_numbers(config: Any, names: Mapping[str, str], prefix: str = "") -> None:
    """Checks the fields of a dataclass that are declared as numbers or tuples of numbers.

    Args:
        config: an instance.
        names: what ``config.json`` calls a field, where that is not ``prefix`` and the field's own name.
        prefix: such as ``sparse_config.``.
    """
    for field in dataclasses.fields(config):
        value: Any = getattr(config, field.name)
        name = names.get(field.name, prefix + field.name)
        for kind in (int, float):
            if field.type is kind or (field.type == kind | None and value is not None):
                check_number(name, value, kind)
            elif field.type == tuple[kind, ...]:
                for item in getattr(config, field.name):
                    check_number(name, item, kind)


def take(data: Mapping[str, Any], name: str) -> Any:
    """The value of a required ``config.json`` field. Class defaults differ from the real models, so none is assumed."""
    if data.get(name) is None:
        raise ConfigError(f"config.json has no field {name!r}; it is required (class defaults are never used)")
    return data[name]


def take_number[Number: (int, float)](data: Mapping[str, Any], name: str, kind: type[Number]) -> Number:
    """The value of a required number."""
    value = take(data, name)
    check_number(name, value, kind)
    return kind(value)


def take_bool(data: Mapping[str, Any], name: str) -> bool:
    """The value of a required true or false."""
    if not isinstance(data.get(name), bool):
        raise ConfigError(
            f"config.json field {name!r} is {data.get(name)!r}; it must be true or false (no default is used)"
        )
    return data[name]


def as_object(value: Any, field: str) -> Mapping[str, Any]:
    """A JSON object; null counts as an empty one."""
    check(value is None or isinstance(value, Mapping), field, value, "it must be a JSON object")
    return value or {}


def as_list(value: Any, field: str) -> list[Any] | tuple[Any, ...]:
    """A JSON list; null counts as an empty one."""
    check(value is None or isinstance(value, list | tuple), field, value, "it must be a list")
    return value or []


def read_config_file(path: Path) -> Mapping[str, Any]:
    """The object in a JSON file.

    Raises:
        ConfigError: the file is not JSON, or holds something else than an object.
    """
    try:
        return as_object(json.loads(path.read_text(encoding="utf-8")), path.name)
    except (ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} is not valid JSON ({error}); fetch it again") from error
