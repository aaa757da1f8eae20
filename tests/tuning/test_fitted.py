"""Fitted trees against brute force, the rate's choice against all others, acceptance against decoding itself."""

import itertools
import random
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import configuration, make, settled, tiny
from fixtures import random_row, settings

from specbench.common import environment
from specbench.common.errors import SpecBenchError
from specbench.common.io import parse
from specbench.common.storage import sha256_of
from specbench.engine.decode import Limits, Prefill, decode
from specbench.engine.policies import Dynamic, Static
from specbench.engine.sampling import Sampler
from specbench.engine.verify import Lossless
from specbench.evaluation import fitting, study_runs
from specbench.records.blocks import Block
from specbench.training.corpus_reader import HeldOutAnswer
from specbench.training.replay import replay
from specbench.tuning import acceptance as measured
from specbench.tuning.cost_aware import (
    NODES,
    TOP_K,
    CostAwareTree,
    Costs,
    Fitted,
    FittedStatic,
    TreeAcceptance,
    between,
    static_choices,
    worthiest,
)

COSTS = Costs(
    verify={1: 0.020, 2: 0.021, 8: 0.030, 16: 0.034, 64: 0.110},
    first={1: 0.004, 10: 0.006},
    level={1: 0.003, 4: 0.0035, 10: 0.007},
)
FREE = Costs({1: 1e-6, 64: 1e-6}, {1: 1e-9}, {1: 1e-9})


def made_up(seed: int = 0, levels: int = 4) -> TreeAcceptance:
    """Tables of a drafter that there is not: deeper and larger trees emit more."""
    draw = random.Random(seed)
    tau = {
        k: [
            [1 + (1 - 0.7 ** (d + 1)) * (1 - draw.uniform(0.5, 0.9) ** n) * 0.4 * k**0.3 for n in NODES]
            for d in range(levels)
        ]
        for k in TOP_K
    }
    ranks = [sorted((draw.random() / 2**r for r in range(10)), reverse=True) for _ in range(levels)]
    ranks = [[share / (1.2 * sum(row)) for share in row] for row in ranks]
    return TreeAcceptance(tau, ranks, [0.0, 0.1, 0.5, 1.0], [0.0, 0.05, 0.4, 0.9], (0.1, 0.0), 100)


@pytest.fixture(scope="module")
def answers():
    """Greedy answers of a tiny target, and the target."""
    target = tiny(spread=0.25)
    found = []
    for begin in range(4):
        prompt = [(7 * begin + i * i) % 60 for i in range(6)]
        events = decode(target, make("none", target), prompt, Limits(30), Lossless(), Sampler())
        tokens = [t for e in events for t in ([e.token] if isinstance(e, Prefill) else e.tokens)]
        found.append(HeldOutAnswer([*prompt, *tokens], len(prompt)))
    return target, found


def agreeing(target, name="eagle2"):
    """A drafter that is right now and then: a random one hardly ever is."""
    drafter = make(name, target)
    head = target.logits

    def leaning(states):
        logits = head(states)
        return logits + 0.6 * logits.std() * torch.sin(states.sum(-1, keepdim=True) * 50 + torch.arange(logits.shape[-1]))

    drafter.target_logits = leaning
    return drafter


def test_costs_lie_on_lines_between_what_was_measured():
    table = {1: 1.0, 3: 3.0, 5: 4.0}
    assert [between(table, x) for x in (1, 2, 4, 5, 7)] == [1.0, 2.0, 3.5, 4.0, 5.0]
    assert between({1: 2.0}, 9) == 2.0 and between({1: 2.0, 2: 0.5}, 9) == 0.0
    assert COSTS.cycle(3, 4, 8) == pytest.approx(0.030 + 0.004 + 3 / 9 * 0.002 + 2 * 0.0035)


