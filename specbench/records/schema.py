"""Types by which the files of runs and trainings are validated when they are read (`specbench/common/io.py`).

Everything that a table or figure uses is declared, with its range; `OPEN` types keep other keys too. Rows: see `rows.py`.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NotRequired

from annotated_types import Ge, Interval, MinLen
from pydantic import AfterValidator, AllowInfNan, Discriminator, Tag, with_config
from typing_extensions import TypedDict

from specbench.common.io import OPEN
from specbench.common.types import Share, Temperature

SCHEMA = 3  # format version of blocks
WEIGHTS, PROVENANCE, SKIP = "model.safetensors", "provenance.json", "skip.json"  # files of a weights folder

Natural = Annotated[int, Interval(ge=0, lt=2**53)]  # exact as a double
Count = Annotated[int, Interval(ge=1, lt=2**53)]
Seconds = Annotated[float, Interval(ge=0, le=1e9)]
Milliseconds = Annotated[float, Interval(ge=0, le=1e9)]
Measure = Annotated[float, Interval(ge=-1e15, le=1e15)]  # sums and ratios stay finite
Shares = Annotated[list[Annotated[float, AllowInfNan()]], MinLen(1)]  # by depth; NaN where nothing was tried


# Provenance of weights ----------------------------------------------------------------------------------------------


@with_config(OPEN)
class Machine(TypedDict):
    """The part of `environment.hardware` that tables show."""

    device: str
    cores: Natural
    instructions: NotRequired[str]
    gpu: NotRequired[dict[str, str | float | None]]  # driver, libraries and limits; `unknown` where the driver does not say


@with_config(OPEN)
class HeldOut(TypedDict):
    """Acceptance on answers that were not trained on."""

    chain_tau: Measure
    n_alpha: Shares
    answers: NotRequired[list[tuple[Natural, Natural]]]  # emitted tokens and cycles; absent in older files


@with_config(OPEN)
class Point(TypedDict):
    """One entry of a training's history."""

    tokens: Natural
    classification: NotRequired[Measure]  # training losses, not held out
    regression: NotRequired[Measure]
    chain_tau: NotRequired[Measure]
    tree_tau: NotRequired[Measure]
    n_alpha: NotRequired[Shares]
    alpha0_top4: NotRequired[Share]  # first tokens among the drafter's 4 likeliest
    alpha0_top10: NotRequired[Share]


@with_config(OPEN)
class Data(TypedDict):
    """A training's corpus."""

    unique_tokens: Natural


@with_config(OPEN)
class Trained(TypedDict):
    """`provenance.json` of weights trained here. base: of the drafter that a second stage was trained on.

    tokens_before, hours_before: of the trainings from whose weights this one went on, which `tokens_seen` and `hours`
    leave out. Older files name the tokens alone.
    """

    parameters: Natural
    tokens_seen: Natural
    tokens_before: NotRequired[Natural]
    steps: Natural
    hours: Seconds
    hours_before: NotRequired[Seconds]
    data: Data
    machine: Machine
    history: Annotated[list[Point], MinLen(1)]
    held_out: NotRequired[HeldOut]
    base: NotRequired["Provenance"]


@with_config(OPEN)
class ExternalWeights(TypedDict):
    """Weights trained elsewhere, or a drafter without weights."""

    base: NotRequired["Provenance"]


def all_tokens(weights: Mapping[str, Any]) -> int:
    """Training tokens that weights have seen, from their provenance: those before this training included."""
    return int(weights.get("tokens_seen", 0) + weights.get("tokens_before", 0))


def all_hours(weights: Mapping[str, Any]) -> float:
    """Hours of training, from provenance: those before this training included; NaN where they are not known."""
    before = weights.get("hours_before", math.nan if weights.get("tokens_before") else 0)
    return float(weights.get("hours", math.nan) + before)


def _kind(value: Any) -> str:
    return "trained" if isinstance(value, dict) and value.get("history") else "foreign"


Provenance = Annotated[
    Annotated[Trained, Tag("trained")] | Annotated[ExternalWeights, Tag("foreign")],
    Discriminator(_kind),
]


# Header of a block --------------------------------------------------------------------------------------------------


@with_config(OPEN)
class Named(TypedDict):
    """A configuration group's choice."""

    name: str


@with_config(OPEN)
class Sampling(TypedDict):
    """temperature: 0 is greedy."""

    temperature: Temperature


