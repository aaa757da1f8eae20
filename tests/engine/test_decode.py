"""The loop: greedy identity, exact ends, oracles, and caches that equal a fresh prefill."""

from collections import Counter

import pytest
import torch
from conftest import ARCHITECTURES, DRAFTERS, DRAFTING, TRAINED, make, tiny
from decoding import GREEDY, PROMPT, generate, plain
from scipy.stats import chi2
from tree_checks import check

from specbench.common.errors import SpecBenchError
from specbench.engine.decode import Limits, Prefill, decode
from specbench.engine.drafter import Drafter
from specbench.engine.interface import Taps
from specbench.engine.policies import Dynamic
from specbench.engine.replay import ReplayTarget
from specbench.engine.sampling import Sampler
from specbench.engine.tree import root_only
from specbench.engine.verify import Lossless, Typical
from specbench.records import metrics
from specbench.records.rows import Row


class Oracle(Drafter):
    """Proposes the greedy continuation as a chain of `depth`, with a wrong sibling beside every right node."""

    nodes, passes = 9, 4

    def __init__(self, truth, depth=4, wrong_after=None):
        super().__init__("oracle")
        self.truth, self.depth, self.wrong_after = truth, depth, wrong_after

    def reset(self, capacity):
        self.at = 0

    def observe(self, states, bonus):
        self.at += len(states.tokens) if self.at else 1
        assert bonus == self.truth[self.at - 1]

    def propose(self, root, sampler, generator):
        from specbench.engine.tree import build

        tokens, parents, depths, ranks, above = [root], [-1], [0], [0], 0
        for depth in range(1, self.depth + 1):
            right = (self.truth + [0] * 9)[self.at + depth - 1]
            if self.wrong_after is not None and depth > self.wrong_after:
                right = (right + 2) % 60
            tokens += [(right + 1) % 60, right]
            parents += [above, above]
            depths += [depth, depth]
            ranks += [0, 1]
            above = len(tokens) - 1
        return build(*(torch.tensor(x) for x in (tokens, parents, depths, ranks)), max_depth=self.depth, width=2)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_baseline_equals_the_unwrapped_model(architecture):
    target = tiny(architecture)
    assert generate(target, make("none", target), cap=30)[0] == plain(target, PROMPT, 30)


@pytest.mark.parametrize("drafter", DRAFTING)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_output_is_identical(drafter, architecture):
    target = tiny(architecture)
    expected = plain(target, PROMPT, 40)
    tokens, steps = generate(target, make(drafter, target))
    assert tokens == expected
    assert sum(s.accepted + 1 for s in steps) == len(tokens) - 1


@pytest.mark.parametrize("depth", [1, 4])
def test_oracle_reaches_depth_plus_one(depth):
    target = tiny()
    truth = plain(target, PROMPT, 80)
    tokens, steps = generate(target, Oracle(truth, depth), cap=1 + 8 * (depth + 1))
    assert tokens == truth[: len(tokens)]
    assert [s.accepted for s in steps] == [depth] * 8
    assert steps[0].ranks == [1] * depth


@pytest.mark.parametrize("wrong_after", [0, 1, 3])
def test_oracle_gone_wrong_is_accepted_up_to_there(wrong_after):
    target = tiny()
    truth = plain(target, PROMPT, 80)
    tokens, steps = generate(target, Oracle(truth, 4, wrong_after), cap=25)
    assert tokens == truth[:25]
    assert {s.accepted for s in steps[:-1]} == {wrong_after}


@pytest.mark.parametrize("cap", range(1, 13))
def test_cap_ends_at_the_exact_token_also_inside_a_path(cap):
    target = tiny()
    truth = plain(target, PROMPT, 40)
    tokens, steps = generate(target, Oracle(truth), cap=cap)
    assert tokens == truth[:cap]
    assert sum(s.accepted + 1 for s in steps) == cap - 1
    assert all(s.drafted >= s.accepted for s in steps)


