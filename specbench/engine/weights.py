"""A drafter's weights: `model.safetensors` with `provenance.json`, or tensors that others published. Knows no drafter.

The provenance says for which target (by fingerprint), on what, how long, by which commit and on which machine the weights
were trained, and their SHA-256; loading refuses those of another target, network or provenance. `skip.json` lists the
sublayers of the target that a search left out, for a drafter without tensors of its own.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from pydantic import ConfigDict
from safetensors.torch import save_file
from torch import Tensor, nn
from typing_extensions import TypedDict

from specbench.common import hashing
from specbench.common.errors import SpecBenchError, refusing
from specbench.common.io import read_json
from specbench.common.storage import atomic_path, sha256_of
from specbench.common.types import Sha256
from specbench.engine.interface import Sublayers
from specbench.engine.tensors import dtype_name, read_tensors, some
from specbench.records.schema import PROVENANCE, SKIP, WEIGHTS


class Provenance(TypedDict, total=False):
    """The keys of a provenance that are read; others are for people."""

    __pydantic_config__ = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)  # type: ignore[misc]
    target: str
    target_fingerprint: str
    original_fingerprint: str  # of the target before its adapter, which was trained with these weights; absent without one
    sha256: Sha256  # of the weights; absent in older files
    vocabulary: Sha256  # of the list of ids that the output layer has; absent where it has all
    calibration: list[list[float]] | None
    history: list[dict[str, Any]]


def trained(module: nn.Module) -> dict[str, torch.Tensor]:
    """A drafter's own tensors: everything but what it shares, frozen, with the target."""
    return {n: p.detach() for n, p in module.named_parameters() if p.requires_grad}


def save(
    made: nn.Module | Mapping[str, Tensor],
    folder: Path,
    provenance: Mapping[str, Any],
    beside: Callable[[str], None] = lambda sha256: None,
) -> None:
    """Write a drafter's own tensors in bfloat16, or tables as they are, and where they come from, the weights last.

    The provenance also names the list whose ids alone the drafter's output layer has, if it has one, see `load`.
    So a folder with new weights is complete, and a process that is killed before leaves none, or earlier ones that
    `matching` refuses.

    Args:
        beside: writes what else belongs to the weights, whose SHA-256 it is given.
    """
    tensors = dict(made) if isinstance(made, Mapping) else trained(made)
    ids = {} if (digest := _list_of(made)) is None else {"vocabulary": digest}
    tensors = {
        n: t.to("cpu", torch.bfloat16 if t.is_floating_point() else t.dtype).contiguous() for n, t in tensors.items()
    }
    with atomic_path(folder / WEIGHTS) as temporary:
        save_file(tensors, temporary)
        sha256 = sha256_of(temporary)
        beside(sha256)
        with atomic_path(folder / PROVENANCE) as path:
            path.write_text(json.dumps({**provenance, **ids, "sha256": sha256}, indent=1) + "\n")


def matching(folder: Path) -> dict[str, Any]:
    """The provenance of a folder's weights. Raises `SpecBenchError` if a file is missing, damaged or of other weights."""
    path = folder / WEIGHTS
    for file in (path, folder / PROVENANCE):
        if not file.is_file():
            raise SpecBenchError(
                f"no drafter weights at {file}; train them (python -m specbench.train drafter=… and the same model) "
                "or point drafter.weights at a folder that has them"
            )
    provenance: dict[str, Any] = read_json(folder / PROVENANCE, Provenance)
    if provenance.get("sha256") not in (None, hashing.of_file(path)):
        raise SpecBenchError(
            f"{path} is damaged or of another training, since {PROVENANCE} beside it names another SHA-256; "
            "fetch or train them again"
        )
    return provenance


def contents_of(folder: Path) -> dict[str, str]:
    """SHA-256 of what `load` reads, by name."""
    return hashing.of_files([folder / WEIGHTS, folder / PROVENANCE])


