"""REST: what followed the text's end in a datastore follows again (arXiv:2311.08252).

The datastore is a text D of many token ids with its suffix array, the positions of D sorted by the ids that begin there.
All positions that begin with a string w lie side by side in it, and are found by bisection. With w the longest end of
prompt and answer, of `context` down to 2 tokens, that occurs in D,

    C(u) = number of retrieved occurrences of w that u follows,    |u| <= length

is counted for all prefixes u of the retrieved continuations, and the `nodes` prefixes with the largest C are drafted as a
trie. No prefix has a larger count than its parent, so that the choice is closed. If no such w occurs, nothing is drafted.

Here D is the corpus that trained drafters learn from, packed beside their weights: the target's own answers with their
questions, and no held-out dialogue. Its suffix array is made once and kept in the project's cache:

    tokens, order    [n] int32 each, n = tokens and one `END` a dialogue

6.7 M tokens of the default target take about 15 seconds on two cores, and 54 MB.

Deviations and choices: the authors take the first `matches` occurrences in the order of the suffix array, whose
continuations begin with the smallest ids, here they are taken at equal distances in it; their tree is cut to about 64
nodes, here the largest counts are taken exactly, of equal ones the shorter prefix; dialogues are stored whole, with the
chat format, and drafts end with a dialogue, or before a stop token (theirs run into the next text). Positions are sorted
by as many ids as a match and its continuation have, at least, not by all. No end is shorter than 2 tokens (their code).
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from drafters.retrieval import Retriever
from specbench.common.errors import SpecBenchError
from specbench.common.storage import cached, project_path
from specbench.common.types import Count, Depth, DraftNodes, Length, Name, Text
from specbench.data import corpus_file
from specbench.engine.interface import DraftTree, Sampler
from specbench.engine.tensors import read_tensors
from specbench.engine.tree import Trie

END = torch.iinfo(torch.int32).max  # ends a dialogue; no id
SHORTEST = 2  # tokens that are looked up


class Datastore:
    """A text of ids and its suffix array.

    Args:
        tokens: [n] int32, `END` last. order: [n] int32 positions, as `suffix_order` sorts them.
    """

    def __init__(self, tokens: Tensor, order: Tensor):
        self.tokens, self.order = tokens.numpy(), order.numpy()
        self.bytes = _bytes(self.tokens)

    def __deepcopy__(self, memo: Any) -> "Datastore":
        return self  # immutable, and large

    def find(self, string: Sequence[int]) -> range:
        """Where in the suffix array the occurrences of a string lie; empty without one."""
        wanted = _bytes(np.array(string))

        def read(position: np.int32) -> bytes:
            return self.bytes[4 * int(position) : 4 * int(position) + len(wanted)]

        first = bisect_left(self.order, wanted, key=read)
        if first == len(self.order) or read(self.order[first]) != wanted:
            return range(0)
        return range(first, bisect_right(self.order, wanted, lo=first, key=read))

    def longest(self, text: Sequence[int]) -> tuple[range, int]:
        """Occurrences and length of the text's longest end that occurs. By bisection: its own ends occur, too."""
        found, low, high = range(0), 0, len(text)
        while low < high:
            middle = (low + high + 1) // 2
            if here := self.find(text[-middle:]):
                found, low = here, middle
            else:
                high = middle - 1
        return found, low

    def following(self, occurrences: range, skip: int, length: int) -> np.ndarray:
        """The ids behind the first `skip` of some occurrences, sorted; those behind an `END` mean nothing. [m, length]"""
        places = self.order[np.array(occurrences)][:, None] + np.arange(skip, skip + length)
        return self.tokens[places.clip(max=len(self.tokens) - 1)]


def _bytes(ids: np.ndarray) -> bytes:
    """Four bytes an id, whose order as texts is that of the ids."""
    return ids.astype(">u4").tobytes()


def suffix_order(tokens: Tensor, length: int) -> Tensor:
    """The positions of a text sorted by the `length` ids, or more, that begin there. [n] -> [n] int32

    Prefix doubling (Manber and Myers, 1990): the rank by 2 w ids is that of the pair of ranks by w ids, here and w ids on.
    """
    rank, width = tokens.unique(return_inverse=True)[1] + 1, 1  # [n]; 0 is the rank of what lies behind the text
    order = rank.argsort()
    while width < length:
        pairs = rank * (len(tokens) + 1)
        pairs[:-width] += rank[width:]
        pairs, order = pairs.sort()
        rank[order] = torch.cat([pairs.new_ones(1), (pairs[1:] != pairs[:-1]).long()]).cumsum(0)
        width *= 2
    return order.int()


