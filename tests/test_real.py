"""The default model with the shipped drafters: greedy identity in float32, target text, sampling against vanilla."""

import json

import numpy as np
import pytest
import torch
from conftest import ROOT, SHIPPED, configuration
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from scipy.stats import chi2_contingency

from specbench.assets import sha256_of
from specbench.bench import audit
from specbench.engine.decode import Limits, Prefill, decode
from specbench.engine.sampling import Sampler
from specbench.engine.verify import Lossless
from specbench.training.corpus import PACKED, PACKED_PROVENANCE, unpack


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


def test_the_shipped_corpus_is_this_targets_and_small(real):
    """Ids of what the target wrote, whole and under the settings that training asks for, so that it is taken over."""
    target, folder = real[0], ROOT / "drafters" / "weights" / "smollm2-135m"
    said = json.loads((folder / PACKED_PROVENANCE).read_text())
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        settings = instantiate(compose("train", []).train.corpus)
    assert said["corpus"] == settings.digest(target.fingerprint()) and said["license"] and said["commit"]
    assert (folder / PACKED).stat().st_size <= 12e6 and sha256_of(folder / PACKED) == said["sha256"]
    texts = unpack(folder / PACKED)
    assert sum(t.index < settings.validation for t in texts) == said["held_out"] >= 0.95 * settings.validation
    assert sum(len(t.tokens) for t in texts if t.index >= settings.validation) == said["training_tokens"] >= 1_000_000
    greedy = min(texts, key=lambda t: t.index)
    begin, end = greedy.spans[0]
    tokens = torch.tensor(greedy.tokens[:end])
    with torch.no_grad():
        best = target.logits(target.run(tokens[None], torch.arange(end)[None], None, None))[0].argmax(-1)
    agree = (best[begin - 1 : end - 1] == tokens[begin:]).float().mean()
    assert agree > 0.97, "held-out answers are the target's own greedy ones"
