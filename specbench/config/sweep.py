"""Progress of a sweep, and at its end the table of all cells, the failures, and the exit code.

Hydra calls the callback, which `conf/run.yaml` names, around every job of `-m`. The summary is read from the results
folder, so that jobs in other processes and on other machines (Slurm, Ray) count too.
"""

import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from specbench.common.errors import visible, warn
from specbench.common.io import readable
from specbench.config.cli import selected, words_of
from specbench.records.rows import CellFailure, by_error

# Read by jobs, in this process or another: when the sweep began, how many cells it has, the file of their notes.
BEGUN, CELLS, NOTES = "SPECBENCH_SWEEP_BEGUN", "SPECBENCH_SWEEP_CELLS", "SPECBENCH_SWEEP_NOTES"
COMPLETE = "complete"  # the line of a job that succeeded


class Sweep(Callback):
    """Progress and summary. See Hydra's documentation of callbacks for when each method is called.

    Args:
        show: prints one table of all cells, from the jobs' notes (see `note`), the results folder, and whether to print
            details. It comes from `specbench.reporting`, which this package does not import.
    """

    def __init__(self, show: Callable[[Sequence[Mapping[str, Any]], Path, bool], None]) -> None:
        self.show = show
        self.done, self.seconds = 0, 0.0
        self.varied: set[str] = set()  # options with several values, except those that a cell is named by

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        cells = count_cells(config)
        self.varied = {o.key_or_group for o in _overrides(config) if o.is_sweep_override()} - {"drafter", "dataset"}
        os.environ[BEGUN], os.environ[CELLS] = str(time.time()), str(cells)
        os.environ[NOTES] = str(Path(config.results).absolute() / f".sweep-{os.environ[BEGUN]}.jsonl")
        print(f"sweep: {cells} cells into {config.results}", file=sys.stderr, flush=True)

    def on_job_start(self, config: DictConfig, **_: Any) -> None:
        self.started = time.time()
        if os.environ.get(CELLS) and not OmegaConf.is_missing(config.hydra.job, "num"):  # a job of a sweep
            number = config.hydra.job.num + 1
            left = ""
            if self.done:
                remaining = (int(os.environ[CELLS]) - number + 1) * self.seconds / self.done
                left = f", about {remaining / 60:.0f} min left"
            cell = (
                config.study.title
                if "study" in config
                else f"{selected(config, 'drafter.name')} on {selected(config, 'dataset.name')}"
            )
            overrides = [word for word in words_of(config.hydra) if _option(word) in self.varied]
            name = ", ".join([cell, *overrides])
            print(f"cell {number}/{os.environ[CELLS]}: {visible(name)}{left}", file=sys.stderr, flush=True)

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **_: Any) -> None:
        self.done, self.seconds = self.done + 1, self.seconds + time.time() - self.started
        if os.environ.get(BEGUN) and job_return.status is JobStatus.COMPLETED and job_return.return_value:
            _append(COMPLETE)

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        """Print the table of all cells, the failures, and the number of complete cells.

        A cell is complete if its job noted its success, whatever rows there are. Exits with code 2 if any is not; Hydra
        swallows all exceptions of a callback but `SystemExit`.
        """
        results = Path(config.results)
        complete, notes = _read_notes()
        if notes and config.get("show"):
            self.show(notes, results, bool(config.get("details")))
        begun, cells = float(os.environ.pop(BEGUN)), int(os.environ.pop(CELLS))
        failed = failed_cells(results, begun)
        for error, names in failed.items():
            print(visible(f"FAILED {', '.join(names)}: {error}"), file=sys.stderr)
        count = cells - complete
        minutes = (time.time() - begun) / 60
        done = "complete" if config.get("minutes") is None else "decoded as far as minutes= allows"
        print(f"sweep: {cells - count} of {cells} cells {done}, {minutes:.1f} min", file=sys.stderr, flush=True)
        if count:
            warn(f"{count} cells failed, named above; the same command tries them again")
            sys.exit(2)


def failed_cells(results: Path, since: float) -> dict[str, list[str]]:
    """Names of the cells that failed since a time (seconds since the epoch), by error."""
    paths = [path for path in sorted(results.rglob("*.failed.json")) if path.stat().st_mtime >= since - 1]
    problems: list[str] = []
    failed = by_error(failure for _, failure in readable(paths, CellFailure.read, problems))
    return {**failed, **{problem: ["a cell"] for problem in problems}}


def note(cell: Mapping[str, Any]) -> None:
    """In a sweep, append a description of a job's cell to a file that the sweep's end reads and removes."""
    if os.environ.get(BEGUN):
        _append(json.dumps(cell))


def _append(line: str) -> None:
    path = Path(os.environ[NOTES])
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def _read_notes() -> tuple[int, list[Mapping[str, Any]]]:
    """The number of complete cells, and the notes of all jobs. Their file is removed."""
    path = Path(os.environ.pop(NOTES))
    if not path.exists():
        return 0, []
    lines = path.read_text(encoding="utf-8").splitlines()
    path.unlink()
    return lines.count(COMPLETE), [json.loads(line) for line in lines if line != COMPLETE]


def _option(word: str) -> str:
    """Of `+drafter.nodes=4`: `drafter.nodes`."""
    return str(word).split("=")[0].lstrip("+~")


def _overrides(config: DictConfig) -> list[Override]:
    """The sweep's overrides: of the command line, and of its configuration where the command line has none."""
    task = words_of(config.hydra)
    fixed: Any = OmegaConf.to_container(config.hydra.sweeper.params) if config.hydra.sweeper.params else {}
    typed = set(map(_option, task))
    task += [f"{key}={value}" for key, value in fixed.items() if key not in typed]
    loader = GlobalHydra.instance().config_loader()  # by which `glob(*)` finds what there is
    return list(OverridesParser.create(loader).parse_overrides(task))


def count_cells(config: DictConfig) -> int:
    """The number of jobs of a sweep."""
    return math.prod(sum(1 for _ in o.sweep_string_iterator()) for o in _overrides(config) if o.is_sweep_override())