def read(folder: Path, fingerprint: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Provenance and tensors of a folder. Raises `SpecBenchError` for files that are missing, damaged, another target's."""
    provenance, tensors = matching(folder), read_tensors(folder / WEIGHTS, "fetch or train them again")
    made = f"drafter weights in {folder} were trained for target"
    hint = "train a drafter for it or choose drafter.weights"
    if provenance.get("original_fingerprint") == fingerprint:
        hint = f"they were trained together with its adapter: add model.adapter={folder}"
    require_target(made, provenance, fingerprint, hint)
    return provenance, tensors


def load(module: nn.Module, folder: Path, fingerprint: str) -> dict[str, Any]:
    """Fill a drafter's own tensors; returns the provenance.

    Raises `SpecBenchError` for files that are missing or damaged, another target's, or do not fit the network, and for an
    output layer over the ids of another list than the module's.
    """
    path, (provenance, tensors) = folder / WEIGHTS, read(folder, fingerprint)
    if (theirs := provenance.get("vocabulary")) != (ours := _list_of(module)):
        raise SpecBenchError(
            f"drafter weights in {path} have an output layer over {_named(theirs)}, this drafter over {_named(ours)}; "
            "restore the list of frequent ids that they were trained with, or train the drafter anew"
        )

    def refuse(reason: str) -> SpecBenchError:
        return SpecBenchError(f"drafter weights in {path} do not fit this network ({reason}); check the drafter's options")

    own = trained(module)
    fill(own, tensors, tensors.keys() - own.keys(), refuse)
    return provenance


def _list_of(made: Any) -> str | None:
    """SHA-256 of the list whose ids alone the output layer of a drafter has; None: all of the target's."""
    listed = getattr(made, "listed", None)
    return None if listed is None else str(listed.digest)


def _named(digest: str | None) -> str:
    return "all ids of the target" if digest is None else f"the ids of a list with the SHA-256 {digest[:12]}…"


def require_target(made: str, provenance: Mapping[str, Any], fingerprint: str, hint: str) -> None:
    """Refuse what another target's `provenance` names. made: the message up to that target's name."""
    if (other := provenance.get("target_fingerprint")) != fingerprint:
        raise SpecBenchError(f"{made} {provenance.get('target')} ({other}), not for this one ({fingerprint}); {hint}")


def fill(
    own: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    unused: Iterable[str],
    refuse: Callable[[str], SpecBenchError],
) -> None:
    """Copy tensors into a drafter's own of the same names.

    Args:
        unused: names in the file that none of the drafter's tensors has.
        refuse: makes the error that is raised if tensors are missing, unused, of another shape, or integers.
    """
    missing, unused = sorted(own.keys() - tensors.keys()), sorted(unused)
    if missing or unused:
        parts = [f"lacks {some(missing)}"] * bool(missing) + [f"also holds {some(unused)}"] * bool(unused)
        raise refuse(f"not this drafter's layout: it {' and '.join(parts)}")
    wrong = [f"{n} is {list(tensors[n].shape)}, not {list(t.shape)}" for n, t in own.items() if tensors[n].shape != t.shape]
    if wrong:
        raise refuse(f"made for another target: {some(wrong)}")
    if odd := [f"{n} is of {dtype_name(t.dtype)}" for n, t in tensors.items() if not t.is_floating_point()]:
        raise refuse(f"{some(odd)}, where weights are floating-point numbers")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])


class Skip(TypedDict):
    """The keys of `SKIP` that are read: layers whose attention, and whose MLP, is left out."""

    __pydantic_config__ = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)  # type: ignore[misc]
    target: str
    target_fingerprint: str
    attention: list[int]
    mlp: list[int]


def load_skip(folder: Path, fingerprint: str, layers: int) -> tuple[Sublayers, dict[str, Any]]:
    """The sublayers that a search left out, and the whole file; raises `SpecBenchError` if damaged or another target's."""
    path = folder / SKIP
    skip: dict[str, Any] = read_json(path, Skip)
    hint = "search again (train.until=search) or set drafter.searched=null"
    require_target(f"{path} was searched for target", skip, fingerprint, hint)
    if odd := [i for i in (*skip["attention"], *skip["mlp"]) if not 0 <= i < layers]:
        raise SpecBenchError(f"{path} names layer {odd[0]}, but the target has {layers}; {hint}")
    return Sublayers(frozenset(skip["attention"]), frozenset(skip["mlp"])), skip


@dataclass(frozen=True)
class Checkpoint:
    """Tensors as the authors named them, in memory only from their first use until `release`."""

    source: str  # folder or hub id, as given
    folder: str
    read: Callable[[], Mapping[str, Tensor]]
    config: Mapping[str, Any]  # `config.json`, empty if there is none
    digest: Mapping[str, str]  # SHA-256 by file of tensors

    @cached_property
    def tensors(self) -> Mapping[str, Tensor]:
        """By name; raises `SpecBenchError` for damage."""
        return self.read()

    def release(self) -> None:
        """Forget the tensors, which may be large; they are read again when needed."""
        self.__dict__.pop("tensors", None)

    def __deepcopy__(self, memo: Any) -> "Checkpoint":
        return self  # immutable, and tensors are large

    def contents(self) -> dict[str, str]:
        """SHA-256 by name of the files of tensors and the configuration."""
        config = Path(self.folder) / "config.json"
        return dict(self.digest) | hashing.of_files([config] if config.is_file() else [])

    def understood(self) -> AbstractContextManager[None]:
        """Around code that reads names, shapes and configuration: turns any error into one that names this checkpoint."""
        return refusing(f"checkpoint={self.source}: its tensors and config.json do not make this drafter")

    def shares(self, copy: Tensor, own: Tensor) -> bool:
        """Is this copy of a table the target's, [V, D]? Looks at its first rows."""
        own = own[: len(copy)]
        return copy.shape == own.shape and torch.allclose(copy[:512].to(own), own[:512], atol=1e-2)

    def require_shared(self, part: str, copy: Tensor, own: Tensor) -> None:
        """Refuse a file whose copy of a table of the target's is another one's."""
        if not self.shares(copy, own):
            raise self.refuse(f"its {part} is not the target's: it was trained for another target")

    def refuse(self, reason: str) -> SpecBenchError:
        """An error that names this checkpoint."""
        return SpecBenchError(f"checkpoint={self.source}: {reason}")
