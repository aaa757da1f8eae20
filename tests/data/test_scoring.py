"""Answers held to their problems' tests: what is a program in an answer, and what passes."""

import json
import textwrap

import pytest

from specbench.common.errors import SpecBenchError
from specbench.data.prompts import PromptSet
from specbench.data.scoring import (
    LastNumber,
    Number,
    Program,
    Reference,
    Summary,
    UnitTests,
    completion,
    last_number,
    rouge_l,
)

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
    "a library that is installed here": "    import torch\n    return 2 * x\n",
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_does_not_pass(what):
    assert not PROBLEM.passed(WRONG[what])


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


# Summaries --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "reference", "score"),
    [
        ("The cat sat on the mat.", "the cat is on a mat", 2 / 3),  # as the package rouge-score has them
        ("a b c d", "d c b a", 0.25),
        ("It's U.S. news: 3.5% up", "news: the U.S. is up 3.5%", 0.5),
        ("", "x", 0),
    ],
)
def test_rouge_l_is_that_of_the_longest_common_subsequence(text, reference, score):
    assert rouge_l(text, reference) == rouge_l(reference, text) == pytest.approx(score)
    assert Summary(reference).scores(text) == (None, pytest.approx(score))


# Prompt sets ----------------------------------------------------------------------------------------------------------


def written(folder, **record):
    folder.joinpath("set.jsonl").write_text(json.dumps({"question_id": "a", "turns": [PROMPT], **record}))
    return {"name": "set", "root": str(folder)}


def test_a_set_hands_out_checks_where_they_are_wanted_and_there(tmp_path):
    program = written(tmp_path, test=TESTS, entry_point="double")
    assert PromptSet(**program, check=UnitTests()).load()[0].check is None
    assert PromptSet(**program, check=UnitTests(), score=True, run_programs=True).load()[0].check == PROBLEM
    number = written(tmp_path, reference=["2 * 3 = <<2*3=6>>6\n#### 6"])
    assert PromptSet(**number, check=LastNumber(), score=True).load()[0].check == Number("6")
    summary = written(tmp_path, reference=["The cat sat."])
    assert PromptSet(**summary, check=Reference(), score=True).load()[0].check == Summary("The cat sat.")


@pytest.mark.parametrize(
    ("check", "record", "message"),
    [
        (UnitTests(), {}, "nothing to score by"),
        (None, {"test": TESTS, "entry_point": "double"}, "nothing to score by"),
        (UnitTests(), {"test": TESTS, "entry_point": "not a name"}, "the name of a function"),
        (UnitTests(), {"test": 3, "entry_point": "double"}, "a text of tests"),
        (LastNumber(), {"reference": "no idea"}, "ends in a number"),
        (Reference(), {}, "nothing to score by"),
        (Reference(), {"reference": ["one", "two"]}, "is no text"),
        (Reference(), {"reference": "..."}, "is no text"),
    ],
)
def test_what_cannot_be_scored_is_refused_in_one_line(check, record, message, tmp_path):
    with pytest.raises(SpecBenchError, match=f"record 1: .*{message}"):
        PromptSet(**written(tmp_path, **record), check=check, score=True, run_programs=True).load()
