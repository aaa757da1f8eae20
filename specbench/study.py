"""Door five: run a study, one table or figure of a paper, and say what became of its claims.

python -m specbench.study study=bench
python -m specbench.study study=coral_table3 seeds=[0]
python -m specbench.study study=bench model=llama2-7b arms=[none,eagle2] datasets=[mtbench,gsm8k]
python -m specbench.study -m study=eagle_table5,coral_table3
"""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from specbench import arms, cell, contents, schema, studies
from specbench.arms import Arm, RunOptions
from specbench.assets import cache_root, require_writable
from specbench.door import CONF, composed, run_door, spoken
from specbench.engine import weights
from specbench.engine.target import Target, pick_device
from specbench.engine.verify import Rule
from specbench.errors import SpecBenchError, visible
from specbench.faults import told
from specbench.metrics import BASELINE
from specbench.options import Name, Natural
from specbench.records import Cell
from specbench.reporting import cells, claims, tables
from specbench.studies import Study


@dataclass(frozen=True)
class Options(RunOptions):
    """What `conf/study.yaml` may say beside what goes for every arm; what each means stands there."""

    study: Study
    arms: list[Name] | None
    seeds: list[Natural] | None
    cells: list[Natural] | None
    datasets: list[Name] | None


OURS = ("study", "arms", "seeds", "cells", "datasets")


@dataclass(frozen=True)
class Member:
    """An arm with one of its seeds. label: as rows call it."""

    name: str
    seed: int | None
    label: str
    spec: studies.Arm


@hydra.main(version_base="1.3", config_path=CONF, config_name="study")
@spoken
def main(config: DictConfig) -> None:
    """Train what is to be trained, decode what is missing, judge."""
    schema.check(config, Options)
    name = HydraConfig.get().runtime.choices["study"]
    plain: Study = OmegaConf.to_container(config.study, resolve=True)  # type: ignore[assignment]
    study = _chosen(studies.check(plain, name), config, name)
    require_writable(Path(config.results))
    missing = studies.unmet(study.get("needs", {}), None, pick_device(config.model.device).type == "cuda")
    if missing:
        raise SpecBenchError(f"study {name} is not testable here: it needs {', '.join(missing)}")
    users = _users()
    members = list(_members(study, config))
    prepared = [_prepared(said, members, users, study, Path(config.results) / name) for said in _cells(study, config)]
    lost = _train(name, members, study, users)
    torch.set_num_threads(config.threads or torch.get_num_threads())
    measured = next((n for n, (base, *_) in enumerate(prepared) if not base.replay), 0)  # once a study, not in each cell
    target, chat, loaded = *arms.load(prepared[0][0]), prepared[0][0].model
    found, dropped, absent = [], 0, 0
    for number, (base, sides, wanted) in enumerate(prepared):
        try:
            questions = instantiate(base.dataset).load()
        except SpecBenchError as error:  # the other cells are worth having
            print(visible(f"specbench: {name}, cell {number + 1} of {len(prepared)}: {error}"), file=sys.stderr)
            dropped += 1
            continue
        if base.model != loaded:  # of another precision
            del target
            target, chat, loaded = *arms.load(base), base.model
        there = (_built(side, target) for side in sides if side.member.label not in lost)
        built = [arms.baseline(base, target), *(arm for arm in there if arm is not None)]
        heat = "greedy" if base.sampler.temperature == 0 else f"T={base.sampler.temperature}"
        where = f"{base.dataset.name}, {heat}{', replayed' if base.replay else ''}"
        print(f"{name}, cell {number + 1} of {len(prepared)}: {where}", file=sys.stderr, flush=True)
        measure = _repetitions(study, base, users) if number == measured else {}
        ran = cell.run(base, target, chat, built, questions, name, measure)
        if ran.failed:
            print(f"specbench: {ran.failed} generations failed; their rows in {ran.cell.path} say why", file=sys.stderr)
        found.append(ran)
        absent = max(absent, 1 + wanted - len({label for label, *_ in ran.cell.rows}))  # the baseline is one
    if not found:
        raise SpecBenchError(f"study {name}: no cell has its prompts, see above")
    _say(name, study, [ran.cell for ran in found], config)
    for ran in found:
        arms.require_lossless(ran.cell)
    broken, unmeasured = sum(ran.failed for ran in found), sum(ran.unmeasured for ran in found)
    if broken or unmeasured or absent or dropped:
        raise SpecBenchError(
            f"{broken} generations and {unmeasured} measurements failed, {dropped} cells and {absent} arms are missing, "
            "named above; run it again to retry them"
        )


