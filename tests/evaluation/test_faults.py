"""Whatever is raised inside a cell ends as a failure of that cell alone, with its traceback in a file that it names."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from battery import attempt
from hydra.core.global_hydra import GlobalHydra

import specbench.run
from drafters.none import NoDrafter
from specbench.records.blocks import NAME, read_block
from specbench.records.rows import Failure, Row


class Faulty(NoDrafter):
    """Raises what nobody foresaw, in its second cycle."""

    def reset(self, capacity: int) -> None:
        self.cycles = 0

    def propose(self, *arguments: Any) -> Any:
        self.cycles += 1
        return super().propose(*arguments) if self.cycles == 1 else {}["nothing"]


@pytest.fixture
def told(home, tmp_path, monkeypatch):
    """The run command in this process, on the tiny model: its exit code and standard error."""
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))

    def call(*arguments: str) -> tuple[int, str]:
        common = [
            f"model.path={home / 'model'}",
            "model.name=tiny",
            "model.wheel=null",
            "model.dtype=float32",
            "data.limit=2",
        ]
        common += [
            f"results={tmp_path / 'results'}",
            f"data.root={home}",
            "threads=1",
            "show=false",
            "decode.warmup=0",
            "memory=0",
        ]
        sweep = [a for a in arguments if a == "-m"]
        code, err, _ = attempt(specbench.run, "run", *sweep, *common, *(a for a in arguments if a != "-m"))
        return code, err

    yield call
    GlobalHydra.instance().clear()


def traceback_of(line: str) -> str:
    found = re.search(r"its traceback is in (\S+)\)", line)
    assert found, line
    return Path(found[1]).read_text()


def test_a_fault_inside_a_generation_is_its_own_row(told, tmp_path):
    code, err = told(
        "++drafter._target_=test_faults.Faulty", "drafter=none", "++drafter.name=faulty", "decode.max_new_tokens=6"
    )
    assert code == 2 and "Traceback" not in err and "4 generations failed" in err
    (path,) = (tmp_path / "results").rglob(NAME)
    _, rows = read_block(path)
    good, bad = ([r for r in rows if isinstance(r, kind)] for kind in (Row, Failure))
    assert {r.drafter for r in good} == {"none"} and len(good) == 4
    assert {r.drafter for r in bad} == {"faulty"} and len(bad) == 4
    assert all("KeyError" in r.error and "in propose" in traceback_of(r.error) for r in bad)


def test_a_fault_of_one_cell_leaves_the_others_of_a_sweep_alone(told, tmp_path, monkeypatch):
    class Broken(NoDrafter):
        def bind(self, target: Any) -> None:
            raise AttributeError("no such thing")

    monkeypatch.setattr("drafters.vanilla.Vanilla.bind", Broken.bind)
    code, err = told("-m", "drafter=vanilla,none", "decode.max_new_tokens=4")
    assert code == 2 and "Traceback" not in err and "sweep: 1 of 2 cells complete" in err
    (failed,) = (tmp_path / "results").rglob("*.failed.json")
    failure = json.loads(failed.read_text())
    assert (
        failure["drafter"] == "vanilla"
        and "no such thing" in failure["error"]
        and "in bind" in traceback_of(failure["error"])
    )
    (path,) = (tmp_path / "results").rglob(NAME)
    assert list(read_block(path)[0]["arms"]) == ["none"]
    monkeypatch.undo()


@pytest.mark.parametrize("option", ["decode.max_new_tokens=4,-5", "sampler.temperature=0,nan", "threads=1,abc"])
def test_an_unfit_option_of_one_cell_leaves_the_others_of_a_sweep_alone(told, tmp_path, option):
    rest = [o for o in ("drafter=none", "decode.max_new_tokens=4") if o.split("=")[0] != option.split("=")[0]]
    code, err = told("-m", *rest, option)
    assert code == 2 and "Traceback" not in err, err
    assert len(list((tmp_path / "results").rglob("*.failed.json"))) == 1
    assert len(list((tmp_path / "results").rglob(NAME))) == 1


@pytest.mark.parametrize("option", ["model.name=..", "drafter.name=../x", "drafter.name=${nothing}", "dataset.name=null"])
def test_cells_with_names_that_are_none_count_as_failed_inside_the_results(told, tmp_path, option):
    before = set(tmp_path.parent.rglob("*.failed.json"))
    code, err = told("-m", "drafter=none,suffix", option)
    assert code == 2 and "sweep: 0 of 2 cells complete" in err and "Warning" not in err, err
    failures = set(tmp_path.parent.rglob("*.failed.json")) - before
    assert failures and all(path.is_relative_to(tmp_path / "results") for path in failures)


def test_cells_whose_failure_cannot_be_written_count_as_failed(told, tmp_path, monkeypatch):
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("specbench.records.rows.CellFailure.write", full)
    code, err = told("-m", "drafter=none,suffix", "threads=0")
    assert code == 2 and "sweep: 0 of 2 cells complete" in err and "No space left on device" in err


@pytest.mark.parametrize("option", ["drafter=none,null", "drafter=none,eagle9", "decode.nonsense=1,2"])
def test_a_sweep_with_a_cell_that_cannot_be_put_together_is_refused_before_its_first_one(told, tmp_path, option):
    code, err = told("-m", option)
    message = [line for line in err.splitlines() if line.startswith("specbench: ")]
    assert code == 2 and "Traceback" not in err and len(message) == 1 and option.split("=")[0] in message[0]
    assert not list((tmp_path / "results").rglob("*.json*"))
