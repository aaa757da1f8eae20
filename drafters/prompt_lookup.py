"""Prompt lookup: what followed the last n tokens before, follows again (A. Saxena, 2023; LLMA, arXiv:2304.04487).

    for n = max_ngram … 1:  if the text's last n tokens stand in it before, draft what followed them there

Text is the prompt and all that was emitted. Three rules say which occurrence counts:

    hf         the leftmost; a continuation may end at the text's end (Transformers' prompt_lookup_num_tokens)
    original   the leftmost whose continuation has full length; else a shorter n (the author's code, Spec-Bench's)
    latest     the last one; a continuation may end at the text's end

Deviations and choices: every n-gram's places are kept, so that a lookup takes no search. Several continuations (`matches`)
are of one n and become a trie; all known code drafts one. A draft ends before a stop token, as in Transformers.
"""

from typing import Literal

import torch

from drafters.retrieval import Matching
from specbench.common.types import Count, Name
from specbench.engine.interface import DraftTree, Sampler
from specbench.engine.tree import Trie


class PromptLookup(Matching):
    """Copies from the prompt and the answer so far.

    Args:
        rule: which occurrence counts, see above.
        max_ngram: longest n-gram that is looked for. length: tokens of a draft at most.
        matches: so many occurrences, in the rule's order (`hf`, `original`: from the left; `latest`: from the right).
    """

    def __init__(
        self,
        name: Name,
        rule: Literal["hf", "original", "latest"] = "hf",
        max_ngram: Count = 3,
        length: Count = 10,
        matches: Count = 1,
    ):
        super().__init__(name, 1 + length * matches)
        self.rule, self.max_ngram, self.length, self.matches = rule, max_ngram, length, matches

    @property
    def generation(self) -> dict[str, int]:
        """What makes Transformers' own `generate` draft the same; nothing where it cannot."""
        if self.rule != "hf" or self.matches > 1:
            return {}
        return {"prompt_lookup_num_tokens": self.length, "max_matching_ngram_size": self.max_ngram}

    def clear(self) -> None:
        self.text: list[int] = []
        self.places: dict[tuple[int, ...], list[int]] = {}  # n-gram -> where the text goes on behind it, ascending

    def read(self, tokens: list[int]) -> None:
        for token in tokens:
            self.text.append(token)
            end = len(self.text)
            for n in range(1, min(self.max_ngram, end) + 1):
                self.places.setdefault(tuple(self.text[end - n :]), []).append(end)

    def propose(self, root: int, sampler: Sampler, generator: torch.Generator | None) -> DraftTree:
        trie = Trie(root, self.nodes)
        for start in self.starts():
            trie.add(self.emittable(self.text[start : start + self.length]))
        return trie.tree(self.device)

    @property
    def matched(self) -> int:
        """Tokens of the text's end that stood there before, as far as n-grams are long."""
        end = len(self.text)
        return next((n for n in range(min(self.max_ngram, end), 0, -1) if len(self.places[tuple(self.text[-n:])]) > 1), 0)

    def starts(self) -> list[int]:
        """Where the continuations of the longest n-gram that has any begin."""
        end = len(self.text)
        for n in range(min(self.max_ngram, end - 1), 0, -1):
            found = self.places[tuple(self.text[end - n :])]
            before = len(found) - 1  # the last one is the text's end itself
            if self.rule == "latest":
                starts = found[max(0, before - self.matches) : before][::-1]
            else:
                starts = found[: min(before, self.matches)]
            if self.rule == "original":
                starts = [s for s in starts if s + self.length <= end and s < end - n]
            if starts:
                return starts
        return []
