"""A draft vocabulary: drafters multiply only the LM head's rows of the target's most frequent ids. Knows no drafter.

While drafting, logits are [F, v] over listed ids instead of [F, V]; growth picks among these *places* and maps them back
(`DraftVocabulary`). The target still judges over all V ids: what is not listed cannot be drafted, and everything can be
emitted.
Source: FR-Spec (arXiv:2502.14856); EAGLE-3 maps draft ids alike (`d2t`).

    vocabulary.safetensors    ids [n] int32, the most frequent first
    vocabulary.json           whose they are, in what they were counted, their SHA-256
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
from specbench.common.storage import atomic_path
from specbench.engine.causal_lm import CausalLM
from specbench.engine.target import Target
from specbench.engine.tensors import read_tensors

FILE, PROVENANCE = "vocabulary.safetensors", "vocabulary.json"
MOST = 32768  # ids of a list
MAKE = "python -m specbench.train train.until=vocabulary and the same model"


class Provenance(TypedDict):
    """What is read of `vocabulary.json`; beside it stands more for people."""

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


def save(path: Path, ids: Tensor, provenance: dict[str, Any]) -> None:
    """Write a list [n], and beside it whose it is: `provenance` says target and target_fingerprint at least."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as temporary:
        save_file({"ids": ids.to("cpu", torch.int32)}, temporary)
        (path.parent / PROVENANCE).write_text(json.dumps(provenance | {"sha256": digest_of(ids)}, indent=1) + "\n")


def digest_of(ids: Tensor) -> str:
    """SHA-256 of ids as int32, little-endian."""
    return hashlib.sha256(ids.to("cpu", torch.int32).numpy().astype("<i4").tobytes()).hexdigest()


def listed(target: Target, count: int) -> DraftVocabulary:
    """The target's `count` most frequent ids, on its device; of a random target, which says nothing, any.

    Raises:
        SpecBenchError: no list, another target's, a damaged one, or fewer ids in it.
    """
    if target.made_from is not None:
        ids = torch.arange(target.vocab_size)
        place = "the target"
    else:
        if target.listing is None:
            raise SpecBenchError("drafter.vocabulary: this target came from no configuration, so no list of ids is its own")
        ids, place = _read(target.listing, target), str(target.listing)
    if count > len(ids):
        raise SpecBenchError(f"drafter.vocabulary={count}: {place} has {len(ids)} ids; ask for no more, or for null, all")
    return DraftVocabulary(ids[:count].to(target.device), target.vocab_size, digest_of(ids))


def _read(path: Path, target: Target) -> Tensor:
    """The ids of a list. [n]"""
    if not path.is_file() or not (path.parent / PROVENANCE).is_file():
        raise SpecBenchError(f"drafter.vocabulary: no list of frequent ids at {path}; make it with {MAKE}")
    said: Provenance = read_json(path.parent / PROVENANCE, Provenance)
    if said["target_fingerprint"] != target.fingerprint():
        raise SpecBenchError(
            f"{path} was made for another target, {said['target']} ({said['target_fingerprint']}), not for this one "
            f"({target.fingerprint()}); make one with {MAKE}"
        )
    ids = read_tensors(path, f"make it again with {MAKE}").get("ids", torch.empty(0))
    if ids.dtype != torch.int32 or digest_of(ids) != said["sha256"]:
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

    Models of a family pad their vocabularies differently: an id behind the model's last one is never drafted.
    """

    def __init__(self, model: CausalLM, ids: Tensor):
        rows = model.head.weight.shape[0]
        self.model, self.rows = model, slice_head(model.head, ids.clamp(max=rows - 1))
        self.absent = ids >= rows if bool((ids >= rows).any()) else None  # [v]
        self.saved = sum(p.numel() for p in model.head.parameters()) - sum(p.numel() for p in self.rows.parameters())

    def __call__(self, states: Tensor) -> Tensor:
        logits = self.model.logits(states, self.rows)
        return logits if self.absent is None else logits.masked_fill(self.absent, -torch.inf)
