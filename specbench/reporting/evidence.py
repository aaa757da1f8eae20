"""The entries of one study, and what may be compared of them: by claims, and with published numbers."""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from specbench.records import identity
from specbench.records.cell_options import CellOptions
from specbench.records.metrics import BASELINE, RATES, sum_rows
from specbench.records.studies import PLACE, Study, cell_needs, cell_options, unmet
from specbench.records.totals import Rate, Sums, Totals
from specbench.records.trainings import current_trainings, is_of
from specbench.reporting.cells import Entry, pooled
from specbench.reporting.fastest import QUESTIONS

SPEEDS = ("tokens_per_s", "token_ms", "speed_up", "draft_ms", "draft_cost", "pass_ms", "expected_speed_up")
TIMED = (*SPEEDS, "lossless", "solved", "rouge_l")  # what decoded answers alone have
# Measurements that `TIMING` is about.
OF_ENGINE = ("drafting", "overhead", "target_pass", "clients", "generate", "busy", "bandwidth")
Side = tuple[str, Mapping[str, Any] | None]  # of a comparison: an arm, and its place as `At` has it
EXACT = ("parameters", "draft_cost_by_parameters")  # independent of the questions


def config_differences(a: Entry, b: Entry, varies: Iterable[str] = ()) -> list[str]:
    """Aspects in which two entries differ, so that they are not compared. varies: aspects that may differ."""
    free = {*varies, *(["prompts"] if "dataset" in varies else [])}
    differences = []
    for aspect, first in a.conditions.items():
        second = b.conditions[aspect]
        if aspect == "prompts":  # only of shared questions
            equal = all(second.get(question, text) == text for question, text in first.items())
        else:  # a drafter without a tree policy is compared with any
            equal = first == second or (aspect == "tree" and None in (first, second))
        if not equal and aspect not in free:
            differences.append(aspect)
    return differences


def target_pass_ms(s: Sums) -> np.ndarray:
    """Milliseconds of a target pass for one token, from the baseline's rows of the same prompts."""
    return 1000 * s["base_target"] / s["base_cycles"]


def _draft_pass_ms(s: Sums) -> np.ndarray:
    return 1000 * s["counted_draft"] / s["passes"]


def rate(e: Entry, metric: str) -> Rate:
    """A metric of an entry, as a function of its sums; of the baseline, a pass is the target's."""
    target = e.header["target"]["parameters"]
    if metric == "parameters":
        return lambda s: np.full_like(s["cycles"], target if e.name == BASELINE else e.parameters)
    if metric == "pass_ms":
        return target_pass_ms if e.name == BASELINE else _draft_pass_ms
    if metric == "draft_cost_by_parameters":
        return lambda s: np.full_like(s["cycles"], e.parameters / target)
    if metric == "draft_cost":  # seconds of a draft pass over seconds of a target pass for one token
        return lambda s: _draft_pass_ms(s) / target_pass_ms(s)
    if metric == "expected_speed_up":  # of a chain, whose length is the maximum of passes a cycle
        return lambda s: _expected(RATES["alpha"](s), rate(e, "draft_cost")(s), e.arm["passes"])
    if metric == "promised_speed_up":  # of fitted trees only
        promised = e.arm.get("fitted", {}).get("choice", {}).get("speedup", math.nan)
        return lambda s: np.full_like(s["cycles"], promised)
    return RATES[metric]


def _expected(alpha: np.ndarray, cost: np.ndarray, gamma: int) -> np.ndarray:
    """Theorem 3.8 of Leviathan et al.: speed-up of a chain of gamma tokens if a wide pass costs as much as a narrow one."""
    return (1 - alpha ** (gamma + 1)) / ((1 - alpha) * (gamma * cost + 1))


