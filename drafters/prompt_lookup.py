"""Prompt lookup: what followed the last n tokens before, follows again (A. Saxena, 2023; LLMA, arXiv:2304.04487).

    for n = max_ngram … 1:  if the text's last n tokens occur in it before, draft what followed them there

The text is the prompt and all that was emitted. Three rules choose the occurrence:

    hf         the leftmost; a continuation may end at the text's end (Transformers' prompt_lookup_num_tokens)
    original   the leftmost whose continuation has full length; else a shorter n (the author's code, Spec-Bench's)
    latest     the last one; a continuation may end at the text's end

Deviations and choices: the positions of every n-gram are stored, so that a lookup takes no search. Several continuations
(`matches`) are of one n and become a trie; all known code drafts one. A draft ends before a stop token, as in Transformers.
"""

from typing import Literal

import torch

from drafters.retrieval import Matching
from specbench.common.types import Depth, Length, Name, Width
from specbench.engine.interface import DraftTree, Sampler
from specbench.engine.tree import Trie


class PromptLookup(Matching):
    """Copies from the prompt and the answer so far.

    Args:
        rule: see above. max_ngram: longest n-gram that is looked up. length: tokens of a draft at most.
        matches: number of occurrences, in the rule's order (`hf`, `original`: from the left; `latest`: from the right).
    """

    def __init__(
        self,
        name: Name,
        rule: Literal["hf", "original", "latest"] = "hf",
        max_ngram: Length = 3,
        length: Depth = 10,
        matches: Width = 1,
    ):
        super().__init__(name, 1 + length * matches)
        self.rule, self.max_ngram, self.length, self.matches = rule, max_ngram, length, matches
        self.longest = max_ngram

    @property
    def generation(self) -> dict[str, int]:
        if self.rule != "hf" or self.matches > 1:
            return {}
        return {"prompt_lookup_num_tokens": self.length, "max_matching_ngram_size": self.max_ngram}

    def clear(self) -> None:
        self.text: list[int] = []
        self.continuations: dict[tuple[int, ...], list[int]] = {}  # n-gram -> indices of the tokens after it, ascending

    def read(self, tokens: list[int]) -> None:
        for token in tokens:
            self.text.append(token)
            end = len(self.text)
            for n in range(1, min(self.max_ngram, end) + 1):
                self.continuations.setdefault(tuple(self.text[end - n :]), []).append(end)

    def propose(self, root: int, sampler: Sampler, generator: torch.Generator | None) -> DraftTree:
        trie = Trie(root, self.nodes)
        for start in self.starts():
            trie.add(self.emittable(self.text[start : start + self.length]))
        return trie.tree(self.device)

    @property
    def matched(self) -> int:
        """The longest n of which the text's last n tokens occurred before, up to `max_ngram`."""
        end = len(self.text)
        return next(
            (n for n in range(min(self.max_ngram, end), 0, -1) if len(self.continuations[tuple(self.text[-n:])]) > 1), 0
        )

    def starts(self) -> list[int]:
        """Indices at which the continuations of the longest n-gram that has any begin."""
        end = len(self.text)
        for n in range(min(self.max_ngram, end - 1), 0, -1):
            known = self.continuations[tuple(self.text[end - n :])]
            count = min(len(known) - 1, self.matches)  # the last one is the text's end itself
            starts = known[-1 - count : -1][::-1] if self.rule == "latest" else known[:count]
            if self.rule == "original":
                starts = [s for s in starts if s + self.length <= end and s < end - n]
            if starts:
                return starts
        return []
