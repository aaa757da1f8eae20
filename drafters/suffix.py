"""Suffix decoding: the longest end of the text that stood there before says what follows, and how surely.

After SAM-Decoding (arXiv:2411.10666: a suffix automaton finds the longest match in constant time a token) and
SuffixDecoding (arXiv:2411.04975: followers are counted, and the tree takes the most frequent first). With w the text's end,

    D(u) = count(w u) / sum_t count(w t)                         the estimated probability that w goes on with u

the tree below w holds the nodes u with the largest D(u), one after the other, down to `least`, and at most
factor * |w| + offset of them: a longer match is trusted further. Of the ends w of the text, the whole match and shorter
ones, that tree is drafted whose sum of D, the accepted tokens it expects, is largest.

Deviations and choices: counts are exact for strings of up to `context + length` tokens, which bounds what a token costs
where a text repeats itself; a match may be longer, and then its last `context` tokens ask. SAM-Decoding's second, static
automaton over a corpus is not here; with `state=run` earlier prompts and answers serve (but for an answer's last cycle, of
which no drafter is told). A draft ends before a stop token.
"""

import heapq

import torch

from drafters.retrieval import Matching
from specbench.common.types import Count, Name, Natural, Share, Weight
from specbench.engine.drafter import State
from specbench.engine.interface import DraftTree, Sampler
from specbench.engine.tree import Trie


class Automaton:
    """The suffix automaton of some texts, read token by token (Blumer et al., 1985; counted as in suffix trees).

    A state stands for all strings that end at the same places; `link` leads to its longest suffix that ends at more places.

    Args:
        counted: length up to which the occurrences of strings are counted.

    Attributes:
        following: by state, token -> state. length: of a state's longest string. count: its strings' occurrences.
        match, matched: state and length of the text's longest end that occurs before, too.
    """

    def __init__(self, counted: int):
        self.counted = counted
        self.following: list[dict[int, int]] = [{}]
        self.link, self.length, self.count = [-1], [0], [0]
        self.begin()

    def begin(self) -> None:
        """A new text: no string goes over from the last one."""
        self.last = 0
        self.match, self.matched = 0, 0
        self.tail, self.tail_length = 0, 0  # the text's last `counted` tokens

    def append(self, token: int) -> None:
        """The text goes on with a token."""
        state, length = self.match, self.matched
        while state and token not in self.following[state]:
            state = self.link[state]
            length = self.length[state]
        found = self.following[state].get(token)
        self._extend(token)
        self.match, self.matched = (0, 0) if found is None else (self.holding(found, length + 1), length + 1)
        self._count(token)

    def holding(self, state: int, length: int) -> int:
        """The state of a string's last `length` tokens, from the state of the whole string or one that was its state."""
        while state and self.length[self.link[state]] >= length:
            state = self.link[state]
        return state

    def _count(self, token: int) -> None:
        """One more occurrence of every end of the text that is counted."""
        tail = self.following[self.holding(self.tail, self.tail_length)][token]
        self.tail_length = min(self.tail_length + 1, self.counted)
        state = self.tail = self.holding(tail, self.tail_length)
        while state:
            self.count[state] += 1
            state = self.link[state]

    def _extend(self, token: int) -> None:
        last, known = self.last, self.following[self.last].get(token)
        if known is not None:  # a text that begins like an earlier one
            self.last = self._exactly(last, token, known)
            return
        self.last = self._state(self.length[last] + 1)
        at = last
        while at >= 0 and token not in self.following[at]:
            self.following[at][token] = self.last
            at = self.link[at]
        self.link[self.last] = 0 if at < 0 else self._exactly(at, token, self.following[at][token])

    def _exactly(self, at: int, token: int, state: int) -> int:
        """The state whose longest string is that of `at` with the token behind it, split off from `state` if need be."""
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
        length: tokens of a path at most. context: of a match, as many last tokens are asked for what followed.
        least: estimated probability below which nothing is drafted.
        state: what the automaton holds when a generation begins.
    """

    def __init__(
        self,
        name: Name,
        nodes: Count = 32,
        factor: Weight = 1.0,
        offset: Natural = 0,
        length: Count = 32,
        context: Count = 16,
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
        """Tokens of the text's end that stood there before."""
        return self.automaton.matched

    def propose(self, root: int, sampler: Sampler, generator: torch.Generator | None) -> DraftTree:
        automaton, best, worth = self.automaton, Trie(root, 1), 0.0
        length = automaton.matched
        state = automaton.holding(automaton.match, min(length, self.context))
        while state:
            budget = min(self.nodes - 1, int(self.factor * length) + self.offset)
            if budget <= worth:  # and shorter ends have less
                break
            trie, expected = self._grown(root, state, budget)
            if expected > worth:
                best, worth = trie, expected
            state = automaton.link[state]
            length = automaton.length[state]
        return best.tree(self.device)

    def _grown(self, root: int, state: int, budget: int) -> tuple[Trie, float]:
        """The tree below one end of the text, best first, and how many tokens of it are expected to be accepted."""
        following, count = self.automaton.following, self.automaton.count
        trie, expected = Trie(root, budget + 1), 0.0
        whole = sum(count[after] for after in following[state].values())
        least = self.least * whole
        heap: list[tuple[int, int, int, int, int]] = []  # -count, order of arrival, token, state, parent
        arrived, parent = 0, 0
        while True:
            if trie.depths[parent] < self.length:
                for token, after in following[state].items():
                    if token not in self.stop_ids and count[after] >= least:
                        arrived += 1
                        heapq.heappush(heap, (-count[after], arrived, token, after, parent))
            if not heap or len(trie) > budget:
                return trie, expected
            worth, _, token, state, above = heapq.heappop(heap)
            parent = trie.append(above, token)
            expected -= worth / whole
