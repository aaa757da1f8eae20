"""What drafters learn from, as token ids: conversations as they are, or the target's own answers to their questions.

Knows tokenised text and who writes it, not states (`features`) and no drafter. A corpus is a folder, named after what it
is made of:

    settings.json      what that is
    answers-0.jsonl    {"index", "tokens", "spans"} a line, written as dialogues end: killed, writing goes on behind them

A finished corpus of answers travels as one compressed file of ids (`pack`, `unpack`), from which states are read anew.
"""

import hashlib
import itertools
import json
import math
import time
from collections.abc import Generator, Iterable
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from specbench.common.errors import SpecBenchError
from specbench.common.progress import progress
from specbench.common.storage import atomic_path
from specbench.common.types import Count, Seed, Weight
from specbench.data.chat import Chat, Message
from specbench.engine.target import Target
from specbench.training import corpus_file
from specbench.training.corpus_file import Text
from specbench.training.writer import Dialogue, Lengths, Precision, Prompt, fastest, rows_of, write, writing

MAX_CHARACTERS = 12  # a token: no longer text is ever encoded
MIN_ANSWER = 32  # tokens that an answer must have room for, or its question is not asked
# options that say how far, where and how it is written, not what it is
NOT_IDENTITY = ("tokens", "draws", "states", "shard", "rows", "reading")


@dataclass(frozen=True)
class CorpusSettings:
    """What a corpus is made of; its hash names the folder, so that no other corpus is ever mistaken for it.

    Attributes:
        source: `answers` (the target's own, to the conversations' questions) or `text` (the conversations as they are).
        turns: questions of a conversation that are asked, at most (`answers`).
        prompt_tokens: longest question used (`answers`).
        answer_tokens: longest answer written (`answers`).
        text_tokens: longest sequence; text is cut off behind it, answers end there.
        temperatures: dialogue i is written at temperature i modulo their number; 0 is greedy, as held-out ones always are.
        draws: times each conversation is held; all but the first at the highest temperature (`answers`).
        validation: conversations set aside before anything else.
        seed: of their order and of sampling.
        system: system prompt; must be the benchmark's.
        tokens: stop once this many are there; None for all conversations.
        states: store the target's states. shard: sequences a file of them.
        rows: dialogues written side by side.
        precision: who writes, see `writer.write`; answers of a quantised copy are another corpus. Held-out answers are
            always the target's own. `auto` is made definite by `settle_precision` before there is a digest.
        reading: precision of the passes that read states, see `precision.wide`.
    """

    source: Literal["answers", "text"] = "answers"
    turns: Count = 4
    prompt_tokens: Count = 256
    answer_tokens: Count = 384
    text_tokens: Count = 640
    temperatures: Annotated[tuple[Weight, ...], Field(min_length=1)] = (0.0, 0.0, 0.7)
    draws: Count = 1
    validation: Count = 256
    seed: Seed = 0
    system: str | None = None
    tokens: Count | None = None
    states: bool = True
    shard: Count = 96
    rows: Count = 128
    precision: Precision = "target"
    reading: Literal["auto", "target"] = "target"

    def __post_init__(self) -> None:
        object.__setattr__(self, "temperatures", tuple(self.temperatures))  # a configuration brings a list

    def identity(self) -> dict[str, Any]:
        """The settings that decide about the text; who writes decides about nothing where nothing is written."""
        if self.source == "answers" and self.precision == "auto":
            raise ValueError("precision=auto names no corpus; settle it first")
        left_out = NOT_IDENTITY if self.source == "answers" else (*NOT_IDENTITY, "precision")
        return {k: v for k, v in asdict(self).items() if k not in left_out}

    def digest(self, fingerprint: str) -> str:
        """Of what the text is: more of the same goes into the same folder."""
        return hashlib.sha256(json.dumps([fingerprint, self.identity()], sort_keys=True).encode()).hexdigest()[:12]

    def folder(self, root: Path, fingerprint: str) -> Path:
        return root / f"{self.source}-{self.digest(fingerprint)}"


def settle_precision(
    settings: CorpusSettings, fingerprint: str, device: torch.device, packed: Path | None
) -> CorpusSettings:
    """The same with a definite precision: for `auto` that of a packed corpus with these settings, else what is fastest.

    So a corpus that lies in one file is taken over on every machine, whichever precision would pay there.
    """
    if settings.precision != "auto" or settings.source == "text":
        return settings
    candidates = [replace(settings, precision=precision) for precision in ("target", "int8")]
    there = None if packed is None else corpus_file.read_provenance(packed)
    for candidate in candidates:
        if there is not None and candidate.digest(fingerprint) == there["corpus"]:
            return candidate
    return replace(settings, precision=fastest(device))


