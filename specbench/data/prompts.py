"""Prompt sets to decode, from a local file, a wheel, the web or the hub."""

import gzip
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import StringConstraints

from specbench.common.errors import SpecBenchError, refusing
from specbench.common.io import parse_lines, read_bytes, read_text
from specbench.common.storage import user_path
from specbench.common.types import Count, Name, Text
from specbench.data.chat import MAX_CHARACTERS
from specbench.data.download import WebFile, Wheel, file_from_web, file_from_wheel
from specbench.data.scoring import Check, LastNumber, Reference, UnitTests
from specbench.records.identity import question_digest

FIELDS = ("turns", "prompt", "question")  # a record of the user's own has its prompt in one of these


@dataclass(frozen=True)
class Question:
    """One benchmark item: the user's turns, answered one after the other."""

    id: str
    category: str
    turns: tuple[str, ...]
    check: Check | None = None  # of the last answer

    @cached_property
    def digest(self) -> str:
        """Digest of its texts and its check, by which rows name the question."""
        return question_digest(self.turns, None if self.check is None else repr(self.check))


@dataclass(frozen=True)
class PromptSet:
    """Benchmark prompts by name. Resolved in this order: `path`, `root`, the wheel, the web, the hub.

    Attributes:
        name: also the file name `<name>.jsonl` under `root`.
        path: a file of the user's own prompts, see `own_prompts`.
        root: a folder of JSONL files with `turns` and optionally `question_id` and `category`.
        shared: a file under `root` with several sets, read if `<name>.jsonl` is missing.
        wheel, web: of a JSONL file, gzipped or not.
        hub: {"path", "name", "split", "revision"} for `datasets.load_dataset`; a commit as revision pins it.
        field: of a published record: a list of turns or a text.
        template: wraps each published text, which replaces `{text}`.
        categories: records of other categories are left out; None: all, as always with `path`.
        check: makes the checks of answers from records. score: score answers.
        run_programs: score programs too, by running them; otherwise they are not scored.
        limit: take this many questions, spread evenly over the set, and so over its categories.
        system: the system prompt that these prompts are asked under, instead of the model's own (`model.system`).
    """

    name: Name
    path: Text | None = None
    root: Text | None = None
    shared: Name | None = None
    wheel: Wheel | None = None
    web: WebFile | None = None
    hub: dict[str, str] | None = None
    field: Text = "turns"
    template: Annotated[str, StringConstraints(pattern=r"^[^{}]*\{text\}[^{}]*$")] = "{text}"
    categories: Sequence[Text] | None = None
    limit: Count | None = None
    check: UnitTests | LastNumber | Reference | None = None
    score: bool = False
    run_programs: bool = False
    system: Text | None = None

    def load(self) -> list[Question]:
        """All questions, or an even spread of `limit` of them. Raises `SpecBenchError` for invalid records."""
        source, records = self._records()
        if self._skips_programs:
            hint = "data.run_programs=true runs them with your rights (docs/running.md)"
            print(f"{self.name}: the programs in answers are not run, so nothing is scored; {hint}", file=sys.stderr)
        numbered = [(number, self._question(f"{source} {number}", number, record)) for number, record in records]
        if not numbered:
            among = f" of category {', '.join(self.categories)}" if self.categories else ""
            hint = f"; write some into {self.path}" if self.path else ""
            raise SpecBenchError(f"dataset {self.name} has no prompts{among}{hint}")
        _require_unique(source, numbered)
        questions = [question for _, question in numbered]
        if self.limit is not None and self.limit < len(questions):
            questions = [questions[i * len(questions) // self.limit] for i in range(self.limit)]
        return questions

    def _records(self) -> tuple[str, Iterable[tuple[int, dict[str, Any]]]]:
        """A name of records for messages, which the number follows; and numbers and records."""
        if self.path is not None:
            return f"{self.path} line", own_prompts(user_path(self.path))
        if self.root is not None:
            records = list(read_jsonl(file_below(user_path(self.root), self.name, self.shared)))
        elif self.wheel is not None:
            records = list(read_jsonl(file_from_wheel(self.wheel)))
        else:
            records = self._from_hub() if self.web is None else list(read_jsonl(file_from_web(self.web)))
        numbered = enumerate(records, 1)
        chosen = ((n, r) for n, r in numbered if self.categories is None or r.get("category") in (None, *self.categories))
        return f"dataset {self.name}, record", chosen

    def _question(self, where: str, number: int, record: dict[str, Any]) -> Question:
        """A record's question. Its default id is its number from 0 on, in the user's own file its digest."""
        published = self.path is None and self.root is None
        in_turns = self.path is None and "turns" in record
        field = self.field if published else "turns" if in_turns else own_field(record, where)
        value = record.get(field)
        turns = [value] if isinstance(value, str) else value
        if not isinstance(turns, list) or not turns or not all(isinstance(t, str) for t in turns):
            raise SpecBenchError(f"{where}: `{field}` is not a text or a list of texts")
        if not all(t.strip() for t in turns):
            raise SpecBenchError(f"{where}: empty prompt; remove it or give it a text")
        if (longest := max(map(len, turns))) > MAX_CHARACTERS:
            raise SpecBenchError(f"{where}: a prompt of {longest:,} characters, more than {MAX_CHARACTERS:,}; shorten it")
        default = number - 1 if self.path is None else record.get("id")
        name, category = record.get("question_id", record.get("task_id", default)), record.get("category")
        name = "" if name is None else name
        for key, value, kinds in (("question_id", name, (str, int)), ("category", category or "", (str,))):
            if not isinstance(value, kinds) or isinstance(value, bool):
                raise SpecBenchError(f"{where}: `{key}` is {value!r}; give it a text")
        texts = tuple(self.template.format(text=t) for t in turns) if published else tuple(turns)
        question = Question(str(name), category or "", texts, self._check(where, record, turns[-1]))
        return question if question.id or self.path is None else replace(question, id=question.digest)

    @property
    def _skips_programs(self) -> bool:
        return self.score and isinstance(self.check, UnitTests) and not self.run_programs

    def _check(self, where: str, record: dict[str, Any], text: str) -> Check | None:
        if not self.score or self._skips_programs:
            return None
        try:
            check = None if self.check is None else self.check.of(record, text)
        except ValueError as error:
            raise SpecBenchError(f"{where}: {error}") from error
        if check is None:
            raise SpecBenchError(f"{where}: nothing to score by; set dataset.score=false")
        return check

    def _from_hub(self) -> list[dict[str, Any]]:
        if self.hub is None:
            raise SpecBenchError(f"dataset {self.name} names no place to read from; give prompts=FILE.jsonl")
        from datasets import load_dataset

        try:
            return [dict(r) for r in load_dataset(**self.hub)]
        except Exception as error:  # the hub client has many exceptions for "no network" and "no such data"
            raise SpecBenchError(
                f"cannot fetch dataset {self.name} from the hub ({type(error).__name__}); connect to the "
                f"network or pass data.root=DIR with a file {self.shared or f'{self.name}.jsonl'} in it"
            ) from error


def file_below(root: Path, name: str, shared: str | None) -> Path:
    """The file of a set in a folder: its own, or that of several sets if it has none. See `PromptSet`."""
    own = root / f"{name}.jsonl"
    return own if shared is None or own.is_file() else root / shared


def _require_unique(source: str, numbered: Sequence[tuple[int, Question]]) -> None:
    """Raises `SpecBenchError` for questions with the same id, by which rows name them, or the same texts."""
    first: dict[str, int] = {}
    for number, question in numbered:
        if (before := first.setdefault(question.digest, number)) != number:
            raise SpecBenchError(f"{source}s {before} and {number}: are the same prompt; remove one")
        if question.id != question.digest and (before := first.setdefault(question.id, number)) != number:
            both = f"both have question_id {question.id}"
            raise SpecBenchError(f"{source}s {before} and {number}: {both}; give each one of its own")


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Objects of a JSONL file, gzipped or not. Raises `SpecBenchError`, which names the first bad line."""
    if not path.is_file():
        raise SpecBenchError(f"no data file {path}; check data.root")
    data = read_bytes(path)
    if path.suffix == ".gz":
        with refusing(f"{path} is damaged or cut off; correct or remove it"):
            data = gzip.decompress(data)
    for number, record in parse_lines(data, Any, path):
        if not isinstance(record, dict):
            raise SpecBenchError(f"{path} line {number}: a JSON object was expected")
        yield record


def own_prompts(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line numbers and records of a user's own file: JSONL, or a `.txt` of one prompt a line. Raises `SpecBenchError`."""
    if not path.is_file():
        raise SpecBenchError(f"prompts={path}: there is no such file; give a JSONL file, or a .txt of one prompt a line")
    if path.suffix != ".txt":
        yield from parse_lines(read_text(path).encode(), dict[str, Any], path)
        return
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if line.strip():
            yield number, {"prompt": line.strip()}


def own_field(record: Mapping[str, Any], where: str) -> str:
    """The one of `FIELDS` that holds a record's prompt. Raises `SpecBenchError` for none, or for several that differ."""
    present = [field for field in FIELDS if field in record]
    if not present:
        raise SpecBenchError(f"{where}: no prompt; give it `turns` (a list of texts), `prompt` or `question` (a text)")
    texts = [[value] if isinstance(value := record[field], str) else value for field in present]
    if any(text != texts[0] for text in texts):
        raise SpecBenchError(f"{where}: {' and '.join(f'`{field}`' for field in present)} differ; keep the one to be asked")
    return present[0]