class Evidence:
    """The entries of one study on one target, by which its claims are judged.

    If a cell was measured on several kinds of machine, seconds are those of one that suffices for a verdict, then of the
    one with most generations.
    """

    def __init__(self, study: Study, entries: Iterable[Entry]):
        self.study = study
        self.entries = [e for e in entries if e.name == BASELINE or e.name in study["arms"]]
        trained = {(e.name, e.header["config"]["model"]["name"]) for e in self.entries if "of" in e.arm}
        self._trainings = {arm: current_trainings(arm, study, model) for arm, model in trained}

    def place(self, at: Mapping[str, Any] | None) -> dict[str, Any]:
        """What names one of the study's cells, see `At`."""
        first = cell_options(self.study)[0]
        usual = {"temperature": 0, "batch": 1, "quantised": None, "adapted": None}
        return {"dataset": first.dataset, "cut_after": first.cut_after} | usual | dict(at or {})

    def find(self, arm: str, at: Mapping[str, Any] | None, timed: bool) -> Entry | None:
        """An arm's entry in one of the study's cells; without seconds the replayed one, which has more questions."""
        fit = self._of_cell(arm, at, timed)
        if not fit:
            return None
        best = max(fit, key=lambda e: (e.replayed, *self._weight(e, timed)))
        if timed or best.replayed:
            return best
        # counts, unlike seconds, are pooled over kinds of machine, but not those of earlier weights with the newest
        cell = identity.cell_key(best.header)
        return pooled([e for e in fit if identity.cell_key(e.header) == cell and e.superseded == best.superseded])

    def find_pair(self, one: Side, other: Side, timed: bool) -> tuple[Entry | None, Entry | None]:
        """As `find`, of two arms or cells; their seconds from one kind of machine, if any measured both."""
        ours, theirs = self.find(*one, timed), self.find(*other, timed)
        if not timed or ours is None or theirs is None or not self.incomparable(ours, theirs, timed):
            return ours, theirs
        pairs = itertools.product(self._of_cell(*one, timed), self._of_cell(*other, timed))
        comparable = [(a, b) for a, b in pairs if not self.incomparable(a, b, timed)]
        return max(comparable, key=lambda pair: min(self._weight(e, timed) for e in pair), default=(ours, theirs))

    def _weight(self, e: Entry, timed: bool) -> tuple[bool, bool, int, bool, str]:
        """Of entries alike the first by: can it decide, are its weights the newest, most questions, no doubt, its age."""
        (done, planned), doubt = self.size(e), self.doubt(e, timed)
        return done >= planned and not doubt, not e.superseded, e.summary.prompts, not doubt, e.header["started"]

    def _of_cell(self, arm: str, at: Mapping[str, Any] | None, timed: bool) -> list[Entry]:
        """An arm's entries in one cell, of all kinds of machine."""
        place = self.place_of(arm, at)
        return [
            e
            for e in self.entries
            if e.name == arm and e.place == place and (not e.lossy or self._means_lossy(arm)) and not (timed and e.replayed)
        ]  # fmt: skip

    def place_of(self, arm: str, at: Mapping[str, Any] | None) -> dict[str, Any]:
        """What names the cell in which a comparison reads an arm."""
        found = self.place({"adapted": self._adapter(arm)} | dict(at or {}))
        return {name: found[name] for name in PLACE}

    def _adapter(self, arm: str) -> str | None:
        """Of the target that an arm drafts for unless a place says otherwise."""
        if not self.study["arms"].get(arm, {"run": []}).get("adapted"):
            return None
        return next((one.adapted for one in cell_options(self.study) if one.adapted), None)

    def _means_lossy(self, arm: str) -> bool:
        """Does the study itself, not the command line, give the arm another rule of acceptance?"""
        return any(o.lstrip("+").startswith("verify") for o in self.study["arms"].get(arm, {"run": []})["run"])

    def measured(self, arm: str, quantity: str) -> Entry | None:
        """The entry with an arm's measurements: those of the newest engine, on the machine that made most of any arm's.

        Of several data sets, as peak memory has them, that of the study's first.
        """
        repetitions: Counter[tuple[int, str]] = Counter()
        for e in self.entries:
            repetitions[_engine_of(e)] += len(e.measured.get(quantity, ()))
        best = max((k for k in repetitions if repetitions[k]), key=lambda k: (k[0], repetitions[k]), default=None)
        fit = (e for e in self.entries if e.name == arm and e.measured.get(quantity) and _engine_of(e) == best)
        return min(fit, key=lambda e: e.dataset != self.place(None)["dataset"], default=None)

    def with_memory(self, arm: str, at: Mapping[str, Any] | None) -> Entry | None:
        """An arm's timed entry in one of the study's data sets of which peak memory was measured."""
        return next((e for e in self._of_cell(arm, at, timed=True) if e.summary.peak_bytes), None)

    def size(self, e: Entry) -> tuple[int, int]:
        """Questions of an entry, and those that the study plans for it on such a machine, 20 at least."""
        return len(e.totals.questions), max([QUESTIONS, *(one.questions for one in self._planned_cells(e))])

    def doubt(self, e: Entry, speeds: bool) -> str:
        """Why an entry decides nothing, whatever its number of questions; empty: nothing. speeds: is a claim about them?"""
        seeds = len(self.study["arms"].get(e.name, {"run": []}).get("seeds", [0]))
        if "of" in e.arm and e.seeds < seeds:
            return f"{e.seeds} of {seeds} seeds"
        trainings = self._trainings.get(e.name)
        if trainings and not any(is_of(e.arm, training) for training in trainings):
            return "of another training than today's"
        if e.superseded:
            return "of earlier weights"
        length = (e.header["config"].get("decode") or {}).get("max_new_tokens")
        cells = self._planned_cells(e)
        if cells and length is not None and length not in {one.tokens for one in cells}:
            return "answers of another length"
        return "on a busy machine" if speeds and e.busy else self.engine_doubt(e, speeds)

    def engine_doubt(self, e: Entry, speeds: bool) -> str:
        """Are these the speeds of an engine that has become faster or slower since?"""
        return "with an earlier engine" if speeds and not identity.speeds_count(e.header) else ""

    def _planned_cells(self, e: Entry) -> list[CellOptions]:
        """The cells of the study that an entry may be of, on a machine such as its own."""
        return [
            one
            for number, one in enumerate(cell_options(self.study))
            if not unmet(cell_needs(self.study, number), e.header, cuda=False)
            and all(getattr(one, name) == getattr(e, name) for name in ("replayed", *PLACE))
        ]

    def incomparable(self, a: Entry, b: Entry, timed: bool) -> str:
        """Why two entries are not compared; empty if they can be.

        timed: are their seconds? Counts are the same on every machine, decoded or replayed.
        """
        aspects = config_differences(a, b, [*self.study.get("varies", []), *([] if timed else ["machine", "replay"])])
        return f"rows that differ in {', '.join(aspects)} are not compared" if aspects else ""


def _engine_of(e: Entry) -> tuple[int, str]:
    """Version of the engine's speed, and kind of machine."""
    return e.header.get("timing", 0), identity.machine_key(e.header)


def seeds_of(e: Entry) -> list[Totals]:
    """Sums of each seed of a trained arm."""
    labels = dict.fromkeys(row.drafter for row in e.rows) if e.seeds > 1 else ()
    return [sum_rows([row for row in e.rows if row.drafter == label], e.baseline) for label in labels]
