"""Losslessness at temperature > 0: exact enumeration of single nodes, chi-square of whole trees, planted bugs caught."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

import specbench.engine.verify as module
from specbench.common.errors import SpecBenchError
from specbench.engine import tree as trees
from specbench.engine.interface import DraftTree
from specbench.engine.policies import Chain, Dynamic, Static
from specbench.engine.sampling import Sampler, argmax, draw, draw_without_replacement, race, top
from specbench.engine.verify import Lossless, Simulated, Typical, algorithm_d, decide, verify
from specbench.engine.vocabulary import DraftVocabulary

V = 6
SAMPLED = Sampler(temperature=1.0)


class Tables:
    """A toy world: the target's p and the drafter's q after every prefix, as random tables. Also an `Expandable`."""

    listed: DraftVocabulary | None = None

    def __init__(self, seed: int, sharpness: float = 1.5):
        self.p_logits: dict[tuple[int, ...], torch.Tensor] = {}
        self.q_logits: dict[tuple[int, ...], torch.Tensor] = {}
        self.random = torch.Generator().manual_seed(seed)
        self.sharpness = sharpness

    def p(self, prefix):
        return self._get(self.p_logits, prefix)

    def q(self, prefix):
        return self._get(self.q_logits, prefix)

    def _get(self, table, prefix):
        if prefix not in table:
            table[prefix] = torch.randn(V, generator=self.random) * self.sharpness
        return table[prefix]

    # Expandable: rows remember their prefix
    def root_logits(self):
        self.rows = []
        return self.q(())

    def expand(self, tokens, parent_rows, depth, visible):
        assert visible.shape == (len(tokens), len(self.rows) + len(tokens))
        prefixes = [
            (self.rows[p] if p >= 0 else ()) + (t,) for t, p in zip(tokens.tolist(), parent_rows.tolist(), strict=True)
        ]
        start = len(self.rows)
        self.rows += prefixes
        for i, prefix in enumerate(prefixes):  # `visible` must show exactly the ancestors and self
            seen = {self.rows[j] for j in visible[i].nonzero()[:, 0].tolist()}
            assert seen == {prefix[: n + 1] for n in range(len(prefix))}, (prefix, seen)
            assert visible[i, start + i]
        return torch.stack([self.q(p) for p in prefixes])

    def target_logits(self, tree: DraftTree) -> torch.Tensor:
        ids, parents = tree.tokens.tolist(), tree.parents.tolist()
        prefixes = [()]
        for node in range(1, len(ids)):
            prefixes.append((*prefixes[parents[node]], ids[node]))
        return torch.stack([self.p(p) for p in prefixes])


class AllAtOnce(Lossless):
    """What a GPU does: all nodes are decided together."""

    def __call__(self, tree, logits, sampler, generator):
        return decide(tree, logits, sampler, generator)


RULES = {"cpu": Lossless(), "gpu": AllAtOnce()}
GROWTHS = {
    "chain": Chain(3),
    "chain-deterministic": Chain(3, candidates="top"),
    "static-sampled": Static([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]], candidates="sample"),
    "static-replacement": Static([[0], [1], [2], [0, 0], [0, 1], [1, 0]], candidates="sample_with_replacement"),
    "static-top": Static([[0], [1], [0, 0], [0, 1], [1, 0]], candidates="top"),
    "dynamic": Dynamic(depth=3, top_k=3, nodes=8),
}


def emitted(world, growth, sampler, runs, seed, length=3, rule=RULES["gpu"]):
    """The first `length` ids of many independent cycles, completed from p where a cycle was shorter. [runs, length]"""
    generator = torch.Generator().manual_seed(seed)
    out = np.empty((runs, length), dtype=int)
    for run in range(runs):
        tree = growth.grow(world, 0, sampler, generator)
        verified = verify(tree, world.target_logits(tree), rule, sampler, generator)
        ids = [*verified.tokens, verified.bonus][:length]
        while len(ids) < length:
            ids.append(int(draw(sampler.probabilities(world.p(tuple(ids))), generator)))
        out[run] = ids
    return out


def joint(world, sampler, length=3):
    """Exact probability of every sequence of `length` ids. [V ** length]"""
    probability = []
    for ids in itertools.product(range(V), repeat=length):
        value = 1.0
        for i, token in enumerate(ids):
            value *= float(sampler.probabilities(world.p(ids[:i]))[token])
        probability.append(value)
    return np.array(probability)


def p_value(samples, expected):
    """Chi-square over all sequences; rare ones share a bin."""
    index = np.ravel_multi_index(samples.T, (V,) * samples.shape[1])
    counts = np.bincount(index, minlength=len(expected)).astype(float)
    assert counts[expected == 0].sum() == 0, "an impossible sequence was emitted"
    rare = expected * len(samples) < 8
    f, e = np.append(counts[~rare], counts[rare].sum()), np.append(expected[~rare], expected[rare].sum())
    keep = e > 0
    return chisquare(f[keep], e[keep] / e[keep].sum() * f[keep].sum()).pvalue


RUNS = 2000  # with as many, each of the bugs that are planted below is caught
SAMPLERS = [SAMPLED, Sampler(0.7, top_p=0.9), Sampler(1.3, top_k=4)]
CASES = [("cpu", growth, sampler) for growth in GROWTHS for sampler in SAMPLERS]
# Both rules accept the same path (below), so of samplers one each is enough.
CASES += [("gpu", growth, SAMPLERS[number % len(SAMPLERS)]) for number, growth in enumerate(GROWTHS)]


@pytest.mark.parametrize(("rule", "growth", "sampler"), CASES, ids=str)
def test_trees_emit_the_targets_distribution(rule, growth, sampler):
    world = Tables(seed=3)
    samples = emitted(world, GROWTHS[growth], sampler, RUNS, seed=11, rule=RULES[rule])
    assert p_value(samples, joint(world, sampler)) > 1e-3


@pytest.mark.parametrize("growth", ["chain", "static-sampled", "dynamic"])
def test_p_values_look_uniform(growth):
    """Not merely above a threshold: twelve independent worlds, no pile of small p-values, no pile of large ones."""
    values = []
    for seed in range(12):
        world = Tables(seed)
        values.append(p_value(emitted(world, GROWTHS[growth], SAMPLED, 700, seed, 2), joint(world, SAMPLED, 2)))
    from scipy.stats import kstest

    assert kstest(values, "uniform").pvalue > 1e-3, values


def test_along_the_path_the_same_is_decided(monkeypatch):
    """With coins and draws that depend on the node's distribution alone, both ways accept the same path."""
    monkeypatch.setattr(module.torch, "rand", lambda n, device=None, generator=None: torch.full((n,), 0.4))
    monkeypatch.setattr(module, "draw", lambda p, generator: (p.cumsum(-1) > 0.6).long().argmax(-1))
    monkeypatch.setattr(module.Sampler, "choose", lambda self, x, g: module.draw(self.probabilities(x), g))
    lengths = set()
    for seed, growth in itertools.product(range(40), GROWTHS.values()):
        world, generator = Tables(seed), torch.Generator().manual_seed(seed)
        tree = growth.grow(world, 0, SAMPLED, generator)
        logits = world.target_logits(tree)
        once, along = (verify(tree, logits, rule, SAMPLED, generator) for rule in (AllAtOnce(), Lossless()))
        assert once == along
        lengths.add(len(once.path))
    assert lengths == {0, 1, 2, 3}


