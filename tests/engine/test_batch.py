"""Several sequences at once: each is what it is alone."""

import threading
import time
from functools import partial

import pytest
import torch
from conftest import BATCHED, DRAFTERS, make, tiny
from decoding import GREEDY

from specbench.common.errors import SpecBenchError
from specbench.engine import slots
from specbench.engine.batch import decode_together, forward_together, in_common
from specbench.engine.decode import Limits, Prefill, decode
from specbench.engine.drafter import ServedEngine
from specbench.engine.interface import Taps
from specbench.engine.lockstep import Lockstep
from specbench.engine.sampling import Sampler
from specbench.engine.slots import Slots
from specbench.engine.tree import build
from specbench.engine.verify import Lossless

PROMPTS = [[5], list(range(3, 40)), [7, 8, 9, 7, 8, 9, 7, 8], [11, 12, 13]]


def generators(sampler):
    return [None if sampler.greedy else torch.Generator().manual_seed(b) for b in range(len(PROMPTS))]


def ids(events):
    return [t for event in events for t in ([event.token] if isinstance(event, Prefill) else event.tokens)]


def alone(target, drafter, limits, sampler):
    return [
        list(decode(target, drafter, prompt, limits, Lossless(), sampler, generator))
        for prompt, generator in zip(PROMPTS, generators(sampler), strict=True)
    ]


def together(target, drafter, limits, sampler=GREEDY):
    return decode_together(target, drafter, PROMPTS, limits, Lossless(), sampler, generators(sampler)).events


