"""Which cells the plan measures first: those that claims wait for."""

from dataclasses import replace

import pytest
from fixtures import arm, block, settings

from specbench.evaluation.plan import Scope, Task
from specbench.records.blocks import below
from specbench.records.rows import Row
from specbench.reporting import cells, undecided

ARMS = ("good", "poor")
REPLAYED, TIMED, AT_TEMPERATURE_1 = 0, 1, 2  # cells
STUDY = {
    "title": "x",
    "source": ["x"],
    "varies": ["temperature"],
    "cells": [
        ["dataset=a", "data.limit=20", "replay=true"],
        ["dataset=a", "data.limit=20"],
        ["dataset=a", "data.limit=20", "sampler.temperature=1"],
    ],
    "arms": {name: {"run": [f"drafter={name}"]} for name in ARMS},
    "measure": {"memory": 5},
}


def claim(says, *tests, **more):
    return {"says": says, "source": "x", "published": "x", "tests": [*tests], **more}


TAU = claim("more is accepted", {"metric": "tau", "of": "good", "over": "poor", "is": "more"})
SPEED = claim("it is faster", {"metric": "speed_up", "of": "good", "over": "poor", "is": "more"})
BOTH = claim("both", *TAU["tests"], *SPEED["tests"])
SAMPLED = claim("less if sampled", {"metric": "tau", "of": "good", "at": {"temperature": 1}, "over_at": {}, "is": "less"})
MEMORY = claim("less memory", {"measured": "memory.peak", "of": "good", "over": "poor", "is": "less"})
GPU = claim("on a GPU", *TAU["tests"], needs={"device": "cuda"})


def waiting(entries, *asked, stale=None):
    found = undecided.by_cell("s", {**STUDY, "claims": [*asked]}, entries, stale or {})
    return [[one["says"] for one in cell] for cell in found]


def test_every_claim_waits_for_the_cells_that_it_is_about():
    assert waiting([], TAU, SPEED, BOTH, SAMPLED, MEMORY, GPU) == [
        ["more is accepted", "both", "less if sampled"],
        ["it is faster", "both", "less memory"],
        ["less if sampled"],
    ]


def test_over_several_data_sets_it_waits_for_each():
    mean = claim("mean", {**TAU["tests"][0], "at": {"dataset": ["a", "b"]}})
    study = {**STUDY, "cells": [["dataset=a"], ["dataset=b"], ["dataset=c"]], "claims": [mean]}
    assert [len(found) for found in undecided.by_cell("s", study, [], {})] == [1, 1, 0]


@pytest.fixture
def entries(tmp_path):
    """Twenty replayed questions."""
    known = settings(*ARMS, dataset="a", replay=True)
    known["arms"] = {name: arm(name) for name in ("none", *ARMS)}
    cell = block(tmp_path / "s", {"study": "s", **known})
    for question in range(20):
        for name, accepted in (("none", 0), ("good", 3), ("poor", 1)):
            drafted, cycles = [4 * (name != "none")], 12 // (accepted + 1)
            path, ranks = [accepted] * cycles, [[0] * accepted] * cycles
            counts = 0.1, 1.0, drafted * cycles, drafted * cycles, path, ranks
            cell.write(Row(name, str(question), "x", 0, 5, [0] * 13, *counts, replayed=True))
    return cells.collect(below(tmp_path), tmp_path)


def test_a_decided_claim_waits_only_for_arms_with_new_weights(entries):
    assert waiting(entries, TAU, SPEED) == [[], ["it is faster"], []]
    assert waiting(entries, TAU, SPEED, stale={REPLAYED: ["good"]}) == [["more is accepted"], ["it is faster"], []]
    assert waiting(entries, TAU, SPEED, stale={REPLAYED: ["another"], AT_TEMPERATURE_1: ["good"]})[REPLAYED] == []


def test_cells_that_nothing_waits_for_come_last(tmp_path):
    lines = "title: x\nsource: [x]\ncells:\n  - [dataset=a]\n  - [dataset=a, sampler.temperature=1]\n"
    lines += "arms: {good: {run: [drafter=good]}}\nclaims:\n  - says: x\n    source: x\n    published: x\n    tests:\n"
    lines += "      - {metric: tau, of: good, than: 2, is: more, at: {temperature: 1}}\n"
    (tmp_path / "s.yaml").write_text(lines)
    greedy = Task("s", 0, "timed", 5, ("dataset=a",), 20, 0, True, 8, None)
    tasks = [greedy, replace(greedy, cell=1, done=20), replace(greedy, cell=1)]
    found = undecided.first(tasks, Scope(tmp_path / "results", "tiny", folder=tmp_path))
    assert [(task.cell, task.open, task.claims) for task in found] == [(1, True, 1), (0, True, 0), (1, False, 0)]
