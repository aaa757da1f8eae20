"""Bad inputs to the commands, many of them, in one process: each must end in one line and exit code 2 and change nothing.

What is wrong with a value follows from the declared type of the option, written down here once more by hand: a schema that
accepted everything would not pass by agreeing with itself.
"""

import io
import itertools
import resource
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specbench.config import validation
from specbench.config.cli import run_cli


@dataclass
class Count:
    """How many inputs a run of the tests tried, and which did not end as they should."""

    tried: int = 0
    failed: list[str] = field(default_factory=list)


COUNT = Count()


@dataclass(frozen=True)
class Number:
    """A number in an option's value. limits: of its type. wrap: the option's value that holds a given number."""

    limits: tuple[Any, ...]
    wrap: Callable[[Any], Any]

    @property
    def ends(self) -> list[float]:
        """The smallest and the largest value, as far as the type names them."""
        steps = {"ge": 0, "le": 0, "gt": 1, "lt": -1}
        named = [(getattr(limit, bound, None), step) for limit in self.limits for bound, step in steps.items()]
        whole = {int: 1, float: 1e-9}
        return [edge + step * whole[type(edge)] for edge, step in named if edge is not None]


@contextmanager
def counting(what: object) -> Iterator[None]:
    """Around one bad input that a test tries by other means."""
    COUNT.tried += 1
    try:
        yield
    except BaseException:
        COUNT.failed.append(str(what))
        raise


@contextmanager
def file_size(limit: int) -> Iterator[None]:
    """No file may grow beyond so many bytes, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def snapshot(*folders: Path) -> dict[str, tuple[int, int]]:
    """Every file below some folders, with its size and time of change."""
    files = itertools.chain.from_iterable(f.rglob("*") for f in folders)
    return {str(p): (p.stat().st_size, p.stat().st_mtime_ns) for p in files if p.is_file()}


def attempt(command: types.ModuleType, name: str, *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard error and output of a command called in this process."""
    out, err, argv = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = [name, *arguments]
    code = 0
    try:
        with redirect_stdout(out), redirect_stderr(err):
            run_cli(command.main, name)
    except SystemExit as exit:
        code = exit.code if isinstance(exit.code, int) else 1
    finally:
        sys.argv = argv
    return code, err.getvalue(), out.getvalue()


def refuse(command: types.ModuleType, name: str, arguments: list[str], mentions: str, watched: list[Path]) -> str | None:
    """Why a bad input did not end as it should; None if it did."""
    before = snapshot(*watched)
    try:
        code, err, _ = attempt(command, name, *arguments)
    except BaseException as error:
        wrong: str | None = f"raised {type(error).__name__}: {error}"
    else:
        message = [line for line in err.splitlines() if line.startswith("specbench: ")]
        after = snapshot(*watched)
        wrong = (
            f"exit code {code}"
            if code != 2
            else f"printed {err[-300:]!r}"
            if len(message) != 1 or "Traceback" in err
            else f"a fault instead of a mistake: {message[0]}"
            if "fault of SpecBench" in message[0]
            else f"{mentions} is not named in {message[0]!r}"
            if mentions not in message[0]
            else f"changed {sorted(before.items() ^ after.items())}"
            if before != after
            else None
        )
    COUNT.tried += 1
    if wrong:
        COUNT.failed.append(f"{name} {' '.join(arguments)}: {wrong}")
    return wrong


def leaves(node: Mapping[str, Any], *takers: type, place: str = "") -> Iterator[tuple[str, Any]]:
    """Options of a configuration with their declared types, nodes taken apart; also those that no YAML file mentions."""
    taker = validation.target(node["_target_"], takers, place) if "_target_" in node else takers[0]
    for name, option in validation.options(taker).items():
        if name == "growth":
            continue  # the tree's own options once more
        path, value = f"{place}.{name}" if place else name, node.get(name)
        inner = list(validation.classes(option.annotation))
        if isinstance(value, dict) and ("_target_" in value or inner):
            yield from leaves(value, *(inner or [object]), place=path)
        elif not inner:
            yield path, option.annotation


def bad_values(annotation: Any) -> list[str]:
    """Values of an option, as the command line writes them, that its type does not allow."""
    parts = list(_parts(annotation))
    kinds = {typing.get_origin(p) or p for p, _ in parts}
    if Any in kinds:
        return []
    found = ["{a: 1}"] if not any(isinstance(k, type) and issubclass(k, Mapping) for k in kinds) else ["5"]
    if type(None) not in kinds:
        found.append("null")
    if kinds & {int, float}:
        found += ["abc", "nan", "[1]", "true"]
    if int in kinds and float not in kinds:
        found += ["1.5", "1e3"]
    if float in kinds:
        found += ["inf", "-inf"]
    if bool in kinds:
        found += ["maybe", "3", "0.5"]
    if str in kinds:
        found += ["5", "[x]", "1.5"]
    if typing.Literal in kinds:
        found += ["nonsense", "7", "[1,2]"]
    for part, limits in parts:
        kind = typing.get_origin(part) or part
        for limit in limits:
            for bound, step in (("ge", -1), ("gt", 0), ("le", 1), ("lt", 0)):
                if (edge := getattr(limit, bound, None)) is not None and kind in (int, float):
                    found.append(str(edge + step))
            if "pattern" in vars(type(limit)).get("__annotations__", {}) and getattr(limit, "pattern", None):
                found += ["../x", "a/b", '""']
            if getattr(limit, "min_length", None) and kind is str:
                found.append('""')
        if kind in (list, tuple) or kind is typing.get_origin(typing.Sequence[int]):
            found += ["abc", "[[abc]]", "3"]
    return list(dict.fromkeys(found))


def numbers(annotation: Any, wrap: Callable[[Any], Any] = lambda value: value) -> Iterator[Number]:
    """The numbers that an option's value is or holds."""
    for part, limits in _parts(annotation):
        kind, inner = typing.get_origin(part), typing.get_args(part)
        if part in (int, float):
            yield Number(limits, wrap)
        elif isinstance(kind, type) and issubclass(kind, Mapping):
            (key,) = typing.get_args(inner[0])[:1] or ("x",)
            yield from numbers(inner[1], lambda value, key=key: wrap({key: value}))
        elif isinstance(kind, type) and issubclass(kind, Sequence):
            count = len(inner) - (... in inner)
            yield from numbers(inner[0], lambda value, count=count: wrap([value] * count))


def _parts(annotation: Any, limits: tuple[Any, ...] = ()) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """The alternatives of a type, each with what limits it."""
    if typing.get_origin(annotation) is typing.Annotated:
        inner, *more = typing.get_args(annotation)
        flat = [m for one in more for m in (getattr(one, "metadata", None) or [one])]
        yield from _parts(inner, (*limits, *flat))
    elif typing.get_origin(annotation) in (typing.Union, types.UnionType):
        for part in typing.get_args(annotation):
            yield from _parts(part, limits)
    else:
        yield annotation, limits
