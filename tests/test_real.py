"""The default model with the shipped drafters: greedy identity in float32, acceptance, sampling, the shipped corpus."""

import json
import os
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, SHIPPED, composed, configuration
from hydra.utils import instantiate
from scipy.stats import chisquare

from specbench.common.environment import installed
from specbench.common.storage import sha256_of
from specbench.data.corpus_file import PACKED, PACKED_PROVENANCE, unpack
from specbench.data.download import file_from_wheel
from specbench.data.prompts import read_jsonl
from specbench.engine.decode import Limits, Prefill, decode
from specbench.engine.policies import Chain, Dynamic
from specbench.engine.sampling import Sampler
from specbench.engine.verify import Lossless
from specbench.evaluation.audit import MAX_ULPS, MIN_ULPS, audit
from specbench.training.corpus import settle_precision

SAMPLED = Sampler(0.8, top_k=4)
TOKENS = 17  # of an answer: enough for eight cycles
DISTINCT = [*{configuration(d).drafter.weights: d for d in reversed(SHIPPED)}.values()]  # other trees change no ids
ADAPTED = "medusa2"  # drafts for the target with the adapter beside its weights


@pytest.fixture(scope="module")
def real():
    """The target in float32 with a short and a long prompt; large enough for all cores that torch would take."""
    config = configuration("none", "model.dtype=float32", "data.limit=3")
    target, chat = instantiate(config.model).load()
    short, _, long = instantiate(config.dataset).load()
    threads = int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))
    torch.set_num_threads(threads)
    yield target, [chat.opening(q.turns[0]) for q in (short, long)]
    torch.set_num_threads(1)


def bound(name, target):
    drafter = instantiate(configuration(name).drafter)
    drafter.bind(target)
    return drafter


def events(target, drafter, prompt, cap, sampler=None, generator=None):
    return list(decode(target, drafter, prompt, Limits(cap, target.stop_ids), Lossless(), sampler or Sampler(), generator))


def ids(found):
    return [t for e in found for t in ([e.token] if isinstance(e, Prefill) else e.tokens)]


@pytest.fixture(scope="module")
def answers(real):
    """The baseline's greedy answers."""
    target, prompts = real
    return [ids(events(target, bound("none", target), prompt, TOKENS)) for prompt in prompts]


@pytest.fixture(scope="module")
def fast(real):
    """The same target in fewer and faster products, as runs have it."""
    target, chat = instantiate(configuration("none", "model.dtype=float32").model).load()
    target.optimize_for_inference()
    assert target.fused is not None
    return target, chat


PEERS = {"openvino": "openvino-genai", "llama_cpp": "llama-cpp-python"}


@pytest.mark.parametrize("lookup", [0, 5])
@pytest.mark.parametrize("name", [name for name, package in PEERS.items() if installed(package)])
def test_other_engines_answer_alike_with_the_targets_own_values(real, answers, name, lookup):
    target, prompts = real
    peer = instantiate(configuration(name, f"drafter.lookup={lookup}").drafter)
    peer.bind(target)
    assert peer.found["exact"]
    limits = Limits(TOKENS, target.stop_ids)
    assert [peer.answer(prompt, "", limits, Sampler(), None).ids for prompt in prompts] == answers
    assert [len(peer.greedy(prompt, 2 * TOKENS)) for prompt in prompts] == [2 * TOKENS] * 2, "nothing stops it"


@pytest.mark.parametrize("drafter", [drafter for drafter in DISTINCT if drafter != ADAPTED])
def test_greedy_output_is_identical_in_float32_and_better_than_chance(real, fast, answers, drafter):
    """The shipped weights were trained for this target, with this wiring: they must be accepted."""
    target, prompts = fast[0], real[1]
    made, cycles = bound(drafter, target), 0
    for prompt, expected in zip(prompts, answers, strict=True):
        found = events(target, made, prompt, TOKENS)
        assert audit(target, prompt, expected, ids(found)) == {"verdict": "identical"}
        cycles += len(found) - 1
    assert sum(len(a) - 1 for a in answers) / cycles > 1.25


def test_medusa_2_drafts_for_its_adapted_target_and_better_than_chance(real):
    adapter = ROOT / configuration(ADAPTED).drafter.weights
    target, _ = instantiate(configuration("none", "model.dtype=float32", f"model.adapter={adapter}").model).load()
    made, emitted, cycles = bound(ADAPTED, target), 0, 0
    for prompt in real[1]:
        expected = ids(events(target, bound("none", target), prompt, TOKENS))
        found = events(target, made, prompt, TOKENS)
        assert audit(target, prompt, expected, ids(found)) == {"verdict": "identical"}
        emitted, cycles = emitted + len(expected) - 1, cycles + len(found) - 1
    assert emitted / cycles > 1.25


