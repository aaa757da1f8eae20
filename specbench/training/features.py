"""The feature source: shards of token ids and target states on disk, or the frozen target in the training loop.

Knows the target and the shards, no drafter. A *corpus* is a folder of safetensors shards; each holds whole sequences
laid end to end. With states on disk ("stored") every drafter shares one pass of the target; without them, or where a
drafter taps more than the last hidden state, the target computes them per batch ("online").

    shard-00007.safetensors    tokens [n] int32 | states [n, D] (optional) | answer [n] uint8 | starts [sequences + 1]
"""

import hashlib
import itertools
import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from specbench.assets import atomic_path
from specbench.datasets import Chat, Message
from specbench.engine.interface import Batch, Taps
from specbench.engine.sampling import Sampler
from specbench.engine.target import Target
from specbench.errors import SpecBenchError
from specbench.progress import progress
from specbench.training.sequences import Sequence, read, write

VALIDATION = "validation"


@dataclass(frozen=True)
class CorpusSettings:
    """What a corpus is made of; its hash names the folder, so that no other corpus is ever mistaken for it.

    Attributes:
        source: `answers` (the target's own answers to the prompts) or `text` (the conversations as they are).
        states: store the target's states beside the tokens.
        tokens: stop once this many are there; None for all conversations.
        prompt_tokens: longest prompt used (`answers`).
        answer_tokens: longest answer written (`answers`).
        text_tokens: longest sequence (`text`), cut off behind it.
        temperatures: shard i is written at temperature i modulo their number; 0 is greedy.
        shard: sequences a shard, and the batch in which they are written.
        validation: conversations set aside before anything else.
        seed: of their order and of sampling.
        system: system prompt; must be the benchmark's.
    """

    source: str = "answers"
    states: bool = True
    tokens: int | None = None
    prompt_tokens: int = 256
    answer_tokens: int = 160
    text_tokens: int = 512
    temperatures: tuple[float, ...] = (0.0, 0.0, 0.7)
    shard: int = 96
    validation: int = 96
    seed: int = 0
    system: str | None = None

    def __post_init__(self) -> None:
        if self.source not in ("answers", "text"):
            raise SpecBenchError(f"train.corpus.source={self.source}: use answers or text")
        object.__setattr__(self, "temperatures", tuple(self.temperatures))  # a configuration brings a list

    def folder(self, root: Path, fingerprint: str) -> Path:
        # `tokens` only says how far to go: more of the same corpus goes into the same folder
        settings = {k: v for k, v in asdict(self).items() if k != "tokens"}
        digest = hashlib.sha256(json.dumps([fingerprint, settings], sort_keys=True).encode()).hexdigest()
        return root / f"{self.source}-{digest[:12]}"


