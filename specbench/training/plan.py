"""Disk, memory and time that a training needs, before it starts, from a trial of seconds. Refuses what cannot fit."""

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specbench.common import environment
from specbench.common.errors import SpecBenchError
from specbench.engine.device import free_unused
from specbench.engine.interface import Batch
from specbench.engine.target import Target
from specbench.training.answer_writer import row_bytes, rows_that_fit, writes_quantised
from specbench.training.corpus import CorpusText
from specbench.training.job import TrainJob
from specbench.training.parameters import check
from specbench.training.precision import mixed
from specbench.training.recipe import TrainSettings
from specbench.training.shards import Shards

TRIAL_LENGTH = 192  # tokens a sequence in the trial: near an answer's usual length
LOGIT_COPIES = 4  # float32 tensors of the logits' size that a loss over the vocabulary holds at once


def plan(job: TrainJob, shards: Shards, drafter: Any, online: bool, processes: int = 1) -> str:
    """A line on the tokens, minutes, disk and memory that a training needs; minutes from a trial of one batch.

    online: the target computes states in the loop. processes: that share every batch; memory is that of one of them.

    Raises:
        SpecBenchError: disk or memory do not suffice, or the drafter cannot follow the recipe; or the target caps its
            logits.
    """
    settings, text, target = job.settings, shards.text, shards.text.target
    check(drafter, settings)
    if getattr(target.config, "final_logit_softcapping", None):
        raise SpecBenchError(
            "this target caps its logits (final_logit_softcapping), which the losses leave out; train for another model="
        )
    missing = text.missing() if job.build else 0
    tokens, without_shard = shards.tokens()
    stored_anew = without_shard + missing if job.build else 0
    weights = sum(p.numel() * p.element_size() for p in drafter.parameters() if p.requires_grad)
    row_tokens = job.row_tokens or text.settings.text_tokens
    training_tokens = settings.epochs * (tokens + missing)
    if settings.steps is not None:
        training_tokens = min(training_tokens, settings.steps * settings.accumulate * job.batch * row_tokens)
    vocabularies = [settings.vocabulary_in(phase) or target.vocab_size for phase in settings.phases]
    rows = -(-job.batch // processes)
    logits = 4 * rows * row_tokens * min(max(vocabularies), target.vocab_size)
    least = 3 * weights + LOGIT_COPIES * logits  # gradients, two moments, the loss over the vocabulary
    written = _answer_cache(text) if missing else 0  # before, and freed
    disk = stored_anew * shards.bytes_per_token + 2 * 3 * weights  # corpus, two checkpoints of weights and two moments each
    _require(disk, shards.folder, max(least, written), target.device)  # before the trial would fill the memory
    trial = _try(drafter, target, settings, rows, online)
    memory = max(least + int(trial.kept * rows * row_tokens), written)
    _require(disk, shards.folder, memory, target.device)
    seconds = training_tokens / processes * trial.seconds
    return (
        f"plan: {missing:,} more tokens of text, states of {stored_anew:,}; training at most {training_tokens:,} tokens, "
        f"about {seconds / 60:.0f} min; "
        f"disk {disk / 1e9:.2f} GB of {_free_disk(shards.folder) / 1e9:.0f} GB free; memory "
        f"about {memory / 1e9:.1f} GB of {environment.free_memory(target.device) / 1e9:.0f} GB free"
    )


def _answer_cache(text: CorpusText) -> int:
    """Bytes of the keys and values of the answers that are written side by side."""
    target, settings = text.target, text.settings
    quantise = writes_quantised(target, settings.precision)
    rows = rows_that_fit(target, settings.rows, settings.text_tokens, quantise)
    return rows * row_bytes(target, settings.text_tokens, quantise)


def _free_disk(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def _require(disk: int, folder: Path, memory: int, device: torch.device) -> None:
    """Raises `SpecBenchError` where so many bytes are not free, and says how to need less."""
    if disk > (free := _free_disk(folder)):
        raise SpecBenchError(
            f"this training needs up to {disk / 1e9:.1f} GB and {folder} has {free / 1e9:.1f} GB "
            "free; lower train.corpus.tokens, compute the target's states in the loop instead of storing them "
            "(train.corpus.states=false), or set SPECBENCH_CACHE to a larger disk"
        )
    if memory > (free := environment.free_memory(device)):
        raise SpecBenchError(
            f"this training needs about {memory / 1e9:.1f} GB more memory and {device} has "
            f"{free / 1e9:.1f} GB free; lower train.batch (with train.settings.accumulate) or confine "
            "the loss with train.settings.vocabulary, in every phase"
        )


@dataclass(frozen=True)
class _Trial:
    """What a training takes per token. kept: bytes held for the backward pass, in the phase that holds most."""

    seconds: float
    kept: float


def _try(drafter: Any, target: Target, settings: TrainSettings, rows: int, online: bool) -> _Trial:
    """Two steps in every phase on random tokens and states; leaves gradients, options and random state as they were."""
    seconds, kept, progress = 0.0, 0.0, 0.0
    options = {name: getattr(drafter, name) for name in drafter.phased}
    drafter.train()
    length = min(TRIAL_LENGTH, target.max_context)
    with torch.random.fork_rng():
        for phase in settings.phases:
            drafter.configure(**phase.drafter)
            progress += phase.share / 2
            step = partial(_step, drafter, target, settings, settings.vocabulary_in(phase), progress, online)
            (_, fewer), (spent, more) = step(rows, length // 2), step(rows, length)  # the first one warms up
            seconds += phase.share * spent / (rows * length)
            kept = max(kept, (more - fewer) / (rows * (length - length // 2)))  # weights that are held, too, do not grow
            progress += phase.share / 2
    drafter.configure(**options)
    free_unused()
    return _Trial(seconds, kept)


def _step(
    drafter: Any,
    target: Target,
    settings: TrainSettings,
    vocabulary: int | None,
    progress: float,
    online: bool,
    rows: int,
    length: int,
) -> tuple[float, int]:
    """Seconds of one step, and bytes held for its backward pass."""
    begin = time.perf_counter()
    tokens = torch.randint(target.vocab_size, (rows, length), device=target.device)
    everywhere = torch.ones_like(tokens, dtype=torch.bool)
    states = torch.randn(*tokens.shape, target.hidden_size, device=target.device, dtype=target.dtype)
    batch = Batch(tokens, states, everywhere, everywhere.clone(), progress=progress)
    batch.hidden = dict.fromkeys(drafter.taps.hidden, states)
    if online:
        batch.states, batch.hidden, batch.kv = target.tapped(tokens, drafter.taps)
    if vocabulary is not None:
        batch.vocabulary = torch.arange(min(vocabulary, target.vocab_size), device=target.device)
    half = mixed(settings.precision, target.device, target.hidden_size) != "no"
    with torch.autocast(target.device.type, torch.bfloat16, enabled=half), _counting_held() as held:
        loss = drafter.loss(batch)["loss"]
    loss.backward()
    float(loss.detach())  # waits for the device
    drafter.zero_grad(set_to_none=True)
    return time.perf_counter() - begin, sum(held.values())


@contextmanager
def _counting_held() -> Iterator[dict[int, int]]:
    """Bytes by address of what autograd keeps for the backward pass, each memory once."""
    held: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage()
        held[memory.data_ptr()] = memory.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield held