def test_baseline_equals_generate(real, answers):
    target, prompts = real
    made = target.model.generate(torch.tensor([prompts[0]]), max_new_tokens=TOKENS, do_sample=False)
    assert answers[0] == made[0, len(prompts[0]) :].tolist()


def test_fast_products_leave_greedy_ids_unchanged_on_twenty_prompts(real, fast):
    """Rounding differs in the last bits; a tie so close that it turns would show here first."""
    fast, chat = fast
    for question in instantiate(configuration("none", "data.limit=20").dataset).load():
        prompt = chat.opening(question.turns[0])[-32:]
        plain, hastened = (ids(events(target, bound("none", target), prompt, 6)) for target in (real[0], fast))
        assert plain == hastened, question.id


@pytest.fixture(scope="module")
def continuations(real):
    """A short prompt, and how likely each three tokens are to follow it: the product of the target's conditionals."""
    target, prompts = real
    prompt, likely = prompts[0][-12:], {(): 1.0}
    with torch.inference_mode():
        for _ in range(3):
            p = SAMPLED.probabilities(target.model(torch.tensor([[*prompt, *path] for path in likely])).logits[:, -1])
            likely = {
                (*path, t): mass * float(row[t])
                for (path, mass), row in zip(likely.items(), p, strict=True)
                for t in row.nonzero()[:, 0].tolist()
            }
    assert not any(stop in path[:2] for path in likely for stop in target.stop_ids), "shorter ones would be another case"
    return prompt, likely


# Sampled candidates and deterministic ones, in trees as deep as three tokens can show.
@pytest.mark.parametrize(("drafter", "growth"), [("vanilla", Chain(2)), ("eagle2_small", Dynamic(2, 4, 12))])
def test_sampling_follows_the_targets_distribution(fast, continuations, drafter, growth):
    """Three tokens many times over against their exact distribution, by chi-square; rare ones share a bin."""
    (target, _), (prompt, likely), runs = fast, continuations, 150
    made, generator = bound(drafter, target), torch.Generator().manual_seed(7)
    made.set_tree_policy(growth)
    found = Counter(tuple(ids(events(target, made, prompt, 3, SAMPLED, generator))) for _ in range(runs))
    assert not found.keys() - likely.keys(), "an impossible continuation"
    often = [path for path, p in likely.items() if p * runs >= 5]
    observed, expected = [found[p] for p in often], [likely[p] * runs for p in often]
    observed, expected = [*observed, runs - sum(observed)], [*expected, runs - sum(expected)]
    assert len(often) > 4, "the test has no power if one continuation is certain"
    assert chisquare(observed, expected).pvalue > 1e-3


class Shaky:
    """A target whose plain pass says what it is told, and whose narrow passes part from it by as much as it is told."""

    def __init__(self, logits, dtype, rounding=0.0):
        self.dtype, self.device = dtype, torch.device("cpu")
        self.logits = torch.tensor(logits)
        self.shaken = self.logits + torch.tensor([rounding, 0.0, -rounding, 0.0])

    def reset(self, capacity, taps=None):
        self.length = 0

    def verifier(self, terms):
        pass

    def prefill(self, tokens):
        self.length = len(tokens)
        return SimpleNamespace(logits=self.logits[None])

    def forward(self, tree):
        assert self.length, "a tree without a prefix"
        return SimpleNamespace(logits=self.shaken.expand(len(tree), -1))

    def keep(self, nodes):
        self.length += len(nodes)


