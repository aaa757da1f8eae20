"""What a training takes, said before it starts: time from a trial of a few seconds, disk, memory. Refuses what cannot fit.

Knows the corpus, the trainer's settings and that a drafter owns its loss.
"""

import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from specbench.common import environment
from specbench.common.errors import SpecBenchError
from specbench.engine.interface import Batch
from specbench.engine.target import Target
from specbench.training.precision import mixed
from specbench.training.recipe import TrainSettings
from specbench.training.shards import Shards
from specbench.training.trainer import check

TRIAL_LENGTH = 192  # tokens a sequence in the trial: near an answer's usual length
FLOATS = 4  # of a logit's size that a loss over the vocabulary holds at once


@dataclass(frozen=True)
class BatchShape:
    """Rows of a batch, and tokens that each is packed to; None: a row is one sequence."""

    rows: int
    row_tokens: int | None = None


@dataclass(frozen=True)
class Plan:
    """Estimates: seconds, bytes, and tokens they are for."""

    corpus_tokens: int  # still to be written
    corpus_seconds: float
    corpus_bytes: int
    training_tokens: int  # at most
    training_seconds: float
    checkpoint_bytes: int
    memory_bytes: int  # beyond the target and the drafter: gradients, optimiser, the loss over the whole vocabulary
    folder: Path
    device: torch.device

    def __str__(self) -> str:
        return (
            f"plan: corpus {self.corpus_tokens:,} more tokens, about {self.corpus_seconds / 60:.0f} min; training at most "
            f"{self.training_tokens:,} tokens, about {self.training_seconds / 60:.0f} min; disk "
            f"{(self.corpus_bytes + self.checkpoint_bytes) / 1e9:.2f} GB of {self.free_disk() / 1e9:.0f} GB free; memory "
            f"about {self.memory_bytes / 1e9:.1f} GB of {self.free_memory() / 1e9:.0f} GB free"
        )

    def free_disk(self) -> int:
        return shutil.disk_usage(self.folder).free

    def free_memory(self) -> int:
        return environment.free_memory(self.device)

    def check(self) -> None:
        """Raises `SpecBenchError` where disk or memory do not suffice, with what would."""
        disk = self.corpus_bytes + self.checkpoint_bytes
        if disk > self.free_disk():
            raise SpecBenchError(
                f"this training needs up to {disk / 1e9:.1f} GB and {self.folder} has {self.free_disk() / 1e9:.1f} GB "
                "free; lower train.corpus.tokens or set SPECBENCH_CACHE to a larger disk"
            )
        if self.memory_bytes > self.free_memory():
            raise SpecBenchError(
                f"this training needs about {self.memory_bytes / 1e9:.1f} GB more memory and {self.device} has "
                f"{self.free_memory() / 1e9:.1f} GB free; lower train.batch (with train.settings.accumulate) or confine "
                "the loss with train.settings.vocabulary, in every phase"
            )


def plan(shards: Shards, drafter: Any, settings: TrainSettings, batch: BatchShape, online: bool, build: bool) -> Plan:
    """Try a training batch and, if tokens are missing, a pass that writes and one that reads them; estimate the rest.

    build: what is missing of the corpus is to be made, not done without.

    Raises:
        SpecBenchError: disk or memory do not suffice, or the drafter cannot follow the recipe.
    """
    check(drafter, settings)
    text, target = shards.text, shards.text.target
    missing, (tokens, unread) = text.missing() if build else 0, shards.tokens()
    unread = unread + missing if build else 0
    own = [p for p in drafter.parameters() if p.requires_grad]
    size = sum(p.numel() * p.element_size() for p in own)
    longest = batch.row_tokens or text.settings.text_tokens
    logits = FLOATS * 4 * batch.rows * longest * target.vocab_size
    ids = [settings.vocabulary_in(phase) or target.vocab_size for phase in settings.phases]
    logits = logits * min(max(ids), target.vocab_size) // target.vocab_size
    passes = settings.epochs * (tokens + missing)
    if settings.steps is not None:
        passes = min(passes, settings.steps * settings.accumulate * batch.rows * longest)
    sizes = Plan(
        corpus_tokens=missing,
        corpus_seconds=0.0,
        corpus_bytes=unread * shards.bytes_per_token,
        training_tokens=passes,
        training_seconds=0.0,
        checkpoint_bytes=2 * 3 * size,  # weights and two moments, old and new file side by side
        memory_bytes=3 * size + logits,
        folder=shards.folder,
        device=target.device,
    )
    sizes.check()  # before the trial would fill the memory
    seconds = missing * text.seconds_per_token() if missing else 0.0
    seconds += unread * shards.seconds_per_token() if unread and text.settings.states else 0.0
    return replace(
        sizes,
        corpus_seconds=seconds,
        training_seconds=passes * _training_seconds(drafter, target, settings, batch.rows, online),
    )


def _training_seconds(drafter: Any, target: Target, settings: TrainSettings, batch: int, online: bool) -> float:
    """Per token, one step in every phase, weighted by its share, on random tokens and states.

    Leaves gradients, options and random state as they were.
    """
    length = min(TRIAL_LENGTH, target.max_context)
    seconds, progress = 0.0, 0.0
    options = {name: getattr(drafter, name) for name in drafter.phased}
    drafter.train()
    half = mixed(settings.precision, target.device, target.hidden_size) != "no"
    with torch.random.fork_rng():
        tokens = torch.randint(target.vocab_size, (batch, length), device=target.device)
        everywhere = torch.ones_like(tokens, dtype=torch.bool)
        states = torch.randn(batch, length, target.hidden_size, device=target.device, dtype=target.dtype)
        for trial, phase in enumerate((settings.phases[0], *settings.phases)):
            begin = time.perf_counter()
            drafter.configure(**phase.drafter)
            made = Batch(tokens, states, everywhere, everywhere.clone(), progress=progress + phase.share / 2)
            if online:
                made.states, made.hidden, made.kv = target.tapped(tokens, drafter.taps)
            count = settings.vocabulary_in(phase)
            if count is not None:
                made.vocabulary = torch.arange(min(count, target.vocab_size), device=target.device)
            with torch.autocast(target.device.type, torch.bfloat16, enabled=half):
                loss = drafter.loss(made)["loss"]
            loss.backward()
            float(loss.detach())  # waits for the device
            drafter.zero_grad(set_to_none=True)
            if trial:  # the first one warms up
                seconds += phase.share * (time.perf_counter() - begin)
                progress += phase.share
    drafter.configure(**options)
    return seconds / tokens.numel()
