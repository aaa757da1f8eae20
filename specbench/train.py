"""Train a drafter for a target, from the corpus to the weights folder.

python -m specbench.train drafter=eagle2
python -m specbench.train drafter=eagle2 train=paper model=llama2-7b
accelerate launch --num_processes 4 -m specbench.train drafter=eagle2 train=paper model=llama2-7b
python -m specbench.train train.until=corpus train.pack=LICENCE       # the corpus alone, its ids also as one file
python -m specbench.train train.until=vocabulary                      # its text, and the list of its most frequent ids
python -m specbench.train drafter=eagle2 train.until=acceptance       # what fitted trees need of weights that are there
python -m specbench.train drafter=self_speculation train.until=search # which sublayers it had best leave out
"""

import specbench.common.omp_policy  # noqa: F401
from specbench.common import storage
from specbench.records.schema import PROVENANCE, SKIP, WEIGHTS

# isort: split
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import hydra
import torch
from accelerate import PartialState
from filelock import FileLock
from hydra.utils import get_class, instantiate
from omegaconf import DictConfig, OmegaConf
from pydantic import Field

from specbench.common import environment, hashing
from specbench.common.budget import Budget
from specbench.common.errors import SpecBenchError
from specbench.common.storage import atomic_path, cache_root, require_writable
from specbench.common.types import Count, Name, Positive, Text
from specbench.config import validation
from specbench.config.cli import CONF, handle_errors, run_cli
from specbench.data.conversations import Conversations
from specbench.engine import vocabulary, weights
from specbench.engine.device import pick_device
from specbench.engine.drafter import Drafter
from specbench.engine.interface import NoShortcut
from specbench.engine.loading import ModelSpec
from specbench.engine.policies import Chain, TreePolicy
from specbench.engine.target import Target
from specbench.training.corpus import CorpusSettings, Writer
from specbench.training.features import VALIDATION, Answer, Corpus, Shards, held_out
from specbench.training.overwriting import UNDECIDED, made_by, refuse_overwriting, tracked
from specbench.training.plan import Rows, plan
from specbench.training.replay import Acceptance, chains, known_states, replay
from specbench.training.trainer import Paused, Trainer, TrainSettings
from specbench.tuning import acceptance as trees
from specbench.tuning import layer_search

CALIBRATION = 64  # held-out answers of a drafter's calibration
NO_RECIPE = ("name", "out", "minutes", "overwrite")  # where it was written, and in how many parts
CHAIN = 5  # steps of the held-out n-alpha: 0-alpha … 4-alpha, as in EAGLE, Table 1


@dataclass(frozen=True)
class Train:
    """What `conf/train/*.yaml` and `conf/recipe/*.yaml` may say; what each means stands in `conf/train/small.yaml`."""

    name: Name | None
    out: Text
    start: Text | None
    missing: bool
    overwrite: bool
    minutes: Positive | None
    build: bool
    until: Literal["vocabulary", "corpus", "weights", "acceptance", "search"]
    packed: Text
    pack: Text | None
    shard_target: bool
    online: bool
    follow: bool
    batch: Count
    row_tokens: Count | None
    answers_only: bool
    settings: TrainSettings
    corpus: CorpusSettings
    text: Conversations


@dataclass(frozen=True)
class Options:
    """What `conf/train.yaml` and its groups may say."""

    threads: Annotated[int, Field(ge=1, le=4096)] | None
    model: ModelSpec
    tree: TreePolicy
    drafter: Drafter
    train: Train


