"""REST against a literal search of its texts; its datastore's cache and what it refuses."""

import json
import statistics
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from conftest import make, tiny
from decoding import PROMPT, generate, p_value_of_pairs, pairs_of, plain
from hypothesis import given, settings
from hypothesis import strategies as st
from tree_checks import check, paths_of

from drafters.rest import END, Datastore, Rest, most_frequent, suffix_order
from specbench.common.errors import SpecBenchError
from specbench.data import corpus_file
from specbench.data.corpus_file import PACKED, PACKED_PROVENANCE, Dialogue
from specbench.engine.batch import decode_together
from specbench.engine.decode import Limits
from specbench.engine.sampling import Sampler
from specbench.engine.verify import Lossless

settings.register_profile("here", deadline=None, max_examples=80)
settings.load_profile("here")

STOP, HIGH = 2, 65_536  # a stop token; where two bytes end
TEXTS = st.lists(st.lists(st.sampled_from([0, 1, STOP, HIGH, HIGH + 1, 128_255]), min_size=1, max_size=12), max_size=5)
TARGET = SimpleNamespace(device=torch.device("cpu"), stop_ids=(STOP,), fingerprint=lambda: "f" * 16)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "datastores"


def store_of(texts, sorted_by=64):
    tokens = torch.tensor([i for text in texts for i in (*text, END)] or [END], dtype=torch.int32)
    return Datastore(tokens, suffix_order(tokens, sorted_by))


def rest(texts, target=TARGET, **options):
    made = Rest("rest", **options)
    made.bind(target)
    made.store = store_of(texts)
    made.reset(99)
    return made


def tree_below(made, text):
    """The tree after a text, checked, and its paths as ids."""
    made.reset(99)
    made.observe(SimpleNamespace(tokens=torch.tensor(text[:-1], dtype=torch.long)), text[-1])
    tree = made.propose(text[-1], Sampler(), None)
    check(tree)
    assert tree.q is None and tree.passes == 0 and len(tree) <= made.nodes
    ids = tree.tokens.tolist()
    return tree, [[ids[n] for n in path[1:]] for path in paths_of(tree.parents.tolist())]


def places(texts, string):
    return [(n, i) for n, text in enumerate(texts) for i in range(len(text)) if text[i : i + len(string)] == list(string)]


def prefixes(paths):
    return {tuple(path[:i]) for path in paths for i in range(1, len(path) + 1)}


def counted(texts, text, context, length):
    """How often each sequence follows the longest end of a text that occurs, by a search."""
    for n in range(min(context, len(text)), 1, -1):
        if found := places(texts, text[-n:]):
            counts = Counter()
            for number, at in found:
                follows = texts[number][at + n : at + n + length]
                follows = follows[: follows.index(STOP)] if STOP in follows else follows
                counts.update(tuple(follows[:i]) for i in range(1, len(follows) + 1))
            return counts
    return Counter()


@given(texts=TEXTS, length=st.integers(1, 9))
def test_positions_are_sorted_by_what_begins_there(texts, length):
    tokens = [i for text in texts for i in (*text, END)] or [END]
    order = suffix_order(torch.tensor(tokens, dtype=torch.int32), length).tolist()
    assert sorted(order) == list(range(len(tokens)))
    begins = [tokens[i : i + length] for i in order]
    assert begins == sorted(begins)


@given(texts=TEXTS, text=st.lists(st.sampled_from([0, 1, HIGH, HIGH + 1]), max_size=5))
def test_occurrences_are_those_that_a_search_finds(texts, text):
    store = store_of(texts)
    starts = [sum(len(t) + 1 for t in texts[:n]) for n in range(len(texts))]
    for n in range(1, len(text) + 1):
        found = store.find(text[-n:])
        assert sorted(store.order[list(found)].tolist()) == [starts[k] + i for k, i in places(texts, text[-n:])]
    found, matched = store.longest(text)
    assert matched == max(n for n in range(len(text) + 1) if n == 0 or places(texts, text[-n:]))
    assert len(found) == (len(places(texts, text[-matched:])) if matched else 0)


