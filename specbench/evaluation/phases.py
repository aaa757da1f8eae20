"""Rows, and filling them with a generation that runs, without a wait for the device before its end."""

from collections.abc import Callable, Iterable
from dataclasses import replace

from specbench.common.timing import Clock, PhaseClock
from specbench.data.prompts import Question
from specbench.engine.decode import Limits, Prefill
from specbench.engine.drafter import Drafter
from specbench.engine.interface import Step
from specbench.records.rows import Row
from specbench.remote.client import LinkLost
from specbench.remote.draft_only import concatenated, draft_alone
from specbench.remote.target import RemoteTarget


def empty_row(drafter: str, question: Question, turn: int, prompt: list[int]) -> Row:
    """The row of a generation that has yet to run. drafter: its label."""
    return Row(drafter, question.id, question.category, turn, len(prompt), [], 0.0, 0.0, text=question.digest)


def fill(row: Row, events: Iterable[Prefill | Step], clock: PhaseClock) -> LinkLost | None:
    """Take the events of `decode`, which must be timed by the same clock; returns the loss of a link that ended them."""
    begin, cycles, lost = clock(), list[Step](), None
    try:
        for event in events:
            if isinstance(event, Prefill):
                row.tokens.append(event.token)
                row.prefill_s = event.seconds
                begin = clock()
            else:
                cycles.append(event)
    except LinkLost as error:
        lost = error
    spent = clock() - begin
    clock.wait()
    row.prefill_s, row.decode_s = float(row.prefill_s), float(spent)
    for step in cycles:
        row.add(in_seconds(step))
    return lost


def fill_untimed(row: Row, events: Iterable[Prefill | Step], count: Callable[[Step], None] = lambda step: None) -> None:
    """Take the events of `decode` without their seconds. count: called with every cycle."""
    for event in events:
        if isinstance(event, Prefill):
            row.tokens.append(event.token)
        else:
            row.add(replace(event, draft_s=0.0, target_s=0.0, verify_s=0.0, rest_s=0.0))
            count(event)


def continue_alone(row: Row, drafter: Drafter, target: RemoteTarget, limits: Limits, clock: Clock) -> None:
    """After the link broke: the drafter's own continuation of the verified tokens."""
    begin = clock()
    room = min(limits.max_new_tokens, target.max_context - row.prompt_tokens) - len(row.tokens)
    if room > 0:
        drafted = draft_alone(drafter, concatenated(target.states), row.tokens[-1], room)
        row.alone = limits.cut(drafted, len(row.tokens))[0]
    row.alone_s = clock() - begin


def in_seconds(step: Step) -> Step:
    """A cycle whose times are numbers, see `PhaseClock`."""
    times = {name: float(getattr(step, name)) for name in ("draft_s", "target_s", "verify_s", "rest_s")}
    return replace(step, **times)  # type: ignore[arg-type]