def most_frequent(rows: np.ndarray, ends: Sequence[int], count: int) -> list[list[int]]:
    """The `count` most frequent prefixes of some sequences, none of which holds one of `ends`; every one behind its parent.

    rows: [m, length], sorted, m > 0.
    """
    begins = np.ones(rows.shape, bool)  # does another prefix of this length begin in this row?
    np.logical_or.accumulate(rows[1:] != rows[:-1], axis=1, out=begins[1:])
    depths, first = begins.T.nonzero()  # of every prefix, the shortest ones first
    times = np.append(first[1:], 0) - first
    times[times <= 0] += len(rows)  # the last prefix of its length: the next one's first row is 0
    open_ended = ~np.logical_or.accumulate(np.isin(rows, ends), axis=1)[first, depths]
    chosen = open_ended.nonzero()[0]
    chosen = chosen[np.argsort(-times[chosen], kind="stable")[:count]]
    return [rows[row, : depth + 1].tolist() for row, depth in zip(first[chosen], depths[chosen], strict=True)]


class Rest(Retriever):
    """Drafts the most frequent continuations, in a datastore, of the text's end.

    Args:
        corpus: folder of the packed corpus; None: an empty datastore (tests).
        nodes: draft nodes at most. length: tokens of a path at most. context: longest end of the text that is looked up.
        matches: occurrences that are retrieved at most.
    """

    store: Datastore

    def __init__(
        self,
        name: Name,
        corpus: Text | None = None,
        nodes: DraftNodes = 64,
        length: Depth = 10,
        context: Length = 16,
        matches: Count = 5000,
    ):
        super().__init__(name, 1 + nodes)
        self.corpus, self.length, self.context, self.matches = corpus, length, context, matches

    def bind(self, target: Any) -> None:
        super().bind(target)
        self.ends = [*self.stop_ids, END]
        if self.corpus is None:
            nothing = torch.full((1,), END, dtype=torch.int32)
            self.store = Datastore(nothing, suffix_order(nothing, 1))
        else:
            self.store = self._load(project_path(self.corpus), target)

    def _load(self, folder: Path, target: Any) -> Datastore:
        """A packed corpus's datastore, from the cache. Raises `SpecBenchError` if that is missing or another target's."""
        path, header = folder / corpus_file.PACKED, corpus_file.read_header(folder)
        if header is None or not path.is_file():
            raise SpecBenchError(
                f"drafter={self.name}: no corpus at {path}; write one (python -m specbench.train train.until=corpus "
                "train.pack=LICENCE) or point drafter.corpus at a folder that has one"
            )
        fingerprint = target.fingerprint()
        if header.get("target_fingerprint") != fingerprint:
            raise SpecBenchError(
                f"drafter={self.name}: the corpus in {folder} holds ids of another target "
                f"({header.get('target_fingerprint')}), not of this one ({fingerprint}); choose another drafter.corpus"
            )
        size = 1 << (self.context + self.length - 1).bit_length()
        name = f"datastores/{header['corpus']}-{header['sha256'][:16]}-{fingerprint}-{size}.safetensors"
        file = cached(name, partial(write, folder, header, size))
        self.contents[path.name] = header["sha256"]
        self.provenance = {"corpus": header["corpus"], "sha256": header["sha256"]}
        tensors = read_tensors(file, hint := "remove it")
        if tensors.keys() != {"tokens", "order"} or len(tensors["tokens"]) != len(tensors["order"]):
            raise SpecBenchError(f"{file} is no datastore; {hint}")
        return Datastore(**tensors)

    def clear(self) -> None:
        self.text: list[int] = []  # its last `context` tokens

    def read(self, tokens: list[int]) -> None:
        self.text = [*self.text, *tokens][-self.context :]

    def propose(self, root: int, sampler: Sampler, generator: torch.Generator | None) -> DraftTree:
        trie = Trie(root, self.nodes)
        found, matched = self.store.longest(self.text)
        if matched >= SHORTEST:
            retrieved = found[:: -(-len(found) // self.matches)]
            rows = self.store.following(retrieved, matched, self.length)
            for prefix in most_frequent(rows, self.ends, self.nodes - 1):
                trie.add(prefix)
        return trie.tree(self.device)


def write(folder: Path, header: corpus_file.PackedHeader, size: int, path: Path) -> None:
    """Write the datastore of a packed corpus without its held-out dialogues, sorted by `size` ids."""
    held_out = header.get("settings", {}).get("validation", 0)
    texts = corpus_file.unpack(folder / corpus_file.PACKED, header["sha256"])
    ids = [i for text in texts if text.index >= held_out for i in (*text.tokens, END)]
    tokens = torch.tensor(ids or [END], dtype=torch.int32)
    save_file({"tokens": tokens, "order": suffix_order(tokens, size)}, path)