def single_node(p, q, replacement, order):
    """A root with children drawn as `order`; q's row is the root's."""
    n = 1 + len(order)
    tree = trees.build(
        torch.tensor([0, *order]),
        torch.tensor([-1] + [0] * len(order)),
        torch.tensor([0] + [1] * len(order)),
        torch.tensor([0, *range(len(order))]),
        max_depth=1,
        width=len(order),
    )
    tree.q, tree.replacement = q.expand(n, -1).clone(), replacement
    return tree


@pytest.mark.parametrize("replacement", [False, True])
def test_algorithm_s_single_node_is_exact(monkeypatch, replacement):
    """Enumerate every draw order with its probability, and integrate acceptance exactly: the emitted mass is p."""
    torch.manual_seed(0)
    v, k = 5, 3
    p = torch.rand(v, dtype=torch.float64).softmax(0)
    q = torch.randn(v, dtype=torch.float64).mul(2).softmax(0)
    total = torch.zeros(v, dtype=torch.float64)
    for order in itertools.product(range(v), repeat=k):
        if not replacement and len(set(order)) < k:
            continue
        weight, rest = 1.0, q.clone()
        for x in order:
            weight *= float(rest[x])
            if not replacement:
                rest[x] = 0
                rest = rest / rest.sum()
        total += weight * _emission(monkeypatch, p, q, replacement, order)
    torch.testing.assert_close(total, p, atol=1e-6, rtol=1e-5)


