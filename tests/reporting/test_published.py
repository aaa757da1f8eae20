"""The papers' numbers: what the files hold, and which measured number stands beside which published one."""

import csv
import shutil

import pytest
from conftest import ROOT
from test_overview import bench

from specbench.common.errors import SpecBenchError
from specbench.records import studies
from specbench.records.metrics import RATES
from specbench.records.rows import Measurement
from specbench.reporting import cells, published
from specbench.reporting.bundle import Report, Sources
from specbench.reporting.evidence import Evidence

PUBLISHED = published.load(ROOT / "results" / "published")


def test_published_cells_are_unique_and_their_words_are_known():
    assert not PUBLISHED.duplicated(["paper", "table", "row", "column"]).any()
    assert len(PUBLISHED) > 1500
    assert set(PUBLISHED["tau_convention"]) <= {"", "bonus included", "unknown"}
    taus = PUBLISHED[PUBLISHED["metric"] == "tau"]
    assert (taus["tau_convention"] != "").all() and (taus["number"] >= 1).all()
    shares = PUBLISHED[PUBLISHED["metric"].str.fullmatch(r"\d-alpha|alpha")]
    assert shares["number"].between(0, 1).all()


def test_printed_means_agree_with_their_cells_or_say_that_they_do_not():
    keys = ["paper", "table", "row", "target", "drafter", "variant", "temperature", "metric"]
    checked = 0
    for _, part in PUBLISHED.groupby(keys, sort=False):
        means = part[part["dataset"] == "mean"]
        parts = part[(part["dataset"] != "mean") & (part["dataset"] != "")]
        for mean in means.itertuples():
            assert len(parts) > 1, mean
            if "differs" in mean.note or "truncated" in mean.note:
                assert abs(parts["number"].mean() - mean.number) > 0.004, f"agrees after all: {mean}"
            else:
                assert abs(parts["number"].mean() - mean.number) <= 0.0101, mean
            checked += 1
    assert checked > 60


def test_suspect_cells_carry_a_note():
    ours = PUBLISHED[(PUBLISHED.paper == "moa") & (PUBLISHED.table == "Table 2") & (PUBLISHED.drafter == "moa")]
    same = ours[ours.dataset.isin(["mtbench", "gsm8k"])]
    assert len(same) == 12 and same.note.str.contains("identical").all()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a,b\n1,2\n", "columns must be"),
        (",".join(published.FIELDS) + "\n" + "x," * 7 + ",x,,x,fast,,,\n", "line 2: value: .*, not 'fast'"),
        (",".join(published.FIELDS) + "\n" + "x," * 7 + "k3,x,,x,1,,,\n", "line 2: variant: .*, not 'k3'"),
        (",".join(published.FIELDS) + "\nx,y\n", "line 2: 2 values in 15 columns"),
    ],
)
def test_damaged_published_numbers_are_named(tmp_path, content, message):
    (tmp_path / "x.csv").write_text(content)
    with pytest.raises(SpecBenchError, match=message):
        published.load(tmp_path)


# What stands beside them ---------------------------------------------------------------------------------------------


