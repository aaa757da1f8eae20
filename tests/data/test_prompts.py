"""Prompts of one's own, and Spec-Bench's tasks: which files are taken, what a bad one is told, whose rows are whose."""

import json
import re

import pytest
from command_line import blocks_of, call, records_of, run
from conftest import composed
from hydra.utils import instantiate

from specbench.common.errors import SpecBenchError
from specbench.config.cli import expand_shorthands
from specbench.data import prompts as prompt_sets
from specbench.data.prompts import PromptSet


def written(path, *records):
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def asked(path):
    return PromptSet(path.stem, path=str(path)).load()


def test_a_record_holds_turns_a_prompt_or_a_question(tmp_path):
    path = written(
        tmp_path / "mine.jsonl",
        {"turns": ["a", "b"], "question_id": 7, "category": "talk"},
        {"prompt": "c", "id": "third"},
        {"question": "d", "prompt": ["d"]},
    )
    found = asked(path)
    assert [q.turns for q in found] == [("a", "b"), ("c",), ("d",)]
    assert [q.id for q in found] == ["7", "third", found[2].digest] and found[0].category == "talk"


def test_a_text_file_holds_a_prompt_a_line(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("What is {x}?\n\n  And\u2028why?  \n")
    assert [q.turns for q in asked(path)] == [("What is {x}?",), ("And\u2028why?",)]


BAD = {
    "none": ([{"prompt": "a"}, {"text": "b"}], "mine.jsonl line 2: no prompt; give it `turns`"),
    "two": ([{"prompt": "a", "question": "b"}], "line 1: `prompt` and `question` differ; keep the one"),
    "empty prompt": ([{"prompt": " "}], "line 1: empty prompt"),
    "a book": ([{"prompt": "a"}, {"turns": ["b", "x" * 10_000_001]}], "line 2: a prompt of 10,000,001 characters"),
    "a number": ([{"prompt": 3}], "line 1: `prompt` is not a text"),
    "no turn": ([{"turns": []}], "line 1: `turns` is not a text or a list of texts"),
    "ids": ([{"prompt": "a", "id": 1}, {"prompt": "b", "id": "1"}], "lines 1 and 2: both have question_id 1; give each"),
    "twice": ([{"prompt": "a"}, {"prompt": "c"}, {"turns": ["a"]}], "lines 1 and 3: are the same prompt"),
    "twice, by id": (
        [{"prompt": "a", "id": 1}, {"prompt": "a", "id": 2}],
        "lines 1 and 2: are the same prompt; remove one",
    ),
    "odd id": ([{"prompt": "a", "id": [1]}], "line 1: `question_id` is [1]"),
    "odd category": ([{"prompt": "a", "category": 3}], "line 1: `category` is 3"),
    "no object": ([["a"]], "line 1: input should be an object"),
    "nothing": ([], "dataset mine has no prompts; write some into"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_prompt_is_named_by_its_line(tmp_path, case):
    records, message = BAD[case]
    with pytest.raises(SpecBenchError, match=re.escape(message)):
        asked(written(tmp_path / "mine.jsonl", *records))


def test_bytes_and_cut_off_lines_are_named_too(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    with pytest.raises(SpecBenchError, match="line 2 is not UTF-8"):
        asked(path)
    path.write_text('{"prompt": "a"}\n{"prompt": ')
    with pytest.raises(SpecBenchError, match="line 2: not JSON"):
        asked(path)


def test_a_word_of_the_command_line_becomes_a_data_set():
    assert expand_shorthands(["prompts=a/b.jsonl,c d.txt"]) == ["dataset=prompts", "dataset.path=a/b.jsonl,'c d.txt'"]
    names = {"a/My own (1).jsonl": "My-own-1-", "v1.2.txt": "v1.2", "a/.jsonl": "jsonl", "/ü'.jsonl": "prompts"}
    for path, name in names.items():
        config = composed("run", *expand_shorthands([f"prompts={path}"])).dataset
        assert (config.path, config.name) == (path, name)


def test_a_run_takes_a_file_under_its_own_name(home, tmp_path):
    results = tmp_path / "results"
    path = written(tmp_path / "my own.jsonl", {"prompt": "w3 w4"}, {"question": "w9 w8 w7"})
    typed = "run", "-m", "drafter=suffix,prompt_lookup", f"prompts={path}", f"results={results}"
    done = call(home, *typed)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "my-own" in done.stdout and done.stdout.count(" same") >= 2
    assert blocks_of(results, "suffix")[0].parent.name == "my-own-greedy-12"


def test_rows_of_an_edited_file_are_not_mixed(home, tmp_path):
    results = tmp_path / "results"
    path = written(tmp_path / "mine.jsonl", {"prompt": "w3 w4"}, {"prompt": "w9 w8 w7"})
    arguments = "run", "drafter=suffix", f"prompts={path}", f"results={results}"
    assert "2 questions" in run(home, *arguments)
    written(path, {"prompt": "w3 w4"}, {"prompt": "w9 w8"}, {"prompt": "w5"})
    assert "3 questions" in run(home, *arguments)
    _, rows = records_of(results, "suffix")
    assert len([r for r in rows if r.drafter == "suffix"]) == 4 == len({r.text for r in rows}), "one was there already"


def test_a_study_asks_ones_own_prompts(home, tmp_path):
    path = written(tmp_path / "mine.jsonl", {"prompt": "w3 w4"})
    out = run(home, "study", "study=retrieval", "arms=[suffix]", "cells=[0]", f"prompts={path}", f"results={tmp_path}")
    assert "mine" in out and blocks_of(tmp_path, "suffix")[0].parent.name.startswith("mine-greedy")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prompts=/nowhere/x.jsonl"], "prompts=/nowhere/x.jsonl: there is no such file"),
        (["dataset=prompts"], "give prompts=FILE.jsonl"),
        (["prompts="], "dataset.path"),
    ],
)
def test_a_file_that_is_not_there_is_one_line(home, arguments, message):
    assert message in run(home, "run", "drafter=none", *arguments, ok=False)


# Spec-Bench -----------------------------------------------------------------------------------------------------------

SPEC_BENCH = [
    {"question_id": 81, "category": "writing", "turns": ["a", "b"]},
    {"question_id": 161, "category": "translation", "turns": ["Translate German to English: c"], "reference": ["d"]},
    {"question_id": 481, "category": "rag", "turns": ["passage\nquestion"], "reference": [["e"]]},
]


@pytest.mark.parametrize(
    ("name", "ids"), [("spec_bench", ["81", "161", "481"]), ("translation", ["161"]), ("rag", ["481"])]
)
def test_spec_benchs_tasks_are_read_from_its_one_file(tmp_path, name, ids):
    written(tmp_path / "question.jsonl", *SPEC_BENCH)
    prompts = instantiate(composed("run", f"dataset={name}", f"data.root={tmp_path}").dataset)
    assert prompts.name == name and [q.id for q in prompts.load()] == ids
    assert prompts.web.address.endswith("data/spec_bench/question.jsonl")


def test_a_file_of_the_sets_own_name_comes_first_and_one_without_its_task_is_refused(tmp_path):
    rag = instantiate(composed("run", "dataset=rag", f"data.root={tmp_path}").dataset)
    with pytest.raises(SpecBenchError, match=r"no data file .*question\.jsonl"):
        rag.load()
    written(tmp_path / "question.jsonl", SPEC_BENCH[0])
    with pytest.raises(SpecBenchError, match="dataset rag has no prompts of category rag"):
        rag.load()
    written(tmp_path / "rag.jsonl", {"turns": ["f"]})
    assert [q.turns for q in rag.load()] == [("f",)]


def test_spec_benchs_tasks_come_from_its_pinned_file_by_their_category(tmp_path, monkeypatch):
    asked = []
    path = written(tmp_path / "f", *SPEC_BENCH)
    monkeypatch.setattr(prompt_sets, "file_from_web", lambda file: asked.append(file) or path)
    found = instantiate(composed("run", "dataset=translation").dataset).load()
    assert [q.id for q in found] == ["161"] and "fd2c1cd7d2201ef71db4c5f4e455008f017967bf" in asked[0].address
