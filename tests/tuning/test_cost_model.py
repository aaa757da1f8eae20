"""What a cycle costs: which trees are timed how often, what a disturbed clock may not say, and whose costs are taken."""

from types import SimpleNamespace

import pytest
from conftest import make, tiny

from specbench.common.errors import SpecBenchError
from specbench.tuning import cost_model
from specbench.tuning.cost_aware import Costs

COSTS = Costs({1: 1.0, 64: 3.0}, {1: 0.1, 10: 0.2}, {1: 0.1, 10: 0.2})
SAID = {"hardware": {"device": "one"}, "versions": {"torch": "1"}, "source": "a", "target": "b", "dtype": "float32"}


def test_every_tree_is_timed_and_plain_decoding_between_them():
    target = tiny()
    drafter = make("eagle2", target)
    trees = cost_model._trees(cost_model.DEEP)
    found = cost_model._timed(target, drafter, trees, 16)
    assert set(found) >= {at for at in trees if at[0] != "verify"} | {cost_model.PLAIN}
    others = {len(steps) for at, steps in found.items() if at != cost_model.PLAIN}
    assert others == {cost_model.TURNS}
    assert len(found[cost_model.PLAIN]) == cost_model.TURNS * (1 + len(found) // cost_model.AGAIN)


def test_passes_that_no_draft_repays_are_left_out(monkeypatch):
    target = tiny()
    drafter = make("eagle2", target)
    monkeypatch.setattr(cost_model, "HOPELESS", 0.0)
    found = cost_model._timed(target, drafter, cost_model._trees(cost_model.DEEP), 16)
    assert not [n for what, n in found if what == "verify" and n > 1]


def test_a_pass_over_more_nodes_is_not_sooner_done():
    assert cost_model._never_falling({4: 5.0, 1: 3.0, 2: 1.0}) == {1: 2.0, 2: 2.0, 4: 5.0}
    target = tiny()
    costs = cost_model.take(target, make("eagle2", target), context=16)
    seconds = [costs.verify[n] for n in sorted(costs.verify)]
    assert seconds == sorted(seconds) and min(seconds) > 0


def test_passes_that_were_timed_before_are_taken_over_in_proportion_to_plain_decoding():
    target = tiny()
    costs = cost_model.take(target, make("eagle2", target), context=16, verify={1: 1.0, 8: 1.5, 64: 4.0})
    assert [costs.verify[n] / costs.verify[1] for n in (1, 8, 64)] == pytest.approx([1.0, 1.5, 4.0])
    assert 0 < costs.verify[1] < 1 and set(costs.first) == set(cost_model.WIDTHS)


def test_the_drafters_own_tree_is_put_back():
    target = tiny()
    drafter = make("eagle2", target)
    before = drafter.growth
    cost_model.take(target, drafter, context=16)
    assert drafter.growth is before


def test_a_drafter_without_trees_is_refused():
    target = tiny()
    with pytest.raises(SpecBenchError, match="grows no trees"):
        cost_model.take(target, make("prompt_lookup", target))


@pytest.mark.parametrize("other", [{"hardware": {"device": "two"}}, {"versions": {"torch": "2"}}, {"target": "c"}])
def test_costs_of_another_machine_version_or_target_are_refused(tmp_path, other):
    path = tmp_path / "eagle2.json"
    cost_model.write(path, COSTS, SAID)
    assert cost_model.read(path, SAID) == COSTS
    with pytest.raises(SpecBenchError, match=f"timed with another {next(iter(other))}; remove it"):
        cost_model.read(path, SAID | other)


def test_costs_are_timed_once_for_what_they_were_made_for(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path))
    taken = []
    monkeypatch.setattr(cost_model, "take", lambda *given, **more: taken.append(more) or COSTS)
    monkeypatch.setattr(cost_model.timing, "BackgroundLoad", lambda: SimpleNamespace(start=lambda: None, read=lambda: 0.0))
    target = tiny()
    drafter = make("eagle2", target)
    for header in ({"threads": 1}, {"threads": 1}, {"threads": 2}):
        assert cost_model.of(target, drafter, "tiny", header) == COSTS
    assert taken == [{"verify": None}, {"verify": COSTS.verify}]  # the target's passes once for all drafters


def test_a_busy_machine_leaves_no_passes_for_other_drafters(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path))
    monkeypatch.setattr(cost_model.timing, "BackgroundLoad", lambda: SimpleNamespace(start=lambda: None, read=lambda: 1.0))
    target = tiny()
    cost_model.of(target, make("eagle2", target), "tiny", {})
    assert len(list(tmp_path.rglob("*.json"))) == 1
