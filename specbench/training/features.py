"""The feature source: shards of token ids and target states on disk, or the frozen target in the training loop.

Knows the target and the shards, no drafter. A corpus' text (`corpus`) lies in its folder as safetensors shards of whole
sequences end to end. With states on disk ("stored") every drafter shares one pass of the target; without them, or where
a drafter taps more than the last hidden state, the target computes them per batch ("online").

    shard-00007.safetensors    tokens [n] int32 | states [n, D] (optional) | answer [n] uint8 | starts [sequences + 1] |
                               index [sequences] which of the corpus' conversations they are
"""

import hashlib
import itertools
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from specbench.common.errors import SpecBenchError, refusing
from specbench.common.progress import progress
from specbench.common.storage import atomic_path
from specbench.engine.interface import Batch, Taps
from specbench.engine.target import Target
from specbench.training.corpus import Text, Writer
from specbench.training.precision import wide

VALIDATION = "validation"
READ_TOKENS = 4096  # of a pass that reads states

Span = tuple[Path, int, int]  # a sequence: its shard, begin and end there
Row = list[Span]  # what lies end to end in one row of a batch


@dataclass(frozen=True)
class Sequence:
    """One conversation as the target saw it."""

    index: int
    tokens: Tensor  # [T] int64
    answer: Tensor  # [T] bool: True on what the assistant said
    states: Tensor | None = None  # [T, D] post-norm


