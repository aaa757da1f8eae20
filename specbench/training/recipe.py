"""What a recipe says: settings, schedule and phases, and from these alone the learning rate of every step.

Pure functions of numbers: knows no drafter, no batch, no device.
"""

import bisect
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from pydantic import Field

from specbench.common.errors import SpecBenchError
from specbench.common.types import Count, Delay, Few, Ids, Natural, Positive, Seed, Share, Steps, Text, Times, Weight

Decay = Literal["constant", "linear", "cosine"]
Beta = Annotated[float, Field(ge=0, lt=1)]


@dataclass(frozen=True)
class Schedule:
    """Factor on the peak learning rate, by step: it rises, holds, and falls to a floor.

            1 |    ______
              |   /      \\
        floor |  /        `-.__
              +------------------> step
                up  plateau  down

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
        shape = {"constant": 1.0, "linear": left, "cosine": 0.5 - 0.5 * math.cos(math.pi * left)}
        return self.floor + (1 - self.floor) * shape[self.decay]


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
    vocabulary: Ids | Literal["inherit"] | None = "inherit"
    drafter: Mapping[str, Any] = field(default_factory=dict)
    train: tuple[Text, ...] | None = None
    restart: bool = False
    warmup: Share | None = None
    warmup_steps: Natural | None = None
    plateau: Share | None = None
    decay: Decay | None = None
    floor: Share | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "drafter", dict(self.drafter or {}))
        object.__setattr__(self, "train", None if self.train is None else tuple(self.train))

    def own_schedule(self) -> dict[str, Any]:
        """What this phase sets of a schedule, by name."""
        return {f.name: value for f in fields(Schedule) if (value := getattr(self, f.name)) is not None}

    def schedule(self, whole: Schedule) -> Schedule:
        """The schedule within this phase, if it restarts: the whole training's, changed by what this phase sets."""
        inherited, own = {f.name: getattr(whole, f.name) for f in fields(Schedule)}, self.own_schedule()
        if own.keys() & {"warmup", "warmup_steps"}:  # either kind of warm-up replaces either
            inherited |= {"warmup": None, "warmup_steps": None}
        return Schedule(**inherited | own)


@dataclass(frozen=True)
class TrainSettings(Schedule):
    """How a drafter is trained, its learning rate by this very schedule. `conf/train/small.yaml` explains each setting.

    Attributes:
        groups: factors on the learning rate by name of parameter, as in `Phase.train`; of several that match the first.
        precision: `no`, `bf16` or `fp16` (Accelerate's mixed precision, over weights in float32), or `auto`: see
            `precision.mixed`.
        sampled, others: of the frequent ids, and of the others, how many a batch's loss uses: those in its own text, and
            some drawn anew.
        phases: none is one phase that changes nothing.
        validations: number of validations before the last step, evenly spaced over the steps, beside those by the clock.

    Raises:
        SpecBenchError: values that contradict each other or are out of range, by name.
    """

    epochs: Times = 20
    steps: Steps | None = None
    lr: Positive = 3e-5
    groups: Mapping[str, Weight] = field(default_factory=dict)
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    weight_decay: Weight = 0.0
    decay_vectors: bool = True
    clip: Positive | None = 0.5
    clip_by: Literal["norm", "value"] = "norm"
    accumulate: Times = 1
    precision: Literal["auto", "no", "bf16", "fp16"] = "no"
    vocabulary: Ids | None = None
    sampled: Ids | None = None
    others: Natural = 0
    phases: tuple[Phase, ...] = ()
    checkpoint_minutes: Delay = 10.0
    validate_minutes: Delay = 15.0
    validation_answers: Count = 8
    validation_trees: Natural = 16
    validations: Few = 0
    seed: Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        # a configuration brings lists and mappings
        phases = tuple(p if isinstance(p, Phase) else Phase(**p) for p in self.phases) or (Phase(share=1.0),)
        object.__setattr__(self, "phases", phases)
        object.__setattr__(self, "groups", dict(self.groups))
        object.__setattr__(self, "betas", tuple(self.betas))
        for number, phase in enumerate(phases):
            if not phase.restart and (own := phase.own_schedule()):
                option = f"train.settings.phases[{number}]"
                raise SpecBenchError(f"{option}: {', '.join(own)} without restart=true has no effect")
            phase.schedule(self)  # raises for contradicting values
        if abs(sum(p.share for p in phases) - 1) > 1e-6:
            shares = " + ".join(f"{p.share:g}" for p in phases)
            raise SpecBenchError(f"train.settings.phases: the shares {shares} do not sum to 1")

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


def evenly_spaced(total: int, count: int) -> frozenset[int]:
    """Steps (from 1) that divide a training of `total` steps into count + 1 equal parts."""
    return frozenset(round(total * part / (count + 1)) for part in range(1, count + 1))


def rates(settings: TrainSettings, total: int) -> list[float]:
    """Factor on the peak learning rate of every step."""
    factors: list[float] = []
    for phase, (begin, end) in zip(settings.phases, itertools.pairwise(starts(settings, total)), strict=True):
        if phase.restart:
            schedule = phase.schedule(settings)
            factors += [phase.lr * schedule.factor(step, end - begin) for step in range(end - begin)]
        else:
            factors += [phase.lr * settings.factor(step, total) for step in range(begin, end)]
    return factors


def lr_shares(settings: TrainSettings, total: int) -> list[float]:
    """Share of the sum of all learning rates that falls to each phase: how much of the training it really is."""
    by_step = rates(settings, total)
    return [sum(by_step[a:b]) / sum(by_step) for a, b in itertools.pairwise(starts(settings, total))]


def describe(settings: TrainSettings, total: int) -> str:
    """The phases in one line: what each does, over which share of the steps and of the learning rate."""
    phases = []
    for phase, lr_share in zip(settings.phases, lr_shares(settings, total), strict=True):
        count = settings.vocabulary_in(phase)
        drawn = f", {settings.sampled:,} of them drawn for each batch" if settings.sampled else ""
        more = f" and {settings.others:,} drawn from all" if settings.others else ""
        parts = ["over all ids" if count is None else f"confined to {count:,} ids{drawn}{more}"]
        parts += [f"{name}={value}" for name, value in phase.drafter.items()]
        parts += [f"only {', '.join(phase.train)}"] if phase.train is not None else []
        phases.append(f"{phase.share:.0%} {' '.join(parts)} ({lr_share:.0%} of the learning rate)")
    return f"phases: {', '.join(phases)}"
