"""Properties of trees, growth and the cache, over random ones."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_verify import Tables
from tree_checks import check, paths_of

from specbench.common.errors import SpecBenchError
from specbench.engine import tree as trees
from specbench.engine.cache import KVCache
from specbench.engine.policies import AccuracyTree, Chain, Dynamic, Static
from specbench.engine.sampling import Sampler
from specbench.engine.tree import Trie, ancestor_mask, depths_of, parents_of_rank_paths

settings.register_profile("here", deadline=None, max_examples=60)
settings.load_profile("here")


@st.composite
def parent_arrays(draw, most=24):
    n = draw(st.integers(1, most))
    return [-1] + [draw(st.integers(0, i - 1)) for i in range(1, n)]


@given(parent_arrays())
def test_mask_is_the_ancestor_relation(parents):
    mask = ancestor_mask(torch.tensor(parents), max(depths_of(parents)))
    for node in range(len(parents)):
        ancestors, at = {node}, node
        while at:
            at = parents[at]
            ancestors.add(at)
        assert set(mask[node].nonzero()[:, 0].tolist()) == ancestors


@given(parent_arrays())
def test_every_node_lies_on_a_path_and_every_path_starts_at_the_root(parents):
    paths = paths_of(parents)
    assert {n for p in paths for n in p} == set(range(len(parents)))
    assert all(p[0] == 0 and all(parents[b] == a for a, b in itertools.pairwise(p)) for p in paths)


@given(depth=st.integers(1, 5), top_k=st.integers(1, 5), nodes=st.integers(2, 40), seed=st.integers(0, 50))
def test_dynamic_trees_hold_the_most_valuable_nodes(depth, top_k, nodes, seed):
    """Against brute force over everything that was seen: same value, closed, at most `nodes`."""
    world = Tables(seed)
    tree = Dynamic(depth, top_k, nodes).grow(world, 0, Sampler(), None)
    check(tree)
    ids, parents = tree.tokens.tolist(), tree.parents.tolist()
    prefixes = [()]
    for node in range(1, len(tree)):
        prefixes.append((*prefixes[parents[node]], ids[node]))

    def value(prefix):
        return sum(float(world.q(prefix[:i]).log_softmax(-1)[t]) for i, t in enumerate(prefix))

    seen = [(t,) for t in world.q(()).topk(top_k).indices.tolist()]
    seen += [(*row, t) for row in world.rows for t in world.q(row).topk(top_k).indices.tolist()]
    best = sorted((value(p) for p in seen), reverse=True)[: nodes - 1]
    assert sorted((value(p) for p in prefixes[1:]), reverse=True) == pytest.approx(best, abs=1e-4)


class Flat:
    """All children equally likely: every comparison is a tie."""

    listed = None

    def __init__(self, value):
        self.value = value

    def root_logits(self):
        return torch.full((6,), self.value)

    def expand(self, tokens, parent_rows, depth, visible):
        return torch.full((len(tokens), 6), self.value)


class Certain(Flat):
    """A point mass: log-probability 0 all the way down, so a child is worth exactly its parent."""

    def root_logits(self):
        return torch.tensor([200.0, 0, 0, 0, 0, 0])

    def expand(self, tokens, parent_rows, depth, visible):
        return self.root_logits().expand(len(tokens), -1)


@pytest.mark.parametrize("nodes", range(2, 30))
@pytest.mark.parametrize("drafter", [Flat(0.0), Certain(0.0)])
def test_dynamic_trees_are_ancestor_closed_under_ties(drafter, nodes):
    check(Dynamic(4, 3, nodes).grow(drafter, 0, Sampler(), None))


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=12))
def test_static_trees_have_the_asked_for_shape(paths):
    closed = sorted({tuple(p[:i]) for p in paths for i in range(1, len(p) + 1)})
    tree = Static(closed).grow(Tables(0), 0, Sampler(), None)
    check(tree)
    assert len(tree) == len(closed) + 1
    parents, ranks = tree.parents.tolist(), tree.ranks.tolist()
    found = {0: ()}
    for node in range(1, len(tree)):
        found[node] = (*found[parents[node]], ranks[node])
    assert sorted(found.values())[1:] == closed


@pytest.mark.parametrize("paths", [[[0, 0]], [[0], [0]], [[]], [[-1]]])
def test_malformed_static_trees_are_refused(paths):
    with pytest.raises(SpecBenchError, match=r"tree\.paths"):
        Static(paths)
    with pytest.raises(ValueError, match="rank path"):
        parents_of_rank_paths(paths)


def test_chain_is_a_chain():
    tree = Chain(4).grow(Tables(1), 5, Sampler(), None)
    assert tree.parents.tolist() == [-1, 0, 1, 2, 3]
    assert paths_of(tree.parents.tolist()) == [[0, 1, 2, 3, 4]]


@pytest.mark.parametrize("paths", [[[1]], [[0], [2]], [[0], [0, 1]]])
def test_draws_are_verified_in_their_order_so_none_may_be_left_out(paths):
    with pytest.raises(SpecBenchError, match=r"tree\.paths: .* without .*, which is drawn and verified before it"):
        Static(paths, "sample")
    for candidates in ("top", "sample_with_replacement"):
        assert Static(paths, candidates).nodes == 1 + len(paths)


def test_of_paths_that_were_measured_elsewhere_as_many_are_taken_as_there_are_nodes():
    paths = [[0], [1], [2], [0, 0], [1, 0], [0, 0, 0]]
    assert AccuracyTree(7, 3, unmeasured=paths).nodes == 7
    fewer = AccuracyTree(4, 3, unmeasured=paths)
    assert fewer.nodes == 4 and fewer.parents == [-1, 0, 0, 1]


def test_shipped_eagle1_tree_is_the_papers():
    from conftest import configuration

    paths = configuration("eagle1").tree.paths
    assert [sum(len(p) == level for p in paths) for level in range(1, 6)] == [4, 8, 8, 3, 2]


@st.composite
def passes(draw):
    """A script of passes: how many rows each appends and which of them stay."""
    script = []
    for _ in range(draw(st.integers(1, 6))):
        n = draw(st.integers(1, 6))
        kept = sorted(draw(st.sets(st.integers(0, n - 1), max_size=n)))
        script.append((n, kept))
    return script


@given(passes(), st.integers(1, 3))
def test_cache_keeps_exactly_the_chosen_rows(script, layers):
    """Against a list of rows."""
    cache, model, count = KVCache(layers, 64), [], 0
    for n, kept in script:
        new = torch.arange(count, count + n).float()
        count += n
        for layer in range(layers):
            key = (new + 1000 * layer)[None, None, :, None].expand(1, 2, n, 4)
            keys, values = cache.layers[layer].update(key, -key)
            assert keys[0, 0, :, 0].tolist() == [x + 1000 * layer for x in model + new.tolist()]
            assert torch.equal(values, -keys)
        cache.keep(torch.tensor(kept, dtype=torch.long))
        model += [float(new[k]) for k in kept]
        assert cache.length == len(model) == cache.get_seq_length()
        for layer in range(layers):
            assert cache.rows(layer, 0, cache.length)[0][1, :, 3].tolist() == [x + 1000 * layer for x in model]


def test_cache_refuses_more_rows_than_it_has():
    cache = KVCache(1, 3)
    with pytest.raises(SpecBenchError, match="3 rows"):
        cache.layers[0].update(torch.zeros(1, 1, 4, 2), torch.zeros(1, 1, 4, 2))


def test_root_only_is_the_baselines_tree():
    tree = trees.root_only(17)
    check(tree)
    assert len(tree) == 1 and tree.tokens.tolist() == [17]


SEQUENCES = st.lists(st.lists(st.integers(0, 3), max_size=5), max_size=8)


@given(SEQUENCES, st.integers(1, 12))
def test_a_trie_holds_the_first_sequences_merged(sequences, nodes):
    """Against a literal set of prefixes: one node for each of the first ones, in the order in which they come."""
    trie = Trie(70_000, nodes)
    for sequence in sequences:
        trie.add(sequence)
    tree = trie.tree(torch.device("cpu"))
    check(tree)
    wanted = []
    for sequence in sequences:
        for end in range(1, len(sequence) + 1):
            if sequence[:end] not in wanted:
                if len(wanted) == nodes - 1:
                    break
                wanted.append(sequence[:end])
    prefixes = [[]]
    for node in range(1, len(tree)):
        prefixes.append([*prefixes[int(tree.parents[node])], int(tree.tokens[node])])
    assert prefixes[1:] == wanted
    assert tree.tokens[0] == 70_000 and tree.acceptable is None
    for node in range(1, len(tree)):
        earlier = [n for n in range(1, node) if tree.parents[n] == tree.parents[node]]
        assert tree.ranks[node] == len(earlier)


def test_a_node_that_is_only_computed_may_repeat_a_siblings_token():
    trie = Trie(1, 9)
    trie.add([5, 6])
    assert trie.append(0, 5, acceptable=False) == 3
    trie.add([5, 7])
    tree = trie.tree(torch.device("cpu"))
    check(tree)
    assert tree.acceptable.tolist() == [True, True, True, False, True]
    assert tree.parents.tolist() == [-1, 0, 1, 0, 1] and tree.ranks.tolist() == [0, 0, 0, 1, 1]
