"""Rows and headers whose values contradict each other are left out with a line; tables can be made of all others."""

import copy
import json
import random
from dataclasses import asdict

import matplotlib.pyplot as plt
import numpy as np
import pytest
from bending import bent
from fixtures import block_path, random_row, settings, whole

from specbench.records.rows import LinkUse, Measurement
from specbench.reporting import analysis_tables, cells, links, study_figures, tables
from specbench.reporting.groups import groups

LINK = {"delay_ms": 10.0, "jitter_ms": 5.0, "mbit": 8.0, "loss": 0.001, "pause_ms": 200.0, "name": "5g"}
BENDS = 25  # of each kind of line


def lines():
    """A header, a row over a link of each drafter, and measurements."""
    header = whole(settings("eagle2"))
    header["config"] = {**header["config"], "link": LINK}
    rows = [random_row(np.random.default_rng(0), who)[0] for who in ("none", "eagle2")]
    for row in rows:
        row.link = LinkUse({"prompt": 500, "tree": 900}, {"last": 800}, 9, 9.0, 7.0, 0, 500, 3.0)
    values = {
        "clients": {f"{name}_{n}": 10.0 * n for name in ("together", "slowest") for n in (1, 2)},
        "target_pass": {f"ms_{n}": 1.0 * n for n in (1, 2, 4)},
        "memory": {"peak": 2e8, "kv": 1e6},
    }
    measured = [Measurement("none", what, 0, own) for what, own in values.items()]
    return json.loads(json.dumps([header, *map(asdict, [*rows, *measured])]))


LINES = lines()
KINDS = {"header": 0, "row": 2, "clients": 3, "target_pass": 4}


def show(folder, changed):
    """Make the tables of a file with these lines; what was left out."""
    path = block_path(folder)
    path.write_text("".join(json.dumps(line) + "\n" for line in changed))
    problems: list[str] = []
    entries = cells.collect([path], None, problems)
    for group in groups(entries):
        for table in (links.table, links.clients, tables.memory_lines, analysis_tables.fitted, analysis_tables.solved):
            table(group)
    study_figures.tree_cost(entries)
    plt.close("all")
    return problems


@pytest.mark.parametrize("kind", KINDS)
def test_a_bent_line_is_left_out_or_shown(tmp_path, kind):
    assert show(tmp_path, LINES) == []
    at, left_out = KINDS[kind], 0
    for seed in range(BENDS):
        made, _how = bent(LINES[at], random.Random(seed))
        problems = show(tmp_path, [*LINES[:at], made, *LINES[at + 1 :]])
        assert all(str(block_path(tmp_path)) in line and "\n" not in line for line in problems)
        left_out += bool(problems)
    assert 0 < left_out < BENDS, "bends that are all left out, or none, test nothing"


@pytest.mark.parametrize(
    ("kind", "at", "value", "message"),
    [
        ("header", ("config", "link", "jitter_ms"), [1], "config.link.jitter_ms"),
        ("header", ("config", "link", "mbit"), -1.0, "config.link.mbit"),
        ("header", ("config", "link", "delay_ms"), -5.0, "config.link.delay_ms"),
        ("row", ("link", "prompt_bytes"), 5000, "more bytes than the whole"),
        ("row", ("link", "prompt_s"), 8.0, "seconds than the whole"),
        ("clients", ("values", "together_2x"), 1.0, "is no quantity of clients"),
        ("target_pass", ("values", "ms_0"), 1.0, "is no quantity of target_pass"),
    ],
)
def test_values_that_contradict_each_other_are_left_out(tmp_path, kind, at, value, message):
    changed = copy.deepcopy(LINES)
    part = changed[KINDS[kind]]
    for step in at[:-1]:
        part = part[step]
    part[at[-1]] = value
    (problem,) = show(tmp_path, changed)
    assert message in problem


def test_rows_without_any_seconds_over_a_link_have_no_prediction(tmp_path):
    changed = copy.deepcopy(LINES)
    changed[0]["config"]["link"] = {"name": "5g"}
    for row in changed[1:3]:
        row["draft_s"] = row["link"]["server_s"] = row["link"]["prompt_s"] = 0.0
    assert show(tmp_path, changed) == []


def test_memory_of_a_target_of_unknown_size_has_no_parts(tmp_path):
    changed = copy.deepcopy(LINES)
    for arm in changed[0]["arms"].values():
        arm["bytes"] = 10
    assert "bytes" not in changed[0]["target"] and show(tmp_path, changed) == []
