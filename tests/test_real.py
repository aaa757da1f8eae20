"""The default model with the shipped drafters: greedy identity in float32, target text, sampling against vanilla."""

import numpy as np
import pytest
import torch
from conftest import SHIPPED, configuration
from hydra.utils import instantiate
from scipy.stats import chi2_contingency

from specbench.bench import audit
from specbench.engine.decode import Limits, Prefill, decode
from specbench.engine.sampling import Sampler
from specbench.engine.verify import Lossless


@pytest.fixture(scope="module")
def real():
    config = configuration("none", "model.dtype=float32", "data.limit=3")
    target, chat = instantiate(config.model).load()
    questions = instantiate(config.dataset).load()
    return target, [chat.encode([{"role": "user", "content": q.turns[0]}]) for q in questions]


def bound(name, target):
    drafter = instantiate(configuration(name).drafter)
    drafter.bind(target)
    return drafter


def ids(target, drafter, prompt, cap, sampler=None, generator=None):
    events = decode(target, drafter, prompt, Limits(cap, target.stop_ids), Lossless(), sampler or Sampler(), generator)
    return [t for e in events for t in ([e.token] if isinstance(e, Prefill) else e.tokens)]


@pytest.mark.parametrize("drafter", SHIPPED)
def test_greedy_output_is_identical_in_float32(real, drafter):
    target, prompts = real
    none, made = bound("none", target), bound(drafter, target)
    for prompt in prompts:
        expected = ids(target, none, prompt, 32)
        assert audit(target, prompt, expected, ids(target, made, prompt, 32)) == {"verdict": "identical"}


def test_baseline_equals_generate(real):
    target, prompts = real
    expected = target.model.generate(torch.tensor([prompts[0]]), max_new_tokens=24, do_sample=False)[0, len(prompts[0]) :]
    assert ids(target, bound("none", target), prompts[0], 24) == expected.tolist()


def test_drafters_beat_chance(real):
    """The shipped weights were trained for this target, with this wiring: they must be accepted."""
    target, prompts = real
    for name in SHIPPED:
        made = bound(name, target)
        cycles = sum(len(list(decode(target, made, p, Limits(33), Lossless(), Sampler()))) - 1 for p in prompts)
        assert 32 * len(prompts) / cycles > 1.25, name


@pytest.mark.parametrize("drafter", ["vanilla", "eagle2_small"])
def test_sampling_follows_the_targets_distribution(real, drafter):
    """First two tokens of many short continuations, speculative against plain: a two-sample chi-square."""
    target, prompts = real
    prompt, sampler, runs = prompts[0][-12:], Sampler(0.8, top_k=4), 260
    counts = []
    for name in ("none", drafter):
        made, generator = bound(name, target), torch.Generator().manual_seed(7)
        counts.append([tuple(ids(target, made, prompt, 3, sampler, generator)) for _ in range(runs)])
    kinds = sorted({k for side in counts for k in side}, key=lambda k: -sum(side.count(k) for side in counts))
    table = np.array([[side.count(k) for k in kinds[:12]] for side in counts])
    table = np.column_stack([table, runs - table.sum(1)])
    table = table[:, table.sum(0) > 8]
    assert table.shape[1] > 2, "the test has no power if one continuation is certain"
    assert chi2_contingency(table).pvalue > 1e-3


class Shaky:
    """A target whose plain pass says what it is told."""

    def __init__(self, logits, dtype):
        self.logits, self.dtype, self.device = logits, dtype, torch.device("cpu")

    def reset(self, capacity):
        pass

    def prefill(self, tokens):
        return type("States", (), {"logits": torch.tensor([self.logits])})


@pytest.mark.parametrize(
    ("gap", "dtype", "verdict"),
    [
        (0.01, torch.bfloat16, "numerical tie"),
        (5.0, torch.bfloat16, "bug"),
        (0.0001, torch.float32, "bug"),
        (0.001, torch.float16, "numerical tie"),
    ],
)
def test_audit_tells_a_tie_from_a_bug(gap, dtype, verdict):
    target = Shaky([0.0, 20.0, 20.0 - gap, 3.0], dtype)
    found = audit(target, [9], [5, 1, 0], [5, 2, 0])
    assert found["verdict"] == verdict and found["at"] == 1 and found["gap"] == pytest.approx(gap, abs=1e-4)
    assert audit(target, [9], [5, 1], [5, 1]) == {"verdict": "identical"}
    assert audit(target, [9], [5, 1], [5, 1, 2])["verdict"] == "bug"
    assert audit(target, [9], [5, 1], [5, 0])["verdict"] == "bug", "a token that is no rival is no tie"
