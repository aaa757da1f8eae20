"""backend=graphs on a CPU, where the same functions run unrecorded on the same buffers: they say what eager passes do.

What CUDA makes of them is in `test_gpu`.
"""

import re
from types import SimpleNamespace

import pytest
import torch
from conftest import DRAFTERS, make, settled, tiny

from specbench.common.errors import SpecBenchError
from specbench.engine import cache as caches
from specbench.engine.backends.cuda_graphs import WARM_UP, Captured, Graphs
from specbench.engine.captured import WIDTHS, width_of
from specbench.engine.causal_lm import CausalLM
from specbench.engine.decode import Limits, Prefill, decode
from specbench.engine.interface import Taps
from specbench.engine.sampling import Sampler
from specbench.engine.tree import build
from specbench.engine.verify import Lossless
from specbench.evaluation import arms

PROMPTS = ([3, 4, 5], [7] * 21, [9, 8])
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    """Capacities of 16, 32, 64, … rows: every answer here outgrows several."""
    monkeypatch.setattr(caches, "BUCKET", 16)


def ids(target, drafter, sampler=None, prompts=PROMPTS):
    found = []
    for prompt in prompts:
        found.append([])
        generator = None if sampler is None else torch.Generator().manual_seed(5)
        for event in decode(target, drafter, prompt, Limits(24), Lossless(), sampler or Sampler(), generator):
            found[-1] += [event.token] if isinstance(event, Prefill) else event.tokens
    return found


def capturing(architecture="llama", fused=False):
    target = tiny(architecture)
    if not fused:
        target.fused = None
    target.capture()
    return target


GROWN = ["beagle", "clover2", "coral", "eagle1", "eagle2", "eagle3", "hass", "hydra", "mtp", "vanilla"]  # in fixed shapes


def whole(drafter, target, *overrides):
    """A drafter as a run with captured passes has it."""
    made = make(drafter, target, *overrides)
    if target.captures:
        made.capture(target)
    made.optimize_for_inference()
    return made


DEEP = [0] + [0] * 50 + [0, *range(51, 120)]  # fifty children of the root, then a chain of seventy


@pytest.mark.parametrize(("parents", "path"), [([0, 0, 0, 2, 2], [0, 2, 4]), (DEEP, [0, *range(51, 121)])])
def test_recording_which_runs_a_function_several_times_moves_no_row_twice(parents, path, monkeypatch):
    """As on CUDA, where a function is recorded at its first call."""
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)

    def prepare(self, *inputs):
        self._fill(*inputs)
        if self.outputs is None:
            for _ in range(WARM_UP):
                self.function(*self.buffers)
            self._run()

    monkeypatch.setattr(Captured, "prepare", prepare)
    kept = []
    for target in (tiny(), capturing()):
        target.reset(256)
        target.prefill(torch.tensor(PROMPTS[0]))
        tokens = 4 + torch.arange(len(parents)) % 9
        ranks = torch.zeros(len(parents), dtype=torch.long)
        tree = build(tokens, torch.tensor(parents), torch.tensor(depths), ranks, max(depths), len(parents))
        target.forward(tree)
        target.keep(torch.tensor(path))
        rows = len(PROMPTS[0]) + len(path)
        kept.append(torch.cat([part for layer in range(target.layers) for part in target.cache.rows(layer, 0, rows)]))
    torch.testing.assert_close(*kept)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_captured_passes_give_the_ids_of_eager_ones(drafter):
    eager, captured = tiny(), capturing()
    made = whole(drafter, captured)
    assert ids(captured, made) == ids(eager, make(drafter, eager))
    growth = getattr(made, "captured", None)
    assert (growth is not None and bool(growth.graphs.captured)) == (
        re.sub("[-_](chain|small|token|unshifted|feature)", "", drafter) in GROWN
    )
    passes = [key for key in captured.captured.graphs.captured if key[0] == "forward"]
    assert {key[1] for key in passes} <= {*WIDTHS, *range(64, 1024, 16)}, "widths"


