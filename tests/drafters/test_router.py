"""CORAL's LM-head router: a distribution over all ids, sliced to the groups that a level asks for."""

import pytest
import torch
from conftest import make, tiny
from decoding import generate
from drafting import batch_of

from drafters.medusa import Medusa
from drafters.router import Routed
from specbench.common.errors import SpecBenchError
from specbench.engine.policies import Dynamic


def routed(groups, active):
    target = tiny()
    made = make("eagle2_router", target, f"+drafter.groups={groups}", f"+drafter.active={active}")
    states = batch_of(target, rows=1, length=12).states[0]
    return target, made, states


@pytest.mark.parametrize("groups", [1, 4, 16, 61])  # 16 does not divide the 61 ids
@torch.inference_mode()
def test_with_all_groups_it_is_a_distribution(groups):
    _, made, states = routed(groups, groups)
    total = made.routed(states).exp().sum(-1)
    torch.testing.assert_close(total, torch.ones_like(total))


def test_a_drafter_with_a_head_of_its_own_is_refused():
    with pytest.raises(SpecBenchError, match="eagle3 has a head of its own; a router chooses among the target's"):
        make("eagle2_router", tiny(), "drafter.base._target_=drafters.eagle3.Eagle3", "drafter.base.name=eagle3")


@pytest.mark.parametrize("groups", [4, 16])
@torch.inference_mode()
def test_an_exact_router_is_the_full_softmax(groups, monkeypatch):
    target, made, states = routed(groups, groups)
    p = target.logits(states).float().softmax(-1)
    exact = torch.stack([part.sum(-1) for part in p.split(made.size, dim=-1)], -1).log()
    monkeypatch.setattr(made.router, "forward", lambda flat: exact)
    torch.testing.assert_close(made.routed(states).exp(), p)


@torch.inference_mode()
def test_a_level_offers_the_union_of_its_nodes_groups_and_nothing_else():
    _, made, states = routed(8, 2)
    logits = made.routed(states)
    wanted = {int(g) for g in made.router(states).topk(2).indices.flatten()}
    assert len(wanted) < 8
    for token in range(61):
        assert bool(torch.isfinite(logits[:, token]).all()) == (token // made.size in wanted)
        assert bool(torch.isfinite(logits[:, token]).any()) == (token // made.size in wanted)
    alone = made.routed(states[3])  # a narrower level offers less, and what both offer is worth the same
    shared = torch.isfinite(alone)
    assert 0 < shared.sum() < torch.isfinite(logits[3]).sum()
    torch.testing.assert_close(alone[shared], logits[3][shared])


@torch.inference_mode()
def test_a_chain_drafts_from_each_places_own_groups():
    """As one node after the other has it; what all places ask for together would draft other ids."""
    target, made, _ = routed(16, 1)
    batch = batch_of(target, rows=2, length=12)
    places = batch.positions > 3
    for draft, states in zip(made.drafts(batch, 3), made.base.draft_states(batch, 3), strict=True):
        drafted, flat = draft(places, 1)[:, 0], states[places]
        assert drafted.tolist() == [int(made.routed(state).argmax()) for state in flat]
        assert drafted.tolist() != made.routed(flat).argmax(-1).tolist()


def test_training_the_router_leaves_the_drafter_as_it_was():
    target, made, _ = routed(8, 2)
    made.loss(batch_of(target))["loss"].backward()
    touched = [name for name, p in made.named_parameters() if p.grad is not None]
    assert touched == ["router.weight", "router.bias"]


def test_a_router_over_heads_takes_their_one_pass_for_all_levels():
    target = tiny()
    made = Routed("routed", Dynamic(3, 2, 7), Medusa("heads", Dynamic(3, 2, 7)))
    made.bind(target)
    _, steps = generate(target, made.eval())
    assert made.passes == 1 and {s.passes for s in steps} == {1}
