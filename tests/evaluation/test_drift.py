"""Drift of sampled answers: against the definition, against exact enumeration, and from a run to its table."""

import itertools
import math

import pytest
import torch
from command_line import records_of, run
from conftest import make, tiny
from decoding import PROMPT, generate

from specbench.engine.sampling import Sampler
from specbench.engine.verify import Lossless, Simulated, Typical
from specbench.evaluation import drift
from specbench.records.metrics import RATES, sum_rows
from specbench.records.rows import Drift, Row
from specbench.records.statistics import interval
from specbench.reporting import analysis_tables, cells, console

RULES = [Lossless(), Typical()]


def row_of(tokens, accepted):
    return Row("x", "q", "", 0, 3, tokens, 0.0, 0.0, nodes=accepted, drafted=accepted, accepted=accepted)


@torch.no_grad()
def losses(target, prompt, answer, sampler):
    ids = torch.tensor([[*prompt, *answer]])
    p = sampler.probabilities(target.model(ids).logits[0, len(prompt) - 1 : -1])
    return [-math.log(float(p[i, token])) for i, token in enumerate(answer)]


@pytest.mark.parametrize("sampler", [Sampler(1.0), Sampler(0.7)])
def test_it_is_the_sum_over_the_answer_and_over_its_accepted_tokens(sampler):
    target, answer = tiny(), [5, 9, 2, 30, 7, 7]
    by_hand = losses(target, [1, 2, 3], answer, sampler)
    row = row_of(answer, [2, 1])  # prefill, 2 accepted, bonus, 1 accepted, bonus
    found = drift.measure(target, sampler, RULES, Typical(), [1, 2, 3], row)
    assert found.nll == pytest.approx(sum(by_hand), rel=1e-4)
    assert found.kl == pytest.approx(by_hand[1] + by_hand[2] + by_hand[4], rel=1e-4)
    exact = drift.measure(target, sampler, RULES, Lossless(), [1, 2, 3], row)
    assert exact.kl == 0 and exact.nll == found.nll


def test_it_is_measured_where_a_rule_changes_sampled_answers_alone():
    target, row = tiny(), row_of([5, 9], [0])
    assert drift.measure(target, Sampler(1.0), [Lossless()], Lossless(), [1], row) is None
    assert drift.measure(target, Sampler(), RULES, Typical(), [1], row) is None
    assert drift.measure(target, Sampler(1.0), [Lossless(), Simulated([0.5])], Lossless(), [1], row) is None
    assert drift.measure(target, Sampler(1.0), RULES, Lossless(), [1], row) is not None


def test_its_mean_is_the_kl_of_what_is_emitted():
    """KL(Q || P) of the first two tokens of an answer, Q counted over many answers, P by full forwards."""
    target = tiny(vocab_size=6, eos_token_id=None, bos_token_id=None, spread=0.3)
    made = make("medusa", target, "tree=chain", "tree.gamma=1", "tree.candidates=top", "++drafter.heads=1")
    prompt, rule, sampler, runs = [token % 6 for token in PROMPT], Typical(0.1, 0.4), Sampler(1.0), 1500
    counts, found, total = {}, {}, 0.0
    for seed in range(runs):
        tokens, steps = generate(target, made, prompt, 3, rule=rule, sampler=sampler, seed=seed)
        first = tuple(tokens[:2])  # the third may be cut
        counts[first] = counts.get(first, 0) + 1
        if (case := (first, steps[0].accepted)) not in found:
            row = row_of(list(first), [steps[0].accepted])
            found[case] = drift.measure(target, sampler, RULES, rule, prompt, row).kl
        total += found[case]
    p = {ids: math.exp(-sum(losses(target, prompt, ids, sampler))) for ids in itertools.product(range(6), repeat=2)}
    assert sum(p.values()) == pytest.approx(1, abs=1e-4)
    kl = sum(n / runs * math.log(n / runs / p[ids]) for ids, n in counts.items())
    assert kl > 0.1, "the rule changes this target's answers"
    assert total / runs == pytest.approx(kl, abs=0.04)


def test_metrics_pool_it_over_tokens():
    rows = [row_of([1, 2, 3], [1]), row_of([1, 2], [0]), row_of([4], [])]
    rows[0].drift, rows[1].drift = Drift(3.0, 0.5), Drift(1.0, 0.0)  # the third was not measured
    totals = sum_rows(rows)
    assert interval(RATES["answer_perplexity"], totals).value == pytest.approx(math.exp(4 / 5))
    assert interval(RATES["answer_kl"], totals).value == pytest.approx(0.5 / 5)


def test_a_run_writes_it_and_shows_it(home, tmp_path):
    rule = ["verify._target_=specbench.engine.verify.Typical", "+verify.epsilon=0.05", "+verify.delta=0.2"]
    words = ["drafter=suffix", "sampler.temperature=1", "data.limit=3", f"results={tmp_path}"]
    run(home, "run", *words, *rule)
    _, records = records_of(tmp_path, "suffix")
    rows = [r for r in records if isinstance(r, Row)]
    assert rows and all(r.drift.nll > 0 for r in rows) and all(r.drift.kl == 0 for r in rows if r.drafter == "none")
    entries = cells.collect(tmp_path.rglob("2*.jsonl"), tmp_path)
    printed = " ".join(console.lines(entries, width=1000))
    assert "perplexity [95%]" in printed and "LOSSY" in printed
    _, lines = analysis_tables.drift(entries)
    assert {line[1] for line in lines} == {"exact", "lossy"}
    run(home, "run", *words[:-1], f"results={tmp_path / 'exact'}")
    _, records = records_of(tmp_path / "exact", "suffix")
    assert all(r.drift is None for r in records if isinstance(r, Row)), "nothing to measure where no rule is lossy"