@pytest.mark.parametrize("at", range(8))
def test_stop_token_ends_inside_a_path_and_is_emitted(at):
    target = tiny()
    truth = plain(target, PROMPT, 40)
    stop = truth[at]
    first = truth.index(stop)
    tokens, _ = generate(target, Oracle(truth), stop=(59, stop))
    assert tokens == truth[: first + 1]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_one_token_prompt_and_full_context(drafter):
    target = tiny()
    target.max_context = 40
    made = make(drafter, target)
    tokens, _ = generate(target, made, prompt=[7], cap=1000)
    assert tokens == plain(target, [7], 39)
    with pytest.raises(SpecBenchError, match="40"):
        generate(target, made, prompt=[1] * 40)
    with pytest.raises(SpecBenchError, match="empty"):
        generate(target, made, prompt=[])


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_target_cache_equals_a_fresh_prefill_after_every_cycle(drafter):
    target = tiny()
    made = make(drafter, target)
    emitted = []
    for event in decode(target, made, PROMPT, Limits(24), Lossless(), GREEDY):
        emitted += [event.token] if isinstance(event, Prefill) else event.tokens
        # everything but the last emitted token, the next root, is in the cache
        known = (PROMPT + emitted)[: target.cache.length]
        assert len(known) == len(PROMPT + emitted) - 1 or len(emitted) == 24
        fresh = tiny()
        fresh.reset(80)
        fresh.prefill(torch.tensor(known))
        for layer in range(target.layers):
            for ours, theirs in zip(
                target.cache.rows(layer, 0, len(known)), fresh.cache.rows(layer, 0, len(known)), strict=True
            ):
                torch.testing.assert_close(ours, theirs, atol=5e-5, rtol=5e-4)


class Watcher(Oracle):
    """An oracle that taps every layer and keeps a copy of what it is shown."""

    taps = Taps(kv=(0, 1, 2))

    def reset(self, capacity):
        super().reset(capacity)
        self.seen = []

    def observe(self, states, bonus):
        super().observe(states, bonus)
        keys, values = (torch.stack([states.kv[layer][i] for layer in self.taps.kv]) for i in (0, 1))  # [L, H, N, Dh]
        self.seen.append((keys, values, states.last))


