"""Effects of a claim's tests in words."""

from collections.abc import Callable, Mapping
from typing import Any

from specbench.records.metrics import BASELINE
from specbench.records.statistics import Interval
from specbench.records.studies import is_difference

Place = Callable[[Mapping[str, Any]], Mapping[str, Any]]
METRIC_WORDS = {
    "tau": "tau", "speed_up": "speed-up", "tokens_per_s": "speed", "token_ms": "latency",
    "draft_ms": "drafting a cycle", "alpha": "acceptance",
    "late_alpha": "acceptance behind the first step", "lossless": "lossless answers", "parameters": "parameters",
    "solved": "share of problems solved", "rouge_l": "ROUGE-L",
    "answer_perplexity": "perplexity of answers", "answer_kl": "KL of answers to the target",
    "draft_cost": "cost of a draft pass", "draft_cost_by_parameters": "its share of the parameters",
    "expected_speed_up": "speed-up by Theorem 3.8", "promised_speed_up": "what its fit promised",
    "busy.ratio": "share of its speed left beside a busy core", "clients.gain_8": "throughput of eight clients over one",
    "drafting.head": "share of the LM head in drafting", "drafting.ms": "time of drafting a cycle",
    "generate.identical": "share of answers as by the other program,",
    "generate.ratio": "speed here over that of the other program,",
    "memory.peak": "peak memory", "overhead.share": "share of a cycle outside both models",
    "target_pass.ms_8/ms_1": "time of a pass over eight tokens relative to one token",
    "training.peak": "peak memory of training", "training.seconds": "time of training",
}  # fmt: skip


def words(metric: str) -> str:
    """A metric's name for readers."""
    if metric[:5] == "alpha" and metric[5:]:
        return f"acceptance of step {int(metric[5:]) + 1}"
    return METRIC_WORDS.get(metric, metric.replace(".", ": ").replace("_", " "))


def describe(test: Mapping[str, Any], effect: Interval | None, reason: str, place: Place) -> str:
    """An effect and its claim, as `speed-up of hass over eagle2: 1.03 [0.99, 1.07] times, claimed more`.

    reason: why there is no effect. place: completes `at` and `over_at` by the study's defaults.
    """
    name = f"{words(test.get('metric') or test['measured'])} of {_arm(test['of'])}{_where(test.get('at'))}"
    named = f" {_arm(test['over'])}" if test.get("over", test["of"]) != test["of"] else ""
    apart = ""
    if "over_at" in test:
        apart = _where(test["over_at"]) or f" at{_other(test.get('at', {}), place(test['over_at']))}"
    if named or apart:
        name += f" over{named}{apart if named else apart.removeprefix(' at')}"
    if test.get("over_metric"):
        name += f" over {words(test['over_metric'])}"
    if effect is None:
        return f"{name}: {reason}"
    return f"{name}: {_measured(test, effect)}, claimed {_claimed(test)}"


def _arm(name: str) -> str:
    return "plain decoding" if name == BASELINE else name


def _measured(test: Mapping[str, Any], effect: Interval) -> str:
    """The effect; the value itself if the claim is about a number."""
    sign, unit = ("+", "") if is_difference(test) else ("", " times")
    if "than" in test:
        sign, unit, effect = "", "", _absolute(effect, test)
    if effect.low == effect.high:
        return f"{effect.value:{sign}.2f}{unit}"
    return f"{effect.value:{sign}.2f} [{effect.low:{sign}.2f}, {effect.high:{sign}.2f}]{unit}"


def _claimed(test: Mapping[str, Any]) -> str:
    """What a test expects, in the units of `_measured`."""
    difference, than = is_difference(test), test.get("than")
    neutral = 0.0 if difference else 1.0
    unit = "" if difference or than else " times"

    def limit(shift: float) -> str:
        value = neutral + shift if than is None else than + shift if difference else than * (1 + shift)
        return f"{value:g}"

    if "within" in test:
        return f"{limit(-test['within'])} to {limit(test['within'])}{unit}"
    if than is None and not test.get("by"):
        return str(test["is"])
    return f"at {'least' if test['is'] == 'more' else 'most'} {limit(test.get('by', 0.0))}{unit}"


def _where(at: Mapping[str, Any] | None) -> str:
    at = at or {}
    datasets = at.get("dataset", "")
    parts = [
        f"T={at['temperature']:g}" if "temperature" in at else "",
        f"the mean of {', '.join(datasets)}" if isinstance(datasets, list) else datasets,
        at.get("category", ""),
        f"a batch of {at['batch']}" if "batch" in at else "",
        at.get("quantised", ""),
        f"the target adapted by {at['adapted']}" if "adapted" in at else "",
        f"a break after {at['cut_after']} tokens" if "cut_after" in at else "",
    ]
    return "".join(f" at {part}" for part in parts if part)


def _other(at: Mapping[str, Any], over: Mapping[str, Any]) -> str:
    """Of the default cell with which another one is compared, what sets it apart."""
    if "category" in at:
        return " all others"
    apart = [over["dataset"]] if "dataset" in at else []
    if "temperature" in at:
        apart.append("greedy" if over["temperature"] == 0 else f"T={over['temperature']:g}")
    if "batch" in at:
        apart.append("one sequence" if over["batch"] == 1 else f"a batch of {over['batch']}")
    if "quantised" in at:
        apart.append(over["quantised"] or "the original")
    if "adapted" in at:
        apart.append(over["adapted"] or "the original")
    if "cut_after" in at:
        apart.append(f"a break after {over['cut_after']} tokens" if over["cut_after"] else "an unbroken link")
    return f" {' '.join(apart)}"


def _absolute(effect: Interval, test: Mapping[str, Any]) -> Interval:
    """The value itself of an effect relative to a number."""
    number, difference = test["than"], is_difference(test)
    return Interval(*(v + number if difference else v * number for v in (effect.value, effect.low, effect.high)))
