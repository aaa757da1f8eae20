"""Which parameters are trained, how fast, and by which optimiser, all by their names. Knows no drafter."""

from collections.abc import Iterable
from fnmatch import fnmatchcase

import torch
from torch import nn

from specbench.common.errors import SpecBenchError
from specbench.training.recipe import TrainSettings

Named = list[tuple[str, nn.Parameter]]


def matches(name: str, pattern: str) -> bool:
    """Does a pattern match a parameter: its name, a prefix of it that ends at a dot, or a shell pattern?"""
    return name.startswith(f"{pattern}.") or fnmatchcase(name, pattern)


def trained_in(named: Named, patterns: Iterable[str] | None) -> set[str]:
    """Names of the parameters that some pattern matches; of all for None."""
    return {name for name, _ in named if patterns is None or any(matches(name, p) for p in patterns)}


def check(named: Named, settings: TrainSettings) -> None:
    """Raises `SpecBenchError` for a pattern of a group or a phase that matches nothing, and a phase that trains nothing."""
    patterns_of: dict[str, Iterable[str]] = {"train.settings.groups": settings.groups}
    for number, phase in enumerate(settings.phases):
        option = f"train.settings.phases[{number}].train"
        if phase.train is not None and not phase.train:
            raise SpecBenchError(f"{option}: nothing is trained; leave it out to train everything")
        patterns_of[option] = phase.train or ()
    for option, patterns in patterns_of.items():
        for pattern in patterns:
            if not trained_in(named, [pattern]):
                tops = ", ".join(dict.fromkeys(name.split(".")[0] for name, _ in named))
                raise SpecBenchError(f"{option}: `{pattern}` is none of this drafter's parameters; they begin with {tops}")


def optimizers(named: Named, settings: TrainSettings) -> list[torch.optim.Optimizer]:
    """AdamW; or Muon for the matrices and AdamW for the rest."""
    muon = settings.optimizer == "muon"
    matrices = [(name, p) for name, p in named if muon and p.ndim == 2]
    others = [(name, p) for name, p in named if not muon or p.ndim != 2]
    lr, weight_decay = (settings.vector_lr, 0.0) if muon else (settings.lr, settings.weight_decay)
    result: list[torch.optim.Optimizer] = []
    if matrices:
        groups = _groups(matrices, settings, settings.lr)
        result.append(torch.optim.Muon(groups, settings.lr, weight_decay=settings.weight_decay, momentum=0.95))
    if others:
        groups = _groups(others, settings, lr)
        result.append(torch.optim.AdamW(groups, lr, settings.betas, weight_decay=weight_decay, fused=True))
    return result


def _groups(named: Named, settings: TrainSettings, lr: float) -> list[dict[str, object]]:
    """Parameter groups, one for each factor on the learning rate."""
    by_factor: dict[float, list[nn.Parameter]] = {}
    for name, parameter in named:
        factor = next((f for pattern, f in settings.groups.items() if matches(name, pattern)), 1.0)
        by_factor.setdefault(factor, []).append(parameter)
    return [{"params": parameters, "lr": lr * factor} for factor, parameters in by_factor.items()]
