"""What a cycle costs: which trees are timed how often, what a disturbed clock may not say, and whose costs are taken."""

import pytest
from conftest import make, tiny

from specbench import price
from specbench.engine.fitted import Costs
from specbench.errors import SpecBenchError

COSTS = Costs({1: 1.0, 64: 3.0}, {1: 0.1, 10: 0.2}, {1: 0.1, 10: 0.2})
SAID = {"hardware": {"device": "one"}, "versions": {"torch": "1"}, "source": "a", "target": "b", "dtype": "float32"}


def test_every_tree_is_timed_and_plain_decoding_between_them():
    target = tiny()
    drafter = make("eagle2", target)
    trees = price._trees(price.DEEP)
    found = price._timed(target, drafter, trees, 16)
    assert set(found) == set(trees)
    others = {len(steps) for at, steps in found.items() if at != price.PLAIN}
    assert others == {price.TURNS}
    assert len(found[price.PLAIN]) == price.TURNS * (1 + len(trees) // price.AGAIN)


def test_a_pass_over_more_nodes_is_not_sooner_done():
    assert price._never_falling({4: 5.0, 1: 3.0, 2: 1.0}) == {1: 2.0, 2: 2.0, 4: 5.0}
    target = tiny()
    costs = price.take(target, make("eagle2", target), context=16)
    seconds = [costs.verify[n] for n in sorted(costs.verify)]
    assert seconds == sorted(seconds) and min(seconds) > 0


def test_the_drafters_own_tree_is_put_back():
    target = tiny()
    drafter = make("eagle2", target)
    before = drafter.growth
    price.take(target, drafter, context=16)
    assert drafter.growth is before


def test_a_drafter_without_trees_is_refused():
    target = tiny()
    with pytest.raises(SpecBenchError, match="grows no trees"):
        price.take(target, make("prompt_lookup", target))


@pytest.mark.parametrize("other", [{"hardware": {"device": "two"}}, {"versions": {"torch": "2"}}, {"target": "c"}])
def test_costs_of_another_machine_version_or_target_are_refused(tmp_path, other):
    path = tmp_path / "eagle2.json"
    price.write(path, COSTS, SAID)
    assert price.read(path, SAID) == COSTS
    with pytest.raises(SpecBenchError, match=f"timed with another {next(iter(other))}; remove it"):
        price.read(path, SAID | other)


def test_costs_are_timed_once_for_what_they_were_made_for(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path))
    taken = []
    monkeypatch.setattr(price, "take", lambda *given: taken.append(given) or COSTS)
    target = tiny()
    drafter = make("eagle2", target)
    for said in ({"threads": 1}, {"threads": 1}, {"threads": 2}):
        assert price.of(target, drafter, "tiny", said) == COSTS
    assert len(taken) == 2