def _emission(monkeypatch, p, q, replacement, order):
    """Distribution of the emitted token given the draws, from the shipped code with its coins laid open.

    Child i is accepted with probability a_i, computed here by the definition. That the code agrees is shown by coins
    just above a_0 … a_{i-1} (all rejected) and just below a_i (accepted); the last residual is read off `draw`.
    """
    tree = single_node(p, q, replacement, order)
    chances = [_acceptance(p, q, replacement, order, i) for i in range(len(order))]
    mass, out = 1.0, torch.zeros_like(p)
    for accept_at in range(len(order) + 1):
        coins, seen = iter(range(len(order))), {}

        def rand(n, device=None, generator=None, coins=coins, accept_at=accept_at):
            i = next(coins)
            return torch.full((n,), chances[i] + (-1e-9 if i == accept_at else 1e-9), dtype=torch.float64)

        def read_residual(probabilities, generator, seen=seen):
            seen["p"] = probabilities[0].clone()
            return probabilities.argmax(-1)

        with monkeypatch.context() as m:
            m.setattr(module.torch, "rand", rand)
            m.setattr(module, "draw", read_residual)
            taken, _ = module.algorithm_s(tree, p.expand(len(tree), -1).clone(), None)
        if accept_at == len(order):
            return out + mass * seen["p"]
        chance = chances[accept_at]
        if mass > 1e-12 and chance > 0:
            assert taken[1:].tolist() == [i == accept_at for i in range(len(order))]
        out[order[accept_at]] += mass * chance
        mass *= 1 - chance
    raise AssertionError


def _acceptance(p, q, replacement, order, at):
    """min(1, p_i / q_i) for child `at` after the earlier ones were rejected, by the definition."""
    p, q = p.clone(), q.clone()
    for i in range(at + 1):
        x = order[i]
        if i == at:
            return float(min(1.0, p[x] / q[x])) if q[x] > 0 else 0.0
        left = (p - q).clamp(min=0)
        p = left / left.sum() if left.sum() > 0 else p
        if not replacement:
            q[x] = 0
            q = q / q.sum()
    raise AssertionError


def test_first_level_acceptance_is_the_overlap():
    """Algorithm D accepts with sum of p over the children; a sampled chain with sum of min(p, q)."""
    world, runs = Tables(seed=5), 6000
    p, q = SAMPLED.probabilities(world.p(())), SAMPLED.probabilities(world.q(()))
    for growth, expected in (
        (Static([[0], [1]]), float(p[q.topk(2).indices].sum())),
        (Chain(1), float(torch.minimum(p, q).sum())),
    ):
        generator = torch.Generator().manual_seed(2)
        hits = 0
        for _ in range(runs):
            tree = growth.grow(world, 0, SAMPLED, generator)
            verified = verify(tree, world.target_logits(tree), Lossless(), SAMPLED, generator)
            hits += len(verified.path) > 0
        assert abs(hits / runs - expected) < 4 * (expected * (1 - expected) / runs) ** 0.5


def _no_renormalisation(p, q):
    return (p - q).clamp(min=0) + 1e-9


def _parents_distribution(tree, q):
    q = q[tree.parents.clamp(min=0)]
    return algorithm_d(tree, q)


