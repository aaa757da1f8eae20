"""The one trainer, on Accelerate. Of a drafter it uses `loss(batch)`, `configure`, `phased` and the size of `embedding`.

A killed run resumes exactly: its checkpoint holds weights, optimisers, step and random state, and the order of the data
is a function of seed and epoch.

Under `accelerate launch` each process takes its share of every batch, and gradients are averaged (DDP): the batch of the
configuration is the global one. The first process logs and writes.
"""

import bisect
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedDataParallelKwargs, broadcast_object_list, gather_object
from torch import Tensor, nn

from specbench.common.budget import UNFINISHED, Budget
from specbench.common.errors import SpecBenchError, refusing
from specbench.engine.interface import Batch
from specbench.engine.tensors import unpickled
from specbench.training import checkpoint, parameters
from specbench.training.corpus_reader import CorpusReader, Row
from specbench.training.loss_vocabulary import LossVocabulary
from specbench.training.metrics import Metrics
from specbench.training.overwriting import NON_IDENTITY_OPTIONS
from specbench.training.precision import mixed
from specbench.training.recipe import TrainSettings, describe, evenly_spaced, phase_at, rates

METRICS_EVERY = 20  # steps between two readings of the metrics


class _Objective(nn.Module):
    """A drafter whose forward is its loss: DDP averages gradients at a module's forward."""

    def __init__(self, drafter: Any):
        super().__init__()
        self.drafter = drafter

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        metrics: dict[str, Tensor] = self.drafter.loss(batch)
        return metrics


class Paused(Exception):
    """The budget ended before the last step; the checkpoint was written."""

    def __init__(self, step: int, total: int, seconds: float):
        super().__init__(f"{step} of {total} steps, about {seconds / 60:.0f} minutes more; {UNFINISHED}")


