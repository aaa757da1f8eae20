"""From rows to numbers, in pure functions. Definitions as in the README's "What is measured".

tau           emitted tokens / target passes, pooled over cycles, bonus included, prefill excluded; macro: mean by prompt
step-alpha_i  cycles that accept depth i / cycles that accept depth i - 1 and drafted depth i
speed-up      ratio of pooled decode speeds on the same prompts, with a paired bootstrap over questions
expected      tau * T_AR / (T_draft + T_tree), the speed-up that tau and the measured times of a cycle's phases give
passes        forwards of the drafter that cycles really ran, see `interface.Step`

Rows without a cycle (failures only, or one token an answer) have no such number: it is NaN, or None where there would be
an interval.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from specbench.records.rows import Row
from specbench.records.schema import Arm, Header

BASELINE = "none"


@dataclass(frozen=True)
class Interval:
    """A value with its 95% interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Summary:
    """One drafter on one dataset, over `prompts` generations."""

    drafter: str
    prompts: int
    tokens: int
    speed: float  # tokens a second, decoding only
    speed_with_prefill: float
    speed_up: Interval | None  # None without baseline rows
    tau: float
    tau_interval: Interval | None
    tau_macro: float
    alphas: tuple[float, ...]
    nodes: float  # draft nodes a cycle
    split: dict[str, float]  # shares of decode time: draft, target, verify, rest
    expected: float  # speed-up that tau and measured times give; NaN without baseline rows or without a clock
    expected_by_parameters: float  # CORAL's estimate from parameter counts; NaN where draft passes were not counted
    peak_bytes: int
    lossless: str
    totals: "Totals"


def cycles(rows: Sequence[Row]) -> int:
    return sum(len(r.accepted) for r in rows)


def tau(rows: Sequence[Row]) -> float:
    """Emitted tokens a target pass. Raises `AssertionError` where a row's counts contradict its tokens."""
    emitted, passes = sum(len(r.tokens) - 1 for r in rows), cycles(rows)
    value = emitted / passes if passes else float("nan")
    assert not passes or abs(value - 1 - sum(marginals(rows))) < 1e-9, "tau is not 1 + the sum of marginal acceptances"
    return value


def tau_macro(rows: Sequence[Row]) -> float:
    return float(np.mean([tau([r]) for r in rows if r.accepted])) if any(r.accepted for r in rows) else float("nan")


def marginals(rows: Sequence[Row]) -> list[float]:
    """Share of all cycles that accept depth 1, 2, …"""
    accepted = np.array([a for r in rows for a in r.accepted], int)
    return [float((accepted >= depth).mean()) for depth in range(1, accepted.max(initial=0) + 1)]


def step_alphas(rows: Sequence[Row]) -> tuple[float, ...]:
    """Conditional acceptance by depth, as far as drafts went."""
    accepted = np.array([a for r in rows for a in r.accepted], int)
    drafted = np.array([d for r in rows for d in r.drafted], int)
    found = []
    for depth in range(1, drafted.max(initial=0) + 1):
        tried = (accepted >= depth - 1) & (drafted >= depth)
        if not tried.any():
            break
        found.append(float((accepted[tried] >= depth).mean()))
    return tuple(found)


def speed(rows: Sequence[Row], prefill: bool = False) -> float:
    """Tokens a second. Decoding only counts the tokens that cycles emitted; with prefill, all of them."""
    tokens = sum(len(r.tokens) - (0 if prefill else 1) for r in rows)
    seconds = sum(r.decode_s + (r.prefill_s if prefill else 0.0) for r in rows)
    return tokens / seconds if tokens and seconds else float("nan")


def compared(rows: Sequence[Row], baseline: Sequence[Row]) -> "Totals":
    """Sums of a drafter and of the baseline over the prompts that both answered."""
    base = {(r.question, r.turn) for r in baseline}
    return Totals.of([r for r in rows if (r.question, r.turn) in base], baseline)


