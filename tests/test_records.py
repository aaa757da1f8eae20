"""Rows survive crashes and full disks; every metric equals a brute-force count over raw steps."""

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest

from specbench import metrics, records
from specbench.engine.interface import Step
from specbench.errors import SpecBenchError
from specbench.records.blocks import Block, read_block
from specbench.records.rows import Failure, Row
from specbench.reporting import cells, tables
from specbench.reporting.cells import Entry


def arm(name="eagle2", **more):
    """A drafter's part of a header."""
    known = {"drafter": {"name": name}, "parameters": 10, "passes": 6, "lossy": False, "weights": {}}
    return known | ({"parameters": 0, "passes": 0} if name == "none" else {}) | more


def settings(*drafters, dataset="d", **more):
    """A header such as the doors write, of some drafters beside the baseline."""
    config = {"model": {"name": "m"}, "dataset": {"name": dataset}, "sampler": {"temperature": 0.0}}
    return {
        "config": config,
        "target": {"dtype": "float32", "parameters": 100},
        "arms": {name: arm(name) for name in ("none", *drafters)},
        "versions": {"torch": "2"},
        "hardware": {"device": "toaster", "cores": 1},
        **more,
    }


SETTINGS = settings("eagle2")


def random_row(rng, drafter="eagle2", question="q", turn=0):
    """A row made of random cycles, the last one cut as the loop cuts it, and its steps."""
    row = Row(drafter, question, "c", turn, 5, [1], 0.5, 0.0)
    steps = []
    for i in range(int(rng.integers(1, 9))):
        drafted = 0 if drafter == "none" else int(rng.integers(1, 5))
        accepted = int(rng.integers(0, drafted + 1))
        if i > 6:
            drafted = accepted
        times = rng.random(4)
        ranks, nodes = [0] * accepted, 9 * (drafter != "none")
        steps.append(Step([7] * (accepted + 1), nodes, drafted, accepted, ranks, drafted, *times))  # a pass a level
        row.add(steps[-1])
    row.decode_s = row.draft_s + row.target_s + row.verify_s + row.rest_s
    return row, steps


@pytest.mark.parametrize("seed", range(10))
def test_metrics_equal_brute_force(seed):
    rng = np.random.default_rng(seed)
    made = [random_row(rng, question=str(i)) for i in range(6)]
    rows, steps = [r for r, _ in made], [s for _, part in made for s in part]
    assert metrics.tau(rows) == pytest.approx(sum(len(s.tokens) for s in steps) / len(steps))
    assert metrics.tau(rows) == pytest.approx(1 + sum(metrics.marginals(rows)))
    macro = [sum(len(s.tokens) for s in part) / len(part) for _, part in made]
    assert metrics.tau_macro(rows) == pytest.approx(sum(macro) / len(macro))
    for i, alpha in enumerate(metrics.step_alphas(rows), 1):
        tried = [s for s in steps if s.accepted >= i - 1 and s.drafted >= i]
        assert alpha == pytest.approx(sum(s.accepted >= i for s in tried) / len(tried))
    split = metrics.time_split(rows)
    assert sum(split.values()) == pytest.approx(1)
    assert split["draft"] == pytest.approx(sum(s.draft_s for s in steps) / sum(r.decode_s for r in rows))
    assert metrics.speed(rows) == pytest.approx(sum(len(s.tokens) for s in steps) / sum(r.decode_s for r in rows))
    base = [random_row(rng, "none", str(i)) for i in range(6)]
    plain = [s for _, part in base for s in part]
    sums = metrics.compared(rows, [r for r, _ in base]).pooled()
    narrow = sum(s.draft_s + s.target_s + s.verify_s for s in plain) / len(plain)
    draft, tree = sum(s.draft_s for s in steps) / len(steps), sum(s.target_s + s.verify_s for s in steps) / len(steps)
    assert metrics.expected_speed_up(sums) == pytest.approx(metrics.tau(rows) * narrow / (draft + tree))
    assert metrics.free_width_speed_up(sums) == pytest.approx(metrics.tau(rows) * narrow / (draft + narrow))
    assert sums["passes"] == sum(s.passes for s in steps) == sum(r.draft_passes for r in rows) > 0


def untimed_rest(rng, drafter, question):
    """A row whose cycles are nothing but drafting, target pass and verification."""
    row, _ = random_row(rng, drafter, question)
    row.decode_s, row.rest_s = row.draft_s + row.target_s + row.verify_s, 0.0
    return row


