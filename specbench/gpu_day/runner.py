"""Runs a stage's steps one after the other, and packs what they left after each, so that a kill loses one step at most."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from specbench.common.budget import UNFINISHED
from specbench.common.processes import dying_with_parent
from specbench.common.storage import PROJECT
from specbench.gpu_day import archives
from specbench.gpu_day.stages import Step

GRACE_S = 45.0  # that a step which ends by itself may take beyond its minutes, for loading and its last question
LOG = "steps.jsonl"  # one line for each step that ran: name, exit code, seconds
STOPPED, PAUSED = 124, 75  # codes of steps that were stopped, and that ended in time with something left
OUTCOMES = {0: "done", STOPPED: "stopped", PAUSED: "time over"}


def run(stage: str, steps: Sequence[Step], work: Path, out: Path, options: Sequence[str], minutes: float) -> int:
    """Run the steps that are not done yet, within `minutes`; returns how many are not done.

    A step that fails or is stopped is run again by the next call, and does not keep the others from running.

    Args:
        work: folder of the steps' results; what is in it is gone on with. out: for archives of it, see `archives.write`.
        options: the caller's, passed on to the steps that know them.
    """
    deadline = time.monotonic() + 60 * minutes
    (work / "logs").mkdir(parents=True, exist_ok=True)
    done, planned = finished(work), sum(step.minutes for step in steps)
    for number, step in enumerate(steps, 1):
        left = (deadline - time.monotonic()) / 60
        if step.name in done or left <= 0:
            continue
        share = min(step.minutes * max(1.0, minutes / planned), left)
        print(f"{stage}: step {number} of {len(steps)}, {step.name}, at most {share:.1f} min", file=sys.stderr, flush=True)
        begin = time.monotonic()
        code = _call(step, work, options, share, deadline)
        seconds = round(time.monotonic() - begin, 1)
        outcome = OUTCOMES.get(code, f"exit code {code}")
        print(f"{stage}: {step.name}: {outcome}, {seconds} s", file=sys.stderr, flush=True)
        with (work / LOG).open("a") as log:
            log.write(json.dumps({"step": step.name, "code": code, "seconds": seconds}) + "\n")
        archives.write(work, out, stage)
    missing = [step.name for step in steps if step.name not in finished(work)]
    if missing:
        print(f"{stage}: not done: {', '.join(missing)}; the same command goes on there", file=sys.stderr)
    return len(missing)


def finished(work: Path) -> set[str]:
    """Names of the steps that ended with code 0."""
    if not (work / LOG).is_file():
        return set()
    lines = [json.loads(line) for line in (work / LOG).read_text().splitlines()]
    return {line["step"] for line in lines if line["code"] == 0}


def _call(step: Step, work: Path, options: Sequence[str], minutes: float, deadline: float) -> int:
    """The exit code of a step, or `STOPPED` or `PAUSED`. Its output goes to a file, and the end of that is printed."""
    path = work / "logs" / f"{step.name}.log"
    limit = 60 * minutes + (GRACE_S if step.budget else 0.0)
    with path.open("ab") as log:
        before = log.tell()
        process = subprocess.Popen(
            [sys.executable, *step.command(options, minutes)],
            cwd=PROJECT, stdout=log, stderr=subprocess.STDOUT, env=_environment(), preexec_fn=dying_with_parent(),
        )  # fmt: skip
        try:
            code = process.wait(min(limit, max(1.0, deadline + GRACE_S - time.monotonic())))
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            code = STOPPED
    output = path.read_bytes()[before:].decode(errors="replace")
    print("".join(f"    {line}\n" for line in output.splitlines()[-12:]), end="", flush=True)
    return PAUSED if code == 0 and step.budget and UNFINISHED in output else code


def _environment() -> Mapping[str, str]:
    """This process's, in which nothing is looked for on a network, and output is not held back."""
    return {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
