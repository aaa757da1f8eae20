"""Shards: token ids and target states of a corpus's conversations on disk, in safetensors files of whole sequences.

Knows the target and the corpus's text, no drafter: all drafters share the one pass of the target.

    shard-00007.safetensors    tokens [n] int32 | states [n, D] (optional) | answer [n] uint8 | starts [sequences + 1] |
                               index [sequences] of the conversations in the corpus
"""

import itertools
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
from specbench.data.corpus_file import Text
from specbench.engine.target import Target
from specbench.training.corpus import Writer
from specbench.training.precision import wide

VALIDATION = "validation"
READ_TOKENS = 4096  # of a pass that computes states


@dataclass(frozen=True)
class Sequence:
    """One conversation with the target's states."""

    index: int
    tokens: Tensor  # [T] int64
    answer: Tensor  # [T] bool: True on the assistant's tokens
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
            last = target.run(tokens, positions, None, None)  # causal, so no real token sees the padding
        return {i: last[row, : len(texts[i].tokens)].to("cpu", torch.bfloat16) for row, i in enumerate(part)}

    by_text = {i: last for done in _in_parallel(run, parts, target.device) for i, last in done.items()}
    sequences = []
    for i, text in enumerate(texts):
        answer = torch.zeros(len(text.tokens), dtype=torch.bool)
        for begin, end in text.spans:
            answer[begin:end] = True
        sequences.append(Sequence(text.index, torch.tensor(text.tokens), answer, by_text.get(i)))
    return sequences


def _in_parallel(run: Callable[[Any], Any], parts: Iterable[Any], device: torch.device) -> list[Any]:
    """The result of each part. On a processor each core runs whole passes, which is faster than all cores at one pass."""
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
    """Writes the shards that are missing or lack newer text, each atomically, so that a killed run continues."""

    def __init__(self, text: Writer):
        self.text, self.settings, self.target, self.folder = text, text.settings, text.target, text.folder

    @property
    def bytes_per_token(self) -> int:
        return 5 + (2 * self.target.hidden_size if self.settings.states else 0)  # states in bfloat16

    def tokens(self) -> tuple[int, int]:
        """Training tokens of the text to be used, and tokens whose shards are missing or lack newer text."""
        used, unread = 0, 0
        for name, texts in self._by_name().items():
            tokens = sum(len(t.tokens) for t in texts)
            used += tokens * (name != VALIDATION)
            unread += tokens * (not self._is_complete(self.folder / f"{name}.safetensors", texts))
        return used, unread

    def build(self, process: int = 0, processes: int = 1, held_out: bool = False) -> Path:
        """Write what is missing; returns the folder. Of several processes each writes its own shards.

        held_out: only the shard of the validation dialogues.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        shards = {name: texts for name, texts in self._by_name().items() if name == VALIDATION or not held_out}
        own = {self.folder / f"{name}.safetensors": shards[name] for name in list(shards)[process::processes]}
        missing = {path: texts for path, texts in own.items() if not self._is_complete(path, texts)}
        total, left = (sum(len(t.tokens) for texts in some.values() for t in texts) for some in (own, missing))
        with progress("states", total, "tokens") as show:
            show(total - left)
            for path, texts in missing.items():
                save_shard(path, read(self.target, texts, self.settings.states, self.settings.reading))
                left -= sum(len(t.tokens) for t in texts)
                show(total - left)
        return self.folder

    def _by_name(self) -> dict[str, list[Text]]:
        """Shards and their texts, held-out first: of the written text as many shards as hold the tokens asked for."""
        shards: dict[str, list[Text]] = {}
        tokens = 0
        for number, texts in itertools.groupby(self.text.texts(), self._number):
            if number < 0:
                shards[VALIDATION] = list(texts)
            elif tokens < self.text.token_limit:
                name = f"shard-{number:05d}"
                shards[name] = list(texts)
                tokens += sum(len(t.tokens) for t in shards[name])
        return shards

    def _number(self, text: Text) -> int:
        return max(-1, (text.index - self.settings.validation) // self.settings.shard)

    def _is_complete(self, path: Path, texts: list[Text]) -> bool:
        """Does this shard hold these texts, with states if the settings ask for them?"""
        if not path.exists():
            return False
        shard = read_shard(path)
        return shard.index == [t.index for t in texts] and (shard.states is not None or not self.settings.states)


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
    """A shard's tensors, mapped from its file."""

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
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - safe_open is no dict
        starts: list[int] = tensors["starts"].tolist()
        lengths = {len(tensors[name]) for name in ("tokens", "answer", "states") if name in tensors}
        if starts[:1] != [0] or starts != sorted(starts) or lengths != {starts[-1]}:
            raise ValueError("its tensors are not of one length, or its sequences do not lie end to end")
        index = tensors["index"].tolist() if "index" in tensors else None
        return Shard(tensors["tokens"], tensors["answer"], tensors.get("states"), starts, index)
