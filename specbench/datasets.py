"""Prompts and training conversations: a local file, the hub, a PyPI wheel. Knows no engine and no drafter."""

import gzip
import json
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import StringConstraints

from specbench.assets import Wheel, file_from_wheel
from specbench.errors import SpecBenchError, refusing
from specbench.files import parse_lines, read_bytes, read_text
from specbench.options import Count, Name, Text
from specbench.records.identity import question_digest
from specbench.scoring import Check, LastNumber, UnitTests

Message = dict[str, str]  # {"role": "system" | "user" | "assistant", "content": text}


@dataclass(frozen=True)
class Question:
    """One benchmark item: the user's turns, answered one after the other."""

    id: str
    category: str
    turns: tuple[str, ...]
    check: Check | None = None  # of the last answer

    @cached_property
    def digest(self) -> str:
        """Of its texts and of how it is scored, by which rows know it."""
        return question_digest(self.turns, None if self.check is None else repr(self.check))


@dataclass(frozen=True)
class PromptSet:
    """Benchmark prompts by name. Resolved in this order: `path`, `root`, the wheel, the hub.

    Attributes:
        name: also the file name `<name>.jsonl` under `root`.
        path: a file of the user's own prompts, see `own_prompts`.
        root: a folder of JSONL files with `turns` (and, if there, `question_id` and `category`).
        shared: a file under `root` that holds several sets, read where `<name>.jsonl` is not there.
        wheel: file to take from a wheel; JSONL, or gzipped JSONL.
        hub: {"path", "name", "split"} for `datasets.load_dataset`.
        field: where the prompt stands in a wheel's or the hub's record: a list of turns or a text.
        template: wraps each text, with `{text}` in it.
        categories: records of others are left out, those without one are not; None: all, as of `path`.
        check: what a record says by which answers can be scored. score: do so.
        limit: take this many questions, spread evenly over the set so that every category stays represented.
    """

    name: Name
    path: Text | None = None
    root: Text | None = None
    shared: Name | None = None
    wheel: Wheel | None = None
    hub: dict[str, str] | None = None
    field: Text = "turns"
    template: Annotated[str, StringConstraints(pattern=r"^[^{}]*\{text\}[^{}]*$")] = "{text}"
    categories: Sequence[Text] | None = None
    limit: Count | None = None
    check: UnitTests | LastNumber | None = None
    score: bool = False

    def load(self) -> list[Question]:
        """All questions, or an even spread of `limit` of them. Raises `SpecBenchError` for anything unusable."""
        place, numbered = self._own() if self.path is not None else self._known()
        if not numbered:
            among = f" of category {', '.join(self.categories)}" if self.categories else ""
            where = f"; write some into {self.path}" if self.path else ""
            raise SpecBenchError(f"dataset {self.name} has no prompts{among}{where}")
        self._require_unlike(place, numbered)
        questions = [question for _, question in numbered]
        if self.limit is not None and self.limit < len(questions):
            questions = [questions[i * len(questions) // self.limit] for i in range(self.limit)]
        return questions

    def _own(self) -> tuple[str, list[tuple[int, Question]]]:
        """Of the user's own file, numbered by line, and how to say where. One without an id is known by its texts."""
        path, numbered = Path(str(self.path)), []
        for number, record in own_prompts(path):
            where = f"{path} line {number}"
            asked = self._question(where, record.get("id"), record, own_field(record, where), "{text}")
            numbered.append((number, asked if asked.id else replace(asked, id=asked.digest)))
        return f"{path} line", numbered

    def _known(self) -> tuple[str, list[tuple[int, Question]]]:
        """Of a published set, numbered by record, and how to say where."""
        if self.root is not None:
            records, field, template = list(read_jsonl(self._under(Path(self.root)))), "turns", "{text}"
        elif self.wheel is not None:
            records, field, template = list(read_jsonl(file_from_wheel(self.wheel))), self.field, self.template
        else:
            records, field, template = self._from_hub(), self.field, self.template
        place = f"dataset {self.name}, record"
        return place, [
            (index + 1, self._question(f"{place} {index + 1}", index, record, field, template))
            for index, record in enumerate(records)
            if self.categories is None or record.get("category") in (None, *self.categories)
        ]

    def _under(self, root: Path) -> Path:
        own = root / f"{self.name}.jsonl"
        return root / self.shared if self.shared is not None and not own.is_file() else own

    def _question(self, where: str, name: Any, record: dict[str, Any], field: str, template: str) -> Question:
        """A record's question. where: it stands. name: its id, where no `question_id` or `task_id` says it; None: none."""
        value = record.get(field)
        turns = [value] if isinstance(value, str) else value
        if not isinstance(turns, list) or not turns or not all(isinstance(t, str) for t in turns):
            raise SpecBenchError(f"{where}: `{field}` is not a text or a list of texts")
        if not all(t.strip() for t in turns):
            raise SpecBenchError(f"{where}: empty prompt; remove it or give it a text")
        name, category = record.get("question_id", record.get("task_id", name)), record.get("category")
        name = "" if name is None else name
        for key, said, kinds in (("question_id", name, (str, int)), ("category", category or "", (str,))):
            if not isinstance(said, kinds) or isinstance(said, bool):
                raise SpecBenchError(f"{where}: `{key}` is {said!r}; give it a text")
        said = tuple(template.format(text=t) for t in turns)
        return Question(str(name), category or "", said, self._check(where, record, turns[-1]))

    def _check(self, where: str, record: dict[str, Any], text: str) -> Check | None:
        if not self.score:
            return None
        try:
            found = None if self.check is None else self.check.of(record, text)
        except ValueError as error:
            raise SpecBenchError(f"{where}: {error}") from error
        if found is None:
            raise SpecBenchError(f"{where}: nothing to score by; set dataset.score=false")
        return found

    def _require_unlike(self, place: str, numbered: Sequence[tuple[int, Question]]) -> None:
        """Rows are known by their question's id: of two questions with one id only one would be decoded."""
        first: dict[str, int] = {}
        for number, question in numbered:
            before = first.setdefault(question.id, number)
            if before != number:
                same = "are the same prompt" if question.id == question.digest else f"both have question_id {question.id}"
                raise SpecBenchError(f"{place}s {before} and {number}: {same}; give each a question_id of its own")

    def _from_hub(self) -> list[dict[str, Any]]:
        if self.hub is None:
            raise SpecBenchError(f"dataset {self.name} has neither path, data.root, wheel nor hub; give prompts=FILE.jsonl")
        from datasets import load_dataset

        try:
            return [dict(r) for r in load_dataset(**self.hub)]
        except Exception as error:  # the hub client raises a dozen kinds for "no network" and "no such data"
            raise SpecBenchError(
                f"cannot fetch dataset {self.name} from the hub ({type(error).__name__}); connect to the "
                f"network or pass data.root=DIR with a file {self.shared or f'{self.name}.jsonl'} in it"
            ) from error


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Objects of a JSONL file, gzipped or not. Raises `SpecBenchError` naming the first bad line."""
    if not path.is_file():
        raise SpecBenchError(f"no data file {path}; check data.root")
    data = read_bytes(path)
    if path.suffix == ".gz":
        with refusing(f"{path} is damaged or cut off; mend or remove it"):
            data = gzip.decompress(data)
    for number, record in parse_lines(data, Any, path):
        if not isinstance(record, dict):
            raise SpecBenchError(f"{path} line {number}: a JSON object was expected")
        yield record


FIELDS = ("turns", "prompt", "question")  # of which a record of one's own has one


def own_prompts(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line numbers and records of a user's own file: JSONL, or a `.txt` of one prompt a line.

    Raises:
        SpecBenchError: it is missing, no UTF-8 text, or a line is no JSON object.
    """
    if not path.is_file():
        raise SpecBenchError(f"prompts={path}: there is no such file; give a JSONL file, or a .txt of one prompt a line")
    if path.suffix != ".txt":
        yield from parse_lines(read_text(path).encode(), dict[str, Any], path)
        return
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if line.strip():
            yield number, {"prompt": line.strip()}


def own_field(record: Mapping[str, Any], where: str) -> str:
    """Which of `FIELDS` holds a record's prompt. Raises `SpecBenchError` for none, or for several that differ."""
    there = [field for field in FIELDS if field in record]
    if not there:
        raise SpecBenchError(f"{where}: no prompt; give it `turns` (a list of texts), `prompt` or `question` (a text)")
    texts = [[value] if isinstance(value := record[field], str) else value for field in there]
    if any(text != texts[0] for text in texts):
        raise SpecBenchError(f"{where}: {' and '.join(f'`{field}`' for field in there)} differ; keep the one to be asked")
    return there[0]


# Training conversations --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Conversations:
    """ShareGPT-style training text: a JSON array of {"id", "conversations": [{"from", "value"}, ...]}.

    Attributes:
        path: a local JSON file, before wheel and hub. wheel, hub: as in `PromptSet`.
        hub_file: the file inside the hub dataset.
    """

    path: Text | None = None
    wheel: Wheel | None = None
    hub: Text | None = None
    hub_file: Text | None = None

    def load(self) -> list[list[Message]]:
        """The whole conversations that hold a user's turn; says how many there are, and whether the file was cut off."""
        records, cut = whole_records(self._file())
        chats = [chat for record in records if (chat := _messages(record))]
        behind = "; the file is cut off behind them" if cut else ""
        print(f"{len(records):,} whole conversations, {len(chats):,} usable{behind}", file=sys.stderr)
        if not chats:
            raise SpecBenchError(f"{self._file()} holds no whole conversation")
        return chats

    def _file(self) -> Path:
        if self.path is not None:
            if not Path(self.path).is_file():
                raise SpecBenchError(f"no training text at train.text.path={self.path}")
            return Path(self.path)
        if self.wheel is not None:
            return file_from_wheel(self.wheel)
        from huggingface_hub import hf_hub_download

        try:
            return Path(hf_hub_download(str(self.hub), str(self.hub_file), repo_type="dataset"))
        except Exception as error:
            raise SpecBenchError(f"cannot fetch {self.hub} from the hub; pass train.text.path=FILE") from error


def whole_records(path: Path) -> tuple[list[dict[str, Any]], bool]:
    """The whole objects of a JSON array, read one by one, and whether the array ended before its bracket.

    A published ShareGPT file is cut off inside a record: everything before that record is good.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    records: list[dict[str, Any]] = []
    decoder = json.JSONDecoder()
    at = text.find("[") + 1
    if not at:
        raise SpecBenchError(f"{path} is not a JSON array of conversations")
    while True:
        while at < len(text) and text[at] in " \t\r\n,":
            at += 1
        if at >= len(text) or text[at] == "]":
            return records, at >= len(text)
        try:
            record, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError:
            return records, True
        if not isinstance(record, dict):
            raise SpecBenchError(f"{path}, record {len(records) + 1}: a JSON object was expected, not {str(record)[:40]}")
        records.append(record)


_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant"}


def _messages(record: dict[str, Any]) -> list[Message]:
    """A record's turns up to the first odd one, starting with the user; empty if there is none."""
    chat: list[Message] = []
    turns = record.get("conversations")
    for turn in turns if isinstance(turns, list) else []:
        who, said = (turn.get("from"), turn.get("value")) if isinstance(turn, dict) else (None, None)
        role, text = _ROLES.get(who) if isinstance(who, str) else None, said if isinstance(said, str) else ""
        expected = "assistant" if len(chat) % 2 else "user"
        if role != expected or not text.strip():
            if not chat and role == "assistant":
                continue  # many records start with the tail of an earlier conversation
            break
        chat.append({"role": role, "content": text})
    return chat


# Rendering -----------------------------------------------------------------------------------------------------------


class Chat:
    """Turns messages into token ids with the tokenizer's chat template.

    Attributes:
        system: the system prompt; None leaves it to the template (CORAL, Appendix E: a drafter trained under another
            system prompt loses acceptance, so training and benchmark must agree).
    """

    def __init__(self, tokenizer: Any, system: str | None = None):
        self.tokenizer, self.system = tokenizer, system

    def encode(self, messages: list[Message], answer_follows: bool = True) -> list[int]:
        """Token ids of a conversation; with the header of the coming answer if one follows.

        Raises:
            SpecBenchError: a template that is damaged, or that does not take these messages.
        """
        if self.system is not None:
            messages = [{"role": "system", "content": self.system}, *messages]
        if self.tokenizer.chat_template is None:  # a base model: plain text is all it knows
            text = "\n\n".join(m["content"] for m in messages) + ("\n\n" if answer_follows else "")
            return self.tokenizer(text)["input_ids"]
        whose = getattr(self.tokenizer, "name_or_path", "this tokenizer")
        with refusing(f"the chat template of {whose} does not take this conversation; mend it, or change model.system"):
            encoded = self.tokenizer.apply_chat_template(messages, add_generation_prompt=answer_follows, return_dict=True)
            return encoded["input_ids"]

    def follow_up(self, content: str) -> list[int]:
        """Ids between an answer's text and the next one: the answer's end, the user's turn, the coming answer's header.

        Raises:
            SpecBenchError: a template that does not lay turns end to end.
        """
        user, answer = {"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}
        opening = self.encode([user])
        whole = self.encode([user, answer, {"role": "user", "content": content}])
        said = self.tokenizer("x", add_special_tokens=False)["input_ids"]
        if whole[: len(opening) + len(said)] != opening + said:
            raise SpecBenchError("this tokenizer's chat template does not lay turns end to end; set train.corpus.turns=1")
        return whole[len(opening) + len(said) :]


class Pieces:
    """Stands in for a tokenizer where only time and memory count: about four characters an id, whatever they are."""

    chat_template = None

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size

    def __call__(self, text: str) -> dict[str, list[int]]:
        pieces = (text[i : i + 4] for i in range(0, len(text), 4))
        return {"input_ids": [zlib.crc32(p.encode()) % self.vocab_size for p in pieces]}

    def decode(self, ids: list[int]) -> str:
        return " ".join(f"{i:03}" for i in ids)  # as long as its ids say
