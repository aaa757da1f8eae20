"""Tables of what links make of drafters, of several clients, of solved problems: every number from rows counted by hand."""

import numpy as np
import pytest
from fixtures import block, random_row, settings

from specbench.records.rows import LinkUse, Measurement
from specbench.reporting import analysis_tables, cells, links

LINK = {"delay_ms": 10.0, "jitter_ms": 0.0, "mbit": 8.0, "loss": 0.0, "pause_ms": 200.0, "name": "5g", "cut_after": None}


@pytest.fixture
def group(tmp_path):
    """Two arms of one cell over a link of 20 ms and 1 MB a second; of each question one answer."""
    header = settings("eagle2")
    header["config"] = {**header["config"], "link": LINK}
    cell, rng = block(tmp_path, header), np.random.default_rng(0)
    for question in range(4):
        for who in ("none", "eagle2"):
            row, steps = random_row(rng, who, str(question))
            size = 1000 * len(steps)
            row.link = LinkUse({"prompt": 500, "tree": size}, {"last": 2 * size}, len(steps) + 1, 9.0, 7.0, 0, 500, 3.0)
            row.rouge_l = 0.25 * question if who == "none" else None
            row.solved, row.alone = question == 0, [3] * (2 * (who == "eagle2"))
            cell.write(row)
    for repetition in range(3):
        values = {f"{what}_{n}": 10.0 * n + repetition for what in ("together", "slowest", "gain") for n in (1, 2, 8)}
        cell.write(Measurement("eagle2", "clients", repetition, values))
    return cells.collect([cell.path])


def test_a_link_is_predicted_from_what_travelled(group):
    """Three bytes of a thousand a cycle each way together take 3 ms, a round trip 20, the server's pass what is left."""
    entry = next(e for e in group if e.name == "eagle2")
    cycles = sum(len(row.accepted) for row in entry.rows)
    found = links.predicted(entry.rows, links.shape_of(LINK))
    assert found.trips_s == pytest.approx(0.02) and found.line_s == pytest.approx(0.003)
    assert found.server_s == pytest.approx(4 * 4.0 / cycles)
    draft = sum(row.draft_s for row in entry.rows) / cycles
    tau = sum(len(row.tokens) - 1 for row in entry.rows) / cycles
    assert found.tokens_per_s == pytest.approx(tau / (draft + found.server_s + 0.023))
    columns, lines = links.table(group)
    assert [line[0] for line in lines] == [e.name for e in group] and {len(line) for line in lines} == {len(columns)}
    assert f"{found.tokens_per_s:.1f}" in next(line for line in lines if line[0] == "eagle2")


def test_rows_without_a_link_or_cut_off_have_no_line(group):
    for row in (row for e in group for row in e.rows):
        row.link.cut = "broke"
    assert links.table(group)[1] == []
    for row in (row for e in group for row in e.rows):
        row.link = None
    assert links.table(group)[1] == []
    assert links.predicted(group[0].rows, links.shape_of(LINK)) is None


def test_clients_are_medians_in_order_of_their_number(group):
    columns, lines = links.clients(group)
    assert columns[1:4] == ("1 client, all", "2 clients, all", "8 clients, all")
    assert lines == [["eagle2", *["11.0", "21.0", "81.0"] * 2]]


def test_summaries_have_the_mean_of_their_scores(group):
    _, ((name, count, score),) = analysis_tables.summaries(group)
    assert (name, count) == ("none", "4") and score.startswith("0.38")


def test_solved_problems_are_counted_with_what_was_said_alone(group):
    _, lines = analysis_tables.solved(group)
    found = {line[0]: line for line in lines}
    assert found["none"][1] == found["eagle2"][1] == "1 of 4" and found["none"][2].startswith("25.0%")
    tokens = sum(len(row.tokens) for e in group if e.name == "eagle2" for row in e.rows)
    assert found["none"][3] == "0%" and found["eagle2"][3] == f"{8 / (8 + tokens):.0%}"
