"""Batches of token ids and target states, read from shards or computed by the frozen target.

Knows the target and the shards, no drafter. With states on disk ("stored") every drafter shares one pass of the target;
without them, or where a drafter reads layers that are not there, the target computes them per batch ("online").
"""

import hashlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from specbench.common.errors import SpecBenchError
from specbench.engine.interface import SIZE_STEP, Batch, Taps
from specbench.engine.target import Target
from specbench.training.precision import Reading, wide
from specbench.training.shards import VALIDATION, Shard, read_shard

Span = tuple[Path, int, int]  # a sequence: its shard, begin and end there
Row = list[Span]  # what lies end to end in one row of a batch


class CorpusReader:
    """Reads a corpus folder as batches in an order that depends on seed and epoch alone.

    Args:
        folder: of shards. online: the target that computes states (and tapped layers) per batch; None reads them.
        batch: rows a batch. answers_only: score only states that lead to an answer token.
        taps: layers read beside the last state: without `online` stored outputs of them.
        limit: use this many tokens' worth of shards at most.
        row_tokens: pack sequences end to end into rows of this many tokens (longer ones are cut off behind them); None
            gives each a row of its own, padded behind it.
        reading: in which `online` computes.

    Raises:
        SpecBenchError: no shards, or no states in them and no target to compute them.
    """

    def __init__(
        self,
        folder: Path,
        batch: int,
        answers_only: bool,
        seed: int,
        online: Target | None = None,
        taps: Taps | None = None,
        limit: int | None = None,
        row_tokens: int | None = None,
        reading: Reading = "target",
    ):
        self.batch, self.answers_only, self.seed, self.online = batch, answers_only, seed, online
        self.taps, self.row_tokens, self.reading = taps or Taps(), row_tokens, reading
        self.sequences: list[Span] = []
        self.shards: dict[Path, Shard] = {}
        self.tokens = 0
        for path in sorted(folder.glob("shard-*.safetensors")):
            if limit is not None and self.tokens >= limit:
                break
            shard = read_shard(path, () if online is not None else self.taps.hidden)
            if shard.states is None and online is None:
                raise SpecBenchError(f"{path} holds no states; build the corpus with states or train online")
            self.sequences += [(path, a, b) for a, b in itertools.pairwise(shard.starts) if b - a > 2]
            self.shards[path] = shard
            self.tokens += shard.starts[-1]
        if not self.sequences:
            raise SpecBenchError(
                f"no training shards in {folder}; write them (train.build=true), from conversations for which "
                "train.corpus.text_tokens is long enough"
            )

    def batches(self, epoch: int) -> list[list[Row]]:
        """This epoch's batches in random order: of packed rows, or of neighbours in length."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)

        def shuffled(items: list[Any]) -> list[Any]:
            return [items[i] for i in torch.randperm(len(items), generator=generator).tolist()]

        order, pool = shuffled(self.sequences), self.batch * 32
        batches: list[list[Row]] = []
        for at in range(0, len(order), pool):
            part = sorted(order[at : at + pool], key=lambda s: s[2] - s[1])
            rows = [[s] for s in part] if self.row_tokens is None else shuffled(packed(part, self.row_tokens))
            batches += [rows[i : i + self.batch] for i in range(0, len(rows), self.batch)]
        return shuffled(batches)

    def load(self, rows: list[Row], device: torch.device, dtype: torch.dtype) -> Batch:
        """Read one batch, padded on the right to a multiple of `SIZE_STEP`."""

        def join(read: Callable[[Shard, int, int], Tensor]) -> Tensor:
            """A part of each sequence, end to end in its row, padded with zeros."""
            parts = (torch.cat([read(self.shards[path], a, b) for path, a, b in row]) for row in rows)
            joined = pad_sequence(list(parts), batch_first=True)  # [B, T, ...]
            return pad(joined, (0, 0) * (joined.ndim - 2) + (0, -joined.shape[1] % SIZE_STEP)).to(device)

        batch = Batch(
            tokens=join(lambda shard, a, b: shard.tokens[a:b].long()),
            states=torch.empty(0),
            valid=join(lambda shard, a, b: torch.ones(b - a, dtype=torch.bool)),
            scored=join(lambda shard, a, b: self._scored(shard.answer[a:b].bool())),
        )
        if self.row_tokens is not None:
            batch.starts = _starts(rows, batch.tokens.shape[1]).to(device)
        if self.online is not None:
            self._compute_states(batch, self.online, dtype)
        else:
            batch.states = join(lambda shard, a, b: shard.states[a:b]).to(dtype)  # type: ignore[index]
            batch.hidden = {
                layer: join(lambda shard, a, b, layer=layer: shard.layers[layer][a:b]).to(dtype)  # type: ignore[misc]
                for layer in self.taps.hidden
            }
        return batch

    def _compute_states(self, batch: Batch, target: Target, dtype: torch.dtype) -> None:
        """Fill in the states and tapped layers of a batch."""
        with wide(self.reading, target.device):
            states, hidden, kv = target.tapped(batch.tokens, self.taps, batch.positions, batch.causal_mask())
        # autocast may have computed them in another precision
        batch.hidden = {layer: h.to(target.dtype) for layer, h in hidden.items()}
        batch.kv = {layer: (k.to(target.dtype), v.to(target.dtype)) for layer, (k, v) in kv.items()}
        batch.states = states.to(dtype)

    def _scored(self, answer: Tensor) -> Tensor:
        """All states of a sequence, or those that an answer token follows. [T] bool -> [T] bool"""
        return pad(answer[1:], (0, 1)) if self.answers_only else torch.ones_like(answer)

    def digest(self) -> dict[str, Any]:
        """What determines the batches: hash of the texts, and options."""
        texts = hashlib.sha256()
        for path in dict.fromkeys(path for path, _, _ in self.sequences):
            shard = self.shards[path]
            for tensor in (torch.tensor(shard.starts), shard.tokens, shard.answer):
                texts.update(tensor.numpy().tobytes())
        options = {"batch": self.batch, "row_tokens": self.row_tokens, "answers_only": self.answers_only, "seed": self.seed}
        return {"texts": texts.hexdigest(), **options, "online": self.online is not None}

    def frequent(self, count: int | None) -> Tensor:
        """The `count` most frequent ids of the corpus, most frequent first; None: all that occur."""
        counts = torch.zeros(0, dtype=torch.long)
        for path in {s[0] for s in self.sequences}:
            own = self.shards[path].tokens.long().bincount(minlength=counts.shape[0])
            counts = own + pad(counts, (0, own.shape[0] - counts.shape[0]))
        return counts.argsort(descending=True, stable=True)[: int((counts > 0).sum()) if count is None else count]


def _starts(rows: list[Row], width: int) -> Tensor:
    """Where each token's sequence begins in its row; padding is a sequence of its own. [B, width]"""
    starts = []
    for row in rows:
        lengths = [b - a for _, a, b in row]
        ends = torch.tensor([0, *lengths]).cumsum(0)
        starts.append(ends.repeat_interleave(torch.tensor([*lengths, width - sum(lengths)])))
    return torch.stack(starts)