@pytest.mark.parametrize("captured", [False, True])
def test_observed_states_are_those_of_a_fresh_prefill(captured):
    """The right nodes are 2, 4, 6 and 8, and keeping them moves their rows to 1 … 4: 2 and 4 are overwritten."""
    target, fresh = tiny(), tiny()
    watcher = Watcher(plain(target, PROMPT, 80))
    if captured:
        target.capture()
    tokens, steps = generate(target, watcher, cap=26)
    assert [s.accepted for s in steps] == [4] * 5
    known = torch.tensor(PROMPT + tokens)[: -len(steps[-1].tokens) - 1]  # what the last cycle emits is not observed
    with torch.inference_mode():
        fresh.reset(len(known), watcher.taps)
        once = Watcher(plain(target, known.tolist(), 1))
        once.reset(0)
        once.observe(fresh.prefill(known), once.truth[0])
    for parts, expected in zip(zip(*watcher.seen, strict=True), once.seen[0], strict=True):
        torch.testing.assert_close(torch.cat(parts, -2), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("drafter", DRAFTING)
def test_same_seed_same_tokens(drafter):
    target = tiny()
    made = make(drafter, target)
    runs = [generate(target, made, sampler=Sampler(0.9), seed=s)[0] for s in (5, 5, 6)]
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize("drafter", DRAFTING)
def test_sampled_output_follows_the_target(drafter):
    """Continuations of three tokens against the exact product of the target's conditionals, by chi-square."""
    target, sampler, runs = tiny(), Sampler(1.0, top_k=3), 300
    made = make(drafter, target)
    if isinstance(getattr(made, "growth", None), Dynamic):  # three tokens end above its deeper levels
        made.growth = Dynamic(2, made.growth.top_k, made.growth.nodes)
    expected = {(): 1.0}
    with torch.inference_mode():
        for _ in range(3):
            longer = {}
            for path, probability in expected.items():
                p = sampler.probabilities(target.model(torch.tensor([[*PROMPT, *path]])).logits[0, -1])
                longer |= {(*path, int(t)): probability * float(p[t]) for t in p.nonzero()[:, 0]}
            expected = longer
    assert len(expected) == 27 and sum(expected.values()) == pytest.approx(1)
    found = Counter(tuple(generate(target, made, cap=3, sampler=sampler, seed=s)[0]) for s in range(runs))
    assert not found.keys() - expected.keys()
    frequent = [path for path, p in expected.items() if p * runs >= 5]
    observed, wanted = [found[p] for p in frequent], [expected[p] * runs for p in frequent]
    rest = runs - sum(wanted)
    if rest >= 5:
        observed, wanted = [*observed, runs - sum(observed)], [*wanted, rest]
    assert len(wanted) > 4, "the test has no power if one continuation is certain"
    statistic = sum((o - w) ** 2 / w for o, w in zip(observed, wanted, strict=True))
    assert chi2.sf(statistic, len(wanted) - 1) > 1e-4


@pytest.mark.parametrize("drafter", DRAFTING)
@pytest.mark.parametrize("sampler", [GREEDY, Sampler(1.0)])
def test_proposed_trees_are_well_formed(drafter, sampler):
    target = tiny()
    made = make(drafter, target)
    target.reset(100, made.taps)
    made.reset(100)
    with torch.inference_mode():
        made.observe(target.prefill(torch.tensor(PROMPT)), 11)
        tree = made.propose(11, sampler, torch.Generator().manual_seed(0))
    check(tree)
    assert tree.tokens[0] == 11
    assert (1 if drafter not in TRAINED else 2) <= len(tree) <= made.nodes


def test_nan_in_the_target_is_one_clear_error():
    target = tiny()
    drafter = make("eagle2", target)
    with torch.no_grad():
        target.decoder.norm.weight.fill_(float("nan"))
    for tokens in (1, 8):  # the prompt's logits are all that an answer of one token reads
        with pytest.raises(SpecBenchError, match="NaN"):
            generate(target, drafter, cap=tokens)


def test_typical_acceptance_is_exact_when_greedy_and_lossy_by_name():
    target = tiny()
    assert Typical().lossy and not Lossless().lossy
    assert generate(target, make("eagle2", target), rule=Typical())[0] == plain(target, PROMPT, 40)
    tokens, _ = generate(target, make("eagle2", target), rule=Typical(), sampler=Sampler(0.7))
    assert len(tokens) == 40


class Seldom(Oracle):
    """An oracle that drafts in every third cycle only, and looks over every pass."""

    observes_trees = True

    def reset(self, capacity):
        super().reset(capacity)
        self.cycles, self.order = 0, []

    def propose(self, root, sampler, generator):
        self.cycles += 1
        self.order.append("propose")
        return root_only(root) if self.cycles % 3 else super().propose(root, sampler, generator)

    def observe_tree(self, tree, states):
        assert states.logits.shape[0] == states.tokens.shape[0] == len(tree), "not all nodes are shown"
        self.order.append("review")

    def observe(self, states, bonus):
        super().observe(states, bonus)
        self.order.append("observe")


def test_cycles_without_a_draft_are_cycles_of_one_token():
    target = tiny()
    row = Row("seldom", "q", "c", 0, len(PROMPT), plain(target, PROMPT, 1), 0.0, 0.0)
    tokens, steps = generate(target, Seldom(plain(target, PROMPT, 80)), cap=22)
    assert tokens == plain(target, PROMPT, 22)
    assert [(s.nodes, s.drafted, s.accepted) for s in steps] == [(0, 0, 0), (0, 0, 0), (8, 4, 4)] * 3
    for step in steps:
        row.add(step)
    assert metrics.tau([row]) == 21 / 9
    assert list(metrics.step_alphas([row])) == [1.0] * 4, "a cycle that drafted nothing rejected something"


def test_a_drafter_may_look_over_every_pass_once_and_before_it_observes():
    target = tiny()
    seldom = Seldom(plain(target, PROMPT, 80))
    _, steps = generate(target, seldom, cap=22)
    assert seldom.order == ["observe", *["propose", "review", "observe"] * len(steps)][:-1]


# Draft passes ----------------------------------------------------------------------------------------------------------


def network_of(made):
    """Where a drafter's network is called: owner, function, and which calls count; None where it has no network."""
    while hasattr(made, "base"):  # a router, a hybrid, Ouroboros
        made = made.base
    if getattr(made, "parallel", False):  # Medusa: one forward is all heads, of which this is the first
        return made, "network", lambda *parts: parts[-1] == 0 if made.name in ("medusa", "medusa2") else True
    found = [
        (owner, name)
        for owner, name in ((getattr(made, "lm", None), "run"), (made, "network"), (made, "cross"), (made, "_extend"))
        if callable(getattr(owner, name, None))
    ]
    return (*found[0], lambda *_: True) if found else None


class Counted:
    """A drafter before whose network stands a counter: of each draft, what `propose` ran, and `observe` before it."""

    def __init__(self, made, monkeypatch):
        self.inner, self.calls, self.observed, self.proposed, self.copied = made, 0, [], [], []
        found = network_of(made)
        if found is None:
            return
        owner, name, counts = found
        inner = getattr(owner, name)

        def called(*parts, **named):
            self.calls += bool(counts(*parts, **named))
            return inner(*parts, **named)

        monkeypatch.setattr(owner, name, called)

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def observe(self, states, bonus):
        before = self.calls
        self.inner.observe(states, bonus)
        self.observed.append(self.calls - before)

    def propose(self, root, sampler, generator):
        before, memory = self.calls, getattr(self.inner, "retrieval", None)
        matched = memory is not None and memory.matched >= self.inner.least
        tree = self.inner.propose(root, sampler, generator)
        self.copied.append(matched and len(tree) > 1)
        self.proposed.append(self.calls - before)
        return tree


OWN_FIRST_LEVEL = ("ouroboros", "self_speculation", "early_exit")  # `propose` drafts it; for all others `observe` does


@pytest.mark.parametrize("sampler", [GREEDY, Sampler(0.8)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_draft_passes_are_the_forwards_that_ran(drafter, sampler, monkeypatch):
    target = tiny()
    counted = Counted(make(drafter, target), monkeypatch)
    _, steps = generate(target, counted, cap=60, sampler=sampler)
    assert len(counted.observed) == len(counted.proposed) == len(steps), "the last cycle is not observed, the prompt is"
    read = [drafter not in OWN_FIRST_LEVEL and not copied for copied in counted.copied]
    first = [ran * used for ran, used in zip(counted.observed, read, strict=True)]
    assert [s.passes for s in steps] == [a + b for a, b in zip(first, counted.proposed, strict=True)]
    assert max(s.passes for s in steps) <= counted.passes
    drafts = network_of(counted.inner) is not None
    assert any(s.passes for s in steps) == drafts == (counted.passes > 0)


def test_a_chain_takes_a_pass_a_token_and_heads_take_one_in_all():
    target = tiny()
    _, chain = generate(target, make("vanilla", target, "tree=chain", "tree.gamma=3"))
    assert {s.passes for s in chain} == {3}
    _, heads = generate(target, make("medusa", target))
    assert {s.passes for s in heads} == {1} and max(s.drafted for s in heads) > 1


def test_a_cycle_that_copies_ran_no_draft_pass():
    target = tiny()
    _, steps = generate(target, make("hybrid", target, "drafter.least=1"), cap=60)
    made = make("eagle2", target)
    assert {s.passes for s in steps} == {0, made.growth.depth}


def test_confidence_that_ends_a_chain_ends_its_passes():
    target = tiny()
    made = make("self_speculation", target)
    _, steps = generate(target, made, cap=60)
    assert all(s.passes == s.nodes for s in steps) and min(s.passes for s in steps) < made.passes


def test_answers_that_are_known_take_the_same_passes():
    target = tiny()
    for drafter in ("eagle2", "hybrid", "medusa", "self_speculation"):
        made = make(drafter, target)
        tokens, steps = generate(target, made)
        replayed, again = generate(ReplayTarget(target, PROMPT, tokens, made.taps), made)
        assert replayed == tokens and [s.passes for s in again] == [s.passes for s in steps], drafter
