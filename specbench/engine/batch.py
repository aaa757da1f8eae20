"""Several prompts at once: every sequence runs the loop of `decode` with a state of its own, their passes are made as one.

A token is what it is alone, but for rounding: products of more rows are summed in another order.
"""

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specbench.common.errors import SpecBenchError
from specbench.engine.cache import KVCache
from specbench.engine.decode import Clock, Limits, Prefill, Step, decode
from specbench.engine.drafter import Drafter
from specbench.engine.interface import DraftTree, Taps, TargetStates
from specbench.engine.lockstep import Lockstep, Shared
from specbench.engine.sampling import Sampler
from specbench.engine.slots import Slots, SlotsOfPass
from specbench.engine.target import Target
from specbench.engine.verify import Rule

DRAFT, VERIFY = 0, 1  # draft passes go first, so that the target's pass waits for every sequence


@dataclass(frozen=True)
class DecodedBatch:
    """A decoded batch. Seconds are by one clock, from its start.

    Attributes:
        events: of each sequence what `decode` yields; their seconds are of what it does by itself.
        ended: when each sequence had its last token. prefilled: when all prompts had been read and the first cycle began.
        drafting, verifying: seconds of the draft passes and of the target's, after that: shared ones, and what sequences
            do by themselves. checking: of verification.
    """

    events: list[list[Prefill | Step]]
    ended: list[float]
    prefilled: float
    drafting: float
    verifying: float
    checking: float

    @property
    def seconds(self) -> float:
        """Of all cycles."""
        return max(0.0, max(self.ended) - self.prefilled)


@torch.inference_mode()
def decode_together(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[list[int]],
    limits: Limits,
    rule: Rule,
    sampler: Sampler,
    generators: Sequence[torch.Generator | None],
    clock: Clock = time.perf_counter,
) -> DecodedBatch:
    """Decode a prompt a sequence, each with its own generator.

    Raises `SpecBenchError` as `decode`, or if drafter or target cannot run several sequences at once.
    """
    lockstep = Lockstep(clock)
    targets = target_rows(target, drafter.taps, len(prompts), lockstep)
    drafters = drafter.for_sequences(len(prompts), lockstep)
    begin = clock()
    timed = lockstep.run(
        [
            partial(_timed_events, clock, *parts, limits, rule, sampler, generator, lockstep.own_seconds)
            for *parts, generator in zip(targets, drafters, prompts, generators, strict=True)
        ]
    )
    events, prefills, ends = (list(part) for part in zip(*timed, strict=True))
    prefilled = max(prefills)

    steps = [step for own in events for step in own if isinstance(step, Step)]

    def spent(order: int) -> float:
        return sum(end - start for kind, start, end in lockstep.spent if kind == order and start >= prefilled)

    return DecodedBatch(
        events,
        [end - begin for end in ends],
        prefilled - begin,
        spent(DRAFT) + sum(step.draft_s for step in steps),
        spent(VERIFY) + sum(step.target_s for step in steps),
        sum(step.verify_s for step in steps),
    )


def _timed_events(clock: Clock, *arguments: Any) -> tuple[list[Prefill | Step], float, float]:
    """What `decode` yields, when the prompt was read, and when the last token was there."""
    events = decode(*arguments)
    first, prefilled = next(events), clock()
    return [first, *events], prefilled, clock()


def target_rows(target: Target, taps: Taps, count: int, lockstep: Lockstep) -> list[Target]:
    """The target for each of `count` sequences: caches of their own in one storage, passes behind them in common.

    taps: what the drafter reads.
    """
    if not target.shares_passes:
        raise SpecBenchError(
            "batch: several sequences at once need a target on one device, without sliding windows and backend=graphs"
        )
    shared = in_common(target, taps)
    call = partial(lockstep.call, in_one_pass(shared.read, partial(shared.read, last_only=True)), VERIFY)
    rows = [copy.copy(target) for _ in range(count)]
    for row, cache in zip(rows, slots_of(target.new_cache(0), count, lockstep), strict=True):
        row.cache, row.read = cache, partial(_read, call)  # type: ignore[method-assign]
    return rows


def slots_of(like: KVCache, count: int, lockstep: Lockstep) -> list[KVCache]:
    """Caches of `count` sequences in one storage, which a sequence leaves when it is over. like: see `Slots`."""
    slots = Slots(like, count)
    caches: list[KVCache] = [*slots.sequences]
    for number, cache in enumerate(caches):
        lockstep.at_end(number, partial(slots.leave, cache))
    return caches


def in_common(target: Target, taps: Taps) -> Target:
    """The target that makes the passes of several sequences, of which the same layers are read."""
    shared = copy.copy(target)
    shared.taps = taps.resolve(target.layers)
    return shared


