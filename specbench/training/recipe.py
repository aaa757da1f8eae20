"""What a recipe says: settings, schedule and phases, and from these alone the learning rate of every step.

Pure functions of numbers: knows no drafter, no batch, no device.
"""

import bisect
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal

from pydantic import Field

from specbench.common.errors import SpecBenchError
from specbench.common.types import Count, Natural, Positive, Seed, Share, Text, Weight

Decay = Literal["constant", "linear", "cosine"]
Beta = Annotated[float, Field(ge=0, lt=1)]
SHAPES = {  # of a decay, by the share of it that is left
    "constant": lambda left: 1.0,
    "linear": lambda left: left,
    "cosine": lambda left: 0.5 - 0.5 * math.cos(math.pi * left),
}


@dataclass(frozen=True)
class Schedule:
    """Factor on the peak learning rate, by step: it rises, holds, and falls to a floor.

            1 |    ______
              |   /      \\
        floor |  /        `-.__
              +------------------> step
                up  held    down

    Attributes:
        warmup: share of the steps over which it rises linearly. warmup_steps: their number instead.
        plateau: share of the steps after the warm-up during which it holds.
        decay: how it falls over the rest: `constant` (it does not), `linear` or `cosine`.
        floor: what it falls to, 0 … 1.

    Raises:
        SpecBenchError: both kinds of warm-up.
    """

    warmup: Share | None = None
    warmup_steps: Natural | None = None
    plateau: Share = 0.0
    decay: Decay = "linear"
    floor: Share = 0.0

    def __post_init__(self) -> None:
        if self.warmup is not None and self.warmup_steps is not None:
            raise SpecBenchError(
                f"train.settings: warmup={self.warmup:g} (a share) and warmup_steps={self.warmup_steps} exclude each "
                "other; set one of them to null"
            )

    def factor(self, step: int, total: int) -> float:
        """At a step (from 0) of a training of `total` steps."""
        up = round((self.warmup or 0.0) * total) if self.warmup_steps is None else self.warmup_steps
        if step < up:
            return (step + 1) / up
        plateau = round(self.plateau * max(total - up, 0))
        if step < up + plateau:
            return 1.0
        left = 1 - (step - up - plateau) / max(total - up - plateau, 1)
        return self.floor + (1 - self.floor) * SHAPES[self.decay](left)


@dataclass(frozen=True)
class Phase:
    """A stretch of a training with an objective, a vocabulary or trained parameters of its own.

    Attributes:
        share: of the steps; those of all phases sum to 1.
        lr: factor on the peak learning rate, beside the schedule's.
        vocabulary: frequent ids of the classification loss, None for all ids; `inherit`: as the whole training.
        drafter: options of the objective, for the drafter's `configure` when the phase begins. They stay set until another
            phase changes them, also after the last.
        train: names of the parameters that are trained (a prefix such as `outputs`, or a pattern such as `*.bias`); None
            for all. The others get no gradient and no update.
        restart: the schedule runs within this phase, from its warm-up on, instead of over the whole training. Only then:
        warmup, warmup_steps, plateau, decay, floor: of this phase's schedule; None as in the whole training's.
    """

    share: Annotated[float, Field(gt=0, le=1)]
    lr: Positive = 1.0
    vocabulary: Count | Literal["inherit"] | None = "inherit"
    drafter: Mapping[str, Any] = field(default_factory=dict)
    train: tuple[Text, ...] | None = None
    restart: bool = False
    warmup: Share | None = None
    warmup_steps: Natural | None = None
    plateau: Share | None = None
    decay: Decay | None = None
    floor: Share | None = None

    @classmethod
    def of(cls, number: int, options: Any) -> "Phase":
        """A phase from what a configuration says of it. Raises `SpecBenchError`, which names the phase from 0."""
        place = f"train.settings.phases[{number}]"
        if isinstance(options, cls):
            options = {f.name: getattr(options, f.name) for f in fields(cls)}
        train = options.get("train")
        phase = cls(
            **{**options, "drafter": dict(options.get("drafter") or {}), "train": None if train is None else tuple(train)}
        )
        if phase._own() and not phase.restart:
            raise SpecBenchError(f"{place}: {', '.join(phase._own())} without restart=true has no effect")
        return phase

    def schedule(self, whole: Schedule) -> Schedule:
        """The schedule within this phase, if it restarts: the whole training's with what this phase says otherwise."""
        own = self._own()
        if own.keys() & {"warmup", "warmup_steps"}:  # either kind takes the place of either
            own = {"warmup": None, "warmup_steps": None} | own
        return replace(whole, **own)

    def _own(self) -> dict[str, Any]:
        return {f.name: value for f in fields(Schedule) if (value := getattr(self, f.name)) is not None}


