"""Which sublayers a target had best leave out when it drafts for itself: a search by predicted speed.

A set's acceptance is replayed: the target drafts with it for held-out greedy answers, as decoding would, and nothing but
drafts is run. Its time is reckoned: so many drafts through so many attention and MLP sublayers, so many whole passes over
so many nodes, each at the price that was measured once on this machine: a thousand sets need not be timed one by one.
Sets are proposed by Optuna's tree-structured Parzen estimator (the authors' search is Bayesian, over timed generations).
The first and the last layer are always kept, as SWIFT keeps them (arXiv:2410.06916).
"""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from specbench.common.errors import SpecBenchError
from specbench.common.progress import progress
from specbench.common.storage import atomic_path
from specbench.common.timing import Clock
from specbench.engine.decode import Limits, decode
from specbench.engine.interface import Step, Sublayers, Taps
from specbench.engine.replay import ReplayTarget
from specbench.engine.sampling import Sampler
from specbench.engine.target import Target
from specbench.engine.verify import Lossless
from specbench.records.schema import SKIP
from specbench.training.features import Answer
from specbench.tuning import target_cost
from specbench.tuning.cost_aware import between

PARTS = ("attention", "mlp")
TRIALS = 200  # sets that are looked at
ANSWERS, MOST = 8, 32  # held-out answers, and tokens of each
CONTEXT, PASSES = 192, 15  # tokens behind which passes are timed, and how many, of which the median counts


@dataclass(frozen=True)
class Prices:
    """Seconds. attention, mlp: of one sublayer in a draft pass. rest: of what else a draft takes, the LM head included.

    whole: of the target's pass, by nodes.
    """

    attention: float
    mlp: float
    rest: float
    whole: Mapping[int, float]

    def draft(self, kept: Sublayers) -> float:
        """One token through these sublayers."""
        return self.rest + len(kept.attention) * self.attention + len(kept.mlp) * self.mlp

    def verify(self, nodes: int) -> float:
        """A whole pass; between the sizes that were timed, in proportion."""
        return between(self.whole, nodes)


@dataclass(frozen=True)
class Prediction:
    """Of plain decoding's speed, tokens a cycle, drafts a cycle."""

    speedup: float
    tau: float
    drafts: float


@torch.inference_mode()
def search(target: Target, drafter: Any, answers: Sequence[Answer], journal: Path, trials: int = TRIALS) -> dict[str, Any]:
    """The best set that was found, and what was expected of it.

    Args:
        drafter: bound; the search begins with what it leaves out. `keep` tells it what to draft with.
        journal: see `best`.
    """
    if not answers:
        raise SpecBenchError("there are no held-out answers to search skipped sublayers on")
    taps = Taps(kv=tuple(range(target.layers)))
    known = [_known(target, answer, taps) for answer in answers]
    prices = priced(target)
    predictions: dict[Sublayers, Prediction] = {}

    def speed(skipped: Sublayers) -> float:
        drafter.keep(skipped.others(target.layers))
        predictions[skipped] = predicted(drafter, known, prices)
        return predictions[skipped].speedup

    start = drafter.kept.others(target.layers)
    found = best(target.layers, speed, start, trials, journal)
    for skipped in (start, found):
        if skipped not in predictions:  # looked at before an interruption
            speed(skipped)
    return {
        "attention": sorted(found.attention),
        "mlp": sorted(found.mlp),
        "predicted": asdict(predictions[found]),
        "predicted_at_start": asdict(predictions[start]),
        "prices": asdict(prices),
        "trials": trials,
        "answers": len(known),
    }