@pytest.mark.parametrize(
    ("gap", "rounding", "dtype", "verdict"),
    [
        (0.01, 0.0, torch.bfloat16, "numerical tie"),  # below a unit in the last place
        (0.19, 0.1, torch.bfloat16, "numerical tie"),
        (0.35, 0.1, torch.bfloat16, "bug"),
        (1.0, 0.1, torch.bfloat16, "bug"),  # passes agree to a tenth of that
        (1.0, 0.0, torch.bfloat16, "bug"),
        (5.0, 0.1, torch.bfloat16, "bug"),
        (5.0, 3.0, torch.bfloat16, "bug"),  # passes that part so far do not round: they are wrong
        (0.0002, 0.0, torch.float32, "bug"),
        (0.0002, 0.0002, torch.float32, "bug"),  # 84 units in the last place are no rounding either
        (0.00002, 0.0, torch.float32, "bug"),
        (0.00002, 0.000015, torch.float32, "numerical tie"),  # a few units, as these passes show
        (0.001, 0.0, torch.float16, "numerical tie"),
    ],
)
def test_audit_tells_a_tie_from_a_bug(gap, rounding, dtype, verdict):
    target = Shaky([0.0, 20.0, 20.0 - gap, 3.0], dtype, rounding)
    found = audit(target, [9], [5, 1, 0], [5, 2, 0])
    assert found["verdict"] == verdict and found["at"] == 1 and found["gap"] == pytest.approx(gap, abs=1e-4)
    assert (found["gap"] <= found["tolerance"]) == (verdict == "numerical tie")
    assert audit(target, [9], [5, 1], [5, 1]) == {"verdict": "identical"}
    assert audit(target, [9], [5, 1], [5, 1, 2])["verdict"] == "bug"
    assert audit(target, [9], [5, 1], [5, 0])["verdict"] == "bug", "a token that is no rival is no tie"
    losers = Shaky([0.0, 20.0, 0.0, 3.0], dtype, rounding)
    assert audit(losers, [9], [5, 0], [5, 2])["verdict"] == "bug", "nor are two equal losers"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_rounding_of_real_passes_is_measured_and_small(real, answers, dtype):
    """Behind a real answer the tolerance is of the size at which passes part, far below what tells words apart."""
    target, prompts = real
    if dtype != target.dtype:
        target = instantiate(configuration("none", "model.dtype=bfloat16").model).load()[0]
    expected = ids(events(target, bound("none", target), prompts[0], TOKENS)) if dtype != torch.float32 else answers[0]
    other = next(i for i in range(target.vocab_size) if i != expected[9])
    found = audit(target, prompts[0], expected, [*expected[:9], other])
    with torch.inference_mode():
        logits = target.model(torch.tensor([[*prompts[0], *expected[:9]]])).logits[0, -1].float()
    ulp = torch.finfo(dtype).eps * float(logits.abs().max())
    assert found["verdict"] == "bug" and found["at"] == 9
    assert MIN_ULPS * ulp < found["tolerance"] < 1.01 * MAX_ULPS[dtype] * ulp
    assert 3 * found["tolerance"] < found["gap"] == pytest.approx(float(logits[expected[9]] - logits[other]), rel=0.05)


def test_the_shipped_corpus_is_this_targets_and_small(real):
    """Ids of what the target wrote, whole and under the settings that training asks for, so that it is taken over."""
    target, folder = real[0], ROOT / "drafters" / "weights" / "smollm2-135m"
    provenance = json.loads((folder / PACKED_PROVENANCE).read_text())
    asked = instantiate(composed("train").train.corpus)
    settings = settle_precision(asked, target.fingerprint(), target.device, folder)
    assert settings.precision == provenance["settings"]["precision"] == "int8"
    assert provenance["corpus"] == settings.digest(target.fingerprint()) and provenance["license"] and provenance["commit"]
    assert (folder / PACKED).stat().st_size <= 12e6 and sha256_of(folder / PACKED) == provenance["sha256"]
    texts = unpack(folder / PACKED)
    assert sum(t.index < settings.validation for t in texts) == provenance["held_out"] >= 0.95 * settings.validation
    assert sum(len(t.tokens) for t in texts if t.index >= settings.validation) == provenance["training_tokens"] >= 1_000_000
    greedy = min(texts, key=lambda t: t.index)
    begin, end = greedy.spans[0]
    tokens = torch.tensor(greedy.tokens[:end])
    with torch.no_grad():
        best = target.logits(target.run(tokens[None], torch.arange(end)[None], None, None))[0].argmax(-1)
    agree = (best[begin - 1 : end - 1] == tokens[begin:]).float().mean()
    assert agree > 0.97, "held-out answers are the target's own greedy ones"


def test_every_reference_solution_of_humaneval_passes_its_tests():
    """As a whole function in a block, or as the prompt's continuation; and no other problem's solution does."""
    folder = configuration("none", "dataset=humaneval", "dataset.score=true", "data.run_programs=true").dataset
    problems = [question.check for question in instantiate(folder).load()]
    records = list(read_jsonl(file_from_wheel(instantiate(folder.wheel))))
    for number, (problem, record) in enumerate(zip(problems, records, strict=True)):
        body = record["canonical_solution"]
        assert problem.passed(body if number % 2 else f"```python\n{record['prompt']}{body}```"), record["task_id"]
    assert not problems[0].passed(records[1]["canonical_solution"])
