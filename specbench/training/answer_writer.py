"""The target's own answers, turn after turn: each answer becomes part of the dialogue before the next question is asked.

Knows the target and token ids. Every pass feeds one token to each of many rows (`engine.rows`): a token of a question, or
the one that the target chose last. A dialogue that ends makes room for the next at once, so no pass is spent on padding.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from specbench.common import environment
from specbench.data.corpus_file import Dialogue
from specbench.engine import memory
from specbench.engine.backends.quantised import multiplies_bytes, quantised
from specbench.engine.causal_lm import CausalLM
from specbench.engine.rows import Rows
from specbench.engine.sampling import Sampler, inverse
from specbench.engine.target import Target

Precision = Literal["auto", "target", "int8"]
GROUPS = 8  # of rows that attend together: more are more calls a layer, and less attention over empty slots
CACHE_SHARE = 0.8  # of free memory: passes need some, too
SAMPLE = 64  # tokens of the target's own text, from which the ranges of 8-bit inputs are taken


@dataclass(frozen=True)
class Prompt:
    """The questions of a dialogue.

    Attributes:
        index: of the dialogue in the corpus.
        turns: ids of each user turn with all the markup around it; a later one begins with the markup that ends an answer.
        temperature: 0 is greedy. seed: of this dialogue's own draws.
    """

    index: int
    turns: tuple[tuple[int, ...], ...]
    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Lengths:
    """In tokens. answer: of one answer. whole: of a dialogue; a turn is asked only if `min_answer` tokens fit behind it."""

    answer: int
    whole: int
    min_answer: int


class _Row:
    """A dialogue while it is written. token: the next one to be fed; pending: the rest of the question, in reverse."""

    def __init__(self, prompt: Prompt):
        self.prompt, self.text = prompt, Dialogue(prompt.index, [], [])
        self.pending = list(reversed(prompt.turns[0]))
        self.turn = 0
        self.generator = torch.Generator().manual_seed(prompt.seed) if prompt.temperature else None
        self.feed()

    @property
    def answering(self) -> bool:
        """Does the target choose the next token?"""
        return not self.pending

    def feed(self) -> None:
        """Append the next token of the question."""
        self.token = self.pending.pop()
        self.text.tokens.append(self.token)
        self.begin = len(self.text.tokens)

    def answer(self, token: int, stop_ids: tuple[int, ...], lengths: Lengths) -> bool:
        """Append a token that the target chose. True if the dialogue ends with it."""
        tokens = self.text.tokens
        self.token = token
        tokens.append(token)
        if token not in stop_ids and len(tokens) < min(self.begin + lengths.answer, lengths.whole):
            return False
        self.text.spans.append((self.begin, len(tokens)))
        self.turn += 1
        if self.turn == len(self.prompt.turns):
            return True
        question = list(self.prompt.turns[self.turn])
        if question[0] == token:  # the answer ended as the markup would end it
            question = question[1:]
        self.pending = question[::-1]
        return len(tokens) + len(question) + lengths.min_answer > lengths.whole


def fastest(device: torch.device) -> Literal["target", "int8"]:
    """What `auto` stands for on a device: a quantised copy is faster where the processor multiplies bytes."""
    return "int8" if device.type == "cpu" and multiplies_bytes() else "target"


def writes_quantised(target: Target, precision: Precision) -> bool:
    """Does a quantised copy of the target write?"""
    return precision == "int8" or (precision == "auto" and fastest(target.device) == "int8")


def row_bytes(target: Target, whole: int, quantise: bool) -> int:
    """Bytes of the keys and values of one row of so many tokens."""
    dtype = torch.bfloat16 if quantise else target.dtype
    return memory.cached_numbers(target) * whole * dtype.itemsize


def rows_that_fit(target: Target, rows: int, whole: int, quantise: bool) -> int:
    """How many of these rows are written side by side: as many as free memory holds, at least one.

    A row's text does not depend on it. Raises `NoRoom` if there is no room for one.
    """
    size = row_bytes(target, whole, quantise)
    free = environment.free_memory(target.device)
    fit = min(rows, int(CACHE_SHARE * free / size))
    if fit < 1:
        raise memory.NoRoom(
            f"writing answers needs {size / 1e9:.1f} GB of cache for a text of {whole:,} tokens and {target.device} has "
            f"{free / 1e9:.1f} GB free; lower train.corpus.text_tokens, or take a smaller model="
        )
    return fit


def write(
    target: Target, prompts: Iterator[Prompt], lengths: Lengths, rows: int = 128, precision: Precision = "target"
) -> Iterator[Dialogue]:
    """Dialogues in the order in which they end. Raises `NoRoom` if memory does not suffice for one.

    Args:
        prompts: each fits into `lengths.whole` with its first turn.
        rows: written side by side, as far as memory suffices.
        precision: `int8` writes with a quantised copy of the target, `auto` where that is faster, `target` never.
    """
    quantise = writes_quantised(target, precision)
    rows = rows_that_fit(target, rows, lengths.whole, quantise)
    slots: list[_Row | None] = [_Row(prompt) for prompt in itertools.islice(prompts, rows)]
    if not slots:
        return
    model: CausalLM = target
    if quantise:
        model = CausalLM(quantised(target.model, target.greedy(target.stop_ids[:1] or (0,), SAMPLE)))
    cache_dtype = None if model is target else torch.bfloat16
    table = Rows(model, len(slots), lengths.whole, max(16, len(slots) // GROUPS), cache_dtype)
    with table.running():
        while any(slots):
            states = table.step([row.token if row else None for row in slots])
            answering = [(slot, row) for slot, row in enumerate(slots) if row and row.answering]
            for row in slots:
                if row and not row.answering:
                    row.feed()
            chosen = _choose(model, states, answering) if answering else []
            ended = [
                (slot, row.text)
                for (slot, row), token in zip(answering, chosen, strict=True)
                if row.answer(token, target.stop_ids, lengths)
            ]
            # The shortest group first: a row that moves up into an ended one's slot has never itself ended.
            for slot, text in reversed(ended):
                free, moves = table.end(slot)
                for source, to in moves:
                    slots[to] = slots[source]
                prompt = next(prompts, None)
                slots[free] = None if prompt is None else _Row(prompt)
                yield text


@torch.inference_mode()
def _choose(model: CausalLM, states: Tensor, rows: list[tuple[int, _Row]]) -> list[int]:
    """The token after each of these rows; a sampled one with its row's own draw. states [B, D]"""
    logits = model.logits(states[[slot for slot, _ in rows]]).float()  # [A, V]
    chosen = logits.argmax(-1)
    by_temperature: dict[float, list[int]] = {}
    for index, (_, row) in enumerate(rows):
        if row.generator is not None:
            by_temperature.setdefault(row.prompt.temperature, []).append(index)
    for temperature, indices in by_temperature.items():
        draws = torch.cat([torch.rand(1, generator=rows[i][1].generator) for i in indices])
        chosen[indices] = inverse(Sampler(temperature).probabilities(logits[indices]), draws.to(logits.device))
    return chosen.tolist()
