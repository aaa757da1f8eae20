"""Lookahead decoding: the target guesses many positions at once and corrects its guesses pass by pass (arXiv:2402.02057).

A window of W columns and N - 1 levels rides along in every target pass; below the root r, in columns j and levels l,

    block 0      r    a_1   a_2   …            a chain
    block 1     b_0   b_1   b_2   …            b_j stands behind a_j (b_0 behind r)
    block 2     c_0   c_1   c_2   …            c_j stands behind b_j

so a node sees its column above it and what the chain holds left of that: an ancestors-only tree in which position is
depth, and needs no mask of its own. What the target says behind the last block becomes the next one, the topmost is
dropped, and every column that is complete, N tokens with the new one, goes into a pool of n-grams by its first token.
Guesses are the pool's at most G latest n-grams that begin with the root; only they may be accepted.

Deviations and choices: the window starts with random tokens of the prompt and a level a cycle is filled, as in the authors'
code; the window moves by one token a cycle however many were accepted, as there. `state=prompt` fills the pool with the
prompt's n-grams first (their POOL_FROM_PROMPT), `run` keeps it from prompt to prompt. Guesses that begin alike share nodes.
With temperature the window goes on with the likeliest tokens, and guesses are verified as deterministic candidates.
"""

import random
from typing import Annotated

import torch
from pydantic import Field

from drafters.retrieval import Retriever
from specbench.engine.interface import DraftTree, Sampler, State, Taps, TargetStates
from specbench.engine.sampling import argmax
from specbench.engine.tree import Trie
from specbench.options import Count, Name, Seed


class Lookahead(Retriever):
    """A Jacobi window and guesses from its n-grams in one tree.

    Args:
        name: as tables show it.
        window: W, columns. level: N, tokens of an n-gram. guesses: G, of one token's n-grams at most.
        state: what the pool holds when a generation begins.
        seed: of the window's first tokens.
    """

    taps = Taps(last=False, likeliest=1)

    def __init__(
        self,
        name: Name,
        window: Count = 7,
        level: Annotated[int, Field(ge=2)] = 5,
        guesses: Count = 7,
        state: State = "prompt",
        seed: Seed = 0,
    ):
        self.guessed = 1 + guesses * (level - 1)  # nodes, the root included
        widest = max(blocks * (window + level - 1 - blocks) for blocks in range(1, level))  # while it fills, or full
        super().__init__(name, self.guessed + widest - 1, state)
        self.window, self.level, self.guesses, self.seed = window, level, guesses, seed

    def forget(self) -> None:
        self.pool: dict[int, dict[tuple[int, ...], None]] = {}  # first token -> what follows it, the latest last

    def observe(self, states: TargetStates, bonus: int) -> None:
        """The prompt starts window and pool; afterwards everything is seen in `review`."""
        if self.begun:
            return
        self.begun = True
        prompt = states.tokens.tolist()
        drawn = random.Random(self.seed).choices(prompt, k=self.window + self.level - 3)
        self.blocks = [[bonus, *drawn]]
        if self.state != "none":
            for end in range(self.level, len(prompt) + 1):
                self._keep(prompt[end - self.level : end])

    def propose(self, root: int, sampler: Sampler, generator: torch.Generator | None) -> DraftTree:
        trie = Trie(root, self.guessed)
        for guess in reversed(self.pool.get(root, {})):
            trie.add(self.emittable(guess))
        self.blocks[0][0] = root
        above = [0]
        for token in self.blocks[0][1:]:
            above.append(trie.append(above[-1], token, acceptable=False))
        for block in self.blocks[1:]:
            above = [trie.append(parent, token, acceptable=False) for parent, token in zip(above, block, strict=True)]
        return trie.tree(self.device)

    def review(self, tree: DraftTree, states: TargetStates) -> None:
        """The window's next block; its nodes are the tree's last ones, but for the root where there is only block 0."""
        width = len(self.blocks[0])
        logits = states.logits[len(tree) - width :]
        if len(self.blocks) == 1:
            logits = torch.cat([states.logits[:1], states.logits[len(tree) - width + 1 :]])
        self.blocks.append(argmax(logits).tolist())
        if len(self.blocks) == self.level:
            for column in zip(*self.blocks, strict=True):
                self._keep(column)
            self.blocks = self.blocks[1:]
        else:
            self.blocks = [block[1:] for block in self.blocks]

    def _keep(self, tokens: list[int] | tuple[int, ...]) -> None:
        """An n-gram into the pool, as its first token's latest; the one that was not seen for longest gives way."""
        followers = self.pool.setdefault(tokens[0], {})
        followers.pop(tuple(tokens[1:]), None)
        followers[tuple(tokens[1:])] = None
        if len(followers) > self.guesses:
            del followers[next(iter(followers))]