class CorpusBuilder:
    """Writes the shards that are missing, each atomically: killed, it goes on at the shard it was at."""

    def __init__(self, settings: CorpusSettings, target: Target, chat: Chat, chats: list[list[Message]], root: Path):
        self.settings, self.target = settings, target
        self.folder = settings.folder(root, target.fingerprint())
        self.items = _dedupe(self._tokenise(chat, chats))
        order = torch.randperm(len(self.items), generator=torch.Generator().manual_seed(settings.seed)).tolist()
        shuffled = [self.items[i] for i in order]
        held_out, rest = shuffled[: settings.validation], shuffled[settings.validation :]
        if not rest:
            raise SpecBenchError(f"{len(shuffled)} usable conversations are too few for a corpus")
        self.shards = {VALIDATION: held_out}
        pool = settings.shard * 8  # neighbours in length share a shard, which wastes less padding
        for start in range(0, len(rest), pool):
            ordered = sorted(rest[start : start + pool], key=lambda item: len(item[0]))
            for at in range(0, len(ordered), settings.shard):
                self.shards[f"shard-{len(self.shards) - 1:05d}"] = ordered[at : at + settings.shard]

    def estimate(self) -> int:
        """At most how many tokens the whole corpus has."""
        answer = self.settings.answer_tokens if self.settings.source == "answers" else 0
        tokens = sum(len(item[0]) + answer for items in self.shards.values() for item in items)
        return min(tokens, self.settings.tokens or tokens)

    @property
    def bytes_per_token(self) -> int:
        return 5 + (2 * self.target.hidden_size if self.settings.states else 0)  # states in bfloat16

    def longest(self) -> int:
        """Tokens of the longest sequence there can be."""
        answer = self.settings.answer_tokens if self.settings.source == "answers" else 0
        return max(len(item[0]) for items in self.shards.values() for item in items) + answer

    def written(self) -> int:
        """Training tokens on disk."""
        return sum(_count(path) for path in self.folder.glob("shard-*.safetensors"))

    def seconds_per_token(self) -> float:
        """Of the pass that makes the corpus, tried on random tokens: one step of a shard's answers, or eight texts."""
        writing = self.settings.source == "answers"
        rows, length = (self.settings.shard, 1) if writing else (8, min(256, self.settings.text_tokens))
        tokens = torch.randint(self.target.vocab_size, (rows, length), device=self.target.device)
        seconds = 0.0
        for _ in range(2):  # the first one warms up
            begin = time.perf_counter()
            states = self.target.run(tokens, torch.arange(length, device=tokens.device).expand_as(tokens), None, None)
            float((self.target.logits(states[:, -1]) if writing else states).sum())  # waits for the device
            seconds = time.perf_counter() - begin
        return seconds / tokens.numel()

    def build(self, process: int = 0, processes: int = 1) -> Path:
        """Write what is missing up to `tokens`; returns the folder. Of several processes each writes its own shards."""
        self.folder.mkdir(parents=True, exist_ok=True)
        tokens = self.estimate()
        if process == 0:
            (self.folder / "settings.json").write_text(json.dumps(asdict(self.settings), indent=1))
        paths = {name: self.folder / f"{name}.safetensors" for name in self.shards}
        done = self.written()
        with progress(self.settings.source, tokens, "tokens") as reached:
            reached(min(done, tokens))
            for index, (name, items) in enumerate(self.shards.items()):
                if index % processes != process or paths[name].exists():
                    continue
                if name != VALIDATION and done >= (self.settings.tokens or math.inf):
                    break
                self._write(paths[name], index, items)
                done = self.written()  # by all
                reached(min(done, tokens))
        return self.folder

    def _tokenise(self, chat: Chat, chats: list[list[Message]]) -> list[tuple[list[int], list[bool]]]:
        """Prompts (`answers`), or conversations with the assistant's share marked (`text`)."""
        if self.settings.source == "answers":
            prompts = (chat.encode(c[:1]) for c in chats if len(c[0]["content"]) < 12 * self.settings.prompt_tokens)
            return [(p, [False] * len(p)) for p in prompts if len(p) <= self.settings.prompt_tokens]
        items = []
        for messages in chats:
            tokens: list[int] = []
            answer: list[bool] = []
            for end in range(2, len(messages) + 1, 2):  # encode turn by turn to know what the assistant said
                before, whole = chat.encode(messages[: end - 1]), chat.encode(messages[:end], answer_follows=False)
                answer += [False] * (len(before) - len(answer)) + [True] * (len(whole) - len(before))
                tokens = whole
                if len(tokens) >= self.settings.text_tokens:
                    break
            if tokens and len(tokens) == len(answer):
                items.append((tokens[: self.settings.text_tokens], answer[: self.settings.text_tokens]))
        return items

    def _write(self, path: Path, index: int, items: list[tuple[list[int], list[bool]]]) -> None:
        settings = self.settings
        if settings.source == "answers":
            heat = 0.0 if path.stem == VALIDATION else settings.temperatures[index % len(settings.temperatures)]
            generator = torch.Generator(self.target.device).manual_seed(settings.seed * 1_000_003 + index)
            sequences = write(self.target, [i[0] for i in items], settings.answer_tokens, Sampler(heat), generator)
        else:
            sequences = []
            for at in range(0, len(items), 8):
                part = items[at : at + 8]
                sequences += read(self.target, [i[0] for i in part], [i[1] for i in part])
        save_shard(path, sequences, settings.states)


def save_shard(path: Path, sequences: list[Sequence], states: bool) -> None:
    """Lay sequences end to end in one safetensors file, atomically; states in bfloat16."""
    starts = torch.tensor([0, *(len(s.tokens) for s in sequences)]).cumsum(0)
    tensors = {
        "tokens": torch.cat([s.tokens for s in sequences]).int(),
        "answer": torch.cat([s.answer for s in sequences]).to(torch.uint8),
        "starts": starts,
    }
    if states:
        tensors["states"] = torch.cat([s.states for s in sequences]).to(torch.bfloat16)
    with atomic_path(path) as temporary:
        save_file(tensors, temporary)


def _count(path: Path) -> int:
    with safe_open(path, "pt") as shard:
        return shard.get_slice("tokens").get_shape()[0]


def _dedupe(items: list[tuple[list[int], list[bool]]]) -> list[tuple[list[int], list[bool]]]:
    return list({tuple(tokens): (tokens, answer) for tokens, answer in items}.values())


