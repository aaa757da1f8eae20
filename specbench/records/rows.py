"""The records of a block: rows (one a generation), failures, measurements, ends of questions; and failures of cells."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AllowInfNan

from specbench.common.errors import shorten
from specbench.common.hashing import of
from specbench.common.io import read_json
from specbench.common.storage import atomic_path
from specbench.records.schema import Measure, Natural, Seconds

if TYPE_CHECKING:
    from specbench.common.gpu import Meter
    from specbench.engine.interface import Step

VERDICTS = ("identical", "numerical tie", "bug", "simulated acceptance")  # of an audit

# Names of quantities that were measured at several sizes, which tables read from the name.
SIZED = {"target_pass": re.compile(r"ms_[1-9][0-9]{0,8}\Z"), "clients": re.compile(r"[a-z_]+_[1-9][0-9]{0,8}\Z")}
BINS = 10  # of a drafter's probability for a token: [0, 0.1), …, [0.9, 1]
Bin = tuple[Natural, Natural, Annotated[float, AllowInfNan()]]  # nodes, those accepted, sum of the drafter's probabilities


class PromptRecord:
    """A record of one turn of one question."""

    drafter: str
    question: str
    turn: int
    text: str

    @property
    def key(self) -> tuple[str, str, int]:
        return self.drafter, self.question, self.turn

    @property
    def asked(self) -> str:
        """What identifies its question: the digest of the text, since an id may have had another; the id without one."""
        return self.text or self.question


@dataclass
class LinkUse:
    """Traffic of a generation, see `specbench.remote.client.Traffic`."""

    sent: dict[str, Natural]
    received: dict[str, Natural]
    round_trips: Natural
    waited_s: Seconds
    server_s: Seconds
    resumed: Natural
    prompt_bytes: Natural = 0
    prompt_s: Seconds = 0.0
    cut: str | None = None  # why the connection ended before the generation


@dataclass
class Served:
    """An answer of another engine, see `specbench.evaluation.served`.

    Attributes:
        counted: its text was tokenized here, since the server sent no ids.
        equal: to the baseline's answer; None: not compared. at: index of the first different token.
    """

    counted: bool
    equal: bool | None = None
    at: Natural | None = None


@dataclass
class Batched:
    """The batch that a generation was part of.

    Attributes:
        size: number of sequences. tokens: that the cycles of all of them emitted.
        first_s: from the start until all prompts had been read. seconds: from then until the last sequence ended.
        own_s: from then until this sequence ended, which is its latency.
    """

    size: Natural
    tokens: Natural
    first_s: Seconds
    seconds: Seconds
    own_s: Seconds


@dataclass
class GpuUse:
    """The GPU of a generation, as its driver sees it; None where that does not say, see `specbench.common.gpu`.

    Attributes:
        energy_j: of the whole generation, its prompt included, whatever else ran on the GPU. sm_mhz, throttled, others: at
            its end: clock, why it is lowered, other processes with memory there.
    """

    energy_j: Seconds | None = None
    sm_mhz: Natural | None = None
    throttled: list[str] | None = None
    others: Natural | None = None

    @classmethod
    def read(cls, meter: Meter) -> GpuUse | None:
        """None off a GPU."""
        state = meter.read()
        return None if state is None else cls(**asdict(state))

    def share(self, part: float) -> GpuUse:
        """Of a batch, one sequence's."""
        return replace(self, energy_j=None if self.energy_j is None else self.energy_j * part)


@dataclass
class Drift:
    """How far a sampled answer is from the target's distribution, see `specbench.evaluation.drift`; sums over tokens."""

    nll: Measure
    kl: Measure


@dataclass
class Row(PromptRecord):
    """One generation: a drafter (or the baseline, `none`) on one turn of one question.

    `text` is the question's digest (`identity.question_digest`). `tokens` are the emitted ids; the first came from the
    prefill, the others from the cycles. Lists of counts have one entry a cycle; `passes` is empty in rows written before
    draft passes were counted. Seconds are sums over the cycles; a `replayed` row has none.
    A row of a batch has its share of the batch's, by tokens, so that speeds are throughputs.
    """

    drafter: str
    question: str
    category: str
    turn: Natural
    prompt_tokens: Natural
    tokens: list[Natural]
    prefill_s: Seconds
    decode_s: Seconds
    nodes: list[Natural] = field(default_factory=list)
    drafted: list[Natural] = field(default_factory=list)
    accepted: list[Natural] = field(default_factory=list)
    ranks: list[list[Natural]] = field(default_factory=list)
    passes: list[Natural] = field(default_factory=list)  # draft passes that ran
    draft_s: Seconds = 0.0
    target_s: Seconds = 0.0
    verify_s: Seconds = 0.0
    rest_s: Measure = 0.0  # outside the phases
    audit: dict[str, Any] | None = None
    others: Seconds | None = None  # cores that other processes kept busy
    replayed: bool = False
    confidence: list[Bin] = field(default_factory=list)  # of a replayed row, see `evaluation.trace.CalibratedDrafter`
    link: LinkUse | None = None  # to a target on a server
    batch: Batched | None = None
    gpu: GpuUse | None = None
    served: Served | None = None  # another engine's answer, timed by its own clock; it has no cycles
    # What the drafter generated after `tokens` without the target, once the connection was cut; unverified.
    alone: list[Natural] = field(default_factory=list)
    alone_s: Seconds = 0.0
    solved: bool | None = None  # does the answer, `alone` included, pass its question's check? None: not checked
    rouge_l: float | None = None  # of such an answer, where its check is a summary that people wrote
    drift: Drift | None = None  # None: not measured
    text: str = ""
    kind: Literal["prompt"] = "prompt"

    def add(self, step: Step) -> None:
        """Add the counts and seconds of one cycle."""
        self.tokens += step.tokens
        self.nodes.append(step.nodes)
        self.drafted.append(step.drafted)
        self.accepted.append(step.accepted)
        self.ranks.append(step.ranks)
        self.passes.append(step.passes)
        self.draft_s += step.draft_s
        self.target_s += step.target_s
        self.verify_s += step.verify_s
        self.rest_s += step.rest_s

    @property
    def draft_passes(self) -> int | None:
        """Of all cycles; None where they were not counted."""
        return sum(self.passes) if len(self.passes) == len(self.accepted) else None