# Sums by question, and what is made of them ---------------------------------------------------------------------------

DEPTHS = 16  # acceptance is kept depth by depth down to here
PHASES = ("draft", "target", "verify")  # of a cycle, as `Step` times them; the rest is nobody's
# Not summed for the baseline.
OWN = ("answers", "passes", "counted", "counted_draft", "sent", "received", "same", "whole", "scored", "solved")
Sums = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Totals:
    """What rows add up to, question by question: all that a rate and its interval need.

    Turns of a question stay together, and so do a drafter's rows and the baseline's on the same prompts, so that
    resampling questions is paired.

    Attributes:
        questions: Q names, sorted.
        sums: name -> [Q], or [Q, DEPTHS] by depth. `counted`, `counted_draft`: cycles and drafting seconds of the rows that
            counted their draft `passes`, which older ones did not.
    """

    questions: tuple[str, ...]
    sums: Sums

    @classmethod
    def of(cls, rows: Sequence[Row], baseline: Sequence[Row] = ()) -> "Totals":
        """Add rows up; of the baseline only what was asked of both."""
        questions = tuple(sorted({r.question for r in rows}))
        place = {q: i for i, q in enumerate(questions)}
        names = ("tokens", "cycles", "seconds", *PHASES, "audited", "lossless")
        sums: dict[str, np.ndarray] = {n: np.zeros(len(questions)) for n in names}
        sums |= {f"base_{n}": np.zeros(len(questions)) for n in names}
        sums |= {n: np.zeros(len(questions)) for n in OWN}
        sums |= {n: np.zeros((len(questions), DEPTHS)) for n in ("tried", "passed")}
        answers = {(r.question, r.turn): r.tokens for r in baseline}
        asked = {(r.question, r.turn) for r in rows}
        for row, prefix in [(r, "") for r in rows] + [(r, "base_") for r in baseline if (r.question, r.turn) in asked]:
            at = place[row.question]
            sums[prefix + "tokens"][at] += len(row.tokens) - 1
            sums[prefix + "cycles"][at] += len(row.accepted)
            sums[prefix + "seconds"][at] += row.decode_s
            for phase in PHASES:
                sums[prefix + phase][at] += getattr(row, f"{phase}_s")
            if row.audit is not None:
                sums[prefix + "audited"][at] += 1
                sums[prefix + "lossless"][at] += row.audit["verdict"] in ("identical", "numerical tie")
            if not prefix:
                sums["answers"][at] += 1
                if row.draft_passes is not None:
                    sums["passes"][at] += row.draft_passes
                    sums["counted"][at] += len(row.accepted)
                    sums["counted_draft"][at] += row.draft_s
                sums["scored"][at] += row.solved is not None
                sums["solved"][at] += bool(row.solved)
                if row.link is not None:
                    sums["sent"][at] += sum(row.link.sent.values())
                    sums["received"][at] += sum(row.link.received.values())
                if (whole := answers.get((row.question, row.turn))) is not None:
                    sums["whole"][at] += len(whole)
                    sums["same"][at] += sum(a == b for a, b in zip(row.tokens + row.alone, whole, strict=False))
                accepted, drafted = np.array(row.accepted, int), np.array(row.drafted, int)
                for depth in range(1, min(drafted.max(initial=0), DEPTHS) + 1):
                    tried = (accepted >= depth - 1) & (drafted >= depth)
                    sums["tried"][at, depth - 1] += tried.sum()
                    sums["passed"][at, depth - 1] += (accepted[tried] >= depth).sum()
        return cls(questions, sums)

    def among(self, questions: Sequence[str]) -> "Totals":
        """The same for these questions only, in this order."""
        place = {q: i for i, q in enumerate(self.questions)}
        at = [place[q] for q in questions]
        return Totals(tuple(questions), {n: s[at] for n, s in self.sums.items()})

    def pooled(self) -> Sums:
        """Sums over all questions: numbers, or [DEPTHS]."""
        return {n: s.sum(0) for n, s in self.sums.items()}

    def resampled(self) -> Sums:
        """The same over every bootstrap sample of questions: [S] or [S, DEPTHS]."""
        return self._resampled

    @cached_property
    def _resampled(self) -> Sums:
        """One product for all sums, and once for all the rates that are asked of them."""
        columns = [s.reshape(len(self.questions), -1) for s in self.sums.values()]
        ends = np.cumsum([c.shape[1] for c in columns])[:-1]
        parts = np.split(resamples(len(self.questions)) @ np.concatenate(columns, 1), ends, axis=1)
        return {n: p.reshape(len(p), *s.shape[1:]) for (n, s), p in zip(self.sums.items(), parts, strict=True)}