class Writer:
    """Brings the text of a corpus into being, as far as `tokens` asks.

    Args:
        chats: conversations. root: of all corpora. packed: a folder that may hold this corpus in one file.
    """

    def __init__(
        self,
        settings: CorpusSettings,
        target: Target,
        chat: Chat,
        chats: list[list[Message]],
        root: Path,
        packed: Path | None = None,
    ):
        self.target, self.chat, self.fingerprint = target, chat, target.fingerprint()
        self.settings = settings = settle_precision(settings, self.fingerprint, target.device, packed)
        self.folder = settings.folder(root, self.fingerprint)
        self.packed = packed
        whole = {json.dumps(c[0]["content"]): c for c in chats}  # a question is asked once
        if settings.source == "text":
            whole = {json.dumps(c): c for c in chats}
        order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(settings.seed)).tolist()
        everything = list(whole.values())
        # ids are counted when a conversation's turn comes: those whose first question surely fits come first
        self.chats = sorted((everything[i] for i in order if self._usable(everything[i])), key=self._long)
        if len(self.chats) <= settings.validation:
            raise SpecBenchError(
                f"{len(self.chats)} usable conversations are too few for a corpus; lower train.corpus.validation "
                f"({settings.validation}) or raise train.corpus.prompt_tokens"
            )

    def _usable(self, chat: list[Message]) -> bool:
        """Is there an answer to read, or a question that may fit?"""
        if self.settings.source == "text":
            return len(chat) > 1
        return len(chat[0]["content"]) <= MAX_CHARACTERS * self.settings.prompt_tokens

    def _long(self, chat: list[Message]) -> bool:
        """May the first question be too long?"""
        return self.settings.source == "answers" and len(chat[0]["content"]) >= 3 * self.settings.prompt_tokens

    # Answers ------------------------------------------------------------------------------------------------------------

    def written(self) -> dict[int, Text]:
        """The dialogues on disk, by index; a line that a kill cut off is as if it were not there."""
        return corpus_file.read_lines(sorted(self.folder.glob("answers-*.jsonl")))

    def texts(self) -> list[Text]:
        """What there is of the corpus, in order: held-out first."""
        if self.settings.source == "answers":
            return sorted(self.written().values(), key=lambda t: t.index)
        found, tokens = [], 0
        for index, chat in enumerate(self.chats):
            if tokens >= self.token_limit:
                break
            text = self._as_it_is(index, chat)
            found.append(text)
            tokens += len(text.tokens) * (index >= self.settings.validation)
        return found

    def missing(self) -> int:
        """Training tokens still to be written; at most, where `tokens` is None."""
        if self.settings.source == "text":
            return 0
        there = self.written()
        if self.settings.tokens is None:
            return max(0, self._dialogues - len(there)) * self.settings.text_tokens // 2
        return max(0, self.settings.tokens - self._training_tokens(there.values()))

    def prepare(self) -> None:
        """Make the folder, and take over the packed corpus if that is this one and nothing is there yet."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "settings.json").write_text(json.dumps(asdict(self.settings), indent=1))
        if self.settings.source == "answers" and self.packed is not None and not self.written():
            texts = corpus_file.unpack_checked(self.packed, self.settings.digest(self.fingerprint))
            if texts:
                with atomic_path(self.folder / "answers-packed.jsonl") as temporary:
                    temporary.write_bytes(b"".join(corpus_file.to_line(t.index, t.tokens, t.spans) for t in texts))

    def seconds_per_token(self) -> float:
        """Of writing, tried on a few passes over rows that are half full."""
        settings = self.settings
        model, rows = writing(self.target, settings.precision), settings.rows
        table = rows_of(model, self.target, rows, settings.text_tokens)
        table.lengths = [settings.text_tokens // 2] * rows
        begin = 0.0
        with table.running():
            for attempt in range(3):
                if attempt == 1:  # the first one warms up
                    begin = time.perf_counter()
                float(model.logits(table.step([0] * rows)).sum())  # waits for the device
        return (time.perf_counter() - begin) / (2 * rows)

    def write(self, process: int = 0, processes: int = 1) -> None:
        """Write what is missing. Of several processes each writes its share of the dialogues, into a file of its own.

        `prepare` comes before, in one process.
        """
        if self.settings.source == "text":
            return
        there = self.written()
        mine = [i for i in range(process, self._dialogues, processes) if i not in there]
        validation, rest = ([i for i in mine if (i < self.settings.validation) == early] for early in (True, False))
        # Held-out answers are the target's own to the letter: acceptance is counted against them.
        with progress("held-out answers", len(validation), "dialogues") as reached:
            for count, _ in enumerate(self._run(validation, process, "target"), 1):
                reached(count)
        tokens, until = self._training_tokens(there.values()) // processes, self.token_limit / processes
        with (
            progress("answers", int(min(until, tokens + self.missing())), "tokens") as reached,
            closing(self._run(rest if tokens < until else [], process, self.settings.precision)) as dialogues,
        ):
            reached(tokens)
            for dialogue in dialogues:
                tokens += len(dialogue.tokens)
                reached(tokens)
                if tokens >= until:
                    break  # what is unfinished is left out

    def _run(self, indices: list[int], process: int, precision: Precision) -> Generator[Dialogue, None, None]:
        """Write dialogues, each into this process's file as it ends."""
        prompts = (p for i in indices if (p := self._prompt(i)))
        first = next(prompts, None)
        if first is None:
            return
        answer = self.settings.answer_tokens
        lengths = Lengths(answer, self.settings.text_tokens, min_answer=min(MIN_ANSWER, answer))
        path = self.folder / f"answers-{process}.jsonl"
        with path.open("ab") as file:
            if file.tell() and not path.read_bytes().endswith(b"\n"):
                file.write(b"\n")  # behind a line that a kill cut off
            for dialogue in write(self.target, itertools.chain([first], prompts), lengths, self.settings.rows, precision):
                file.write(corpus_file.to_line(dialogue.prompt.index, dialogue.tokens, dialogue.spans))
                file.flush()
                yield dialogue

    def _prompt(self, index: int) -> Prompt | None:
        """What dialogue `index` is asked: its questions up to the first one that is too long."""
        settings, validation = self.settings, self.settings.validation
        draw, behind = divmod(max(0, index - validation), len(self.chats) - validation)
        chat = self.chats[index if index < validation else validation + behind]
        questions = [m["content"] for m in chat if m["role"] == "user"][: settings.turns]
        turns: list[tuple[int, ...]] = []
        for question in questions:
            if len(question) > MAX_CHARACTERS * settings.prompt_tokens:
                break
            ids = self.chat.follow_up(question) if turns else self.chat.encode([{"role": "user", "content": question}])
            if len(ids) > settings.prompt_tokens:
                break
            turns.append(tuple(ids))
        if not turns:
            return None
        temperature = max(settings.temperatures) if draw else settings.temperatures[index % len(settings.temperatures)]
        temperature = 0.0 if index < validation else temperature
        return Prompt(index, tuple(turns), temperature, settings.seed * 1_000_003 + index)

    @property
    def _dialogues(self) -> int:
        validation = self.settings.validation
        return validation + (len(self.chats) - validation) * self.settings.draws

    @property
    def token_limit(self) -> float:
        """Training tokens asked for; infinite: all there are."""
        return math.inf if self.settings.tokens is None else self.settings.tokens

    def _training_tokens(self, texts: Iterable[Text]) -> int:
        return sum(len(t.tokens) for t in texts if t.index >= self.settings.validation)

    # Text as it is ------------------------------------------------------------------------------------------------------

    def _as_it_is(self, index: int, messages: list[Message]) -> Text:
        """A conversation up to `text_tokens`, encoded turn by turn to know what the assistant said."""
        tokens: list[int] = []
        spans = []
        for end in range(2, len(messages) + 1, 2):
            before, tokens = (
                self.chat.encode(messages[: end - 1]),
                self.chat.encode(messages[:end], answer_follows=False),
            )
            spans.append((len(before), min(len(tokens), self.settings.text_tokens)))
            if len(tokens) >= self.settings.text_tokens:
                break
        limit = self.settings.text_tokens
        return Text(index, tokens[:limit], [s for s in spans if s[0] < s[1]])

    # What it is made of -------------------------------------------------------------------------------------------------

    def frequent(self, count: int, name: str) -> tuple[torch.Tensor, dict[str, Any]]:
        """The ids of the training text from the most frequent on, ties by id, and what was counted.

        Where fewer occur than are wanted, those that never do follow in the order of their ids. name: of the target.
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
            "occurring": int((counts[ids] > 0).sum()),  # behind these stand ids that never occur
        }

    def pack(self, folder: Path, provenance: dict[str, Any]) -> Path:
        """Write all answers as one compressed file of ids, and beside it what they are."""
        texts = self.texts()
        if not texts:
            raise SpecBenchError(f"{self.folder} holds no answers to pack")
        about = self._identity() | {
            "dialogues": len(texts),
            "held_out": sum(t.index < self.settings.validation for t in texts),
            "training_tokens": self._training_tokens(texts),
        }
        return corpus_file.pack(folder, texts, self.target.vocab_size, provenance | about)

    def _identity(self) -> dict[str, Any]:
        """What this corpus is, for provenances."""
        return {
            "corpus": self.settings.digest(self.fingerprint),
            "settings": self.settings.identity(),
            "target_fingerprint": self.fingerprint,
        }
