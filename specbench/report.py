"""Tables, figures, claims and an HTML page from the rows under a results folder; needs no model.

python -m specbench.report
python -m specbench.report results=results
python -m specbench.report results=results/bench format=markdown
python -m specbench.report training=drafters/weights/smollm2-135m
python -m specbench.report import=answers.jsonl format=spec-bench
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import hydra
from omegaconf import DictConfig

from specbench.common.errors import SpecBenchError, visible
from specbench.common.types import Name, Text
from specbench.config import validation
from specbench.config.cli import CONF, handle_errors, run_cli
from specbench.records.rows import by_error
from specbench.reporting import cells, console, foreign_results, tables, trainings
from specbench.reporting.bundle import Report, Sources
from specbench.reporting.claims import tally


@dataclass(frozen=True)
class Options:
    """What `conf/report.yaml` may say; what each means stands there."""

    results: Text
    show: bool
    format: Literal["terminal", "markdown", "spec-bench", "eagle", "hass"]
    studies: list[Name] | None
    training: Text | None
    import_: Text | None
    baseline: Text | None


@hydra.main(version_base="1.3", config_path=CONF, config_name="report")
@handle_errors
def main(config: DictConfig) -> None:
    """Collect, print, and write the report beside the rows."""
    validation.check(config, Options)
    results = Path(config.results)
    if config["import"] is not None:
        print(foreign_results.markdown(Path(config["import"]), config.format, config.baseline), end="")
        return
    if config.format in foreign_results.CYCLES:
        raise SpecBenchError(f"format={config.format} is of an answer file of that harness; name one with import=FILE")
    problems: list[str] = []
    if config.training is not None:
        lines = trainings.held_out_lines(Path(config.training), problems)
        if not lines:
            raise SpecBenchError(problems[0] if problems else f"no trained weights under training={config.training}")
        print("".join(f"{tables.markdown_problem(p)}\n\n" for p in problems), end="")
        print(tables.markdown_table(trainings.HELD_OUT, lines))
        return
    if config.format == "markdown":
        found = cells.find(results)
        print(tables.markdown(found.entries, found.problems) + "\n" + tables.training_markdown(found.entries), end="")
        return
    report = Report(Sources(results, chosen=config.studies))
    for problem in report.problems:
        print(f"LEFT OUT {visible(problem)}")
    for error, lost in by_error(report.failures).items():
        print(visible(f"FAILED {', '.join(lost)}: {error}"))
    if config.show:
        console.show(report.view.timed(report.view.first) or report.main)
    if any(any(v.effects) for v in report.verdicts):  # nothing is said of studies that were not run
        print("claims: " + ", ".join(f"{count} {kind}" for kind, count in tally(report.verdicts).items()))
    print(f"report: {report.write()}")


if __name__ == "__main__":
    run_cli(main, "report")