def _read(call: Callable[..., tuple[Tensor, ...]], *arguments: Any, last_only: bool = False) -> tuple[Tensor, ...]:
    """`Target.read` of one sequence. last_only: as it is, since a prompt's pass alone asks for it, and runs alone."""
    return call(*arguments)


def forward_together(rows: Sequence[Target], trees: Sequence[DraftTree]) -> list[TargetStates]:
    """`Target.forward` of several sequences as one pass: of copies of one target with equal taps, caches in one `Slots`."""
    calls = [row.inputs(tree) for row, tree in zip(rows, trees, strict=True)]
    found = in_one_pass(rows[0].read)(calls)
    return [
        row.states_of_pass(tree.tokens, call[1][0], *part)
        for row, tree, call, part in zip(rows, trees, calls, found, strict=True)
    ]


def by_row(function: Callable[..., Any]) -> Shared:
    """Shares a function of independent rows, [D] or [N, …] each, that gives one tensor or, of [N, …], several."""

    def together(calls: list[tuple[Any, ...]]) -> list[Any]:
        rows = [call if call[0].ndim > 1 else (call[0][None],) for call in calls]
        counts = [len(row[0]) for row in rows]
        found = function(*(torch.cat(column) for column in zip(*rows, strict=True)))
        if not isinstance(found, Tensor):
            return list(zip(*(x.split(counts) for x in found), strict=True))
        return [x if call[0].ndim > 1 else x[0] for x, call in zip(found.split(counts), calls, strict=True)]

    return together


def share_network(drafter: Any, rows: Sequence[Any], lockstep: Lockstep, name: str = "network") -> None:
    """Give a drafter's sequences caches of their own in one storage, and passes of its network behind them in common.

    name: of the function, as `in_one_pass` takes it.
    """
    network = in_one_pass(getattr(drafter, name))
    for row, cache in zip(rows, slots_of(drafter.cache, len(rows), lockstep), strict=True):
        row.cache = cache
        setattr(row, name, partial(lockstep.call, network, DRAFT))


def over_keys(function: Callable[..., Tensor]) -> Shared:
    """Shares attention to given keys: tensors [1, N, ...], keys and values [1, H, S, Dh], a mask [1, N, S] or None."""

    def together(calls: list[tuple[Any, ...]]) -> list[Tensor]:
        *columns, keys, values, masks = zip(*calls, strict=True)
        counts, sizes = [x.shape[1] for x in columns[0]], [x.shape[2] for x in keys]
        inputs = [torch.cat([_filled(x, max(counts)) for x in column]) for column in columns]
        joined = [torch.cat([_filled(x, max(sizes), dim=2) for x in part]) for part in (keys, values)]
        mask = torch.zeros(len(calls), max(counts), max(sizes), dtype=torch.bool, device=joined[0].device)
        for row, own, count, size in zip(mask, masks, counts, sizes, strict=True):
            row[:count, :size] = True if own is None else own[0]
        output = function(*inputs, *joined, mask)
        return [output[i : i + 1, :count] for i, count in enumerate(counts)]

    return together


def in_one_pass(function: Callable[..., Any], alone: Callable[..., Any] | None = None) -> Shared:
    """Shares a pass of N tokens of each sequence behind its cache.

    Args:
        function: takes tensors [B, N, ...], a mask [B, 1, N, S] or None, and a cache; gives one or several [B, N, ...].
        alone: makes the first pass of a sequence, behind an empty cache; None: `function`. Prompts differ in length, and
            together would be no faster.
    """

    first = function if alone is None else alone

    def together(calls: list[tuple[Any, ...]]) -> list[Any]:
        begun = [not call[-1].empty for call in calls]
        behind = iter(_pass(function, [call for call, is_begun in zip(calls, begun, strict=True) if is_begun]))
        return [next(behind) if is_begun else first(*call) for call, is_begun in zip(calls, begun, strict=True)]

    return together


def _pass(function: Callable[..., Any], calls: list[tuple[Any, ...]]) -> list[Any]:
    """Make several calls as one, filled up to the longest."""
    if not calls:
        return []
    *columns, masks, caches = zip(*calls, strict=True)
    counts = [x.shape[1] for x in columns[0]]
    cache, new = SlotsOfPass(caches, counts), max(counts)
    inputs = [torch.cat([_filled(x, new) for x in column]) for column in columns]
    mask = cache.mask(masks, new).to(inputs[0].device)
    output = function(*inputs, mask, cache)
    if isinstance(output, Tensor):
        return [output[i : i + 1, :count] for i, count in enumerate(counts)]
    return [tuple(x[i : i + 1, :count] for x in output) for i, count in enumerate(counts)]


def _filled(x: Tensor, length: int, dim: int = 1) -> Tensor:
    """Zeros appended along an axis, up to a length."""
    missing = length - x.shape[dim]
    return torch.cat([x, x.new_zeros(*x.shape[:dim], missing, *x.shape[dim + 1 :])], dim) if missing else x
