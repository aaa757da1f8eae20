"""The one trainer, on Accelerate. Knows that a drafter owns its `loss(batch)`, nothing else about it.

A run survives a kill: its checkpoint holds weights, optimiser, schedule, step and random state, and the data order is
a function of seed and epoch, so that the resumed run takes the very steps the uninterrupted one would have taken.

Under `accelerate launch` every process takes its share of each batch, and gradients are averaged (DDP): the batch of the
configuration is the global one, whatever the number of processes. The first process logs and writes.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from rich.console import Console
from torch import Tensor, nn

from specbench.assets import atomic_path
from specbench.engine.interface import Batch
from specbench.errors import SpecBenchError
from specbench.training.features import Corpus


@dataclass(frozen=True)
class TrainSettings:
    """How a drafter is trained.

    Attributes:
        epochs: passes over the corpus. steps: end after this many optimiser steps, whatever the epochs say.
        lr: peak, of AdamW or, with `optimizer: muon`, of Muon on the matrices (vectors keep AdamW at `vector_lr`).
        warmup_steps: linear. decay: `constant`, `linear` or `cosine` to zero at the end.
        clip: norm of the gradient. accumulate: batches a step.
        precision: `no`, `bf16` or `fp16` (Accelerate's mixed precision).
        vocabulary: confine the classification loss to this many frequent ids; None for all.
        full_vocabulary_from: share of the steps after which it runs over all ids again.
        checkpoint_minutes, validate_minutes: how often.
        validation_answers: held-out answers replayed.
        seed: data order, initial weights, noise.
    """

    epochs: int = 20
    steps: int | None = None
    optimizer: str = "adamw"
    lr: float = 3e-5
    vector_lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    warmup_steps: int = 2000
    decay: str = "linear"
    clip: float = 0.5
    accumulate: int = 1
    precision: str = "no"
    vocabulary: int | None = None
    full_vocabulary_from: float = 1.0
    checkpoint_minutes: float = 10.0
    validate_minutes: float = 15.0
    validation_answers: int = 8
    seed: int = 0


class _Objective(nn.Module):
    """A drafter whose forward is its loss: gradients of several processes meet at a module's forward."""

    def __init__(self, drafter: nn.Module):
        super().__init__()
        self.drafter = drafter

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        found: dict[str, Tensor] = self.drafter.loss(batch)  # type: ignore[operator]
        return found


class Trainer:
    """Trains one drafter; `run` returns the history of what it measured.

    Args:
        drafter: bound to its target; only parameters that require a gradient are touched.
        validate: measures the drafter on held-out data, returns numbers to log.
        folder: of the checkpoint and, line by line, the log.
    """

    def __init__(
        self,
        drafter: nn.Module,
        corpus: Corpus,
        settings: TrainSettings,
        validate: Callable[[], dict[str, Any]],
        folder: Path,
    ):
        self.settings, self.corpus, self.validate, self.folder = settings, corpus, validate, folder
        self.accelerator = Accelerator(
            mixed_precision=settings.precision, cpu=next(drafter.parameters()).device.type == "cpu"
        )
        self.processes = self.accelerator.num_processes
        self.drafter, self.objective = drafter, _Objective(drafter)
        if self.processes > 1:
            self.objective = self.accelerator.prepare(self.objective)
        self.parameters = [p for p in drafter.parameters() if p.requires_grad]
        if not self.parameters:
            raise SpecBenchError("this drafter has nothing to train")
        self.optimizers = [self.accelerator.prepare(o) for o in _optimizers(self.parameters, settings)]
        self.peaks = [[group["lr"] for group in o.param_groups] for o in self.optimizers]
        self.per_epoch = math.ceil(len(self._batches(0)) / settings.accumulate)
        self.total = min(settings.steps or math.inf, settings.epochs * self.per_epoch)
        self.frequent = None
        if settings.vocabulary is not None:
            self.frequent = corpus.frequent(settings.vocabulary).to(self.accelerator.device)
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        self.history: list[dict[str, Any]] = []

    def _batches(self, epoch: int) -> list[list[tuple[Path, int, int]]]:
        """Those of which every process gets something."""
        return [items for items in self.corpus.batches(epoch) if len(items) >= self.processes]

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint.pt"

    def run(self) -> list[dict[str, Any]]:
        """Train to the end, from the last checkpoint if there is one."""
        self._resume()
        console, settings = Console(stderr=True), self.settings
        device, dtype = self.parameters[0].device, self.parameters[0].dtype
        self.drafter.train()
        now = saved = validated = time.monotonic()
        running: dict[str, float] = {}
        while self.step < self.total:
            epoch, at = divmod(self.step, self.per_epoch)
            batches = self._batches(epoch)
            for index in range(at, self.per_epoch):
                metrics, count = {}, 0
                for items in batches[index * settings.accumulate : (index + 1) * settings.accumulate]:
                    batch = self.corpus.load(items[self.accelerator.process_index :: self.processes], device, dtype)
                    if self.step < settings.full_vocabulary_from * self.total:
                        batch.vocabulary = self.frequent
                    batch.progress = self.step / self.total
                    with self.accelerator.autocast():
                        metrics = self.objective(batch)
                    metrics, tokens = self._together(metrics, batch)
                    self.accelerator.backward(metrics["loss"] / settings.accumulate)
                    count += tokens
                self._update(metrics["loss"])
                self.step, self.tokens = self.step + 1, self.tokens + count
                for name, value in metrics.items():
                    new = float(value.detach())
                    running[name] = 0.98 * running.get(name, new) + 0.02 * new
                before, now = now, time.monotonic()
                self.seconds += now - before
                if self.step % 20 == 0 or self.step == self.total:
                    self._progress(console, running)
                if self._agreed(now - validated > settings.validate_minutes * 60 and self.step < self.total):
                    self._log(console, running)
                    now = validated = time.monotonic()  # validation is no training time
                if self._agreed(now - saved > settings.checkpoint_minutes * 60 or self.step == self.total):
                    self._save()
                    saved = time.monotonic()
                if self.step >= self.total:
                    break
        if not self.history or self.history[-1]["step"] != self.step:
            self._log(console, running)
            self._save()
        return self.history

    def _together(self, metrics: dict[str, Tensor], batch: Batch) -> tuple[dict[str, Tensor], int]:
        """Of several processes: means over the whole batch instead of this share of it, and its tokens.

        Gradients are averaged over processes, so a share counts by its scored positions over their average. What is
        returned as `loss` has the gradient of this share and, like the other values, the value of the whole batch.
        """
        tokens = batch.valid.sum()
        if self.processes == 1:
            return metrics, int(tokens)
        scored = batch.scored.sum()
        totals: Tensor = self.accelerator.reduce(torch.stack([scored, tokens]), "sum")
        share = scored / totals[0] * self.processes
        names = list(metrics)
        values: Tensor = self.accelerator.reduce(torch.stack([metrics[n].detach().float() for n in names]) * share, "mean")
        whole = dict(zip(names, values.unbind(), strict=True))
        own = metrics["loss"] * share
        return whole | {"loss": own + (whole["loss"] - own.detach())}, int(totals[1])

    def _agreed(self, due: bool) -> bool:
        """The first process's clock decides for all."""
        if self.processes == 1:
            return due
        flag = torch.tensor(float(due and self.accelerator.is_main_process), device=self.accelerator.device)
        return bool(self.accelerator.reduce(flag, "sum") > 0)

    def _update(self, loss: torch.Tensor) -> None:
        settings = self.settings
        if not torch.isfinite(loss):
            raise SpecBenchError(f"the loss became {float(loss)} at step {self.step}; lower train.lr or train.clip")
        self.accelerator.clip_grad_norm_(self.parameters, settings.clip)
        factor = schedule(self.step, int(self.total), settings.warmup_steps, settings.decay)
        for optimizer, peaks in zip(self.optimizers, self.peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * factor
            optimizer.step()
            optimizer.zero_grad()

    def _progress(self, console: Console, running: dict[str, float]) -> None:
        if not self.accelerator.is_main_process:
            return
        speed = self.tokens / max(self.seconds, 1e-9)
        left = self.seconds / self.step * (self.total - self.step)
        shown = " ".join(f"{k} {v:.4f}" for k, v in running.items())
        console.print(
            f"step {self.step}/{self.total}  {shown}  {speed:,.0f} tokens/s  {left / 60:.1f} min left",
            highlight=False,
            soft_wrap=True,
        )

    def _log(self, console: Console, running: dict[str, float]) -> None:
        self.drafter.eval()
        entry = {"step": self.step, "tokens": self.tokens, "seconds": round(self.seconds, 1)}
        entry |= {k: round(v, 5) for k, v in running.items()} | self.validate()
        self.drafter.train()
        self.history.append(entry)
        if self.accelerator.is_main_process:
            console.print(f"held out: {entry}", highlight=False, soft_wrap=True)

    def _save(self) -> None:
        """Everything a resumed run needs, atomically."""
        state = {
            "step": self.step,
            "total": self.total,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "history": self.history,
            "parameters": [p.detach().cpu() for p in self.parameters],
            "optimizers": [o.state_dict() for o in self.optimizers],
            "rng": gather_object([torch.get_rng_state()]),  # by process
            "cuda_rng": gather_object([torch.cuda.get_rng_state()]) if torch.cuda.is_available() else [],
        }
        if self.accelerator.is_main_process:
            with atomic_path(self.checkpoint) as temporary:
                torch.save(state, temporary)
        self.accelerator.wait_for_everyone()

    def _resume(self) -> None:
        if not self.checkpoint.exists():
            torch.manual_seed(self.settings.seed + self.accelerator.process_index)
            return
        state = torch.load(self.checkpoint, map_location="cpu", weights_only=True)
        if state["total"] != self.total:
            raise SpecBenchError(
                f"{self.checkpoint} is of a run of {state['total']} steps, this one has {self.total} (the corpus or the "
                "settings changed); use another train.name or remove it"
            )
        with torch.no_grad():
            for parameter, value in zip(self.parameters, state["parameters"], strict=True):
                parameter.copy_(value)
        for optimizer, value in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(value)
        if len(state["rng"]) != self.processes:
            raise SpecBenchError(
                f"{self.checkpoint} is of {len(state['rng'])} processes, this run has {self.processes}; launch as many or "
                "use another train.name"
            )
        torch.set_rng_state(state["rng"][self.accelerator.process_index])
        if state["cuda_rng"]:
            torch.cuda.set_rng_state(state["cuda_rng"][self.accelerator.process_index])
        self.step, self.tokens, self.seconds = state["step"], state["tokens"], state["seconds"]
        self.history = state["history"]
        if self.accelerator.is_main_process:
            Console(stderr=True).print(f"resuming at step {self.step} of {self.total}", highlight=False)


def schedule(step: int, total: int, warmup: int, decay: str) -> float:
    """Factor on the peak learning rate at a step: linear warm-up, then constant, linear or cosine to zero."""
    if step < warmup:
        return (step + 1) / warmup
    left = 1 - (step - warmup) / max(total - warmup, 1)
    return {"constant": 1.0, "linear": left, "cosine": 0.5 - 0.5 * math.cos(math.pi * left)}[decay]


def _optimizers(parameters: list[nn.Parameter], settings: TrainSettings) -> list[torch.optim.Optimizer]:
    if settings.optimizer == "adamw":
        return [torch.optim.AdamW(parameters, settings.lr, settings.betas, weight_decay=settings.weight_decay)]
    if settings.optimizer != "muon":
        raise SpecBenchError(f"train.optimizer={settings.optimizer}: use adamw or muon")
    matrices, vectors = [p for p in parameters if p.ndim == 2], [p for p in parameters if p.ndim != 2]
    muon = torch.optim.Muon(matrices, settings.lr, weight_decay=settings.weight_decay, momentum=0.95)
    if not vectors:
        return [muon]
    return [muon, torch.optim.AdamW(vectors, settings.vector_lr, settings.betas, weight_decay=0.0)]
