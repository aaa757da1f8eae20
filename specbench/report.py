"""Door three: tables, figures, claims and an HTML page from the rows under a results folder; needs no model.

python -m specbench.report
python -m specbench.report results=results
python -m specbench.report results=results/smollm2-135m-cpu format=markdown
python -m specbench.report training=drafters/weights/smollm2-135m
python -m specbench.report import=answers.jsonl format=spec-bench
"""

from pathlib import Path

import hydra
from omegaconf import DictConfig

from specbench.errors import SpecBenchError, run_door, spoken, visible
from specbench.records import by_error
from specbench.reporting import cells, tables, trainings, translate
from specbench.reporting.bundle import Report, Sources

FORMATS = ("terminal", "markdown")


@hydra.main(version_base="1.3", config_path="../conf", config_name="report")
@spoken
def main(config: DictConfig) -> None:
    """Collect, print, and write the report beside the rows."""
    results = Path(config.results)
    if config["import"] is not None:
        print(translate.markdown(Path(config["import"]), config.format, config.baseline), end="")
        return
    if config.format not in FORMATS:
        raise SpecBenchError(f"format={config.format}: use {' or '.join(FORMATS)}")
    problems: list[str] = []
    if config.training is not None:
        lines = trainings.held_out_lines(Path(config.training), problems)
        if not lines:
            said = problems[0] if problems else f"no trained weights under training={config.training}"
            raise SpecBenchError(said)
        print("".join(f"{tables.markdown_problem(p)}\n\n" for p in problems), end="")
        print(tables.markdown_table(trainings.HELD_OUT, lines))
        return
    if config.format == "markdown":
        found = cells.find(results)
        print(tables.markdown(found.entries, found.problems) + "\n" + tables.training_markdown(found.entries), end="")
        return
    report = Report(Sources(results, chosen=config.claims))
    for problem in report.problems:
        print(f"LEFT OUT {visible(problem)}")
    tables.show(report.main)
    for error, lost in by_error(report.failures).items():
        print(visible(f"FAILED {', '.join(lost)}: {error}"))
    for part in report.parts:
        print(visible(f"{part['caption']}: {part['verdict']}"))
    print(f"report: {report.write()}")


if __name__ == "__main__":
    run_door(main)