@pytest.mark.parametrize("seed", range(3))
def test_the_fitted_tree_is_the_fastest_of_all(seed):
    known, growth = made_up(seed), Fitted(depth=3, top_k=6, nodes=32)
    growth.fit(known, COSTS)
    best = (0.0, (0, 0, 0))
    for depth, k, (size, nodes) in itertools.product((1, 2, 3), (1, 2, 3, 4, 6), list(enumerate(NODES))):
        if nodes <= min(32, 1 + k + (depth - 1) * k * k):
            best = max(best, (known.tau[k][depth - 1][size] / COSTS.cycle(depth, k, nodes), (depth, k, nodes)))
    assert (growth.depth, growth.top_k, growth.nodes) == best[1]
    assert growth.chosen["choice"]["speedup"] == pytest.approx(best[0] * COSTS.verify[1], abs=1e-3)
    assert growth.chosen["runner_up"]["speedup"] <= growth.chosen["choice"]["speedup"]
    assert growth.rows == growth.top_k * (growth.depth - 1)


def test_static_trees_are_the_best_of_their_size():
    """Every tree of 6 nodes over three levels and three ranks, against the greedy choice."""
    ranks = [[0.5, 0.3, 0.05], [0.6, 0.1, 0.1], [0.4, 0.2, 0.0]]
    paths = [p for depth in (1, 2, 3) for p in itertools.product(range(3), repeat=depth)]
    worth = {
        p: ranks[0][p[0]] * (ranks[1][p[1]] if len(p) > 1 else 1) * (ranks[2][p[2]] if len(p) > 2 else 1) for p in paths
    }
    best = max(
        sum(worth[p] for p in chosen)
        for chosen in itertools.combinations(sorted(paths, key=lambda p: -worth[p])[:14], 5)
        if all(len(p) == 1 or p[:-1] in chosen for p in chosen)
    )
    found = list(itertools.islice(worthiest(ranks), 5))
    assert sum(w for w, _ in found) == pytest.approx(best)
    assert [w for w, _ in found] == sorted((w for w, _ in found), reverse=True)


def test_a_fitted_static_tree_pays_for_what_it_expands():
    known, growth = made_up(1), FittedStatic(depth=3, nodes=24)
    growth.fit(known, COSTS)
    for choice in static_choices(known, COSTS, growth.limits):
        expanded = [{p[:-1] for p in choice.paths if len(p) == d} for d in range(2, choice.depth + 1)]
        seconds = between(COSTS.verify, choice.nodes) + between(COSTS.first, choice.top_k)
        assert choice.seconds == pytest.approx(seconds + sum(between(COSTS.level, len(level)) for level in expanded))
        assert choice.speed <= growth.chosen["choice"]["speedup"] / COSTS.verify[1] + 1e-2
        Static(choice.paths)  # ancestor-closed


@pytest.mark.parametrize("seed", range(20))
def test_as_many_nodes_are_verified_as_pay(seed):
    draw = random.Random(seed)
    growth = CostAwareTree(depth=3, top_k=4, nodes=20)
    growth.fit(made_up(seed), COSTS)
    worth = torch.tensor([draw.random() ** 3 for _ in range(draw.randrange(1, 40))])
    ordered = sorted(worth.tolist(), reverse=True)
    gains = {m: sum(ordered[:m]) - growth.price * between(COSTS.verify, 1 + m) for m in range(min(19, len(ordered)) + 1)}
    assert gains[growth.kept(worth)] == pytest.approx(max(gains.values()), abs=1e-6)