def _alpha(depth: int) -> "Rate":
    return lambda s: s["passed"][..., depth] / s["tried"][..., depth]


def _speed(s: Sums, whose: str = "") -> np.ndarray:
    """Tokens a second; none, rather than zero, where no cycle emitted any."""
    tokens = s[f"{whose}tokens"]
    return np.where(tokens > 0, tokens, np.nan) / s[f"{whose}seconds"]


Rate = Callable[[Sums], np.ndarray]
RATES: dict[str, Rate] = {
    "tau": lambda s: s["tokens"] / s["cycles"],
    "tokens_per_s": _speed,
    "speed_up": lambda s: _speed(s) / _speed(s, "base_"),
    "alpha": lambda s: s["passed"].sum(-1) / s["tried"].sum(-1),  # of all steps together, as in the theory of chains
    **{f"alpha{depth}": _alpha(depth) for depth in range(6)},
    "late_alpha": lambda s: s["passed"][..., 1:].sum(-1) / s["tried"][..., 1:].sum(-1),  # all steps behind the first
    "draft_ms": lambda s: 1000 * s["draft"] / s["cycles"],
    "target_calls": lambda s: s["cycles"] / s["answers"],  # passes over trees, the prompt's not counted
    "sent_bytes": lambda s: s["sent"] / s["cycles"],  # a cycle, the prompt's share included
    "received_bytes": lambda s: s["received"] / s["cycles"],
    "same_share": lambda s: s["same"] / s["whole"],  # of the baseline's ids, those that stand in the same place here
    "solved": lambda s: s["solved"] / s["scored"],  # answers that pass their question's check
    "lossless": lambda s: s["lossless"] / s["audited"],  # greedy answers that are the baseline's, but for numerical ties
}
SAMPLES = 2000


@lru_cache(maxsize=8)
def draws(questions: int) -> np.ndarray:
    """Bootstrap samples of questions, [S, Q] indices; the same ones whenever there are as many questions."""
    return np.random.default_rng(0).integers(questions, size=(SAMPLES, questions))


@lru_cache(maxsize=8)
def resamples(questions: int) -> np.ndarray:
    """[S, Q]: how often a sample holds each question."""
    return np.stack([np.bincount(sample, minlength=questions) for sample in draws(questions)]).astype(float)


def interval(rate: Rate, totals: Totals) -> Interval | None:
    """A rate over all questions with its 95% bootstrap interval over questions; None where nothing was counted."""
    if not totals.questions:
        return None
    return _bounded(rate, (totals.pooled(),), (totals.resampled(),))


def contrast(
    rate: Rate, ours: Totals, theirs: Totals, ratio: bool = False, other: Rate | None = None, paired: bool = True
) -> Interval | None:
    """Difference (or ratio) of a rate between two drafters on the questions they share, resampled alike for both.

    other: the rate of the second drafter, if it is another one. paired: False: each side has questions of its own, which
    are resampled apart.
    """
    if paired:
        shared = sorted(set(ours.questions) & set(theirs.questions))
        ours, theirs = ours.among(shared), theirs.among(shared)
    if not ours.questions or not theirs.questions:
        return None

    def effect(mine: Sums, yours: Sums) -> np.ndarray:
        first, second = rate(mine), (other or rate)(yours)
        return first / second if ratio else first - second

    second = theirs.resampled()
    if not paired:  # as many questions on both sides have the same samples: the other way round they are unrelated
        second = {name: sums[::-1] for name, sums in second.items()}
    return _bounded(effect, (ours.pooled(), theirs.pooled()), (ours.resampled(), second))


