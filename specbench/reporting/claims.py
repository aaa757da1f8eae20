"""The ledger of claims: what papers say, as plain data, against what rows say. Knows rows and metrics, no drafter.

A claim is a list of tests; a test compares one metric of a drafter with the same or another metric of a drafter,

    {metric: tau, of: hass, over: eagle2, is: more}          tau(hass) - tau(eagle2) > 0
    {metric: speed_up, of: beagle, over: eagle2, within: 0.05}   the ratio lies in 1 +- 0.05
    {metric: tau, of: medusa, than: 2.0, is: more}           tau(medusa) > 2, a number instead of another drafter

or two measured numbers of a benchmark file (`file`, dotted keys in `of` and `over`; no interval there). Differences are
taken of tau and acceptances, ratios of everything else. The 95% interval resamples questions, for both drafters the same.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Gt, MinLen
from pydantic import AfterValidator
from typing_extensions import NotRequired, TypedDict

from specbench.errors import SpecBenchError
from specbench.files import read_yaml
from specbench.metrics import BASELINE, RATES, Interval, Rate, Totals, contrast, interval
from specbench.reporting.cells import Entry
from specbench.reporting.tables import markdown_table

REPRODUCED, NOT_REPRODUCED, INCONCLUSIVE, NOT_RUN = "reproduced", "not reproduced", "inconclusive", "not run here"


@dataclass(frozen=True)
class Evidence:
    """Greedy rows of one drafter on one dataset, added up with the baseline's beside them."""

    totals: Totals
    generations: int
    parameters: int  # that a draft pass multiplies
    target_parameters: int = 1
    passes: int = 1  # draft passes a cycle

    def rate(self, metric: str) -> Rate:
        """A metric of this drafter. Raises `SpecBenchError` for an unknown one."""
        if metric in RATES:
            return RATES[metric]
        if metric == "parameters":
            return lambda s: np.full_like(s["cycles"], self.parameters)
        if metric == "draft_cost_by_parameters":
            return lambda s: np.full_like(s["cycles"], self.parameters / self.target_parameters)
        if metric == "draft_cost":  # seconds of a draft pass over seconds of a target pass for one token
            per_cycle = max(self.passes, 1)
            return lambda s: s["draft"] / s["cycles"] / per_cycle / (s["base_target"] / s["base_cycles"])
        raise SpecBenchError(f"unknown metric {metric} in a claim; there are {', '.join(METRICS)}")


METRICS = (*RATES, "parameters", "draft_cost", "draft_cost_by_parameters")


# "is" is a keyword, hence the call. Only a benchmark file has no metric, only an interval around no effect no direction.
Test = TypedDict(
    "Test",
    {
        "metric": NotRequired[Literal[METRICS]],  # type: ignore[valid-type]
        "of": str,
        "over": NotRequired[str],
        "over_metric": NotRequired[Literal[METRICS]],  # type: ignore[valid-type]
        "than": NotRequired[Annotated[float, Gt(0)]],
        "is": NotRequired[Literal["more", "less"]],
        "by": NotRequired[float],
        "within": NotRequired[Annotated[float, Gt(0)]],
        "file": NotRequired[str],
    },
)


def _complete(test: Test) -> Test:
    if ("metric" in test) == ("file" in test) or ("file" in test and "over" not in test):
        raise ValueError("a test compares a metric, or two numbers of a file: `of` and `over`")
    if ("is" in test) == ("within" in test):
        raise ValueError("a test expects a direction (`is`) or an interval (`within`)")
    return test


class Claim(TypedDict):
    """What a paper says, and the tests of it."""

    says: str
    source: str
    needs: str
    published: str
    dataset: NotRequired[str]
    tests: Annotated[list[Annotated[Test, AfterValidator(_complete)]], MinLen(1)]
    run: str


def read(path: Path) -> list[Claim]:
    """A list of claims. Raises `SpecBenchError`."""
    claims: list[Claim] = read_yaml(path, list[Claim])
    return claims


def evidence(entries: Iterable[Entry], dataset: str) -> dict[str, Evidence]:
    """Greedy cells on a dataset, by the drafter's name; of several with one name the one with most generations.

    A study's cell stands for a drafter only under a name of its own, `<drafter>-<variant>`; any of them can be named
    with its study, as in `data-comparison/text:eagle2`.
    """
    found: dict[str, Evidence] = {}
    for e in entries:
        if e.dataset != dataset or e.temperature != 0 or e.lossy or e.name == BASELINE:
            continue
        plain = "/" not in e.collection or "-" in e.name
        for name in (f"{e.collection}:{e.name}", *([e.name] if plain else [])):
            if e.summary.prompts > (found[name].generations if name in found else 0):
                found[name] = Evidence(e.totals, e.summary.prompts, e.parameters, e.target_parameters, e.passes)
    return found