@pytest.mark.parametrize("seed", range(20))
def test_a_level_is_drafted_for_the_nodes_that_pay_for_it(seed):
    draw = random.Random(seed)
    growth, known = CostAwareTree(depth=4, top_k=4, nodes=20), made_up(seed)
    growth.fit(known, COSTS)
    worth = torch.tensor([draw.random() ** 2 for _ in range(12)])
    begin, depth = draw.randrange(0, 8), draw.randrange(1, 4)

    def value(parents):
        """Of verifying the best of all nodes and of the children that these are expected to have."""
        pool = sorted([*worth.tolist(), *(w * share for w in parents for share in known.ranks[depth][:4])], reverse=True)
        tokens = max(sum(pool[:m]) - growth.price * between(COSTS.verify, 1 + m) for m in range(20))
        return tokens - (growth.price * between(COSTS.level, len(parents)) if parents else 0)

    newest = worth[begin:].tolist()
    best = max(value(nodes) for width in range(5) for nodes in itertools.combinations(newest, width))
    chosen = growth.frontier(worth, begin, depth).tolist()
    assert value([newest[i] for i in chosen]) == pytest.approx(best, abs=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("costs", "drafts"), [(COSTS, None), (FREE, True), (Costs({1: 1.0, 2: 9.0}, {1: 9.0}, {1: 9.0}), False)]
)
def test_whatever_pays_the_answer_is_the_targets(answers, temperature, costs, drafts):
    target, texts = answers
    for growth in (CostAwareTree(depth=4, top_k=4, nodes=20), Fitted(depth=3, top_k=4, nodes=20)):
        growth.fit(made_up(), costs)
        drafter = agreeing(target)
        drafter.set_tree_policy(growth)
        prompt = texts[0].ids[: texts[0].begin]
        sampler, rng = Sampler(temperature), torch.Generator().manual_seed(1)
        events = list(decode(target, drafter, prompt, Limits(24), Lossless(), sampler, rng))
        if not temperature:
            assert [t for e in events for t in ([e.token] if isinstance(e, Prefill) else e.tokens)] == texts[0].ids[6:30]
        if drafts is not None and isinstance(growth, CostAwareTree):
            assert (sum(e.nodes for e in events[1:]) > 0) == drafts


def test_a_generous_rate_drafts_what_a_dynamic_tree_does(answers):
    """Where nothing costs anything, every node pays, and both are the same tree."""
    target, texts = answers
    free, fixed = CostAwareTree(depth=4, top_k=4, nodes=20), Dynamic(4, 4, 20)
    sure = TreeAcceptance(made_up().tau, [[0.5] * 10] * 4, [0.0, 1.0], [0.0, 1.0], (0.0, 0.0), 1)
    free.fit(sure, FREE)
    found = []
    for growth in (free, fixed):
        drafter = agreeing(target)
        drafter.set_tree_policy(growth)
        trees, grow = [], growth.grow
        growth.grow = lambda *a, grow=grow, trees=trees: trees.append(grow(*a)) or trees[-1]
        list(decode(target, drafter, texts[1].ids[:6], Limits(16), Lossless(), Sampler()))
        found.append([(t.tokens.tolist(), t.parents.tolist(), t.ranks.tolist(), t.depths.tolist()) for t in trees])
    assert found[0] == found[1]


@pytest.mark.parametrize("costs", [FREE, Costs({1: 1.0, 2: 9.0}, {1: 9.0}, {1: 9.0})])
def test_passes_are_the_levels_that_were_drafted_though_none_of_them_was_verified(answers, costs):
    target, texts = answers
    growth, drafter, levels = CostAwareTree(depth=4, top_k=4, nodes=20), agreeing(target), []
    growth.fit(made_up(), costs)
    drafter.set_tree_policy(growth)
    expand, propose = drafter.expand, drafter.propose
    drafter.propose = lambda *a: levels.append(1) or propose(*a)  # the first level comes out of `observe`
    drafter.expand = lambda *a: levels.append(levels.pop() + 1) or expand(*a)
    events = list(decode(target, drafter, texts[0].ids[:6], Limits(24), Lossless(), Sampler()))
    assert [step.passes for step in events[1:]] == levels
    assert (max(levels) > 1) == (costs is FREE), "where nothing pays, a level is drafted and no node verified"


@pytest.mark.parametrize("growth", [Fitted(), FittedStatic(), CostAwareTree()])
def test_what_was_not_fitted_does_not_draft(growth):
    with pytest.raises(SpecBenchError, match="was not fitted"):
        growth.grow(None, 0, Sampler(), None)


