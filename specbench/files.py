"""Reading what others wrote: JSON, JSON lines and YAML, held to a declared shape. Knows errors and nothing else.

A shape is a type: a dataclass, a `TypedDict`, `list[float]`, `dict[str, Any]`. Whatever is wrong with a file, missing, cut
off, binary, another type than expected, ends in one line that names the file and the place in it.
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError

from specbench.errors import SpecBenchError

STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


def read_bytes(path: Path) -> bytes:
    """Raises `SpecBenchError` for a file that is missing, a folder, or unreadable."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise SpecBenchError(f"cannot read {path}: {(error.strerror or str(error)).lower()}") from error


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
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        raise SpecBenchError(
            f"{path}{where} is not YAML ({getattr(error, 'problem', None) or 'damaged'}); mend it"
        ) from error
    try:
        return _adapter(shape).validate_python(value, strict=False)
    except ValidationError as error:
        raise SpecBenchError(f"{path}: {explain(error)}") from error


def parse(data: bytes, shape: Any, where: str) -> Any:
    """JSON text of a shape; `where` begins the message of whatever is wrong with it."""
    try:
        return _adapter(shape).validate_json(data)
    except ValidationError as error:
        raise SpecBenchError(f"{where}: {explain(error)}") from error


def explain(error: ValidationError) -> str:
    """The first thing that is wrong, and where in the value: `tokens.3: input should be a valid integer, not "x"`."""
    first = error.errors(include_url=False)[0]
    place = ".".join(map(str, first["loc"]))
    said = first["msg"][:1].lower() + first["msg"][1:]
    if first["type"] == "json_invalid":
        return f"not JSON, damaged or cut off ({first['ctx']['error']}); mend or remove it"
    if first["type"] != "missing":
        found = repr(first["input"])
        said += f", not {found if len(found) <= 40 else found[:37] + '…'}"
    more = len(error.errors()) - 1
    return f"{place}: {said}".removeprefix(": ") + (f" (and {more} more)" if more else "")


@cache
def _adapter(shape: Any) -> TypeAdapter[Any]:
    try:
        return TypeAdapter(shape, config=STRICT)
    except PydanticUserError:  # a class with a configuration of its own
        return TypeAdapter(shape)
