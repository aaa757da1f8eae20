"""`drafts` against the real thing: `chains`, which walks its ids, counts what drafting chain after chain counts."""

import pytest
import torch
from conftest import make, tiny
from decoding import PROMPT, plain
from drafting import FAMILY, save_tokenizer, trained

from drafters.vanilla import Vanilla
from specbench.engine.interface import Batch, NoShortcut, Taps
from specbench.engine.policies import Chain
from specbench.training.corpus_reader import HeldOutAnswer
from specbench.training.replay import chains, replay

STEPS = 4


def counts_alike(target, made):
    made.growth = Chain(STEPS)
    answers = [HeldOutAnswer(PROMPT[k:] + plain(target, PROMPT[k:], 30 - 3 * k), len(PROMPT) - k) for k in range(3)]
    real, found = replay(target, made, answers), chains(target, made, answers, STEPS)
    assert found == real
    assert len(found.ranks) == real.reached[0] and found.ranks.count(0) == real.passed[0]
    return real


@pytest.mark.parametrize("drafter", FAMILY)
def test_walking_the_table_counts_what_replay_counts(drafter):
    target = tiny()
    found = counts_alike(target, trained(drafter, target)[0])
    assert found.passed[0] > 0 and found.passed[0] < found.reached[0], "acceptance of all or nothing shows nothing"


class FixedRanks:
    """Its likeliest first token is id 0, then 1, 2 …; it drafts no second one right."""

    listed, taps = None, Taps()

    def drafts(self, batch, steps):
        for first in (0, 50):
            yield lambda chosen, k, first=first: torch.arange(first, first + k).expand(int(chosen.sum()), k)


def test_the_rank_of_a_first_token_is_its_place_among_the_likeliest():
    target = tiny()
    answer = HeldOutAnswer([7, 7, 0, 3, 4, 9, 10, 30, 5], 1)
    found = chains(target, FixedRanks(), [answer], STEPS)
    # root 7 accepts 0, and 3 is the bonus; then every cycle ends with its first token
    assert found.ranks == [0, 4, 9, 10, 10, 5]
    assert found.among_likeliest == {4: 1 / 6, 10: 4 / 6} and found.passed[0] == 1


def test_a_draft_model_by_path_has_a_table_too(tmp_path):
    target = tiny()
    target.model.save_pretrained(tmp_path / "draft")
    save_tokenizer(tmp_path / "draft", [f"w{i}" for i in range(61)])
    target.path = tmp_path / "draft"
    made = Vanilla("vanilla", Chain(STEPS), path=str(tmp_path / "draft"))
    made.bind(target)
    assert counts_alike(target, made).tau > STEPS  # the target itself


def test_there_are_no_more_steps_than_heads():
    target = tiny()
    made = make("medusa", target, "+drafter.heads=3")
    tokens, states = torch.ones(1, 9, dtype=torch.long), torch.randn(1, 9, 32)
    batch = Batch(tokens, states, tokens.bool(), tokens.bool())
    assert len(list(made.drafts(batch, 5))) == 3


def test_what_has_no_shortcut_says_so():
    target = tiny()
    made = make("eagle2_router", target)
    made.base = make("medusa", target)
    with pytest.raises(NoShortcut):
        next(iter(made.drafts(None, 3)))
