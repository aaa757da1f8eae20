"""Tables, figures, claims and an HTML page from the rows under a results folder; needs no model.

python -m specbench.report
python -m specbench.report results=results
python -m specbench.report results=results/bench format=markdown
python -m specbench.report training=drafters/weights/smollm2-135m
python -m specbench.report import=answers.jsonl format=spec-bench
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from specbench.common.errors import SpecBenchError
from specbench.common.types import Name, Text
from specbench.config import validation
from specbench.config.cli import command, run_cli
from specbench.reporting import command_output, foreign_results
from specbench.reporting.bundle import Report, Sources


@dataclass(frozen=True)
class Options:
    """The options in `conf/report.yaml`, which explains each."""

    results: Text
    show: bool
    format: Literal["terminal", "markdown", "spec-bench", "eagle", "hass"]
    studies: list[Name] | None
    training: Text | None
    import_: Text | None
    baseline: Text | None


@command("report")
def main(config: Any) -> None:
    """Collect, print, and write the report beside the rows."""
    validation.check(config, Options)
    if config["import"] is not None:
        print(foreign_results.markdown(Path(config["import"]), config.format, config.baseline), end="")
    elif config.format in foreign_results.HARNESSES:
        raise SpecBenchError(f"format={config.format} is of an answer file of that harness; name one with import=FILE")
    elif config.training is not None:
        print(command_output.weights_markdown(Path(config.training)), end="")
    elif config.format == "markdown":
        print(command_output.rows_markdown(Path(config.results)), end="")
    else:
        report = Report(Sources(Path(config.results), chosen=config.studies))
        command_output.show_report(report, table=config.show)
        print(f"report: {report.write()}")


if __name__ == "__main__":
    run_cli(main, "report")