# Acceptance -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["eagle2", "medusa"])
def test_every_tree_accepts_what_decoding_with_it_accepts(answers, name):
    target, texts = answers
    drafter = agreeing(target, name)
    before = drafter.growth
    found = measured.measure(target, drafter, texts)
    assert drafter.growth is before and found.positions == sum(len(a.ids) - a.begin - 1 for a in texts)
    levels = len(found.tau[1])
    assert levels == (5 if name == "medusa" else measured.LEVELS)
    assert found.tau[10][levels - 1][-1] > 1.2, "the drafter is never right: nothing is compared"
    for depth, k, nodes in ((1, 1, 2), (levels, 1, 5), (3, 10, 16), (levels, 10, 64), (2, 10, 40)):
        drafter.set_tree_policy(Dynamic(depth, k, nodes))
        counted = replay(target, drafter, texts)
        tau = found.tau[k][depth - 1][NODES.index(nodes)]
        assert tau == pytest.approx(counted.tau, abs=1e-4), (depth, k, nodes)
    for depth, k, nodes in ((3, 2, 6), (levels, 4, 24), (4, 6, 32)):  # frontiers of the large tree hardly ever lack any
        drafter.set_tree_policy(Dynamic(depth, k, nodes))
        assert found.tau[k][depth - 1][NODES.index(nodes)] == pytest.approx(replay(target, drafter, texts).tau, rel=0.03)
    drafter.set_tree_policy(before)


def test_shares_by_rank_are_counted_below_right_nodes(answers):
    target, texts = answers
    drafter = agreeing(target)
    found = [measured._drafted(target, drafter, text) for text in texts[:2]]
    for depth in range(3):
        tried, right = 0, [0] * 10
        for text, one in zip(texts, found, strict=False):
            tokens = text.ids[text.begin :]
            for p in range(len(tokens) - 1):
                at, node = -1, -1
                for level in range(depth + 1):
                    at = node
                    children = [
                        n for n in range(one.values.shape[1]) if one.depths[p, n] == level + 1 and one.parents[p, n] == at
                    ]
                    node = next((n for n in children if n == one.path[p, level]), None)
                    if node is None:
                        break
                if level < depth or p + depth + 1 >= len(tokens) or not children:
                    continue
                tried += 1
                if node is not None:
                    right[int(one.ranks[p, node])] += 1
        assert measured.ranks_of(found)[depth] == pytest.approx([r / max(tried, 1) for r in right])


def test_the_correction_never_falls_and_mends_what_is_overconfident():
    sure = [0.1, 0.3, 0.5, 0.7, 0.9]
    xs, ys = measured.isotonic(sure, [0.05, 0.2, 0.15, 0.4, 0.6], [10, 10, 10, 10, 10])
    assert xs == [0.0, *sure, 1.0] and ys == pytest.approx([0.0, 0.05, 0.175, 0.175, 0.4, 0.6, 0.6])
    known = TreeAcceptance({1: [[1.0] * len(NODES)]}, [[0.5]], xs, ys, (0.0, 0.0), 1)
    asked = torch.tensor([0.0, 0.1, 0.2, 0.8, 1.0, 1.1])
    assert known.worth(asked).tolist() == pytest.approx([0.0, 0.05, 0.1125, 0.5, 0.6, 0.6])


def test_acceptance_lies_beside_the_weights_it_was_measured_with(tmp_path, answers):
    (tmp_path / "model.safetensors").write_bytes(b"these")
    known = made_up()
    measured.write(tmp_path, known, sha256_of(tmp_path / "model.safetensors"))
    assert measured.read(tmp_path) == parse((tmp_path / measured.FILE).read_bytes(), measured.AcceptanceFile, "").acceptance
    assert measured.read(tmp_path).tau[4][2] == known.tau[4][2]
    (tmp_path / "model.safetensors").write_bytes(b"others")
    with pytest.raises(SpecBenchError, match="measured with other weights"):
        measured.read(tmp_path)
    (tmp_path / measured.FILE).unlink()
    with pytest.raises(SpecBenchError, match=r"until=acceptance"):
        measured.read(tmp_path)


