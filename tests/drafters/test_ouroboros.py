"""Ouroboros: its drafts, suffixes and pool against a telling without tree and cache; drafts of a perfect model."""

from types import SimpleNamespace

import pytest
import torch
from conftest import configuration, make, settled, tiny
from decoding import PROMPT, generate, plain
from drafting import listing, save_tokenizer, trained
from test_lookahead import Told, prefixes
from tree_checks import check

from specbench.common.errors import SpecBenchError
from specbench.evaluation import arms

SIZES = [(8, 3, 6, 5, 6), (6, 3, 5, 4, 4), (4, 2, 3, 3, 2), (3, 1, 1, 2, 1), (5, 0, 2, 3, 2)]


def sized(target, gamma, suffixes, window, level, guesses, *more):
    """With a draft model that is often right."""
    names = ("gamma", "suffixes", "window", "level", "guesses")
    values = (gamma, suffixes, window, level, guesses)
    made = make("ouroboros", target, *(f"drafter.{n}={v}" for n, v in zip(names, values, strict=True)), *more)
    made.base.load_state_dict(trained("vanilla", target)[0].state_dict())
    return made


def drafting(told, draft, text, gamma):
    """The draft model's tokens, and how many passes it took for them."""
    drafts, passes = [], 0
    while len(drafts) < gamma:
        now = [*text, *drafts]
        truth = plain(draft, now, told.level)
        right = [
            next((i for i, (a, b) in enumerate(zip(g, truth, strict=False)) if a != b), len(g)) for g in pool(told, now)
        ]
        told.cycle(now)
        drafts += truth[: max(right, default=0) + 1]
        passes += 1
    return drafts[:gamma], passes


def pool(told, text):
    return told.pool.get(text[-1], [])


def correct(told, target, text, drafts, offered):
    """What the authors' code does after a pass, each token asked by a pass of its own. offered: the oldest first."""
    after = [plain(target, [*text, *drafts[:i]], 1)[0] for i in range(len(drafts) + 1)]
    phrases = [[plain(target, [*text, *drafts, *p[:j]], 1)[0] for j in range(len(p))] for p in offered]
    known = pool(told, drafts)
    known[:] = [phrase for phrase in known if phrase not in offered]
    for phrase in phrases:
        told.keep([drafts[-1], *phrase])
    first = next((i for i, draft in enumerate(drafts) if after[i] != draft), len(drafts))
    rest, answers = drafts[first:], after[first + 1 :]
    for i, token in enumerate(rest):
        completion = []
        for j in range(min(told.level - 1, len(rest) - i)):
            completion.append(answers[i + j])
            if i + j + 1 < len(rest) and rest[i + j + 1] != answers[i + j]:
                break
        if len(completion) == told.level - 1:
            told.keep([token, *completion])


