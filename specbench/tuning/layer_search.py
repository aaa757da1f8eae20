"""A search for the sublayers that a target should skip when it drafts for itself, by predicted speed.

Acceptance is replayed: the target drafts without the skipped sublayers for held-out greedy answers. Time is predicted from
the cost of one attention and one MLP sublayer and of whole passes, timed once on this machine, so that a thousand sets need
not be timed one by one. Sets are proposed by Optuna's tree-structured Parzen estimator (the authors' search is Bayesian,
over timed generations). The first and the last layer are never skipped, as in SWIFT (arXiv:2410.06916).
"""

import json
import os
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from specbench.common.errors import SpecBenchError
from specbench.common.io import parse_lines, read_bytes
from specbench.common.progress import progress
from specbench.common.storage import atomic_path
from specbench.engine.interface import Sublayers, Taps
from specbench.engine.replay import ReplayTarget
from specbench.engine.target import Target
from specbench.records.blocks import locked
from specbench.records.schema import SKIP, Measure, Natural
from specbench.training.corpus_reader import HeldOutAnswer
from specbench.training.replay import cycles, replay_target
from specbench.tuning import target_cost
from specbench.tuning.cost_aware import between

PARTS = ("attention", "mlp")
TRIALS = 200  # sets that are tried
ANSWERS, ANSWER_TOKENS = 8, 32  # held-out answers, and tokens of each at most
CONTEXT, PASSES = 192, 15  # tokens before the timed passes, and their number, of which the median counts


@dataclass(frozen=True)
class Prices:
    """Seconds. attention, mlp: of one sublayer in a draft pass. rest: of the rest of a draft pass, LM head included.

    whole: of the target's pass, by nodes.
    """

    attention: float
    mlp: float
    rest: float
    whole: Mapping[int, float]

    def draft(self, kept: Sublayers) -> float:
        """One token through these sublayers."""
        return self.rest + len(kept.attention) * self.attention + len(kept.mlp) * self.mlp


@dataclass(frozen=True)
class Prediction:
    """speedup: over plain decoding. tau: tokens a cycle. drafts: draft passes a cycle."""

    speedup: float
    tau: float
    drafts: float


@torch.inference_mode()
def search(
    target: Target, drafter: Any, answers: Sequence[HeldOutAnswer], journal: Path, trials: int = TRIALS
) -> dict[str, Any]:
    """The fastest set that was found, and its prediction.

    Args:
        drafter: bound; the search begins with the sublayers that it skips, and calls its `keep`.
        journal: see `best`.

    Raises:
        SpecBenchError: no answers.
    """
    if not answers:
        raise SpecBenchError("there are no held-out answers to search skipped sublayers on")
    taps = Taps(kv=tuple(range(target.layers)))
    replayed = [replay_target(target, answer, taps, ANSWER_TOKENS).detach() for answer in answers]
    prices = priced(target)
    predictions: dict[Sublayers, Prediction] = {}

    def speed(skipped: Sublayers) -> float:
        drafter.keep(skipped.others(target.layers))
        predictions[skipped] = predicted(drafter, replayed, prices)
        return predictions[skipped].speedup

    start = drafter.kept.others(target.layers)
    fastest = best(target.layers, speed, start, trials, journal)
    for skipped in (start, fastest):
        if skipped not in predictions:  # tried before an interruption
            speed(skipped)
    return {
        "attention": sorted(fastest.attention),
        "mlp": sorted(fastest.mlp),
        "predicted": asdict(predictions[fastest]),
        "predicted_at_start": asdict(predictions[start]),
        "prices": asdict(prices),
        "trials": trials,
        "answers": len(replayed),
    }


def best(
    layers: int, speed: Callable[[Sublayers], float], start: Sublayers, trials: int, journal: Path, seed: int = 0
) -> Sublayers:
    """The skipped sublayers of the highest speed found. No set is tried twice.

    journal: a file that records every trial, so that an interrupted search continues; earlier trials keep their speeds.
    Of several processes with one journal, one searches at a time.

    Raises `SpecBenchError` for a damaged journal.
    """
    with locked(journal.parent, journal.name, wait=True):
        return _best(layers, speed, start, trials, journal, seed)