def read(target: Target, texts: list[Text], states: bool = True, precision: str = "target") -> list[Sequence]:
    """Texts with the target's states, in the given order; neighbours in length share a right-padded pass."""
    parts: list[list[int]] = []
    waiting = sorted(range(len(texts)), key=lambda i: len(texts[i].tokens))
    while waiting and states:
        rows = max(1, READ_TOKENS // len(texts[waiting[-1]].tokens))
        parts.append(waiting[-rows:])
        waiting = waiting[:-rows]

    @torch.no_grad()
    def run(part: list[int]) -> dict[int, Tensor]:
        longest = len(texts[part[-1]].tokens)
        padded = [texts[i].tokens + [0] * (longest - len(texts[i].tokens)) for i in part]
        tokens = torch.tensor(padded, device=target.device)
        positions = torch.arange(longest, device=target.device).expand_as(tokens)
        with wide(precision, target.device, target.hidden_size):
            last = target.run(tokens, positions, None, None)  # causal: padding on the right is seen by no real token
        return {i: last[row, : len(texts[i].tokens)].to("cpu", torch.bfloat16) for row, i in enumerate(part)}

    found = {i: last for read in _side_by_side(run, parts, target.device) for i, last in read.items()}
    sequences = []
    for i, text in enumerate(texts):
        answer = torch.zeros(len(text.tokens), dtype=torch.bool)
        for begin, end in text.spans:
            answer[begin:end] = True
        sequences.append(Sequence(text.index, torch.tensor(text.tokens), answer, found.get(i)))
    return sequences


def _side_by_side(run: Callable[[Any], Any], parts: Iterable[Any], device: torch.device) -> list[Any]:
    """What comes of each part. Of a processor's cores each takes whole passes: all at one pass wait a third of the time."""
    cores = torch.get_num_threads() if device.type == "cpu" else 1
    if cores == 1:
        return list(map(run, parts))
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(cores) as pool:
            return list(pool.map(run, parts))
    finally:
        torch.set_num_threads(cores)


class Shards:
    """Writes the shards that are missing or behind their text, each atomically: killed, it goes on at the one it was at."""

    def __init__(self, text: Writer):
        self.text, self.settings, self.target, self.folder = text, text.settings, text.target, text.folder

    @property
    def bytes_per_token(self) -> int:
        return 5 + (2 * self.target.hidden_size if self.settings.states else 0)  # states in bfloat16

    def tokens(self) -> tuple[int, int]:
        """Training tokens of the text to be used, and tokens whose shards are missing or behind their text."""
        used, unread = 0, 0
        for name, texts in self.chosen().items():
            tokens = sum(len(t.tokens) for t in texts)
            used += tokens * (name != VALIDATION)
            unread += tokens * (not self._there(self.folder / f"{name}.safetensors", texts))
        return used, unread

    def seconds_per_token(self) -> float:
        """Of a pass that reads states, tried on random tokens."""
        length = min(256, self.settings.text_tokens)
        tokens = torch.randint(self.target.vocab_size, (READ_TOKENS // length // 2 or 1, length), device=self.target.device)
        seconds = 0.0
        for _ in range(2):  # the first one warms up
            begin = time.perf_counter()
            with wide(self.settings.reading, self.target.device, self.target.hidden_size):
                states = self.target.run(tokens, torch.arange(length, device=tokens.device).expand_as(tokens), None, None)
            float(states.sum())  # waits for the device
            seconds = time.perf_counter() - begin
        return seconds / tokens.numel()

    def build(self, process: int = 0, processes: int = 1, held_out: bool = False) -> Path:
        """Write what is missing; returns the folder. Of several processes each writes its own shards.

        held_out: of the validation dialogues alone.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        shards = {name: texts for name, texts in self.chosen().items() if name == VALIDATION or not held_out}
        total, done = sum(len(t.tokens) for texts in shards.values() for t in texts), 0
        with progress("states", total, "tokens") as reached:
            for turn, (name, texts) in enumerate(shards.items()):
                path = self.folder / f"{name}.safetensors"
                if turn % processes == process and not self._there(path, texts):
                    save_shard(path, read(self.target, texts, self.settings.states, self.settings.reading))
                done += sum(len(t.tokens) for t in texts)
                reached(done)
        return self.folder

    def chosen(self) -> dict[str, list[Text]]:
        """Shards and their texts, held-out first: of the written text as many shards as hold the tokens asked for."""
        shards: dict[str, list[Text]] = {}
        tokens = 0
        for number, texts in itertools.groupby(self.text.texts(), self._number):
            if number < 0:
                shards[VALIDATION] = list(texts)
            elif tokens < self.text.wanted():
                name = f"shard-{number:05d}"
                shards[name] = list(texts)
                tokens += sum(len(t.tokens) for t in shards[name])
        return shards

    def _number(self, text: Text) -> int:
        return max(-1, (text.index - self.settings.validation) // self.settings.shard)

    def _there(self, path: Path, texts: list[Text]) -> bool:
        """Does this shard hold these texts, with states if they are wanted?"""
        if not path.exists():
            return False
        shard = read_shard(path)
        if shard.states is None and self.settings.states:
            return False
        return shard.index == [t.index for t in texts]


def save_shard(path: Path, sequences: list[Sequence]) -> None:
    """Lay sequences end to end in one safetensors file, atomically; states in bfloat16."""
    tensors = {
        "tokens": torch.cat([s.tokens for s in sequences]).int(),
        "answer": torch.cat([s.answer for s in sequences]).to(torch.uint8),
        "starts": torch.tensor([0, *(len(s.tokens) for s in sequences)]).cumsum(0),
        "index": torch.tensor([s.index for s in sequences]),
    }
    states = [s.states for s in sequences if s.states is not None]
    if len(states) == len(sequences):
        tensors["states"] = torch.cat(states).to(torch.bfloat16)
    with atomic_path(path) as temporary:
        save_file(tensors, temporary)


@dataclass(frozen=True)
class Shard:
    """A shard's tensors, mapped from its file: what is read once lies in memory as long as there is room."""

    tokens: Tensor  # [n] int32
    answer: Tensor  # [n] uint8
    states: Tensor | None  # [n, D] bfloat16
    starts: list[int]  # where its sequences begin, and the last one's end
    index: list[int] | None  # of their conversations; None: of an older format


def read_shard(path: Path) -> Shard:
    """Map a shard. Raises `SpecBenchError` for one that is not there or damaged."""
    if not path.is_file():
        raise SpecBenchError(f"{path} is not there; build the corpus (train.build=true)")
    with refusing(f"{path} is damaged; remove it, and it is made again"), safe_open(path, "pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - safe_open is no dict
        starts: list[int] = found["starts"].tolist()
        lengths = {len(found[name]) for name in ("tokens", "answer", "states") if name in found}
        if starts[:1] != [0] or starts != sorted(starts) or lengths != {starts[-1]}:
            raise ValueError("its tensors are not of one length, or its sequences do not lie end to end")
        index = found["index"].tolist() if "index" in found else None
        return Shard(found["tokens"], found["answer"], found.get("states"), starts, index)


class Corpus:
    """Reads a corpus folder as batches in an order that depends on seed and epoch alone.

    Args:
        folder: of shards. online: the target that computes states (and tapped layers) per batch; None reads them.
        batch: rows a batch. answers_only: score only states that lead to an answer token.
        row_tokens: pack sequences end to end into rows of this many tokens (longer ones are cut off behind them); None
            gives each a row of its own, padded behind it.
        taps: layers wanted beside the last state; needs `online`.
        limit: use this many tokens' worth of shards at most.
        reading: precision of what `online` computes, see `precision.wide`.

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
        reading: str = "target",
    ):
        self.batch, self.answers_only, self.seed, self.online = batch, answers_only, seed, online
        self.taps, self.row_tokens, self.reading = taps or Taps(), row_tokens, reading
        self.sequences: list[Span] = []
        self.shards: dict[Path, Shard] = {}
        self.tokens = 0
        for path in sorted(folder.glob("shard-*.safetensors")):
            if limit is not None and self.tokens >= limit:
                break
            shard = read_shard(path)
            if shard.states is None and online is None:
                raise SpecBenchError(f"{path} holds no states; build the corpus with states or train online")
            self.sequences += [(path, a, b) for a, b in itertools.pairwise(shard.starts) if b - a > 2]
            self.shards[path] = shard
            self.tokens += shard.starts[-1]
        if not self.sequences:
            raise SpecBenchError(f"no training shards in {folder}; let specbench.train build them first")

    def batches(self, epoch: int) -> list[list[Row]]:
        """This epoch's batches in random order: of packed rows, or of neighbours in length."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        order = torch.randperm(len(self.sequences), generator=generator).tolist()
        pool = self.batch * 32
        groups: list[list[Row]] = []
        for at in range(0, len(order), pool):
            part = sorted((self.sequences[i] for i in order[at : at + pool]), key=lambda s: s[2] - s[1])
            rows = [[s] for s in part]
            if self.row_tokens is not None:
                rows = packed(part, self.row_tokens)
                rows = [rows[i] for i in torch.randperm(len(rows), generator=generator).tolist()]
            groups += [rows[i : i + self.batch] for i in range(0, len(rows), self.batch)]
        return [groups[i] for i in torch.randperm(len(groups), generator=generator).tolist()]

    def load(self, rows: list[Row], device: torch.device, dtype: torch.dtype) -> Batch:
        """Read one batch and pad it on the right."""
        longest = max(sum(b - a for _, a, b in row) for row in rows)
        tokens = torch.zeros(len(rows), longest, dtype=torch.long)
        valid, scored = torch.zeros_like(tokens, dtype=torch.bool), torch.zeros_like(tokens, dtype=torch.bool)
        starts = torch.zeros_like(tokens)
        states: Tensor | None = None
        for number, row in enumerate(rows):
            at = 0
            for path, a, b in row:
                here = slice(at, at := at + b - a)
                shard = self.shards[path]
                tokens[number, here] = shard.tokens[a:b].long()
                valid[number, here] = True
                scored[number, here] = self._scored(shard.answer[a:b].bool())
                starts[number, here] = here.start
                if self.online is None and shard.states is not None:
                    if states is None:
                        states = shard.states.new_zeros(len(rows), longest, shard.states.shape[-1])
                    states[number, here] = shard.states[a:b]
            starts[number, at:] = at  # padding is a sequence of its own
        batch = Batch(tokens.to(device), torch.empty(0), valid.to(device), scored.to(device))
        if self.row_tokens is not None:
            batch.starts = starts.to(device)
        if self.online is None:
            assert states is not None
            batch.states = states.to(device, dtype)
        else:
            mask = None
            if batch.starts is not None:
                causal = torch.ones(longest, longest, dtype=torch.bool, device=device).tril()
                mask = batch.within(causal)[:, None]
            with wide(self.reading, self.online.device, self.online.hidden_size):
                read_states, hidden, kv = self.online.tapped(batch.tokens, self.taps, batch.positions, mask)
            own = self.online.dtype  # whatever the products were in
            batch.hidden = {layer: h.to(own) for layer, h in hidden.items()}
            batch.kv = {layer: (k.to(own), v.to(own)) for layer, (k, v) in kv.items()}
            batch.states = read_states.to(dtype)
        return batch

    def _scored(self, answer: Tensor) -> Tensor:
        """All states of a sequence, or those after which the assistant speaks. [T] bool -> [T] bool"""
        if not self.answers_only:
            return torch.ones_like(answer)
        return torch.cat([answer[1:], answer.new_zeros(1)])

    def digest(self) -> dict[str, Any]:
        """What shapes a training: the texts and how they are laid into batches."""
        texts = hashlib.sha256()
        for path in dict.fromkeys(path for path, _, _ in self.sequences):
            shard = self.shards[path]
            for tensor in (torch.tensor(shard.starts), shard.tokens, shard.answer):
                texts.update(tensor.numpy().tobytes())
        how = {"batch": self.batch, "row_tokens": self.row_tokens, "answers_only": self.answers_only, "seed": self.seed}
        return {"texts": texts.hexdigest(), **how, "online": self.online is not None}

    def frequent(self, count: int | None) -> Tensor:
        """The `count` most frequent ids of the corpus, most frequent first; None: all that occur."""
        counts = torch.zeros(0, dtype=torch.long)
        for path in {s[0] for s in self.sequences}:
            found = self.shards[path].tokens.long().bincount(minlength=counts.shape[0])
            counts = found + torch.nn.functional.pad(counts, (0, found.shape[0] - counts.shape[0]))
        return counts.argsort(descending=True, stable=True)[: int((counts > 0).sum()) if count is None else count]


def packed(sequences: list[Span], room: int) -> list[Row]:
    """Lay sequences end to end into rows of at most `room` tokens: longest first, each into the first row it fits."""
    rows: list[Row] = []
    left: list[int] = []
    for path, a, b in sorted(sequences, key=lambda s: s[1] - s[2]):
        length = min(b - a, room)
        place = next((i for i, free in enumerate(left) if free >= length), None)
        if place is None:
            rows.append([])
            left.append(room)
            place = len(rows) - 1
        rows[place].append((path, a, a + length))
        left[place] -= length
    return rows


@dataclass(frozen=True)
class Answer:
    """A held-out greedy answer: ids of the dialogue up to its end, where it begins, and the states of all of it."""

    ids: list[int]
    begin: int
    states: Tensor | None = None  # [T, D]; None: not known yet


def held_out(folder: Path, count: int, least: int = 16) -> list[Answer]:
    """The first `count` held-out dialogues with a usable answer; of dialogue i its i-th answer, going round.

    So second and third answers, with a history before them, are measured too, as they are in a benchmark of several turns.
    """
    found: list[Answer] = []
    shard = read_shard(folder / f"{VALIDATION}.safetensors")
    tokens, answer, states = shard.tokens.long(), shard.answer.bool(), shard.states
    for turn, (a, b) in enumerate(itertools.pairwise(shard.starts)):
        said = torch.cat([answer.new_zeros(1), answer[a:b], answer.new_zeros(1)]).int().diff()
        begins, ends = (said == 1).nonzero()[:, 0].tolist(), (said == -1).nonzero()[:, 0].tolist()
        usable = [(i, j) for i, j in zip(begins, ends, strict=True) if j - i >= least and i > 0]
        if not usable:
            continue
        begin, end = usable[turn % len(usable)]
        known = None if states is None else states[a : a + end]
        found.append(Answer(tokens[a : a + end].tolist(), begin, known))
        if len(found) == count:
            break
    return found
