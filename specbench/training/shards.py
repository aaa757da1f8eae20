"""Shards: token ids and target states of a corpus's conversations on disk, in safetensors files of whole sequences.

Knows the target and the corpus's text, no drafter: all drafters share the one pass of the target.

    shard-00007.safetensors    tokens [n] int32 | states [n, D] (optional) | answer [n] uint8 | starts [sequences + 1] |
                               index [sequences] of the conversations in the corpus
    layer-14/shard-00007.safetensors    states [n, D], outputs of layer 14, for drafters that read layers (optional)
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from specbench.common.errors import SpecBenchError, refusing
from specbench.common.progress import progress
from specbench.common.storage import atomic_path
from specbench.data.corpus_file import Dialogue
from specbench.engine.interface import Taps
from specbench.engine.target import Target
from specbench.training.corpus import CorpusText
from specbench.training.precision import Reading, wide

VALIDATION = "validation"
READ_TOKENS = 4096  # of a pass that computes states


@dataclass(frozen=True)
class Sequence:
    """One conversation with the target's states."""

    index: int
    tokens: Tensor  # [T] int64
    answer: Tensor  # [T] bool: True on the assistant's tokens
    states: Tensor | None = None  # [T, D] post-norm
    layers: Mapping[int, Tensor] = field(default_factory=dict)  # layer -> its output [T, D]