@pytest.mark.parametrize("state", ["none", "prompt", "run"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_drafts_suffixes_and_pool_are_the_algorithms(sizes, state):
    """In every cycle, and in as many passes of the draft model."""
    gamma, suffixes, window, level, guesses = sizes
    target = tiny()
    target.stop_ids = ()
    made = sized(target, *sizes, f"drafter.state={state}")
    made.persist(True)
    log, passes = [], []
    propose, review, run = made.propose, made.observe_tree, made.base.lm.run

    def proposing(*args):
        passes.clear()
        return propose(*args)

    def reviewing(tree, states):
        check(tree)
        assert len(tree) <= made.nodes and len(passes) <= made.passes
        offered = prefixes(tree)
        review(tree, states)
        log.append((offered, len(passes), {k: [list(t) for t in v] for k, v in made.pool.known.items() if v}))

    def running(*args):
        passes.append(1)
        return run(*args)

    made.propose, made.observe_tree, made.base.lm.run = proposing, reviewing, running
    draft, remembered, lengthened = SimpleNamespace(model=made.base.lm.model, device=target.device), {}, 0
    for prompt in (PROMPT * 2, PROMPT[::-1] * 2):
        log.clear()
        tokens, steps = generate(target, made, prompt, cap=24)
        assert tokens == plain(target, prompt, 24)
        told = Told(draft, prompt, window, level, guesses, remembered if state == "run" else {})
        if state != "none":
            for end in range(level, len(prompt) + 1):
                told.keep(prompt[end - level : end])
        at = 1
        for (offered, count, kept), step in zip(log, steps, strict=True):
            text = [*prompt, *tokens[:at]]
            drafts, wanted = drafting(told, draft, text, gamma)
            phrases = pool(told, drafts)[max(0, len(pool(told, drafts)) - suffixes) :]
            paths = [[*drafts, *phrase] for phrase in [[], *phrases]]
            assert offered == {tuple(path[:n]) for path in paths for n in range(1, len(path) + 1)}
            assert count == wanted
            correct(told, target, text, drafts, [list(p) for p in phrases])
            assert kept == {k: v for k, v in told.pool.items() if v}
            lengthened += bool(phrases)
            at += len(step.tokens)
    assert lengthened or not suffixes, "no draft was ever made longer"


def test_the_target_as_its_own_draft_model_is_accepted_in_full(tmp_path):
    """By path. What was verified is not run again, and sooner or later a suffix is right as well."""
    target = tiny()
    target.stop_ids = ()
    target.model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path, [f"w{i}" for i in range(61)])
    target.path = tmp_path
    sizes = ("drafter.gamma=4", "drafter.level=3", "drafter.window=6", "drafter.guesses=4")
    made = make("ouroboros", target, *sizes, f"drafter.base.path={tmp_path}")
    ran, run = [], made.base.lm.run

    def running(tokens, *args):
        ran.append(tokens.shape[1])
        return run(tokens, *args)

    made.base.lm.run = running
    tokens, steps = generate(target, made, cap=120)
    assert tokens == plain(target, PROMPT, 120)
    assert all(4 <= step.accepted <= 4 + 2 for step in steps[:-1]) and any(step.accepted > 4 for step in steps)
    assert max(ran[1:]) <= made.window.nodes + 3, "beside the tree only an accepted suffix and the last draft were not run"


def test_a_draft_ends_before_a_stop_token():
    """And no phrase follows it then."""
    target = tiny()
    made = sized(target, 6, 3, 5, 4, 4)
    drafted = []
    propose = made.propose

    def proposing(*args):
        drafted.append(propose(*args))
        return drafted[-1]

    truth = plain(target, PROMPT, 40)
    target.stop_ids = (truth[20], truth[21])
    made.bind(target)
    made.base.load_state_dict(trained("vanilla", target)[0].state_dict())
    made.propose = proposing
    tokens, _ = generate(target, made, cap=40, stop=target.stop_ids)
    assert tokens == truth[: min(truth.index(stop) for stop in target.stop_ids) + 1]
    assert not set(target.stop_ids) & {token for tree in drafted for token in tree.tokens.tolist()}
    assert all(len(tree) <= 7 or tree.max_depth > 6 for tree in drafted)
    assert any(tree.max_depth < 6 for tree in drafted), "the draft model never thought of a stop token"


def test_a_temperature_is_refused_before_anything_is_loaded():
    spec = settled("ouroboros", "sampler.temperature=1", "drafter.base.weights=null")
    with pytest.raises(SpecBenchError, match=r"^drafter=ouroboros is for greedy decoding; set sampler\.temperature=0$"):
        arms.make(spec)


def test_its_draft_model_is_the_one_that_vanilla_has():
    assert configuration("ouroboros").drafter.base == configuration("vanilla").drafter


def test_a_draft_vocabulary_confines_drafts(tmp_path):
    target = listing(tiny(), tmp_path)
    made = make("ouroboros", target, "drafter.base.vocabulary=30", "drafter.gamma=4", "drafter.window=3")
    tokens, _ = generate(target, made, cap=30)
    assert tokens == plain(target, PROMPT, 30)
    with torch.inference_mode():
        target.reset(100, made.taps)
        made.reset(100)
        made.observe(target.prefill(torch.tensor(PROMPT)), 11)
        drafted = made.propose(11, None, None).tokens[1:].tolist()
    assert len(drafted) >= 4 and set(drafted) <= set(made.base.listed.ids.tolist())