class Trainer:
    """Trains one drafter; `run` returns the history of what it measured.

    Args:
        drafter: bound to its target; only parameters that require a gradient are touched.
        validate: measures the drafter on held-out data, returns numbers to log.
        folder: of the checkpoint.
        shaped_by: what else determines the weights, as plain values: a checkpoint made with others is refused.

    Raises:
        SpecBenchError: see `parameters.check`.
    """

    def __init__(
        self,
        drafter: Any,
        corpus: CorpusReader,
        settings: TrainSettings,
        validate: Callable[[], dict[str, Any]],
        folder: Path,
        shaped_by: Mapping[str, Any] | None = None,
    ):
        parameters.check(drafter, settings)
        self.settings, self.corpus, self.validate = settings, corpus, validate
        self.checkpoint = folder / checkpoint.FILE
        decisive = {k: v for k, v in asdict(settings).items() if k not in NON_IDENTITY_OPTIONS["settings"]}
        self.shaped_by = {"settings": decisive, "corpus": corpus.digest(), **(shaped_by or {})}
        self.named = parameters.trainable(drafter)
        self.parameters = [p for _, p in self.named]
        self.size = sum(p.numel() for p in self.parameters)
        device = self.parameters[0].device
        self.precision = self._settle_precision(device)
        self.dtype = self.parameters[0].dtype  # in which the drafter is used
        if self.precision != "no":  # in half precision an update smaller than a 256th of a weight would be lost
            self._cast(torch.float32)
        self.accelerator = Accelerator(
            mixed_precision=self.precision,
            cpu=device.type == "cpu",
            # a phase that trains or runs a part of the drafter leaves gradients out that DDP would wait for
            kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=len(settings.phases) > 1)],
        )
        self.processes = self.accelerator.num_processes
        self.drafter, self.objective = drafter, _Objective(drafter)
        if self.processes > 1:
            self.objective = self.accelerator.prepare(self.objective)
        self.optimizer = self.accelerator.prepare(parameters.optimizer(self.named, settings))
        self.peaks = [group["lr"] for group in self.optimizer.param_groups]
        self.starts = self._starts()
        self.total = int(min(settings.steps or math.inf, self.starts[-1]))
        self.rates = rates(settings, self.total)
        self.vocabulary = LossVocabulary(corpus, settings, drafter, self.accelerator.device)
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        self.resumed = (0, 0, 0.0)  # step, tokens and seconds where this process began
        self.phase, self.entered = -1, (0, 0.0)  # before the first; step and seconds where this process entered it
        self.metrics = Metrics()
        self.history: list[dict[str, Any]] = []

    def _settle_precision(self, device: torch.device) -> str:
        """What `auto` stands for, by a trial of the first process; an interrupted training keeps what it had."""
        precision = mixed(self.settings.precision, device, max(p.shape[-1] for p in self.parameters))
        if self.settings.precision == "auto" and self.checkpoint.exists():
            state = unpickled(self.checkpoint, "remove it to begin anew")
            precision = state.get("precision", precision) if isinstance(state, dict) else precision
        PartialState(cpu=device.type == "cpu")  # begins the processes' connection, if nothing has
        settled: str = broadcast_object_list([precision])[0]
        return settled

    def _cast(self, dtype: torch.dtype) -> None:
        for parameter in self.parameters:
            parameter.data = parameter.data.to(dtype)

    def _steps(self, epoch: int) -> list[list[list[Row]]]:
        """An epoch's batches, by optimiser step; without batches too small to give every process a row."""
        batches = [rows for rows in self.corpus.batches(epoch) if len(rows) >= self.processes]
        count = self.settings.accumulate
        return [batches[i : i + count] for i in range(0, len(batches), count)]

    def _starts(self) -> list[int]:
        """First step of every epoch that `steps` lets begin, and the end of the last.

        Counted epoch by epoch: into how many rows texts are packed depends on their order.
        """
        starts, max_steps = [0], self.settings.steps or math.inf
        for epoch in range(self.settings.epochs):
            if starts[-1] < max_steps:
                starts.append(starts[-1] + len(self._steps(epoch)))
        return starts

    def _remaining_steps(self) -> Iterator[list[list[Row]]]:
        """The batches of every optimiser step from the current one on."""
        while self.step < self.total:
            epoch = bisect.bisect_right(self.starts, self.step) - 1
            yield from self._steps(epoch)[self.step - self.starts[epoch] :][: self.total - self.step]

    def run(self, budget: Budget | None = None) -> list[dict[str, Any]]:
        """Train to the end, from the last checkpoint if there is one; the drafter stays as the last phase configured it.

        Raises:
            Paused: the budget was over before; the next run goes on at this very step.
        """
        budget, settings = budget or Budget(), self.settings
        self._resume()
        self.accelerator.print(describe(settings, self.total), file=sys.stderr)
        self.drafter.train()
        milestones = evenly_spaced(self.total, settings.validations)
        if self.step in milestones and not self._logged:  # killed while it validated
            self._log()
        now = saved = validated = time.monotonic()
        for batches in self._remaining_steps():
            self._enter(phase_at(settings, self.step, self.total))
            metrics, tokens = self._gradients(batches)
            self._update()
            self.step, self.tokens = self.step + 1, self.tokens + tokens
            self.metrics.add(metrics)
            before, now = now, time.monotonic()
            self.seconds += now - before
            over = self.step == self.total
            if self.step % METRICS_EVERY == 0 or over:
                self.metrics.read(self.step)
                self._show_progress()
            validating, saving, pausing = self._agreed(
                now - validated > settings.validate_minutes * 60,
                now - saved > settings.checkpoint_minutes * 60,
                not budget.allows(0),
            )
            if (validating or self.step in milestones) and not over:
                self._save()  # a validation takes minutes; its result is saved below
                self._log()
                now = validated = time.monotonic()  # validation is no training time
                saving = True
            if saving or pausing or over:
                self._save()
                saved = time.monotonic()
            if pausing and not over:
                raise Paused(self.step, self.total, self.seconds_left)
        self._enter(len(settings.phases) - 1)
        for parameter in self.parameters:
            parameter.requires_grad_(True)  # whatever the last phase trained
        self._cast(self.dtype)
        if not self._logged:
            self._log()
            self._save()
        return self.history

    @property
    def _logged(self) -> bool:
        """Was this step validated?"""
        return bool(self.history) and bool(self.history[-1]["step"] == self.step)

    def _enter(self, phase: int) -> None:
        """Begin a phase unless it has begun. Options stay set, so a resumed run sets those of earlier phases too."""
        if phase == self.phase:
            return
        self.metrics.read(self.step)
        phases = self.settings.phases
        for begun in phases[self.phase + 1 : phase + 1]:
            self.drafter.configure(**begun.drafter)
        trained = parameters.trained_in(self.named, phases[phase].train)
        for name, parameter in self.named:
            parameter.requires_grad_(name in trained)
        self.phase, self.entered = phase, (self.step, self.seconds)
        self.metrics.smoothed.clear()  # losses of two objectives are not averaged

    def _gradients(self, batches: list[list[Row]]) -> tuple[dict[str, Tensor], int]:
        """Of one optimiser step, accumulated over its batches; the last one's metrics and the tokens of all."""
        device, dtype = self.parameters[0].device, self.parameters[0].dtype
        metrics: dict[str, Tensor] = {}
        total = 0
        for rows in batches:
            share = rows[self.accelerator.process_index :: self.processes]
            batch = self.corpus.load(share, device, dtype)
            self.vocabulary.confine(batch, self.settings.phases[self.phase])
            batch.progress = self.step / self.total
            with self.accelerator.autocast():
                metrics = self.objective(batch)
            loss, metrics = self._over_processes(metrics, batch)
            self.accelerator.backward(loss / len(batches))
            total += sum(b - a for row in rows for _, a, b in row)
        return metrics, total

    def _over_processes(self, metrics: dict[str, Tensor], batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """This process's part of the loss, and the metrics of the whole batch, from those of its share.

        Gradients are averaged over processes, so a share counts by its scored positions over their average.
        """
        if self.processes == 1:
            return metrics["loss"], metrics
        scored = batch.scored.sum()
        everywhere: Tensor = self.accelerator.reduce(scored, "sum")
        share = scored / everywhere.clamp(min=1) * self.processes
        names = list(metrics)
        values: Tensor = self.accelerator.reduce(torch.stack([metrics[n].detach().float() for n in names]) * share, "mean")
        return metrics["loss"] * share, dict(zip(names, values.unbind(), strict=True))

    def _agreed(self, *due: bool) -> list[bool]:
        """What the first process's clock says, in all of them; asked for seldom, since the answer waits for the device."""
        if self.processes == 1:
            return list(due)
        if self.step > METRICS_EVERY and self.step % METRICS_EVERY:
            return [False] * len(due)
        agreed: list[bool] = broadcast_object_list(list(due))
        return agreed

    def _update(self) -> None:
        settings = self.settings
        if settings.clip is not None:
            accelerator = self.accelerator
            clip = {"norm": accelerator.clip_grad_norm_, "value": accelerator.clip_grad_value_}[settings.clip_by]
            clip(self.parameters, settings.clip)
        for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
            group["lr"] = peak * self.rates[self.step]
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def seconds_left(self) -> float:
        """At the pace of this phase in this process: the machine may have been busier before, an earlier phase cheaper."""
        step, seconds = self.entered
        return (self.seconds - seconds) / (self.step - step) * (self.total - self.step)

    def _show_progress(self) -> None:
        _, tokens, seconds = self.resumed
        speed = f"{(self.tokens - tokens) / max(self.seconds - seconds, 1e-9):,.0f} tokens/s"
        speed += f"  {self.seconds_left / 60:.1f} min left"
        losses = " ".join(f"{k} {v:.4f}" for k, v in self.metrics.smoothed.items())
        self.accelerator.print(f"step {self.step}/{self.total}  {losses}  {speed}", file=sys.stderr)

    def _log(self) -> None:
        """Validate the drafter as it will be used: in its own dtype, whatever that of the weights in training."""
        self.metrics.read(self.step)
        self.drafter.eval()
        entry = {"step": self.step, "tokens": self.tokens, "seconds": round(self.seconds, 1)}
        entry |= {k: round(v, 5) for k, v in self.metrics.smoothed.items()}
        trained = [p.data for p in self.parameters]
        self._cast(self.dtype)
        entry |= self.validate()
        for parameter, data in zip(self.parameters, trained, strict=True):
            parameter.data = data
        self.drafter.train()
        self.history.append(entry)
        self.accelerator.print(f"held out: {entry}", file=sys.stderr)

    def _save(self) -> None:
        """Write the checkpoint; raises `SpecBenchError` instead if the loss is not finite."""
        self.metrics.read(self.step)
        state = {
            "step": self.step,
            "total": self.total,
            "shaped_by": json.dumps(self.shaped_by),
            "tokens": self.tokens,
            "seconds": self.seconds,
            "history": self.history,
            "phase": self.phase,
            "smoothed": self.metrics.smoothed,
            "parameters": [p.detach().cpu() for p in self.parameters],
            "optimizer": self.optimizer.state_dict(),
            "precision": self.precision,
        }
        checkpoint.write(self.checkpoint, state, self.accelerator)

    def _resume(self) -> None:
        """Restore the checkpoint, if there is one. Raises `SpecBenchError` for one of another training."""
        if self.checkpoint.exists():
            self._restore()
        else:
            torch.manual_seed(self.settings.seed + self.accelerator.process_index)
        if len(set(gather_object([self.step]))) > 1:
            raise SpecBenchError(
                f"some processes see {self.checkpoint} others do not; give SPECBENCH_CACHE a folder that all nodes share"
            )

    def _restore(self) -> None:
        state = unpickled(self.checkpoint, "remove it to begin anew")
        with refusing(f"{self.checkpoint} is not of this training; {checkpoint.HINT}"), torch.no_grad():
            checkpoint.check(self.checkpoint, state, self.total, self.shaped_by, self.processes)
            for parameter, value in zip(self.parameters, state["parameters"], strict=True):
                parameter.copy_(value)
            self.optimizer.load_state_dict(state["optimizer"])
            checkpoint.restore_random_state(state, self.accelerator.process_index)
            self.step, self.tokens, self.seconds = state["step"], state["tokens"], state["seconds"]
            self.resumed = (self.step, self.tokens, self.seconds)
            self.history = state["history"]
            self._enter(state["phase"])
            self.metrics.smoothed.update(state["smoothed"])
        self.accelerator.print(f"resuming at step {self.step} of {self.total}", file=sys.stderr)
