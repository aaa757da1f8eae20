"""Rows survive crashes and full disks, are found and pooled by what names them; every metric equals a brute-force count."""

import errno
import json
import math
import os
import random
import re
import time
from dataclasses import asdict, replace
from fnmatch import fnmatch
from pathlib import Path

import fixtures
import numpy as np
import pytest
from conftest import ROOT
from fixtures import SETTINGS, arm, block, block_path, random_row, settings, whole
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from specbench.common.errors import SpecBenchError
from specbench.records import blocks, identity, metrics, statistics
from specbench.records.blocks import NAME, below, read_block, scan
from specbench.records.rows import Failure, Measurement, QuestionEnd, Row
from specbench.records.schema import SCHEMA, all_hours, all_tokens
from specbench.reporting import cells, trainings
from specbench.reporting.cells import Entry


@pytest.mark.parametrize("seed", range(10))
def test_metrics_equal_brute_force(seed):
    rng = np.random.default_rng(seed)
    made = [random_row(rng, question=str(i)) for i in range(6)]
    rows, steps = [r for r, _ in made], [s for _, part in made for s in part]
    assert metrics.tau(rows) == pytest.approx(sum(len(s.tokens) for s in steps) / len(steps))
    assert metrics.tau(rows) == pytest.approx(1 + np.mean([a for r in rows for a in r.accepted]))
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
    sums = metrics.compared(rows, [r for r, _ in base]).pooled
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


BENCH = ROOT / "results" / "bench"


def test_the_expected_speed_up_of_committed_rows_is_what_was_measured():
    """Time that no phase claims is a percent or two of a cycle. A tree of 60 nodes does not pay on two cores."""
    found = [e for e in cells.collect(below(BENCH)) if not e.replayed and e.name != "none"]
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
    part = metrics.summarise(SETTINGS, arm(), "eagle2", rows, base)
    counted = sum(sum(r.passes) for r in rows[1:]) / sum(len(r.accepted) for r in rows[1:])
    assert part.expected_by_parameters == pytest.approx(known.tau / (counted * 10 / 100 + 1)), "of rows that counted them"
    for row in rows:
        row.passes = []
    none = metrics.summarise(SETTINGS, arm(), "eagle2", rows, base)
    assert np.isnan(none.expected_by_parameters) and none.expected == known.expected
    assert statistics.interval(metrics.expected_by_parameters(10, 100), none.totals) is None
    assert statistics.interval(metrics.RATES["tau"], none.totals) == known.tau_interval


def test_tau_refuses_counts_that_contradict_the_tokens():
    row, _ = random_row(np.random.default_rng(0))
    row.tokens.append(3)
    with pytest.raises(AssertionError, match="tau is not 1"):
        metrics.tau([row])


def test_speed_up_is_the_ratio_of_pooled_speeds_and_its_interval_is_paired():
    rng = np.random.default_rng(1)
    base = [random_row(rng, "none", str(i))[0] for i in range(20)]
    ours = []
    for b in base:  # twice as fast on every prompt: however prompts are drawn, the ratio is two
        ours.append(replace(b, drafter="eagle2", decode_s=b.decode_s / 2))
    found = statistics.interval(metrics.RATES["speed_up"], metrics.compared(ours, base))
    assert found is not None
    assert (found.value, found.low, found.high) == pytest.approx((2, 2, 2))
    assert statistics.interval(metrics.RATES["speed_up"], metrics.compared(ours, [])) is None
    assert statistics.interval(metrics.RATES["speed_up"], metrics.compared(ours[:3], base[5:])) is None


def test_coral_estimate_by_hand():
    sums = {"tokens": np.array(9.0), "cycles": np.array(3.0), "passes": np.array(12.0), "counted": np.array(2.0)}
    # tau 3, six passes a cycle
    assert metrics.expected_by_parameters(10, 120)(sums) == pytest.approx(2.0)


# Blocks ----------------------------------------------------------------------------------------------------------------


def written(results, header, *records, cell="d-greedy"):
    """Path of a new block with these records."""
    made = block(results, header, cell)
    for record in records:
        made.write(record)
    return made.path


def row(drafter="eagle2", question="q", seed=0, **more):
    """One random row."""
    found = random_row(np.random.default_rng(seed), drafter, question)[0]
    return replace(found, **more)


def records_of_every_kind():
    return [
        row("none", "a"),
        row("eagle2", "a"),
        Failure("eagle2", "b", 1, "boom", "beef"),
        Measurement("eagle2", "memory", 2, {"peak": 3.0}),
        QuestionEnd("a", 2, 1.5),
    ]


def ledger(folder, header=SETTINGS, timed=False, **more):
    return fixtures.ledger(folder, header, timed, **more)


def test_rows_come_back_as_written(tmp_path):
    records = records_of_every_kind()
    path = written(tmp_path, SETTINGS, *records)
    assert path.parent == tmp_path / "m" / "d-greedy" and path.match(NAME)
    header, found = read_block(path)
    assert header["arms"] == SETTINGS["arms"] and (header["schema"], header["decoding"]) == (SCHEMA, identity.DECODING)
    assert found == records


