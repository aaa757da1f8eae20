"""The one trainer, on Accelerate. Of a drafter it knows `loss(batch)` and that a phase may `configure` it, nothing else.

A run survives a kill: its checkpoint holds weights, optimiser, schedule, step and random state, and the data order is
a function of seed and epoch, so that the resumed run takes the very steps the uninterrupted one would have taken.

Under `accelerate launch` every process takes its share of each batch, and gradients are averaged (DDP): the batch of the
configuration is the global one, whatever the number of processes. The first process logs and writes.
"""

import bisect
import json
import math
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from rich.console import Console
from torch import Tensor, nn

from specbench.common.budget import Budget
from specbench.common.errors import SpecBenchError, refusing
from specbench.engine.interface import Batch
from specbench.engine.tensors import unpickled
from specbench.training import checkpoint, parameters
from specbench.training.features import Corpus, Row
from specbench.training.loss_vocabulary import LossVocabulary
from specbench.training.metrics import Metrics
from specbench.training.overwriting import UNDECIDED
from specbench.training.precision import mixed
from specbench.training.recipe import TrainSettings, describe, phase_at, rates

METRICS_EVERY = 20  # steps after which metrics are read and shown


def trainable(drafter: nn.Module) -> parameters.Named:
    """What is the drafter's own: the parameters that require a gradient, by name."""
    return [(name, p) for name, p in drafter.named_parameters() if p.requires_grad]


def check(drafter: Any, settings: TrainSettings) -> None:
    """Refuse a recipe that this drafter cannot follow, before anything is trained or written.

    Raises:
        SpecBenchError: nothing to train; an option in some phase, or a parameter there or in a group, that it lacks.
    """
    named = trainable(drafter)
    if not named:
        raise SpecBenchError("this drafter has nothing to train")
    parameters.check(named, settings)
    for phase in settings.phases:
        if unknown := {k: v for k, v in phase.drafter.items() if k not in drafter.phased}:
            drafter.configure(**unknown)  # says what it has instead


def _decisive(settings: TrainSettings) -> dict[str, Any]:
    """What decides about the weights: the rest may differ when a killed run goes on."""
    return {k: v for k, v in asdict(settings).items() if k not in UNDECIDED["settings"]}


class _Objective(nn.Module):
    """A drafter whose forward is its loss: gradients of several processes meet at a module's forward."""

    def __init__(self, drafter: nn.Module):
        super().__init__()
        self.drafter = drafter

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        found: dict[str, Tensor] = self.drafter.loss(batch)  # type: ignore[operator]
        return found


class Paused(Exception):
    """A training whose time was over before its last step, and that was kept."""

    def __init__(self, step: int, total: int, seconds: float):
        super().__init__(f"{step} of {total} steps, about {seconds / 60:.0f} minutes more; the same command goes on there")