@hydra.main(version_base="1.3", config_path=CONF, config_name="train")
@handle_errors
def main(config: DictConfig) -> None:
    """Build what is missing of the corpus, train, write the weights."""
    validation.check(config, Options)
    _settle(config)
    if config.train.missing and config.train.until == "weights" and (Path(config.train.out) / WEIGHTS).exists():
        print(f"{config.train.out}: there already (train.missing=false trains anew)")
        return
    budget = Budget.of_minutes(config.train.minutes)
    environment.commit()  # remembered from now on: the code that trains is the code that was there at the start
    torch.set_num_threads(config.threads or torch.get_num_threads())
    spec: ModelSpec = instantiate(config.model)
    if spec.dtype == "auto" and pick_device(spec.device).type == "cpu":
        spec = replace(spec, dtype="float32")  # wide products in bfloat16 are slower on most processors, and less exact
    processes = PartialState(cpu=pick_device(spec.device).type == "cpu")
    beside = [instantiate(config.drafter)] * (config.train.until in ("weights", "acceptance", "search"))
    target, chat = spec.load(processes.num_processes if config.train.shard_target else 1, beside=beside)
    packed = storage.PROJECT / config.train.packed
    chats = instantiate(config.train.text).load()
    text = Writer(instantiate(config.train.corpus), target, chat, chats, cache_root() / "corpora", packed)
    config.train.corpus.precision = text.settings.precision  # of `auto` what it came to: the provenance says who wrote
    with processes.main_process_first():
        text.prepare()
    shards = Shards(text)
    if config.train.until == "weights":
        _train(config, shards, processes, budget)
    elif config.train.until == "acceptance":
        _follow(config, shards)
    elif config.train.until == "search":
        _search(config, shards)
    elif config.train.until == "corpus":
        _build(shards, processes)
    else:
        _write(text, processes)
    if config.train.until in ("vocabulary", "corpus") and processes.is_main_process:
        path = packed / vocabulary.FILE
        if tracked(path) and not config.train.overwrite:
            print(f"{path} is under version control and stays as it is (train.overwrite=true counts its ids anew)")
        else:
            vocabulary.save(path, *text.frequent(vocabulary.MOST, config.model.name))
            print(f"frequent ids in {path}")
    if config.train.pack is not None and processes.is_main_process:
        said = {"license": config.train.pack, "questions": OmegaConf.to_container(config.train.text)}
        made = {
            "machine": environment.hardware(target.device),
            "versions": environment.versions(),
            "commit": environment.commit(),
        }
        print(f"corpus in {text.pack(packed, said | made)}")


def _settle(config: DictConfig) -> None:
    """Refuse what cannot end well, before anything is loaded."""
    taker: Any = get_class(config.drafter._target_)
    part, phased = config.train, taker.phased  # options that a phase may change
    if part.shard_target and part.build:
        raise SpecBenchError(
            "a target spread over processes runs in all of them at once and writes no corpus; write it before, in one "
            "process (model.device_map=auto), then train with train.build=false"
        )
    if part.until in ("weights", "acceptance", "search"):
        if config.drafter.get("vocabulary") is not None:
            raise SpecBenchError("drafter.vocabulary needs no training; train without it, and draft with it")
        made, verb = ("searched", "search") if part.until == "search" else ("weights", "train")
        if made not in config.drafter:
            raise SpecBenchError(f"drafter={config.drafter.name} has nothing to {verb}; choose another drafter=")
        require_writable(Path(part.out))
    instantiate(part.settings)  # what contradicts itself there
    for number, phase in enumerate(part.settings.phases):
        said: Any = OmegaConf.to_container(phase)
        validation.hold_some(said.get("drafter", {}), taker, phased, f"train.settings.phases[{number}].drafter")
    if not (part.overwrite or part.missing):
        _protect(config)


def _protect(config: DictConfig) -> None:
    """Refuse to write over what another training made, before anything is loaded."""
    out, until = Path(config.train.out), config.train.until
    if until == "search":
        refuse_overwriting(out / SKIP)
    elif until == "weights":
        drafter, recipe = (OmegaConf.to_container(part, resolve=True) for part in (config.drafter, config.train))
        refuse_overwriting(out / WEIGHTS, made_by(drafter, recipe))  # type: ignore[arg-type]