def test_a_block_that_nothing_was_written_to_is_no_file(tmp_path):
    block(tmp_path, SETTINGS)
    assert not list(tmp_path.iterdir())


def test_two_blocks_of_one_second_are_two_files(tmp_path):
    assert len({written(tmp_path, SETTINGS, row()) for _ in range(5)}) == 5


def test_names_of_blocks_of_one_second_sort_by_the_time_at_which_they_began(tmp_path):
    names = []
    for _ in range(20):
        names.append(blocks.Block(tmp_path, settings()).path.name)
        time.sleep(0.001)
    assert names == sorted(names) and all(fnmatch(name, NAME) for name in names)


@pytest.mark.parametrize("keep", range(1, 60, 7))
def test_a_cut_last_line_is_dropped_and_the_rest_kept(tmp_path, keep):
    cell = block(tmp_path, SETTINGS)
    first, second = row(question="a", seed=3), row(question="b", seed=4)
    cell.write(first)
    size = cell.path.stat().st_size
    cell.write(second)
    os.truncate(cell.path, size + keep)
    assert read_block(cell.path)[1] == [first]
    resumed = ledger(cell.path.parent)
    assert resumed.done("eagle2", first.text, 0) and not resumed.done("eagle2", second.text, 0)
    resumed.write(second)
    assert read_block(cell.path)[1] == [first], "what another process wrote is never touched"
    (entry,) = cells.collect(below(tmp_path), tmp_path)
    assert {r.question: r for r in entry.rows} == {"a": first, "b": second}


def test_a_block_cut_at_any_byte_is_read_up_to_its_last_whole_line(tmp_path):
    records = records_of_every_kind()
    path = written(tmp_path, SETTINGS, *records)
    data = path.read_bytes()
    ends = {i for i, byte in enumerate(data) if byte == ord("\n")}
    near = {end + i for end in ends for i in range(-3, 60)}  # of a line's end and the next one's beginning
    for size in (i for i in range(len(data) + 1) if i in near or i % 7 == 0):
        path.write_bytes(data[:size])
        lines = data.count(b"\n", 0, size)
        known = scan(path, "none")
        if not lines:
            assert known is None
            with pytest.raises(SpecBenchError, match="is empty"):
                read_block(path)
        else:
            assert read_block(path)[1] == records[: lines - 1] and held(known) == content(records[: lines - 1])
        if size % 97 == 0 or {size - 1, size, size + 1} & ends:
            problems = []
            cells.collect([path], tmp_path, problems)
            assert len(problems) == (not data[:size].endswith(b"\n"))
            assert ledger(path.parent).done("eagle2", records[1].text, 0) == (lines > 2)


def held(known):
    """What a scan found, without where it lies."""
    return known.rows, known.failures, known.measured, known.generations, pytest.approx(known.seconds)


def content(records):
    """The same of records that were read whole."""
    rows, failures = ({(r.drafter, r.text, r.turn) for r in records if isinstance(r, kind)} for kind in (Row, Failure))
    measured = {r.key for r in records if isinstance(r, Measurement)}
    ends = [r for r in records if isinstance(r, QuestionEnd)]
    return rows, failures, measured, sum(r.generations for r in ends), sum(r.seconds for r in ends)


AWKWARD = ['"', "\\", '\\"', '", "turn": 9, "', '"text": "beef"', "\u2028", "é→\U0001f600", "\n", "\x00\x1b", "{}", ""]
awkward = st.sampled_from(AWKWARD)
names = awkward | st.text(max_size=8) | st.builds(str.__add__, awkward, st.text(max_size=4))
digests = st.text("0123456789abcdef", min_size=12, max_size=12) | st.just("")
counts = st.integers(0, 2**40)


def known_records(labels):
    label = st.sampled_from(labels)
    whole_rows = st.builds(
        lambda drafter, question, category, turn, text, **more: Row(
            drafter, question, category, turn, 5, [1], 0.5, 0.0, text=text, **more
        ),
        label, names, names, counts, digests,
        audit=st.none() | st.just({"verdict": "identical", "why": '"text": "0123456789ab"'}),
    )  # fmt: skip
    return st.lists(
        whole_rows
        | st.builds(Failure, label, names, counts, names, digests)
        | st.builds(Measurement, label, names, counts, st.dictionaries(names, st.floats(-1e9, 1e9), max_size=2))
        | st.builds(QuestionEnd, names, counts, st.floats(0, 1e9)),
        min_size=1,
        max_size=8,
    )


