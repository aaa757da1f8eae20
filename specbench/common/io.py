"""Strict reading of JSON, JSON lines and YAML files, validated against a shape.

A shape is a type: a dataclass, a `TypedDict`, `list[float]`, `dict[str, Any]`. Any problem with a file (missing, cut off,
binary, another type than expected) is a `SpecBenchError` that names the file and the position in it.

Whatever a file holds, reading takes a few times its size: values are bounded before they are parsed, a list is left at its
first wrong item, and only regular files are read.
"""

import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError, with_config
from pydantic_core import CoreConfig, SchemaValidator

from specbench.common.errors import SpecBenchError, shorten, visible

STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
_CORE_STRICT = CoreConfig(strict=True, extra_fields_behavior="forbid", allow_inf_nan=False)  # the same
OPEN = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)  # for `with_config`: keys beside the declared ones stay

MAX_VALUE, MAX_LINE = 64 << 20, 16 << 20  # bytes of a JSON value, and of one that is a line among others
BYTES_PER_COLON = 64  # at least, on average: each key may become an error of a kilobyte

T = TypeVar("T")


def readable(paths: Iterable[Path], read: Callable[[Path], T], problems: list[str] | None) -> Iterator[tuple[Path, T]]:
    """The readable files with their contents. problems: collects a line on each other file; None: raise its error."""
    for path in paths:
        try:
            content = read(path)
        except SpecBenchError as error:
            if problems is None:
                raise
            problems.append(str(error))
        else:
            yield path, content


def read_bytes(path: Path, limit: int | None = None) -> bytes:
    """A regular file's bytes. Raises `SpecBenchError`, also if there are more than `limit`."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
            raise SpecBenchError(f"cannot read {path}: not a regular file; move it away")
        if limit is not None and status.st_size > limit:
            raise SpecBenchError(f"{path} is larger than {limit >> 20} MB, which none of its kind is; move it away")
        return path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        reason = getattr(error, "strerror", None) or str(error)
        raise SpecBenchError(f"cannot read {path}: {reason.lower()}") from error


def read_text(path: Path) -> str:
    """A file's UTF-8 text. Raises `SpecBenchError`, which names the line of a decoding error."""
    data = read_bytes(path)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise SpecBenchError(f"{path} line {line} is not UTF-8 text; write it again or remove it") from error


def read_json(path: Path, shape: Any = dict[str, Any]) -> Any:
    """The value of a JSON file. Raises `SpecBenchError`."""
    return parse(read_bytes(path, MAX_VALUE), shape, str(path))


def read_json_lines(path: Path, shape: Any = dict[str, Any], cut: bool = False) -> Iterator[tuple[int, Any]]:
    """Line numbers and values of a JSONL file, without empty lines. cut: skip a last line without newline as incomplete."""
    yield from parse_lines(read_bytes(path), shape, path, cut)


def parse_lines(data: bytes, shape: Any, path: Path, cut: bool = False) -> Iterator[tuple[int, Any]]:
    """Line numbers and values of JSON lines that were read from `path`, see `read_json_lines`."""
    lines = data.split(b"\n")  # not `splitlines`: U+2028 may occur inside a JSON string
    last = lines.pop()
    for number, line in enumerate(lines if cut else [*lines, last], 1):
        if line.strip():
            yield number, parse(line, shape, f"{path} line {number}", MAX_LINE)


def read_yaml(path: Path, shape: Any) -> Any:
    """The value of a YAML file. Raises `SpecBenchError`."""
    try:
        value = yaml.safe_load(read_text(path))
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # dates and numbers out of range, endless nesting
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or "damaged"
        line = f" line {mark.line + 1}" if mark else ""
        raise SpecBenchError(f"{path}{line} is not YAML ({problem}); correct it") from error
    return validate(value, shape, str(path))


def validate(value: Any, shape: Any, where: str) -> Any:
    """A plain value as a shape; lists and integers also pass as tuples and floats. where: begins error messages."""
    try:
        return _validator(shape).validate_python(value, strict=False)
    except ValidationError as error:
        raise SpecBenchError(f"{where}: {explain(error)}; correct or remove it") from error


def parse(data: bytes, shape: Any, where: str, limit: int = MAX_VALUE) -> Any:
    """The value of JSON text of at most `limit` bytes. where: begins error messages."""
    if len(data) > limit or data.count(b":") > limit // BYTES_PER_COLON:
        bound = f"{limit >> 20} MB or {limit // BYTES_PER_COLON:,} keys"
        raise SpecBenchError(f"{where}: more than {bound} in one value; correct or remove it")
    try:
        return _validator(shape).validate_json(data)
    except ValidationError as error:
        raise SpecBenchError(f"{where}: {explain(error)}; correct or remove it") from error


def explain(error: ValidationError) -> str:
    """The first problem and its position in the value: `tokens.3: input should be a valid integer, not "x"`."""
    first = error.errors(include_url=False)[0]
    if first["type"] == "json_invalid":
        return f"not JSON, damaged or cut off ({first['ctx']['error']})"
    text = first["msg"].removeprefix("Value error, ")
    message = text[:1].lower() + text[1:]
    if first["type"] == "value_error":  # raised by a validator of this project
        message = str(first["ctx"]["error"])
    elif first["type"] != "missing":
        message += f", not {shorten(repr(first['input']), 40)}"
    key = shorten(visible(".".join(map(str, first["loc"]))), 80)
    more = error.error_count() - 1
    return f"{key}: {message}".removeprefix(": ") + (f" (and {more} more)" if more else "")


def strict_adapter(shape: Any) -> TypeAdapter[Any]:
    """A validator without conversions or unknown keys, unless the shape has a configuration of its own."""
    try:
        return TypeAdapter(shape, config=STRICT)
    except PydanticUserError:  # a class, which must hold its configuration itself
        return TypeAdapter(shape if hasattr(shape, "__pydantic_config__") else with_config(STRICT)(shape))


@cache
def _validator(shape: Any) -> SchemaValidator:
    """That of `strict_adapter`, with lists that are left at their first wrong item."""
    return SchemaValidator(_failing_fast(strict_adapter(shape).core_schema), _CORE_STRICT)


def _failing_fast(schema: Any) -> Any:
    """A core schema, or a part of one, with `FailFast` on every list and tuple."""
    if isinstance(schema, dict):
        made = {name: _failing_fast(part) for name, part in schema.items()}
        return {**made, "fail_fast": True} if made.get("type") in ("list", "tuple") else made
    return type(schema)(map(_failing_fast, schema)) if type(schema) in (list, tuple) else schema


def differing(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Dotted names of the items in which two JSON objects differ: `a.b` for b within a."""
    for name in sorted(before.keys() | now.keys()):
        a, b = before.get(name), now.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            yield from differing(a, b, f"{prefix}{name}.")
        elif a != b or (name in before) != (name in now):
            yield f"{prefix}{name}"