class Trainer:
    """Trains one drafter; `run` returns the history of what it measured.

    Args:
        drafter: bound to its target; only parameters that require a gradient are touched.
        validate: measures the drafter on held-out data, returns numbers to log.
        folder: of the checkpoint and, line by line, the log.
        shaped_by: what shapes the run beside settings and corpus, as plain values: a checkpoint of another run is refused.

    Raises:
        SpecBenchError: nothing to train; phases or groups with options or parameters that this drafter lacks.
    """

    def __init__(
        self,
        drafter: nn.Module,
        corpus: Corpus,
        settings: TrainSettings,
        validate: Callable[[], dict[str, Any]],
        folder: Path,
        shaped_by: Mapping[str, Any] | None = None,
    ):
        self.settings, self.corpus, self.validate, self.folder = settings, corpus, validate, folder
        self.shaped_by = {"settings": _decisive(settings), "corpus": corpus.digest(), **(shaped_by or {})}
        check(drafter, settings)
        self.named = trainable(drafter)
        self.parameters = [p for _, p in self.named]
        device = self.parameters[0].device
        precision = mixed(settings.precision, device, max(p.shape[-1] for p in self.parameters))
        self.dtype = self.parameters[0].dtype  # in which the drafter is used
        if precision != "no":  # in half precision an update smaller than a 256th of a weight would be lost
            self._cast(torch.float32)
        self.accelerator = Accelerator(
            mixed_precision=precision,
            cpu=device.type == "cpu",
            # a phase that trains a part of the drafter leaves gradients out that DDP would wait for
            kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=any(p.train for p in settings.phases))],
        )
        self.processes = self.accelerator.num_processes
        self.drafter, self.objective = drafter, _Objective(drafter)
        if self.processes > 1:
            self.objective = self.accelerator.prepare(self.objective)
        self.optimizers = [self.accelerator.prepare(o) for o in parameters.optimizers(self.named, settings)]
        self.peaks = [[group["lr"] for group in o.param_groups] for o in self.optimizers]
        self.ends = self._ends()
        self.total = int(min(settings.steps or math.inf, self.ends[-1]))
        self.rates = rates(settings, self.total)
        self.vocabulary = LossVocabulary(corpus, settings, self.accelerator.device)
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        self.phase = -1  # none has begun
        self.metrics = Metrics()
        self.history: list[dict[str, Any]] = []

    def _cast(self, dtype: torch.dtype) -> None:
        for parameter in self.parameters:
            parameter.data = parameter.data.to(dtype)

    def _batches(self, epoch: int) -> list[list[Row]]:
        """Those of which every process gets something."""
        return [items for items in self.corpus.batches(epoch) if len(items) >= self.processes]

    def _ends(self) -> list[int]:
        """Optimiser steps taken when each epoch is over, as far as `steps` lets it get.

        They are counted epoch by epoch: how many rows packing makes depends on the order in which it meets the texts.
        """
        ends, max_steps = [0], self.settings.steps or math.inf
        for epoch in range(self.settings.epochs):
            if ends[-1] < max_steps:
                ends.append(ends[-1] + len(self._steps(epoch)))
        return ends[1:]

    @property
    def size(self) -> int:
        """Trainable parameters."""
        return sum(p.numel() for p in self.parameters)

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint.pt"

    def run(self, budget: Budget | None = None) -> list[dict[str, Any]]:
        """Train to the end, from the last checkpoint if there is one; the drafter stays as the last phase configured it.

        Raises:
            Paused: the budget was over before; the next run goes on at this very step.
        """
        budget = budget or Budget()
        self._resume()
        console, settings = Console(stderr=True), self.settings
        self._print(console, describe(settings, self.total))
        self.drafter.train()
        now = saved = validated = time.monotonic()
        while self.step < self.total:
            epoch = bisect.bisect_right(self.ends, self.step)
            begin = self.ends[epoch - 1] if epoch else 0
            for step_batches in self._steps(epoch)[self.step - begin :]:
                self._enter(phase_at(settings, self.step, self.total))
                metrics, tokens = self._gradients(step_batches)
                self._update()
                self.step, self.tokens = self.step + 1, self.tokens + tokens
                self.metrics.add(metrics)
                before, now = now, time.monotonic()
                self.seconds += now - before
                if self.step % METRICS_EVERY == 0 or self.step == self.total:
                    self.metrics.read(self.step)
                    self._progress(console)
                if self._agreed(now - validated > settings.validate_minutes * 60 and self.step < self.total):
                    self._log(console)
                    now = validated = time.monotonic()  # validation is no training time
                if self._agreed(now - saved > settings.checkpoint_minutes * 60 or self.step == self.total):
                    self._save()
                    saved = time.monotonic()
                if self.step >= self.total:
                    break
                if self._agreed(not budget.allows(0)):
                    self._save()
                    raise Paused(self.step, self.total, self.seconds / self.step * (self.total - self.step))
        self._enter(len(settings.phases) - 1)
        for parameter in self.parameters:
            parameter.requires_grad_(True)  # what is the drafter's own, whatever the last phase trained
        self._cast(self.dtype)  # as it will be used: so is it measured now
        if not self.history or self.history[-1]["step"] != self.step:
            self._log(console)
            self._save()
        return self.history

    def _steps(self, epoch: int) -> list[list[list[Row]]]:
        """An epoch's batches, by optimiser step."""
        batches, each = self._batches(epoch), self.settings.accumulate
        return [batches[i : i + each] for i in range(0, len(batches), each)]

    def _enter(self, phase: int) -> None:
        """Begin a phase, if it has not begun. Options stay set, so that a resumed run sets those of earlier phases too."""
        if phase == self.phase:
            return
        self.metrics.read(self.step)
        settings = self.settings
        for begun in settings.phases[self.phase + 1 : phase + 1]:
            if begun.drafter:
                self.drafter.configure(**begun.drafter)  # type: ignore[operator]
        trained = parameters.trained_in(self.named, settings.phases[phase].train)
        for name, parameter in self.named:
            parameter.requires_grad_(name in trained)
        self.phase = phase
        self.metrics.smoothed.clear()  # another objective's loss is another number

    def _gradients(self, batches: list[list[Row]]) -> tuple[dict[str, Tensor], int]:
        """Of one optimiser step, accumulated over its batches; the last one's metrics and the tokens of all."""
        device, dtype = self.parameters[0].device, self.parameters[0].dtype
        metrics: dict[str, Tensor] = {}
        total = 0
        for items in batches:
            share = items[self.accelerator.process_index :: self.processes]
            batch = self.corpus.load(share, device, dtype)
            batch.vocabulary = self.vocabulary.of(self.settings.phases[self.phase], batch)
            batch.progress = self.step / self.total
            with self.accelerator.autocast():
                metrics = self.objective(batch)
            metrics, tokens = self._over_processes(metrics, batch, sum(b - a for row in share for _, a, b in row))
            self.accelerator.backward(metrics["loss"] / self.settings.accumulate)
            total += tokens
        return metrics, total

    def _over_processes(self, metrics: dict[str, Tensor], batch: Batch, own: int) -> tuple[dict[str, Tensor], int]:
        """Of several processes: means over the whole batch instead of this share of it with `own` tokens, and its tokens.

        Gradients are averaged over processes, so a share counts by its scored positions over their average. What is
        returned as `loss` has the gradient of this share and, like the other values, the value of the whole batch.
        """
        if self.processes == 1:
            return metrics, own
        scored = batch.scored.sum()
        totals: Tensor = self.accelerator.reduce(torch.stack([scored, torch.full_like(scored, own)]), "sum")
        share = scored / totals[0] * self.processes
        names = list(metrics)
        values: Tensor = self.accelerator.reduce(torch.stack([metrics[n].detach().float() for n in names]) * share, "mean")
        whole = dict(zip(names, values.unbind(), strict=True))
        loss = metrics["loss"] * share
        return whole | {"loss": loss + (whole["loss"] - loss.detach())}, int(totals[1])

    def _agreed(self, due: bool) -> bool:
        """The first process's clock decides for all."""
        if self.processes == 1:
            return due
        flag = torch.tensor(float(due and self.accelerator.is_main_process), device=self.accelerator.device)
        return bool(self.accelerator.reduce(flag, "sum") > 0)

    def _update(self) -> None:
        settings = self.settings
        if settings.clip is not None:
            accelerator = self.accelerator
            cut = {"norm": accelerator.clip_grad_norm_, "value": accelerator.clip_grad_value_}[settings.clip_by]
            cut(self.parameters, settings.clip)
        for optimizer, peaks in zip(self.optimizers, self.peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * self.rates[self.step]
            optimizer.step()
            optimizer.zero_grad()

    def _print(self, console: Console, line: str) -> None:
        if self.accelerator.is_main_process:
            console.print(line, highlight=False, soft_wrap=True)

    def _progress(self, console: Console) -> None:
        speed = self.tokens / max(self.seconds, 1e-9)
        left = self.seconds / self.step * (self.total - self.step)
        shown = " ".join(f"{k} {v:.4f}" for k, v in self.metrics.smoothed.items())
        self._print(console, f"step {self.step}/{self.total}  {shown}  {speed:,.0f} tokens/s  {left / 60:.1f} min left")

    def _log(self, console: Console) -> None:
        self.metrics.read(self.step)
        self.drafter.eval()
        entry = {"step": self.step, "tokens": self.tokens, "seconds": round(self.seconds, 1)}
        entry |= {k: round(v, 5) for k, v in self.metrics.smoothed.items()}
        with self.accelerator.autocast() if self.step < self.total else nullcontext():
            entry |= self.validate()
        self.drafter.train()
        self.history.append(entry)
        self._print(console, f"held out: {entry}")

    def _save(self) -> None:
        """Everything a resumed run needs, atomically; nothing once the loss is no number."""
        self.metrics.read(self.step)
        state = {
            "step": self.step,
            "total": self.total,
            "shaped_by": json.dumps(self.shaped_by),
            "tokens": self.tokens,
            "seconds": self.seconds,
            "history": self.history,
            "parameters": [p.detach().cpu() for p in self.parameters],
            "optimizers": [o.state_dict() for o in self.optimizers],
        }
        checkpoint.write(self.checkpoint, state, self.accelerator)

    def _resume(self) -> None:
        if not self.checkpoint.exists():
            torch.manual_seed(self.settings.seed + self.accelerator.process_index)
            return
        state = unpickled(self.checkpoint, "remove it to begin anew")
        with refusing(f"{self.checkpoint} is not of this training; use another train.name or remove it"):
            checkpoint.check(self.checkpoint, state, self.total, self.shaped_by, self.processes)
            self._restore(state)
        self._print(Console(stderr=True), f"resuming at step {self.step} of {self.total}")

    def _restore(self, state: dict[str, Any]) -> None:
        """Go on where a saved state stands. Raises anything at all for one that is not of this drafter and optimizer."""
        with torch.no_grad():
            for parameter, value in zip(self.parameters, state["parameters"], strict=True):
                parameter.copy_(value)
        for optimizer, value in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(value)
        checkpoint.restore_random_state(state, self.accelerator.process_index)
        self.step, self.tokens, self.seconds = state["step"], state["tokens"], state["seconds"]
        self.history = state["history"]