def _chosen(study: Study, config: DictConfig, name: str) -> Study:
    """The study with the arms that were asked for; a drafter's name that is no arm's is an arm by itself."""
    wanted = config.arms
    if wanted is None:
        return study
    known = dict(study["arms"])
    for arm in wanted:
        if arm not in known and arm != BASELINE:
            if not (Path(CONF) / "drafter" / f"{arm}.yaml").is_file():
                near = schema.nearest(arm, known)
                raise SpecBenchError(f"arms: study {name} has no arm {visible(arm)}, and there is no such drafter{near}")
            known[arm] = {"run": [f"drafter={arm}"]}
    return {**study, "arms": {arm: known[arm] for arm in wanted if arm != BASELINE}}


def _users() -> list[str]:
    """What the command line says for all arms."""
    task = list(HydraConfig.get().overrides.task)
    keys = [o.key_or_group for o in OverridesParser.create().parse_overrides(task)]
    if "drafter" in keys:
        raise SpecBenchError("drafter: a study has its own arms; choose among them with arms=[NAME,…]")
    return [said for said, key in zip(task, keys, strict=True) if key.split(".")[0] not in OURS]


def _members(study: Study, config: DictConfig) -> Iterator[Member]:
    """Every arm with each of its seeds; one that is not trained here has none."""
    for name, spec in study["arms"].items():
        trained = spec if "train" in spec else study["arms"].get(spec.get("weights", ""), spec)
        if "train" not in trained:
            yield Member(name, None, name, spec)
            continue
        for seed in config.seeds if config.seeds is not None else trained.get("seeds", [0]):
            yield Member(name, seed, f"{name}@{seed}", spec)


def _cells(study: Study, config: DictConfig) -> Iterator[list[str]]:
    """What each chosen cell says; with other datasets, each cell for each of them."""
    count = len(study["cells"])
    for number in range(count) if config.cells is None else config.cells:
        if number >= count:
            raise SpecBenchError(f"cells: this study has no cell {number}; there are 0 to {count - 1}")
        said = study["cells"][number]
        if config.datasets is None:
            yield said
        else:
            rest = [o for o in said if not o.startswith("dataset=")]
            yield from ([*rest, f"dataset={dataset}"] for dataset in config.datasets)


def _base(said: list[str], users: list[str], results: Path) -> DictConfig:
    """What a cell's arms have in common."""
    base = composed("run", [*said, *users])
    schema.check(base, RunOptions)
    arms.settle(base)
    base.results = str(results)
    return base


def _repetitions(study: Study, base: DictConfig, users: list[str]) -> dict[str, int]:
    """How many times over each quantity is measured. Peak memory is beside timed rows, unless the study or the command
    line says otherwise."""
    said = {"memory": 0 if base.replay else base.memory, **study.get("measure", {})}
    return said | ({"memory": base.memory} if any(o.startswith("memory=") for o in users) else {})


# Training -------------------------------------------------------------------------------------------------------------


def _training(member: Member, study: Study, users: list[str]) -> tuple[str, list[str]] | None:
    """Where a member's weights are trained, and what the training is told; None if it takes what lies there.

    The folder is named by all that the training is told, and by the weights that it starts from as they are now, so that
    no other training is ever taken for it.
    """
    if member.seed is None:
        return None
    source = study["arms"][member.spec["weights"]] if "weights" in member.spec else member.spec
    keys = {o: o.lstrip("+~").split("=")[0] for o in source["run"]}
    # from how many ids it will draft is nothing that a training knows of
    own = [o for o, key in keys.items() if key.split(".")[0] == "drafter" and key != "drafter.vocabulary"]
    model = [o for o in users if o.split("=")[0].split(".")[0] in ("model", "threads")]
    said = [*model, *own, *source.get("train", []), f"train.settings.seed={member.seed}"]
    drafter = next(o for o in own if o.startswith("drafter=")).partition("=")[2]
    starts = [weights.PROJECT / o.partition("=")[2] / weights.WEIGHTS for o in said if o.startswith("train.start=")]
    return f"{drafter}-{contents.of([said, [contents.of_file(path) for path in starts if path.is_file()]])[:12]}", said


