"""Validates a configuration against the annotations of the classes that it configures, before anything is loaded.

Every option is declared once: as an annotated parameter of the class in a node's `_target_`, or as a field of the command's
dataclass. Values are not converted: `"3"` is no number. An error is one line: the option, its value, what is allowed.
"""

import dataclasses
import functools
import inspect
import json
import re
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
_INPUT = re.compile(r"^(Input|String|List|Tuple|Dictionary) should")  # begins pydantic's messages


def check(config: DictConfig, declared: type) -> dict[str, Any]:
    """The options of a configuration as plain values, validated against a command's dataclass. Raises `SpecBenchError`."""
    try:
        plain: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or "configuration"
        raise SpecBenchError(f"{key}: {str(error).splitlines()[0]}") from error
    check_node(plain, (declared,))
    return plain


def check_node(node: Mapping[Any, Any], classes: tuple[type, ...], key: str = "") -> None:
    """Validate a node against the class it configures, one of `classes`. key: of the node, as on the command line."""
    cls = classes[0]
    if "_target_" in node:
        cls = target(node["_target_"], classes, key)
    elif not dataclasses.is_dataclass(cls):
        raise SpecBenchError(f"{key}._target_ is missing: the class, of the kind {cls.__name__}, that takes this node")
    given = {name: value for name, value in node.items() if not (key and name in INSTANTIATION)}
    _check_options(given, options(cls), key)
    for name, option in options(cls).items():
        if option.required and name not in node:
            raise SpecBenchError(f"{_join(key, name)} is missing; {cls.__name__} needs it")


def check_some(node: Mapping[str, Any], cls: type, allowed: Sequence[str], key: str) -> None:
    """Validate values of the allowed options of a class, none of which is required."""
    _check_options(node, {name: option for name, option in options(cls).items() if name in allowed}, key)


def _check_options(node: Mapping[Any, Any], declared: "Mapping[str, Option]", key: str) -> None:
    for name in node:
        if name not in declared:
            raise SpecBenchError(f"{_join(key, visible(str(name)))}: no such option{nearest(name, declared)}")
    for name, option in declared.items():  # in the order of declaration, whatever that of the node
        if name in node:
            check_value(node[name], option, _join(key, name))


@dataclasses.dataclass(frozen=True)
class Option:
    """One option of a class, as declared."""

    annotation: Any
    required: bool
    default: Any = None

    @functools.cached_property
    def adapter(self) -> TypeAdapter[Any]:
        return strict_adapter(self.annotation)


@functools.cache
def options(cls: type) -> dict[str, Option]:
    """The options of a class: parameters of its constructor, and of its parents' if it has keyword arguments."""
    declared: dict[str, Option] = {}
    for owner in cls.__mro__:
        constructor = vars(owner).get("__init__")
        if not inspect.isfunction(constructor):
            continue
        hints = typing.get_type_hints(owner if dataclasses.is_dataclass(owner) else constructor, include_extras=True)
        parameters = list(inspect.signature(constructor).parameters.values())[1:]
        for parameter in parameters:
            if parameter.kind is not parameter.VAR_KEYWORD:
                required = parameter.default is parameter.empty
                name = parameter.name.removesuffix("_")  # of an option that is a keyword of Python
                declared.setdefault(name, Option(hints.get(parameter.name, Any), required, parameter.default))
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return declared


def check_value(value: Any, option: Option, key: str) -> None:
    """Validate one option's value: a node against its class, plain values against their type."""
    expected = tuple(classes(option.annotation))
    if isinstance(value, Mapping) and ("_target_" in value or expected):
        check_node(value, expected or (object,), key)
    elif isinstance(value, list) and expected:
        for index, node in enumerate(value):
            if not isinstance(node, Mapping):
                raise SpecBenchError(f"{key}[{index}]={_shown(node)}: the options of {expected[0].__name__} were expected")
            check_node(node, expected, f"{key}[{index}]")
    elif value is None and type(None) in typing.get_args(option.annotation):
        pass
    elif expected:
        raise SpecBenchError(f"{key}={_shown(value)}: a node with a _target_ was expected, {expected[0].__name__}")
    else:
        try:
            option.adapter.validate_json(json.dumps(value))
        except ValidationError as error:
            raise SpecBenchError(f"{key}{_explain(error, value)}") from error


def _explain(error: ValidationError, value: Any) -> str:
    """The end of a message: path in the value, value, what is allowed, as in `[2]=abc: must be a valid number`."""
    errors = error.errors(include_url=False)
    path = max((_path_in(value, e["loc"]) for e in errors), key=len)
    for step in path:
        value = value[step]
    allowed = [_INPUT.sub("must", e["msg"]).removeprefix("Value error, ") for e in errors if e["loc"][: len(path)] == path]
    shown_path = "".join(f"[{step}]" if isinstance(step, int) else f".{visible(str(step))}" for step in path)
    return f"{shown_path}={_shown(value)}: {' or '.join(dict.fromkeys(allowed))}"


def _path_in(value: Any, loc: tuple[Any, ...]) -> tuple[Any, ...]:
    """The part of an error's location that lies in the value; the rest names types that were tried."""
    for depth, step in enumerate(loc):
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            return loc[:depth]
    return loc


def target(path: Any, expected: tuple[type, ...], key: str) -> type:
    """The class that a `_target_` names. Raises `SpecBenchError` if it is of none of the expected kinds."""
    try:
        cls = get_class(path)
    except Exception as error:  # imports can raise anything
        raise SpecBenchError(f"{key}._target_={_shown(path)}: no such class") from error
    if not any(_is_a(cls, kind) for kind in expected):
        raise SpecBenchError(f"{key}._target_={path}: is no {' or '.join(kind.__name__ for kind in expected)}")
    return cls


def _is_a(cls: type, kind: type) -> bool:
    """Is a class a subclass of this kind, or does it have the methods of this protocol?"""
    if getattr(kind, "_is_protocol", False):
        methods = [n for n, v in vars(kind).items() if inspect.isfunction(v) and (n == "__call__" or n[0] != "_")]
        return all(hasattr(cls, name) for name in methods)
    return issubclass(cls, kind)


def classes(annotation: Any) -> Iterator[type]:
    """Classes in an annotation whose nodes are validated option by option, since pydantic does not do so."""
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


def _join(key: str, name: Any) -> str:
    return f"{key}.{name}" if key else str(name)


def _shown(value: Any) -> str:
    return shorten(visible(value if isinstance(value, str) else json.dumps(value)), 60)
