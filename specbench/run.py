"""Door one: decode a dataset with a drafter beside the baseline, and print what came of it.

python -m specbench.run drafter=eagle2 dataset=mtbench
python -m specbench.run -m drafter=none,vanilla,eagle2 dataset=mtbench,humaneval
"""

import sys

import hydra
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig

from specbench import arms, cell, schema, sweep
from specbench.arms import RunOptions as Options
from specbench.assets import require_writable
from specbench.datasets import PromptSet
from specbench.door import CONF, run_door, spoken, sweeping
from specbench.errors import SpecBenchError, visible
from specbench.faults import told
from specbench.metrics import BASELINE
from specbench.records import has_failed
from specbench.reporting import cells, tables


@hydra.main(version_base="1.3", config_path=CONF, config_name="run")
@spoken
def job(config: DictConfig) -> None:
    """One cell. In a sweep a failure is written down where the cell would be, and the next cell begins."""
    place = arms.failure_path(config)
    try:
        schema.check(config, Options)
        arms.settle(config)
        require_writable(arms.folder(config))
        if config.rerun == "failed" and not place.exists() and not _has_failed_rows(config):
            return
        _run(config)
    except Exception as error:
        if not sweeping():
            raise
        failure = arms.failure(config, told(error))
        known = arms.lost(failure.error)  # said once; at the sweep's end all its cells are named
        failure.write(place)
        if not known:
            print(visible(f"specbench: {failure.drafter} on {failure.dataset}: {failure.error}"), file=sys.stderr)
    else:
        place.unlink(missing_ok=True)


def _run(config: DictConfig) -> None:
    torch.set_num_threads(config.threads or torch.get_num_threads())
    prompts: PromptSet = instantiate(config.dataset)
    made = arms.make(config)
    questions = prompts.load()
    target, chat = arms.load(config)
    own = arms.build(config, target, made=made)
    sides = [own] if own.label == BASELINE else [arms.baseline(config, target), own]
    ran = cell.run(config, target, chat, sides, questions)
    path = ran.cell.path
    if config.show:
        tables.show(cells.collect([path]))
    if ran.failed:
        raise SpecBenchError(f"{ran.failed} generations failed; their rows in {path} say why; run again to retry them")
    if ran.unmeasured:
        raise SpecBenchError(f"{ran.unmeasured} measurements failed, named above; run again to retry them")
    arms.require_lossless(ran.cell)


def _has_failed_rows(config: DictConfig) -> bool:
    """Did generations fail in a cell of this very configuration?"""
    return has_failed(arms.folder(config).glob(f"{config.drafter.name}-*/rows.jsonl"), arms.plain(config))


def main() -> None:
    """Run the job or the sweep; exit code 2 if any cell failed."""
    job()
    if sweep.failed:
        lost = sum(map(len, sweep.failed.values()))
        raise SpecBenchError(f"{lost} cells failed, named above; the same command tries them again")


if __name__ == "__main__":
    from specbench import run  # under its own name, by which launchers find it in other processes

    run_door(run.main, "run")