@given(texts=TEXTS, nodes=st.integers(1, 8), length=st.integers(1, 4), context=st.integers(1, 4), data=st.data())
def test_the_most_frequent_continuations_are_drafted(texts, nodes, length, context, data):
    """The ids may need more than two bytes. Of equal counts any may be drafted, so that the counts are compared."""
    text = data.draw(st.lists(st.sampled_from([0, 1, HIGH, HIGH + 1]), min_size=1, max_size=6))
    if texts and data.draw(st.booleans()):
        text = [*text, *texts[0][:3]]
    made = rest(texts, nodes=nodes, length=length, context=context)
    counts = counted(texts, text, context, length)
    tree, paths = tree_below(made, text)
    drafted = prefixes(paths)
    assert drafted <= counts.keys() and len(tree) - 1 == len(drafted) == min(nodes, len(counts))
    assert sorted(counts[p] for p in drafted) == sorted(sorted(counts.values(), reverse=True)[:nodes])
    for path in drafted:  # better ranks have larger counts
        siblings = [p for p in drafted if p[:-1] == path[:-1]]
        node = next(n for n in range(1, len(tree)) if _ids(tree, n) == path)
        assert all(counts[p] >= counts[path] for p in siblings if tree.ranks[_node(tree, p)] < tree.ranks[node])


def _ids(tree, node):
    return (*_ids(tree, int(tree.parents[node])), int(tree.tokens[node])) if node else ()


def _node(tree, path):
    return next(n for n in range(1, len(tree)) if _ids(tree, n) == path)


def test_few_of_many_occurrences_are_spread_over_them():
    """Every second of 100 occurrences, as they are sorted: each continuation keeps its share."""
    texts = [[5, 6, 10 + i % 4] for i in range(100)]
    made = rest(texts, matches=50)
    found, matched = made.store.longest([5, 6])
    assert (len(found), matched) == (100, 2)
    assert tree_below(made, [5, 6])[1] == [[10], [12], [11], [13]]
    rows = made.store.following(found[::2], 2, 1)
    assert Counter(rows[:, 0].tolist()) == {10: 13, 11: 12, 12: 13, 13: 12}
    assert most_frequent(rows, [END], 2) == [[10], [12]]


def test_one_token_is_no_match_and_a_miss_drafts_nothing():
    made = rest([[5, 6, 7, 8]])
    for text in ([9, 6], [6], [50, 51], [7, 8]):  # the last one is the text's end
        tree, _ = tree_below(made, text)
        assert len(tree) == 1 and tree.tokens.tolist() == [text[-1]]
    assert tree_below(made, [1, 5, 6])[1] == [[7, 8]]


# The corpus --------------------------------------------------------------------------------------------------------------


def packed(folder, texts, validation=0, fingerprint="f" * 16, **changes):
    """A packed corpus of some dialogues."""
    header = {"corpus": "c" * 12, "settings": {"validation": validation}, "target_fingerprint": fingerprint}
    dialogues = [Dialogue(i, text, [(0, 1)]) for i, text in enumerate(texts)]
    corpus_file.pack(folder, dialogues, 1 << 17, header | changes)
    return str(folder)


def test_held_out_dialogues_are_not_in_the_datastore(tmp_path):
    made = Rest("rest", packed(tmp_path / "c", [[5, 6, 7], [5, 6, 8], [5, 6, 9]], validation=2))
    made.bind(TARGET)
    assert tree_below(made, [5, 6])[1] == [[9]]
    assert made.store.tokens.tolist() == [5, 6, 9, END]


def test_a_datastore_is_made_once_for_a_corpus_and_a_target(tmp_path, cache, monkeypatch):
    folder = packed(tmp_path / "c", [[5, 6, HIGH]])
    made = Rest("rest", folder)
    made.bind(TARGET)
    (file,) = cache.iterdir()
    assert "c" * 12 in file.name and TARGET.fingerprint() in file.name
    assert made.contents == {PACKED: json.loads((tmp_path / "c" / PACKED_PROVENANCE).read_text())["sha256"]}
    with monkeypatch.context() as patched:
        patched.setattr(corpus_file, "unpack", None)  # would fail
        again = Rest("rest", folder)
        again.bind(TARGET)
    assert tree_below(again, [5, 6])[1] == tree_below(made, [5, 6])[1] == [[HIGH]]
    Rest("rest", packed(tmp_path / "c", [[5, 6, 8]])).bind(TARGET)  # more text under the same settings
    Rest("rest", folder, context=40).bind(TARGET)  # longer strings must be sorted
    assert len(list(cache.iterdir())) == 3