@examples(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_what_a_scan_finds_is_what_a_block_holds(tmp_path, data):
    """Whatever stands in labels, questions, categories and errors, what looks like another field among it."""
    labels = data.draw(st.lists(names, min_size=1, max_size=3, unique=True))
    records = data.draw(known_records(labels))
    path = written(tmp_path, settings() | {"arms": {label: arm(label) for label in labels}}, *records)
    known = scan(path, labels[0])
    assert held(known) == content(records)
    assert read_block(path)[1] == records
    base = {(r.text, r.turn): r for r in records if isinstance(r, Row) and r.drafter == labels[0]}
    assert known.baseline_lines.keys() == base.keys()
    for key, line in known.baseline_lines.items():
        found = json.loads(line)
        assert (found["text"], found["turn"], found["question"]) == (*key, base[key].question)


def test_what_a_scan_finds_of_every_committed_block_is_what_it_holds():
    paths = [path for root in ("results", "tests/golden") for path in below(ROOT / root)]
    assert len(paths) > 30
    for path in paths:
        assert held(scan(path, "none")) == content(read_block(path)[1]), path


def full(descriptor):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_leaves_no_half_row(tmp_path, monkeypatch):
    cell, first = block(tmp_path, SETTINGS), row(seed=5)
    cell.write(first)
    with monkeypatch.context() as m:
        m.setattr(blocks.os, "fsync", full)
        with pytest.raises(SpecBenchError, match="free some space"):
            cell.write(row(question="z", seed=6))
    assert read_block(cell.path)[1] == [first]


def test_a_disk_that_was_full_at_the_first_row_leaves_no_file_and_takes_the_next(tmp_path, monkeypatch):
    cell, first = block(tmp_path, SETTINGS), row(seed=5)
    with monkeypatch.context() as m:
        m.setattr(blocks.os, "fsync", full)
        with pytest.raises(SpecBenchError, match="free some space"):
            cell.write(first)
    assert not below(tmp_path)
    cell.write(first)
    assert read_block(cell.path)[1] == [first]


HEADER = json.dumps(whole(SETTINGS))
ROW = json.dumps({"kind": "prompt", **{k: v for k, v in asdict(row()).items() if k != "kind"}})
DAMAGED = [
    ("", "is empty"),
    ('{"kind": "hea', "is empty"),
    ('{"kind": "error", "drafter": "x", "question": "q", "turn": 0, "error": "boom"}\n', "start with a header"),
    ('{"kind": "header", "schema": 0}\n', "line 1: header.schema: 0, while this code reads blocks of schema 3"),
    ("HEADER\nnonsense\n", "line 2: not JSON"),
    ("HEADER\nHEADER\n", "line 2: a second header"),
    ('HEADER\n{"kind": "prompt", "what": 1}\n', "line 2: prompt.drafter: field required"),
]


@pytest.mark.parametrize(("content", "match"), DAMAGED)
def test_damaged_files_are_named(tmp_path, content, match):
    path = tmp_path / "rows.jsonl"
    path.write_text(content.replace("HEADER", HEADER))
    with pytest.raises(SpecBenchError, match=match):
        read_block(path)


# Of a block in a cell's folder: what is said of it where the cell goes on, and where it is reported; None: nothing.
FOREIGN = [
    (b"nonsense\n", "line 1", "line 1"),
    (b"\xff\x00\n", "line 1", "line 1"),
    (b"[]\n", "line 1", "line 1"),
    (b'{"kind": "header", "schema": 2}\n', "line 1", "line 1"),
    (b"ROW\n", "line 1", "header"),
    (b"HEADER\nnonsense\nROW\n", "line 2", "line 2"),
    (b"HEADER\nROW\n\xff\xfe\n", "line 3", "line 3"),
    (b"HEADER\nROW\nHEADER\n", "line 3", "line 3"),
    (b'HEADER\n{"kind": "error", "drafter": "\xff", QUESTION, "turn": 0, "error": "", "text": ""}\n', "line 2", "line 2"),
    (b'HEADER\n{"kind": "error", "drafter": "\\q", QUESTION, "turn": 0, "error": "", "text": ""}\n', "line 2", "line 2"),
    (b'HEADER\n{"kind": "question", QUESTION, "generations": 1, "seconds": 1.2.3}\n', "line 2", "line 2"),
    (b'HEADER\n{"kind": "question", QUESTION, "generations": LONG, "seconds": 1}\n', "line 2", "line 2"),
    (b"", None, "is empty"),
    (b"\n", "line 1", "is empty"),
]  # fmt: skip


@pytest.mark.parametrize(("data", "going_on", "reported"), FOREIGN)
def test_a_damaged_or_foreign_block_is_one_line_that_names_it(tmp_path, data, going_on, reported):
    good = written(tmp_path, SETTINGS, row("none"), row())
    path = block_path(good.parent)
    words = {"HEADER": HEADER, "ROW": ROW, "QUESTION": '"question": "q"', "LONG": "1" * 5000}
    for word, meant in words.items():
        data = data.replace(word.encode(), meant.encode())
    path.write_bytes(data)
    if going_on is None:
        assert ledger(good.parent).done("eagle2", row().text, 0)
    else:
        with pytest.raises(SpecBenchError) as raised:
            ledger(good.parent)
        assert str(path) in str(raised.value) and going_on in str(raised.value)
        assert len(str(raised.value).splitlines()) == 1
    problems = []
    assert [e.name for e in cells.collect(below(tmp_path), tmp_path, problems)] == ["none", "eagle2"]
    assert len(problems) == 1 and str(path) in problems[0] and reported in problems[0]
    assert len(problems[0].splitlines()) == 1


@pytest.mark.parametrize("seed", range(60))
def test_a_scan_of_flipped_bytes_ends_in_one_line_or_goes_on(tmp_path, seed):
    path = written(tmp_path, SETTINGS, *records_of_every_kind())
    draw, data = random.Random(seed), bytearray(path.read_bytes())
    begins = [m.end() for m in re.finditer(b"\n", data)][:-1]
    for _ in range(3):  # in the beginnings of lines, which are all that a scan looks at
        data[draw.choice(begins) + draw.randrange(70)] = draw.randrange(256)
    path.write_bytes(data)
    message = None
    try:
        found = scan(path, "none")
    except SpecBenchError as error:
        found, message = None, str(error)
    assert found is not None or re.fullmatch(rf"{re.escape(str(path))} line \d+: [^\n]+", message)


def test_files_that_are_no_blocks_are_passed_over(tmp_path):
    good = written(tmp_path, SETTINGS, row("none"), row())
    for name in ("rows.jsonl", "notes.txt", "trace-eagle2.json", ".2026-01-01T000000-x-0.jsonl.swp", "2026.jsonl"):
        (good.parent / name).write_bytes(b"\xff")
    assert ledger(good.parent).done("eagle2", row().text, 0) and below(tmp_path) == [good]


# What is there, and what is missing ------------------------------------------------------------------------------------


def test_a_ledger_knows_what_all_blocks_hold_and_writes_its_own(tmp_path):
    folder = written(tmp_path, SETTINGS, row("none", "a"), row(question="a"), QuestionEnd("a", 2, 3.0)).parent
    written(tmp_path, SETTINGS, row("none", "b"), Failure("eagle2", "b", 0, "boom", row(question="b").text))
    known = ledger(folder)
    texts = {q: row(question=q).text for q in "abc"}
    assert {q for q in "abc" if known.done("none", texts[q], 0)} == {"a", "b"}
    assert {q for q in "abc" if known.done("eagle2", texts[q], 0)} == {"a"} and not known.done("eagle2", texts["a"], 1)
    assert known.failed() == {("eagle2", texts["b"], 0)} and known.pace() == 1.5
    assert known.answer(texts["b"], 0) == row("none", "b") and known.answer(texts["c"], 0) is None
    known.write(row(question="b"))
    assert known.done("eagle2", texts["b"], 0) and not known.failed()
    written(tmp_path, SETTINGS, row(question="c"))
    assert not known.done("eagle2", texts["c"], 0)
    known.refresh()
    assert known.done("eagle2", texts["c"], 0)
    assert not ledger(folder, fresh=True).done("eagle2", texts["c"], 0)


def test_a_ledger_finds_the_baselines_answer_in_its_own_block(tmp_path):
    known = ledger(tmp_path / "m" / "d-greedy")
    base = row("none", "a")
    known.write(base)
    known.write(row("eagle2", "a"))
    known.refresh()
    assert known.answer(base.text, 0) == base


def test_a_forgotten_arm_is_not_remembered_by_looking_again(tmp_path):
    folder = written(tmp_path, SETTINGS, row("none"), row()).parent
    known = ledger(folder)
    known.forget("eagle2")
    written(tmp_path, SETTINGS, row(question="later"))
    known.refresh()
    assert known.done("none", row().text, 0)
    assert not any(known.done("eagle2", row(question=q).text, 0) for q in ("q", "later"))
    known.write(row())
    assert known.done("eagle2", row().text, 0)


@pytest.mark.parametrize(
    ("change", "counts"),
    [
        ({}, True),
        ({"timing": identity.TIMING - 1}, False),
        ({"batching": 1}, True),
        ({"batching": 1, "config": {"batch": 2}}, False),
        ({"sampling": 1}, True),
        ({"sampling": 1, "config": {"sampler": {"temperature": 1.0}}}, False),
        ({"config": {"sampler": {"temperature": 1.0}, "batch": 2}}, True),
        ({"emulator": 1, "config": {"link": {"name": "local"}}}, True),
        ({"emulator": 1, "config": {"link": {"name": "lan"}}}, False),
    ],
)
def test_each_number_of_the_engines_speed_counts_where_it_applies(change, counts):
    header = whole(SETTINGS)
    assert identity.speeds_count(header | change | {"config": header["config"] | change.get("config", {})}) == counts


OTHER = {"hardware": {"device": "fridge", "cores": 1}}


@pytest.mark.parametrize(
    ("change", "replayed", "timed"),
    [
        ({}, True, True),
        ({"commit": "another", "versions": {"torch": "9"}, "load": 3}, True, True),
        (OTHER, True, False),
        ({"timing": identity.TIMING - 1}, True, False),
        ({"decoding": identity.DECODING - 1}, False, False),
        ({"target": {"dtype": "float32", "parameters": 100, "fingerprint": "another"}}, False, False),
        ({"arms": {"none": arm("none"), "eagle2": arm(drafter={"name": "eagle2", "depth": 9})}}, False, False),
    ],
)
def test_rows_of_other_machines_count_where_no_seconds_do_and_of_other_arms_and_targets_never(
    tmp_path, change, replayed, timed
):
    folder = written(tmp_path, SETTINGS | change, row()).parent
    found = [ledger(folder, timed=t).done("eagle2", row().text, 0) for t in (False, True)]
    assert found == [replayed, timed]


def test_rows_count_for_an_arm_that_was_called_otherwise(tmp_path):
    own = arm(drafter={"name": "x", "depth": 7})
    folder = written(tmp_path, SETTINGS | {"arms": {"none": arm("none"), "before": own}}, row("before")).parent
    assert ledger(folder, SETTINGS | {"arms": {"none": arm("none"), "now": own}}).done("now", row().text, 0)


ROWS, FILES = 100_000, 5


def test_what_is_missing_among_100_000_rows_is_found_in_seconds(tmp_path):
    folder, header = tmp_path / "m" / "d-greedy", settings(*(f"arm{i}" for i in range(24)))
    labels = list(header["arms"])
    questions = [f"{i:012x}" for i in range(ROWS // len(labels))]
    long = row(tokens=list(range(100, 160)), nodes=[60] * 40, drafted=[5] * 40, accepted=[3] * 40, ranks=[[0, 0, 1]] * 40)
    line = json.dumps({"kind": "prompt", **{k: v for k, v in asdict(long).items() if k != "kind"}}).encode() + b"\n"
    label, text = b'"drafter": "eagle2"', long.text.encode()
    assert 900 < len(line) < 2000 and line.count(label) == line.count(text) == 1
    mine = [line.replace(label, b'"drafter": "%s"' % name.encode()) for name in labels]
    for number in range(FILES):
        part = (one.replace(text, q.encode()) for q in questions[number::FILES] for one in mine)
        block_path(folder, number).write_bytes(json.dumps(whole(header)).encode() + b"\n" + b"".join(part))
    wanted = [(name, q) for q in [*questions, "f" * 12] for name in labels]
    begin = time.process_time()
    known = ledger(folder, header, timed=True)
    missing = [key for key in wanted if not known.done(*key, 0)]
    took = time.process_time() - begin
    assert missing == [(name, "f" * 12) for name in labels]
    assert took < 5, f"{took:.2f} s"


# Pooling ---------------------------------------------------------------------------------------------------------------


def at(second, **more):
    """A header of a block that began then."""
    return SETTINGS | {"started": f"2026-01-01T00:00:{second:02}Z"} | more


def both(questions, seed=0, drafters=("none", "eagle2")):
    """Rows of several drafters to these questions."""
    rng = np.random.default_rng(seed)
    return [random_row(rng, name, q)[0] for q in questions for name in drafters]


def entries_of(results, name="eagle2", problems=None):
    return [e for e in cells.collect(below(results), results, problems) if e.name == name]


def test_questions_of_two_blocks_add_up(tmp_path):
    first, second = both("abc", seed=1), both("de", seed=2)
    written(tmp_path, at(1), *first)
    written(tmp_path, at(2, commit="another", versions={"torch": "3"}), *second)
    (entry,) = entries_of(tmp_path)
    mine, base = ([r for r in first + second if r.drafter == name] for name in ("eagle2", "none"))
    assert entry.rows == mine and entry.baseline == base and entry.summary.prompts == 5
    expected = statistics.interval(metrics.RATES["speed_up"], metrics.compared(mine, base))
    assert entry.summary.speed_up == expected and entry.summary.tau == pytest.approx(metrics.tau(mine))
    assert len(entries_of(tmp_path, "none")) == 1


@pytest.mark.parametrize("turned", [False, True])
def test_a_generation_that_two_blocks_hold_counts_once_the_newer(tmp_path, turned):
    """By when the blocks began, whichever was written first."""
    blocks_ = [(at(1), both("ab", seed=1)), (at(2), both("bc", seed=2))]
    for header, rows in blocks_[:: -1 if turned else 1]:
        written(tmp_path, header, *rows)
    (entry,) = entries_of(tmp_path)
    assert entry.rows == [blocks_[0][1][1], blocks_[1][1][1], blocks_[1][1][3]]


def test_a_failure_that_was_made_good_in_another_block_is_none(tmp_path):
    lost = [Failure("eagle2", q, 0, "boom", row(question=q).text) for q in "ab"]
    written(tmp_path, at(1), row("none", "a"), *lost)
    assert entries_of(tmp_path)[0].failed == 2
    written(tmp_path, at(2), row("none", "a"), row(question="a"))
    (entry,) = entries_of(tmp_path)
    assert entry.failed == 1 and len(entry.rows) == 1


def test_timed_rows_of_another_machine_are_another_entry_and_replayed_rows_pool(tmp_path):
    for replay, expected in ((False, [2, 3]), (True, [5])):
        root, more = tmp_path / str(replay), {"replay": replay}
        written(root, at(1, **more), *both("ab"))
        written(root, at(2, **more, **OTHER), *both("cde"))
        assert sorted(e.summary.prompts for e in entries_of(root)) == expected
    assert {e.machine.split(",")[0] for e in entries_of(tmp_path / "False")} == {"toaster", "fridge"}


def test_a_speed_up_is_over_the_baseline_of_the_rows_own_block(tmp_path):
    """The machine was twice as slow when the second block was measured."""
    header = {"arms": {name: arm(name) for name in ("none", "a", "b")}}

    def timed(name, question, seconds):
        return Row(name, question, "c", 0, 5, [1] * 11, 0.1, seconds, [0] * 10, [0] * 10, [0] * 10, [[]] * 10)

    fast = [timed(name, q, s) for q in "xy" for name, s in (("none", 4.0), ("a", 2.0))]
    slow = [timed(name, q, s) for q in "xy" for name, s in (("none", 8.0), ("b", 2.0))]
    written(tmp_path, at(1, **header), *fast)
    written(tmp_path, at(2, **header), *slow)
    found = {e.name: e for e in cells.collect(below(tmp_path), tmp_path)}
    assert found["a"].summary.speed_up.value == pytest.approx(2) and found["b"].summary.speed_up.value == pytest.approx(4)
    assert [r.decode_s for r in found["none"].rows] == [8.0, 8.0], "the baseline's own are the newest"


def test_a_replays_rows_are_held_against_the_answers_of_another_block(tmp_path):
    written(tmp_path, at(1, replay=True), row("none", "a"))
    written(tmp_path, at(2, replay=True), row(question="a", replayed=True))
    assert entries_of(tmp_path)[0].baseline == [row("none", "a")]


def test_measurements_of_several_blocks_are_repetitions_each_once(tmp_path):
    for second, values in ((1, {0: 1.0, 1: 2.0}), (2, {1: 5.0, 2: 6.0})):
        made = [Measurement("eagle2", "memory", r, {"peak": peak}) for r, peak in values.items()]
        written(tmp_path, at(second), *both("ab"), *made)
    assert [v["peak"] for v in entries_of(tmp_path)[0].measured["memory"]] == [1.0, 5.0, 6.0]


def deeper(**more):
    return {"arms": {"none": arm("none"), "eagle2": arm(drafter={"name": "eagle2", "depth": 9})}} | more


def test_of_a_studys_arm_the_newest_recipe_counts_and_of_plain_runs_each_is_an_entry(tmp_path):
    for name, study, expected in (("study", "s", [2]), ("plain", None, [4, 2])):
        written(tmp_path / name, at(1, study=study), *both("abcd"))
        written(tmp_path / name, at(2, **deeper(study=study)), *both("ab"))
        assert [e.summary.prompts for e in entries_of(tmp_path / name)] == expected
        (base,) = entries_of(tmp_path / name, "none")
        assert base.summary.prompts == 4


def fitted(depth, costs=1.0):
    """An arm whose tree was fitted to the machine."""
    choice = {"depth": depth, "top_k": 2, "nodes": 5, "tau": 2.0, "speedup": 1.5}
    return arm(fitted={"choice": choice, "costs": {"target": {1: costs}}})


def test_of_a_fitted_arms_trees_the_one_with_most_rows_counts(tmp_path):
    for second, depth, questions in ((1, 3, "abc"), (2, 4, "de")):
        arms = {"none": arm("none"), "eagle2": fitted(depth)}
        written(tmp_path, at(second, study="s", arms=arms), *both(questions))
    (entry,) = entries_of(tmp_path)
    assert entry.summary.prompts == 3 and entry.arm["fitted"]["choice"]["depth"] == 3


def test_rows_decoded_by_older_rules_are_left_out_with_a_line(tmp_path):
    old = written(tmp_path, at(1, decoding=identity.DECODING - 1), *both("ab"))
    written(tmp_path, at(2), *both("c"))
    problems = []
    (entry,) = entries_of(tmp_path, problems=problems)
    assert entry.summary.prompts == 1
    assert len(problems) == 1 and problems[0].startswith(f"{old}: its rows were decoded by older rules")


def test_what_lies_in_local_is_found_only_where_it_is_asked_for(tmp_path):
    path = written(tmp_path / "local", SETTINGS, row())
    assert below(tmp_path) == [] and below(tmp_path / "local") == [path]


# Identity --------------------------------------------------------------------------------------------------------------

GROWTH = {"_target_": "specbench.engine.policies.Dynamic", "depth": 5, "top_k": 3}
DRAFTER = {"_target_": "drafters.eagle.Eagle", "name": "eagle2", "weights": "w/eagle2", "growth": GROWTH, "layers": [1, 2]}
KNOWN = arm(
    drafter=DRAFTER,
    tree=GROWTH,
    verify={"_target_": "specbench.engine.verify.Lossless"},
    contents={"model.safetensors": "abc", "config.json": "def"},
)
CHOICE = {"depth": 5, "top_k": 3, "nodes": 9, "tau": 2.0, "speedup": 1.5}
FIT = {"choice": CHOICE, "costs": {"target": {1: 0.5, 8: 0.75}}}
RATE = {"_target_": "specbench.tuning.cost_aware.Rate"}


@pytest.mark.parametrize(
    "change",
    [
        {"drafter": DRAFTER | {"_target_": "elsewhere.Eagle", "growth": GROWTH | {"_target_": "other.Dynamic"}}},
        {"drafter": DRAFTER | {"weights": "/else/where", "name": "mine", "searched": "x.json", "path": "/x"}},
        {"drafter": DRAFTER | {"vocabulary": None, "growth": GROWTH | {"limit": None}}},
        {"drafter": dict(reversed(DRAFTER.items())) | {"layers": (1, 2)}},
        {"contents": {"model.safetensors": "abc", "config.json": "other", "more.json": "x"}},
        {"parameters": 99, "passes": 9, "bytes": 5, "checkpoint": "x", "of": "y", "seed": 3},
        {"weights": {"commit": "another", "hours": 3}},
        {"draft_dtype": None},
    ],
)
def test_an_arms_name_passes_over_what_determines_no_row(change):
    assert identity.arm_key(KNOWN | change) == identity.arm_key(KNOWN)


@pytest.mark.parametrize(
    "change",
    [
        {"drafter": DRAFTER | {"_target_": "drafters.eagle.Other"}},
        {"drafter": DRAFTER | {"growth": GROWTH | {"depth": 6}}},
        {"drafter": DRAFTER | {"layers": [2, 1]}},
        {"drafter": DRAFTER | {"vocabulary": 0}},
        {"verify": {"_target_": "specbench.engine.verify.Typical"}},
        {"contents": {"model.safetensors": "other"}},
        {"contents": {"model.safetensors": "abc", "more.safetensors": "abc"}},
        {"contents": {"model.safetensors": "abc", "skip.json": "x"}},
        {"weights": {"calibration": "x"}},
        {"sequence": "x"},
        {"draft_dtype": "bfloat16"},
        {"fitted": FIT},
    ],
)
def test_an_arms_name_sees_options_and_digests(change):
    assert identity.arm_key(KNOWN | change) != identity.arm_key(KNOWN)


@pytest.mark.parametrize(
    ("change", "tree", "same"),
    [
        ({"costs": {"target": {1: 9.0}}}, GROWTH, True),
        ({"choice": CHOICE | {"tau": 9.0, "speedup": 9.0}}, GROWTH, True),
        ({"runner_up": CHOICE}, GROWTH, True),
        ({"choice": CHOICE | {"depth": 6}}, GROWTH, False),
        ({"choice": CHOICE | {"top_k": 4}}, GROWTH, False),
        ({"choice": CHOICE | {"nodes": 8}}, GROWTH, False),
        ({"costs": {"target": {1: 9.0}}}, RATE, False),
        ({"choice": CHOICE | {"depth": 6}}, RATE, True),
    ],
)
def test_of_a_fitted_tree_the_choice_counts_and_of_one_that_follows_costs_these(change, tree, same):
    first, second = (identity.arm_key(KNOWN | {"tree": tree, "fitted": fit}) for fit in (FIT, FIT | change))
    assert first[0] == second[0] == identity.arm_key(KNOWN | {"tree": tree})[0] and (first[1] == second[1]) == same


@pytest.mark.parametrize("tree", [GROWTH, RATE])
def test_names_are_the_same_before_writing_and_after(tmp_path, tree):
    """JSON knows neither tuples nor numbers as keys."""
    own = KNOWN | {"tree": tree, "fitted": FIT, "drafter": DRAFTER | {"layers": (1, 2), "bins": {1: 2}}}
    header = whole(settings() | {"arms": {"none": arm("none"), "eagle2": own}})
    again, _ = read_block(written(tmp_path, header, row()))
    assert identity.arm_key(again["arms"]["eagle2"]) == identity.arm_key(own)
    assert identity.cell_key(again) == identity.cell_key(header)
    assert identity.machine_key(again) == identity.machine_key(header)
    costs = {"target": {"1": 0.5, "8": 0.75}}
    assert identity.arm_key(own | {"fitted": FIT | {"costs": costs}}) == identity.arm_key(own)


def full_header():
    """With everything that names a cell or a machine."""
    config = {
        "model": {"name": "m", "max_context": 64, "forward": "eager", "path": None},
        "dataset": {"name": "d", "root": "/x"},
        "sampler": {"_target_": "specbench.engine.sampling.Sampler", "temperature": 0.0, "top_p": 1.0, "top_k": 0},
        "decode": {"max_new_tokens": 9, "seed": 0, "warmup": 1},
        "link": {"name": "local", "to": None, "delay_ms": 0.0},
        "threads": 2,
        "backend": "eager",
        "data": {"root": None, "limit": 8},
    }
    target = {"fingerprint": "f", "dtype": "float32", "chat": "c", "parameters": 9}
    target |= {"contents": {"model.safetensors": "x", "config.json": "y"}}
    hardware = {"device": "toaster", "instructions": "avx2", "cores": 2, "threads": 2, "memory": 9}
    return whole(settings() | {"config": config, "target": target, "hardware": hardware, "commit": "c", "load": 0.0})


def changed(path, value):
    header = full_header()
    *folders, last = path.split(".")
    inner = header
    for name in folders:
        inner = inner[name]
    inner[last] = value
    return header


CHANGES = [  # what changes, and whether it makes another cell, another machine
    ("commit", "other", False, False),
    ("versions", {"torch": "9"}, False, False),
    ("started", "2027", False, False),
    ("load", 9.0, False, False),
    ("study", "s", False, False),
    ("arms", {"none": arm("none", passes=3)}, False, False),
    ("hardware.memory", 8, False, False),
    ("target.contents", {"model-1-of-1.safetensors": "x", "config.json": "y"}, False, False),
    ("target.contents", {"model.safetensors": "x", "config.json": "z"}, True, False),
    ("config.data.limit", 3, False, False),
    ("config.dataset.root", "/y", False, False),
    ("config.decode.warmup", 9, False, False),
    ("config.decode.seed", 9, False, False),
    ("config.link.delay_ms", 9.0, False, False),
    ("config.sampler._target_", "elsewhere.Sampler", False, False),
    ("config.model.path", "/x", False, False),
    ("target.fingerprint", "g", True, False),
    ("target.dtype", "bfloat16", True, False),
    ("target.chat", "d", True, False),
    ("config.model.max_context", 65, True, False),
    ("config.dataset.name", "e", True, False),
    ("config.sampler.temperature", 1.0, True, True),
    ("config.sampler.top_p", 0.9, True, False),
    ("config.decode.max_new_tokens", 10, True, False),
    ("config.link", {"name": "lan", "delay_ms": 1.0}, True, True),
    ("replay", True, True, False),
    ("config.batch", 1, False, False),
    ("config.batch", 4, True, False),
    ("hardware.device", "fridge", False, True),
    ("hardware.instructions", "avx512", False, True),
    ("hardware.cores", 3, False, True),
    ("config.threads", 1, False, True),
    ("config.backend", "graphs", False, True),
    ("config.model.forward", "lean", False, True),
    ("timing", 99, False, True),
    ("target.attention", {"prompt": "flash", "tree": "efficient"}, False, True),
    ("hardware.gpu", {"driver": "570.1", "cudnn": 91002, "power_limit_w": "unknown", "cuda": None}, False, False),
]


@pytest.mark.parametrize(("path", "value", "cell", "machine"), CHANGES)
def test_cells_and_machines_are_named_by_what_determines_counts_and_seconds(path, value, cell, machine):
    first, second = full_header(), changed(path, value)
    assert first != second
    assert (identity.cell_key(first) != identity.cell_key(second)) == cell
    assert (identity.machine_key(first) != identity.machine_key(second)) == machine


def test_a_seed_names_a_cell_where_something_is_drawn_and_an_address_none(tmp_path):
    for path, value in (("config.sampler.temperature", 1.0), ("simulated", True)):
        first, second = changed(path, value), changed(path, value)
        second["config"]["decode"]["seed"] = 9
        assert identity.cell_key(first) != identity.cell_key(second)
    lan = {"name": "lan", "delay_ms": 1.0, "to": None}
    first, second = changed("config.link", lan), changed("config.link", lan | {"to": "tcp://elsewhere:1"})
    assert identity.cell_key(first) == identity.cell_key(second)
    assert identity.cell_key(first) != identity.cell_key(changed("config.link", lan | {"delay_ms": 2.0}))


def test_threads_that_nobody_chose_are_the_machines(tmp_path):
    first, second = changed("config.threads", None), changed("config.threads", None)
    assert identity.machine_key(first) == identity.machine_key(full_header())
    second["hardware"]["threads"] = 1
    assert identity.machine_key(first) != identity.machine_key(second)


def test_a_question_is_known_by_all_its_texts():
    digest = identity.question_digest
    assert len({digest(t) for t in (["a"], ["b"], ["a", "b"], ["b", "a"], ["ab"], [""])}) == 6
    assert digest(("a", "b")) == digest(["a", "b"])


# Summaries -------------------------------------------------------------------------------------------------------------


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
    on = weights(parameters=5, tokens_before=30_000_000, hours_before=4.0)
    entries = [entry("a", first), entry("b", second), entry("a2", first), entry("r", routed), entry("on", on)]
    lines = trainings.cost_lines([*entries, entry("none", {})])
    assert [line[:2] for line in lines] == [["a, a2", "100"], ["b", "7"], ["r", "10"], ["on", "5"]]
    assert lines[2][4:7] == ["20", "4", "1.00"] and lines[3][4:7] == ["10 after 30,000,000", "2", "0.50 after 4.00"]
    assert all_hours(on) == 4.5 and all_hours(first) == 0.5
    assert math.isnan(all_hours(weights(tokens_before=5))) and math.isnan(all_hours({}))
    (seen,) = trainings.tokens_seen([entry("on", on), entry("a", first)])
    assert "on on 30.0 million" in seen and all_tokens(on) == 30_000_010 and all_tokens({}) == 0


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
    from specbench.common import progress

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
