"""`specbench list`: what there is to choose from, one line each: what it is, what it needs, whether it is here.

Nothing is loaded and nothing is fetched.
"""

import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import constants
from pydantic import TypeAdapter

from specbench.common.errors import SpecBenchError, nearest, shorten, visible
from specbench.common.storage import PROJECT, cache_root
from specbench.config import catalog
from specbench.config.catalog import File
from specbench.data.download import Wheel, Wheels, wheel_name

Rows = list[tuple[str, ...]]  # the first are the columns' names
_WHEEL: TypeAdapter[Wheel | Wheels] = TypeAdapter(Wheel | Wheels)
WIDTH = 80  # where there is no terminal
MIN_WIDTH = 17  # characters that a column keeps: as many as "Beagle, Figure 11" has


def list_text(words: Sequence[str]) -> str:
    """The list that `specbench list` prints. Raises `SpecBenchError` for an unknown one."""
    if not words:
        raise SpecBenchError(f"list: name one of {', '.join(KINDS)}")
    kind, *options = words
    if kind not in KINDS:
        raise SpecBenchError(f"list {visible(kind)}: there is no such list{nearest(kind, KINDS)}")
    pairs = [word.lstrip("-").partition("=") for word in options]
    if pairs and (kind != "drafters" or any(key != "model" for key, _, _ in pairs)):
        raise SpecBenchError(f"list {visible(' '.join(words))}: there is no such option; list drafters takes --model=NAME")
    rows = drafters(*[name for _, _, name in pairs][-1:]) if kind == "drafters" else KINDS[kind]()
    return table(rows, shutil.get_terminal_size((WIDTH, 24)).columns)


