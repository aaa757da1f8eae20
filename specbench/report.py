"""Door three: tables from the rows under a results folder.

python -m specbench.report
python -m specbench.report results=results/smollm2-135m-cpu format=markdown
python -m specbench.report results=results ledger=conf/claims
"""

from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf

from specbench import measure
from specbench.errors import SpecBenchError, run_door, spoken
from specbench.reporting import claims, figures, tables


@hydra.main(version_base="1.3", config_path="../conf", config_name="report")
@spoken
def main(config: DictConfig) -> None:
    """Collect, then print."""
    paths = sorted(Path(config.results).rglob("rows.jsonl"))
    if not paths:
        raise SpecBenchError(f"no rows under results={config.results}; run `make bench` first")
    if config.format not in ("terminal", "markdown"):
        raise SpecBenchError(f"format={config.format}: use terminal or markdown")
    if config.ledger is not None:
        files = sorted(Path(config.ledger).glob("*.yaml"))
        if not files:
            raise SpecBenchError(f"no lists of claims in ledger={config.ledger}; use conf/claims")
        listed: list[Any] = [claim for file in files for claim in OmegaConf.to_container(OmegaConf.load(file))]  # type: ignore[union-attr]
        known = claims.evidence(paths, config.dataset)
        print(claims.markdown(claims.ledger(listed, known, Path(config.results) / config.machine)), end="")
        return
    entries = tables.collect(paths)
    if config.figures is not None:
        weights = measure.ROOT / "drafters" / "weights" / entries[0].model
        figures.learning_curves(weights, Path(config.figures) / "learning_curves.png")
    if config.format == "markdown":
        print(tables.markdown(entries) + "\n" + tables.training_markdown(entries), end="")
    else:
        tables.show(entries)


if __name__ == "__main__":
    run_door(main)
