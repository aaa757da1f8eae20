"""What runs before the first row: first calls pay for kernels and memory that later ones find ready."""

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from specbench.common.errors import SpecBenchError, format_exception
from specbench.data.chat import Chat
from specbench.data.prompts import Question
from specbench.engine.decode import Prefill
from specbench.engine.drafter import Drafter
from specbench.engine.interface import Step
from specbench.engine.target import Target

TOKENS = 16  # of each answer
SHORT = 64  # tokens of a prompt on a CPU, where any ids do, and few always fit
GPU_S = 5.0  # at least, on a GPU: libraries are loaded lazily, clocks rise, memory grows up to the longest prompt's


def prompt(chat: Chat, questions: Sequence[Question], device: torch.device, max_context: int) -> list[int]:
    """Ids of a first turn: on a GPU of the longest one, cut to leave room for an answer."""
    if device.type != "cuda":
        return chat.opening(questions[0].turns[0])[:SHORT]
    longest = max((chat.opening(question.turns[0]) for question in questions), key=len)
    return longest[: max(1, max_context - TOKENS)]


def finish(target: Target, drafter: Drafter, events: Iterable[Prefill | Step]) -> int:
    """Decode to the end, and prepare the drafter's widest trees, which may come later; returns the number of tokens."""
    tokens = sum(len(event.tokens) for event in events)
    target.prepare(drafter.nodes)
    return tokens


def run(device: torch.device, times: int, arms: Mapping[str, Callable[[], int]]) -> dict[str, float]:
    """Run every arm in turn, `times` times, and on a GPU until `GPU_S` are over; 0: not at all.

    arms: by label, a generation; it returns how many tokens there were. One that fails is named and not run again here:
    its rows will say the same, while the others go on.

    Returns seconds a token, of the last generations; 0 for an arm that failed.
    """
    token_s: dict[str, float] = {}
    failed: set[str] = set()
    begin, rounds = time.monotonic(), 0
    while rounds < times or (times and device.type == "cuda" and time.monotonic() - begin < GPU_S):
        for label, generate in arms.items():
            if label in failed:
                continue
            before = time.monotonic()
            try:
                tokens = generate()
            except Exception as error:
                if isinstance(error, SpecBenchError) and len(arms) <= 2:  # of the only drafter beside the baseline
                    raise
                print(f"{label} failed while warming up: {format_exception(error)}", file=sys.stderr, flush=True)
                failed.add(label)
                token_s[label] = 0.0
                continue
            token_s[label] = (time.monotonic() - before) / max(1, tokens)
        rounds += 1
    return token_s