def best(
    layers: int, speed: Callable[[Sublayers], float], start: Sublayers, trials: int, journal: Path, seed: int = 0
) -> Sublayers:
    """The skipped sublayers of highest speed that were found. A set that comes again is not tried again.

    journal: a file to which every try goes, so that a search that was interrupted goes on there. What was tried before
    keeps the prices of its time.
    """
    import optuna  # takes a while, and only a search needs it
    from optuna.storages.journal import JournalFileBackend

    tried: dict[Sublayers, float] = {}
    inner = range(1, layers - 1)
    names = [f"{part}{i}" for part in PARTS for i in inner]

    def chosen(params: Mapping[str, bool]) -> Sublayers:
        return Sublayers(*(frozenset(i for i in inner if params[f"{part}{i}"]) for part in PARTS))

    def objective(trial: optuna.Trial) -> float:
        skipped = chosen({name: trial.suggest_categorical(name, [False, True]) for name in names})
        if skipped not in tried:
            tried[skipped] = speed(skipped)
        reached(trial.number + 1)
        return tried[skipped]

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    journal.parent.mkdir(parents=True, exist_ok=True)
    study = optuna.create_study(
        storage=optuna.storages.JournalStorage(JournalFileBackend(str(journal))),
        sampler=optuna.samplers.TPESampler(seed=seed),
        study_name="skip",
        direction="maximize",
        load_if_exists=True,
    )
    done = [t for t in study.trials if t.value is not None]
    tried |= {chosen(t.params): t.value for t in done if t.value is not None}
    if not done:
        study.enqueue_trial({f"{part}{i}": i in getattr(start, part) for part in PARTS for i in inner})
    with progress("search", trials, "sets") as reached:
        study.optimize(objective, n_trials=max(0, trials - len(done)))
    return max(tried, key=lambda skipped: tried[skipped])


def _known(target: Target, answer: Answer, taps: Taps) -> ReplayTarget:
    prompt, said = answer.ids[: answer.begin], answer.ids[answer.begin : answer.begin + MOST]
    return ReplayTarget(target, prompt, said, taps).detach()


def predicted(drafter: Any, known: Sequence[ReplayTarget], prices: Prices) -> Prediction:
    """Replay the answers; reckon their time."""
    emitted = cycles = drafts = 0
    seconds = 0.0
    for one in known:
        target: Any = one
        prompt, said = one.text[: one.begin], one.text[one.begin :]
        for step in decode(target, drafter, prompt, Limits(len(said)), Lossless(), Sampler()):
            if isinstance(step, Step):
                emitted, cycles, drafts = emitted + len(step.tokens), cycles + 1, drafts + step.nodes
                seconds += prices.verify(step.nodes + 1) + step.nodes * prices.draft(drafter.kept)
    return Prediction(emitted * prices.verify(1) / seconds, emitted / cycles, drafts / cycles)


@torch.inference_mode()
def priced(target: Target) -> Prices:
    """Draft passes through everything, through the MLPs alone and through nothing, in turn; whole passes by size."""
    layers, prompt = target.layers, target_cost.text(target, min(CONTEXT, target.max_context // 2))
    everything, nothing = frozenset(range(layers)), frozenset[int]()
    kinds = [Sublayers(everything, everything), Sublayers(nothing, everything), Sublayers(nothing, nothing)]
    target.reset(len(prompt) + 1)
    target.prefill(torch.tensor(prompt, device=target.device))
    token = torch.zeros(1, 1, dtype=torch.long, device=target.device)
    clock, found = Clock(target.device), [list[float]() for _ in kinds]
    for turn in range(PASSES + 1):
        for seconds, kept in zip(found, kinds, strict=True):
            begin = clock()
            states = target.subset(token, token + len(prompt), None, target.cache, kept)
            target.logits(states[0, -1]).float().softmax(-1).argmax()
            if turn:  # the first one warms up
                seconds.append(clock() - begin)
            target.cache.truncate(len(prompt))
    whole, mlps, rest = (statistics.median(seconds) for seconds in found)
    passes = {
        nodes: ms / 1000
        for nodes, ms in zip(target_cost.NODES, target_cost.target_pass(target, prompt).values(), strict=True)
    }
    return Prices(max(0.0, whole - mlps) / layers, max(0.0, mlps - rest) / layers, rest, passes)


def write(folder: Path, said: Mapping[str, Any]) -> None:
    """Where the drafter looks for it."""
    with atomic_path(folder / SKIP) as temporary:
        temporary.write_text(json.dumps(said, indent=1) + "\n")