def _bounded(effect: Callable[..., np.ndarray], pooled: tuple[Sums, ...], resampled: tuple[Sums, ...]) -> Interval | None:
    """An effect of sums with its bounds over samples; samples that leave it undefined do not count."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        value, samples = float(effect(*pooled)), effect(*resampled)
    if not np.isfinite(value):
        return None
    samples = samples[np.isfinite(samples)]
    low, high = np.percentile(samples, [2.5, 97.5]) if samples.size else (value, value)
    return Interval(value, float(low), float(high))


def pooled(rate: Rate, totals: Totals) -> float:
    """A rate over all questions; NaN where it is undefined."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(rate(totals.pooled()))


def macro(rate: Rate, totals: Totals) -> float:
    """The mean over questions of a rate taken question by question."""
    with np.errstate(divide="ignore", invalid="ignore"):
        values = rate(totals.sums)
    values = values[np.isfinite(values)]
    return float(values.mean()) if values.size else float("nan")


def repeated(values: Sequence[float]) -> Interval:
    """The median of a measurement's repetitions, with its 95% interval over these."""
    low, high = np.percentile(medians(values), [2.5, 97.5])
    return Interval(float(np.median(values)), float(low), float(high))


def medians(values: Sequence[float], seed: int = 0) -> np.ndarray:
    """[S] of bootstrap samples of repetitions."""
    found: np.ndarray = np.median(np.random.default_rng(seed).choice(values, (SAMPLES, len(values))), axis=1)
    return found


def time_split(rows: Sequence[Row]) -> dict[str, float]:
    """Shares of the decode time. What no phase claims belongs to the rest."""
    total = sum(r.decode_s for r in rows if r.accepted) or float("nan")
    parts = {name: sum(getattr(r, f"{name}_s") for r in rows) / total for name in PHASES}
    return parts | {"rest": 1 - sum(parts.values())}


def _phases(s: Sums, whose: str = "") -> np.ndarray:
    """Seconds of the phases of a cycle, the mean over cycles: T_draft + T_tree, or T_AR of the baseline."""
    return sum(s[f"{whose}{phase}"] for phase in PHASES) / s[f"{whose}cycles"]


def expected_speed_up(s: Sums) -> np.ndarray:
    """tau * T_AR / (T_draft + T_tree), in seconds a cycle: what tau and the costs measured here give.

    T_tree is the target's pass over the tree with its verification, T_AR the same phases of the baseline's cycle on the
    same prompts. It differs from the measured speed-up by the time that no phase claims, and by nothing else.
    """
    return RATES["tau"](s) * _phases(s, "base_") / _phases(s)


def free_width_speed_up(s: Sums) -> np.ndarray:
    """tau * T_AR / (T_draft + T_AR): the same if a pass over a whole tree cost no more than one over a single token."""
    plain = _phases(s, "base_")
    return RATES["tau"](s) * plain / (s["draft"] / s["cycles"] + plain)


def expected_by_parameters(draft: int, target: int) -> Rate:
    """CORAL's estimate: latency goes with the parameters that are multiplied, embeddings aside and heads included.

    tau / (passes * draft / target + 1), with as many draft passes a cycle as ran. draft, target: parameters of one pass.
    """
    return lambda s: RATES["tau"](s) / (s["passes"] / s["counted"] * draft / target + 1)


OTHERS, DRIFT = 0.25, 1.2  # of the cores, kept busy by others; of the baseline's speed, between halves of a cell
FEWEST = 4  # generations of the baseline, for their halves to say something


