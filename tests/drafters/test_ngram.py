"""Unigram and bigram drafters: probabilities against counts by hand, files, a training by counting, exact verification."""

import json
from types import SimpleNamespace

import pytest
import torch
from command_line import run, train
from conftest import COUNTED, make, tiny
from decoding import PROMPT, generate, plain

from specbench.common.errors import SpecBenchError
from specbench.engine import weights
from specbench.engine.policies import Chain
from specbench.engine.sampling import Sampler
from specbench.training.corpus_reader import HeldOutAnswer
from specbench.training.drafter_training import _count
from specbench.training.replay import chains, replay

TEXTS = [torch.tensor(ids) for ids in ([1, 2, 3, 1, 2, 4, 1, 2, 3, 1, 5], [2, 3])]  # 1: 2 2 2 5; 2: 3 3 3 4; 3: 1 1; 4: 1
UNIGRAM = torch.tensor([0, 4, 4, 3, 1, 1, *[0] * 55])


def counted(drafter, *overrides, texts=TEXTS):
    made = make(drafter, tiny(), *overrides)
    return made, made.count(texts)


def test_a_unigram_draws_by_frequency_whatever_came_before():
    made, tables = counted("unigram")
    assert torch.equal(tables["counts"].long(), UNIGRAM) and tables.keys() == {"counts"}
    q = made.after(torch.tensor([1, 9])).exp()
    torch.testing.assert_close(q, ((UNIGRAM + 1) / (13 + 61)).expand(2, -1))


@pytest.mark.parametrize("followers", [1, 2, 16])
def test_a_bigram_draws_what_followed_and_the_rest_by_frequency(followers):
    made, _ = counted("bigram", f"drafter.followers={followers}")
    q, unigram = made.after(torch.tensor([1, 2, 9])).exp(), (UNIGRAM + 1) / (13 + 61)
    torch.testing.assert_close(q.sum(1), torch.ones(3))
    assert q.argmax(1)[:2].tolist() == [2, 3] and bool((q > 0).all())
    own = torch.zeros(61)
    own[2], own[5] = 3, float(followers > 1)
    torch.testing.assert_close(q[0], (own + (5 - own.sum()) * unigram) / 5)
    torch.testing.assert_close(q[2], unigram)  # 9 does not occur


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_what_is_sampled_is_drawn_from_the_distribution_that_verification_reads(temperature):
    made, _ = counted("bigram")
    made.set_tree_policy(Chain(2))
    made.root = torch.tensor([1])
    drawn = [made.propose(1, Sampler(temperature), torch.Generator().manual_seed(s)) for s in range(400)]
    assert {tree.passes for tree in drawn} == {0}
    q = drawn[0].q[0]
    torch.testing.assert_close(q, (made.after(made.root)[0] / temperature).softmax(-1))
    share = sum(int(tree.tokens[1]) == 2 for tree in drawn) / 400
    assert abs(share - float(q[2])) < 4 * float(q[2] * (1 - q[2]) / 400) ** 0.5


@pytest.mark.parametrize("drafter", COUNTED)
def test_counts_of_the_targets_own_text_are_accepted_and_change_no_answer(drafter):
    target = tiny()
    made, truth = make(drafter, target), plain(target, PROMPT, 40)
    made.count([torch.tensor(PROMPT + truth)])
    tokens, steps = generate(target, made)
    assert tokens == truth and sum(step.accepted for step in steps) > 2 * (drafter == "bigram")
    made.set_tree_policy(Chain(3))
    answers = [HeldOutAnswer(PROMPT + truth, len(PROMPT))]
    assert chains(target, made, answers, 3) == replay(target, made, answers)


def test_tables_survive_a_file_and_those_of_another_kind_are_refused(tmp_path):
    target = tiny()
    named = {"target": "tiny", "target_fingerprint": target.fingerprint()}
    tables = {name: counted(name)[1] for name in COUNTED}
    for name in COUNTED:
        weights.save(tables[name], tmp_path / name, named)
    made, again = counted("bigram")[0], make("bigram", target)
    again.weights = str(tmp_path / "bigram")
    again.bind(target)
    assert torch.equal(again.after(torch.arange(61)), made.after(torch.arange(61)))
    weights.save(tables["bigram"] | {"followers": tables["bigram"]["followers"] + 60}, tmp_path / "odd", named)
    for folder in ("unigram", "odd"):
        again.weights = str(tmp_path / folder)
        with pytest.raises(SpecBenchError, match=r"holds no counts of 61 ids with drafter.order=2; count them again"):
            again.bind(target)


def test_training_counts_what_the_corpus_holds(home):
    run(home, "train", *train(home, "bigram", "train.corpus.source=text", "drafter=bigram", "train.follow=false"))
    provenance = json.loads((home / "out" / "bigram" / "provenance.json").read_text())
    tables = weights.read(home / "out" / "bigram", provenance["target_fingerprint"])[1]
    assert provenance["tokens_seen"] == provenance["data"]["unique_tokens"] == int(tables["counts"].sum()) > 500
    assert provenance["history"][0]["chain_tau"] >= 1 and provenance["held_out"]["answers"]


def test_counting_goes_on_from_nothing():
    job = SimpleNamespace(start="drafters/weights/elsewhere")
    with pytest.raises(
        SpecBenchError, match=r"train.start=drafters/weights/elsewhere: .* counted from nothing; leave it out"
    ):
        _count(SimpleNamespace(job=job), make("bigram", tiny()))
