"""Prompts, chats and trainers for tests of training."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from drafters.base import TrainedDrafter
from specbench.data.chat import Chat
from specbench.engine.interface import Batch
from specbench.engine.policies import Chain
from specbench.training.answer_writer import Prompt
from specbench.training.recipe import TrainSettings
from specbench.training.trainer import Trainer

STOP = 60


def prompts_of(count, temperature=0.0):
    generator = torch.Generator().manual_seed(5)

    def ids(length):
        return tuple(torch.randint(0, 59, (length,), generator=generator).tolist())

    return [Prompt(i, (ids(2 + i % 4), (STOP, *ids(3)), (STOP, *ids(2))), temperature, seed=i) for i in range(count)]


class Words:
    """A chat whose ids are its words' numbers: [58] question [59] answer [60] [58] question …"""

    def encode(self, messages, answer_follows=True):
        ids = []
        for m in messages:
            words = [int(w) for w in m["content"].split()]
            ids += [58, *words] if m["role"] == "user" else [59, *words, STOP]
        return ids + [59] * answer_follows

    def opening(self, question):
        return self.encode([{"role": "user", "content": question}])

    def follow_up(self, content):
        return [STOP, 58, *map(int, content.split()), 59]


class Numbers(Chat):
    """A chat whose ids are the newest 40 numbers in it."""

    def __init__(self):
        super().__init__(SimpleNamespace(decode=lambda ids: " ".join(map(str, ids))))

    def encode(self, messages, answer_follows=True):
        return [int(x) for m in messages for x in m["content"].split()][-40:]


def chats_of(count):
    def talk(i):
        roles = ["user", "assistant"] * (1 + i % 3)
        return [{"role": r, "content": f"{i % 50} {j} {(i * 7 + j) % 57}"} for j, r in enumerate(roles)]

    return [talk(i) for i in range(count)]


SMALL = {"prompt_tokens": 16, "answer_tokens": 8, "text_tokens": 40, "validation": 6, "shard": 10, "rows": 7}


VOCABULARY = 8  # ids


BATCHES = 5  # an epoch


class Fake(TrainedDrafter):
    """Two linear layers whose loss depends on an option, the vocabulary and noise; remembers what it was called with."""

    phased = ("gain", "noise")

    def __init__(self, width: int = 4, stop: int | None = None):
        super().__init__("fake", Chain(2))
        torch.manual_seed(3)
        self.body, self.outputs = nn.Linear(width, width), nn.ModuleList([nn.Linear(width, VOCABULARY)])
        self.shared = nn.Linear(width, width).requires_grad_(False)
        self.gain, self.noise, self.stop = 1.0, 0.1, stop
        self.seen: list[dict[str, Any]] = []

    def loss(self, batch: Batch) -> dict[str, torch.Tensor]:
        if len(self.seen) == self.stop:
            raise KeyboardInterrupt
        trained = {n.split(".")[0] for n, p in self.named_parameters() if p.requires_grad}
        ids = None if batch.vocabulary is None else batch.vocabulary.tolist()
        self.seen.append({"gain": self.gain, "ids": ids, "progress": batch.progress, "trained": trained})
        hidden = self.body(self.shared(batch.states) + self.noise * torch.rand_like(batch.states))
        logits = self.outputs[0](hidden)
        logits = logits if batch.vocabulary is None else logits[..., batch.vocabulary]
        return {"loss": self.gain * (logits.logsumexp(-1) - logits[..., 0]).mean()}


class Text:
    """A corpus of random states; the frequent ids are the highest ones."""

    def batches(self, epoch: int) -> list[list[list[tuple[Path, int, int]]]]:
        order = torch.randperm(BATCHES, generator=torch.Generator().manual_seed(epoch)).tolist()
        return [[[(Path("x"), i, i + 6)]] * 2 for i in order]

    def load(self, items: Any, device: torch.device, dtype: torch.dtype) -> Batch:
        states = torch.randn(len(items), 6, 4, generator=torch.Generator().manual_seed(items[0][0][1]))
        everywhere = torch.ones(len(items), 6, dtype=torch.bool)
        return Batch(torch.zeros(len(items), 6, dtype=torch.long), states, everywhere, everywhere)

    def digest(self) -> dict[str, Any]:
        return {"texts": "random"}

    def frequent(self, count: int) -> torch.Tensor:
        return torch.arange(VOCABULARY).flip(0)[:count]


def trainer(folder: Path, drafter: Fake | None = None, **settings: Any) -> Any:
    made = TrainSettings(**({"lr": 0.05, "checkpoint_minutes": -1.0, "decay": "constant", "epochs": 4} | settings))
    corpus: Any = Text()
    return Trainer(Fake() if drafter is None else drafter, corpus, made, dict, folder)