def compare(
    test: Mapping[str, Any], known: Mapping[str, Evidence], files: Mapping[str, Mapping[str, Any]]
) -> Interval | None:
    """The effect that a test is about, None where its rows are missing. Raises `SpecBenchError` for an unknown metric.

    files: benchmark files by name, those that are there.
    """
    if "file" in test:
        data = files.get(test["file"], {})
        above, below = _lookup(data, test["of"]), _lookup(data, test["over"])
        if above is None or not below:
            return None
        return Interval(above / below, above / below, above / below)
    second = test.get("over_metric", test["metric"])
    for name in (test["metric"], second):
        if name not in METRICS:
            raise SpecBenchError(f"unknown metric {name} in a claim; there are {', '.join(METRICS)}")
    ours, theirs = known.get(test["of"]), known.get(test.get("over", test["of"]))
    if ours is None or theirs is None:
        return None
    rate = ours.rate(test["metric"])
    if "than" in test:
        found = interval(rate, ours.totals)
        return found and _against(found, test["than"], _subtracted(test))
    return contrast(rate, ours.totals, theirs.totals, ratio=not _subtracted(test), other=theirs.rate(second))


def _against(found: Interval, number: float, subtracted: bool) -> Interval:
    values = (v - number if subtracted else v / number for v in (found.value, found.low, found.high))
    return Interval(*values)


def _subtracted(test: Mapping[str, Any]) -> bool:
    """Is the effect a difference? Otherwise it is a ratio."""
    return "file" not in test and (test["metric"] == "tau" or "alpha" in test["metric"])


def _lookup(data: Any, key: str) -> float | None:
    """The number under a dotted key; None where it was not measured."""
    for part in key.split("."):
        if not isinstance(data, Mapping) or part not in data:
            return None
        data = data[part]
    return float(data) if isinstance(data, (int, float)) and np.isfinite(data) else None


def judge(test: Mapping[str, Any], effect: Interval | None) -> str:
    """A verdict from an effect and what the test expects of it."""
    if effect is None:
        return NOT_RUN
    neutral = 0.0 if _subtracted(test) else 1.0
    if "within" in test:
        low, high = neutral - test["within"], neutral + test["within"]
        if low <= effect.low and effect.high <= high:
            return REPRODUCED
        return NOT_REPRODUCED if effect.high < low or effect.low > high else INCONCLUSIVE
    bound = neutral + test.get("by", 0.0)
    above, below = effect.low > bound, effect.high < bound
    if test["is"] == "less":
        above, below = below, above
    return REPRODUCED if above else NOT_REPRODUCED if below else INCONCLUSIVE


@dataclass(frozen=True)
class Verdict:
    """A claim with what was found."""

    claim: Mapping[str, Any]
    effects: tuple[Interval | None, ...]
    verdict: str


def ledger(
    claims: Sequence[Mapping[str, Any]],
    known: Callable[[str], Mapping[str, Evidence]],
    files: Mapping[str, Mapping[str, Any]],
) -> list[Verdict]:
    """Judge every claim on its `dataset` (MT-bench unless it names one).

    It is reproduced if all its tests are, and not if one is not. known: evidence by dataset. files: see `compare`.
    """
    found = []
    for claim in claims:
        rows = known(claim.get("dataset", "mtbench"))
        effects = tuple(compare(test, rows, files) for test in claim["tests"])
        verdicts = {judge(test, effect) for test, effect in zip(claim["tests"], effects, strict=True)}
        whole = next(v for v in (NOT_RUN, NOT_REPRODUCED, INCONCLUSIVE, REPRODUCED) if v in verdicts)
        found.append(Verdict(claim, effects, whole))
    return found


COLUMNS = ("claim", "source", "needs", "published", "measured", "verdict")


def cells(v: Verdict) -> list[str]:
    """One line of the ledger, in the order of `COLUMNS`; the measured effect of each test with its interval."""
    measured = "; ".join(map(_effect, v.claim["tests"], v.effects))
    verdict = f"{v.verdict}: {v.claim['run']}" if v.verdict == NOT_RUN else v.verdict
    return [v.claim["says"], v.claim["source"], v.claim["needs"], v.claim["published"], measured, verdict]


def markdown(verdicts: Sequence[Verdict]) -> str:
    """The ledger as a table."""
    return markdown_table(COLUMNS, map(cells, verdicts)) + "\n"


def _effect(test: Mapping[str, Any], effect: Interval | None) -> str:
    name = f"{test.get('metric', test.get('file'))} of {test['of']}"
    if test.get("over", test["of"]) != test["of"]:
        name += f" against {test['over']}"
    if "than" in test:
        name += f" against {test['than']}"
    if test.get("over_metric"):
        name += f" against {test['over_metric']}"
    if effect is None:
        return f"{name}: -"
    if "file" in test:
        return f"{name}: x{effect.value:.2f}"
    if _subtracted(test):
        return f"{name}: {effect.value:+.2f} [{effect.low:+.2f}, {effect.high:+.2f}]"
    return f"{name}: x{effect.value:.2f} [{effect.low:.2f}, {effect.high:.2f}]"
