"""Writing a report: links are not followed, a full disk leaves whole files, many cells make no large tables."""

import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from battery import file_size
from fixtures import arm, block, random_row, settings
from test_files import no_figures  # noqa: F401
from test_report import GOLDEN, fill

from specbench.common.errors import SpecBenchError
from specbench.records.rows import Measurement
from specbench.reporting import cells, fastest, figures, overview, sections, study_figures
from specbench.reporting.bundle import Report, Sources
from specbench.reporting.document import Paragraph
from specbench.reporting.overview import Overview


@pytest.fixture
def two_figures(monkeypatch):
    """Drawing takes most of a report's time: files of figures, but not all of them."""
    monkeypatch.setattr(figures, "cost_against_tau", lambda _: None)
    monkeypatch.setattr(figures, "step_alphas", lambda _: None)
    for module in (figures.study_figures, figures.analysis_figures):
        monkeypatch.setattr(module, "draw", lambda *_: {})


def report_of(results: Path) -> Report:
    """With one study, which is fast to read."""
    return Report(Sources(results, studies=GOLDEN / "studies", weights=results))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_report_writes_through_no_link(tmp_path, two_figures):
    disk, results = tmp_path / "disk", tmp_path / "results"
    fill(disk, ["eagle2"], questions=2)
    results.symlink_to(disk)  # as a user does whose results lie on a larger disk
    report_of(results).write()
    written = [name for name in contents(disk) if not name.startswith("m/")]
    assert {"README.md", "report.html", "rows.sha256", "tables/decoding.csv", "figures/speed_up.svg"} <= {*written}
    for number, name in enumerate(written):
        (tmp_path / str(number)).write_text("kept")
        (disk / name).unlink()
        (disk / name).symlink_to(tmp_path / str(number))
    report_of(results).write()
    assert {(tmp_path / str(number)).read_text() for number in range(len(written))} == {"kept"}
    assert not any((disk / name).is_symlink() for name in written)


@pytest.mark.parametrize("folder", ["tables", "figures"])
def test_a_linked_folder_below_the_results_is_refused(tmp_path, two_figures, folder):
    fill(tmp_path / "results", ["eagle2"], questions=2)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "results" / folder).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SpecBenchError, match=f"{folder} is a symbolic link that leads out of .*; remove the link"):
        report_of(tmp_path / "results").write()
    assert not contents(tmp_path / "elsewhere")


def test_on_a_full_disk_every_file_is_the_old_or_the_new_one(tmp_path, two_figures):
    results, reference = tmp_path / "a" / "results", tmp_path / "b" / "results"
    fill(results, ["eagle2"], questions=2)
    report_of(results).write()
    fill(results, ["eagle2", "vanilla"], questions=3, seed=1)
    shutil.copytree(results, reference)
    report, old = report_of(results), contents(results)
    report_of(reference).write()
    new, mixed = contents(reference), 0
    for limit in sorted({len(data) - 1 for name, data in new.items() if not name.startswith("m/")})[::-8]:
        with file_size(limit), pytest.raises(SpecBenchError, match=r"cannot write .*: File too large; "):
            report.write()
        now = contents(results)
        assert not [name for name, data in now.items() if data not in (old.get(name), new.get(name))], limit
        mixed += any(data == new.get(name) != old.get(name) for name, data in now.items())
    assert mixed, "no limit let a part of the files through"


def many(folder, count, shared=False):
    """Cells of one question, each of a drafter of its own. shared: of one prompt set, so that all can be compared."""
    rng = np.random.default_rng(0)
    for i in range(count):
        cell = block(folder, settings(f"a{i}", dataset="d" if shared else f"d{i:03d}"), "d" if shared else f"d{i:03d}")
        for who in ("none", f"a{i}"):
            cell.write(random_row(rng, who, "q")[0])
    return cells.find(folder).entries


def test_tables_of_many_cells_grow_with_their_number_and_say_what_is_left_out(tmp_path, no_figures):  # noqa: F811
    many(tmp_path, 60)
    report = report_of(tmp_path)
    report.write()
    for table in (overview.acceptance(report.view), overview.speeds(report.view)):
        assert len(table.columns) == 1 + overview.MAX_SETTINGS and table.caption.endswith(
            "without 36 datasets with fewer generations"
        )
        assert len(table.lines) == overview.MAX_SETTINGS


def test_of_many_drafters_the_first_are_paired_and_drawn_and_none_is_called_fastest(tmp_path, monkeypatch, no_figures):  # noqa: F811
    drafters = 101
    view = Overview(many(tmp_path, drafters, shared=True))
    group = view.timed(view.first)
    assert len(group) == drafters + 1
    assert len(overview.versus(group)) == overview.MAX_PAIRED * (overview.MAX_PAIRED - 1) // 2
    assert len(figures._fastest(group)) == study_figures.MAX_ARMS + 1
    assert study_figures.left_out(drafters) == "; the first 40 of 101 drafters" and not study_figures.left_out(40)
    notes = [block.text for block in sections._duels(report_of(tmp_path), group) if isinstance(block, Paragraph)]
    assert notes[0].endswith("All pairs of the first 40 drafters: tables/versus.csv.")
    monkeypatch.setattr(fastest, "QUESTIONS", 1)
    assert fastest.fastest(group).reason.startswith("101 drafters: too many for a verdict")
    assert fastest.fastest([*group[:20], *(e for e in group[20:] if e.name == "none")]).best


def test_measurements_of_many_arms_are_read_once(tmp_path):
    names = [f"a{i}" for i in range(1200)]
    cell = block(tmp_path, settings() | {"arms": {name: arm(name) for name in ("none", *names)}})
    cell.write(random_row(np.random.default_rng(0), "none", "q")[0])
    rows = [Measurement(name, "memory", 0, {"peak": float(i)}) for i, name in enumerate(names)]
    source = cells.Source(0, cell.path, "", cell.header, rows)
    begin = time.process_time()
    arms = cells._arm_rows([source])
    found = [cells._measured([own])["memory"] for key, own in arms.items() if key[0] != "none"]
    assert found == [[{"peak": float(i)}] for i in range(len(names))] and time.process_time() - begin < 2