@pytest.mark.parametrize("lean", [False, True], ids=["plain", "lean"])
@pytest.mark.parametrize("name", BATCHED)
def test_every_sequence_is_what_it_is_alone(name, lean):
    target = tiny()
    if lean:
        target.optimize_for_inference()
    drafter, limits = make(name, target), Limits(24)
    expected = alone(target, drafter, limits, GREEDY)
    found = together(target, drafter, limits)
    assert [ids(events) for events in found] == [ids(events) for events in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert [e.accepted for e in ours[1:]] == [e.accepted for e in theirs[1:]]
        assert [e.nodes for e in ours[1:]] == [e.nodes for e in theirs[1:]]


@pytest.mark.parametrize("name", ["none", "vanilla", "eagle2", "prompt_lookup"])
def test_sampling_draws_from_each_sequences_own_generator(name):
    target, sampler = tiny(), Sampler(1.0)
    drafter, limits = make(name, target), Limits(20)
    expected = [ids(events) for events in alone(target, drafter, limits, sampler)]
    assert [ids(events) for events in together(target, drafter, limits, sampler)] == expected
    assert expected[0] != ids(alone(target, drafter, limits, GREEDY)[0])


@pytest.mark.parametrize("name", ["none", "eagle2"])
def test_sequences_may_end_at_different_times(name):
    target = tiny()
    drafter = make(name, target)
    free = [ids(events) for events in alone(target, drafter, Limits(30), GREEDY)]
    stops = (free[0][3], free[2][11])
    limits = Limits(30, stops)
    expected = [ids(events) for events in alone(target, drafter, limits, GREEDY)]
    assert len({len(answer) for answer in expected}) > 1, "they all end alike: the test shows nothing"
    assert [ids(events) for events in together(target, drafter, limits)] == expected


@pytest.mark.parametrize("name", BATCHED)
def test_a_short_prompt_beside_a_long_one(name, monkeypatch):
    monkeypatch.setattr(slots, "STEP", 64)  # the storage grows many times
    target = tiny(max_position_embeddings=1000)
    drafter = make(name, target)
    prompts = [[5], [i % 50 + 3 for i in range(900)]]
    limits = Limits(40)
    found = decode_together(target, drafter, prompts, limits, Lossless(), GREEDY, [None, None]).events
    expected = [list(decode(target, drafter, prompt, limits, Lossless(), GREEDY)) for prompt in prompts]
    assert [ids(events) for events in found] == [ids(events) for events in expected]


def test_drafters_that_draft_for_one_sequence_say_so():
    target = tiny()
    refused = [name for name in DRAFTERS if name not in BATCHED and not isinstance(make(name, target), ServedEngine)]
    assert refused
    for name in refused:
        drafter = make(name, target)
        if not drafter.batches:
            with pytest.raises(SpecBenchError, match=f"drafter={name} drafts for one sequence at a time"):
                together(target, drafter, Limits(4))


def test_a_target_with_sliding_windows_says_so():
    target = tiny("mistral")
    with pytest.raises(SpecBenchError, match="sliding windows"):
        together(target, make("none", target), Limits(4))


def test_one_pass_of_the_target_serves_all(monkeypatch):
    target, passes = tiny(), []
    score = target.score

    def counted(tokens, *rest, **options):
        passes.append(len(tokens))
        return score(tokens, *rest, **options)

    monkeypatch.setattr(target, "score", counted)
    together(target, make("none", target), Limits(10))
    assert passes == [1] * len(PROMPTS) + [len(PROMPTS)] * 9


@pytest.mark.parametrize("name", ["none", "eagle2", "vanilla", "moa"])
def test_sequences_that_are_over_leave_the_storage_so_that_passes_of_the_others_copy_nothing(name, monkeypatch):
    target = tiny()
    first = [ids(events) for events in alone(target, make("none", target), Limits(24), GREEDY)]
    target.stop_ids = (first[1][4], first[2][9])
    drafter, limits, views = make(name, target), Limits(24, target.stop_ids), []

    class Watched(slots.SlotsOfPass):
        def __init__(self, caches, counts):
            super().__init__(caches, counts)
            if len(caches) == len(self.slots.sequences):
                views.append(self.rows)

    monkeypatch.setattr("specbench.engine.batch.SlotsOfPass", Watched)
    expected = [ids(events) for events in alone(target, drafter, limits, GREEDY)]
    assert len({*map(len, expected)}) > 2, "they end one after the other"
    assert [ids(events) for events in together(target, drafter, limits)] == expected
    assert {view.stop for view in views} >= {2, 4} and all(view.start == 0 for view in views)


def test_a_sequences_own_clock_stands_while_it_waits():
    lockstep = Lockstep()

    def body(x):
        begin = lockstep.own_seconds()
        lockstep.call(lambda calls: time.sleep(0.2) or [None] * len(calls), 0, x)
        return lockstep.own_seconds() - begin

    assert all(seconds < 0.1 for seconds in lockstep.run([partial(body, x) for x in range(2)]))


def test_tapped_layers_are_read_of_several_sequences_at_once():
    target, taps = tiny(), Taps(hidden=(0, 2), kv=(1,))
    trees = [chain([7, 8, 9]), chain([5])]
    rows = [in_common(target, taps) for _ in trees]
    for row, cache, prompt in zip(rows, Slots(target.new_cache(0), len(rows)).sequences, PROMPTS[1:], strict=False):
        row.cache = cache
        row.reset(64, taps)
        row.prefill(torch.tensor(prompt))
    alone = [row.forward(tree) for row, tree in zip(rows, trees, strict=True)]
    for ours, theirs in zip(forward_together(rows, trees), alone, strict=True):
        assert (ours.positions == theirs.positions).all() and sorted(ours.hidden) == [0, 2]
        torch.testing.assert_close(
            [ours.hidden, ours.kv, ours.logits], [theirs.hidden, theirs.kv, theirs.logits], atol=1e-4, rtol=1e-5
        )


def chain(tokens):
    index = torch.arange(len(tokens))
    return build(torch.tensor(tokens), index - 1, index, torch.zeros_like(index), len(tokens) - 1, 1)


def test_an_error_in_one_sequence_ends_all():
    lockstep, seen, threads = Lockstep(), [], threading.active_count()

    def double(calls):
        seen.append(len(calls))
        return [2 * x for (x,) in calls]

    def body(x):
        y = lockstep.call(double, 0, x)
        if y == 4:
            raise SpecBenchError("two")
        return lockstep.call(double, 0, y)

    with pytest.raises(SpecBenchError, match="two"):
        lockstep.run([partial(body, x) for x in (1, 2, 3)])
    assert seen == [3]
    assert Lockstep().run([partial(pow, 2, x) for x in (1, 2, 3)]) == [2, 4, 8]
    assert threading.active_count() == threads


def test_draft_passes_go_before_those_of_the_target():
    lockstep, order = Lockstep(), []

    def named(name):
        return lambda calls: order.append((name, len(calls))) or [None] * len(calls)

    draft, verify = named("draft"), named("verify")

    def body(drafts):
        for _ in range(drafts):
            lockstep.call(draft, 0)
        lockstep.call(verify, 1)

    lockstep.run([partial(body, drafts) for drafts in (0, 1, 3)])
    assert order == [("draft", 2), ("draft", 1), ("draft", 1), ("verify", 3)]
