"""DFlash and DDTree: masks and trees against literal definitions, the block alone as in training, its loss by hand."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from conftest import configuration, make, tiny
from decoding import PROMPT, generate, p_value_of_pairs, plain
from drafting import batch_of, trained
from hydra.utils import instantiate
from hypothesis import given, settings
from hypothesis import strategies as st
from tree_checks import check

from drafters.dflash import DFlash, block_mask, feature_layers
from specbench.common.errors import SpecBenchError
from specbench.engine import checkpoints
from specbench.engine.interface import Batch
from specbench.engine.marginal_tree import MarginalTree
from specbench.engine.policies import Chain
from specbench.engine.sampling import Sampler, top

settings.register_profile("here", deadline=None, max_examples=60)
settings.load_profile("here")


# The tree ----------------------------------------------------------------------------------------------------------------


class Levels:
    """A drafter whose levels have given logits."""

    listed, parallel = None, True

    def __init__(self, logits):
        self.logits = logits

    def level_logits(self):
        return self.logits


def prefixes_of(tree):
    found = [()]
    for node in range(1, len(tree)):
        found.append((*found[int(tree.parents[node])], int(tree.tokens[node])))
    return found[1:]


@given(
    levels=st.integers(1, 4), top_k=st.integers(1, 5), nodes=st.integers(2, 30), seed=st.integers(0, 99), flat=st.booleans()
)
def test_the_tree_of_marginals_is_the_best_of_all(levels, top_k, nodes, seed, flat):
    """Against every path over the `top_k` ids of each level; flat: all of them equal."""
    logits = torch.randn(levels, 6, generator=torch.Generator().manual_seed(seed)) * 2
    logits = torch.zeros_like(logits) if flat else logits
    tree = MarginalTree(levels, top_k, nodes).grow(Levels(logits), 9, Sampler(), None)
    check(tree)
    log_p = logits.log_softmax(-1)
    best = top(logits, top_k)[1].tolist()  # of equal ids any may be among them
    assert all(sorted(row[ids].tolist()) == sorted(row.tolist())[-top_k:] for row, ids in zip(logits, best, strict=True))
    paths = [path for depth in range(1, levels + 1) for path in itertools.product(*best[:depth])]

    def value(path):
        return sum(float(log_p[level, token]) for level, token in enumerate(path))

    found = prefixes_of(tree)
    assert len(set(found)) == len(found) == min(nodes - 1, len(paths)) and set(found) <= set(paths)
    expected = sorted(map(value, paths), reverse=True)[: nodes - 1]
    assert sorted(map(value, found), reverse=True) == pytest.approx(expected, abs=1e-4)
    for node, path in enumerate(found, 1):
        assert best[len(path) - 1][int(tree.ranks[node])] == path[-1]
    torch.testing.assert_close(tree.confidence(), torch.tensor([math.exp(value(p)) for p in found]), atol=1e-5, rtol=1e-4)


def test_the_tree_has_no_more_levels_than_the_drafter_and_medusa_takes_it():
    target = tiny()
    made = make("medusa", target, "tree=ddtree", "tree.nodes=20")
    assert made.growth.depth == 5 and made.nodes == 20
    tokens, steps = generate(target, made)
    assert tokens == plain(target, PROMPT, 40) and {s.passes for s in steps} == {1}
    for other in ("eagle2", "hydra"):
        with pytest.raises(SpecBenchError, match="all levels at once"):
            generate(target, make(other, target, "tree=ddtree"))


# The network -------------------------------------------------------------------------------------------------------------


@given(length=st.integers(2, 9), size=st.integers(2, 4), data=st.data())
def test_a_block_sees_its_context_before_the_anchor_and_itself(length, size, data):
    anchors = sorted(data.draw(st.sets(st.integers(0, length - 1), min_size=1)))
    cut = data.draw(st.integers(0, length - 1))  # a second sequence begins there
    starts = torch.tensor([[0 if i < cut else cut for i in range(length)]])
    mask = block_mask(torch.tensor([anchors]), length, size, starts)[0]
    assert mask.shape == (len(anchors) * size, length + len(anchors) * size)
    for query, key in itertools.product(range(mask.shape[0]), range(mask.shape[1])):
        anchor = anchors[query // size]
        if key < length:
            expected = key < anchor and (key < cut) == (anchor < cut)
        else:
            expected = (key - length) // size == query // size
        assert bool(mask[query, key]) == expected, (query, key)


def test_features_are_evenly_spaced_layers():
    assert feature_layers(30, 5) == (1, 8, 14, 20, 27) and feature_layers(36, 5) == (1, 9, 17, 25, 33)
    assert [feature_layers(n, 5) for n in (1, 2, 3, 4, 5)] == [(0,), (0, 1), (0, 1), (1,), (1, 2)]
    assert make("dflash", tiny()).taps.hidden == (0, 1)


@torch.no_grad()
@pytest.mark.parametrize("layers", [1, 2])
def test_decoding_runs_the_block_of_training(layers):
    """Behind a cache filled in three parts, against one pass over all anchors of a text."""
    target = tiny()
    made = make("dflash", target, f"drafter.layers={layers}")
    batch = batch_of(target, rows=1)
    text = batch.tokens[0]
    anchors = torch.arange(1, len(text))[None]
    expected = target.logits(made.slots(batch, anchors)[0])  # [n, K, V]
    target.reset(60, made.taps)
    states = target.prefill(text)
    made.reset(60)
    begin = 0
    for end in (1, 2, 7, 8, 15):
        made.observe(states.select(torch.arange(begin, end)), int(text[end]))
        torch.testing.assert_close(made.level_logits(), expected[end - 1], atol=1e-4, rtol=1e-4)
        assert made.cache.length == end, "rows of the block were kept"
        begin = end


@torch.no_grad()
def test_packed_sequences_are_drafted_as_if_alone():
    target = tiny()
    made = make("dflash", target)
    one, two = batch_of(target, rows=2, length=12).tokens
    states = [target.tapped(tokens[None], made.taps) for tokens in (one, two)]
    everywhere = torch.ones(1, 24, dtype=torch.bool)
    packed = Batch(
        torch.cat([one, two])[None],
        torch.cat([states[0][0], states[1][0]], 1),
        everywhere,
        everywhere,
        hidden={layer: torch.cat([states[0][1][layer], states[1][1][layer]], 1) for layer in made.taps.hidden},
        starts=torch.tensor([[0] * 12 + [12] * 12]),
    )
    together = made.slots(packed, torch.tensor([[5, 17]]))[0]
    for index, (tokens, (last, hidden, _)) in enumerate(zip((one, two), states, strict=True)):
        alone = Batch(tokens[None], last, everywhere[:, :12], everywhere[:, :12], hidden=hidden)
        torch.testing.assert_close(together[index], made.slots(alone, torch.tensor([[5]]))[0, 0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("vocabulary", [None, [3, 5, 8, 13, 21, 34, 55]])
def test_the_loss_is_the_weighted_cross_entropy_of_every_block(vocabulary):
    """Summed by hand over anchors and slots; a question in the middle of the text counts for nothing."""
    target = tiny()
    made = make("dflash", target, "drafter.block=4", "+drafter.gamma=2.0")
    batch = batch_of(target, rows=2, length=14)
    batch.scored[:, 6:9] = False
    ids = None if vocabulary is None else torch.tensor(vocabulary)
    batch.vocabulary = ids
    head = target.head.weight if ids is None else target.head.weight[ids]
    slots = made.slots(batch, torch.arange(14).expand(2, -1))
    total, weights = 0.0, 0.0
    for row, anchor, k in itertools.product(range(2), range(13), range(1, 4)):
        if anchor + k < 14 and batch.scored[row, anchor : anchor + k].all():
            p = F.linear(batch.states[row, anchor + k - 1], head).softmax(-1)
            log_q = F.linear(slots[row, anchor, k - 1], head).log_softmax(-1)
            weight = math.exp(-(k - 1) / 2)
            total, weights = total - weight * float((p * log_q).detach().sum()), weights + weight
    assert float(made.loss(batch)["loss"].detach()) == pytest.approx(total / weights, rel=1e-4)


def test_anchors_are_drawn_anew_among_those_that_count():
    target = tiny()
    made = make("dflash", target, "+drafter.anchors=3")
    batch = batch_of(target, rows=4)
    batch.scored[:, :10] = False
    batch.scored[3] = False
    torch.manual_seed(0)
    draws = [made._draw(batch) for _ in range(40)]
    for columns, chosen in draws:
        assert columns.shape == (4, 3) and chosen[:3].all() and not chosen[3].any()
        assert (columns[:3] >= 10).all() and (columns.diff(dim=1) > 0).all() and (columns < 23).all()
    assert set(torch.cat([c[:3].flatten() for c, _ in draws]).tolist()) == set(range(10, 23))
    assert set(made.loss(batch)) == {"loss", "regression", "classification", "agreement"}


def test_the_mask_is_a_vector_of_its_own_that_is_trained():
    target = tiny()
    made, _ = trained("dflash", target)
    mean = target.embedding.weight.mean(0)
    torch.testing.assert_close(make("dflash", target).mask.data, mean)
    assert (made.mask - mean).abs().max() > 1e-2
    assert not target.embedding.weight.requires_grad or made.embedding is target.embedding


def test_a_cycle_is_one_forward_and_one_product_with_the_head(monkeypatch):
    target = tiny()
    made, calls = trained("dflash", target)[0], []
    logits = made.target_logits
    made.target_logits = lambda states: calls.append(states.shape[0]) or logits(states)
    tokens, steps = generate(target, made)
    assert tokens == plain(target, PROMPT, 40) and sum(s.accepted for s in steps) > 10
    assert {s.passes for s in steps} == {1} and calls == [7] * len(steps)


def test_sampled_answers_follow_the_target():
    """With the tree of marginals, whose siblings are deterministic candidates."""
    target, sampler = tiny(), Sampler(1.0, top_k=3)
    made = trained("dflash", target)[0]
    made.set_tree_policy(MarginalTree(2, 3, 6))
    p, drafted = p_value_of_pairs(target, made, PROMPT, sampler, 400)
    assert drafted == 400 and p > 1e-4


def test_what_does_not_fit_is_refused_in_one_line(tmp_path):
    target = tiny()
    with pytest.raises(SpecBenchError, match=r"depth 8, but drafter\.block=4 drafts 3 levels"):
        DFlash("dflash", Chain(8), block=4)
    made = make("dflash", target, "drafter.block=4", "tree=chain", "tree.gamma=3")
    assert isinstance(made.growth, Chain) and {s.nodes for s in generate(target, made)[1][:-1]} == {3}
    published = instantiate(configuration("dflash").drafter)
    target.model.save_pretrained(tmp_path)
    published.checkpoint = checkpoints.read(str(tmp_path))
    with pytest.raises(SpecBenchError, match="no published layout is known for DFlash"):
        published.bind(target)