@dataclass
class Failure(PromptRecord):
    """A generation that raised an error."""

    drafter: str
    question: str
    turn: Natural
    error: str
    text: str = ""
    kind: Literal["error"] = "error"


@dataclass
class Measurement:
    """One repetition of a quantity, such as `memory`, that was measured of a drafter beside its generations."""

    drafter: str
    what: str
    repetition: Natural
    values: dict[str, Measure]
    kind: Literal["measurement"] = "measurement"

    @property
    def key(self) -> tuple[str, str, int]:
        return self.drafter, self.what, self.repetition


@dataclass
class QuestionEnd:
    """All generations of a question in this block are finished; seconds include everything done around them."""

    question: str
    generations: Natural
    seconds: Seconds
    kind: Literal["question"] = "question"


Record = Row | Failure | Measurement | QuestionEnd


@dataclass
class CellFailure:
    """A cell that could not begin or was aborted; the next sweep tries it again."""

    model: str
    dataset: str
    drafter: str
    temperature: Annotated[float, AllowInfNan()] | str | None  # as configured, which may be why it failed
    error: str
    when: str = ""
    kind: Literal["cell failure"] = "cell failure"

    @classmethod
    def path(cls, folder: Path, drafter: str, settings: dict[str, Any]) -> Path:
        """File for the failure of a cell with these settings. folder: of the dataset's cells."""
        return folder / f"{drafter}-{of(settings)[:12]}.failed.json"

    def write(self, path: Path) -> None:
        self.when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        with atomic_path(path) as temporary:
            temporary.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> CellFailure:
        """Raises `SpecBenchError` for a damaged file or one of another kind."""
        failure: CellFailure = read_json(path, cls)
        return failure


def by_error(failures: Iterable[CellFailure]) -> dict[str, list[str]]:
    """The cells that failed with each error."""
    failed: dict[str, list[str]] = {}
    for failure in failures:
        failed.setdefault(failure.error, []).append(f"{failure.drafter} on {failure.dataset} ({failure.model})")
    return failed


def _link_contradiction(link: LinkUse) -> str | None:
    if link.prompt_bytes > sum(link.sent.values()) + sum(link.received.values()):
        return "the prompt took more bytes than the whole generation"
    if link.prompt_s > link.server_s:
        return "the prompt took more of the server's seconds than the whole generation"
    return None


def contradiction(row: Any, arms: Iterable[str]) -> str | None:
    """Why a record's values, each valid by itself, cannot all be right; None if they can. arms: labels of the header."""
    if isinstance(row, dict):
        return "a second header"
    if isinstance(row, QuestionEnd):
        return None
    if row.drafter not in arms:
        return f"{row.drafter} is none of the header's drafters, {', '.join(arms)}"
    if isinstance(row, Measurement):
        pattern = SIZED.get(row.what, re.compile(""))
        odd = [name for name in row.values if not pattern.match(name)]
        return f"{shorten(repr(odd[0]), 40)} is no quantity of {row.what}, which ends in a size" if odd else None
    if not isinstance(row, Row):
        return None
    if row.link is not None and (problem := _link_contradiction(row.link)):
        return problem
    if len({len(row.nodes), len(row.drafted), len(row.accepted), len(row.ranks)}) > 1:
        return "nodes, drafted, accepted and ranks have one entry a cycle, so as many each"
    if row.passes and len(row.passes) != len(row.accepted):
        return "passes has one entry a cycle, or none at all where draft passes were not counted"
    if row.served is not None and (row.accepted or row.audit is not None):
        return "another engine's answer has no cycles and no audit"
    if row.served is None and len(row.tokens) - 1 != sum(row.accepted) + len(row.accepted):
        return f"{len(row.tokens)} tokens are not the prefill's one, the accepted ones and a bonus a cycle"
    if row.audit is not None and row.audit.get("verdict") not in VERDICTS:
        return f"an audit's verdict is one of {', '.join(VERDICTS)}"
    return None