def test_what_is_no_corpus_of_this_target_is_refused_in_one_line(tmp_path, cache):
    folder = tmp_path / "c"
    with pytest.raises(SpecBenchError, match=r"drafter=rest: no corpus at .*pack=LICENCE"):
        Rest("rest", str(folder)).bind(TARGET)
    packed(folder, [[5, 6, 7]], fingerprint="another")
    with pytest.raises(SpecBenchError, match=r"ids of another target \(another\).*choose another drafter\.corpus"):
        Rest("rest", str(folder)).bind(TARGET)
    packed(folder, [[5, 6, 7]])
    (folder / PACKED).write_bytes(b"cut off")
    with pytest.raises(SpecBenchError, match="SHA-256"):
        Rest("rest", str(folder)).bind(TARGET)
    assert not list(cache.iterdir()), "half a datastore was kept"
    packed(folder, [[5, 6, 7]])
    Rest("rest", str(folder)).bind(TARGET)
    (file,) = cache.iterdir()
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(SpecBenchError, match=rf"{file.name}.*remove it"):
        Rest("rest", str(folder)).bind(TARGET)


# In the loop -------------------------------------------------------------------------------------------------------------


def own_text(target):
    """What the target says to some prompts, with mistakes."""
    texts = [[*PROMPT, *plain(target, PROMPT, 60)], [7, *plain(target, [7], 60)]]
    return [*texts, *([i if n % 9 else (i + 1) % 60 for n, i in enumerate(text)] for text in texts)]


def test_greedy_answers_are_the_targets_and_drafts_are_accepted():
    target = tiny()
    made = rest(own_text(target), target)
    tokens, steps = generate(target, made)
    assert tokens == plain(target, PROMPT, 40)
    assert len(steps) < 12 and max(s.accepted for s in steps) == made.length


def test_sampled_answers_follow_the_target():
    """The second token is drafted in most runs: every other pair that may follow stands in the datastore."""
    target, sampler, prompt = tiny(), Sampler(1.0, top_k=3), [*PROMPT, 5]
    pairs = list(pairs_of(target, prompt, sampler))
    assert len(pairs) == 9
    p, drafted = p_value_of_pairs(target, rest([[5, *pair] for pair in pairs[::2]], target), prompt, sampler, 400)
    assert drafted > 200 and p > 1e-4


def test_several_sequences_share_one_datastore():
    target = tiny()
    made = rest(own_text(target), target)
    prompts = [PROMPT, [7], [9, 9]]
    rows = made.for_sequences(3, None)
    assert all(row.store is made.store for row in rows) and len({id(row.text) for row in rows}) == 3
    found = decode_together(target, made, prompts, Limits(20), Lossless(), Sampler(), [None] * 3).events
    for prompt, events in zip(prompts, found, strict=True):
        assert [events[0].token, *(t for e in events[1:] for t in e.tokens)] == plain(target, prompt, 20)


def test_a_lookup_takes_no_time():
    """Processor time of a cycle among 200,000 tokens, where 5,000 occurrences are retrieved: ms."""
    generator = torch.Generator().manual_seed(0)
    made = rest(torch.randint(0, 6, (1000, 200), generator=generator).tolist())
    made.context = 2
    milliseconds = []
    for _ in range(20):
        begin = time.process_time()
        made.read([3, 4])
        tree = made.propose(4, Sampler(), None)
        milliseconds.append(1e3 * (time.process_time() - begin))
        assert len(tree) == made.nodes
    assert statistics.median(milliseconds) < 10


def test_its_configuration_takes_the_shipped_corpus():
    made = make("rest", tiny())
    assert (made.nodes, made.length, made.context, made.matches) == (65, 10, 16, 5000)
    assert len(made.propose(3, Sampler(), None)) == 1, "an empty datastore drafts nothing"