def _build(shards: Shards, processes: PartialState) -> None:
    """Write the text that is missing, then read the states. Of trainings side by side one does so, the others wait."""
    with _alone(shards.folder, processes):
        shards.text.write(processes.process_index, processes.num_processes)
        processes.wait_for_everyone()
        shards.build(processes.process_index, processes.num_processes)
        processes.wait_for_everyone()


def _write(text: Writer, processes: PartialState) -> None:
    """Write the text that is missing; where none is, wait for nobody who reads states of it."""
    if not text.missing():
        return
    with _alone(text.folder, processes):
        text.write(processes.process_index, processes.num_processes)
        processes.wait_for_everyone()


def _alone(folder: Path, processes: PartialState) -> AbstractContextManager[Any]:
    """Commands side by side enter one after the other, the processes of one command together."""
    return FileLock(folder / ".lock") if processes.num_processes == 1 else nullcontext()


def _train(config: DictConfig, shards: Shards, processes: PartialState, budget: Budget) -> None:
    """Train one drafter on the corpus and write its weights, or as much of its training as the budget lasts for."""
    target, settings = shards.text.target, instantiate(config.train.settings)
    assert isinstance(settings, TrainSettings)
    torch.manual_seed(settings.seed)
    drafter: Any = instantiate(config.drafter, weights=config.train.start)
    drafter.bind(target)
    stored = shards.settings.states and not config.train.online and not drafter.taps.beside  # shards hold last states only
    rows = Rows(config.train.batch, config.train.row_tokens)
    estimate = plan(shards, drafter, settings, rows, not stored, config.train.build)
    if processes.is_main_process:
        print(estimate, flush=True)
    if config.train.build:
        _build(shards, processes)
    corpus = Corpus(
        shards.folder,
        rows.count,
        config.train.answers_only,
        settings.seed,
        None if stored else target,
        drafter.taps,
        shards.settings.tokens,
        rows.tokens,
        shards.settings.reading,
    )
    answers = held_out(shards.folder, settings.validation_answers)
    measured: list[Acceptance] = []

    def validate() -> dict[str, Any]:
        found = acceptance(target, drafter, answers)
        measured.append(found)
        return {"chain_tau": round(found.tau, 4), "n_alpha": [round(a, 4) for a in found.alphas]}

    folder = _progress_of(config)
    trainer = Trainer(drafter, corpus, settings, validate, folder, _shaping(config, target))
    own = sum(p.numel() for p in trainer.parameters)
    processes.print(
        f"{config.drafter.name}: {own:,} trainable parameters, {corpus.tokens:,} tokens a pass, "
        f"{trainer.total} steps, checkpoints in {trainer.folder}",
        file=sys.stderr,
    )
    try:
        history = trainer.run(budget)
    except Paused as pause:
        processes.print(f"{config.drafter.name}: {pause}")
        return
    # By all processes: a target in parts runs in all of them or in none.
    calibration = drafter.calibrate([known_states(target, answer) for answer in answers[:CALIBRATION]])
    found = measured[-1] if measured else acceptance(target, drafter, answers)  # of a run that had ended, none is
    followed = trees.measure(target, drafter, answers) if config.train.follow else None
    if not processes.is_main_process:
        return
    provenance = _provenance(config, trainer, corpus, target, found) | {"history": history, "calibration": calibration}
    out = Path(config.train.out)
    with atomic_path(out / WEIGHTS) as temporary:
        weights.save(drafter, temporary.parent, provenance)
        (temporary.parent / PROVENANCE).replace(out / PROVENANCE)
    if followed is not None:
        trees.write(out, followed)
    print(f"weights in {out}")


def _hold_out(shards: Shards) -> None:
    """Write the held-out answers where they are missing; those who train need not wait, nor be waited for."""
    with FileLock(shards.folder / f"{VALIDATION}.lock"):
        shards.text.write()
        shards.build(held_out=True)