@dataclass(frozen=True)
class TrainSettings:
    """How a drafter is trained.

    Attributes:
        epochs: passes over the corpus. steps: end after this many optimiser steps, whatever the epochs say.
        lr: peak, of AdamW or, with `optimizer: muon`, of Muon on the matrices (vectors keep AdamW at `vector_lr`).
        groups: factors on the learning rate by name of parameter (a prefix such as `outputs`, or a pattern such as
            `*.bias`); of several that match the first counts.
        warmup, warmup_steps, plateau, decay, floor: see `Schedule`.
        clip: of the gradient, None for none. clip_by: its `norm`, or each entry's `value`.
        accumulate: batches a step.
        precision: `no`, `bf16` or `fp16` (Accelerate's mixed precision, over weights in float32), `auto`: bf16 on a
            GPU, and on a processor that multiplies it faster (`precision.mixed`).
        vocabulary: confine the classification loss to this many frequent ids; None for all. Phases may say otherwise.
        sampled: of these confine it to so many a batch: those in its own text, and others drawn anew; None for all of them.
        others: beside these so many of the corpus's other ids a batch, likewise, so that none goes untrained.
        phases: see `Phase`; none is one phase that changes nothing.
        checkpoint_minutes, validate_minutes: how often.
        validation_answers: held-out answers replayed.
        seed: data order, initial weights, noise.

    Raises:
        SpecBenchError: values that contradict each other or are out of range, by name.
    """

    epochs: Count = 20
    steps: Count | None = None
    optimizer: Literal["adamw", "muon"] = "adamw"
    lr: Positive = 3e-5
    vector_lr: Positive = 1e-3
    groups: Mapping[str, Weight] = field(default_factory=dict)
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    weight_decay: Weight = 0.0
    warmup: Share | None = None
    warmup_steps: Natural | None = None
    plateau: Share = 0.0
    decay: Decay = "linear"
    floor: Share = 0.0
    clip: Positive | None = 0.5
    clip_by: Literal["norm", "value"] = "norm"
    accumulate: Count = 1
    precision: Literal["auto", "no", "bf16", "fp16"] = "no"
    vocabulary: Count | None = None
    sampled: Count | None = None
    others: Natural = 0
    phases: tuple[Phase, ...] = ()
    checkpoint_minutes: Weight = 10.0
    validate_minutes: Weight = 15.0
    validation_answers: Count = 8
    seed: Seed = 0

    def __post_init__(self) -> None:
        # a configuration brings lists and mappings
        phases = tuple(Phase.of(i, options) for i, options in enumerate(self.phases)) or (Phase(share=1.0),)
        object.__setattr__(self, "phases", phases)
        object.__setattr__(self, "groups", dict(self.groups))
        object.__setattr__(self, "betas", tuple(self.betas))
        if abs(sum(p.share for p in phases) - 1) > 1e-6:
            shares = " + ".join(f"{p.share:g}" for p in phases)
            raise SpecBenchError(f"train.settings.phases: the shares {shares} do not sum to 1")
        for phase in phases:
            phase.schedule(self.schedule)  # each one's values are in range

    @property
    def schedule(self) -> Schedule:
        """That of the whole training."""
        return Schedule(**{f.name: getattr(self, f.name) for f in fields(Schedule)})

    def vocabulary_in(self, phase: Phase) -> int | None:
        """Frequent ids of the classification loss in a phase; None for all ids."""
        return self.vocabulary if isinstance(phase.vocabulary, str) else phase.vocabulary


def starts(settings: TrainSettings, total: int) -> list[int]:
    """First step of every phase, and the end of the last; a phase of a short training may have no step at all."""
    ends = itertools.accumulate(phase.share for phase in settings.phases[:-1])
    return [0, *(round(end * total) for end in ends), total]


def phase_at(settings: TrainSettings, step: int, total: int) -> int:
    """Number of the phase that a step (from 0) belongs to; of the end, the last one's."""
    return min(bisect.bisect_right(starts(settings, total), step), len(settings.phases)) - 1


def rates(settings: TrainSettings, total: int) -> list[float]:
    """Factor on the peak learning rate of every step."""
    found: list[float] = []
    for phase, (begin, end) in zip(settings.phases, itertools.pairwise(starts(settings, total)), strict=True):
        within, length, first = settings.schedule, total, 0
        if phase.restart:
            within, length, first = phase.schedule(settings.schedule), end - begin, begin
        found += [phase.lr * within.factor(step - first, length) for step in range(begin, end)]
    return found


def lr_shares(settings: TrainSettings, total: int) -> list[float]:
    """Share of the sum of all learning rates that falls to each phase: how much of the training it really is."""
    by_step = rates(settings, total)
    return [sum(by_step[a:b]) / sum(by_step) for a, b in itertools.pairwise(starts(settings, total))]


def describe(settings: TrainSettings, total: int) -> str:
    """The phases in one line: what each does, over which share of the steps and of the learning rate."""
    phases = []
    for phase, lr_share in zip(settings.phases, lr_shares(settings, total), strict=True):
        count = settings.vocabulary_in(phase)
        more = f" and {settings.others:,} drawn" if settings.others else ""
        parts = ["over all ids" if count is None else f"confined to {count:,} ids{more}"]
        parts += [f"{name}={value}" for name, value in phase.drafter.items()]
        parts += [f"only {', '.join(phase.train)}"] if phase.train is not None else []
        phases.append(f"{phase.share:.0%} {' '.join(parts)} ({lr_share:.0%} of the learning rate)")
    return f"phases: {', '.join(phases)}"
