"""The files of `conf/`: what each is, its options, their defaults, and their meanings from the comments beside them.

Reads YAML together with its comments and imports neither Hydra nor torch, so that help and lists are there at once.
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
    """One option. name: as it is typed. default: as it is written; empty for a part that has options of its own."""

    name: str
    default: str
    meaning: str


@dataclass(frozen=True)
class File:
    """One YAML file.

    Attributes:
        about: its first comment, on one line. whole: its options are named from the configuration's root.
        options: those that stand in it, by name.
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
        """The part of the content that is passed to the class that the file configures."""
        node: Mapping[str, Any] = self.content.get(self.path.parent.name, {}) if self.whole else self.content
        return node


@dataclass(frozen=True)
class Group:
    """A folder of files of which a command takes one.

    Attributes:
        place: of its options. chosen: by default. fixed: only the user may choose otherwise. optional: it may be none.
    """

    folder: str
    place: str
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
        raise SpecBenchError(f"{path} is not YAML; mend it") from error
    finally:
        loader.dispose()
    if not isinstance(node, yaml.MappingNode):
        raise SpecBenchError(f"{path}: options were expected; mend it")
    header = re.match(r"(#.*\n)*", text)
    comment = [line[1:].strip() for line in header[0].splitlines() if not line.startswith("# @")] if header else []
    options = {option.name: option for option in _options(node, text.split("\n"))}
    return File(path, " ".join(comment), text.startswith("# @package _global_"), content, options)


def _options(node: yaml.MappingNode, lines: Sequence[str], place: str = "") -> Iterator[Option]:
    """The options below a node. A part with a comment of its own is one option, of another part each option is one."""
    for key, value in node.value:
        name = place + str(key.value)
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
    found = re.search(r"(?:^|\s)#\s*(.*)", lines[end.line][end.column :])
    return found[1].strip() if found else ""


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


def unknown(folder: str, name: str, known: Collection[str]) -> str:
    """The message on a name that no file of a folder has."""
    return f"{folder}={visible(name)}: there is no such {folder}{nearest(name, known) or f'; {where(folder)}'}"


def where(folder: str) -> str:
    """How a user can list the files of a folder of `conf/`."""
    named = f"specbench list {LISTED[folder]}" if folder in LISTED else f"ls conf/{folder}"
    return f"`{named}` shows what there is"


def groups(command: str) -> dict[str, Group]:
    """The groups of a command's configuration, by the names under which they are typed."""
    found: dict[str, Group] = {}
    for item in read(CONF / f"{command}.yaml").content.get("defaults", []):
        if isinstance(item, str):
            found |= groups(item) if item != "_self_" else {}
            continue
        ((key, chosen),) = item.items()
        typed = key.split()[-1]
        folder, _, place = typed.partition("@")
        if not folder.startswith("hydra/"):
            how = key.split()[0]
            found[typed] = Group(folder, place or folder, chosen, how == "override", how == "optional")
    return found


def choices(command: str, words: Sequence[str] = ()) -> dict[str, str]:
    """The file that each group of a command takes with these overrides. Raises `SpecBenchError` for an unknown file."""
    known = groups(command)
    pairs = (word.partition("=") for word in words)
    typed = {key: value.split(",")[0] for key, equals, value in pairs if equals and key in known}
    found = {key: group.chosen for key, group in known.items()} | typed
    for key, name in typed.items():
        file(known[key].folder, name)
    for key, name in [*found.items()]:
        if known[key].folder in PRESETS:
            continue
        for other, value in _overridden(file(known[key].folder, name)):
            if other in known and other not in typed and not known[other].fixed:
                found[other] = value
    return found


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
    """A file's options after those of its parents; the first file that has an option gives its meaning."""
    own = read(path)
    found: dict[str, Option] = {}
    for parent in own.parents:
        found |= options(path.with_name(f"{parent}.yaml"))
    for name, option in own.options.items():
        known = found.get(name)
        found[name] = replace(option, meaning=known.meaning) if known and known.meaning else option
    return found


def chosen_options(group: Group, name: str, default: str) -> list[Option]:
    """The options of a group's file. One that it says nothing of means what it means elsewhere.

    That is in another file of the same class, or in the group's default one.
    """
    found = file(group.folder, name)
    same = [other for other in names(group.folder) if _class(file(group.folder, other)) == _class(found)]
    meanings: dict[str, str] = {}
    for other in (name, *same, default):
        for option in _placed(group, other):
            meanings[option.name] = meanings.get(option.name) or option.meaning
    return [replace(option, meaning=meanings[option.name]) for option in _placed(group, name)]


def _placed(group: Group, name: str) -> list[Option]:
    found = file(group.folder, name)
    place = "" if found.whole else f"{group.place}."
    return [replace(option, name=place + option.name) for option in options(found.path).values()]


def _class(found: File) -> Any:
    return found.node.get("_target_")