@pytest.mark.parametrize("seed", range(10))
def test_the_expected_speed_up_is_the_measured_one_where_nothing_else_takes_time(seed):
    rng = np.random.default_rng(seed)
    rows, base = ([untimed_rest(rng, name, str(i)) for i in range(6)] for name in ("eagle2", "none"))
    lost = untimed_rest(rng, "eagle2", "lost")  # the baseline has no answer to it
    summary = metrics.summarise(SETTINGS, arm(), "eagle2", [*rows, lost], base)
    assert summary.expected == pytest.approx(summary.speed_up.value, rel=1e-9)
    for row in (*rows, lost):
        row.decode_s += row.draft_s
    slower = metrics.summarise(SETTINGS, arm(), "eagle2", [*rows, lost], base)
    assert slower.expected == summary.expected > slower.speed_up.value


BENCH = Path(__file__).resolve().parents[1] / "results" / "bench"


def test_the_expected_speed_up_of_committed_rows_is_what_was_measured():
    """Time that no phase claims is a percent or two of a cycle. A tree of 60 nodes does not pay on two cores."""
    found = [e for e in cells.collect(sorted(BENCH.rglob("rows.jsonl"))) if not e.replayed and e.name != "none"]
    timed = [e.summary for e in found if e.summary.speed_up is not None]
    assert len(timed) > 20
    for summary in timed:
        assert summary.expected == pytest.approx(summary.speed_up.value, rel=0.03), summary.drafter
    assert min(s.expected for s in timed if s.drafter == "eagle2") < 0.6


def test_rows_without_counted_passes_have_no_number_that_needs_them():
    """The most that a drafter may run, 6 in its header, does not stand in for what it ran."""
    rng = np.random.default_rng(0)
    rows = [random_row(rng, question=str(i))[0] for i in range(4)]
    base = [random_row(rng, "none", str(i))[0] for i in range(4)]
    known = metrics.summarise(SETTINGS, arm(), "eagle2", rows, base)
    rows[0].passes = []
    assert rows[0].draft_passes is None and rows[1].draft_passes == sum(rows[1].passes)
    found = metrics.summarise(SETTINGS, arm(), "eagle2", rows, base)
    assert np.isnan(found.expected_by_parameters) and found.expected == known.expected
    assert metrics.interval(metrics.expected_by_parameters(10, 100), found.totals) is None
    assert metrics.interval(metrics.RATES["tau"], found.totals) == known.tau_interval


def test_tau_refuses_counts_that_contradict_the_tokens():
    row, _ = random_row(np.random.default_rng(0))
    row.tokens.append(3)
    with pytest.raises(AssertionError, match="marginal"):
        metrics.tau([row])


def test_speed_up_is_the_ratio_of_pooled_speeds_and_its_interval_is_paired():
    rng = np.random.default_rng(1)
    base = [random_row(rng, "none", str(i))[0] for i in range(20)]
    ours = []
    for b in base:  # twice as fast on every prompt: however prompts are drawn, the ratio is two
        row = Row("eagle2", b.question, "", 0, 5, list(b.tokens), 0.1, b.decode_s / 2, b.nodes, b.drafted, b.accepted)
        ours.append(row)
    found = metrics.interval(metrics.RATES["speed_up"], metrics.compared(ours, base))
    assert found is not None
    assert (found.value, found.low, found.high) == pytest.approx((2, 2, 2))
    assert metrics.interval(metrics.RATES["speed_up"], metrics.compared(ours, [])) is None
    assert metrics.interval(metrics.RATES["speed_up"], metrics.compared(ours[:3], base[5:])) is None


def test_coral_estimate_by_hand():
    sums = {"tokens": np.array(9.0), "cycles": np.array(3.0), "passes": np.array(18.0)}  # tau 3, six passes a cycle
    assert metrics.expected_by_parameters(10, 120)(sums) == pytest.approx(2.0)


def test_rows_come_back_as_written(tmp_path):
    cell = Block(tmp_path, SETTINGS)
    row, _ = random_row(np.random.default_rng(2))
    cell.write(row)
    cell.write(Failure("eagle2", "other", 1, "boom"))
    header, rows = read_block(tmp_path / "rows.jsonl")
    assert header["arms"] == SETTINGS["arms"]
    assert rows[0] == row
    again = Block(tmp_path, SETTINGS)
    assert again.done(row.key) and not again.done(("eagle2", "other", 1))