def busy(rows: Sequence[Row], cores: int) -> str | None:
    """Did the machine do other work while a cell was timed? A sentence on it, or None.

    Args:
        rows: of all drafters of the cell, in the order in which they were decoded. cores: of the machine.
    """
    if any(r.replayed for r in rows):
        return None  # nothing was timed
    # Over a link the server may be one of the other processes, and is meant to work.
    others = [r.others for r in rows if r.others is not None and r.link is None]
    if others and (mean := float(np.mean(others))) > OTHERS * cores:
        return f"The machine was busy: other processes kept {mean:.1f} of its {cores} cores at work. Do not rely on speeds."
    base = [r for r in rows if r.drafter == BASELINE and r.accepted]
    half = len(base) // 2
    if len(base) < FEWEST:
        return None
    slow, fast = sorted((speed(base[:half]), speed(base[half:])))
    if fast > DRIFT * slow:
        return (
            f"The machine was busy: the baseline was {fast / slow:.2f} times as fast in one half of this cell as in the "
            "other. Do not rely on speeds."
        )
    return None


def lossless_verdict(rows: Sequence[Row], sampled: bool = False, lossy: bool = False) -> str:
    """One phrase over all audits of greedy rows; of sampled ones, what the verification rule promises."""
    if any(r.audit and r.audit["verdict"] == "simulated acceptance" for r in rows):
        return "SIMULATED acceptance"
    if any(r.replayed for r in rows):
        return "replayed"
    if any(r.served for r in rows):
        return f"served: another engine's clock; {equal_answers(rows)}"
    if lossy:
        return "LOSSY verification rule"
    if sampled:
        return "same distribution (rule)"
    audits = [r.audit for r in rows if r.audit is not None]
    if not audits:
        return "not audited"
    bugs = sum(a["verdict"] == "bug" for a in audits)
    ties = sum(a["verdict"] == "numerical tie" for a in audits)
    if bugs:
        return f"NOT lossless: {bugs} of {len(audits)} differ"
    return f"identical {len(audits) - ties}/{len(audits)}" + (f", {ties} numerical ties" if ties else "")


def equal_answers(rows: Sequence[Row]) -> str:
    """How many of another engine's answers are the baseline's, token by token."""
    found = [r.served.equal for r in rows if r.served and r.served.equal is not None]
    return f"{sum(found)} of {len(found)} answers equal" if found else "answers not compared"


def summarise(
    header: Header,
    arm: Arm,
    name: str,
    rows: Sequence[Row],
    baseline: Sequence[Row],
    measured: Mapping[str, Sequence[Mapping[str, float]]] | None = None,
) -> Summary:
    """Everything the table shows about one drafter. header, arm: of its cell, for parameter counts and the rule.

    Seconds of another engine are held against nothing that was timed here.
    """
    if any(r.served for r in rows):
        baseline = ()
    totals, both = Totals.of(rows, baseline), compared(rows, baseline)
    sampled = header["config"]["sampler"]["temperature"] > 0
    peaks = [values["peak"] for values in (measured or {}).get("memory", ()) if "peak" in values]
    return Summary(
        drafter=name,
        prompts=len(rows),
        tokens=sum(len(r.tokens) for r in rows),
        speed=speed(rows),
        speed_with_prefill=speed(rows, prefill=True),
        speed_up=interval(RATES["speed_up"], both),
        tau=tau(rows),
        tau_interval=interval(RATES["tau"], totals),
        tau_macro=tau_macro(rows),
        alphas=step_alphas(rows),
        nodes=float(np.mean([float(n) for r in rows for n in r.nodes] or [float("nan")])),
        split=time_split(rows),
        expected=pooled(expected_speed_up, both),
        expected_by_parameters=pooled(expected_by_parameters(arm["parameters"], header["target"]["parameters"]), totals),
        peak_bytes=int(np.median(peaks)) if peaks else 0,
        lossless=lossless_verdict(rows, sampled, arm["lossy"]),
        totals=totals,
    )
