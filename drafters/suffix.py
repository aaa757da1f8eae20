"""Suffix decoding: what followed earlier occurrences of the text's end, by estimated probability.

After SAM-Decoding (arXiv:2411.10666: a suffix automaton finds the longest match in constant time a token) and
SuffixDecoding (arXiv:2411.04975: followers are counted, and the tree takes the most frequent first). With w the text's end,

    D(u) = count(w u) / sum_t count(w t)                         the estimated probability that u follows w

the tree below w holds the nodes u with the largest D(u), in that order, down to `least`, and at most factor * |w| + offset
of them: more for a longer match. Of the ends w of the text, the longest match and shorter ones, that tree is drafted whose
sum of D, the expected number of accepted tokens, is largest.

Deviations and choices: counts are exact for strings of up to `context + length` tokens, which bounds the cost of a token in
repetitive text; of a longer match the last `context` tokens are looked up. SAM-Decoding's static automaton over a corpus is
left out; with `state=run` earlier prompts and answers take its place (without an answer's last cycle, which no drafter
observes). A draft ends before a stop token.
"""

import heapq

import torch

from drafters.retrieval import Matching
from specbench.common.types import Depth, DraftNodes, Name, Natural, Share, Tokens, Weight
from specbench.engine.drafter import State
from specbench.engine.interface import DraftTree, Sampler
from specbench.engine.tree import Trie


class Automaton:
    """The suffix automaton of some texts, read token by token (Blumer et al., 1985; counted as in suffix trees).

    A state stands for all strings that end at the same positions; `link` is the state of its longest suffix that ends at
    more.

    Args:
        counted: length up to which the occurrences of strings are counted.

    Attributes:
        following: by state, token -> state. length: of a state's longest string. count: its strings' occurrences.
        match, matched: state and length of the text's longest end that occurred before.
    """

    def __init__(self, counted: int):
        self.counted = counted
        self.following: list[dict[int, int]] = [{}]
        self.link, self.length, self.count = [-1], [0], [0]
        self.begin()

    def begin(self) -> None:
        """Start a new text, unconnected to the last one."""
        self.last = 0
        self.match, self.matched = 0, 0
        self.tail, self.tail_length = 0, 0  # the text's last `counted` tokens

    def append(self, token: int) -> None:
        """Continue the text with a token."""
        state, length = self.match, self.matched
        while state and token not in self.following[state]:
            state = self.link[state]
            length = self.length[state]
        after = self.following[state].get(token)
        self._extend(token)
        self.match, self.matched = (0, 0) if after is None else (self.suffix_state(after, length + 1), length + 1)
        self._count(token)

    def suffix_state(self, state: int, length: int) -> int:
        """The state of the last `length` tokens of a string that `state` stands for, or stood for before a split."""
        while state and self.length[self.link[state]] >= length:
            state = self.link[state]
        return state

    def _count(self, token: int) -> None:
        """Count one more occurrence of every end of the text up to `counted` tokens."""
        tail = self.following[self.suffix_state(self.tail, self.tail_length)][token]
        self.tail_length = min(self.tail_length + 1, self.counted)
        state = self.tail = self.suffix_state(tail, self.tail_length)
        while state:
            self.count[state] += 1
            state = self.link[state]

    def _extend(self, token: int) -> None:
        last, known = self.last, self.following[self.last].get(token)
        if known is not None:  # a text that begins like an earlier one
            self.last = self._split(last, token, known)
            return
        self.last = self._state(self.length[last] + 1)
        at = last
        while at >= 0 and token not in self.following[at]:
            self.following[at][token] = self.last
            at = self.link[at]
        self.link[self.last] = 0 if at < 0 else self._split(at, token, self.following[at][token])

    def _split(self, at: int, token: int, state: int) -> int:
        """The state whose longest string is that of `at` plus the token: `state`, or one split off from it."""
        if self.length[state] == self.length[at] + 1:
            return state
        split = self._state(self.length[at] + 1)
        self.following[split] = dict(self.following[state])
        self.link[split], self.count[split] = self.link[state], self.count[state]
        self.link[state] = split
        while at >= 0 and self.following[at].get(token) == state:
            self.following[at][token] = split
            at = self.link[at]
        return split

    def _state(self, length: int) -> int:
        self.following.append({})
        self.link.append(0)
        self.length.append(length)
        self.count.append(0)
        return len(self.length) - 1


class Suffix(Matching):
    """Drafts the likeliest continuations of the text's end.

    Args:
        nodes: draft nodes at most. factor, offset: a match of n tokens allows factor * n + offset of them.
        length: tokens of a path at most. context: last tokens of a match that are looked up.
        least: estimated probability below which nothing is drafted.
        state: what the automaton holds when a generation begins.
    """

    def __init__(
        self,
        name: Name,
        nodes: DraftNodes = 32,
        factor: Weight = 1.0,
        offset: Natural = 0,
        length: Depth = 32,
        context: Tokens = 16,
        least: Share = 0.1,
        state: State = "prompt",
    ):
        super().__init__(name, nodes + 1, state)
        self.factor, self.offset, self.length, self.context, self.least = factor, offset, length, context, least

    def clear(self) -> None:
        self.automaton = Automaton(self.context + self.length)

    def begin(self) -> None:
        self.automaton.begin()

    def read(self, tokens: list[int]) -> None:
        for token in tokens:
            self.automaton.append(token)

    @property
    def matched(self) -> int:
        return self.automaton.matched

    def propose(self, root: int, sampler: Sampler, generator: torch.Generator | None) -> DraftTree:
        """Of the longest match and its ever shorter ends, whose continuations are expected to be accepted furthest."""
        automaton, best, worth = self.automaton, Trie(root, 1), 0.0
        length = automaton.matched
        state = automaton.suffix_state(automaton.match, min(length, self.context))
        while state:
            budget = min(self.nodes - 1, int(self.factor * length) + self.offset)
            if budget <= worth:  # shorter ends have smaller budgets
                break
            trie, expected = self._grow(root, state, budget)
            if expected > worth:
                best, worth = trie, expected
            state = automaton.link[state]
            length = automaton.length[state]
        return best.tree(self.device)

    def _grow(self, root: int, state: int, budget: int) -> tuple[Trie, float]:
        """The tree below one end of the text, and the expected number of its accepted tokens."""
        following, count = self.automaton.following, self.automaton.count
        trie, expected = Trie(root, budget + 1), 0.0
        total = sum(count[after] for after in following[state].values())
        min_count = self.least * total
        heap: list[tuple[int, int, int, int, int]] = []  # -count, order of arrival, token, state, parent
        arrived, parent = 0, 0
        while True:
            if trie.depths[parent] < self.length:
                for token, after in following[state].items():
                    if token not in self.stop_ids and count[after] >= min_count:
                        arrived += 1
                        heapq.heappush(heap, (-count[after], arrived, token, after, parent))
            if not heap or len(trie) > budget:
                return trie, expected
            negative, _, token, state, above = heapq.heappop(heap)
            parent = trie.append(above, token)
            expected -= negative / total
