"""Decode a dataset with a drafter beside the baseline, and print the results.

python -m specbench.run drafter=eagle2 dataset=mtbench
python -m specbench.run 'drafter=[suffix,eagle2]' dataset=mtbench     # in one process, beside one baseline
python -m specbench.run -m drafter=none,vanilla,eagle2 dataset=mtbench,humaneval
python -m specbench.run drafter=suffix prompts=FILE.jsonl
"""

from typing import Any

from specbench.common.storage import require_writable
from specbench.config import run_spec
from specbench.config.cli import command, run_cli
from specbench.config.run_spec import RunOptions as Options
from specbench.evaluation import arms, cell, run
from specbench.records.metrics import BASELINE
from specbench.reporting import command_output, console


def main() -> None:
    """Run the job, or the jobs of a sweep one after the other, which share the known properties of targets."""
    reused = arms.Reused()

    @command("run")
    def job(config: Any) -> None:
        with run.failure_recorded(config):
            decode(config, reused)

    job()


def decode(config: Any, reused: arms.Reused) -> None:
    """Decode one cell, print its table, and fail if any of its generations did."""
    spec = run_spec.from_config(config, Options)
    require_writable(spec.folder)
    specs = [spec, *run.other_specs(config)]
    result = run.decode(specs, reused, console.live)
    command_output.show_run(spec, result)
    if spec.minutes is not None and (result.left or result.waiting):
        drafters = [label for label in result.ledger.arms if label != BASELINE] or [BASELINE]
        print(f"{', '.join(drafters)}: {cell.progress([result])}")
    run.require_complete(result)


if __name__ == "__main__":
    from specbench.run import main as imported  # launchers import it by this name in other processes

    run_cli(imported, "run")