def _folder(member: Member, study: Study, users: list[str]) -> Path | None:
    training = _training(member, study, users)
    return None if training is None else cache_root() / "studies" / training[0]


def _train(name: str, members: list[Member], study: Study, users: list[str]) -> set[str]:
    """Train, one after the other, each in a process of its own, what is not there; the members that are lost."""
    failed: set[Path] = set()
    lost = set()
    for member in members:
        training, folder = _training(member, study, users), _folder(member, study, users)
        if training is None or folder is None or (folder / weights.WEIGHTS).exists():
            continue
        if folder not in failed:  # of a training that several arms share
            print(f"{name}: training {member.label}", file=sys.stderr, flush=True)
            ways = [f"train.name={training[0]}", f"train.out={folder}", "train.missing=true"]
            code = subprocess.run([sys.executable, "-m", "specbench.train", *training[1], *ways]).returncode
            if code < 0 or code == 130:
                raise KeyboardInterrupt
            if not code:
                continue
            failed.add(folder)
        print(f"specbench: {name}: the training of {member.label} failed; see above", file=sys.stderr)
        lost.add(member.label)
    return lost


# Decoding -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Side:
    """A member in one cell, ready to be bound. place: where its failure would stand."""

    member: Member
    config: DictConfig
    made: tuple[Any, Rule]
    place: Path


def _prepared(
    said: list[str], members: list[Member], users: list[str], study: Study, results: Path
) -> tuple[DictConfig, list[Side], int]:
    """A cell's configuration, its members as far as they can be checked without target and weights, and how many there
    should be: one that cannot sample has no place where the others do."""
    base = _base(said, users, results)
    sides, wanted = [], len(members)
    for member in members:
        trained = _folder(member, study, users)
        config = composed("run", [*said, *member.spec["run"], *users])
        config.results = base.results
        if trained is not None:
            arms.bearer(config.drafter).weights = str(trained)
        place = arms.failure_path(config, member.label)
        try:
            schema.check(config, RunOptions)
            arms.settle(config)
            if trained is not None:
                config.checkpoint = None  # its own are trained by then, whatever is published
            if config.model != base.model:
                raise SpecBenchError(f"arm {member.label} names another model; all arms of a study share one")
            sides.append(Side(member, config, arms.make(config), place))
        except arms.GreedyOnly as error:
            wanted -= 1
            print(
                visible(f"specbench: {member.label} is left out at T={base.sampler.temperature}: {error}"), file=sys.stderr
            )
        except Exception as error:
            _fail(config, member, place, error)
    return base, sides, wanted


def _built(side: Side, target: Target) -> Arm | None:
    """A member bound to the target; None, and its failure written down, where that cannot be."""
    member = side.member
    more = {} if member.seed is None else {"of": member.name, "seed": member.seed}
    try:
        arm = arms.build(side.config, target, member.label, side.made, **more)
    except Exception as error:
        _fail(side.config, member, side.place, error)
        return None
    side.place.unlink(missing_ok=True)
    return arm


def _fail(config: DictConfig, member: Member, place: Path, error: Exception) -> None:
    """The others are worth having."""
    failure = arms.failure(config, told(error), member.label)
    failure.write(place)
    print(visible(f"specbench: {member.label} on {failure.dataset}: {failure.error}"), file=sys.stderr)


def _say(name: str, study: Study, done: list[Cell], config: DictConfig) -> None:
    """The cells as tables, and what became of the study's claims."""
    entries = cells.collect([one.path for one in done])
    if config.show:
        tables.show(entries)
    for verdict in claims.judge_study(name, study, entries):
        print(visible(f"{verdict.verdict.upper()}: {verdict.claim['says']} ({verdict.claim['source']}). {verdict.said}"))


if __name__ == "__main__":
    run_door(main, "study")
