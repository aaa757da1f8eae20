"""What README and pages for contributors tell to write is written, as it stands there, into a copy of the code, and run."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from command_line import arguments_of, call, train
from conftest import ROOT
from forked import FIXED


def files_of(page):
    """The files that a page tells to write: path -> content."""
    return dict(
        re.findall(r"`((?:drafters|conf)/\w[\w/]*\.(?:py|yaml))`[^\n]*:\n\n```(?:python|yaml)\n(.*?)```", page, re.S)
    )


PAGE = (ROOT / "CONTRIBUTING.md").read_text()
COPYING = files_of((ROOT / "README.md").read_text())
FILES = files_of(PAGE)
TRAINED = files_of((ROOT / "docs" / "drafters.md").read_text())


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of code and configuration, without weights and rows, with the page's files in it."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("specbench", "drafters", "conf"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("weights", "__pycache__"))
    for name, text in (FILES | COPYING | TRAINED).items():
        assert not (folder / name).exists(), name
        (folder / name).write_text(text)
    return folder


def test_the_page_is_short_and_has_all_files():
    assert len(PAGE.splitlines()) <= 120
    assert sorted(name.rpartition("/")[0] for name in FILES) == ["conf/dataset", "conf/study"]


def test_the_readme_has_a_whole_drafter():
    assert sorted(COPYING) == ["conf/drafter/echo.yaml", "drafters/echo.py"]


def test_the_page_on_drafters_has_a_whole_one():
    assert sorted(TRAINED) == ["conf/drafter/recurrent.yaml", "drafters/recurrent.py"]


def specbench(checkout, home, folder, command, *words):
    """Standard output of a command of the copy, on the tests' model; results, prompts and cache lie in `folder`."""
    shutil.copy(home / "mtbench.jsonl", folder / "truthfulqa.jsonl")
    words = arguments_of(home, command, *words)
    if command != "train":
        words += [f"results={folder / 'results'}", f"data.root={folder}", "data.limit=2"]
    environment = {**os.environ, **FIXED, "SPECBENCH_CACHE": str(folder / "cache"), "PYTHONPATH": str(checkout)}
    typed = [sys.executable, "-m", f"specbench.{command}", *words]
    done = subprocess.run(typed, cwd=checkout, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_drafter_of_the_readme_shows_up_in_table_and_report(home, checkout, tmp_path):
    printed = specbench(checkout, home, tmp_path, "run", "drafter=echo", "dataset=truthfulqa")
    (line,) = [line for line in printed.splitlines() if line.startswith("echo ")]
    assert line.split()[-1] == "same"
    report = call(home, "report", f"results={tmp_path / 'results'}", "format=markdown")
    assert report.returncode == 0 and "truthfulqa" in report.stdout and "echo" in report.stdout, report.stderr[-3000:]


def test_a_trained_drafter_of_the_page_learns_and_stays_lossless(home, checkout, tmp_path):
    out = tmp_path / "weights"
    words = [*train(home, "recurrent"), "drafter=recurrent", f"train.out={out}", "train.settings.validation_trees=2"]
    specbench(checkout, home, tmp_path, "train", *words)
    history = json.loads((out / "provenance.json").read_text())["history"]
    assert history[-1]["loss"] < 0.9 * history[0]["loss"] and history[-1]["tree_tau"] > 1
    words = ["drafter=recurrent", f"drafter.weights={out}", "dataset=truthfulqa"]
    lines = specbench(checkout, home, tmp_path, "run", *words).splitlines()
    assert next(line for line in lines if line.startswith("recurrent ")).split()[-1] == "same", lines


def test_its_study_decodes_and_is_judged(home, checkout, tmp_path):
    printed = specbench(checkout, home, tmp_path, "study", "study=echo_lengths")
    assert {line.split()[0] for line in printed.splitlines() if line.startswith(("short ", "long "))} == {"short", "long"}
    assert "A longer draft accepts more" in printed
