"""From rows to numbers, in pure functions. Definitions as in the README's "What is measured".

tau           emitted tokens / target passes, pooled over cycles, bonus included, prefill excluded; macro: mean by prompt
step-alpha_i  cycles that accept depth i / cycles that accept depth i - 1 and drafted depth i
speed-up      ratio of pooled decode speeds on the same prompts, with a paired bootstrap over questions
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specbench.records import Row

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
    tau_macro: float
    alphas: tuple[float, ...]
    nodes: float  # draft nodes a cycle
    split: dict[str, float]  # shares of decode time: draft, target, verify, rest
    predicted: float  # speed-up expected from tau and the measured draft / target ratio
    predicted_by_parameters: float  # CORAL's estimate from parameter counts
    peak_bytes: int
    lossless: str


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
    accepted = np.array([a for r in rows for a in r.accepted])
    return [float((accepted >= depth).mean()) for depth in range(1, accepted.max(initial=0) + 1)]


def step_alphas(rows: Sequence[Row]) -> tuple[float, ...]:
    """Conditional acceptance by depth, as far as drafts went."""
    accepted = np.array([a for r in rows for a in r.accepted])
    drafted = np.array([d for r in rows for d in r.drafted])
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
    return tokens / seconds if seconds else float("nan")


def speed_up(rows: Sequence[Row], baseline: Sequence[Row], samples: int = 2000, seed: int = 0) -> Interval | None:
    """Pooled speed over the baseline's on the same prompts; None where they share none.

    The interval resamples questions, keeping each question's turns and its baseline together.
    """
    base = {(r.question, r.turn): r for r in baseline}
    pairs = [(r, base[r.question, r.turn]) for r in rows if (r.question, r.turn) in base]
    questions = sorted({r.question for r, _ in pairs})
    place = {q: i for i, q in enumerate(questions)}
    totals = np.zeros((len(questions), 4))  # tokens and seconds, drafter's and baseline's
    for ours, theirs in pairs:
        totals[place[ours.question]] += (
            len(ours.tokens) - 1,
            ours.decode_s,
            len(theirs.tokens) - 1,
            theirs.decode_s,
        )
    if not len(questions) or (totals.sum(0) == 0).any():
        return None

    def ratio(t: np.ndarray) -> np.ndarray:
        return (t[..., 0] / t[..., 1]) / (t[..., 2] / t[..., 3])

    draws = np.random.default_rng(seed).integers(len(questions), size=(samples, len(questions)))
    with np.errstate(divide="ignore", invalid="ignore"):
        low, high = np.nanpercentile(ratio(totals[draws].sum(1)), [2.5, 97.5])
    return Interval(float(ratio(totals.sum(0))), float(low), float(high))


def time_split(rows: Sequence[Row]) -> dict[str, float]:
    """Shares of the decode time. What no phase claims belongs to the rest."""
    total = sum(r.decode_s for r in rows) or float("nan")
    parts = {name: sum(getattr(r, f"{name}_s") for r in rows) / total for name in ("draft", "target", "verify")}
    return parts | {"rest": 1 - sum(parts.values())}


def predicted_speed_up(rows: Sequence[Row]) -> float:
    """tau / (T_draft / T_verify + 1), T being seconds a cycle: what tau and the time split alone would give."""
    target = sum(r.target_s for r in rows)
    return tau(rows) / (sum(r.draft_s for r in rows) / target + 1) if target else float("nan")


def predicted_by_parameters(value: float, passes: int, draft_parameters: int, target_parameters: int) -> float:
    """CORAL's estimate: latency goes with the parameters that are multiplied, embeddings aside and heads included.

    tau / (passes * draft / target + 1), with `passes` draft forwards a cycle.
    """
    return value / (passes * draft_parameters / target_parameters + 1)


def lossless_verdict(rows: Sequence[Row], sampled: bool = False, lossy: bool = False) -> str:
    """One phrase over all audits of greedy rows; of sampled ones, what the verification rule promises."""
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


def summarise(header: dict[str, Any], drafter: str, rows: Sequence[Row], baseline: Sequence[Row]) -> Summary:
    """Everything the table shows about one drafter. header: of its cell, for parameter counts and the rule."""
    parameters = header["parameters"]
    value = tau(rows)
    draft, passes = (0, 0) if drafter == BASELINE else (parameters["drafter"], header["draft_passes"])
    sampled = header["config"]["sampler"]["temperature"] > 0
    return Summary(
        drafter=drafter,
        prompts=len(rows),
        tokens=sum(len(r.tokens) for r in rows),
        speed=speed(rows),
        speed_with_prefill=speed(rows, prefill=True),
        speed_up=speed_up(rows, baseline),
        tau=value,
        tau_macro=tau_macro(rows),
        alphas=step_alphas(rows),
        nodes=float(np.mean([float(n) for r in rows for n in r.nodes] or [float("nan")])),
        split=time_split(rows),
        predicted=predicted_speed_up(rows),
        predicted_by_parameters=predicted_by_parameters(value, passes, draft, parameters["target"]),
        peak_bytes=max((max(peak_bytes(r)) for r in rows), default=0),
        lossless=lossless_verdict(rows, sampled, drafter != BASELINE and header["lossy"]),
    )


def peak_bytes(row: Row) -> list[int]:
    """Peaks of a generation, one by source."""
    return [v for v in row.peak.values() if isinstance(v, int) and not isinstance(v, bool)] or [0]
