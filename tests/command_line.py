"""The command lines on a tiny model, for the tests: functions to call the commands in the folder of the fixture `home`."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from conftest import ROOT
from forked import FIXED, ForkedCommand

from specbench.records.blocks import NAME, read_block
from specbench.records.rows import QuestionEnd, Row


def arguments_of(home, command, *arguments):
    if command in ("report", "evidence"):
        return list(arguments)  # need no model
    common = [f"model.path={home / 'model'}", "model.name=tiny", "model.wheel=null", "model.dtype=float32"]
    if command in ("run", "study"):
        common += [f"results={home / 'results'}", f"data.root={home}", "decode.max_new_tokens=12", "threads=1", "memory=0"]
    flags = [a for a in arguments if a.startswith("-")]  # Hydra wants them in front
    return [*flags, *common, *(a for a in arguments if a not in flags)]


def environment(home, **more):
    return {**os.environ, "SPECBENCH_CACHE": str(home / "cache"), **FIXED, **more}


def start(home, command, *arguments, **more):
    """A command that runs beside the test; `more` is added to its environment."""
    output = Path(tempfile.mkdtemp(dir=home))
    return ForkedCommand(
        f"specbench.{command}", arguments_of(home, command, *arguments), ROOT, environment(home, **more), output
    )


def call(home, command, *arguments, **more):
    """Exit code, stdout and stderr of a command, whatever came of it."""
    return start(home, command, *arguments, **more).completed()


def run(home, command, *arguments, ok=True, **more):
    """The stdout of a command that must succeed, or the one line with which it must refuse."""
    done = call(home, command, *arguments, **more)
    if ok:
        assert done.returncode == 0 and "a fault of SpecBench" not in done.stderr, done.stderr[-3000:]
        return done.stdout
    lines = [x for x in done.stderr.splitlines() if x.startswith("specbench: ")]
    assert done.returncode != 0 and "Traceback" not in done.stderr, done.stderr[-3000:]
    assert len(lines) == 1, done.stderr[-3000:]
    return lines[0]


def typed(home, command, *arguments):
    """The same in a new interpreter, which takes seconds to import what it needs: once a command is enough."""
    words = [sys.executable, "-m", f"specbench.{command}", *arguments_of(home, command, *arguments)]
    return subprocess.run(words, cwd=ROOT, env=environment(home), capture_output=True, text=True, timeout=300)


def weight(home, name):
    return f"drafter.weights={home / 'weights' / name}"


def blocks_of(results, drafter):
    """Blocks of runs of one drafter, by its label, oldest first."""
    return [path for path in sorted(Path(results).rglob(NAME)) if list(read_block(path)[0]["arms"])[-1] == drafter]


def records_of(results, drafter):
    """Header of the newest block and the records of all blocks of one drafter's runs, but for ends of questions."""
    found = blocks_of(results, drafter)
    assert found, f"no blocks of {drafter} in {results}"
    records = [record for path in found for record in read_block(path)[1] if not isinstance(record, QuestionEnd)]
    return read_block(found[-1])[0], records


def rows_of(home, drafter):
    return records_of(home / "results", drafter)


def wait_for_rows(process, results, lines):
    """Until a run's first block has more than so many lines, or the run is over; that block's path."""
    deadline = time.monotonic() + 120
    found = []
    while time.monotonic() < deadline and process.poll() is None:
        found = list(results.rglob(NAME))
        if found and found[0].read_bytes().count(b"\n") > lines:
            break
        time.sleep(0.01)
    assert found, process.completed().stderr[-3000:]
    return found[0]


def kill_after_rows(process, results, lines):
    """SIGKILL a run once its first block has more than so many lines; that block's path and content."""
    path = wait_for_rows(process, results, lines)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return path, path.read_bytes()


def train(home, name, *more):
    return [
        "drafter=eagle2",
        "threads=1",
        f"train.text.path={home / 'talk.json'}",
        f"train.name={name}",
        f"train.out={home / 'out' / name}",
        "train.batch=4",
        "train.corpus.validation=8",
        "train.corpus.shard=10",
        "train.corpus.answer_tokens=20",
        "train.settings.vocabulary=32",
        "train.settings.epochs=6",
        "train.settings.lr=0.005",
        "train.settings.warmup=0.1",
        "train.settings.checkpoint_minutes=0",
        "train.settings.validation_answers=2",
        *more,
    ]


TWO = """\
title: Two drafters
source: [nowhere]
varies: [tree]
cells:
  - [dataset=mtbench, data.limit=3]
  - [dataset=mtbench, data.limit=6, replay=true]
arms:
  eagle2: {run: [drafter=eagle2, drafter.weights=HOME/weights/eagle2]}
  chain: {run: [drafter=eagle2, tree=chain, drafter.weights=HOME/weights/eagle2]}
claims:
  - {says: trees accept more, source: nowhere, published: more, tests: [{metric: tau, of: eagle2, over: chain, is: more}]}
  - {says: a GPU is fast, source: nowhere, published: more, needs: {device: cuda},
     tests: [{metric: speed_up, of: eagle2, than: 0.01, is: more}]}
"""


def read_rows(path):
    """Header and generations of a block."""
    header, records = read_block(path)
    return header, [r for r in records if isinstance(r, Row)]


def study(home, text, name, *arguments, ok=True):
    folder = home / "conf"
    (folder / "study").mkdir(parents=True, exist_ok=True)
    (folder / "study" / f"{name}.yaml").write_text(text.replace("HOME", str(home)))
    return run(home, "study", f"--config-dir={folder}", f"study={name}", *arguments, ok=ok)
