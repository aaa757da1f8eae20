"""`specbench list`: the files of options, one line each: what it is, what it needs, whether it is here.

No model is loaded and nothing is downloaded.
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
from specbench.common.storage import cache_root, project_path, user_path
from specbench.config import catalog
from specbench.config.catalog import File
from specbench.data.download import WebFile, Wheel, Wheels, converted_entry, wheel_name

Rows = list[tuple[str, ...]]  # the first are the columns' names
_WHEEL: TypeAdapter[Wheel | Wheels] = TypeAdapter(Wheel | Wheels)
_WEB = TypeAdapter(WebFile)
WIDTH = 80  # where there is no terminal
MIN_WIDTH = 17  # characters of a column that is narrowed: as many as "Beagle, Figure 11" has


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
    rows = drafters(pairs[-1][2]) if pairs else KINDS[kind]()
    return table(rows, shutil.get_terminal_size((WIDTH, 24)).columns)


def table(rows: Rows, width: int) -> str:
    """Columns in plain text, narrowed to a total width where that cuts the fewest cells."""
    lengths = [[len(cell) for cell in column] for column in zip(*rows, strict=True)]
    widths = [max(column) for column in lengths]
    while sum(widths) + 2 * (len(widths) - 1) > width:
        narrowable = [index for index, size in enumerate(widths) if index and size > MIN_WIDTH]
        if not narrowable:
            break
        cut = {index: sum(length >= widths[index] for length in lengths[index]) for index in narrowable}
        widths[min(narrowable, key=lambda index: (cut[index], -widths[index]))] -= 1
    lines = ("  ".join(shorten(cell, size).ljust(size) for cell, size in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(visible(line.rstrip()) for line in lines)


def _files(folder: str) -> list[File]:
    return [catalog.file(folder, name) for name in catalog.names(folder)]


# Drafters -------------------------------------------------------------------------------------------------------------


def drafters(model: str | None = None) -> Rows:
    """model: the target of the weights in column `here`; None: the default one."""
    model = model or catalog.groups("run")["model"].chosen
    published = catalog.file("model", model).content.get("published") or {}
    rows: Rows = [("drafter", "what", "needs", "here")]
    for file in _files("drafter"):
        rows.append((file.path.stem, file.sentence, _needs(file), drafter_here(file, model, published)))
    return rows


def _needs(file: File) -> str:
    """What a drafter needs beside the target."""
    if _trained(file.node):
        return "training"
    needs = {"corpus": "a corpus", "endpoint": "a server", "arithmetic": "its package"}  # by an option that such files have
    return next((words for option, words in needs.items() if option in file.node), "nothing")


def drafter_here(file: File, model: str, published: Mapping[str, str]) -> str:
    """Are the weights, or the corpus, that a drafter's file names there for a target: yes, no, or "on the hub"?"""
    parts = _trained(file.node)
    return _corpus(file.node["corpus"], model) if "corpus" in file.node and not parts else _weights(parts, model, published)


