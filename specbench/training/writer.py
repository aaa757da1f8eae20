"""The target's own answers, turn after turn: each answer goes into the history before the next question is asked.

Knows the target and token ids, not what the text is for. Every pass feeds one token to each of many rows (`engine.rows`):
a token of a question, or the one the target chose after its last. A dialogue that ends makes room for the next at once,
so no pass is spent on padding, and prompts cost what answers do.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from specbench.engine.backends.quantised import multiplies_bytes, quantised
from specbench.engine.causal_lm import CausalLM
from specbench.engine.rows import Rows
from specbench.engine.sampling import Sampler
from specbench.engine.target import Target

Precision = Literal["auto", "target", "int8"]
GROUPS = 8  # of rows that attend together: each is a call a layer, each saves attention over slots that are not there
SAMPLE = 64  # tokens of the target's own text, by which the ranges of 8-bit inputs are judged


@dataclass(frozen=True)
class Prompt:
    """What a dialogue is asked.

    Attributes:
        index: its place in the corpus.
        turns: ids of each user turn with all the markup around it; a later one begins with the markup that ends an answer.
        temperature: 0 is greedy. seed: of its own draws, whoever its neighbours are.
    """

    index: int
    turns: tuple[tuple[int, ...], ...]
    temperature: float = 0.0
    seed: int = 0


@dataclass
class Dialogue:
    """A prompt's turns and the target's answers, as far as they got. spans: [begin, end) of each answer in `tokens`."""

    prompt: Prompt
    tokens: list[int] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True)
class Lengths:
    """In tokens. answer: of one answer. whole: of a dialogue; a turn is asked only if `min_answer` tokens fit behind it."""

    answer: int
    whole: int
    min_answer: int


class _Row:
    """One dialogue while it is written: what must still be fed, and whether the target chooses what follows."""

    def __init__(self, prompt: Prompt):
        self.dialogue = Dialogue(prompt)
        self.forced = list(prompt.turns[0])[::-1]  # the next one last
        self.turn, self.begin = 0, 0
        self.generator = torch.Generator().manual_seed(prompt.seed) if prompt.temperature else None

    @property
    def answering(self) -> bool:
        """Does the target choose the next token?"""
        return not self.forced

    def feed(self) -> int:
        """The next token of a question goes into the text."""
        token = self.forced.pop()
        self.dialogue.tokens.append(token)
        self.begin = len(self.dialogue.tokens)
        return token

    def take(self, token: int, stops: tuple[int, ...], lengths: Lengths) -> bool:
        """The target chose a token. True when the dialogue is over with it."""
        tokens = self.dialogue.tokens
        tokens.append(token)
        over = token in stops
        if not over and len(tokens) < min(self.begin + lengths.answer, lengths.whole):
            return False
        self.dialogue.spans.append((self.begin, len(tokens)))
        self.turn += 1
        turns = self.dialogue.prompt.turns
        if self.turn == len(turns):
            return True
        coming = list(turns[self.turn])
        if coming[0] == token:  # the answer ended itself as the markup would
            coming = coming[1:]
        self.forced = coming[::-1]
        return len(tokens) + len(coming) + lengths.min_answer > lengths.whole


def fastest(device: torch.device) -> Literal["target", "int8"]:
    """What `auto` stands for on a device: a quantised copy pays where the processor multiplies bytes."""
    return "int8" if device.type == "cpu" and multiplies_bytes() else "target"


def writing(target: Target, precision: Precision) -> CausalLM:
    """The model that writes: the target itself, or a quantised copy of it. Raises `SpecBenchError` for anything else."""
    if precision == "target" or (precision == "auto" and fastest(target.device) == "target"):
        return target
    return CausalLM(quantised(target.model, target.greedy(target.stop_ids[:1] or (0,), SAMPLE)))


def rows_of(model: CausalLM, target: Target, rows: int, capacity: int) -> Rows:
    """Rows in groups that suit their number; a quantised copy keeps keys and values in half the memory too."""
    return Rows(model, rows, capacity, max(16, rows // GROUPS), None if model is target else torch.bfloat16)


def write(
    target: Target, prompts: Iterator[Prompt], lengths: Lengths, rows: int = 128, precision: Precision = "target"
) -> Iterator[Dialogue]:
    """Dialogues in the order in which they end.

    Args:
        prompts: each fits into `lengths.whole` with its first turn.
        rows: written side by side.
        precision: `int8` writes with a quantised copy of the target, `auto` where that pays, `target` never.

    Raises:
        SpecBenchError: an unknown precision.
    """
    model = writing(target, precision)
    waiting = list(itertools.islice(prompts, rows))
    waiting.reverse()
    slots: list[_Row | None] = [None] * len(waiting)
    table = rows_of(model, target, len(slots), lengths.whole)
    fed: list[int | None] = [None] * len(slots)

    def begin(slot: int, prompt: Prompt | None) -> None:
        slots[slot] = row = None if prompt is None else _Row(prompt)
        fed[slot] = None if row is None else row.feed()

    for slot in range(len(slots)):
        begin(slot, waiting.pop())
    with table.running():
        while any(slots):
            states = table.step(fed)
            asking = [i for i, row in enumerate(slots) if row is not None and row.answering]
            chosen = _choose(model, states, [(i, slots[i]) for i in asking]) if asking else []  # type: ignore[misc]
            ended = []
            for slot, row in enumerate(slots):
                if row is not None and not row.answering:
                    fed[slot] = row.feed()
            for slot, token in zip(asking, chosen, strict=True):
                row = slots[slot]
                assert row is not None
                if row.take(token, target.stop_ids, lengths):
                    ended.append(slot)
                fed[slot] = token
            # The shortest group first: what moves up from below an ended row is never itself an ended one.
            for slot in sorted(ended, reverse=True):
                row = slots[slot]
                assert row is not None
                free, moves = table.end(slot)
                for source, to in moves:
                    slots[to], fed[to] = slots[source], fed[source]
                begin(free, next(prompts, None))
                yield row.dialogue


@torch.inference_mode()
def _choose(model: CausalLM, states: Tensor, rows: list[tuple[int, _Row]]) -> list[int]:
    """The token after each of these rows; a sampled one with its row's own draw. states [B, D]"""
    logits = model.logits(states[[i for i, _ in rows]]).float()  # [A, V]
    chosen = logits.argmax(-1)
    by_temperature: dict[float, list[int]] = {}
    for index, (_, row) in enumerate(rows):
        if row.generator is not None:
            by_temperature.setdefault(row.dialogue.prompt.temperature, []).append(index)
    for temperature, indices in by_temperature.items():
        draws = torch.cat([torch.rand(1, generator=rows[i][1].generator) for i in indices])
        mass = Sampler(temperature).probabilities(logits[indices]).double().cumsum(-1)
        below = draws.to(mass)[:, None] * mass[:, -1:]
        chosen[indices] = torch.searchsorted(mass, below, right=True)[:, 0].clamp(max=mass.shape[-1] - 1)
    return chosen.tolist()
