"""Lookahead: its window and pool against a telling without tree and cache, its tree against the published mask."""

import random

import pytest
import torch
from conftest import make, tiny
from decoding import PROMPT, generate, plain
from tree_checks import check

from drafters.lookahead import Lookahead
from specbench.engine.sampling import Sampler

SIZES = [(7, 5, 7), (3, 2, 2), (1, 3, 1), (4, 3, 2), (2, 6, 3), (1, 2, 1)]


class Told:
    """The algorithm as its authors' code goes: level 0 lacks the root, every level is a list, passes are whole texts."""

    def __init__(self, target, prompt, window, level, guesses, pool):
        self.target, self.level, self.guesses, self.pool = target, level, guesses, pool
        self.levels = [random.Random(0).choices(prompt, k=window + level - 3)]

    @torch.inference_mode()
    def cycle(self, text):
        """text: all that is emitted, the root at its end."""
        new = []
        for j in range(len(self.levels[0]) + 1):
            ids = [*text, *self.levels[0][:j], *(level[j] for level in self.levels[1:])]
            new.append(int(self.target.model(torch.tensor([ids])).logits[0, -1].argmax()))
        if len(self.levels) < self.level - 1:
            self.levels = [level[1:] for level in [*self.levels, new]]
            return
        for j, first in enumerate([text[-1], *self.levels[0]]):
            self.keep([first, *(level[j] for level in self.levels[1:]), new[j]])
        after = [*self.levels[1:], new]
        self.levels = [after[0][1:], *after[1:]]

    def keep(self, tokens):
        known = self.pool.setdefault(tokens[0], [])
        if tokens[1:] in known:
            known.remove(tokens[1:])
        elif len(known) == self.guesses:
            known.pop(0)
        known.append(tokens[1:])


@pytest.mark.parametrize("read_answer", [True, False])
@pytest.mark.parametrize("state", ["none", "prompt", "run"])
@pytest.mark.parametrize(("window", "level", "guesses"), SIZES)
def test_window_and_pool_are_the_algorithms(window, level, guesses, state, read_answer):
    """After every cycle; and the guesses offered are the pool's, merged."""
    target = tiny()
    target.stop_ids = ()  # a guess would end before one
    options = f"drafter.state={state}", f"drafter.read_answer={read_answer}"
    made = make("lookahead", target, *sizes(window, level, guesses), *options)
    made.persist(True)
    log = []
    review = made.observe_tree

    def watched(tree, states):
        check(tree)
        assert len(tree) <= made.nodes
        offered = prefixes(tree)
        review(tree, states)
        blocks = made.window.blocks
        levels = [blocks[0][1:], *blocks[1:]]
        log.append((offered, [list(x) for x in levels], {k: [list(t) for t in v] for k, v in made.pool.known.items()}))

    made.observe_tree = watched
    pool = {}
    for prompt in (PROMPT * 3, PROMPT[::-1] * 3):
        log.clear()
        tokens, steps = generate(target, made, prompt, cap=30)
        assert tokens == plain(target, prompt, 30)
        told = Told(target, prompt, window, level, guesses, pool if state == "run" else {})
        if state != "none":
            for end in range(level, len(prompt) + 1):
                told.keep(prompt[end - level : end])
        at, read = 1, len(prompt)
        for (offered, levels, kept), step in zip(log, steps, strict=True):
            text = [*prompt, *tokens[:at]]
            for end in range(max(level, read + 1), len(text) + 1) if read_answer else ():
                told.keep(text[end - level : end])
            read = len(text)
            guesses_now = told.pool.get(text[-1], [])
            assert offered == {tuple(g[:n]) for g in guesses_now for n in range(1, level)}
            told.cycle(text)
            assert levels == told.levels
            assert kept == told.pool
            at += len(step.tokens)


def sizes(window, level, guesses):
    return f"drafter.window={window}", f"drafter.level={level}", f"drafter.guesses={guesses}"


def prefixes(tree):
    """What of a tree may be accepted, as prefixes."""
    ids, parents = tree.tokens.tolist(), tree.parents.tolist()
    marks = [True] * len(tree) if tree.acceptable is None else tree.acceptable.tolist()
    found = [()]
    for node in range(1, len(tree)):
        found.append((*found[parents[node]], ids[node]))
    return {p for p, mark in zip(found[1:], marks[1:], strict=True) if mark}


@pytest.mark.parametrize(("window", "level"), [(7, 5), (4, 3), (3, 2), (1, 4), (15, 5)])
def test_the_published_mask_is_this_tree(window, level):
    """The literal mask of the authors' code: blocks of W rows behind one another, then the guesses' chains."""
    drafter = Lookahead("l", window, level, guesses=3)
    drafter.bind(type("Any", (), {"device": torch.device("cpu"), "stop_ids": ()}))
    drafter.reset(0)
    drafter.begun = True
    drafter.window.blocks = [[100 * block + j for j in range(window)] for block in range(1, level)]
    for guess in range(3):
        drafter.pool.keep([9, *(1000 * (guess + 1) + n for n in range(level - 1))])
    tree = drafter.propose(9, Sampler(), None)
    check(tree)

    rows, chain = window * (level - 1), level - 1
    n = rows + 3 * chain
    mask, positions = torch.zeros(n, n, dtype=torch.bool), torch.zeros(n, dtype=torch.long)
    for block in range(level - 1):
        for j in range(window):
            row = block * window + j
            mask[row, : j + 1] = True  # block 0 is causal, and every other block sees as much of it
            for above in range(1, block + 1):
                mask[row, above * window + j] = True
            positions[row] = block + j
    for guess in range(3):
        for i in range(chain):
            row = rows + guess * chain + i
            mask[row, 0] = True
            mask[row, rows + guess * chain : row + 1] = True
            positions[row] = i + 1

    guessed = 1 + 3 * chain
    ours = [
        0,
        *range(guessed, len(tree)),
        *range(1 + 2 * chain, guessed),
        *range(1 + chain, 1 + 2 * chain),
        *range(1, 1 + chain),
    ]
    assert tree.tokens[ours[:rows]].tolist() == [t for block in drafter.window.blocks for t in block]
    assert tree.tokens[ours[rows:]].tolist() == [1000 * (g + 1) + i for g in range(3) for i in range(chain)]
    assert torch.equal(tree.ancestors[ours][:, ours], mask)
    assert torch.equal(tree.depths[ours], positions)
    assert tree.acceptable[ours].tolist() == [True] + [False] * (rows - 1) + [True] * 3 * chain


def test_a_window_token_is_not_accepted_even_where_it_is_right():
    """Without n-grams in the pool nothing can be accepted, though the window holds the target's own words."""
    target = tiny()
    truth = plain(target, PROMPT, 30)
    made = make("lookahead", target, "drafter.state=none")
    review = made.observe_tree

    def right(tree, states):
        review(tree, states)
        made.pool.known.clear()
        at = right.cycle = right.cycle + 1
        made.window.blocks = [[0, *truth[at + 1 : at + 7]]]

    right.cycle, made.observe_tree = 0, right
    tokens, steps = generate(target, made, cap=20)
    assert tokens == truth[:20] and {s.accepted for s in steps} == {0} and {s.drafted for s in steps} == {0}


def test_the_node_count_is_what_the_paper_says():
    for window, level, guesses, nodes in ((7, 5, 7, 56), (15, 5, 15, 120)):
        assert Lookahead("l", window, level, guesses).nodes == nodes