@with_config(OPEN)
class Link(TypedDict, total=False):
    """The way to a target on a server, see `conf/link/local.yaml`. mbit: None without a limit."""

    name: str
    delay_ms: Milliseconds
    jitter_ms: Milliseconds
    mbit: Annotated[float, Interval(ge=1e-6, le=1e9)] | None
    loss: Share
    pause_ms: Milliseconds


@with_config(OPEN)
class Config(TypedDict):
    """The options that all arms of a cell share."""

    model: Named
    dataset: Named
    sampler: Sampling
    decode: NotRequired[dict[str, Any]]
    threads: NotRequired[int | None]
    backend: NotRequired[str]
    batch: NotRequired[Count]
    data: NotRequired[dict[str, Any]]  # `limit` among them: of questions
    link: NotRequired[Link]


@with_config(OPEN)
class TreeShape(TypedDict):
    """A tree that a fit considered, with the expected tokens a cycle and speed-up over plain decoding."""

    depth: Count
    top_k: Count
    nodes: Count
    tau: Seconds
    speedup: Seconds


@with_config(OPEN)
class Fit(TypedDict):
    """The tree that a fit chose, and the costs it used: seconds by nodes or width."""

    choice: TreeShape
    runner_up: NotRequired[TreeShape]
    costs: dict[str, dict[str, Seconds]]


@with_config(OPEN)
class ServedModel(TypedDict, total=False):
    """What another engine reports of its model; all but `id` of one in this process, see `specbench.engine.peer`."""

    id: str
    engine: str
    version: str
    precision: str
    arithmetic: str
    exact: bool
    lookup: Natural


@with_config(OPEN)
class ArmHeader(TypedDict):
    """One drafter of a cell, with its tree and weights. of: the study's arm of which this is one training seed."""

    drafter: Named
    parameters: Natural  # multiplied in a draft pass, the shared LM head included
    passes: Natural  # maximum of draft passes a cycle; a row's own `passes` are those that ran
    lossy: bool
    weights: Provenance
    bytes: NotRequired[Natural]  # of its own parameters
    of: NotRequired[str]
    seed: NotRequired[Natural]
    fitted: NotRequired[Fit]
    tree: NotRequired[dict[str, Any] | None]
    contents: NotRequired[dict[str, str]]  # SHA-256 of its files
    served: NotRequired[ServedModel]


@with_config(OPEN)
class TargetInfo(TypedDict):
    """The target of a cell. parameters: multiplied in a pass. vocabulary: number of ids."""

    dtype: str
    parameters: Count
    quantised: NotRequired[str]
    adapted: NotRequired[str]
    attention: NotRequired[dict[str, str]]  # PyTorch's kernels by pass, on GPUs
    bytes: NotRequired[Count]
    vocabulary: NotRequired[Count]


@with_config(OPEN)
class Versions(TypedDict):
    """Versions of libraries."""

    torch: str


def _check_schema(schema: int) -> int:
    if schema != SCHEMA:
        raise ValueError(f"{schema}, while this code reads blocks of schema {SCHEMA}")
    return schema


@with_config(OPEN)
class Header(TypedDict):
    """The first line of a block: what was measured, how and where.

    started: UTC. decoding, timing: see `specbench.records.identity`. replay: drafts were checked against known answers,
    without target passes.
    """

    kind: Literal["header"]
    schema: Annotated[int, AfterValidator(_check_schema)]
    started: str
    decoding: Natural
    timing: Natural
    config: Config
    target: TargetInfo
    arms: Annotated[dict[str, ArmHeader], MinLen(1)]
    versions: Versions
    hardware: Machine
    study: NotRequired[str | None]
    replay: NotRequired[bool]
    simulated: NotRequired[bool]


# Traces ---------------------------------------------------------------------------------------------------------------


class Cycle(TypedDict):
    """One cycle of a trace; see `specbench.evaluation.trace.trace`."""

    root: str
    nodes: list[tuple[str, Natural, Measure, Measure | None]]
    path: list[Count]
    bonus: str
    ms: dict[Literal["draft", "target", "verify", "rest"], Annotated[float, Ge(0)]]


def _check_nodes(cycle: Cycle) -> Cycle:
    size = len(cycle["nodes"])
    if max(cycle["path"], default=0) > size or any(n[1] > size for n in cycle["nodes"]):
        raise ValueError(f"a path or parent beyond the {size} nodes of its tree")
    return cycle


class Trace(TypedDict):
    """One generation of a `trace-<arm>.json`. arm: digest of what the arm was, see `identity.arm_key`."""

    question: str
    drafter: str
    arm: NotRequired[str]  # older ones have none
    prompt: str
    first: str
    cycles: list[Annotated[Cycle, AfterValidator(_check_nodes)]]
