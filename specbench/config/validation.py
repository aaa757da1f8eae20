"""Validates a configuration against the annotations of the classes that take it, before anything is loaded.

Every option is declared once: as an annotated parameter of the class that a node's `_target_` names, or as a field of the
command's own dataclass. Types and ranges are those annotations (`specbench/common/types.py`); nothing is converted, so that
`"3"` is no number. An error is one line: the option, its value, what is allowed.
"""

import dataclasses
import functools
import inspect
import json
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError

from specbench.common.errors import SpecBenchError, nearest, shorten, visible
from specbench.common.io import strict_adapter

INSTANTIATION = ("_target_", "_convert_", "_recursive_")  # Hydra's own keys of a node


def check(config: DictConfig, declared: type) -> None:
    """Hold a composed configuration, interpolations resolved, to a command's dataclass.

    Raises:
        SpecBenchError: an unknown, missing or unfit option.
    """
    try:
        plain = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        place = getattr(error, "full_key", None) or "configuration"
        raise SpecBenchError(f"{place}: {str(error).splitlines()[0]}") from error
    assert isinstance(plain, dict)
    hold(plain, (declared,))


def hold(node: Mapping[Any, Any], takers: tuple[type, ...], place: str = "") -> None:
    """Hold one node to the class that takes it, one of some. place: of the node, as the command line names it."""
    taker = takers[0]
    if "_target_" in node:
        taker = target(node["_target_"], takers, place)
    elif not dataclasses.is_dataclass(taker):
        raise SpecBenchError(f"{place}._target_ is missing: the class, of the kind {taker.__name__}, that takes this node")
    given = {name: value for name, value in node.items() if not (place and name in INSTANTIATION)}
    _hold_options(given, options(taker), place)
    for name, option in options(taker).items():
        if option.required and name not in node:
            raise SpecBenchError(f"{_join(place, name)} is missing; {taker.__name__} needs it")


def hold_some(node: Mapping[str, Any], taker: type, among: Sequence[str], place: str) -> None:
    """Validate values of some options of a class, none of which is required."""
    _hold_options(node, {name: option for name, option in options(taker).items() if name in among}, place)


def _hold_options(node: Mapping[Any, Any], declared: "Mapping[str, Option]", place: str) -> None:
    for name in node:
        if name not in declared:
            raise SpecBenchError(f"{_join(place, visible(str(name)))}: no such option{nearest(name, declared)}")
    for name, option in declared.items():  # in the order of declaration: what a message names comes first
        if name in node:
            _value(node[name], option, _join(place, name))


@dataclasses.dataclass(frozen=True)
class Option:
    """One option of a class, as declared."""

    annotation: Any
    required: bool

    @functools.cached_property
    def adapter(self) -> TypeAdapter[Any]:
        """Validates plain values of this option."""
        return strict_adapter(self.annotation)


@functools.cache
def options(taker: type) -> dict[str, Option]:
    """The options of a class: parameters of its constructor, and of its parents' where it passes them on."""
    found: dict[str, Option] = {}
    for owner in taker.__mro__:
        constructor = vars(owner).get("__init__")
        if not inspect.isfunction(constructor):
            continue
        hints = typing.get_type_hints(owner if dataclasses.is_dataclass(owner) else constructor, include_extras=True)
        parameters = list(inspect.signature(constructor).parameters.values())[1:]
        for parameter in parameters:
            if parameter.kind is not parameter.VAR_KEYWORD:
                required = parameter.default is parameter.empty
                name = parameter.name.removesuffix("_")  # of an option that Python has a keyword for
                found.setdefault(name, Option(hints.get(parameter.name, Any), required))
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return found


def _value(value: Any, option: Option, place: str) -> None:
    """Validate one option's value: a node against its class, plain values against their type."""
    takers = tuple(classes(option.annotation))
    if isinstance(value, Mapping) and ("_target_" in value or takers):
        return hold(value, takers or (object,), place)
    if isinstance(value, list) and takers:
        for index, each in enumerate(value):
            if not isinstance(each, Mapping):
                raise SpecBenchError(f"{place}[{index}]={_shown(each)}: the options of {takers[0].__name__} were expected")
            hold(each, takers, f"{place}[{index}]")
        return None
    if value is None and type(None) in typing.get_args(option.annotation):
        return None
    if takers:
        raise SpecBenchError(f"{place}={_shown(value)}: a node with a _target_ was expected, {takers[0].__name__}")
    try:
        option.adapter.validate_json(json.dumps(value))
    except ValidationError as error:
        raise SpecBenchError(f"{place}{_explained(error, value)}") from error
    return None


def _explained(error: ValidationError, value: Any) -> str:
    """The end of a message: place in the value, value, what is allowed, as in `[2]=abc: must be a valid number`."""
    errors = error.errors(include_url=False)
    deepest = max(errors, key=lambda e: len(_within(value, e["loc"])))
    place = _within(value, deepest["loc"])
    for step in place:
        value = value[step]
    allowed = [e["msg"].replace("Input should", "must", 1) for e in errors if e["loc"][: len(place)] == place]
    where = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in place)
    return f"{where}={_shown(value)}: {' or '.join(dict.fromkeys(allowed))}"


def _within(value: Any, loc: tuple[Any, ...]) -> tuple[Any, ...]:
    """The part of an error's location that lies in the value; behind it stand the types that were tried."""
    found: list[Any] = []
    for step in loc:
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            break
        found.append(step)
    return tuple(found)


def target(path: Any, expected: tuple[type, ...], place: str) -> type:
    """The class that a `_target_` names. Raises `SpecBenchError` for one of another kind than expected."""
    try:
        taker = get_class(path)
    except Exception as error:  # imports can raise anything
        raise SpecBenchError(f"{place}._target_={_shown(path)}: no such class") from error
    if not any(_is(taker, kind) for kind in expected):
        raise SpecBenchError(f"{place}._target_={path}: is no {' or '.join(kind.__name__ for kind in expected)}")
    return taker


def _is(taker: type, kind: type) -> bool:
    """Is a class of this kind, or does it have the methods of this protocol?"""
    if getattr(kind, "_is_protocol", False):
        asked = [n for n, v in vars(kind).items() if inspect.isfunction(v) and (n == "__call__" or n[0] != "_")]
        return all(hasattr(taker, name) for name in asked)
    return issubclass(taker, kind)


def classes(annotation: Any) -> Iterator[type]:
    """Classes in an annotation whose nodes are validated by option: dataclasses, protocols, types unknown to pydantic."""
    if typing.get_origin(annotation) is typing.Annotated:
        yield from classes(typing.get_args(annotation)[0])
    elif typing.get_origin(annotation) in (typing.Union, types.UnionType, list, tuple):
        for part in typing.get_args(annotation):
            yield from classes(part)
    elif isinstance(annotation, type) and (dataclasses.is_dataclass(annotation) or not _plain(annotation)):
        yield annotation


@functools.cache
def _plain(annotation: type) -> bool:
    try:
        TypeAdapter(annotation)
    except PydanticSchemaGenerationError:
        return False
    return True


def _join(place: str, name: Any) -> str:
    return f"{place}.{name}" if place else str(name)


def _shown(value: Any) -> str:
    shown = "null" if value is None else value if isinstance(value, str) else json.dumps(value)
    return shorten(visible(shown), 60)
