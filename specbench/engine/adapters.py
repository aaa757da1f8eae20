"""Adapters of a target: changes of low rank to the products of its layers (LoRA, arXiv:2106.09685), in PEFT's files.

    W' = W + s B A,    s = alpha / r, or alpha / sqrt(r) where rank-stabilised;    A [r, in], B [out, r]

A target with an adapter merged into its weights (`Target.merge_adapter`) is another target, with its own fingerprint. It is
decoded without PEFT, at the original's speed. `attach` makes a copy of a target whose adapter is trained, by PEFT.

    adapter_config.json, adapter_model.safetensors    as PEFT writes and reads them
    provenance.json                                   of adapters trained here: the target that they belong to
"""

import copy
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import ConfigDict
from safetensors.torch import save_file
from torch import Tensor, nn
from typing_extensions import TypedDict

from specbench.common import hashing
from specbench.common.environment import installed
from specbench.common.errors import SpecBenchError
from specbench.common.io import read_json
from specbench.common.storage import atomic_path
from specbench.engine import weights
from specbench.engine.pretrained import fingerprint
from specbench.engine.tensors import read_tensors, some
from specbench.records.schema import PROVENANCE

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # PEFT's, before a module's name
NAME = re.compile(rf"(?:{re.escape(PREFIX)})?(?P<module>.+)\.lora_(?P<part>[AB])(?:\.\w+)?\.weight")
LEAVE_WEIGHTS = ("gaussian", "eva", "orthogonal")  # ways to begin that change no weight of the target
HINT = "pass a folder with a LoRA adapter as PEFT writes it, such as the one of drafter=medusa2"


class AdapterConfig(TypedDict, total=False):
    """The keys of `adapter_config.json` that are read; others do not change what is computed."""

    __pydantic_config__ = ConfigDict(strict=True, extra="allow")  # type: ignore[misc]
    peft_type: str
    r: int
    lora_alpha: int | float
    use_rslora: bool
    use_dora: bool
    bias: str
    rank_pattern: dict[str, int] | None
    alpha_pattern: dict[str, int | float] | None
    modules_to_save: list[str] | None
    init_lora_weights: bool | str | None
    alora_invocation_tokens: list[int] | None


class Pair(NamedTuple):
    """The two factors of a change. a: [r, in], b: [out, r]."""

    a: Tensor
    b: Tensor


@dataclass(frozen=True)
class Adapter:
    """An adapter in memory.

    Attributes:
        pairs: by the name of the layer in the Transformers model. scale: s.
        folder: it was read from; None: it is being trained. provenance: names the target it belongs to; empty: unknown.
    """

    pairs: Mapping[str, Pair]
    scale: float
    folder: Path | None = None
    provenance: Mapping[str, Any] | None = None

    def fingerprint(self, original: str) -> str:
        """Of the adapted target, by the original's."""
        tensors = ((f"{name}.{part}", t) for name, pair in self.pairs.items() for part, t in pair._asdict().items())
        return hashing.of([original, fingerprint(tensors), self.scale])[:16]

    def save(self, folder: Path) -> None:
        """Write PEFT's two files, in bfloat16; with this scale whatever the rank."""
        rank = len(next(iter(self.pairs.values())).a)
        modules = sorted({name.rpartition(".")[2] for name in self.pairs})
        config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": self.scale * rank}
        config |= {"target_modules": modules, "bias": "none", "lora_dropout": 0.0, "base_model_name_or_path": None}
        tensors = {
            f"{PREFIX}{name}.lora_{part.upper()}.weight": tensor.detach().to("cpu", torch.bfloat16).contiguous()
            for name, pair in self.pairs.items()
            for part, tensor in pair._asdict().items()
        }
        with atomic_path(folder / TENSORS) as temporary:
            save_file(tensors, temporary, {"format": "pt"})
        with atomic_path(folder / CONFIG) as temporary:
            temporary.write_text(json.dumps(config, indent=1) + "\n")


def read(folder: Path) -> Adapter:
    """The adapter in a folder. Raises `SpecBenchError` if it is missing, damaged, or not plain LoRA."""
    for name in (CONFIG, TENSORS):
        if not (folder / name).is_file():
            raise SpecBenchError(f"model.adapter={folder}: there is no {name}; {HINT}")
    config: AdapterConfig = read_json(folder / CONFIG, AdapterConfig)
    if unknown := _unsupported(config):
        raise SpecBenchError(f"model.adapter={folder}: {unknown} in {CONFIG} is not supported; {HINT}")
    rank = config.get("r", 0)
    if rank < 1 or "lora_alpha" not in config:
        raise SpecBenchError(f"model.adapter={folder}: {CONFIG} names no rank r and lora_alpha; {HINT}")
    pairs = _pairs(folder, read_tensors(folder / TENSORS), rank)
    scale = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
    known = (folder / PROVENANCE).is_file()
    provenance: dict[str, Any] = read_json(folder / PROVENANCE, weights.Provenance) if known else {}
    return Adapter(pairs, scale, folder, provenance)