def packed(sequences: list[Span], row_tokens: int) -> list[Row]:
    """Lay sequences end to end into rows of at most `row_tokens`: longest first, each into the first row it fits."""
    rows: list[Row] = []
    free: list[int] = []  # tokens, by row
    for path, a, b in sorted(sequences, key=lambda s: s[1] - s[2]):
        length = min(b - a, row_tokens)
        index = next((i for i, tokens in enumerate(free) if tokens >= length), len(rows))
        if index == len(rows):
            rows.append([])
            free.append(row_tokens)
        rows[index].append((path, a, a + length))
        free[index] -= length
    return rows


@dataclass(frozen=True)
class HeldOutAnswer:
    """A held-out greedy answer: ids of the dialogue up to its end, where it begins, and the states of all of it."""

    ids: list[int]
    begin: int
    states: Tensor | None = None  # [T, D]; None: not computed yet


def held_out(folder: Path, count: int, min_tokens: int = 16) -> list[HeldOutAnswer]:
    """One answer of at least `min_tokens` from each of the first `count` held-out dialogues that have any.

    Dialogue i gives its i-th answer (modulo their number), so that answers with a history are measured too.
    """
    answers: list[HeldOutAnswer] = []
    shard = read_shard(folder / f"{VALIDATION}.safetensors")
    for dialogue, (a, b) in enumerate(itertools.pairwise(shard.starts)):
        edges = pad(shard.answer[a:b].bool().int(), (1, 1)).diff()
        begins, ends = (edges == 1).nonzero()[:, 0].tolist(), (edges == -1).nonzero()[:, 0].tolist()
        usable = [(i, j) for i, j in zip(begins, ends, strict=True) if j - i >= min_tokens and i > 0]
        if not usable:
            continue
        begin, end = usable[dialogue % len(usable)]
        states = None if shard.states is None else shard.states[a : a + end]
        answers.append(HeldOutAnswer(shard.tokens[a : a + end].tolist(), begin, states))
        if len(answers) == count:
            break
    return answers
