"""What drafters learn from, as token ids: conversations as they are, or the target's own answers to their questions.

Knows tokenised text and the target, no states (see `shards`), no drafter. A corpus is a folder, named after its settings:

    settings.json      the settings
    answers-0.jsonl    {"index", "tokens", "spans"} a line, written as dialogues end, so that a killed run continues

A finished corpus of answers can be packed into one compressed file of ids, from which states are computed anew.
"""

import json
import math
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from specbench.common import hashing
from specbench.common.errors import SpecBenchError
from specbench.common.io import read_json
from specbench.common.progress import progress
from specbench.common.storage import atomic_path, write_file
from specbench.common.types import Count, Few, Rows, Seed, Temperature, Times, Tokens
from specbench.data import corpus_file
from specbench.data.chat import Chat, Message
from specbench.data.corpus_file import Dialogue
from specbench.engine.target import Target
from specbench.training.answer_writer import Lengths, Precision, Prompt, fastest, write
from specbench.training.precision import Reading, settled_reading

MAX_CHARACTERS = 12  # of a token; longer questions are dropped without counting their tokens
MIN_ANSWER = 32  # tokens that an answer must have room for, or its question is not asked
# options that say how much, where and how it is written, not what it is
NON_IDENTITY_KEYS = ("tokens", "draws", "states", "layers", "shard", "rows", "reading")


@dataclass(frozen=True)
class CorpusSettings:
    """What a corpus is made of; `conf/train/small.yaml` explains each setting. Their hash names the folder.

    Dialogue i is written at temperature i modulo their number; held-out ones are greedy, and always the target's own.
    `settle_precision` replaces `precision="auto"` before a digest is taken; answers of a quantised copy are another corpus.
    """

    source: Literal["answers", "text"] = "answers"
    turns: Count = 4
    prompt_tokens: Tokens = 256
    answer_tokens: Tokens = 384
    text_tokens: Tokens = 640
    temperatures: Annotated[tuple[Temperature, ...], Field(min_length=1)] = (0.0, 0.0, 0.7)
    draws: Times = 1
    validation: Count = 256
    seed: Seed = 0
    system: str | None = None
    tokens: Count | None = None
    states: bool = True
    layers: Annotated[tuple[Few, ...], Field(max_length=16)] = ()
    shard: Count = 96
    rows: Rows = 128
    precision: Precision = "target"
    reading: Literal["auto"] | Reading = "target"

    def __post_init__(self) -> None:
        object.__setattr__(self, "temperatures", tuple(self.temperatures))  # a configuration brings lists
        object.__setattr__(self, "layers", tuple(sorted(set(self.layers))))

    def identity(self) -> dict[str, Any]:
        """The settings that determine the text."""
        if self.source == "answers" and self.precision == "auto":
            raise ValueError("precision=auto names no corpus; settle it first")
        left_out = NON_IDENTITY_KEYS if self.source == "answers" else (*NON_IDENTITY_KEYS, "precision")
        return {k: v for k, v in asdict(self).items() if k not in left_out}

    def digest(self, fingerprint: str, conversations: str | None = None) -> str:
        """Of a corpus of the target with this fingerprint, of any size: more text goes into the same folder.

        conversations: see `Conversations.digest`.
        """
        return hashing.of([fingerprint, self.identity(), *([] if conversations is None else [conversations])])[:12]


def settle_precision(
    settings: CorpusSettings,
    fingerprint: str,
    device: torch.device,
    packed: Path | None,
    conversations: str | None = None,
) -> CorpusSettings:
    """Replace `auto` by the precision of a packed corpus with these settings, else by the one that is faster here.

    So a packed corpus is used on every machine, whichever precision would be faster there.
    """
    if settings.precision != "auto" or settings.source == "text":
        return settings
    header = None if packed is None else corpus_file.read_header(packed)
    for precision in ("target", "int8"):
        candidate = replace(settings, precision=precision)
        if header is not None and candidate.digest(fingerprint, conversations) == header["corpus"]:
            return candidate
    return replace(settings, precision=fastest(device))


