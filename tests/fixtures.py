"""Made-up drafters, headers, rows and cells: the one place that knows what a header holds and where blocks lie."""

import itertools
import time
from pathlib import Path

from specbench.engine.interface import Step
from specbench.records.blocks import Block, Ledger
from specbench.records.identity import DECODING, SPEEDS, question_digest
from specbench.records.rows import Row
from specbench.records.schema import SCHEMA


def arm(name="eagle2", **more):
    """A drafter's part of a header."""
    known = {"drafter": {"name": name}, "parameters": 10, "passes": 6, "lossy": False, "weights": {}}
    return known | ({"parameters": 0, "passes": 0} if name == "none" else {}) | more


def settings(*drafters, dataset="d", **more):
    """A header such as the commands write, of some drafters beside the baseline."""
    config = {"model": {"name": "m"}, "dataset": {"name": dataset}, "sampler": {"temperature": 0.0}}
    return {
        "config": config,
        "target": {"dtype": "float32", "parameters": 100},
        "arms": {name: arm(name) for name in ("none", *drafters)},
        "versions": {"torch": "2"},
        "hardware": {"device": "toaster", "cores": 1},
        **more,
    }


SETTINGS = settings("eagle2")


def random_row(rng, drafter="eagle2", question="q", turn=0):
    """A row made of random cycles, the last one cut as the loop cuts it, and its steps."""
    row = Row(drafter, question, "c", turn, 5, [1], 0.5, 0.0, text=question_digest([question]))
    steps = []
    for i in range(int(rng.integers(1, 9))):
        drafted = 0 if drafter == "none" else int(rng.integers(1, 5))
        accepted = int(rng.integers(0, drafted + 1))
        if i > 6:
            drafted = accepted
        times = rng.random(4)
        ranks, nodes = [0] * accepted, 9 * (drafter != "none")
        steps.append(Step([7] * (accepted + 1), nodes, drafted, accepted, ranks, drafted, *times))  # a pass a level
        row.add(steps[-1])
    row.decode_s = row.draft_s + row.target_s + row.verify_s + row.rest_s
    return row, steps


def whole(header):
    """A header with what `Block` adds to it, as it stands in a file."""
    known = {"kind": "header", "schema": SCHEMA, "started": "2026-01-01T00:00:00Z"}
    return known | {"decoding": DECODING, **SPEEDS} | header


_seconds = itertools.count()


def block(results: Path, header, cell="d-greedy") -> Block:
    """A new block of a cell of the model `m`, as a process that measures begins one, later than those before."""
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(1.7e9 + next(_seconds)))
    return Block(results / "m" / cell, {"started": started, **header})


def block_path(folder: Path, number=0) -> Path:
    """Where a block may lie that a test writes by hand."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"2026-01-01T000000-toaster-{number:06x}.jsonl"


def ledger(folder: Path, header, timed=True, **more) -> Ledger:
    """What lies in a cell's folder, for a process that goes on with it. more: see `Ledger`."""
    return Ledger(folder, header, "none", timed, **more)