def read(
    target: Target, texts: list[Dialogue], states: bool = True, reading: Reading = "target", layers: tuple[int, ...] = ()
) -> list[Sequence]:
    """Texts with the target's states, in the given order; neighbours in length share a right-padded pass."""
    parts: list[list[int]] = []
    waiting = sorted(range(len(texts)), key=lambda i: len(texts[i].tokens))
    while waiting and (states or layers):
        rows = max(1, READ_TOKENS // len(texts[waiting[-1]].tokens))
        parts.append(waiting[-rows:])
        waiting = waiting[:-rows]

    @torch.no_grad()
    def run(part: list[int]) -> dict[int, list[Tensor]]:
        """By text the last states and those of the layers."""
        longest = len(texts[part[-1]].tokens)
        padded = [texts[i].tokens + [0] * (longest - len(texts[i].tokens)) for i in part]
        tokens = torch.tensor(padded, device=target.device)
        positions = torch.arange(longest, device=target.device).expand_as(tokens)
        with wide(reading, target.device):  # causal, so no real token sees the padding
            if layers:
                last, hidden, _ = target.tapped(tokens, Taps(hidden=layers), positions)
                found = [last, *(hidden[layer] for layer in layers)]
            else:
                found = [target.run(tokens, positions, None, None)]
        return {i: [x[row, : len(texts[i].tokens)].to("cpu", torch.bfloat16) for x in found] for row, i in enumerate(part)}

    # a target notes the layers of one pass at a time
    done = map(run, parts) if layers else _in_parallel(run, parts, target.device)
    by_text = {i: found for part in done for i, found in part.items()}
    sequences = []
    for i, text in enumerate(texts):
        answer = torch.zeros(len(text.tokens), dtype=torch.bool)
        for begin, end in text.spans:
            answer[begin:end] = True
        last, *hidden = by_text.get(i, (None,))
        named = dict(zip(layers, hidden, strict=True))
        sequences.append(Sequence(text.index, torch.tensor(text.tokens), answer, last if states else None, named))
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

    def __init__(self, text: CorpusText):
        self.text, self.settings, self.target, self.folder = text, text.settings, text.target, text.folder
        if beyond := [layer for layer in self.settings.layers if layer >= self.target.layers]:
            raise SpecBenchError(
                f"train.corpus.layers: there is no layer {beyond[0]}; the target has {self.target.layers}, from 0"
            )

    @property
    def bytes_per_token(self) -> int:
        return 5 + 2 * self.target.hidden_size * (self.settings.states + len(self.settings.layers))  # in bfloat16

    def tokens(self) -> tuple[int, int]:
        """Training tokens of the text to be used, and tokens whose shards are missing or lack newer text."""
        used, unread = 0, 0
        for name, texts in self._by_name().items():
            tokens = sum(len(t.tokens) for t in texts)
            used += tokens * (name != VALIDATION)
            unread += tokens * (not self._is_complete(self.folder / f"{name}.safetensors", texts))
        return used, unread

    def hold(self, layers: Collection[int]) -> bool:
        """Will the shards hold the outputs of these layers: as the settings ask for, or as an earlier job stored them?"""
        if {*layers} <= {*self.settings.layers}:
            return True
        if self.text.missing() or self.tokens()[1]:
            return False
        paths = [self.folder / f"{name}.safetensors" for name in self._by_name() if name != VALIDATION]
        return bool(paths) and all(layer_file(path, layer).is_file() for path in paths for layer in layers)

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
                settings, layers = self.settings, self._layers_of(path)
                sequences = read(self.target, texts, settings.states, self.text.reading, layers)
                save_layers(path, sequences)
                if not self._has_states(path, texts):  # what trainings have read stays as it is
                    save_shard(path, sequences)
                left -= sum(len(t.tokens) for t in texts)
                show(total - left)
        return self.folder

    def _by_name(self) -> dict[str, list[Dialogue]]:
        """Shards and their texts, held-out first: of the written text as many shards as hold the tokens asked for."""
        shards: dict[str, list[Dialogue]] = {}
        tokens = 0
        for number, texts in itertools.groupby(self.text.texts(), self._number):
            if number < 0:
                shards[VALIDATION] = list(texts)
            elif tokens < self.text.token_limit:
                name = f"shard-{number:05d}"
                shards[name] = list(texts)
                tokens += sum(len(t.tokens) for t in shards[name])
        return shards

    def _number(self, text: Dialogue) -> int:
        return max(-1, (text.index - self.settings.validation) // self.settings.shard)

    def _is_complete(self, path: Path, texts: list[Dialogue]) -> bool:
        """Does this shard hold these texts, with the states and layers that the settings ask for?"""
        tokens = sum(len(t.tokens) for t in texts)
        layers = [layer_file(path, layer) for layer in self._layers_of(path)]
        return self._has_states(path, texts) and all(file.is_file() and len(_read_layer(file)) == tokens for file in layers)

    def _has_states(self, path: Path, texts: list[Dialogue]) -> bool:
        """The same without layers."""
        if not path.exists():
            return False
        shard = read_shard(path)
        return shard.index == [t.index for t in texts] and (shard.states is not None or not self.settings.states)

    def _layers_of(self, path: Path) -> tuple[int, ...]:
        """The layers whose outputs are stored beside a shard: of held-out dialogues the target computes them."""
        return () if path.stem == VALIDATION else self.settings.layers


def layer_file(shard: Path, layer: int) -> Path:
    """The file with a layer's outputs beside a shard."""
    return shard.parent / f"layer-{layer}" / shard.name


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


def save_layers(path: Path, sequences: list[Sequence]) -> None:
    """The same of the outputs of layers, each in a file beside that of a shard."""
    for layer in sequences[0].layers:
        layer_file(path, layer).parent.mkdir(exist_ok=True)
        with atomic_path(layer_file(path, layer)) as temporary:
            save_file({"states": torch.cat([s.layers[layer] for s in sequences]).to(torch.bfloat16)}, temporary)


@dataclass(frozen=True)
class Shard:
    """A shard's tensors, mapped from its file."""

    tokens: Tensor  # [n] int32
    answer: Tensor  # [n] uint8
    states: Tensor | None  # [n, D] bfloat16
    starts: list[int]  # where its sequences begin, and the last one's end
    index: list[int]  # of their conversations in the corpus
    layers: Mapping[int, Tensor]  # layer -> its outputs [n, D] bfloat16


def read_shard(path: Path, layers: tuple[int, ...] = ()) -> Shard:
    """Map a shard and these layers of it. Raises `SpecBenchError` for one that is not there or damaged."""
    with _mapped(path) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - safe_open is no dict
        starts: list[int] = tensors["starts"].tolist()
        hidden = {layer: _read_layer(layer_file(path, layer)) for layer in layers}
        lengths = {len(tensors[name]) for name in ("tokens", "answer", "states") if name in tensors}
        if starts[:1] != [0] or starts != sorted(starts) or lengths != {starts[-1]}:
            raise ValueError("its tensors are not of one length, or its sequences do not lie end to end")
        if any(len(states) != starts[-1] for states in hidden.values()):
            raise ValueError("its stored layers are of other texts")
        index: list[int] = tensors["index"].tolist()
        return Shard(tensors["tokens"], tensors["answer"], tensors.get("states"), starts, index, hidden)


def _read_layer(path: Path) -> Tensor:
    """Map a layer's outputs [n, D]."""
    with _mapped(path) as file:
        states: Tensor = file.get_tensor("states")
        return states


@contextmanager
def _mapped(path: Path) -> Iterator[Any]:
    """An open safetensors file. Raises `SpecBenchError` for one that is not there or damaged."""
    if not path.is_file():
        raise SpecBenchError(f"{path} is not there; build the corpus (train.build=true)")
    with refusing(f"{path} is damaged; remove it, and it is made again"), safe_open(path, "pt") as file:
        yield file