def _unsupported(config: AdapterConfig) -> str:
    """An option that would need more than a merged product; empty: there is none."""
    options = {name: config.get(name) for name in ("use_dora", "rank_pattern", "alpha_pattern", "modules_to_save")}
    options |= {
        name: v for name, none in (("peft_type", "LORA"), ("bias", "none")) if (v := config.get(name, none)) != none
    }
    if isinstance(start := config.get("init_lora_weights"), str) and start not in LEAVE_WEIGHTS:
        options["init_lora_weights"] = start
    options["alora_invocation_tokens"] = config.get("alora_invocation_tokens")
    return next((f"{name}={value}" for name, value in options.items() if value), "")


def _pairs(folder: Path, tensors: Mapping[str, Tensor], rank: int) -> dict[str, Pair]:
    """The file's tensors by layer. Raises `SpecBenchError` for one that is no half of a pair of this rank."""
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if (match := NAME.fullmatch(name)) is None or tensor.ndim != 2:
            raise SpecBenchError(f"model.adapter={folder}: {name} is no matrix of a LoRA adapter; {HINT}")
        parts.setdefault(match["module"], {})[match["part"]] = tensor
    wrong = [n for n, p in parts.items() if len(p) < 2 or not len(p["A"]) == p["B"].shape[1] == rank]
    if wrong or not parts:
        raise SpecBenchError(f"model.adapter={folder}: {some(wrong) or TENSORS} has no A and B of rank {rank}; {HINT}")
    return {name: Pair(part["A"], part["B"]) for name, part in parts.items()}


@torch.no_grad()
def merge(model: Any, adapter: Adapter) -> None:
    """Add an adapter to the weights of a Transformers model's layers, computed in float32.

    Raises `SpecBenchError`, and changes nothing, if one of its layers is not there, or of another shape.
    """
    weights_of = {name: product.weight for name, product in _products(model).items()}
    shapes = {name: (len(b), a.shape[1]) for name, (a, b) in adapter.pairs.items()}
    made, hint = f"model.adapter={adapter.folder} was made for another target", "leave it out, or choose its own model="
    if unknown := [name for name in shapes if name not in weights_of]:
        raise SpecBenchError(f"{made}: this one has no {some(unknown)}; {hint}")
    for name, shape in shapes.items():
        if weights_of[name].shape != shape:
            raise SpecBenchError(f"{made}: {name} is {list(weights_of[name].shape)}, not {list(shape)}; {hint}")
    for name, (a, b) in adapter.pairs.items():
        weight = weights_of[name]
        change = adapter.scale * (b.float() @ a.float())
        weight.copy_(weight.float() + change.to(weight.device))


def _products(model: Any) -> dict[str, nn.Linear]:
    """The products of a Transformers model's layers, by name."""
    return {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and ".layers." in f".{n}"}


def require_peft() -> None:
    """Raises `SpecBenchError` where PEFT is not installed."""
    if not installed("peft"):
        raise SpecBenchError("training an adapter needs PEFT, which is not installed; pip install -e '.[medusa2]'")


def attach(target: Any, rank: int, alpha: float, modules: list[str], dropout: float) -> Any:
    """A copy of a target with an untrained adapter: it shares all weights, which stay frozen, and computes the same.

    Args:
        target: a `Target`. modules: last parts of the names of the layers that it changes. dropout: of their inputs.

    Raises:
        SpecBenchError: PEFT is not installed, or no layer has such a name.
    """
    require_peft()
    from peft import LoraConfig, inject_adapter_in_model

    shared = {id(t): t for t in (*target.model.parameters(), *target.model.buffers())}
    model = copy.deepcopy(target.model, shared)
    names = list(_products(model))
    chosen = [name for name in names if name.rpartition(".")[2] in modules]
    if not chosen:
        raise SpecBenchError(f"no layer of the target is called {some(modules)}; they are {some(_last_parts(names))}")
    scale: Any = alpha  # PEFT declares an integer and takes any number
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=scale, target_modules=chosen, lora_dropout=dropout), model)
    adapted = type(target)(model, target.path)
    for parameter in _trained(model):
        parameter.data = parameter.data.to(target.dtype)
        parameter.requires_grad_(True)
    return adapted


def _last_parts(names: list[str]) -> list[str]:
    return list(dict.fromkeys(name.rpartition(".")[2] for name in names))


def _trained(model: Any) -> Iterator[nn.Parameter]:
    return (parameter for name, parameter in model.named_parameters() if NAME.fullmatch(name))


def of(model: Any, scale: float) -> Adapter:
    """The adapter of a copy that `attach` made."""
    parts: dict[str, dict[str, Tensor]] = {}
    for name, parameter in model.named_parameters():
        if match := NAME.fullmatch(name):
            parts.setdefault(match["module"], {})[match["part"]] = parameter.detach()
    return Adapter({name: Pair(part["A"], part["B"]) for name, part in parts.items()}, scale)