def _best(
    layers: int, speed: Callable[[Sublayers], float], start: Sublayers, trials: int, journal: Path, seed: int
) -> Sublayers:
    """`best`, with the journal locked."""
    import optuna  # slow to import, and only a search needs it

    inner = range(1, layers - 1)
    sublayers = {f"{part}{i}": (part, i) for part in PARTS for i in inner}
    either: optuna.distributions.BaseDistribution = optuna.distributions.CategoricalDistribution([False, True])

    def params(skipped: Sublayers) -> dict[str, bool]:
        return {name: i in getattr(skipped, part) for name, (part, i) in sublayers.items()}

    done = earlier(journal, inner)
    speeds = dict(done)

    def objective(trial: optuna.Trial) -> float:
        chosen = [sublayers[name] for name in sublayers if trial.suggest_categorical(name, [False, True])]
        skipped = Sublayers(*(frozenset(i for part, i in chosen if part == kind) for kind in PARTS))
        if skipped not in speeds:
            speeds[skipped] = speed(skipped)
        _append(journal, Trial(sorted(skipped.attention), sorted(skipped.mlp), speeds[skipped]))
        show(trial.number + 1)
        return speeds[skipped]

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed), direction="maximize")
    distributions = dict.fromkeys(sublayers, either)
    for skipped, value in done:
        study.add_trial(optuna.create_trial(params=params(skipped), distributions=distributions, value=value))
    if not done:
        study.enqueue_trial(params(start))
    with progress("search", trials, "sets") as show:
        study.optimize(objective, n_trials=max(0, trials - len(done)))
    return max(speeds, key=lambda skipped: speeds[skipped])


@dataclass(frozen=True)
class Trial:
    """A line of the journal: the sublayers that were skipped, and the predicted speed-up."""

    attention: list[Natural]
    mlp: list[Natural]
    speed: Measure


def earlier(journal: Path, layers: Container[int]) -> list[tuple[Sublayers, float]]:
    """The trials of a journal in order; a last line that a kill cut off is removed.

    layers: those that may be skipped. Raises `SpecBenchError` for a damaged journal.
    """
    if not journal.exists():
        return []
    data, found = read_bytes(journal), []
    for number, trial in parse_lines(data, Trial, journal, cut=True):
        if odd := [i for i in (*trial.attention, *trial.mlp) if i not in layers]:
            raise SpecBenchError(f"{journal} line {number}: layer {odd[0]} may not be skipped; remove the file")
        found.append((Sublayers(frozenset(trial.attention), frozenset(trial.mlp)), trial.speed))
    os.truncate(journal, data.rfind(b"\n") + 1)
    return found


def _append(journal: Path, trial: Trial) -> None:
    with journal.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(trial)) + "\n")


def predicted(drafter: Any, answers: Sequence[ReplayTarget], prices: Prices) -> Prediction:
    """Replay the answers with a drafter, and add up what their passes cost."""
    emitted = count = drafts = 0
    seconds = 0.0
    for answer in answers:
        for step in cycles(answer, drafter):
            emitted, count, drafts = emitted + len(step.tokens), count + 1, drafts + step.nodes
            seconds += between(prices.whole, step.nodes + 1) + step.nodes * prices.draft(drafter.kept)
    return Prediction(emitted * between(prices.whole, 1) / seconds, emitted / count, drafts / count)


@torch.inference_mode()
def priced(target: Target) -> Prices:
    """Time draft passes through all sublayers, through the MLPs alone and through none, in turn; whole passes by size."""
    layers, prompt = target.layers, target_cost.text(target, min(CONTEXT, target.max_context // 2))
    every, no = frozenset(range(layers)), frozenset[int]()
    kinds = {"all": Sublayers(every, every), "mlps": Sublayers(no, every), "none": Sublayers(no, no)}
    target.reset(len(prompt) + 1)
    target.prefill(torch.tensor(prompt, device=target.device))
    token = torch.zeros(1, 1, dtype=torch.long, device=target.device)

    def draft(kept: Sublayers) -> None:
        states = target.subset(token, token + len(prompt), None, target.cache, kept)
        target.logits(states[0, -1]).float().softmax(-1).argmax()

    draft_passes = {name: partial(draft, kept) for name, kept in kinds.items()}
    seconds = target_cost.median_seconds(target, draft_passes, PASSES)
    attention, mlps = seconds["all"] - seconds["mlps"], seconds["mlps"] - seconds["none"]
    milliseconds = target_cost.target_pass(target, prompt).values()
    whole = {nodes: ms / 1000 for nodes, ms in zip(target_cost.NODES, milliseconds, strict=True)}
    return Prices(max(0.0, attention) / layers, max(0.0, mlps) / layers, seconds["none"], whole)


def write(folder: Path, result: Mapping[str, Any]) -> None:
    """Where the drafter looks for it."""
    with atomic_path(folder / SKIP) as temporary:
        temporary.write_text(json.dumps(result, indent=1) + "\n")
