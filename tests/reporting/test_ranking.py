"""Rankings name no winner among equals, and tell apart what differs."""

import numpy as np
import pytest
from test_overview import bench

from specbench.records.metrics import RATES
from specbench.records.rows import Measurement
from specbench.records.statistics import interval
from specbench.records.totals import Totals
from specbench.reporting import cells, ranking, tables
from specbench.reporting.evidence import Evidence


class Arm:
    """As much of an entry as a ranking reads."""

    def __init__(self, totals, seeds=()):
        self.totals, self.seeds, self.parts = totals, max(1, len(seeds)), list(seeds)


def answers(rng, taus, tau, questions=20):
    """Tokens and cycles by question: taus: what all arms have in common; tau: this arm's own factor."""
    tokens = rng.integers(20, 65, questions).astype(float)
    cycles = tokens / (1 + taus * tau * rng.lognormal(0, 0.2, questions))
    return Totals(tuple(f"{i:02}" for i in range(questions)), {"tokens": tokens, "cycles": cycles})


def test_of_equal_arms_none_is_surely_first_nor_last_more_often_than_one_time_in_twenty():
    rng, runs, told_apart = np.random.default_rng(4), 120, 0
    for _ in range(runs):
        taus = rng.gamma(3, 0.4, 20)
        found = ranking.places([Arm(answers(rng, taus, 1.0)) for _ in range(6)], RATES["tau"])
        told_apart += any(place != (1, 6) for place in found)
    assert told_apart / runs <= 0.09, told_apart / runs


def test_seeds_that_differ_leave_places_open(monkeypatch):
    monkeypatch.setattr(ranking, "seeds_of", lambda arm: arm.parts)
    rng = np.random.default_rng(5)
    taus = rng.gamma(3, 0.4, 20)

    def arm(factors):
        seeds = [answers(rng, taus, factor) for factor in factors]
        return Arm(Totals(seeds[0].questions, {n: sum(s.sums[n] for s in seeds) for n in seeds[0].sums}), seeds)

    steady = [arm([1.6, 1.6, 1.6]), arm([1.0, 1.0, 1.0])]
    assert ranking.places(steady, RATES["tau"]) == [(1, 1), (2, 2)]
    assert ranking.places([arm([1.0, 1.6, 2.2]), steady[1]], RATES["tau"]) == [(1, 2), (1, 2)]


@pytest.mark.parametrize(("questions", "places"), [(24, ["1", "2"]), (12, ["-", "-"])])
def test_a_study_that_ranks_shows_places_only_of_enough_questions(tmp_path, questions, places):
    made = bench(tmp_path / "s", {"a": 2.0, "b": 1.0}, study="s", questions=questions, noise=0.01)
    made.write(Measurement("a", "training", 0, {"seconds": 1.5, "peak": 2**30}))
    made.write(Measurement("a", "training", 1, {"seconds": 2.5, "peak": 2**30}))
    study = {"title": "x", "source": ["x"], "cells": [["dataset=mtbench"]], "ranks": "speed_up", "claims": []}
    study["arms"] = {name: {"run": ["drafter=eagle2"]} for name in "ab"}
    entries = cells.find(tmp_path).entries
    table, note = ranking.blocks(Evidence(study, entries))
    column = {name: [line[i] for line in table.lines] for i, name in enumerate(table.columns)}
    assert column["drafter"] == ["a", "b"] and column["place"] == places
    assert column["a training step, s"] == ["2", "-"] and "peak memory of decoding, MiB" not in column
    assert note.text == ranking.RULE or "too few" in note.text
    assert ranking.blocks(Evidence({**study, "ranks": "tau", "arms": {}}, entries)) == []


def test_a_ranking_says_what_each_drafter_brings_as_it_is_shipped(tmp_path):
    """tau at T=1 from the study's own rows, the fastest tree's speed and tau from the bench's, the hours of the weights."""
    trained = {"history": [{"step": 1}], "tokens_seen": 10**6, "hours": 2.5}
    shown = {name: {"name": name} for name in ("x", "y")}
    bench(tmp_path / "s", {"x": 2.0, "y": 1.0}, study="s", questions=24, replay=True, cell="replay-1", options=shown)
    bench(tmp_path / "s", {"x": 1.5}, study="s", questions=24, temperature=1.0, cell="decode-2", seed=1)
    trees = {"x": {"name": "x"}, "x_fitted": {"name": "x"}, "other": {"name": "z"}}
    bench(tmp_path / "b", {"x": 0.5, "x_fitted": 1.7, "other": 3.0}, study="bench", questions=24, options=trees, seed=2)
    found = cells.find(tmp_path).entries
    for e in found:
        if e.study == "s" and e.name == "y":
            e.arm["weights"] = trained

    def evidence(name, arms, **more):
        study = {"title": name, "source": ["x"], "cells": [["dataset=mtbench"]], "claims": [], **more}
        study["arms"] = {arm: {"run": ["drafter=eagle2"]} for arm in arms}
        return Evidence(study, [e for e in found if e.study == name])

    known, shipped = evidence("s", "xy", ranks="tau"), evidence("bench", trees)
    table, note = ranking.blocks(known, shipped)
    line = {row[1]: dict(zip(table.columns, row, strict=True)) for row in table.lines}
    own, fast = known.find("x", {"temperature": 1}, False), shipped.find("x_fitted", None, True)
    brings = {
        "tau at T=1 [95%]": tables.shown(interval(RATES["tau"], own.totals)),
        "speed-up as shipped [95%]": tables.shown(interval(RATES["speed_up"], fast.totals)),
        "its tau [95%]": tables.shown(interval(RATES["tau"], fast.totals)),
    }
    assert {head: line["x"][head] for head in brings} == brings
    assert {line["y"][head] for head in brings} == {"-"}
    assert [line[name]["hours of training"] for name in "xy"] == ["-", "2.5"]
    assert ranking.SHIPPED in note.text
    known.study["arms"]["x"]["train"] = ["train.settings.steps=8"]
    beside_shipped, note = ranking.blocks(known, shipped)
    assert "speed-up as shipped [95%]" not in beside_shipped.columns, "weights of the study's own are not the shipped ones"
    known.study["arms"]["y"]["weights"] = "x"
    every_arm, note = ranking.blocks(known, shipped)
    assert "speed-up as shipped [95%]" in every_arm.columns, "a study that trains all arms: what is shipped"
    plain, note = ranking.blocks(known)
    assert "speed-up as shipped [95%]" not in plain.columns and ranking.SHIPPED not in note.text