def _trained(node: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The options of a drafter, and of those it wraps, that have weights of their own."""
    if "trained" in node:
        return _trained(catalog.file("drafter", node["trained"]).node)
    base = node.get("base")
    return [*([node] if "weights" in node else []), *(_trained(base) if isinstance(base, Mapping) else [])]


def _weights(parts: Sequence[Mapping[str, Any]], model: str, published: Mapping[str, str]) -> str:
    if all((_folder(part["weights"], model) / "model.safetensors").is_file() for part in parts):
        return "yes"
    return "on the hub" if parts[0]["name"] in published else "no"


def _corpus(folder: str, model: str) -> str:
    return "yes" if (_folder(folder, model) / "corpus.safetensors.xz").is_file() else "no"


def _folder(option: str, model: str) -> Path:
    """The folder that an option of a file names, for a target."""
    return project_path(option.replace("${model.name}", model))


# Models and prompts ---------------------------------------------------------------------------------------------------


def models() -> Rows:
    rows: Rows = [("model", "what", "size", "memory", "from", "here")]
    for file in _files("model"):
        size = _billions(file)
        rows.append((file.path.stem, file.sentence, *_sizes(file, size), _source(file), _here(file, 2 * (size or 0))))
    return rows


def _billions(file: File) -> float | None:
    """Billions of parameters, from the file, else from the model's name; None if unknown."""
    if (billions := file.content.get("billions")) is not None:
        return float(billions)
    match = re.search(r"-(\d+(?:\.\d+)?)([mb])$", file.path.stem)
    return float(match[1]) / (1000 if match[2] == "m" else 1) if match else None


def _sizes(file: File, billions: float | None) -> tuple[str, str]:
    """Number of parameters, and memory of the weights in bfloat16 to float32 if the device decides on the precision."""
    if billions is None:
        return "?", "?"
    dtype = file.content.get("dtype", "auto")
    sizes = (2 * billions, 4 * billions) if dtype == "auto" else ((4 if dtype == "float32" else 2) * billions,)
    memory = "–".join(_number(gigabytes) for gigabytes in sizes) + " GB"
    return (f"{_number(billions)} B" if billions >= 1 else f"{1000 * billions:.0f} M"), memory


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def datasets() -> Rows:
    rows: Rows = [("dataset", "what", "from", "here")]
    for file in _files("dataset"):
        content = dict(file.content)
        for name in file.parents:
            content = {**catalog.file("dataset", name).content, **content}
        file = replace(file, content=content)
        rows.append((file.path.stem, file.sentence, _source(file) or "a file", _here(file)))
    return rows


def _source(file: File) -> str:
    """Where a file's data comes from, in the order in which sources are tried."""
    sources = [source for source in ("path", "hub", "wheel", "web") if file.content.get(source)]
    return " or ".join(sources) + (", gated" if "Gated on the hub" in file.about else "")


def _here(file: File, gigabytes: float | None = None) -> str:
    """`yes`, or `no` with the size of the download if it is known. gigabytes: size on the hub."""
    content = file.content
    if content.get("path"):
        return "yes" if user_path(content["path"]).exists() else "no"
    if _in_cache(file):
        return "yes"
    size = re.search(r"\((\d+ [KMG]B)\)", file.about)
    if size or (gigabytes and content.get("hub")):
        return f"no, {size[1] if size else f'{gigabytes:.0f} GB'}"
    return "no"


def _in_cache(file: File) -> bool:
    """Is it in this project's cache, or in that of the hub's client?"""
    wheel, web, hub = (file.content.get(key) for key in ("wheel", "web", "hub"))
    if wheel:
        parts = _WHEEL.validate_python(wheel)
        entries = converted_entry(file.path.stem, parts), wheel_name(parts)
        if any((cache_root() / entry).exists() for entry in entries):
            return True
    if web:
        return (cache_root() / _WEB.validate_python(web).entry).exists()
    if isinstance(hub, Mapping):
        cache = Path(os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME) / "datasets")
        return _any(cache / hub["path"].replace("/", "___"), "**/*.arrow")
    patterns = "snapshots/*/*.safetensors", "snapshots/*/*.bin"
    return hub is not None and _any(Path(constants.HF_HUB_CACHE) / f"models--{hub.replace('/', '--')}", *patterns)


def _any(folder: Path, *patterns: str) -> bool:
    return any(True for pattern in patterns for _ in folder.glob(pattern))


# Trees and studies ----------------------------------------------------------------------------------------------------


def trees() -> Rows:
    return [("tree", "what"), *((file.path.stem, file.sentence) for file in _files("tree"))]


def studies() -> Rows:
    rows: Rows = [("study", "what", "of", "needs", "rows")]
    for file in _files("study"):
        name, content = file.path.stem, file.content
        measured = any(_any(Path(results) / name, "**/*.jsonl") for results in ("results", "results/local"))
        needs = ", ".join(_need(key, value) for key, value in content.get("needs", {}).items()) or "nothing"
        title, source = content.get("title", file.sentence), "; ".join(content.get("source", []))
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
