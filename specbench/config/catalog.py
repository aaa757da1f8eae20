"""The files of `conf/`: their options, defaults, and meanings from the comments beside them.

Imports neither Hydra nor torch, so that help and lists appear at once.
"""

import functools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from specbench.common.errors import SpecBenchError, nearest, visible
from specbench.common.io import read_text
from specbench.common.storage import PROJECT

CONF = PROJECT / "conf"
PRESETS = ("recipe", "study")  # groups whose files are chosen as a whole
LISTED = {"drafter": "drafters", "dataset": "datasets", "model": "models", "tree": "trees", "study": "studies"}
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True)
class Option:
    """One option. name: as it is typed. default: as in the file; empty for a part that has options of its own."""

    name: str
    default: str
    meaning: str


@dataclass(frozen=True)
class File:
    """One YAML file.

    Attributes:
        about: its first comment, on one line. whole: its options are named from the configuration's root.
        options: those of the file itself, without its parents', by name.
    """

    path: Path
    about: str
    whole: bool
    content: Mapping[str, Any]
    options: Mapping[str, Option]

    @property
    def sentence(self) -> str:
        """What the file is, in one sentence."""
        return re.split(r"(?<=[\w)])\. (?=[A-Z])", self.about.rstrip("."), maxsplit=1)[0]

    @property
    def parents(self) -> list[str]:
        """Names of files in the same folder that this one extends."""
        return [item for item in self.content.get("defaults", []) if isinstance(item, str) and item != "_self_"]

    @property
    def node(self) -> Mapping[str, Any]:
        """The part of the content that configures the file's class."""
        return self.content.get(self.path.parent.name, {}) if self.whole else self.content


@dataclass(frozen=True)
class Group:
    """A folder of files of which a command takes one.

    Attributes:
        prefix: of its options' names. chosen: the default file. fixed: no other file overrides the choice.
        optional: no file need be chosen.
    """

    folder: str
    prefix: str
    chosen: str
    fixed: bool
    optional: bool


@functools.cache
def read(path: Path) -> File:
    """A YAML file with its comments. Raises `SpecBenchError` for a file that holds no YAML mapping."""
    text = read_text(path)
    loader = _LOADER(text)
    try:
        node = loader.get_single_node()
        content = loader.construct_document(node)
    except (yaml.YAMLError, AttributeError) as error:
        raise SpecBenchError(f"{path} is not YAML; correct it") from error
    finally:
        loader.dispose()
    if not isinstance(node, yaml.MappingNode):
        raise SpecBenchError(f"{path}: options were expected; correct it")
    header = re.match(r"(#.*\n)*", text)
    comment = [line[1:].strip() for line in header[0].splitlines() if not line.startswith("# @")] if header else []
    options = {option.name: option for option in _options(node, text.split("\n"))}
    return File(path, " ".join(comment), text.startswith("# @package _global_"), content, options)


def _options(node: yaml.MappingNode, lines: Sequence[str], prefix: str = "") -> Iterator[Option]:
    """The options below a node. A part with a comment of its own is one option; other parts are listed by option."""
    for key, value in node.value:
        name = prefix + str(key.value)
        if key.value.startswith("_") or name in ("defaults", "hydra"):
            continue
        part = isinstance(value, yaml.MappingNode) and not value.flow_style
        meaning = _comment(key, value, lines)
        if part and not meaning and any(not k.value.startswith("_") for k, _ in value.value):
            yield from _options(value, lines, f"{name}.")
        else:
            yield Option(name, "" if part else _written(value, lines), meaning)


def _comment(key: yaml.Node, value: yaml.Node, lines: Sequence[str]) -> str:
    """The comment behind a value on one line, else the one behind its key."""
    block = getattr(value, "flow_style", None) is False or getattr(value, "style", None) in ("|", ">")
    end = key.end_mark if block or value.start_mark.line < value.end_mark.line else value.end_mark
    match = re.search(r"(?:^|\s)#\s*(.*)", lines[end.line][end.column :])
    return match[1].strip() if match else ""


def _written(value: yaml.Node, lines: Sequence[str]) -> str:
    if isinstance(value, yaml.ScalarNode) and value.style not in ("|", ">"):
        return str(value.value) or '""'
    begin, end = value.start_mark, value.end_mark
    return lines[begin.line][begin.column : end.column] if begin.line == end.line else "…"


# Groups ---------------------------------------------------------------------------------------------------------------


def names(folder: str) -> list[str]:
    """The names of the files in a folder of `conf/`, without `.yaml`."""
    return sorted(path.stem for path in (CONF / folder).glob("*.yaml"))


def file(folder: str, name: str) -> File:
    """One file of a folder of `conf/`. Raises `SpecBenchError` for an unknown name."""
    known = names(folder)
    if name not in known:
        raise SpecBenchError(unknown(folder, name, known))
    return read(CONF / folder / f"{name}.yaml")


