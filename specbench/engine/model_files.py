"""The files of a model's folder: which ones decide what it computes, and what must not stand in them. Knows no model.

Loading and identity share these lists. Keys by which Transformers would read other files than the listed ones are refused,
as are sizes that no model has, before anything is built from them.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ConfigDict
from typing_extensions import TypedDict

from specbench.common import hashing
from specbench.common.errors import SpecBenchError
from specbench.common.io import read_json, read_text

CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer_config.json"
WHOLE = ("model.safetensors", "pytorch_model.bin")  # one file, else an index of several; safetensors first
SETTINGS = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".bpe", ".spm", ".vocab")  # suffixes; besides the weights
VERSIONED = "tokenizer.model."  # begins names such as `tokenizer.model.v3`
TEMPLATES = "additional_chat_templates"  # a folder, one of whose files may be the template that is used
OBJECTS = {f"{n}.json" for n in ("config", "generation_config", "tokenizer", "tokenizer_config", "vocab")}
OBJECTS |= {f"{n}.json" for n in ("special_tokens_map", "added_tokens", "chat_template")}
SMALL = 1 << 20  # bytes; larger files of text are checked only after a library failed to read the folder

ADAPTER = "adapter_config.json"  # Transformers adds the adapter's weights wherever PEFT is installed
# Keys that name another file to read instead of the one beside which they stand.
REDIRECTS = {CONFIG: ("transformers_weights", "configuration_files"), TOKENIZER: ("fast_tokenizer_files", "gguf_file")}

MAX_PARTS, MAX_SIZE = 4096, 2**31 - 1
SIZE = re.compile(r"size|dim|width|rank|length|position|inner|embd|ffn|capacity")  # in keys of integers up to MAX_SIZE
PARTS = re.compile(r"layers?|experts?|heads?|blocks|depth")  # in other keys, of integers up to MAX_PARTS


class Index(TypedDict):
    """The key of an index that is read: the file of each tensor."""

    __pydantic_config__ = ConfigDict(strict=True)  # type: ignore[misc]
    weight_map: dict[str, str]


def weight_files(folder: Path) -> list[Path]:
    """The files that Transformers reads a model's tensors from. Raises `SpecBenchError` if one is not there."""
    name = main_file(folder)
    if not name.endswith(".index.json"):
        return [folder / name]
    index: Index = read_json(folder / name, Index)
    files = [folder / part for part in sorted(set(index["weight_map"].values()))]
    if missing := [path for path in files if not path.is_file()]:
        raise SpecBenchError(f"{missing[0]} is missing, which {name} names; fetch it again")
    return files


def main_file(folder: Path) -> str:
    """The weights, or the index of several such files. Raises `SpecBenchError` if there are none."""
    names = (name for whole in WHOLE for name in (whole, f"{whole}.index.json"))
    if (name := next((n for n in names if (folder / n).is_file()), None)) is None:
        raise SpecBenchError(f"{folder} holds no weights ({' or '.join(WHOLE)}, or an index of several); fetch them")
    return name


def heads_of(config: Any) -> tuple[int, int, int]:
    """Heads of queries, heads of keys and values, and the width of a head; configurations may leave out the last two."""
    heads: int = config.num_attention_heads
    key_heads: int = getattr(config, "num_key_value_heads", None) or heads
    width: int = getattr(config, "head_dim", None) or config.hidden_size // heads
    return heads, key_heads, width


def settings_files(folder: Path) -> list[Path]:
    """The files besides the weights that decide what a model and its tokenizer do, down to the chat format."""
    found = [p for p in folder.iterdir() if p.suffix in SETTINGS or p.name.startswith(VERSIONED)]
    return sorted(p for p in [*found, *(folder / TEMPLATES).glob("*.jinja")] if p.is_file())


def contents_of(folder: Path) -> dict[str, str]:
    """SHA-256, by path in a folder, of every file that decides what a model and its tokenizer do."""
    files = [*settings_files(folder), *weight_files(folder)]
    return {os.path.relpath(path, folder): hashing.of_file(path) for path in files}


def read_settings(path: Path) -> dict[str, Any]:
    """The values of a file such as `config.json`. Raises `SpecBenchError`, also for sizes that no model has."""
    values: dict[str, Any] = read_json(path)
    require_sizes(values, str(path))
    return values


def require_sizes(values: Mapping[str, Any], where: str) -> None:
    """Refuse sizes that no model has. where: begins the message."""
    for key, value in _items(values):
        if isinstance(value, int) and value > (limit := _limit(key)):
            raise SpecBenchError(f"{where}: {key} is {value}, more than {limit}; correct it")


def _items(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Keys and values at any depth."""
    for key, value in values.items():
        yield str(key), value
        if isinstance(value, Mapping):
            yield from _items(value)


def _limit(key: str) -> float:
    """The largest integer that a key of a configuration may have."""
    return MAX_SIZE if SIZE.search(key) else MAX_PARTS if PARTS.search(key) else float("inf")


def require_sound(folder: Path) -> None:
    """Refuse a folder with damaged text, with keys or files that redirect a reader, or with sizes that no model has."""
    check_text(path for path in settings_files(folder) if path.stat().st_size <= SMALL)  # Transformers ignores some damage
    if (folder / CONFIG).is_file():
        read_settings(folder / CONFIG)
    for name, keys in REDIRECTS.items():
        values = read_json(folder / name) if (folder / name).is_file() else {}
        if key := next((k for k, _ in _items(values) if k in keys), None):
            raise SpecBenchError(
                f"{folder / name}: {key} makes other files count than those in this folder; remove the key"
            )
    if (folder / ADAPTER).is_file():
        raise SpecBenchError(
            f"{folder / ADAPTER}: an adapter is not applied; merge it into the weights and remove the file"
        )


def check_text(paths: Iterable[Path]) -> None:
    """Refuse text that is not UTF-8, and JSON that is no object where Transformers expects one."""
    for path in paths:
        if path.name in OBJECTS:
            read_json(path)
        elif path.suffix in (".jinja", ".txt"):
            read_text(path)