def _search(config: DictConfig, shards: Shards) -> None:
    """Which of the target's sublayers a drafter had best leave out, as decoding runs them here."""
    _hold_out(shards)
    target, out = shards.text.target, Path(config.train.out)
    target.optimize_for_inference()
    drafter: Any = instantiate(config.drafter, searched=None)
    drafter.bind(target)
    journal = _progress_of(config) / f"search-{target.fingerprint()[:12]}.journal"
    found = layer_search.search(target, drafter, held_out(shards.folder, layer_search.ANSWERS), journal)
    whose = {"target": config.model.name, "target_fingerprint": target.fingerprint()}
    made = {
        "machine": environment.hardware(target.device),
        "versions": environment.versions(),
        "commit": environment.commit(),
    }
    layer_search.write(out, whose | found | {"drafter": OmegaConf.to_container(config.drafter, resolve=True)} | made)
    print(f"skipped sublayers in {out / SKIP}: {found['predicted']['speedup']:.2f}x plain decoding expected")


def _progress_of(config: DictConfig) -> Path:
    """Where something that was interrupted lies."""
    return cache_root() / "training" / str(config.model.name) / str(config.train.name or config.drafter.name)


def _follow(config: DictConfig, shards: Shards) -> None:
    """How far the held-out answers follow the trees of a drafter whose weights are there, as training says at its end."""
    _hold_out(shards)
    drafter: Any = instantiate(config.drafter, weights=str(Path(config.train.out).absolute()))
    drafter.bind(shards.text.target)
    drafter.eval()
    drafter.optimize_for_inference()
    trees.write(Path(config.train.out), trees.measure(shards.text.target, drafter, held_out(shards.folder, trees.ANSWERS)))
    print(f"acceptance in {Path(config.train.out) / trees.FILE}")


def _provenance(config: DictConfig, trainer: Trainer, corpus: Corpus, target: Target, found: Acceptance) -> dict[str, Any]:
    """Where the weights come from: what was trained on what, by which recipe, how long, where, and how good it became."""
    recipe = OmegaConf.to_container(config.train, resolve=True)
    assert isinstance(recipe, dict)
    return {
        "drafter": OmegaConf.to_container(config.drafter, resolve=True),
        "target": config.model.name,
        "target_fingerprint": target.fingerprint(),
        "parameters": sum(p.numel() for p in trainer.parameters),
        "data": {
            **OmegaConf.to_container(config.train.corpus, resolve=True),  # type: ignore[dict-item]
            "unique_tokens": corpus.tokens,
            "shards": len(corpus.shards),
        },
        "recipe": {k: v for k, v in recipe.items() if k not in NO_RECIPE},
        "tokens_seen": trainer.tokens,
        "steps": trainer.step,
        "precision": trainer.accelerator.mixed_precision,
        "hours": round(trainer.seconds / 3600, 3),
        "machine": environment.hardware(target.device),
        "versions": environment.versions(),
        "commit": environment.commit(),
        "held_out": {
            "chain_tau": round(found.tau, 4),
            "n_alpha": [round(a, 4) for a in found.alphas],
            "answers": found.answers,  # (tokens emitted, cycles) of each
        },
    }


def _shaping(config: DictConfig, target: Target) -> dict[str, Any]:
    """What shapes a training beside its settings and its texts."""
    drafter: Any = OmegaConf.to_container(config.drafter, resolve=True)
    start = None
    if config.train.start is not None:
        start = hashing.of_file(storage.PROJECT / config.train.start / WEIGHTS)
    own = {k: v for k, v in drafter.items() if k not in UNDECIDED["drafter"]}
    return {"drafter": own, "target": target.fingerprint(), "start": start}


def acceptance(target: Target, drafter: Any, answers: list[Answer]) -> Acceptance:
    """Of a chain of `CHAIN` on held-out answers: from all positions at once where the drafter can, else cycle by cycle."""
    growth, drafter.growth = drafter.growth, Chain(CHAIN)
    try:
        return chains(target, drafter, answers, CHAIN)
    except NoShortcut:
        return replay(target, drafter, answers)
    finally:
        drafter.growth = growth


if __name__ == "__main__":
    run_cli(main, "train")