@pytest.mark.parametrize("keep", range(1, 60, 7))
def test_a_cut_last_line_is_dropped_and_the_rest_kept(tmp_path, keep):
    cell = Block(tmp_path, SETTINGS)
    first, _ = random_row(np.random.default_rng(3), question="a")
    second, _ = random_row(np.random.default_rng(4), question="b")
    cell.write(first)
    size = cell.path.stat().st_size
    cell.write(second)
    os.truncate(cell.path, size + keep)
    assert read_block(cell.path)[1] == [first]
    resumed = Block(tmp_path, SETTINGS)
    assert resumed.done(first.key) and not resumed.done(second.key)
    resumed.write(second)
    assert read_block(cell.path)[1] == [first, second]


def test_a_full_disk_leaves_no_half_row(tmp_path, monkeypatch):
    cell = Block(tmp_path, SETTINGS)
    row, _ = random_row(np.random.default_rng(5))
    cell.write(row)

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as m:
        m.setattr(records.os, "fsync", full)
        with pytest.raises(SpecBenchError, match="free some space"):
            cell.write(random_row(np.random.default_rng(6), question="z")[0])
    assert read_block(cell.path)[1] == [row]


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("", "is empty"),
        ('{"kind": "hea', "is empty"),
        ('{"kind": "error", "drafter": "x", "question": "q", "turn": 0, "error": "boom"}\n', "start with a header"),
        ('{"kind": "header", "schema": 0}\n', "line 1: header.schema: 0, while this code reads row schema 2"),
        ("HEADER\nnonsense\n", "line 2: not JSON"),
        ("HEADER\nHEADER\n", "line 2: a second header"),
        ('HEADER\n{"kind": "prompt", "what": 1}\n', "line 2: prompt.drafter: field required"),
    ],
)
def test_damaged_files_are_named(tmp_path, content, match):
    path = tmp_path / "rows.jsonl"
    path.write_text(content.replace("HEADER", json.dumps({"kind": "header", "schema": 2, **SETTINGS})))
    with pytest.raises(SpecBenchError, match=match):
        read_block(path)


def test_identity_sees_every_setting():
    assert identity(SETTINGS) == identity(json.loads(json.dumps(SETTINGS)))
    assert identity(SETTINGS) != identity({**SETTINGS, "replay": True})


def test_training_table_joins_shared_weights_and_adds_up_stages():
    def weights(**more):
        stage = {"parameters": 100, "tokens_seen": 10, "steps": 2, "hours": 0.5, "data": {"unique_tokens": 5}}
        return stage | {"history": [{"chain_tau": 1.5}], "machine": {"device": "toaster", "cores": 1}} | more

    def entry(drafter, provenance):
        own, header = arm(drafter, parameters=1000, weights=provenance), settings(drafter)
        rows = [random_row(np.random.default_rng(0), drafter)[0]]
        summary = metrics.summarise(header, own, drafter, rows, [])
        return Entry("", summary, 0, rows, header, own, 1, {}, Path("rows.jsonl"))

    first, second = weights(), weights(parameters=7)
    routed = weights(parameters=3, base=second)
    lines = tables.training_lines(
        [entry("a", first), entry("b", second), entry("a2", first), entry("r", routed), entry("none", {})]
    )
    assert [line[:2] for line in lines] == [["a, a2", "100"], ["b", "7"], ["r", "10"]]
    assert lines[2][4:7] == ["20", "4", "1.00"]


def test_verdicts():
    rows = [random_row(np.random.default_rng(i), question=str(i))[0] for i in range(3)]
    assert metrics.lossless_verdict(rows) == "not audited"
    for row in rows:
        row.audit = {"verdict": "identical"}
    assert metrics.lossless_verdict(rows) == "identical 3/3"
    rows[0].audit = {"verdict": "numerical tie"}
    assert metrics.lossless_verdict(rows) == "identical 2/3, 1 numerical ties"
    rows[1].audit = {"verdict": "bug"}
    assert "NOT lossless" in metrics.lossless_verdict(rows)
    assert "LOSSY" in metrics.lossless_verdict(rows, lossy=True)


def test_progress_says_in_a_log_how_far_it_is(monkeypatch, capsys):
    from specbench import progress

    clock = iter([0.0, 1.0, 10.0, 31.0, 40.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    with progress.progress("eagle2", 100, "generations") as reached:
        for count in (20, 30, 60, 100):  # 20 were there before
            reached(count)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "eagle2: 60/100 generations, about 0.5 min left",
        "eagle2: 100/100 generations, about 0.0 min left",
    ]