def drafter_class(name: str) -> Any:
    """The class of a drafter of `conf/drafter`. Raises `SpecBenchError` for an unknown name."""
    from hydra.utils import get_class  # here alone: listing needs no Hydra

    return get_class(file("drafter", name).node["_target_"])


def unknown(folder: str, name: str, known: Collection[str]) -> str:
    """The message on a name that no file of a folder has."""
    return f"{folder}={visible(name)}: there is no such {folder}{nearest(name, known) or f'; {where(folder)}'}"


def require_own_name(options: Mapping[str, Any], option: str = "drafter") -> None:
    """Raises `SpecBenchError` for a drafter with the name of another one of `conf/drafter`, as which its rows would count.

    Other names are allowed: they tell variants of a drafter apart.
    """
    name, target = options["name"], options["_target_"]
    if name in names("drafter") and file("drafter", name).node["_target_"] != target:
        kind = target.rpartition(".")[2]
        raise SpecBenchError(f"{option}.name={name}: this is the name of another drafter, not of {kind}; leave it out")


def where(folder: str) -> str:
    """The end of a message: the command that lists the files of a folder of `conf/`."""
    command = f"specbench list {LISTED[folder]}" if folder in LISTED else f"ls conf/{folder}"
    return f"`{command}` shows what there is"


def groups(command: str) -> dict[str, Group]:
    """The groups of a command's configuration, by the names under which they are typed."""
    by_name: dict[str, Group] = {}
    for item in read(CONF / f"{command}.yaml").content.get("defaults", []):
        if isinstance(item, str):
            by_name |= groups(item) if item != "_self_" else {}
            continue
        ((key, chosen),) = item.items()
        keyword, name = key.split()[0], key.split()[-1]
        folder, _, prefix = name.partition("@")
        if not folder.startswith("hydra/"):
            by_name[name] = Group(folder, prefix or folder, chosen, keyword == "override", keyword == "optional")
    return by_name


def choices(command: str, words: Sequence[str] = ()) -> dict[str, str]:
    """The file that each group of a command takes with these overrides. Raises `SpecBenchError` for an unknown file."""
    known = groups(command)
    pairs = (word.partition("=") for word in words)
    typed = {key: value.split(",")[0] for key, equals, value in pairs if equals and key in known}
    chosen = {key: group.chosen for key, group in known.items()} | typed
    for key, name in typed.items():
        file(known[key].folder, name)
    for key, name in [*chosen.items()]:
        if known[key].folder in PRESETS:
            continue
        for other, value in _overridden(file(known[key].folder, name)):
            if other in known and other not in typed and not known[other].fixed:
                chosen[other] = value
    return chosen


def require_optional(command: str, words: Sequence[str]) -> None:
    """Raises `SpecBenchError` for an unknown file of an optional group, which Hydra would ignore."""
    known = groups(command)
    for key, _, values in (word.partition("=") for word in words):
        if key in known and known[key].optional and re.fullmatch(r"[\w.,-]+", values) and values != "null":
            for name in values.split(","):
                file(known[key].folder, name)


def _overridden(chosen: File) -> Iterator[tuple[str, str]]:
    """Files of other groups that a file chooses by default."""
    for item in chosen.content.get("defaults", []):
        if isinstance(item, Mapping):
            for key, value in item.items():
                yield key.removeprefix("override ").lstrip("/"), value


# Options --------------------------------------------------------------------------------------------------------------


def options(path: Path) -> dict[str, Option]:
    """A file's options after those of its parents; an option has the meaning that the first file gives it."""
    own = read(path)
    by_name: dict[str, Option] = {}
    for parent in own.parents:
        by_name |= options(path.with_name(f"{parent}.yaml"))
    for name, option in own.options.items():
        inherited = by_name.get(name)
        by_name[name] = replace(option, meaning=inherited.meaning) if inherited and inherited.meaning else option
    return by_name


def chosen_options(group: Group, name: str, default: str) -> list[Option]:
    """The options of a group's file; those without a comment have it from a file of the same class, or the default file."""
    configured = file(group.folder, name).node.get("_target_")
    same = [other for other in names(group.folder) if file(group.folder, other).node.get("_target_") == configured]
    meanings: dict[str, str] = {}
    for other in (name, *same, default):
        for option in _full_names(group, other):
            meanings[option.name] = meanings.get(option.name) or option.meaning
    return [replace(option, meaning=meanings[option.name]) for option in _full_names(group, name)]


def _full_names(group: Group, name: str) -> list[Option]:
    """The options of a group's file, named as they are typed."""
    chosen = file(group.folder, name)
    prefix = "" if chosen.whole else f"{group.prefix}."
    return [replace(option, name=prefix + option.name) for option in options(chosen.path).values()]