BUGS = {
    "residual without subtraction": ("_residual", lambda p, q: p, "chain"),
    "residual reversed": ("_residual", lambda p, q: (q - p).clamp(min=0) / (q - p).clamp(min=0).sum(-1, True), "chain"),
    "parent's distribution": ("algorithm_d", _parents_distribution, "dynamic"),
    "bonus by argmax": ("draw", lambda p, g: p.argmax(-1), "chain"),
    "raw bonus": ("draw", lambda p, g: draw(torch.full_like(p, 1 / V), g), "static-sampled"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_caught(monkeypatch, bug):
    name, wrong, growth = BUGS[bug]
    monkeypatch.setattr(module, name, wrong)
    world = Tables(seed=3)
    samples = emitted(world, GROWTHS[growth], SAMPLED, RUNS, seed=11, length=2)
    with np.errstate(all="ignore"):
        assert p_value(samples, joint(world, SAMPLED, 2)) < 1e-6


def test_q_at_another_temperature_is_caught():
    """The classic: candidates drawn at temperature 0.5 while q is kept at 1."""

    class Mismatched(Chain):
        def _choose(self, logits, count, sampled, sampler, generator):
            ids, _ = super()._choose(logits, count, sampled, Sampler(0.4), generator)
            return ids, sampler.probabilities(logits)

    world = Tables(seed=3)
    samples = emitted(world, Mismatched(3), SAMPLED, RUNS, 11, 2)
    assert p_value(samples, joint(world, SAMPLED, 2)) < 1e-6


def test_children_that_q_cannot_draw_are_no_candidates():
    """top-k 1 leaves one possible child; the other draws without replacement are fillers and never accepted."""
    world, sampler = Tables(seed=4), Sampler(1.0, top_k=1)
    generator = torch.Generator().manual_seed(0)
    growth = GROWTHS["static-sampled"]
    for _ in range(50):
        tree = growth.grow(world, 0, sampler, generator)
        verified = verify(tree, world.target_logits(tree), Lossless(), sampler, generator)
        assert [*verified.tokens, verified.bonus][0] == int(world.p(()).argmax())


def test_probabilities_match_transformers_processors():
    from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(20, 50) * 3
    ours = Sampler(0.7, top_p=0.8, top_k=20).probabilities(logits)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(0.7), TopKLogitsWarper(20), TopPLogitsWarper(0.8)])
    torch.testing.assert_close(ours, warpers(None, logits.clone()).softmax(-1))