@pytest.mark.parametrize(("drafter", "capacities"), [("none", {16, 32, 64}), ("vanilla", {16, 32, 64}), ("eagle2", {128})])
def test_an_answer_outgrows_its_capacity(drafter, capacities, monkeypatch):
    eager, captured, seen = tiny(), capturing(), set()
    original = CausalLM.score

    def noted(self, tokens, positions, mask, cache, last_only=False):
        if isinstance(cache, caches.FixedRows):
            seen.add(mask.shape[-1])
        return original(self, tokens, positions, mask, cache, last_only)

    expected, made = ids(eager, make(drafter, eager)), make(drafter, captured)
    monkeypatch.setattr(CausalLM, "score", noted)
    assert ids(captured, made) == expected and capacities <= seen


@pytest.mark.parametrize("architecture", ["qwen2", "mistral", "gemma3"])
@pytest.mark.parametrize("drafter", ["none", "eagle2", "moa"])
def test_other_architectures(architecture, drafter):
    eager, captured = tiny(architecture), capturing(architecture)
    assert ids(captured, whole(drafter, captured)) == ids(eager, make(drafter, eager))


@pytest.mark.parametrize("drafter", ["none", "vanilla", "eagle2", "eagle3", "lookahead"])
def test_the_fused_forward_is_captured(drafter):
    eager, captured = tiny(), capturing(fused=True)
    assert ids(captured, whole(drafter, captured)) == ids(eager, make(drafter, eager))


@pytest.mark.parametrize("drafter", ["vanilla", "eagle1", "eagle2"])
def test_samples_are_those_of_eager_passes(drafter):
    eager, captured = tiny(), capturing()
    made = whole(drafter, captured)
    assert ids(captured, made, Sampler(0.9)) == ids(eager, make(drafter, eager), Sampler(0.9))
    assert bool(made.captured.graphs.captured) == (drafter == "eagle2"), "a sampled tree draws random numbers"


@pytest.mark.parametrize("tree", ["static", "chain", "dynamic", "lone"])
@pytest.mark.parametrize("drafter", ["eagle2", "beagle", "vanilla", "hydra"])
def test_trees_grown_in_fixed_shapes_are_the_same_node_by_node(drafter, tree, monkeypatch):
    policies = {
        "static": ["tree=eagle1" if drafter != "hydra" else "tree=medusa"],
        "chain": ["tree=chain", "tree.gamma=4"],
        "dynamic": ["tree=eagle2", "tree.depth=4", "tree.top_k=3", "tree.nodes=9"],
        "lone": ["tree=eagle2", "tree.depth=1", "tree.top_k=3", "tree.nodes=3"],
    }
    seen = {}
    for captured in (False, True):
        target = capturing() if captured else tiny()
        made = whole(drafter, target, *policies[tree])
        torch.manual_seed(2)
        for block in getattr(made, "blocks", ()):  # of Hydra; as they begin all nodes of a level draft alike: ties
            torch.nn.init.normal_(block[0].weight, 0, 0.2)
        propose, trees = made.propose, []

        def noted(*arguments, propose=propose, trees=trees):
            found = propose(*arguments)
            parts = found.tokens, found.parents, found.depths, found.ranks, found.ancestors
            trees.append([x.clone() for x in parts] + [found.passes, found.max_depth, found.width])
            if found.confidence is not None:
                trees[-1].append(found.confidence().clone())
            return found

        made.propose = noted
        ids(target, made)
        seen[captured] = trees
    assert len(seen[True]) == len(seen[False]) > 5
    for mine, theirs in zip(seen[True], seen[False], strict=True):
        torch.testing.assert_close(mine[:8], theirs[:8], atol=0, rtol=0)
        torch.testing.assert_close(mine[8:], theirs[8:], atol=1e-5, rtol=1e-5)


def test_trees_are_captured_once_for_all_capacities_and_prompts():
    target = capturing()
    made = whole("eagle2", target)
    ids(target, made, prompts=PROMPTS[:1])
    first = dict(made.captured.graphs.captured)
    assert len(first) > 2 and max(size for _, size in first) == made.cache.layer(0)[0].shape[-2]
    ids(target, made)
    assert dict(made.captured.graphs.captured) == first
    with target.eagerly():
        assert not made.captured.serves(made, Sampler())


