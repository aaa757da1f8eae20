"""Medusa: the calibrated tree against brute force, shared candidates, what the heads are trained on."""

import itertools

import pytest
import torch
from conftest import make, tiny
from test_decode import PROMPT, generate, plain
from test_drafters import batch_of, trained

from specbench.engine.grow import Calibrated
from specbench.training.replay import known_states


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("nodes", [2, 5, 12])
def test_the_tree_expects_most_of_all_trees_of_its_size(seed, nodes):
    """Greedy choice equals the best ancestor-closed set: the most valuable paths, since no path beats its prefix."""
    accuracy = torch.rand(3, 3, generator=torch.Generator().manual_seed(seed)).tolist()  # not sorted by rank on purpose
    growth = Calibrated(nodes)
    growth.calibrate(accuracy)
    worth = {}
    for length in (1, 2, 3):
        for path in itertools.product(range(3), repeat=length):
            value = 1.0
            for level, rank in enumerate(path):
                value *= accuracy[level][rank]
            worth[path] = value
    best = sum(sorted(worth.values(), reverse=True)[: nodes - 1])
    chosen = []
    for node in range(1, growth.nodes):
        path = []
        while node:
            path.insert(0, growth.ranks[node])
            node = growth.parents[node]
        chosen.append(tuple(path))
    assert len(set(chosen)) == nodes - 1
    assert sum(worth[p] for p in chosen) == pytest.approx(best)


def test_calibration_is_the_acceptance_that_drafting_finds():
    """Accuracy of head k at rank r, counted by proposing a full product of two levels at every position."""
    target = tiny()
    made, _ = trained("medusa", target, steps=60)
    tokens = PROMPT + plain(target, PROMPT, 30)
    found = made.calibrate([known_states(target, tokens, len(PROMPT))])
    with torch.inference_mode():
        target.reset(60)
        states = target.prefill(torch.tensor(tokens))
        for level in range(made.heads):
            hits, cases = [0] * 10, 0
            for root in range(len(PROMPT), len(tokens) - level - 1):
                made.observe(states.select(torch.arange(root)), tokens[root])
                ids = made.levels[level].topk(10).indices.tolist()
                cases += 1
                if tokens[root + level + 1] in ids:
                    hits[ids.index(tokens[root + level + 1])] += 1
            assert found[level] == pytest.approx([h / cases for h in hits])


def test_the_tree_ships_with_the_weights(tmp_path):
    from conftest import configuration
    from hydra.utils import instantiate

    from specbench.engine import weights

    target = tiny()
    made, _ = trained("medusa", target, steps=20)
    accuracy = made.calibrate([known_states(target, PROMPT + plain(target, PROMPT, 30), len(PROMPT))])
    provenance = {"target_fingerprint": target.fingerprint(), "calibration": accuracy}
    weights.save(made, tmp_path, provenance)
    again = instantiate(configuration("medusa").drafter, weights=str(tmp_path))
    again.bind(target)
    assert (again.growth.parents, again.growth.ranks) == (made.growth.parents, made.growth.ranks)
    assert generate(target, again)[0] == plain(target, PROMPT, 40)


def test_heads_start_as_the_targets_own_and_may_have_their_own_output():
    target = tiny()
    batch = batch_of(target, rows=2)
    for override in ("+drafter.head_per_level=false", "+drafter.head_per_level=true"):
        made = make("medusa", target, override)
        assert len(made.outputs) == (made.heads if "true" in override else 0)
        with torch.inference_mode():
            made.observe(known(target, batch.tokens[0]), 7)
            assert torch.allclose(made.levels, target.logits(batch.states[0, -1]).expand_as(made.levels), atol=1e-5)


def known(target, tokens):
    target.reset(len(tokens))
    return target.prefill(tokens)


def test_confined_vocabulary_drops_labels_outside_it():
    target = tiny()
    made, batch = make("medusa", target), batch_of(target)
    whole = made.loss(batch)["head_1"]
    batch.vocabulary = torch.arange(61)
    assert float(made.loss(batch)["head_1"]) == pytest.approx(float(whole), rel=1e-5)
    batch.vocabulary = batch.tokens.unique()[:20]
    assert torch.isfinite(made.loss(batch)["loss"])
