"""Metrics of rows. Definitions as in docs/results.md, "Numbers".

tau           emitted tokens / target passes, pooled over cycles, bonus included, prefill excluded; macro: mean by prompt
step-alpha_i  cycles that accept depth i / cycles that accept depth i - 1 and drafted depth i
speed-up      ratio of pooled decode speeds on the same prompts, with a paired bootstrap over questions
expected      tau * T_AR / (T_draft + T_tree): the speed-up that follows from tau and the measured times of the phases
passes        forwards of the drafter that ran, see `interface.Step`

Without any cycle (failures only, or one token an answer) a metric is NaN, or None in place of an interval.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from specbench.records.rows import Row
from specbench.records.schema import ArmHeader, Header
from specbench.records.statistics import Interval, Ratio, interval, mean, pooled
from specbench.records.totals import Counts, Rate, Sums, Totals

BASELINE = "none"


@dataclass(frozen=True)
class Summary:
    """One drafter on one dataset, over `prompts` generations."""

    drafter: str
    prompts: int
    speed: float  # tokens a second, decoding only
    speed_up: Interval | None  # None without baseline rows
    tau: float
    tau_interval: Interval | None
    tau_macro: float
    alphas: tuple[float, ...]
    nodes: float  # draft nodes a cycle
    split: dict[str, float]  # shares of decode time: draft, target, verify, rest
    expected: float  # see `expected_speed_up`; NaN without baseline rows or in replays
    expected_by_parameters: float  # see `expected_by_parameters`; NaN where draft passes were not counted
    peak_bytes: int
    lossless: str
    totals: Totals


def tau(rows: Sequence[Row]) -> float:
    """Emitted tokens a target pass. Raises `AssertionError` if a row's counts contradict its tokens."""
    emitted, cycles = sum(len(r.tokens) - 1 for r in rows), sum(len(r.accepted) for r in rows)
    accepted = sum(sum(r.accepted) for r in rows)
    assert not cycles or emitted == cycles + accepted, "tau is not 1 + the mean number of accepted tokens"
    return emitted / cycles if cycles else float("nan")


def tau_macro(rows: Sequence[Row]) -> float:
    """The mean over rows of each row's own tau."""
    return mean(tau([r]) for r in rows if r.accepted)


def step_alphas(rows: Sequence[Row]) -> tuple[float, ...]:
    """Conditional acceptance by depth, of all depths that were tried."""
    drafted = [d for r in rows for d in r.drafted]
    tried, passed = depth_counts([a for r in rows for a in r.accepted], drafted, max(drafted, default=0))
    return tuple(float(p / t) for p, t in zip(passed, tried, strict=True) if t)


def depth_counts(accepted: Sequence[int], drafted: Sequence[int], depths: int) -> tuple[np.ndarray, np.ndarray]:
    """[depths] each: cycles that tried draft step 1, 2, …, and cycles that accepted it.

    A step is tried if the step before was accepted and a token was drafted for it.
    """
    a, d = np.array(accepted, int), np.array(drafted, int)

    def at_least(depth: np.ndarray) -> np.ndarray:
        counts = np.bincount(np.clip(depth, 0, depths), minlength=depths + 1)
        return counts[::-1].cumsum()[::-1][1:]

    return at_least(np.minimum(a + 1, d)), at_least(np.minimum(a, d))


def speed(rows: Sequence[Row]) -> float:
    """Tokens that cycles emitted, a second."""
    tokens, seconds = sum(len(r.tokens) - 1 for r in rows), sum(r.decode_s for r in rows)
    return tokens / seconds if tokens and seconds else float("nan")


def compared(rows: Sequence[Row], baseline: Sequence[Row]) -> Totals:
    """Sums of a drafter and of the baseline over the prompts that both answered."""
    base = {(r.asked, r.turn) for r in baseline}
    return sum_rows([r for r in rows if (r.asked, r.turn) in base], baseline)


# Sums by question -----------------------------------------------------------------------------------------------------

DEPTHS = 16  # for which acceptance is counted
PHASES = ("draft", "target", "verify")  # of a cycle, as timed in `Step`
SHARED = ("tokens", "cycles", "seconds", *PHASES, "audited", "lossless")  # also summed for the baseline, as `base_<name>`
DRIFT_SUMS = ("judged", "nll", "kl")  # tokens of answers whose drift was measured, and its sums
OWN = (
    "answers",
    "waited",
    "passes",
    "counted",
    "counted_draft",
    "travelled",
    "same",
    "whole",
    "scored",
    "solved",
    "summaries",
    "rouge_l",
    *DRIFT_SUMS,
)
ZEROS: Counts = {
    **dict.fromkeys((*SHARED, *(f"base_{name}" for name in SHARED), *OWN), 0.0),
    **dict.fromkeys(("tried", "passed"), np.zeros(DEPTHS)),
}


