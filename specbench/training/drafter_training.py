"""Train one drafter on its corpus, from a job to weights with their provenance."""

import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specbench.common import hashing
from specbench.common.budget import Budget
from specbench.common.errors import SpecBenchError
from specbench.common.storage import project_path
from specbench.engine import weights
from specbench.engine.adapters import Adapter
from specbench.engine.interface import Taps
from specbench.engine.target import Target
from specbench.records.schema import WEIGHTS, all_hours, all_tokens
from specbench.training.corpus_reader import CorpusReader, HeldOutAnswer, held_out
from specbench.training.job import Workspace
from specbench.training.overwriting import NON_IDENTITY_OPTIONS
from specbench.training.plan import plan
from specbench.training.replay import AcceptanceCounts, answer_states, chain_acceptance, replay
from specbench.training.trainer import Trainer

CALIBRATION_ANSWERS = 64  # held-out answers for a drafter's calibration
NOT_RECIPE = ("name", "out", "minutes", "overwrite")  # left out of provenances: where and in how many parts it ran


@dataclass(frozen=True)
class TrainedWeights:
    """A drafter trained to its end, not yet saved. answers: held-out ones, for further measurements."""

    drafter: Any
    answers: list[HeldOutAnswer]
    provenance: dict[str, Any]
    target: Target  # that it drafts for, see `Drafter.prepare_training`
    tables: dict[str, Tensor] | None = None  # of a drafter that counts
    adapter: Adapter | None = None  # of the target

    def save(self, out: Path, beside: Callable[[str], None]) -> None:
        """Write weights, the target's adapter and provenance into a folder, see `weights.save`."""

        def write(sha256: str) -> None:
            if self.adapter is not None:
                self.adapter.save(out)
            beside(sha256)

        weights.save(self.tables or self.drafter, out, self.provenance, write)


@dataclass
class Validation:
    """Measures a drafter on held-out answers while it trains. trees: answers replayed with its own tree, too.

    chains: what was last measured with chains. calibration: by the drafter itself, whose tree may follow it.
    """

    target: Target
    drafter: Any
    answers: list[HeldOutAnswer]
    trees: int
    chains: AcceptanceCounts | None = None
    calibration: Any = None

    def measure(self) -> dict[str, Any]:
        """Values for the history of a training."""
        self.chains = chain_acceptance(self.target, self.drafter, self.answers)
        chosen = self.answers[:CALIBRATION_ANSWERS]
        self.calibration = self.drafter.calibrate(answer_states(self.target, answer) for answer in chosen)
        followed = self.answers[: self.trees]
        tree = {"tree_tau": round(replay(self.target, self.drafter, followed).tau, 4)} if followed else {}
        return _rounded(self.chains) | tree


def train(workspace: Workspace, budget: Budget) -> TrainedWeights:
    """Train to the end, from the last checkpoint if there is one. All processes take part.

    Raises:
        Paused: the budget was over before the last step; the next run goes on there.
        SpecBenchError: disk or memory do not suffice, or the drafter cannot follow the recipe.
    """
    job, target, processes = workspace.job, workspace.target, workspace.processes
    settings = job.settings
    torch.manual_seed(settings.seed)
    drafter = job.make_drafter(weights=job.start)
    drafter.bind(target)
    if drafter.counted:
        return _count(workspace, drafter)
    adapted = drafter.prepare_training(target)
    online = job.online or not job.corpus.states or not _stored(drafter.taps, workspace)
    processes.print(plan(job, workspace.shards, drafter, online, processes.num_processes), flush=True)
    if job.build:
        workspace.build_corpus()
    corpus = _corpus(workspace, drafter, online)
    answers = held_out(workspace.shards.folder, settings.validation_answers)
    if adapted is not target:
        answers = [replace(answer, states=None) for answer in answers]  # they are the original's
    validation = Validation(adapted, drafter, answers, settings.validation_trees)
    trainer = Trainer(drafter, corpus, settings, validation.measure, job.progress_folder, _shaped_by(workspace))
    processes.print(
        f"{job.drafter['name']}: {trainer.size:,} trainable parameters, {corpus.tokens:,} tokens a pass, "
        f"{trainer.total} steps, checkpoints in {job.progress_folder}",
        file=sys.stderr,
    )
    trainer.run(budget)
    drafter.eval()
    if validation.chains is None:  # a finished run validates nothing
        validation.measure()
    assert validation.chains is not None
    measured = _measured(trainer, job.start) | {"calibration": validation.calibration}
    data = {"unique_tokens": trainer.corpus.tokens, "shards": len(trainer.corpus.shards)}
    adapter = drafter.release_adapter()
    provenance = _provenance(workspace, data, measured, validation.chains, adapter)
    return TrainedWeights(drafter, answers, provenance, adapted, adapter=adapter)