class Corpus:
    """Reads a corpus folder as batches in an order that depends on seed and epoch alone.

    Args:
        folder: of shards. online: the target that computes states (and tapped layers) per batch; None reads them.
        batch: sequences a batch. answers_only: score only states that lead to an answer token.
        taps: layers wanted beside the last state; needs `online`.
        limit: use this many tokens' worth of shards at most.

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
    ):
        self.batch, self.answers_only, self.seed, self.online = batch, answers_only, seed, online
        self.taps = taps or Taps()
        self.sequences: list[tuple[Path, int, int]] = []
        self.shards: list[str] = []
        self.tokens = 0
        for path in sorted(folder.glob("shard-*.safetensors")):
            if limit is not None and self.tokens >= limit:
                break
            with safe_open(path, "pt") as shard:
                if "states" not in shard.keys() and online is None:  # noqa: SIM118 - safe_open is no dict
                    raise SpecBenchError(f"{path} holds no states; build the corpus with states or train online")
                starts = shard.get_tensor("starts").tolist()
            self.sequences += [(path, a, b) for a, b in itertools.pairwise(starts) if b - a > 2]
            self.shards.append(path.name)
            self.tokens += starts[-1]
        if not self.sequences:
            raise SpecBenchError(f"no training shards in {folder}; let specbench.train build them first")

    def batches(self, epoch: int) -> list[list[tuple[Path, int, int]]]:
        """This epoch's batches: neighbours in length together, batches in random order."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        order = torch.randperm(len(self.sequences), generator=generator).tolist()
        pool = self.batch * 32
        groups = []
        for at in range(0, len(order), pool):
            part = sorted((self.sequences[i] for i in order[at : at + pool]), key=lambda s: s[2] - s[1])
            groups += [part[i : i + self.batch] for i in range(0, len(part), self.batch)]
        return [groups[i] for i in torch.randperm(len(groups), generator=generator).tolist()]

    def load(self, items: list[tuple[Path, int, int]], device: torch.device, dtype: torch.dtype) -> Batch:
        """Read one batch and pad it on the right."""
        longest = max(b - a for _, a, b in items)
        tokens = torch.zeros(len(items), longest, dtype=torch.long)
        answer = torch.zeros(len(items), longest, dtype=torch.bool)
        valid = torch.zeros(len(items), longest, dtype=torch.bool)
        states: Tensor | None = None
        for row, (path, a, b) in enumerate(items):
            with safe_open(path, "pt") as shard:
                tokens[row, : b - a] = shard.get_slice("tokens")[a:b].long()
                answer[row, : b - a] = shard.get_slice("answer")[a:b].bool()
                valid[row, : b - a] = True
                if self.online is None:
                    part = shard.get_slice("states")[a:b]
                    if states is None:
                        states = torch.zeros(len(items), longest, part.shape[-1], dtype=part.dtype)
                    states[row, : b - a] = part
        scored = valid.clone()
        if self.answers_only:  # a state counts if the token after it is the assistant's
            scored[:, :-1] &= answer[:, 1:]
        tokens, valid, scored = tokens.to(device), valid.to(device), scored.to(device)
        if self.online is None:
            assert states is not None
            return Batch(tokens, states.to(device, dtype), valid, scored)
        read_states, hidden, kv = self.online.tapped(tokens, self.taps)
        return Batch(tokens, read_states.to(dtype), valid, scored, hidden=hidden, kv=kv)

    def frequent(self, count: int) -> Tensor:
        """The `count` most frequent ids of the corpus, most frequent first."""
        counts = torch.zeros(0, dtype=torch.long)
        for path in {s[0] for s in self.sequences}:
            with safe_open(path, "pt") as shard:
                found = shard.get_tensor("tokens").long().bincount(minlength=counts.shape[0])
            counts = found + torch.nn.functional.pad(counts, (0, found.shape[0] - counts.shape[0]))
        return counts.argsort(descending=True, stable=True)[:count]


def held_out(folder: Path, count: int) -> list[tuple[list[int], int]]:
    """Validation sequences as (ids, index of the first answer token), the first `count` with a usable answer."""
    found = []
    with safe_open(folder / f"{VALIDATION}.safetensors", "pt") as shard:
        tokens, answer = shard.get_tensor("tokens"), shard.get_tensor("answer").bool()
        starts = shard.get_tensor("starts").tolist()
    for a, b in itertools.pairwise(starts):
        begin = int((~answer[a:b]).sum())
        if b - a - begin >= 16 and bool(answer[a + begin : b].all()):
            found.append((tokens[a:b].tolist(), begin))
    spread = max(1, len(found) // count)
    return found[::spread][:count]