def paper(folder, *lines, target="llama3-8b", table="Table 1"):
    """A published table of lines (row, column, dataset, temperature, metric, value); a row is a drafter's, on `target`
    unless it names one: `EAGLE on llama2-7b`."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{table}.csv").open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(published.FIELDS)
        for row, column, dataset, temperature, metric, value in lines:
            drafter, _, own = row.partition(" on ")
            about = ["x", table, row, column, "A100", own or target, drafter, "", dataset, temperature, metric, value]
            out.writerow([*about, "", "bonus included" if metric == "tau" else "", ""])
    return published.load(folder)


def study(**shown):
    """A study with arms a and b that shows these published drafters of the table."""
    arms = {name: {"run": ["drafter=eagle2"]} for name in ("a", "b")}
    shows = [{"paper": "x", "table": "Table 1", "arms": shown}]
    return {"title": "x", "source": ["x"], "cells": [["dataset=mtbench"]], "arms": arms, "shows": shows}


@pytest.fixture
def measured(tmp_path):
    """Entries of study s: two datasets, one of them warm and replayed as well, and memory."""
    cell = bench(tmp_path / "s", {"a": 2.0, "b": 1.5}, study="s")
    for repetition, peak in enumerate((3, 1, 2, 2, 9)):
        cell.write(Measurement("a", "memory", repetition, {"peak": peak * 2**30, "kv": 0}))
    bench(tmp_path / "s", {"a": 3.0, "b": 1.0}, study="s", dataset="gsm8k", seed=1)
    bench(tmp_path / "s", {"a": 2.5, "b": 1.0}, study="s", temperature=1.0, cell="decode-2", seed=2)
    bench(tmp_path / "s", {"a": 2.0, "b": 1.5}, study="s", replay=True, cell="replay-1", questions=24, seed=3)
    return cells.find(tmp_path).entries


def beside(entries, numbers, spec):
    problems = []
    known = {"s": Evidence(spec, entries)}
    (table,) = published.tables(numbers, known, problems)
    return table, problems


def value(entries, name, metric, dataset="mtbench", temperature=0.0, replayed=False):
    wanted = name, dataset, temperature, replayed
    (e,) = (e for e in entries if (e.name, e.dataset, e.temperature, e.replayed) == wanted)
    return pytest.approx(float(RATES[metric](e.totals.pooled)))


def test_a_measured_number_stands_beside_the_row_that_the_study_names(tmp_path, measured):
    numbers = paper(
        tmp_path / "p",
        ("EAGLE", "tau", "mtbench", "0", "tau", "4.1"),
        ("EAGLE", "speed", "mtbench", "0", "speed_up", "3.0"),
        ("EAGLE", "tok/s", "mtbench", "", "tokens_per_s", "99"),
        ("EAGLE", "alpha", "", "", "alpha", "0.8"),
        ("EAGLE", "0-alpha", "mtbench", "0", "0-alpha", "0.8"),
        ("EAGLE", "M", "mtbench", "0", "memory_gb", "13.5"),
        ("EAGLE", "size", "", "", "parameters", "250"),
        ("EAGLE", "T=1", "mtbench", "1", "tau", "3.9"),
        ("EAGLE", "GSM8K", "gsm8k", "0", "tau", "4.0"),
        ("EAGLE", "HumanEval", "humaneval", "0", "tau", "4.4"),
        ("HASS", "tau", "mtbench", "0", "tau", "4.5"),
    )
    table, problems = beside(measured, numbers, study(EAGLE="a", **{"EAGLE; column=T=1": "b"}))
    row = {column: pair.measured for column, pair in table.cells["EAGLE"].items()}
    assert not problems and {pair.published for pair in table.cells["EAGLE"].values()} >= {"4.1", "13.5", "250"}
    assert row["tau"] == value(measured, "a", "tau", replayed=True), "of acceptance the replayed rows, which are more"
    assert row["speed"] == value(measured, "a", "speed_up") and row["tok/s"] == value(measured, "a", "tokens_per_s")
    assert row["alpha"] == value(measured, "a", "alpha", replayed=True), "without a dataset it is the study's own"
    assert row["0-alpha"] == value(measured, "a", "alpha0", replayed=True)
    assert row["M"] == 2.0, "the median of the peaks, in GiB"
    assert row["T=1"] == value(measured, "b", "tau", temperature=1.0), "the key with more parts counts"
    assert row["GSM8K"] == value(measured, "a", "tau", dataset="gsm8k")
    assert row["size"] is row["HumanEval"] is None and table.cells["HASS"]["tau"].measured is None
    where = "m on toaster, 1 cores, torch 2, float32; 12 to 24 questions"
    assert table.targets == f"published: llama3-8b on A100; measured here: {where}"
    assert table.cells["EAGLE"]["tau"].source == "a: mtbench, 24 generations, replayed"
    heads, lines = list(zip(*table.heads[:2], strict=True)), {line[0]: line for line in table.lines()}
    assert lines["EAGLE"][heads.index(("M", "measured"))] == "2.00"
    assert [lines["HASS"][heads.index(("tau", side))] for side in ("measured", "published")] == ["", "4.5"]


@pytest.mark.parametrize(
    ("shown", "expected"), [({}, "EAGLE on vicuna-7b"), ({"beside": "llama2-7b"}, "EAGLE on llama2-7b")]
)
def test_published_rows_follow_the_measured_target(tmp_path, measured, shown, expected):
    lines = [(f"EAGLE on {t}", "tau", "mtbench", "0", "tau", "4.1") for t in ("vicuna-7b", "llama2-7b")]
    spec = study(EAGLE="a")
    spec["shows"][0] |= shown
    table, _ = beside(measured, paper(tmp_path / "p", *lines), spec)
    assert [row for row, line in table.cells.items() if line["tau"].measured] == [expected]
    assert not table.cells[expected]["tau"].alike, "marked: another target"
    own = ("EAGLE on m", "tau", "mtbench", "0", "tau", "4.1")
    table, _ = beside(measured, paper(tmp_path / "p", *lines, own), spec)
    assert [row for row, line in table.cells.items() if line["tau"].measured] == ["EAGLE on m"]
    assert table.cells["EAGLE on m"]["tau"].alike and "published: m on A100" in table.targets
    others = [*lines, ("HASS on m", "tau", "mtbench", "0", "tau", "4.1")]
    table, _ = beside(measured, paper(tmp_path / "p", *others), spec)
    assert table.measured == 0, "the table has the target, but not this drafter on it"


def test_a_number_without_a_data_set_stands_beside_the_mean_over_the_studys(tmp_path, measured):
    spec = {**study(EAGLE="a"), "cells": [["dataset=mtbench"], ["dataset=gsm8k"]]}
    table, _ = beside(measured, paper(tmp_path / "p", ("EAGLE", "tau", "", "", "tau", "4.9")), spec)
    own = [float(RATES["tau"](e.totals.pooled)) for e in measured if e.name == "a" and e.temperature == 0]
    pair = table.cells["EAGLE"]["tau"]
    assert len(own) == 3 and pair.measured == pytest.approx((own[1] + own[2]) / 2), "replayed where there is a replay"
    assert pair.source == "mean of mtbench, gsm8k"


def test_a_mean_is_of_the_rows_datasets_if_all_were_measured(tmp_path, measured):
    lines = [
        ("EAGLE", "MT", "mtbench", "0", "speed_up", "3.0"),
        ("EAGLE", "GSM", "gsm8k", "0", "speed_up", "3.0"),
        ("EAGLE", "Mean", "mean", "0", "speed_up", "3.0"),
    ]
    table, _ = beside(measured, paper(tmp_path / "p", *lines), study(EAGLE="a"))
    both = [table.cells["EAGLE"][c].measured for c in ("MT", "GSM")]
    assert table.cells["EAGLE"]["Mean"].measured == pytest.approx(sum(both) / 2)
    more = [*lines, ("EAGLE", "HE", "humaneval", "0", "speed_up", "3.0")]
    table, _ = beside(measured, paper(tmp_path / "p", *more), study(EAGLE="a"))
    assert table.cells["EAGLE"]["Mean"].measured is None


def test_n_alphas_are_of_chains_alone(tmp_path):
    trees = {"a": {"growth": {"_target_": "x.grow.Dynamic"}}, "b": {"growth": {"_target_": "x.grow.Chain"}}}
    bench(tmp_path / "s", {"a": 2.0, "b": 1.5}, study="s", options=trees)
    found = cells.find(tmp_path).entries
    numbers = paper(tmp_path / "p", ("A", "0", "", "", "0-alpha", "0.8"), ("B", "0", "", "", "0-alpha", "0.8"))
    table, _ = beside(found, numbers, study(A="a", B="b"))
    assert table.cells["A"]["0"].measured is None and table.cells["B"]["0"].measured == value(found, "b", "alpha0")


def test_a_row_that_no_table_has_is_named(tmp_path, measured):
    numbers = paper(tmp_path / "p", ("EAGLE", "tau", "mtbench", "0", "tau", "4.1"))
    table, problems = beside(measured, numbers, study(EAGLE="a", EAGEL="b"))
    assert table.measured == 1
    assert problems == ["study s shows x Table 1 EAGEL, which is not among the published numbers"]


def test_rows_of_another_study_stand_beside_nothing(tmp_path, measured):
    numbers = paper(tmp_path / "p", ("EAGLE", "tau", "mtbench", "0", "tau", "4.1"))
    (table,) = published.tables(numbers, {"s": Evidence(study(EAGLE="a"), [])})
    assert not table.measured and not table.study and table.csv_heads == [["row", "tau"]]
    again = {name: Evidence(study(EAGLE="a"), measured) for name in ("s", "t")}
    assert [t.slug for t in published.tables(numbers, again)] == ["x-table-1", "x-table-1-t"]


def test_what_the_committed_studies_show_is_published():
    problems = []
    published.tables(PUBLISHED, {name: Evidence(one, []) for name, one in studies.load().items()}, problems)
    assert problems == []


def test_every_task_of_spec_bench_is_a_cell_and_meets_its_published_column():
    asked = {one.dataset for one in studies.cell_options(studies.load()["spec_bench"])}
    table = PUBLISHED[(PUBLISHED["paper"] == "spec-bench") & (PUBLISHED["metric"] == "speed_up")]
    assert asked == set(table["dataset"]) - {"spec-bench"} and len(asked) == 6


def test_the_report_pairs_measured_and_published_and_lists_the_rest(tmp_path, monkeypatch):
    monkeypatch.setattr("specbench.reporting.bundle.figures.draw_all", lambda *_: {})
    bench(tmp_path / "r" / "s", {"a": 2.0, "b": 1.5}, study="s")
    paper(tmp_path / "p", ("EAGLE", "tau", "mtbench", "0", "tau", "4.1"))
    paper(tmp_path / "p", ("EAGLE", "tau", "mtbench", "0", "tau", "4.9"), table="Table 2")
    paper(tmp_path / "same", ("EAGLE", "tau", "mtbench", "0", "tau", "4.1"), target="m")
    (tmp_path / "studies").mkdir()
    (tmp_path / "studies" / "s.yaml").write_text(
        "title: Trees\nsource: [here]\ncells: [[dataset=mtbench]]\narms: {a: {run: [drafter=eagle2]}}\n"
        "shows: [{paper: x, table: Table 1, arms: {EAGLE: a}}]\n"
    )
    (tmp_path / "studies" / "gpu.yaml").write_text(
        "title: Needs\nsource: [there]\nneeds: {device: cuda}\ncells: [[dataset=mtbench]]\n"
        "arms: {a: {run: [drafter=eagle2]}}\n"
    )
    found = Report(Sources(tmp_path / "r", published=tmp_path / "p", studies=tmp_path / "studies"))
    page, readme = found.write().read_text(), (tmp_path / "r" / "README.md").read_text()
    tau = f"{found.papers[0].cells['EAGLE']['tau'].measured:.2f}"
    file = (tmp_path / "r" / "tables" / "x-table-1.md").read_text()
    assert f"| EAGLE | {tau} / another target |" in file and "| EAGLE | 4.1 |" in file, "all that was published is there"
    assert "](tables/x-table-1.md)" in readme and "](papers.md)" in readme and "4.1" not in readme
    assert "- [x, Table 2](tables/x-table-2.md)" in (tmp_path / "r" / "papers.md").read_text()
    assert f'>{tau} <span class="beside">/ another target</span></td>' in page and "tables/x-table-2.md" in page
    assert "published: llama3-8b on A100; measured here: m on toaster" in page
    same = Report(Sources(tmp_path / "r", published=tmp_path / "same", studies=tmp_path / "studies")).write().read_text()
    assert f'>{tau} <span class="beside">/ 4.1</span></td>' in same, "of the same target both are shown"
    (tmp_path / "studies" / "s.yaml").unlink()
    shutil.rmtree(tmp_path / "r" / "tables")
    Report(Sources(tmp_path / "r", published=tmp_path / "p", studies=tmp_path / "studies")).write()
    assert not (tmp_path / "r" / "tables" / "x-table-1.md").exists(), "nothing of any paper was measured"
    assert "Papers" not in (tmp_path / "r" / "README.md").read_text()
