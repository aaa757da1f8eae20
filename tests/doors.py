"""The command lines on a tiny model, for the tests: functions to call the doors in the folder of the fixture `home`."""

import os
import signal
import subprocess
import sys
import time

from conftest import ROOT

from specbench.records import read_cell


def command(home, door, *arguments):
    common = [f"model.path={home / 'model'}", "model.name=tiny", "model.wheel=null", "model.dtype=float32"]
    if door == "run":
        common += [f"results={home / 'results'}", f"data.root={home}", "decode.max_new_tokens=12", "threads=1"]
    sweep = [a for a in arguments if a == "-m"]  # Hydra wants it in front
    return [sys.executable, "-m", f"specbench.{door}", *sweep, *common, *(a for a in arguments if a != "-m")]


def environment(home):
    return {**os.environ, "SPECBENCH_CACHE": str(home / "cache"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def run(home, door, *arguments, ok=True):
    done = subprocess.run(
        command(home, door, *arguments), cwd=ROOT, env=environment(home), capture_output=True, text=True, timeout=300
    )
    if ok:
        assert done.returncode == 0, done.stderr[-3000:]
    else:
        lines = [x for x in done.stderr.splitlines() if x.startswith("specbench: ")]
        assert done.returncode != 0 and "Traceback" not in done.stderr, done.stderr[-3000:]
        assert len(lines) == 1, done.stderr[-3000:]
        return lines[0]
    return done.stdout


def start(home, door, *arguments):
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(command(home, door, *arguments), cwd=ROOT, env=environment(home), **quiet)


def weight(home, name):
    return f"drafter.weights={home / 'weights' / name}"


def rows_of(home, drafter):
    found = list((home / "results").rglob(f"{drafter}-*/rows.jsonl"))
    assert len(found) == 1, found
    return read_cell(found[0])


def kill_after_rows(process, results, lines):
    """SIGKILL a run once its first cell has more than so many lines; that cell's path and content."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        found = list(results.rglob("rows.jsonl"))
        if found and found[0].read_bytes().count(b"\n") > lines:
            break
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return found[0], found[0].read_bytes()
