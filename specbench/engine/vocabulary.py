"""A draft vocabulary: drafters multiply only the LM head's rows of the target's most frequent ids. Knows no drafter.

While drafting, logits are [F, v] over listed ids instead of [F, V]; tree policies pick indices in that list and map them
to the target's ids (`DraftVocabulary`). The target still verifies over all V ids, so every id can be emitted.
Source: FR-Spec (arXiv:2502.14856); EAGLE-3 maps draft ids alike (`d2t`).

    vocabulary.safetensors    ids [n] int32, the most frequent first
    vocabulary.json           their target, the text they were counted in, their SHA-256
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ConfigDict
from safetensors.torch import save_file
from torch import Tensor, nn
from typing_extensions import TypedDict

from specbench.common.errors import SpecBenchError
from specbench.common.io import read_json
from specbench.common.storage import atomic_path, write_file
from specbench.engine.causal_lm import CausalLM
from specbench.engine.target import Target
from specbench.engine.tensors import read_tensors
from specbench.engine.weights import require_target

FILE, PROVENANCE = "vocabulary.safetensors", "vocabulary.json"
MAX_IDS = 32768  # of a list
MAKE = "python -m specbench.train train.until=vocabulary and the same model"


class Provenance(TypedDict):
    """The keys of `vocabulary.json` that are read; others are for people."""

    __pydantic_config__ = ConfigDict(strict=True, extra="allow")  # type: ignore[misc]
    target: str
    target_fingerprint: str
    sha256: str


@dataclass(frozen=True)
class DraftVocabulary:
    """The ids that a drafter may propose, in the order of its logits. ids: [v]; size: V; digest: SHA-256 of their list."""

    ids: Tensor
    size: int
    digest: str

    def spread(self, q: Tensor) -> Tensor:
        """A distribution over the listed ids as one over all. [N, v] -> [N, V]"""
        return q.new_zeros(q.shape[0], self.size).index_copy_(1, self.ids, q)


def places(ids: Tensor, size: int) -> Tensor:
    """[V] where in a list of ids each id stands, -1 for one that is not listed. ids: [v]; size: V"""
    return ids.new_full((size,), -1).index_copy_(0, ids, torch.arange(len(ids), device=ids.device))


def save(path: Path, ids: Tensor, provenance: dict[str, Any]) -> None:
    """Write a list [n] and its provenance, which names target and target_fingerprint at least."""
    with atomic_path(path) as temporary:
        save_file({"ids": ids.to("cpu", torch.int32)}, temporary)
        write_file(path.parent / PROVENANCE, json.dumps(provenance | {"sha256": digest_of(ids)}, indent=1) + "\n")


def digest_of(ids: Tensor) -> str:
    """SHA-256 of ids as int32, little-endian."""
    return hashlib.sha256(ids.to("cpu", torch.int32).numpy().astype("<i4").tobytes()).hexdigest()


def listed(target: Target, count: int, option: str = "drafter.vocabulary") -> DraftVocabulary:
    """The target's `count` most frequent ids, on its device; of a target with random weights, the first ones.

    Raises `SpecBenchError`, which names the `option`, if its list is missing, damaged, another target's, or too short.
    """
    if target.made_from is not None:
        ids, source = torch.arange(target.vocab_size), "the target"
    elif target.listing is None:
        raise SpecBenchError(f"{option}: this target came from no configuration, so no list of ids is its own")
    else:
        ids, source = _read(target.listing, target, option), str(target.listing)
    if count > len(ids):
        raise SpecBenchError(f"{option}={count}: {source} has {len(ids)} ids; ask for no more, or for null, all")
    return DraftVocabulary(ids[:count].to(target.device), target.vocab_size, digest_of(ids))


def _read(path: Path, target: Target, option: str) -> Tensor:
    """The ids of a list. [n]"""
    if not path.is_file() or not (path.parent / PROVENANCE).is_file():
        raise SpecBenchError(f"{option}: no list of frequent ids at {path}; make it with {MAKE}")
    provenance: Provenance = read_json(path.parent / PROVENANCE, Provenance)
    require_target(f"{path} was made for another target,", provenance, target.fingerprint(), f"make one with {MAKE}")
    ids = read_tensors(path, f"make it again with {MAKE}").get("ids", torch.empty(0))
    if ids.dtype != torch.int32 or digest_of(ids) != provenance["sha256"]:
        raise SpecBenchError(f"{path} has not the ids whose SHA-256 {PROVENANCE} names; make it again with {MAKE}")
    return ids.long()


def slice_head(layer: nn.Linear, ids: Tensor) -> nn.Linear:
    """A copy of an output layer with the rows of some ids alone, in their order."""
    small = nn.Linear(layer.in_features, len(ids), bias=layer.bias is not None, device="meta")
    for name, parameter in layer.named_parameters():
        small.register_parameter(name, nn.Parameter(parameter.detach()[ids].clone(), parameter.requires_grad))
    return small


class Head:
    """A language model's logits of some ids. [..., D] -> [..., v]

    Models of a family pad their vocabularies differently: ids that the model lacks are never drafted.
    """

    def __init__(self, model: CausalLM, ids: Tensor):
        rows = model.head.weight.shape[0]
        self.model, self.rows = model, slice_head(model.head, ids.clamp(max=rows - 1))
        self.absent = ids >= rows if bool((ids >= rows).any()) else None  # [v]
        self.saved = sum(p.numel() for p in model.head.parameters()) - sum(p.numel() for p in self.rows.parameters())

    def __call__(self, states: Tensor) -> Tensor:
        logits = self.model.logits(states, self.rows)
        return logits if self.absent is None else logits.masked_fill(self.absent, -torch.inf)