def table(rows: Rows, width: int) -> str:
    """Columns in plain text; columns that cost the fewest cells characters are narrowed until all fit."""
    lengths = [[len(cell) for cell in column] for column in zip(*rows, strict=True)]
    widths = [max(column) for column in lengths]
    while sum(widths) + 2 * (len(widths) - 1) > width:
        cuttable = [index for index, size in enumerate(widths) if index and size > MIN_WIDTH]
        if not cuttable:
            break
        cost = {index: sum(length >= widths[index] for length in lengths[index]) for index in cuttable}
        widths[min(cuttable, key=lambda index: (cost[index], -widths[index]))] -= 1
    lines = ("  ".join(shorten(cell, size).ljust(size) for cell, size in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(visible(line.rstrip()) for line in lines)


def _files(folder: str) -> list[File]:
    return [catalog.file(folder, name) for name in catalog.names(folder)]


# Drafters -------------------------------------------------------------------------------------------------------------


def drafters(model: str | None = None) -> Rows:
    """The rows of the list. model: the target whose weights are looked for; None: the default one."""
    model = model or catalog.groups("run")["model"].chosen
    published = catalog.file("model", model).content.get("published") or {}
    rows: Rows = [("drafter", "what", "needs", "here")]
    for found in _files("drafter"):
        parts = _trained(found.node)
        needs = "training" if parts else "nothing"
        rows.append((found.path.stem, found.sentence, needs, _weights(parts, model, published)))
    return rows


def _trained(node: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The parts of a drafter that have weights of their own, itself first."""
    if "trained" in node:
        return _trained(catalog.file("drafter", node["trained"]).node)
    base = node.get("base")
    return [*([node] if "weights" in node else []), *(_trained(base) if isinstance(base, Mapping) else [])]


def _weights(parts: Sequence[Mapping[str, Any]], model: str, published: Mapping[str, str]) -> str:
    folders = [str(part["weights"]).replace("${model.name}", model) for part in parts]
    if all((PROJECT / folder / "model.safetensors").is_file() for folder in folders):
        return "yes"
    return "on the hub" if parts[0]["name"] in published else "no"


# Models and prompts ---------------------------------------------------------------------------------------------------


def models() -> Rows:
    """The rows of the list. size: parameters. memory: of the weights in bfloat16, and in float32, which most CPUs take."""
    rows: Rows = [("model", "what", "size", "memory", "from", "here")]
    for found in _files("model"):
        size = _billions(found)
        rows.append((found.path.stem, found.sentence, *_sizes(found, size), _source(found), _here(found, 2 * (size or 0))))
    return rows


def _billions(found: File) -> float | None:
    """Billions of parameters, from the file, else from the model's name; None if neither tells."""
    if (billions := found.content.get("billions")) is not None:
        return float(billions)
    named = re.search(r"-(\d+(?:\.\d+)?)([mb])$", found.path.stem)
    return float(named[1]) / (1000 if named[2] == "m" else 1) if named else None


def _sizes(found: File, billions: float | None) -> tuple[str, str]:
    """Number of parameters and memory, for a table."""
    if billions is None:
        return "?", "?"
    dtype = found.content.get("dtype", "auto")
    sizes = (2 * billions, 4 * billions) if dtype == "auto" else ((4 if dtype == "float32" else 2) * billions,)
    memory = "–".join(_number(gigabytes) for gigabytes in sizes) + " GB"
    return (f"{_number(billions)} B" if billions >= 1 else f"{1000 * billions:.0f} M"), memory


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def datasets() -> Rows:
    """The rows of the list. A file of `data.root` comes before the sources listed here."""
    rows: Rows = [("dataset", "what", "from", "here")]
    files = map(_with_parents, _files("dataset"))
    return rows + [(found.path.stem, found.sentence, _source(found) or "a file", _here(found)) for found in files]


def _with_parents(found: File) -> File:
    """A file with the content of its parents under its own."""
    content = dict(found.content)
    for name in found.parents:
        content = {**catalog.file(found.path.parent.name, name).content, **content}
    return replace(found, content=content)


def _source(found: File) -> str:
    """Where a file's data comes from, in the order in which sources are tried."""
    sources = [source for source in ("path", "hub", "wheel") if found.content.get(source)]
    return " or ".join(sources) + (", gated" if "Gated on the hub" in found.about else "")


def _here(found: File, gigabytes: float | None = None) -> str:
    """`yes`, or how much is fetched on first use. gigabytes: size on the hub, if known."""
    content = found.content
    if content.get("path"):
        return "yes" if Path(content["path"]).expanduser().exists() else "no"
    if _fetched(found):
        return "yes"
    size = re.search(r"\((\d+ [KMG]B)\)", found.about)
    if size or (gigabytes and content.get("hub")):
        return f"no, {size[1] if size else f'{gigabytes:.0f} GB'}"
    return "no"


def _fetched(found: File) -> bool:
    """Does this project's cache or that of the hub's client hold it?"""
    wheel, hub = found.content.get("wheel"), found.content.get("hub")
    if wheel:
        entries = f"models/{found.path.stem}", wheel_name(_WHEEL.validate_python(wheel))
        if any((cache_root() / entry).exists() for entry in entries):
            return True
    if isinstance(hub, Mapping):
        cache = Path(os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME) / "datasets")
        return _any(cache / hub["path"].replace("/", "___"), "**/*.arrow")
    patterns = "snapshots/*/*.safetensors", "snapshots/*/*.bin"
    return hub is not None and _any(Path(constants.HF_HUB_CACHE) / f"models--{hub.replace('/', '--')}", *patterns)


def _any(folder: Path, *patterns: str) -> bool:
    return any(True for pattern in patterns for _ in folder.glob(pattern))


# Trees and studies ----------------------------------------------------------------------------------------------------


def trees() -> Rows:
    return [("tree", "what"), *((found.path.stem, found.sentence) for found in _files("tree"))]


def studies() -> Rows:
    """The rows of the list. Results are looked for under `results/`, where `specbench evidence` and `study` write them."""
    rows: Rows = [("study", "what", "of", "needs", "rows")]
    for found in _files("study"):
        name, content = found.path.stem, found.content
        measured = any(_any(Path(place) / name, "**/*.jsonl") for place in ("results", "results/local"))
        needs = ", ".join(_need(key, value) for key, value in content.get("needs", {}).items()) or "nothing"
        title, source = content.get("title", found.sentence), "; ".join(content.get("source", []))
        rows.append((name, title, source, needs, "yes" if measured else "no"))
    return rows


def _need(key: str, value: Any) -> str:
    """A requirement in words, see `specbench.records.studies.Needs`."""
    words = {"device": "a GPU", "billions": f"a target of {value} B", "vocabulary": f"a target with {value} ids"}
    return words.get(key) or (str(value) if key in ("project", "pretrained") else f"{key} {value}")


KINDS: dict[str, Callable[[], Rows]] = {
    "drafters": drafters,
    "datasets": datasets,
    "models": models,
    "trees": trees,
    "studies": studies,
}