@pytest.mark.parametrize("drafter", ["eagle2", "beagle", "vanilla"])
def test_after_a_long_prompt_shorter_and_longer_texts_capture_nothing(drafter):
    """As a run's warm-up has it. A drafter's own storage would grow with longer answers, and its graphs be made anew."""
    target = capturing()
    made = whole(drafter, target)
    ids(target, made, prompts=[[7, 5, 9] * 20])
    captured = [dict(graphs.captured) for graphs in (target.captured.graphs, made.captured.graphs)]
    for prompt in ([3, 4, 5], [8, 6] * 50):
        ids(target, made, prompts=[prompt])
    assert captured == [dict(graphs.captured) for graphs in (target.captured.graphs, made.captured.graphs)]


def random_tree(nodes, seed):
    draw = torch.Generator().manual_seed(seed)
    parents = torch.tensor([-1, *(int(torch.randint(n, (), generator=draw)) for n in range(1, nodes))])
    depths = [0]
    for parent in parents[1:].tolist():
        depths.append(depths[parent] + 1)
    tokens = torch.randint(61, (nodes,), generator=draw)
    return build(tokens, parents, torch.tensor(depths), torch.zeros(nodes, dtype=torch.long), max(depths), nodes)


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
@torch.inference_mode()
def test_states_and_cache_are_those_of_eager_passes(architecture):
    """Trees of every width, each followed by the next on the same rows, a path of which is kept."""
    pair = tiny(architecture), capturing(architecture)
    for target in pair:
        target.reset(200, Taps(hidden=(0, 2), kv=(1,)))
        target.prefill(torch.arange(5))
    for nodes in (1, 3, 2, 7, 33, 5, 4, 17, 64, 66, 1):
        tree = random_tree(nodes, nodes)
        path = tree.ancestors[int(tree.depths.argmax())].nonzero()[:, 0]
        eager, captured = (target.forward(tree) for target in pair)
        for mine, theirs in ((captured.last, eager.last), (captured.logits, eager.logits)):
            torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)  # the logits' standard deviation is 2.3
        torch.testing.assert_close(dict(captured.hidden), dict(eager.hidden), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(dict(captured.kv), dict(eager.kv), atol=1e-4, rtol=1e-4)
        assert torch.equal(captured.positions, eager.positions)
        for target in pair:
            target.keep(path)
        length = pair[0].cache.length
        assert length == pair[1].cache.length and not pair[1].cache.pending
        for layer in range(pair[0].layers):
            torch.testing.assert_close(*(t.cache.rows(layer, 0, length) for t in pair), atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_padding_sees_itself_alone_and_is_seen_by_nobody(monkeypatch):
    target, seen = capturing(), []
    original = target.read

    def noted(tokens, positions, mask, rows, last_only=False):
        seen.append((tokens, positions, mask))
        return original(tokens, positions, mask, rows, last_only)

    target.reset(64)
    target.prefill(torch.arange(5))
    monkeypatch.setattr(target, "read", noted)
    for nodes in (7, 5):  # the second has the first one's values in its padding, unless they are taken out
        target.forward(random_tree(nodes, 1))
        tokens, positions, mask = seen[-1]
        assert tokens.shape == (1, 8) and mask.shape == (1, 1, 8, 16) and not tokens[0, nodes:].any()
        assert torch.equal(positions[0, nodes:], torch.full((8 - nodes,), 5))
        assert torch.equal(mask[0, 0, nodes:], torch.arange(16) == torch.arange(5 + nodes, 13)[:, None])
        assert mask[0, 0, :nodes, :5].all() and not mask[0, 0, :nodes, 5 + nodes :].any()


@pytest.mark.parametrize(("nodes", "width"), [(1, 1), (2, 2), (3, 4), (33, 48), (60, 64), (64, 64), (65, 80), (81, 96)])
def test_widths(nodes, width):
    assert width_of(nodes) == width


def test_capacities(monkeypatch):
    assert [caches.bucket(rows) for rows in (1, 16, 17, 32, 33, 100)] == [16, 16, 32, 32, 64, 128]
    monkeypatch.setattr(caches, "BUCKET", 512)
    assert [caches.bucket(rows) for rows in (1, 512, 513, 1025, 2049)] == [512, 512, 1024, 2048, 4096]


def test_passes_are_captured_anew_only_where_the_cache_moves():
    target = capturing()
    drafter = make("eagle2", target)
    ids(target, drafter)
    captured, storage = dict(target.captured.graphs.captured), target.cache.layer(0)[0].data_ptr()
    ids(target, drafter)
    assert dict(target.captured.graphs.captured) == captured and target.cache.layer(0)[0].data_ptr() == storage
    target.cache.storage = {}
    expected = ids(tiny(), make("eagle2", tiny()))
    assert ids(target, drafter) == expected and not set(captured.values()) & set(target.captured.graphs.captured.values())


def test_a_full_cache_is_said():
    target = tiny(max_position_embeddings=8)
    target.capture()
    with torch.inference_mode():
        target.reset(8)
        target.prefill(torch.arange(8))
        for _ in range(target.cache.capacity - 8):
            target.forward(random_tree(1, 0))
            target.keep(torch.tensor([0]))
        with pytest.raises(SpecBenchError, match="the cache holds"):
            target.forward(random_tree(1, 0))


def test_buffers_are_refilled_and_outputs_reused():
    calls = []

    def double(x, y):
        calls.append((x.clone(), y.clone()))
        return x * 2, y + 1

    graphs = Graphs(CPU)
    one = graphs.get("double", double, lambda: (torch.full((3,), -1.0), torch.eye(2)))
    assert graphs.get("double", double, lambda: 1 / 0) is one
    first, _ = one(torch.tensor([1.0, 2.0]), torch.zeros(1, 2))
    assert first.tolist() == [2, 4, -2] and calls[-1][1].tolist() == [[0, 0], [0, 1]]
    second, _ = one(torch.tensor([5.0]), torch.zeros(2, 2))
    assert second is first and first.tolist() == [10, -2, -2] and not calls[-1][1].any()
    graphs.clear()
    assert graphs.get("double", double, lambda: (torch.zeros(1),)) is not one


@pytest.mark.parametrize(
    "option", ["link=lan", "batch=2", "model.device_map=auto", "model.quantised=int8"], ids=lambda o: o.split("=")[0]
)
def test_what_cannot_be_captured_is_refused_or_eager(option, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert settled("none", option).backend == "eager"
    with pytest.raises(SpecBenchError, match=f"backend=graphs cannot be combined with {option}; "):
        settled("none", option, "backend=graphs")


def test_graphs_are_the_default_on_cuda_alone(monkeypatch):
    assert settled("none", "model.device=cpu").backend == "eager"
    for available, backend in ((True, "graphs"), (False, "eager")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        assert settled("none").backend == settled("none").shared["backend"] == backend
        assert settled("none", "model.device=cpu").backend == "eager"
    assert settled("none", "model.device=cpu", "backend=graphs").backend == "graphs"


def test_a_run_with_captured_passes(home):
    """As a run loads and builds them: with the forward that can be captured."""
    files = [f"model.path={home / 'model'}", "model.name=tiny", "model.wheel=null", f"data.root={home}", "model.device=cpu"]
    sizes = ["data.limit=2", "decode.max_new_tokens=8", "memory=0", "threads=1", "backend=graphs", "dataset=mtbench"]
    spec = settled("suffix", *files, *sizes, "model.dtype=float32")
    target, _ = arms.load(spec)
    assert target.captures and target.kernels == "fused"
    assert ids(target, arms.build(spec, target).bound.drafter) == ids(tiny(), make("none", tiny()))
    with target.eagerly():
        assert not target.captures
    assert target.captures


def test_a_target_over_several_devices_is_refused(monkeypatch):
    target = tiny()
    monkeypatch.setattr(target, "new_cache", lambda _: SimpleNamespace(stored={CPU: 1, torch.device("meta"): 2}))
    with pytest.raises(SpecBenchError, match="backend=graphs needs the whole target on one device; use backend=eager"):
        target.capture()


@pytest.mark.parametrize(("drafter", "widths"), [("none", {1}), ("eagle2", set(WIDTHS)), ("vanilla", {1, 2, 4, 8})])
def test_narrower_passes_and_other_capacities_are_captured_with_the_first(drafter, widths):
    """The warm-up's first cycle captures what later ones use."""
    target = capturing()
    events = decode(target, make(drafter, target), [3, 4, 5], Limits(24), Lossless(), Sampler())
    next(events), next(events)
    first = {key for key in target.captured.graphs.captured if key[0] == "forward"}
    assert {key[1] for key in first} == widths and max(key[2] for key in first) == target.cache.capacity
    for _ in events:
        pass
    assert {key for key in target.captured.graphs.captured if key[0] == "forward"} == first
