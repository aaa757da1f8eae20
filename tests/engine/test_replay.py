"""Acceptance without the target: real drafting against a known answer accepts what decoding accepts."""

import dataclasses
from typing import Any

import pytest
import torch
from conftest import DRAFTERS, make, tiny

from specbench.common.errors import SpecBenchError
from specbench.engine.decode import Limits, decode
from specbench.engine.interface import Step, Taps
from specbench.engine.replay import ReplayTarget
from specbench.engine.sampling import Sampler
from specbench.engine.verify import Lossless

PROMPTS = ([5, 9, 3, 17, 22, 8, 41, 2], [7, 7, 30])


def counted(target: Any, drafter: Any, prompt: list[int], limits: Limits) -> tuple[list[int], list[Any]]:
    """The answer, and every cycle without its times."""
    tokens, steps = [], []
    for event in decode(target, drafter, prompt, limits, Lossless(), Sampler()):
        if isinstance(event, Step):
            tokens += event.tokens
            steps.append({k: v for k, v in dataclasses.asdict(event).items() if not k.endswith("_s")})
        else:
            tokens.append(event.token)
    return tokens, steps


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_replay_accepts_cycle_by_cycle_what_decoding_accepts(name: str, architecture: str) -> None:
    target = tiny(architecture)
    drafter = make(name, target)
    if drafter.observes_trees:  # what other nodes say is not known
        with pytest.raises(SpecBenchError, match=f"drafter={name} learns from"):
            counted(ReplayTarget(target, PROMPTS[0], [4, 5], drafter.taps), drafter, PROMPTS[0], Limits(2))
        return
    for prompt in PROMPTS:
        for stop in ((), (counted(target, drafter, prompt, Limits(24))[0][13],)):
            limits = Limits(24, stop)
            answer, decoded = counted(target, drafter, prompt, limits)
            known = ReplayTarget(target, prompt, answer, drafter.taps)
            assert counted(known, drafter, prompt, Limits(len(answer), stop)) == (answer, decoded)


@pytest.mark.parametrize("extra", [("drafter.tli=1",), ("drafter.tli=2", "++drafter.lsa=false")])
def test_target_layers_of_the_drafter_read_the_known_text(extra: tuple[str, ...]) -> None:
    target = tiny()
    drafter = make("moa", target, *extra)
    answer, decoded = counted(target, drafter, PROMPTS[0], Limits(24))
    known = ReplayTarget(target, PROMPTS[0], answer, drafter.taps)
    assert counted(known, drafter, PROMPTS[0], Limits(24)) == (answer, decoded)


def test_one_prefill_serves_several_drafters() -> None:
    target = tiny()
    moa, eagle = make("moa", target), make("eagle2", target)
    answer, _ = counted(target, make("none", target), PROMPTS[0], Limits(24))
    expected = {d.name: counted(target, d, PROMPTS[0], Limits(24))[1] for d in (moa, eagle)}
    everything = Taps(tuple({*moa.taps.hidden, *eagle.taps.hidden}), tuple({*moa.taps.kv, *eagle.taps.kv}))
    known = ReplayTarget(target, PROMPTS[0], answer, everything)
    for drafter in (moa, eagle, moa):
        assert counted(known, drafter, PROMPTS[0], Limits(24)) == (answer, expected[drafter.name])


def test_a_wrong_answer_is_not_what_decoding_accepts() -> None:
    """The comparison above can fail: against another answer the cycles are others."""
    target = tiny()
    drafter = make("eagle2", target)
    answer, decoded = counted(target, drafter, PROMPTS[0], Limits(24))
    wrong = [*answer[:5], (answer[5] + 1) % target.vocab_size, *answer[6:]]
    known = ReplayTarget(target, PROMPTS[0], wrong, drafter.taps)
    found, cycles = counted(known, drafter, PROMPTS[0], Limits(24))
    assert found == wrong and cycles != decoded


def test_nothing_is_accepted_beyond_an_answer_of_one_token() -> None:
    target = tiny()
    known = ReplayTarget(target, PROMPTS[0], [4], Taps())
    assert counted(known, make("eagle2", target), PROMPTS[0], Limits(1)) == ([4], [])
    assert torch.equal(known.states.tokens, torch.tensor(PROMPTS[0]))