def sum_rows(rows: Sequence[Row], baseline: Sequence[Row] = ()) -> Totals:
    """Sums by question of rows, and of the baseline's rows of the same turns.

    [Q] by name, `tried` and `passed` [Q, DEPTHS]. `counted`, `counted_draft`: cycles and drafting seconds of the rows that
    counted their draft `passes` (older ones did not). `whole`, `same`: ids of the baseline's answers, and how many of them
    are equal here at the same index. `waited`: seconds from an answer's first token to its last.
    """
    answers = {(r.asked, r.turn): r.tokens for r in baseline}
    turns = {(r.asked, r.turn) for r in rows}
    counts = [(r.asked, _shared_counts(r) | _own_counts(r, answers.get((r.asked, r.turn)))) for r in rows]
    for r in baseline:
        if (r.asked, r.turn) in turns:
            counts.append((r.asked, {f"base_{name}": value for name, value in _shared_counts(r).items()}))
    return Totals.add_up(counts, ZEROS)


def _shared_counts(row: Row) -> dict[str, float | np.ndarray]:
    """`SHARED` of one row."""
    return {
        "tokens": len(row.tokens) - 1,
        "cycles": len(row.accepted),
        "seconds": row.decode_s,
        **{phase: getattr(row, f"{phase}_s") for phase in PHASES},
        "audited": row.audit is not None,
        "lossless": row.audit is not None and row.audit["verdict"] in ("identical", "numerical tie"),
    }


def _own_counts(row: Row, reference: Sequence[int] | None) -> dict[str, float | np.ndarray]:
    """Those of `OWN` that a row has, and acceptance by depth. reference: the baseline's answer, if there is one."""
    tried, passed = depth_counts(row.accepted, row.drafted, DEPTHS)
    counts: dict[str, float | np.ndarray] = {"answers": 1, "tried": tried, "passed": passed}
    counts |= {"scored": row.solved is not None, "solved": bool(row.solved)}
    counts |= {"summaries": row.rouge_l is not None, "rouge_l": row.rouge_l or 0.0}
    counts |= {"waited": row.decode_s if row.batch is None else row.batch.own_s}
    if row.drift is not None:
        counts |= {"judged": len(row.tokens), "nll": row.drift.nll, "kl": row.drift.kl}
    if row.draft_passes is not None:
        counts |= {"passes": row.draft_passes, "counted": len(row.accepted), "counted_draft": row.draft_s}
    if row.link is not None:
        link = row.link
        counts |= {"travelled": sum(link.sent.values()) + sum(link.received.values()) - link.prompt_bytes}
    if reference is not None:
        same = sum(a == b for a, b in zip(row.tokens + row.alone, reference, strict=False))
        counts |= {"whole": len(reference), "same": same}
    return counts


def step_alpha(depth: int) -> Rate:
    """Acceptance of draft step depth + 1, given the step before."""
    return lambda s: s["passed"][..., depth] / s["tried"][..., depth]


def _speed(s: Sums, prefix: str = "") -> np.ndarray:
    """Tokens a second; NaN, not zero, where no cycle emitted any."""
    tokens = s[f"{prefix}tokens"]
    return np.where(tokens > 0, tokens, np.nan) / s[f"{prefix}seconds"]


RATES: dict[str, Rate] = {
    "tau": lambda s: s["tokens"] / s["cycles"],
    "tokens_per_s": Ratio(_speed),
    "token_ms": Ratio(lambda s: 1000 * s["waited"] / np.where(s["tokens"] > 0, s["tokens"], np.nan)),  # latency
    "speed_up": Ratio(lambda s: _speed(s) / _speed(s, "base_")),
    "alpha": lambda s: s["passed"].sum(-1) / s["tried"].sum(-1),  # over all steps, as in the theory of chains
    **{f"alpha{depth}": step_alpha(depth) for depth in range(6)},
    "late_alpha": lambda s: s["passed"][..., 1:].sum(-1) / s["tried"][..., 1:].sum(-1),  # all steps after the first
    "draft_ms": lambda s: 1000 * s["draft"] / s["cycles"],
    "target_calls": lambda s: s["cycles"] / s["answers"],  # passes over trees, without the prefill
    "bytes_per_token": lambda s: s["travelled"] / s["tokens"],  # between client and server, without the prompt
    "same_share": lambda s: s["same"] / s["whole"],  # ids equal to the baseline's at the same index
    "solved": lambda s: s["solved"] / s["scored"],  # answers that pass their question's check
    "rouge_l": lambda s: s["rouge_l"] / s["summaries"],  # mean of answers, to the summaries that people wrote
    "answer_perplexity": lambda s: np.exp(s["nll"] / s["judged"]),  # of sampled answers under the target
    "answer_kl": lambda s: s["kl"] / s["judged"],  # of what emitted them to the target's distribution, in nats a token
    "lossless": lambda s: s["lossless"] / s["audited"],  # greedy answers equal to the baseline's, up to numerical ties
}
# Metrics that claims and figures name; those beside `RATES` are in `specbench.reporting.claims.rate`.
METRICS = (*RATES, "parameters", "draft_cost", "draft_cost_by_parameters", "expected_speed_up", "promised_speed_up")


def time_split(rows: Sequence[Row]) -> dict[str, float]:
    """Shares of the decode time by phase; `rest` is the time outside the phases."""
    total = sum(r.decode_s for r in rows if r.accepted) or float("nan")
    parts = {name: sum(getattr(r, f"{name}_s") for r in rows) / total for name in PHASES}
    return parts | {"rest": 1 - sum(parts.values())}