def test_a_hybrids_trees_are_those_of_the_drafter_that_it_asks(monkeypatch):
    """They are fitted to its acceptance and to its cycles, as if it drafted alone; and it drafts from as many ids."""
    target, asked = tiny(), []
    monkeypatch.setattr(fitting.acceptance, "read", lambda folder: asked.append(folder.name) or made_up())
    monkeypatch.setattr(
        fitting.cost_model, "of", lambda target, drafter, model, header: asked.append((drafter, header)) or COSTS
    )
    drafter = make("hybrid", target, "tree=rate")
    drafter.base.weights = "somewhere"
    spec, alone = settled("hybrid", "drafter.vocabulary=20"), settled("eagle2", "drafter.vocabulary=20")
    found = fitting.fit(drafter, spec, target, "hybrid")
    (timed, header) = asked.pop()
    assert asked == ["somewhere"] and timed is drafter.base
    assert header["drafter"] == {k: v for k, v in alone.drafter.items() if k != "growth"}
    assert header["draft_dtype"] is None and header["forward"] == spec.model.forward and header["captured"] is False
    drafter.base.draft_dtype = torch.bfloat16
    fitting.fit(drafter, spec, target, "hybrid")
    assert asked.pop()[1] == header | {"draft_dtype": "bfloat16"}, "drafts in another precision have other costs"
    asked.pop()
    assert found["fitted"]["choice"] == drafter.base.growth.chosen["choice"]
    assert drafter.nodes == max(drafter.retrieval.nodes, drafter.base.nodes) and drafter.passes == drafter.base.passes
    assert configuration("hybrid").drafter.base.vocabulary is None
    assert fitting.fit(make("hybrid", target), spec, target, "hybrid") == {}, "a tree of a paper is not fitted"


def test_a_replay_takes_the_tree_of_timed_rows(tmp_path):
    """Whatever threads and precision its drafter has there; without them its own, and never that of another cell."""
    target, spec = tiny(), settled("eagle2", "tree=fitted", "replay=true", f"results={tmp_path}")
    drafter = make("eagle2", target, "tree=fitted")
    spec.own["drafter"].setdefault("name", "eagle2")

    def written(cell, verify, **more):
        header = settings("eagle2") | {"hardware": environment.hardware(target.device) | {"threads": 2}, **more}
        fitted = {"choice": {"depth": 1, "top_k": 1, "nodes": 2, "tau": 1.0, "speedup": 1.0}}
        fitted["costs"] = asdict(replace(COSTS, verify={1: verify, 2: verify}))
        header["arms"]["eagle2"] |= {"drafter": spec.drafter, "fitted": fitted}
        Block(cell, header).write(random_row(np.random.default_rng(0))[0])

    def found():
        costs = fitting._earlier_costs(drafter, spec, target, "eagle2")
        return None if costs is None else costs.verify[1]

    assert found() is None
    written(replace(spec, batch=2, replay=False).cell_folder, 9.0)
    assert found() is None
    written(spec.cell_folder, 3.0, replay=True)
    assert found() == 3.0
    written(replace(spec, replay=False).cell_folder, 1.0)
    assert found() == 1.0


def test_arms_that_need_no_timing_decode_first_where_others_do(monkeypatch):
    """Not those whose memory goes on from prompt to prompt; and nobody where all are ready, or where there is no clock."""

    def side(label, slow=False, state="none", replay=False, batch=1):
        made = SimpleNamespace(slow=slow, state=state)
        return SimpleNamespace(made=(made, None), spec=SimpleNamespace(replay=replay, batch=batch), label=label)

    monkeypatch.setattr(fitting, "takes_time", lambda drafter, *_: drafter.slow)
    ready, slow, ordered = side("a"), side("b", slow=True), side("c", state="run")
    assert study_runs.ready_early([ready, slow, ordered], None) == [ready]
    assert study_runs.ready_early([ready, ordered], None) == []
    assert study_runs.ready_early([ready, side("b", slow=True, replay=True)], None) == []
    assert study_runs.ready_early([ready, side("b", slow=True, batch=2)], None) == [], "one question is no batch"