@given(st.integers(1, 5), st.sampled_from([128, 256, 384, 200, 61]), st.integers(1, 3), st.integers(0, 10**6))
def test_two_stage_choices_are_torchs(rows, size, k, seed):
    """Coarse values make ties: argmax still returns the first, and top the same values as topk."""
    logits = torch.randint(-4, 4, (rows, size), generator=torch.Generator().manual_seed(seed)).float()
    assert torch.equal(argmax(logits), logits.argmax(-1))
    assert torch.equal(argmax(logits[0]), logits[0].argmax(-1))
    values, ids = top(logits, k)
    assert torch.equal(values, logits.topk(k, -1).values) and torch.equal(logits.gather(1, ids), values)
    assert all(len(set(row)) == k for row in ids.tolist())
    logits[0, size // 2] = float("nan")
    assert argmax(logits)[0] == size // 2 and torch.isnan(top(logits, k)[0][0, 0])


def _by_race(p, count, generator):
    return race(p, generator).topk(count).indices


@pytest.mark.parametrize("take", [draw_without_replacement, _by_race])
@pytest.mark.parametrize("size", [5, 256], ids=["whole", "by chunk"])
def test_draws_without_replacement_follow_sequential_draws(take, size):
    p, runs = torch.zeros(size), 20000
    at = torch.tensor([0, 1, size - 3, size - 2])  # of 256 ids, two in each chunk
    p[at] = torch.tensor([0.5, 0.3, 0.15, 0.05])
    ids = take(p.expand(runs, -1), 2, torch.Generator().manual_seed(0))
    place = {int(x): i for i, x in enumerate(at)}
    counts = np.bincount([place[a] * 4 + place[b] for a, b in ids.tolist()], minlength=16)
    p = p[at]
    expected = np.array([0 if a == b else p[a] * p[b] / (1 - p[a]) for a in range(4) for b in range(4)]) * runs
    keep = expected > 0
    assert counts[~keep].sum() == 0
    assert chisquare(counts[keep], expected[keep] / expected[keep].sum() * runs).pvalue > 1e-3
    every = take(p[:3].expand(50, -1), 3, None)
    assert sorted(map(sorted, every.tolist())) == [[0, 1, 2]] * 50
    certain = take(torch.tensor([0.0, 0.0, 1.0]).expand(50, -1), 3, None)
    assert (certain[:, 0] == 2).all() and all(sorted(row) == [0, 1, 2] for row in certain.tolist())


@pytest.mark.parametrize("size", [6, 640], ids=["whole", "by chunk"])
def test_draws_follow_the_weights(size):
    """Rows need not sum to 1; what has no weight is not drawn, not even beside weights of 1e-9."""
    runs, weights = 20000, torch.zeros(size)
    at = torch.tensor([1, 2, size // 2, size - 2])
    weights[at] = torch.tensor([2.0, 4.0, 1.0, 1e-9])
    rows = weights.expand(runs, -1)
    for found in (draw(rows, torch.Generator().manual_seed(1)), race(rows, None).argmax(-1)):
        counts = torch.bincount(found, minlength=size)
        assert counts[at].sum() == runs
        assert chisquare(counts[at[:3]].numpy(), np.array([2, 4, 1]) * counts[at[:3]].sum().item() / 7).pvalue > 1e-3
    assert draw(weights, None).shape == () and draw(weights.expand(2, 3, -1), None).shape == (2, 3)
    assert 0 <= int(draw(torch.full((size,), torch.nan), None)) < size


@st.composite
def marked_trees(draw):
    """Parents, tokens and marks of a tree in which some nodes may not be accepted; their tokens may be anything."""
    n = draw(st.integers(2, 12))
    parents = [-1, *(draw(st.integers(0, i - 1)) for i in range(1, n))]
    return (
        parents,
        draw(st.lists(st.integers(0, 3), min_size=n, max_size=n)),
        [True, *draw(st.lists(st.booleans(), min_size=n - 1, max_size=n - 1))],
    )


@pytest.mark.parametrize("rule", [Lossless(), Typical(), Simulated([0.9, 0.5])], ids=lambda r: type(r).__name__)
@pytest.mark.parametrize("sampler", [Sampler(), SAMPLED], ids=str)
@pytest.mark.parametrize("drawn", [False, True], ids=["deterministic", "drawn"])
@given(marked=marked_trees(), seed=st.integers(0, 9))
def test_nodes_that_are_not_acceptable_are_not_there_for_any_rule(rule, sampler, drawn, marked, seed):
    """The result is that on a tree built without them, down to the random numbers; what is below them goes as well."""
    parents, tokens, marks = marked
    n, random = len(parents), torch.Generator().manual_seed(seed)
    logits, q = torch.randn(n, V, generator=random), torch.rand(n, V, generator=random).softmax(-1)
    stays = [0]
    for node in range(1, n):
        if marks[node] and parents[node] in stays:
            stays.append(node)

    def tree(nodes):
        above = [stays.index(parents[i]) if nodes is stays and i else parents[i] for i in nodes]
        depths = trees.depths_of(above)
        ranks = [sum(p == parents[i] for p in parents[1:i]) for i in nodes]
        built = trees.build(*(torch.tensor(x) for x in ([tokens[i] for i in nodes], above, depths, ranks)), n, n)
        built.q = q[nodes] if drawn else None
        return built

    def verified(built, logits):
        again = Simulated(rule.alpha) if isinstance(rule, Simulated) else rule
        return verify(built, logits, again, sampler, torch.Generator().manual_seed(seed))

    expected = verified(tree(stays), logits[stays])
    whole = tree(list(range(n)))
    whole.acceptable = torch.tensor(marks)
    found = verified(whole, logits)
    assert found.path == [stays[i] for i in expected.path] and found.drafted == expected.drafted
    assert (found.tokens, found.ranks, found.bonus) == (expected.tokens, expected.ranks, expected.bonus)


def test_what_is_not_acceptable_must_still_be_finite():
    tree = trees.build(*(torch.tensor(x) for x in ([1, 2], [-1, 0], [0, 1], [0, 0])), max_depth=1, width=1)
    tree.acceptable = torch.tensor([True, False])
    logits = torch.zeros(2, V)
    assert verify(tree, logits, Lossless(), Sampler(), None).drafted == 0, "a depth that nobody could accept was counted"
    logits[1, 0] = torch.nan
    with pytest.raises(SpecBenchError, match="NaN"):
        verify(tree, logits, Lossless(), Sampler(), None)
