"""Energy a token and clocks, of made-up rows of a GPU."""

from dataclasses import replace

import fixtures
import numpy as np
import pytest

from specbench.records.rows import GpuUse
from specbench.reporting import cells, document, energy, sections
from specbench.reporting.bundle import Report, Sources

RATIO = "ratio to plain [95%]"


def rows_of(drafter, uses):
    rng = np.random.default_rng(3)
    made = [fixtures.random_row(rng, drafter, f"q{i}")[0] for i in range(len(uses))]
    return [replace(row, gpu=use) for row, use in zip(made, uses, strict=True)]


@pytest.fixture
def entries(tmp_path):
    """Of plain decoding and two drafters, whose rows hold what a driver may say: everything, or nothing."""
    block = fixtures.block(tmp_path, fixtures.settings("eagle2", "quiet"))
    plain = rows_of("none", [GpuUse(30.0, 1980, [], 0), GpuUse(50.0, 1980, [], 0)])
    eagle = rows_of("eagle2", [GpuUse(10.0, 1755, ["software power cap"], 0), GpuUse(14.0, 1980, [], 1)])
    quiet = rows_of("quiet", [GpuUse(), GpuUse()])
    for row in (*plain, *eagle, *quiet):
        block.write(row)
    found = {e.name: e for e in cells.collect([block.path])}
    return tmp_path, found, {"none": plain, "eagle2": eagle, "quiet": quiet}


def tokens(rows):
    return sum(len(row.tokens) for row in rows)


def test_energy_is_pooled_over_tokens_and_compared_with_plain_decoding(entries):
    _, found, rows = entries
    table = {line[0]: dict(zip(energy.COLUMNS, line, strict=True)) for line in energy.lines(list(found.values()))}
    own, plain = 24.0 / tokens(rows["eagle2"]), 80.0 / tokens(rows["none"])
    eagle = table["eagle2"]
    assert eagle["J a token"] == f"{own:.2f}" and eagle[RATIO] == f"{own / plain:.2f}"
    assert eagle["SM clock, MHz"] == "1,868 (1,755 to 1,980)" and eagle["other processes"] == "1"
    assert eagle["clock lowered in answers by"] == "software power cap (1 of 2)"
    assert table["none"][RATIO] == "1.00" and table["none"]["SM clock, MHz"] == "1,980"
    assert table["none"]["clock lowered in answers by"] == "nothing"


def test_the_ratio_of_energies_has_an_interval_over_questions(tmp_path):
    block = fixtures.block(tmp_path, fixtures.settings("eagle2"))
    uses = [GpuUse(joules, 1980, [], 0) for joules in (10.0, 14.0, 9.0, 20.0, 11.0, 16.0, 12.0, 15.0)]
    rows = {name: rows_of(name, uses) for name in ("none", "eagle2")}
    for row in (*rows["none"], *rows["eagle2"]):
        block.write(row)
    table = {line[0]: line[2] for line in energy.lines(cells.collect([block.path]))}
    value, low, high = (float(part.strip("[,]")) for part in table["eagle2"].split())
    assert low < value < high and value == pytest.approx(tokens(rows["none"]) / tokens(rows["eagle2"]), abs=0.005)
    assert table["none"] == "1.00"


def test_what_the_driver_does_not_say_is_no_zero(entries):
    _, found, _ = entries
    (line,) = energy.lines([found["quiet"]])
    assert line[1:] == ["-", "-", "-", "unknown", "unknown"]


def test_the_report_has_the_table_where_rows_hold_it_and_not_elsewhere(entries, tmp_path_factory):
    folder, _, _ = entries
    assert "J a token" in found_tables(folder)["tables/energies"].columns
    other = tmp_path_factory.mktemp("cpu")
    block = fixtures.block(other, fixtures.settings("eagle2"))
    for row in (*rows_of("none", [None, None]), *rows_of("eagle2", [None, None])):
        block.write(row)
    assert energy.lines(cells.collect([block.path])) == []
    assert "tables/times" in found_tables(other) and "tables/energies" not in found_tables(other)


def found_tables(folder):
    """The tables of a report's linked pages."""
    return document.tables([part for section in sections.sections(Report(Sources(folder))) for part in section.blocks])