def _phases(s: Sums, prefix: str = "") -> np.ndarray:
    """Mean seconds of a cycle's phases: T_draft + T_tree, or T_AR of the baseline."""
    return sum(s[f"{prefix}{phase}"] for phase in PHASES) / s[f"{prefix}cycles"]


def expected_speed_up(s: Sums) -> np.ndarray:
    """tau * T_AR / (T_draft + T_tree), in seconds a cycle.

    T_tree is the target's pass over the tree with its verification, T_AR the same phases of the baseline's cycle on the
    same prompts. It differs from the measured speed-up only by the time outside the phases.
    """
    return RATES["tau"](s) * _phases(s, "base_") / _phases(s)


def free_width_speed_up(s: Sums) -> np.ndarray:
    """tau * T_AR / (T_draft + T_AR): the expected speed-up if a pass over a tree cost as much as one over one token."""
    plain = _phases(s, "base_")
    return RATES["tau"](s) * plain / (s["draft"] / s["cycles"] + plain)


def expected_by_parameters(draft: int, target: int) -> Rate:
    """CORAL's estimate: tau / (passes * draft / target + 1), latency being proportional to the parameters multiplied.

    Embeddings do not count, heads do; passes are those that ran. draft, target: parameters of one pass.
    """
    return lambda s: RATES["tau"](s) / (s["passes"] / s["counted"] * draft / target + 1)


OTHERS, DRIFT = 0.25, 1.2  # limits: share of the cores that others keep busy; ratio of the baseline's speed between halves
FEWEST = 4  # generations of the baseline needed to compare their halves


def busy(rows: Sequence[Row], cores: int) -> str | None:
    """A sentence if the machine did other work while a cell was timed, else None.

    Args:
        rows: of all drafters of the cell, in the order in which they were decoded. cores: of the machine.
    """
    if any(r.replayed for r in rows):
        return None  # nothing was timed
    alone = [r for r in rows if r.link is None and r.served is None]  # else the server may be one of the other processes
    others = [r.others for r in alone if r.others is not None]
    if others and (mean := float(np.mean(others))) > OTHERS * cores:
        return f"The machine was busy: other processes kept {mean:.1f} of its {cores} cores at work. Do not rely on speeds."
    if shared := max((r.gpu.others or 0 for r in alone if r.gpu is not None), default=0):
        return f"The GPU was shared: up to {shared} other processes had memory there. Do not rely on speeds."
    base = [r for r in rows if r.drafter == BASELINE and r.accepted]
    if len(base) < FEWEST:
        return None
    half = len(base) // 2
    slow, fast = sorted((speed(base[:half]), speed(base[half:])))
    if fast <= DRIFT * slow:
        return None
    ratio = f"{fast / slow:.2f} times as fast in one half of this cell as in the other"
    return f"The machine was busy: the baseline was {ratio}. Do not rely on speeds."


def lossless_verdict(rows: Sequence[Row], sampled: bool = False, lossy: bool = False) -> str:
    """A phrase on the audits of greedy rows; for other rows, why they were not audited."""
    if any(r.audit and r.audit["verdict"] == "simulated acceptance" for r in rows):
        return "SIMULATED acceptance"
    if any(r.replayed for r in rows):
        return "replayed"
    if any(r.served for r in rows):
        return f"another engine; {equal_answers(rows)}"
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
    """How many of another engine's answers equal the baseline's token by token, in words."""
    equal = [r.served.equal for r in rows if r.served and r.served.equal is not None]
    return f"{sum(equal)} of {len(equal)} answers equal" if equal else "answers not compared"


def summarise(
    header: Header,
    arm: ArmHeader,
    name: str,
    rows: Sequence[Row],
    baseline: Sequence[Row],
    measured: Mapping[str, Sequence[Mapping[str, float]]] | None = None,
) -> Summary:
    """Metrics of one drafter. Another engine has no speed-up, since its clock is its own."""
    served = any(r.served for r in rows)
    both = compared(rows, baseline)
    totals = both if both.pooled["answers"] == len(rows) else sum_rows(rows, baseline)
    sampled = header["config"]["sampler"]["temperature"] > 0
    peaks = [values["peak"] for values in (measured or {}).get("memory", ()) if "peak" in values]
    return Summary(
        drafter=name,
        prompts=len(rows),
        speed=speed(rows),
        speed_up=None if served else interval(RATES["speed_up"], both),
        tau=tau(rows),
        tau_interval=interval(RATES["tau"], totals),
        tau_macro=tau_macro(rows),
        alphas=step_alphas(rows),
        nodes=mean(n for r in rows for n in r.nodes),
        split=time_split(rows),
        expected=pooled(expected_speed_up, both),
        expected_by_parameters=pooled(expected_by_parameters(arm["parameters"], header["target"]["parameters"]), totals),
        peak_bytes=int(np.median(peaks)) if peaks else 0,
        lossless=lossless_verdict(rows, sampled, arm["lossy"]),
        totals=totals,
    )
