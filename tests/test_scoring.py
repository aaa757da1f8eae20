"""Answers held to their problems' tests: what is a program in an answer, what passes, and what a hostile one cannot do."""

import json
import os
import textwrap
import time

import pytest

from specbench.common.errors import SpecBenchError
from specbench.data.prompts import PromptSet
from specbench.data.scoring import START, LastNumber, Number, Program, UnitTests, completion, last_number

PROMPT = 'def double(x):\n    """Twice x."""\n'
TESTS = "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(-1) == -2\n"
PROBLEM = Program(PROMPT, TESTS, "double")
WHOLE = "def double(x):\n    return 2 * x\n"


# From an answer to a program ------------------------------------------------------------------------------------------

RIGHT = {
    "the body alone": "    return 2 * x\n",
    "a body that lost its indentation": "return 2 * x",
    "only that of its first line": "y = 2 * x\n    return y",
    "a body that is indented no more at all": "y = 2 * x\nreturn y",
    "a block with the function": f"Here it is:\n\n```python\n{WHOLE}```\n\nIt doubles.",
    "a block with the body": "```python\n    return 2 * x\n```",
    "a block that was cut off": f"Sure.\n```python\n{WHOLE}",
    "an example in a block before": f"Called as\n```\ndouble(3)\n```\nwith\n```python\n{WHOLE}```",
    "the function without a block": f"Here is the function:\n\n{WHOLE}\nIt doubles x.",
    "a helper and an import before it": f"```python\nimport math\n\ndef twice(x):\n    return 2 * x\n\n{WHOLE}```",
    "an indented block": textwrap.indent(f"```python\n{WHOLE}```", "  "),
    "prose behind it": f"{WHOLE}\nThis function takes x; and isn't it nice?",
}


@pytest.mark.parametrize("what", RIGHT)
def test_the_program_in_an_answer_passes(what):
    assert PROBLEM.passed(RIGHT[what])


WRONG = {
    "nothing": "",
    "prose": "I am sorry, I cannot help with that.",
    "another result": WHOLE.replace("2 *", "3 *"),
    "another function": WHOLE.replace("double", "triple"),
    "an error": "    return y\n",
    "no end": "    while True:\n        pass\n",
    "all memory": "    return len([0] * 10**10) and 2 * x\n",
    "no depth": "    return double(x)\n",
    "an exit that says all is well": "    import sys\n    sys.exit(0)\n",
    "a hard exit": "    import os\n    os._exit(0)\n",
    "the word": "    print('passed')\n    return 0\n",
    "builtins of its own": "    return 0\nimport builtins\nbuiltins.all = builtins.abs = lambda x: True\n",
    "a signal to the one that runs it": "    import os\n    os.kill(os.getppid(), 9)\n    return 2 * x\n",
    "a signal to its group": "    import os\n    os.killpg(0, 9)\n    return 2 * x\n",
    "a process more": "    import os\n    os.fork()\n    return 2 * x\n",
    "a thread more": "    import threading\n    threading.Thread(target=print).start()\n    return 2 * x\n",
    "a shell": "    import subprocess\n    subprocess.run(['true'], check=True)\n    return 2 * x\n",
    "a socket": "    import socket\n    socket.socket()\n    return 2 * x\n",
    "a file": "    open('x', 'w')\n    return 2 * x\n",
    "a library that is installed here": "    import torch\n    return 2 * x\n",
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_or_reaches_out_does_not_pass(what):
    begin = time.monotonic()
    assert not PROBLEM.passed(WRONG[what])
    assert time.monotonic() - begin < 2 * START  # it was not waited for


def test_a_program_leaves_nothing_behind(tmp_path):
    """Neither a file, nor one less, nor what it inherits; it may try all of it and go on."""
    kept = tmp_path / "kept"
    kept.write_text("here")
    os.environ["SPECBENCH_SECRET"] = "word"
    tries = "".join(
        f"try:\n    {line}\nexcept BaseException:\n    pass\n"
        for line in (
            f"open({str(tmp_path / 'new')!r}, 'w').write('x')",
            f"__import__('posix').unlink({str(kept)!r})",
            f"__import__('posix').rename({str(kept)!r}, {str(tmp_path / 'moved')!r})",
            f"__import__('posix').mkdir({str(tmp_path / 'folder')!r})",
            f"__import__('posix').chmod({str(kept)!r}, 0)",
        )
    )
    code = f"{tries}\nimport os\ndef double(x):\n    assert 'SPECBENCH_SECRET' not in os.environ\n    return 2 * x\n"
    try:
        assert PROBLEM.passed(f"```python\n{code}```")
    finally:
        del os.environ["SPECBENCH_SECRET"]
    assert [path.name for path in tmp_path.iterdir()] == ["kept"] and kept.read_text() == "here"


def test_what_stands_behind_the_prompt_is_python_as_far_as_it_goes():
    assert completion(PROMPT, "    return 2 * x\n    return (", "double") == "    return 2 * x\n"
    assert completion(PROMPT, "(((", "double") == ""


# Numbers --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 109", "109"),
        ("The answer is $1,234.50.", "1234.50"),
        ("3 - 5 is -2", "-2"),
        ("16-3 = 13 eggs", "13"),
        ("It costs 20%", "20"),
        ("none at all", None),
        ("", None),
    ],
)
def test_the_last_number_of_a_text(text, number):
    assert last_number(text) == number


def test_numbers_are_equal_by_value():
    assert Number("1234.5").passed("so it is 1,234.50 dollars")
    assert not Number("5").passed("5 or rather 6") and not Number("5").passed("five")


# Prompt sets ----------------------------------------------------------------------------------------------------------


def written(folder, **record):
    folder.joinpath("set.jsonl").write_text(json.dumps({"question_id": "a", "turns": [PROMPT], **record}))
    return {"name": "set", "root": str(folder)}


def test_a_set_hands_out_checks_where_they_are_wanted_and_there(tmp_path):
    program = written(tmp_path, test=TESTS, entry_point="double")
    assert PromptSet(**program, check=UnitTests()).load()[0].check is None
    assert PromptSet(**program, check=UnitTests(), score=True).load()[0].check == PROBLEM
    number = written(tmp_path, reference=["2 * 3 = <<2*3=6>>6\n#### 6"])
    assert PromptSet(**number, check=LastNumber(), score=True).load()[0].check == Number("6")


@pytest.mark.parametrize(
    ("check", "record", "said"),
    [
        (UnitTests(), {}, "nothing to score by"),
        (None, {"test": TESTS, "entry_point": "double"}, "nothing to score by"),
        (UnitTests(), {"test": TESTS, "entry_point": "not a name"}, "the name of a function"),
        (UnitTests(), {"test": 3, "entry_point": "double"}, "a text of tests"),
        (LastNumber(), {"reference": "no idea"}, "ends in a number"),
    ],
)
def test_what_cannot_be_scored_is_refused_in_one_line(check, record, said, tmp_path):
    with pytest.raises(SpecBenchError, match=f"record 1: .*{said}"):
        PromptSet(**written(tmp_path, **record), check=check, score=True).load()
