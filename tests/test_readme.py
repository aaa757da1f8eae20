"""What README and `docs/` say: files, targets, commands and the example drafter are tried as they stand."""

import csv
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, make, tiny
from forked import FIXED, ForkedCommand

from specbench.config import listing
from specbench.config.cli import composed, expand_shorthands
from specbench.engine.decode import Limits, decode
from specbench.engine.sampling import Sampler
from specbench.engine.verify import Lossless

README = (ROOT / "README.md").read_text()
PAGES = {path.name: path.read_text() for path in (ROOT / "docs").glob("*.md")}


def commands(page: str) -> list[str]:
    """Lines of code blocks that a shell takes, without their comments."""
    lines = re.findall(r"^    ((?:specbench|make) [^\n]*)", page, re.M)
    return list(dict.fromkeys(re.sub(r"\s+#.*", "", line) for line in lines))


def test_the_readme_fits_one_screen_after_another():
    assert len(README.splitlines()) <= 160
    assert all(len(page.splitlines()) < 200 for page in PAGES.values())
    top = "\n".join(README.splitlines()[:20])
    assert "make bench" in top and "make test" in top and "![" in top


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", *(f"docs/{name}" for name in sorted(PAGES))])
def test_linked_files_exist(name):
    page = ROOT / name
    for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / link).exists(), link


def test_the_benchmark_of_the_readme_is_that_of_the_report():
    with (ROOT / "results" / "tables" / "decoding.csv").open() as table:
        header, *reported = csv.reader(table)
    rows = [line.strip() for line in README.splitlines() if line.startswith("    ") and "ties" in line]
    lines = [re.split(r"\s{2,}", row) for row in rows]
    assert len(header) == 6 and len(lines) > 10
    assert [line for line in reported if line in lines] == lines  # in its order


@pytest.mark.parametrize("command", [c for page in (README, *PAGES.values()) for c in commands(page) if c[:4] == "make"])
def test_makefile_targets_exist(command):
    done = subprocess.run([*shlex.split(command), "-n"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


STUB = """#!/bin/sh
case "$*" in *$FAILS*) code=3 ;; *) code=0 ;; esac
echo "$*" >> words
exit $code
"""


def made(folder, *words, fails="nothing"):
    """Runs the Makefile in a folder, with a stub for Python; the status, and the words of each call."""
    (folder / "python").write_text(STUB)
    (folder / "python").chmod(0o755)
    command = ["make", "-s", "-f", str(ROOT / "Makefile"), "READY=", f"BIN={folder}", *words]
    done = subprocess.run(command, cwd=folder, env={**os.environ, "FAILS": fails}, capture_output=True, text=True)
    return done.returncode, (folder / "words").read_text().splitlines()


@pytest.mark.parametrize("fails", ["nothing", "specbench.study"])
def test_make_bench_reports_whatever_the_study_says_and_returns_its_status(tmp_path, fails):
    (tmp_path / "results" / "local" / "bench" / "smollm2-135m").mkdir(parents=True)
    status, calls = made(tmp_path, "bench", "DRAFTERS=eagle2,hass", fails=fails)
    assert (status == 0) == (fails == "nothing")
    assert [call.split()[1] for call in calls] == ["specbench.study", "specbench.report"]
    assert "arms=[eagle2,hass]" in calls[0] and "model=smollm2-135m" in calls[0]


def test_make_train_ends_at_the_first_training_that_fails(tmp_path):
    chosen = ("train", "TRAIN=coral_router,hass,coral,medusa,eagle2")  # whatever their order
    _, every = made(tmp_path, *chosen)
    assert [call.split()[1] for call in every] == ["specbench.train"] * 5 + ["specbench.report"]
    (tmp_path / "words").unlink()
    status, calls = made(tmp_path, *chosen, fails="drafter=hass")
    assert status != 0 and [call.split("drafter=")[1].split()[0] for call in calls] == ["medusa", "eagle2", "hass"]
    (tmp_path / "words").unlink()
    _, alone = made(tmp_path, "train", "TRAIN=eagle2_router")
    assert len(alone) == 2 and "train=router drafter=eagle2_router" in alone[0]


@pytest.mark.parametrize("command", [c for c in commands(README) if c.startswith("specbench")])
def test_commands_of_the_readme_run(command, home, tmp_path):
    """On the shipped target and drafters, each with one question and a few tokens; FILE and DIR are made here."""
    prompts = "\n".join(re.findall(r'^    (\{"(?:prompt|turns)".*\})$', README, re.M)) + "\n"
    (tmp_path / "own.jsonl").write_text(prompts)
    for name in ("mtbench", "gsm8k"):
        shutil.copy(home / "mtbench.jsonl", tmp_path / f"{name}.jsonl")
    _, entry, *words = shlex.split(command)
    if entry == "list" or "--help" in words:
        done = subprocess.run([sys.executable, "-m", "specbench", entry, *words], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0 and len(done.stdout.splitlines()) > 5, done.stderr
        return
    words = [w.replace("FILE.jsonl", str(tmp_path / "own.jsonl")).replace("DIR", str(home / "model")) for w in words]
    words += ["data.limit=1", "decode.max_new_tokens=4", "memory=0", f"results={tmp_path / 'results'}"]
    words += [f"data.root={tmp_path}"] * (not any(word.startswith("prompts=") for word in words))
    done = ForkedCommand(f"specbench.{entry}", words, ROOT, {**os.environ, **FIXED}, tmp_path).completed()
    assert done.returncode == 0 and "tokens/pass" in done.stdout, done.stderr


@pytest.mark.parametrize("command", [c for page in PAGES.values() for c in commands(page) if c.startswith("specbench")])
def test_options_of_the_pages_are_there(command):
    _, entry, *words = shlex.split(command)
    if entry == "list":
        assert listing.list_text(words)
        return
    words = [word.replace("study=NAME", "study=bench") for word in words]
    first = [word if "[" in word else word.split(",")[0] for word in words if not word.startswith("-")]  # of a sweep
    assert composed(entry, expand_shorthands(first)) is not None


def test_the_drafter_of_the_readme_is_lossless(tmp_path, monkeypatch):
    """Its two files, whole, as a newcomer would write them."""
    code, config = (re.search(rf"```{kind}\n(.*?)```", README, re.S)[1] for kind in ("python", "yaml"))
    (tmp_path / "echo_of_the_readme.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    import echo_of_the_readme

    assert "_target_: drafters.echo.Echo" in config and "name: echo" in config
    target = tiny()
    drafter = echo_of_the_readme.Echo("echo", 4)
    drafter.bind(target)
    prompt, limits = [3, 5, 3, 5, 7, 3], Limits(24, frozenset())
    found = [list(decode(target, one, prompt, limits, Lossless(), Sampler())) for one in (make("none", target), drafter)]
    tokens = [[events[0].token, *(t for step in events[1:] for t in step.tokens)] for events in found]
    assert tokens[0] == tokens[1] and sum(step.drafted > 0 for step in found[1][1:]) > 0


def test_no_path_or_host_of_a_workplace_is_committed():
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    forbidden = re.compile(r"(?<![\w.])/(work|root|home|tmp)/")
    for name in filter(None, files):
        if name.endswith((".py", ".md", ".yaml", ".toml", ".txt", "Makefile")) and name != "tests/test_readme.py":
            assert not forbidden.search((ROOT / name).read_text()), name
