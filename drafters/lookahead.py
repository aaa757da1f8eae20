"""Lookahead decoding: the target guesses many positions at once and corrects its guesses pass by pass (arXiv:2402.02057).

A window of W columns and N - 1 levels rides along in every target pass; below the root r, in columns j and levels l,

    block 0      r    a_1   a_2   …            a chain
    block 1     b_0   b_1   b_2   …            b_j follows a_j (b_0 follows r)
    block 2     c_0   c_1   c_2   …            c_j follows b_j

so a node attends to its column above it and to the chain up to that column: an ancestors-only tree in which position is
depth, without a mask of its own. The target's tokens after the last block become the next block, the first is dropped, and
every complete column, N tokens with the new one, goes into a pool of n-grams by its first token. Guesses are the pool's at
most G latest n-grams that begin with the root; only they may be accepted.

Deviations and choices: as in the authors' code, the window starts with random tokens of the prompt, fills a level a
cycle, and moves by one token a cycle however many were accepted. `state=prompt` and `read_answer` fill the pool with
n-grams of the prompt and of the answer as it grows, too (their POOL_FROM_PROMPT; the paper has neither), `run` keeps it
from prompt to prompt. Guesses that begin alike share nodes. Theirs begins to guess once the window is full, and replaces
end tokens in it. With temperature the window continues with the likeliest tokens, and guesses are verified as
deterministic candidates.
"""

import random
from collections.abc import Iterable, Sequence
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from drafters.retrieval import Retriever
from specbench.common.types import Length, Name, Seed, Width
from specbench.engine.drafter import State
from specbench.engine.interface import DraftTree, Sampler, Taps, TargetStates
from specbench.engine.sampling import argmax
from specbench.engine.tree import Trie

Level = Annotated[Length, Field(ge=2)]


class Pool:
    """n-grams by their first token; of those with the same, the `capacity` that were seen last."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.known: dict[int, dict[tuple[int, ...], None]] = {}  # first token -> what follows it, the latest last

    def after(self, first: int) -> list[tuple[int, ...]]:
        """The rests of the n-grams that begin with a token, the latest first."""
        return [*reversed(self.known.get(first, {}))]

    def keep(self, tokens: Sequence[int]) -> None:
        """Add an n-gram, as its first token's latest."""
        followers = self.known.setdefault(tokens[0], {})
        followers.pop(tuple(tokens[1:]), None)
        followers[tuple(tokens[1:])] = None
        if len(followers) > self.capacity:
            del followers[next(iter(followers))]

    def read(self, text: list[int], level: int) -> None:
        """Add every n-gram of a text. level: n."""
        for end in range(level, len(text) + 1):
            self.keep(text[end - level : end])


class Window:
    """The Jacobi window, in one tree with guesses. width: W. level: N. guesses: G.

    Attributes:
        max_guessed: upper bound of the guesses' nodes, the root included. nodes: of the whole tree's.
        blocks: those filled so far; the first includes the root.
    """

    def __init__(self, width: int, level: int, guesses: int):
        self.width, self.level = width, level
        self.max_guessed = 1 + guesses * (level - 1)
        largest = max(blocks * (width + level - 1 - blocks) for blocks in range(1, level))  # while it fills, or full
        self.nodes = self.max_guessed + largest - 1

    def begin(self, root: int, prompt: list[int], seed: int) -> None:
        """Start a text: block 0 alone, with random tokens of its prompt."""
        self.blocks = [[root, *random.Random(seed).choices(prompt, k=self.width + self.level - 3)]]

    def trie(self, root: int, guesses: Iterable[Iterable[int]]) -> tuple[Trie, int]:
        """A tree of guesses, then the window, which may not be accepted; and the number of nodes before the window."""
        trie = Trie(root, self.max_guessed)
        for guess in guesses:
            trie.add(guess)
        guessed = len(trie)
        self.blocks[0][0] = root
        above = [0]
        for token in self.blocks[0][1:]:
            above.append(trie.append(above[-1], token, acceptable=False))
        for block in self.blocks[1:]:
            above = [trie.append(parent, token, acceptable=False) for parent, token in zip(above, block, strict=True)]
        return trie, guessed

    def last(self, nodes: Tensor) -> Tensor:
        """The rows of the last block's nodes: the tree's last, and the root if there is only block 0. [N, …] -> [W', …]"""
        width = len(self.blocks[0])
        if len(self.blocks) > 1:
            return nodes[len(nodes) - width :]
        return torch.cat([nodes[:1], nodes[len(nodes) - width + 1 :]])

    def update(self, next_tokens: list[int], pool: Pool) -> None:
        """Append the model's tokens after the last block as the next one; complete columns go into the pool."""
        self.blocks.append(next_tokens)
        if len(self.blocks) == self.level:
            for column in zip(*self.blocks, strict=True):
                pool.keep(column)
            self.blocks = self.blocks[1:]
        else:
            self.blocks = [block[1:] for block in self.blocks]


class Lookahead(Retriever):
    """A Jacobi window and guesses from its n-grams in one tree.

    Args:
        window: W, columns. level: N, tokens of an n-gram. guesses: G, n-grams of one first token at most.
        state: what the pool holds when a generation begins. read_answer: does it also get the answer's n-grams?
        seed: of the window's first tokens.
    """

    taps = Taps(last=False, observe_top_k=1)
    observes_trees = True

    def __init__(
        self,
        name: Name,
        window: Width = 7,
        level: Level = 5,
        guesses: Width = 7,
        state: State = "prompt",
        seed: Seed = 0,
        read_answer: bool = True,
    ):
        self.window = Window(window, level, guesses)
        super().__init__(name, self.window.nodes, state)
        self.guesses, self.seed, self.read_answer = guesses, seed, read_answer
        self.end: list[int] = []  # of the text: what the next n-grams begin with

    def clear(self) -> None:
        self.pool = Pool(self.guesses)

    def observe(self, states: TargetStates, bonus: int) -> None:
        """Start window and pool from the prompt; later add the n-grams of what was emitted."""
        if self.begun:
            if self.read_answer:
                self._read([*states.tokens.tolist()[1:], bonus])  # the root was the last bonus
            return
        self.begun = True
        prompt = states.tokens.tolist()
        self.window.begin(bonus, prompt, self.seed)
        if self.state != "none":
            self.pool.read(prompt, self.window.level)
        self.end = prompt[1 - self.window.level :]
        if self.read_answer:
            self._read([bonus])

    def _read(self, emitted: list[int]) -> None:
        text = [*self.end, *emitted]
        self.pool.read(text, self.window.level)
        self.end = text[1 - self.window.level :]

    def propose(self, root: int, sampler: Sampler, generator: torch.Generator | None) -> DraftTree:
        trie, _ = self.window.trie(root, map(self.emittable, self.pool.after(root)))
        return trie.tree(self.device)

    def observe_tree(self, tree: DraftTree, states: TargetStates) -> None:
        self.window.update(argmax(self.window.last(states.logits)).tolist(), self.pool)
