"""Strict reading of JSON, JSON lines and YAML files: what is read is validated against a declared shape.

A shape is a type: a dataclass, a `TypedDict`, `list[float]`, `dict[str, Any]`. Whatever is wrong with a file, missing, cut
off, binary, another type than expected, ends in one line that names the file and the place in it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError, with_config

from specbench.common.errors import SpecBenchError, shorten, visible

STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
OPEN = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)  # for `with_config`: keys beside the declared ones stay

T = TypeVar("T")


def readable(paths: Iterable[Path], read: Callable[[Path], T], problems: list[str] | None) -> Iterator[tuple[Path, T]]:
    """The readable ones of several files, each with its path.

    Args:
        problems: gets one line on each file that cannot be read; None: the first one raises its `SpecBenchError`.
    """
    for path in paths:
        try:
            found = read(path)
        except SpecBenchError as error:
            if problems is None:
                raise
            problems.append(str(error))
        else:
            yield path, found


def read_bytes(path: Path) -> bytes:
    """Raises `SpecBenchError` for a file that is missing, a folder, or unreadable."""
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:  # a null byte in a path is a ValueError
        reason = getattr(error, "strerror", None) or str(error)
        raise SpecBenchError(f"cannot read {path}: {reason.lower()}") from error


def read_text(path: Path) -> str:
    """UTF-8 text. Raises `SpecBenchError` naming the line that is not."""
    data = read_bytes(path)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise SpecBenchError(f"{path} line {line} is not UTF-8 text; write it again or remove it") from error


def read_json(path: Path, shape: Any = dict[str, Any]) -> Any:
    """A JSON file of one value. Raises `SpecBenchError`, also for a value of another shape."""
    return parse(read_bytes(path), shape, str(path))


def read_json_lines(path: Path, shape: Any = dict[str, Any], cut: bool = False) -> Iterator[tuple[int, Any]]:
    """Line numbers and values of a JSONL file; empty lines are passed over.

    Args:
        cut: a last line without its newline is what a kill left behind, and is passed over too.
    """
    yield from parse_lines(read_bytes(path), shape, path, cut)


def parse_lines(data: bytes, shape: Any, path: Path, cut: bool = False) -> Iterator[tuple[int, Any]]:
    """The same of bytes already read from `path`."""
    lines = data.split(b"\n")  # not at U+2028 and its kin, which may stand raw inside a JSON string
    last = lines.pop()
    for number, line in enumerate(lines if cut else [*lines, last], 1):
        if line.strip():
            yield number, parse(line, shape, f"{path} line {number}")


def read_yaml(path: Path, shape: Any) -> Any:
    """A YAML file of plain values. Raises `SpecBenchError`."""
    try:
        value = yaml.safe_load(read_text(path))
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # dates and numbers beyond Python's, endless nesting
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        raise SpecBenchError(
            f"{path}{where} is not YAML ({getattr(error, 'problem', None) or 'damaged'}); mend it"
        ) from error
    return hold(value, shape, str(path))


def hold(value: Any, shape: Any, where: str) -> Any:
    """A plain value as a shape, sequences and numbers as Python is used to; `where` begins the message of an error."""
    try:
        return _adapter(shape).validate_python(value, strict=False)
    except ValidationError as error:
        raise SpecBenchError(f"{where}: {explain(error)}; mend or remove it") from error


def parse(data: bytes, shape: Any, where: str) -> Any:
    """JSON text of a shape; `where` begins the message of whatever is wrong with it."""
    try:
        return _adapter(shape).validate_json(data)
    except ValidationError as error:
        raise SpecBenchError(f"{where}: {explain(error)}; mend or remove it") from error


def explain(error: ValidationError) -> str:
    """The first thing that is wrong, and where in the value: `tokens.3: input should be a valid integer, not "x"`."""
    first = error.errors(include_url=False)[0]
    if first["type"] == "json_invalid":
        return f"not JSON, damaged or cut off ({first['ctx']['error']})"
    message = first["msg"][:1].lower() + first["msg"][1:]
    if first["type"] == "value_error":  # raised by a validator of ours, which says it all
        message = str(first["ctx"]["error"])
    elif first["type"] != "missing":
        message += f", not {shorten(repr(first['input']), 40)}"
    place = shorten(visible(".".join(map(str, first["loc"]))), 80)
    more = error.error_count() - 1
    return f"{place}: {message}".removeprefix(": ") + (f" (and {more} more)" if more else "")


def strict_adapter(shape: Any) -> TypeAdapter[Any]:
    """A validator that converts nothing and refuses unknown keys, unless the shape has rules of its own."""
    try:
        return TypeAdapter(shape, config=STRICT)
    except PydanticUserError:  # a class has its own configuration, or gets this one
        return TypeAdapter(shape if hasattr(shape, "__pydantic_config__") else with_config(STRICT)(shape))


_adapter = cache(strict_adapter)


def differing(before: Mapping[str, Any], now: Mapping[str, Any], place: str = "") -> Iterator[str]:
    """Dotted names of the items in which two JSON objects differ: `a.b` for b within a."""
    for name in sorted(before.keys() | now.keys()):
        a, b = before.get(name), now.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            yield from differing(a, b, f"{place}{name}.")
        elif a != b or (name in before) != (name in now):
            yield f"{place}{name}"
