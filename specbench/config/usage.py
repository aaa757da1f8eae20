"""The text of `--help`: a command's options, their defaults and meanings, and the files to choose among."""

import ast
import re
import textwrap
from collections.abc import Iterable, Sequence

from specbench.common.errors import visible
from specbench.common.storage import PROJECT
from specbench.config import arguments, catalog

WIDTH, COLUMN = 80, 28
FLAGS = ("-h", "--help")
HIDDEN = {"study": "drafter"}  # by command, a group that it lets nobody choose: a study has arms
COMMANDS = ("run", "study", "train", "report", "export", "cost", "serve", "evidence")


def asks_for_help(words: Sequence[str]) -> bool:
    """Does a command line contain a help flag?"""
    return any(word in FLAGS for word in words)


def help_text(command: str, words: Sequence[str] = ()) -> str:
    """The help of a command. Raises `SpecBenchError` for an unknown file.

    words: of its command line; the options of the files that they choose are shown, else those of the default ones.
    """
    chosen = catalog.choices(command, words)
    groups = {key: group for key, group in catalog.groups(command).items() if key != HIDDEN.get(command)}
    first, *rest = _docstring(command)
    blocks = [[f"usage: specbench {command} [OPTION=VALUE ...]"], textwrap.wrap(first, WIDTH), *_paragraphs(rest)]
    blocks.append(["options:", *_options(catalog.options(catalog.CONF / f"{command}.yaml").values())])
    if groups:
        blocks.append(["files of options, to choose by name:", *_files(groups, chosen)])
    for key, group in groups.items():
        if group.folder not in catalog.PRESETS:
            title = f"{key}={chosen[key]}: {catalog.file(group.folder, chosen[key]).sentence}"
            options = catalog.chosen_options(group, chosen[key], group.chosen)
            blocks.append([*textwrap.wrap(visible(title), WIDTH), *_options(options)])
            if key == "drafter":
                blocks.append(_further(catalog.file(group.folder, chosen[key]), options))
    example = next((key for key in ("drafter", "model") if key in groups), None)
    hint = f"Options of another file: specbench {command} --help {example}=NAME. " if example else ""
    blocks.append(textwrap.wrap(f"{hint}Hydra's own flags, such as --multirun and --cfg job: --hydra-help.", WIDTH))
    return "\n\n".join("\n".join(block) for block in blocks if block)


def summary(command: str) -> str:
    """What a command does, in one sentence."""
    return _docstring(command)[0]


def row(left: str, right: str, column: int = COLUMN) -> list[str]:
    """Lines of two columns; a left text that is too long gets a line of its own."""
    lines = textwrap.wrap(visible(right), WIDTH - column, break_on_hyphens=False) or [""]
    left = f"  {visible(left)}"
    if len(left) + 2 > column:
        return [left, *(" " * column + line for line in lines)]
    return [left.ljust(column) + lines[0], *(" " * column + line for line in lines[1:])]


def _docstring(command: str) -> list[str]:
    """Lines of the docstring of a command's module, read without importing it, which takes seconds."""
    text = (PROJECT / "specbench" / f"{command}.py").read_text()
    first, *rest = (ast.get_docstring(ast.parse(text)) or "").replace("python -m specbench.", "specbench ").split("\n")
    return [first.rstrip("."), *rest]


def _paragraphs(lines: Iterable[str]) -> list[list[str]]:
    """Paragraphs of a docstring, wrapped; in those with examples, comments follow on lines of their own."""
    wrapped = []
    for paragraph in "\n".join(lines).strip().split("\n\n"):
        if "specbench " in paragraph.split("\n")[0]:
            examples = (re.split(r"\s+# ", line, maxsplit=1) for line in paragraph.split("\n"))
            wrapped.append([line for words in examples for line in _example(*words)])
        else:
            wrapped.append(textwrap.wrap(paragraph, WIDTH))
    return wrapped


def _example(command: str, comment: str = "") -> list[str]:
    lines = textwrap.wrap(command, WIDTH - 2, initial_indent="  ", subsequent_indent="      ", break_on_hyphens=False)
    comments = textwrap.wrap(comment, WIDTH, initial_indent="      # ", subsequent_indent="      # ")
    return [*" \\\n".join(lines).split("\n"), *comments]


def _options(options: Iterable[catalog.Option]) -> list[str]:
    lines = ((f"{o.name}={o.default}" if o.default else f"{o.name}.*", o.meaning) for o in options)
    return [line for left, right in lines for line in row(left, right)]


def _further(file: catalog.File, options: Iterable[catalog.Option]) -> list[str]:
    """The arguments of a drafter's class that its file leaves at their defaults."""
    path, listed = str(file.node["_target_"]), {option.name.split(".")[1] for option in options}
    words = ", ".join(f"++drafter.{name}={value}" for name, value in arguments.of(path).items() if name not in listed)
    title = f"further arguments, explained in the docstring of {path}:" if words else ""
    return [*textwrap.wrap(title, WIDTH), *textwrap.wrap(words, WIDTH, initial_indent="  ", subsequent_indent="  ")]


def _files(groups: dict[str, catalog.Group], chosen: dict[str, str]) -> list[str]:
    lines = []
    for key, group in groups.items():
        lines += row(f"{key}={chosen[key].replace('???', 'NAME')}", ", ".join(catalog.names(group.folder)))
    return lines
