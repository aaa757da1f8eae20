"""Sweeps: complete cells stay, failed ones are visible and come again, a kill loses nothing, two at once do no harm."""

import json

import pytest
from command_line import blocks_of, call, kill_after_rows, records_of, start, typed

from specbench.records import blocks
from specbench.records.rows import Failure
from specbench.reporting import cells


def sweep(home, results, *arguments, drafters="vanilla,eagle2", weights=None, by=call):
    folder = weights or home / "weights"
    return by(home, "run", "-m", f"drafter={drafters}", *_common(folder, results), *arguments)


def _common(weights, results):
    return f"drafter.weights={weights}/${{drafter.name}}", f"results={results}", "data.limit=2", "show=false"


def rows(results, drafter):
    """The newest block of a drafter's runs, and the rows of all of them."""
    return blocks_of(results, drafter)[-1], records_of(results, drafter)[1]


def test_a_failed_cell_is_a_visible_row_and_comes_again(home, tmp_path):
    weights, results = tmp_path / "weights", tmp_path / "results"
    weights.mkdir()
    (weights / "eagle2").symlink_to(home / "weights" / "eagle2")
    done = sweep(home, results, weights=weights)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    lines = done.stderr.splitlines()
    assert any(x.startswith("sweep: 2 cells") for x in lines) and any(x.startswith("cell 2/2") for x in lines)
    summary = [x for x in lines if x.startswith(("FAILED", "sweep: 1 of 2"))]
    assert summary[0].startswith("FAILED vanilla on mtbench (tiny): no drafter weights") and len(summary) == 2
    (failure,) = results.rglob("*.failed.json")
    assert json.loads(failure.read_text())["drafter"] == "vanilla"
    before, _ = rows(results, "eagle2")
    stamp = before.stat().st_mtime_ns

    (weights / "vanilla").symlink_to(home / "weights" / "vanilla")
    again = sweep(home, results, weights=weights)
    assert again.returncode == 0, again.stderr[-2000:]
    assert not list(results.rglob("*.failed.json")), "a corrected failure still stands there"
    assert len(rows(results, "vanilla")[1]) == 8
    assert before.stat().st_mtime_ns == stamp, "a complete cell was touched"


def test_cells_of_a_sweep_are_announced_by_what_differs(home, tmp_path):
    words = "decode.max_new_tokens=4,6", "data.limit=1"
    done = sweep(home, tmp_path, *words, drafters="eagle2")
    lines = [line.split(", about")[0] for line in done.stderr.splitlines() if line.startswith("cell ")]
    assert lines == [f"cell {n}/2: eagle2 on mtbench, decode.max_new_tokens={tokens}" for n, tokens in ((1, 4), (2, 6))]


def test_rerun_all_measures_anew_into_another_block(home, tmp_path):
    assert sweep(home, tmp_path, drafters="eagle2").returncode == 0
    path, first = rows(tmp_path, "eagle2")
    assert sweep(home, tmp_path, "rerun=all", drafters="eagle2").returncode == 0
    again, both = rows(tmp_path, "eagle2")
    second = both[len(first) :]
    assert again != path and [r.tokens for r in second] == [r.tokens for r in first]
    assert [r.decode_s for r in second] != [r.decode_s for r in first]
    (entry,) = [e for e in cells.collect(blocks.below(tmp_path)) if e.name == "eagle2"]
    assert [r.decode_s for r in entry.rows] == [r.decode_s for r in second if r.drafter == "eagle2"], "the newest count"


def test_a_killed_sweep_goes_on_at_its_next_prompt(home, tmp_path):
    arguments = [*_common(home / "weights", tmp_path), "data.limit=12", "decode.max_new_tokens=60"]
    process = start(home, "run", "-m", "drafter=eagle2,vanilla", *arguments)
    path, before = kill_after_rows(process, tmp_path, 4)
    done = sweep(home, tmp_path, "data.limit=12", "decode.max_new_tokens=60", drafters="eagle2,vanilla")
    assert done.returncode == 0, done.stderr[-2000:]
    assert path.read_bytes() == before
    for drafter in ("eagle2", "vanilla"):
        keys = [r.key for r in rows(tmp_path, drafter)[1] if r.drafter == drafter]
        assert len(keys) == len(set(keys)) == 12 * 2


def test_two_sweeps_at_once_measure_everything_once(home, tmp_path):
    arguments = [*_common(home / "weights", tmp_path), "data.limit=6"]
    both = [start(home, "run", "-m", "drafter=eagle2,vanilla", *arguments) for _ in range(2)]
    assert [p.wait(timeout=400) for p in both] == [0, 0]
    for drafter in ("eagle2", "vanilla"):
        found = rows(tmp_path, drafter)[1]
        keys = [r.key for r in found]
        assert len(keys) == len(set(keys)) == 6 * 2 * 2 and not any(isinstance(r, Failure) for r in found)


@pytest.mark.parametrize("launcher", ["submitit_local", "ray"])
def test_launchers_work_in_their_local_modes(home, tmp_path, launcher):
    arguments = {
        "submitit_local": ["hydra.launcher.timeout_min=5", f"hydra.launcher.submitit_folder={tmp_path / 'log'}"],
        "ray": ["+hydra.launcher.ray.init.num_cpus=2", "+hydra.launcher.ray.init.include_dashboard=false"],
    }[launcher]
    # A launcher pickles the job by value with all it refers to: only a new interpreter has what a user's has, and no more.
    done = sweep(home, tmp_path / "results", f"hydra/launcher={launcher}", *arguments, by=typed)
    assert done.returncode == 0, done.stderr[-3000:]
    for drafter in ("eagle2", "vanilla"):
        assert len(rows(tmp_path / "results", drafter)[1]) == 8
    assert "sweep: 2 of 2 cells complete" in done.stderr
