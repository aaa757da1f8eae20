"""What each mend of a recipe or a network brought, alone; `conf/trials.yaml` lists them.

python -m specbench.trials
python -m specbench.trials only=[eagle2,vanilla:norm] seeds=[0] tokens=100000

A trial trains once a seed on the corpus' first `tokens`, beside a base that has one thing otherwise, and is measured on the
held-out answers. A row a training goes to `trials.jsonl` as soon as it is there; what a machine like this one left is
not done again, and only what was trained alike is compared. The table beside it is its `README.md`.
"""

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import hydra
from annotated_types import MinLen
from omegaconf import DictConfig, OmegaConf
from pydantic import with_config
from typing_extensions import NotRequired, TypedDict

from specbench.common import environment, hashing
from specbench.common.errors import SpecBenchError, visible
from specbench.common.io import STRICT
from specbench.common.storage import atomic_path, cache_root, require_writable
from specbench.common.types import Count, Name, Natural, Share, Text
from specbench.config import validation
from specbench.config.cli import CONF, handle_errors, run_cli
from specbench.engine.device import pick_device
from specbench.records.schema import PROVENANCE
from specbench.records.studies import Override
from specbench.reporting import trainings
from specbench.reporting.tables import markdown_table
from specbench.reporting.trainings import TRIALS, Trial, trial_lines

BASE = "base"
# Of a provenance.
KEPT = ("held_out", "hours", "steps", "tokens_seen", "parameters", "precision", "machine", "versions", "commit")
Row = Mapping[str, Any]


@with_config(STRICT)
class Change(TypedDict):
    """One thing changed. told: to the training. beside: another trial than the base. kept: once that is decided."""

    why: Text
    told: Annotated[list[Override], MinLen(1)]
    beside: NotRequired[Name]
    kept: NotRequired[bool]


@with_config(STRICT)
class Tried(TypedDict):
    """A drafter. told: to all of its trainings. share: of the tokens."""

    trials: Mapping[Name, Change]
    told: NotRequired[list[Override]]
    share: NotRequired[Share]


@dataclass(frozen=True)
class Options:
    """What `conf/trials.yaml` may say; what each means stands there."""

    out: Text
    only: list[Text] | None
    seeds: Annotated[list[Natural], MinLen(1)]
    tokens: Count
    every: list[Override]
    parts: Mapping[Name, Text]
    drafters: Mapping[Name, Tried]


@hydra.main(version_base="1.3", config_path=CONF, config_name="trials")
@handle_errors
def main(config: DictConfig) -> None:
    """Train what is missing; write rows and table."""
    validation.check(config, Options)
    plain: Any = OmegaConf.to_container(config, resolve=True)
    asked, out = Options(**plain), Path(plain["out"])
    require_writable(out)
    every = listed(asked)
    chosen = _chosen(every, asked.only)
    path = out / "trials.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    here = environment.hardware(pick_device("auto"))["device"]
    ours = [r for r in rows if r["machine"]["device"] == here]
    there = {(r["drafter"], r["trial"], r["seed"], trainings.tokens_of(r["options"])) for r in ours}
    for seed in asked.seeds:
        for trial in chosen:
            said = told(asked, trial, seed)
            if (trial.drafter, trial.name, seed, trainings.tokens_of(said)) in there:
                continue
            print(f"{trial.drafter} {trial.name}, seed {seed}", file=sys.stderr, flush=True)
            rows.append(_train(trial, seed, said))
            out.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
            write_table(out, every, rows)
    write_table(out, every, rows)


def listed(asked: Options) -> list[Trial]:
    """Every base, followed by what is compared with it."""
    found = []
    for drafter, tried in asked.drafters.items():
        found.append(Trial(drafter, BASE, "before the mends"))
        for name, change in tried["trials"].items():
            found.append(Trial(drafter, name, change["why"], change.get("beside", BASE), change.get("kept")))
    return found


def told(asked: Options, trial: Trial, seed: int) -> list[str]:
    """What the trainer's door is told; of an option that is named twice the last word counts."""
    tried = asked.drafters[trial.drafter]
    changed = tried["trials"][trial.name]["told"] if trial.name != BASE else []
    tokens = int(asked.tokens * tried.get("share", 1))
    said = [*asked.every, *tried.get("told", []), *changed, f"train.settings.seed={seed}", f"train.corpus.tokens={tokens}"]
    return [f"drafter={trial.drafter}", *{o.lstrip("+").partition("=")[0]: o for o in said}.values()]


def _chosen(every: list[Trial], only: Sequence[str] | None) -> list[Trial]:
    """Raises `SpecBenchError` for a name that is none."""
    if only is None:
        return every
    names = {name: trial for trial in every for name in _names(trial)}
    for name in only:
        if name not in names:
            raise SpecBenchError(f"only: there is no trial {visible(name)}{validation.nearest(name, names)}")
    return [trial for trial in every if _names(trial) & set(only)]


def _names(trial: Trial) -> set[str]:
    return {trial.drafter, f"{trial.drafter}:{trial.name}"}


def _train(trial: Trial, seed: int, options: list[str]) -> Row:
    """One training, in a process of its own; its row. Its folder is named by all that the training is told."""
    name = f"trial-{trial.drafter}-{trial.name}-{hashing.of(options)[:12]}"
    folder = cache_root() / "trials" / name
    command = [sys.executable, "-m", "specbench.train", *options, f"train.name={name}", f"train.out={folder}"]
    if code := subprocess.run([*command, "train.missing=true"]).returncode:
        if code < 0 or code == 130:
            raise KeyboardInterrupt
        raise SpecBenchError(f"the training of {name} failed; see above")
    said = trainings.read(folder / PROVENANCE)
    row = {"drafter": trial.drafter, "trial": trial.name, "seed": seed, "options": options}
    return row | {key: said[key] for key in KEPT}


def write_table(out: Path, trials: Sequence[Trial], rows: Iterable[Row]) -> None:
    """`README.md` of the folder."""
    rows = list(rows)
    machines = ", ".join(sorted({row["machine"]["device"] for row in rows}))
    text = f"""# Trials

One thing changed at a time, beside the same training without it: same tokens, in the same order; seeds pooled;
tau of a chain of 5 on the held-out answers, resampled alike for both. *kept*: whether the shipped recipe has it; these
trainings are short, so some that lose here are: as the paper's own, or since the longer one was not tried without.
Written by `specbench.trials` from `trials.jsonl` ({machines}).

{markdown_table(TRIALS, trial_lines(trials, rows))}
"""
    with atomic_path(out / "README.md") as temporary:
        temporary.write_text(text)


if __name__ == "__main__":
    run_cli(main, "trials")