def _shaped_by(workspace: Workspace) -> dict[str, Any]:
    """What determines the weights besides settings and corpus, see `Trainer`."""
    job = workspace.job
    return {
        "drafter": {k: v for k, v in job.drafter.items() if k not in NON_IDENTITY_OPTIONS["drafter"]},
        "target": workspace.target.fingerprint(),
        "start": None if job.start is None else hashing.of_file(project_path(job.start) / WEIGHTS),
    }


def _measured(trainer: Trainer, start: str | None) -> dict[str, Any]:
    """Size, length and course of a training, for its provenance. start: the folder of weights that it began with."""
    before = {} if start is None else weights.matching(project_path(start))
    hours = 0 if start is None else all_hours(before)
    return {
        "parameters": trainer.size,
        "tokens_seen": trainer.tokens,
        "tokens_before": all_tokens(before),
        **({} if math.isnan(hours) else {"hours_before": round(hours, 3)}),
        "steps": trainer.step,
        "precision": trainer.accelerator.mixed_precision,
        "processes": trainer.processes,
        "hours": round(trainer.seconds / 3600, 3),
        "history": trainer.history,
    }


def _stored(taps: Taps, workspace: Workspace) -> bool:
    """Do the corpus's shards hold all that a drafter reads?"""
    taps = taps.resolve(workspace.target.layers)
    return not taps.kv and workspace.shards.hold(taps.hidden)


def _corpus(workspace: Workspace, drafter: Any, online: bool) -> CorpusReader:
    """The training corpus, whose states the target computes in the loop if `online`."""
    job, writing = workspace.job, workspace.text.settings
    return CorpusReader(
        workspace.shards.folder,
        job.batch,
        job.answers_only,
        job.settings.seed,
        workspace.target if online else None,
        drafter.taps.resolve(workspace.target.layers),
        writing.tokens,
        job.row_tokens,
        workspace.text.reading,
    )


def _count(workspace: Workspace, drafter: Any) -> TrainedWeights:
    """Fit a drafter by counting the training text, without gradient steps: in seconds, so whatever the budget."""
    job = workspace.job
    if job.start is not None:
        raise SpecBenchError(f"train.start={job.start}: drafter={drafter.name} is counted from nothing; leave it out")
    if job.build:
        workspace.write_text()
    workspace.build_held_out()
    begin = time.monotonic()
    texts = list(workspace.text.training_ids())
    if not texts:
        raise SpecBenchError(f"{workspace.text.folder} holds no training text to count; write it first (train.build=true)")
    tables, tokens = drafter.count(texts), sum(map(len, texts))
    hours = round((time.monotonic() - begin) / 3600, 6)
    answers = held_out(workspace.shards.folder, job.settings.validation_answers)
    acceptance = chain_acceptance(workspace.target, drafter, answers)
    counted = {
        "parameters": sum(table.numel() for table in tables.values()),
        "tokens_seen": tokens,
        "steps": 1,
        "hours": hours,
        "history": [{"step": 1, "tokens": tokens, "seconds": round(3600 * hours, 1), **_rounded(acceptance)}],
    }
    provenance = _provenance(workspace, {"unique_tokens": tokens}, counted, acceptance)
    return TrainedWeights(drafter, answers, provenance, workspace.target, tables)


def _rounded(counts: AcceptanceCounts) -> dict[str, Any]:
    likeliest = {f"alpha0_top{k}": round(share, 4) for k, share in counts.among_likeliest.items()}
    return {"chain_tau": round(counts.tau, 4), "n_alpha": [round(a, 4) for a in counts.alphas], **likeliest}


def _provenance(
    workspace: Workspace,
    data: Mapping[str, Any],
    measured: Mapping[str, Any],
    acceptance: AcceptanceCounts,
    adapter: Adapter | None = None,
) -> dict[str, Any]:
    """What was trained on what, by which recipe, how long, where, and how good it became."""
    job, recipe = workspace.job, workspace.recipe
    return {
        "drafter": job.drafter,
        "target": job.model.name,
        **_fingerprints(workspace.target.fingerprint(), adapter),
        "data": {**recipe["corpus"], **data},
        "recipe": {k: v for k, v in recipe.items() if k not in NOT_RECIPE},
        **measured,
        **workspace.provenance,
        "held_out": {**_rounded(acceptance), "answers": acceptance.answers},  # (tokens emitted, cycles) of each
    }


def _fingerprints(original: str, adapter: Adapter | None) -> dict[str, str]:
    """Of the target that is drafted for, and of that before its adapter, if it got one."""
    if adapter is None:
        return {"target_fingerprint": original}
    return {"target_fingerprint": adapter.fingerprint(original), "original_fingerprint": original}