class CorpusText:
    """The text of a corpus: writes it, as far as `tokens` asks, and reads it.

    Args:
        load: reads the conversations, which takes a while, when they are needed. conversations: their digest, see
            `Conversations.digest`. root: of all corpora. packed: a folder that may hold this corpus in one file.
    """

    def __init__(
        self,
        settings: CorpusSettings,
        target: Target,
        chat: Chat,
        load: Callable[[], list[list[Message]]],
        root: Path,
        packed: Path | None = None,
        conversations: str | None = None,
    ):
        self.target, self.chat, self.packed, self.fingerprint = target, chat, packed, target.fingerprint()
        self.settings = settings = settle_precision(settings, self.fingerprint, target.device, packed, conversations)
        self.digest = settings.digest(self.fingerprint, conversations)
        self.folder = root / f"{settings.source}-{self.digest}"
        self.load = load
        self.reading: Reading = "target"  # in which the target computes states of this text; settled by `prepare`

    @cached_property
    def chats(self) -> list[list[Message]]:
        """The usable conversations, see `_select`. Raises `SpecBenchError` if they are too few."""
        chats, validation = self._select(self.load()), self.settings.validation
        if len(chats) <= validation:
            raise SpecBenchError(
                f"{len(chats)} usable conversations are too few for a corpus; lower train.corpus.validation ({validation}) "
                "or raise train.corpus.prompt_tokens"
            )
        return chats

    def _select(self, chats: list[list[Message]]) -> list[list[Message]]:
        """The usable conversations in random order, each once (`answers`: each first question once).

        Tokens are counted only when a conversation is used, so those whose first question surely fits come first.
        """
        settings = self.settings
        text = settings.source == "text"
        unique = list({json.dumps(c if text else c[0]["content"]): c for c in chats}.values())
        order = torch.randperm(len(unique), generator=torch.Generator().manual_seed(settings.seed)).tolist()
        shuffled = [unique[i] for i in order]
        if text:
            return [c for c in shuffled if len(c) > 1]
        usable = [c for c in shuffled if len(c[0]["content"]) <= MAX_CHARACTERS * settings.prompt_tokens]
        return sorted(usable, key=lambda c: len(c[0]["content"]) >= 3 * settings.prompt_tokens)

    # Reading ------------------------------------------------------------------------------------------------------------

    def written(self) -> dict[int, Dialogue]:
        """The dialogues on disk, by index; without a line that a kill cut off."""
        return corpus_file.read_lines(sorted(self.folder.glob("answers-*.jsonl")))

    def texts(self) -> list[Dialogue]:
        """What there is of the corpus, in order: held-out first."""
        texts = sorted(self.written().values(), key=lambda t: t.index)
        if self.settings.source == "answers":
            return texts
        tokens = 0
        for index, chat in enumerate(self.chats[self.settings.validation :], self.settings.validation):
            if tokens >= self.token_limit:
                break
            texts.append(self._encode(index, chat))
            tokens += len(texts[-1].tokens)
        return texts

    def _encode(self, index: int, messages: list[Message]) -> Dialogue:
        """A conversation up to `text_tokens`, encoded turn by turn to find the assistant's tokens."""
        limit = self.settings.text_tokens
        tokens: list[int] = []
        spans = []
        for end in range(2, len(messages) + 1, 2):
            before = self.chat.encode(messages[: end - 1])
            tokens = self.chat.encode(messages[:end], answer_follows=False)
            spans.append((len(before), min(len(tokens), limit)))
            if len(tokens) >= limit:
                break
        return Dialogue(index, tokens[:limit], [s for s in spans if s[0] < s[1]])

    def training_ids(self) -> Iterator[torch.Tensor]:
        """The training texts as ids [T], as many as `tokens` asks for."""
        read = 0
        for text in self.texts():
            if text.index >= self.settings.validation and read < self.token_limit:
                read += len(text.tokens)
                yield torch.tensor(text.tokens)

    def missing(self) -> int:
        """Training tokens still to be written; where `tokens` is None, an estimate."""
        if self.settings.source == "text":
            return 0
        written = self.written()
        if self.settings.tokens is None:
            return max(0, self._dialogues - len(written)) * self.settings.text_tokens // 2
        return max(0, self.settings.tokens - self._training_tokens(written.values()))

    @property
    def _dialogues(self) -> int:
        validation = self.settings.validation
        return validation + (len(self.chats) - validation) * self.settings.draws

    @property
    def token_limit(self) -> float:
        """Training tokens asked for; infinite for all conversations."""
        return math.inf if self.settings.tokens is None else self.settings.tokens

    @property
    def _unpacked(self) -> Path:
        """The text of a packed corpus, all held-out dialogues included."""
        return self.folder / "answers-packed.jsonl"

    def _training_tokens(self, texts: Iterable[Dialogue]) -> int:
        return sum(len(t.tokens) for t in texts if t.index >= self.settings.validation)

    # Writing ------------------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Make the folder; unpack the packed corpus into it if that has these settings and nothing is written yet."""
        path, target = self.folder / "settings.json", self.target
        earlier = read_json(path).get("reading") if path.is_file() else None
        self.reading = settled_reading(self.settings.reading, earlier, target.device, target.hidden_size)
        write_file(path, json.dumps(asdict(self.settings) | {"reading": self.reading}, indent=1))
        if self.settings.source == "answers" and self.packed is not None and not self.written():
            texts = corpus_file.unpack_checked(self.packed, self.digest)
            if texts:
                with atomic_path(self._unpacked) as temporary:
                    temporary.write_bytes(b"".join(map(corpus_file.to_line, texts)))

    def write(self, process: int = 0, processes: int = 1, held_out: bool = False) -> None:
        """Write what is missing, after `prepare`. Of several processes each writes its own dialogues into its own file.

        held_out: only the validation dialogues, which are all that is written where conversations are the training text.
        """
        if self._unpacked.is_file() and (held_out or self.missing() == 0):  # of which no conversation has to be read
            return
        written = self.written()
        own = [i for i in range(process, self._dialogues, processes) if i not in written]
        validation = [i for i in own if i < self.settings.validation]
        # Held-out answers are exactly the target's own: acceptance is counted against them.
        with progress("held-out answers", len(validation), "dialogues") as show:
            for count, _ in enumerate(self._write(validation, process, "target"), 1):
                show(count)
        if held_out or self.settings.source == "text":
            return
        tokens, limit = self._training_tokens(written.values()) // processes, self.token_limit / processes
        training = own[len(validation) :] if tokens < limit else []
        with (
            progress("answers", int(min(limit, tokens + self.missing())), "tokens") as show,
            closing(self._write(training, process, self.settings.precision)) as texts,
        ):
            show(tokens)
            for text in texts:
                tokens += len(text.tokens)
                show(tokens)
                if tokens >= limit:
                    break  # unfinished dialogues are dropped

    def _write(self, indices: list[int], process: int, precision: Precision) -> Generator[Dialogue, None, None]:
        """Write dialogues, each into this process's file as it ends."""
        if not indices:
            return
        prompts = (p for i in indices if (p := self._prompt(i)))
        lengths = Lengths(self.settings.answer_tokens, self.settings.text_tokens, self._min_answer)
        path = self.folder / f"answers-{process}.jsonl"
        with path.open("ab") as file:
            if file.tell() and not path.read_bytes().endswith(b"\n"):
                file.write(b"\n")  # end a line that a kill cut off
            for text in write(self.target, prompts, lengths, self.settings.rows, precision):
                file.write(corpus_file.to_line(text))
                file.flush()
                yield text

    @property
    def _min_answer(self) -> int:
        return min(MIN_ANSWER, self.settings.answer_tokens)

    def _prompt(self, index: int) -> Prompt | None:
        """The questions of dialogue `index` up to the first that is too long; None if that is the very first."""
        settings, validation = self.settings, self.settings.validation
        longest = min(settings.prompt_tokens, settings.text_tokens - self._min_answer)
        draw, position = divmod(max(0, index - validation), len(self.chats) - validation)
        chat = self.chats[index if index < validation else validation + position]
        turns: list[tuple[int, ...]] = []
        for question in [m["content"] for m in chat if m["role"] == "user"][: settings.turns]:
            if len(question) > MAX_CHARACTERS * settings.prompt_tokens:
                break
            ids = self.chat.follow_up(question) if turns else self.chat.opening(question)
            if len(ids) > longest:
                break
            turns.append(tuple(ids))
        if not turns:
            return None
        temperatures = settings.temperatures
        temperature = max(temperatures) if draw else temperatures[index % len(temperatures)]
        if index < validation:
            temperature = 0.0
        return Prompt(index, tuple(turns), temperature, settings.seed * 1_000_003 + index)

    # Vocabulary and packing ---------------------------------------------------------------------------------------------

    def frequent(self, count: int, name: str) -> tuple[torch.Tensor, dict[str, Any]]:
        """The most frequent ids of the training text, ties by id, and their provenance. name: of the target.

        Where fewer occur than `count`, ids that never do follow in ascending order.
        """
        texts = [torch.tensor(t.tokens) for t in self.texts() if t.index >= self.settings.validation]
        if not texts:
            raise SpecBenchError(f"{self.folder} holds no training text to count; let specbench.train write it first")
        counts = torch.cat(texts).bincount(minlength=self.target.vocab_size)
        ids = counts.argsort(descending=True, stable=True)[:count]
        return ids, {
            "target": name,
            **self._identity(),
            "training_tokens": int(counts.sum()),
            "ids": len(ids),
            "occurring": int((counts[ids] > 0).sum()),
        }

    def pack(self, folder: Path, provenance: dict[str, Any]) -> Path:
        """Write all answers as one compressed file of ids, and their provenance beside it."""
        texts = self.texts()
        if not texts:
            raise SpecBenchError(f"{self.folder} holds no answers to pack")
        own = self._identity() | {
            "dialogues": len(texts),
            "held_out": sum(t.index < self.settings.validation for t in texts),
            "training_tokens": self._training_tokens(texts),
        }
        return corpus_file.pack(folder, texts, self.target.vocab_size, provenance | own)

    def _identity(self) -> dict[str, Any]:
        return {
            "corpus": self.digest,
            "settings": self.settings.identity(),
            "target_fingerprint": self.fingerprint,
        }
