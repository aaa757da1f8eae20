"""Run a study, one table or figure of a paper, and judge its claims.

python -m specbench.study study=bench
python -m specbench.study study=bench minutes=20                      # whole questions, as long as they fit
python -m specbench.study study=coral_table3 'seeds=[0]'
python -m specbench.study study=bench model=llama2-7b 'arms=[none,eagle2]' 'datasets=[mtbench,gsm8k]'
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from omegaconf import DictConfig, OmegaConf
from pydantic import Field

from specbench.common.budget import UNFINISHED, Budget
from specbench.common.storage import require_writable
from specbench.common.types import Name, Natural, Seed
from specbench.config import validation
from specbench.config.cli import choice, command, run_cli
from specbench.config.run_spec import RunOptions
from specbench.evaluation import study
from specbench.evaluation.study_training import train_missing
from specbench.records.studies import Study
from specbench.reporting import command_output, console

TRAINING_SHARE = 0.75  # of a limited time: what is trained by then is decoded, before the next command trains the rest


@dataclass(frozen=True)
class Options(RunOptions):
    """The options in `conf/study.yaml`, which explains each, beside those of every arm."""

    study: Study
    arms: list[Name] | None
    seeds: Annotated[list[Seed], Field(min_length=1)] | None
    cells: Annotated[list[Natural], Field(min_length=1)] | None
    datasets: Annotated[list[Name], Field(min_length=1)] | None


@command("study")
def main(config: Any) -> None:
    """Train missing drafters, decode missing rows, judge."""
    options, budget = checked(config), Budget.of_minutes(config.minutes)
    require_writable(Path(options["results"]))
    run = study.prepare(choice("study"), options)
    trained = train_missing(run.name, run.members, run.study, run.overrides, budget.part(TRAINING_SHARE))
    torch.set_num_threads(options["threads"] or torch.get_num_threads())
    decoded = study.decode(run, trained, budget, console.live)
    command_output.show_study(run.name, run.study, decoded)
    if budget.seconds is not None and (left := study.unfinished(run, decoded, trained)):
        print(f"{left}; {UNFINISHED}{', without rerun=all' if config.get('rerun') == 'all' else ''}")
    study.require_complete(run, decoded, trained)


def checked(config: DictConfig) -> dict[str, Any]:
    """The command's options, with the study as its file has it. Raises `SpecBenchError`.

    What its overrides leave open (`${…}`) is resolved where they are composed, so that a training has one name
    wherever it is read, see `specbench.records.trainings`.
    """
    return validation.check(config, Options) | {"study": OmegaConf.to_container(config.study, resolve=False)}


if __name__ == "__main__":
    run_cli(main, "study")
