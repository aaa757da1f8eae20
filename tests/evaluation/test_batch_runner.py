"""Cells of several questions at once: rows as alone, shares of the batch's time, whole batches."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from conftest import make, tiny
from corpora import Numbers
from fixtures import settings

from specbench.data.prompts import Question
from specbench.engine.decode import RunSettings
from specbench.engine.sampling import Sampler
from specbench.engine.verify import Lossless
from specbench.evaluation.batch_runner import BatchBench
from specbench.evaluation.runner import Bench, BoundDrafter
from specbench.records.blocks import Ledger, read_block
from specbench.records.rows import Failure, QuestionEnd

QUESTIONS = [Question(str(i), "c", (f"{i} 3 14 15", "9 26")[: 1 + i % 2]) for i in range(5, 10)]


class Rule(Lossless):
    def __init__(self):
        """The protocol's own takes part in no instance."""


GREEDY = Sampler()


def bench(target, batch, sampler=GREEDY, names=("none", "eagle2", "prompt_lookup")):
    chat = Numbers()
    bound = [BoundDrafter(name, make(name, target), Rule()) for name in names]
    arguments = target, chat, bound, sampler, RunSettings(max_new_tokens=20)
    return Bench(*arguments) if batch == 1 else BatchBench(*arguments, batch=batch)


def rows_of(ledger):
    return {r.key: r for r in read_block(ledger.block.path)[1] if not isinstance(r, QuestionEnd)}


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(0.9)], ids=["greedy", "sampled"])
def test_rows_of_batches_are_those_of_single_questions(tmp_path, sampler):
    target, found = tiny(), []
    target.stop_ids = (7,)
    for batch in (1, 2, 3):
        ledger = Ledger(tmp_path / str(batch), settings("eagle2", "prompt_lookup"), "none", timed=True)
        bench(target, batch, sampler).run(QUESTIONS, ledger)
        found.append(rows_of(ledger))
    for rows in found[1:]:
        assert rows.keys() == found[0].keys()
        assert all(
            (row.tokens, row.accepted) == (found[0][key].tokens, found[0][key].accepted) for key, row in rows.items()
        )
        assert all(row.batch is not None and row.others is not None for row in rows.values())
        if sampler.greedy:
            assert {row.audit["verdict"] for row in rows.values() if row.drafter != "none"} == {"identical"}


def test_the_shares_of_a_batch_add_up_to_its_seconds(tmp_path):
    target = tiny()
    ledger = Ledger(tmp_path, settings("eagle2", "prompt_lookup"), "none", timed=True)
    bench(target, 2).run(QUESTIONS[:2], ledger)
    rows = [row for row in rows_of(ledger).values() if row.turn == 0]
    for name in ("none", "eagle2"):
        one, other = (row for row in rows if row.drafter == name)
        assert one.batch is not None and other.batch is not None
        assert (one.batch.size, one.batch.tokens) == (2, len(one.tokens) + len(other.tokens) - 2)
        assert one.decode_s + other.decode_s == pytest.approx(one.batch.seconds)
        assert max(one.batch.own_s, other.batch.own_s) == pytest.approx(one.batch.seconds)
        phases = one.draft_s + one.target_s + one.verify_s + one.rest_s
        assert min(one.target_s, one.verify_s) > 0 and phases == pytest.approx(one.decode_s)
        assert one.draft_s > 0 or name == "none", "what each sequence does by itself is drafting, too"


def test_a_batch_that_failed_is_a_failure_of_each_question_and_the_next_goes_on(tmp_path, monkeypatch):
    target = tiny()
    made = bench(target, 2)
    whole, calls = target.score, []

    def failing(*arguments, **options):
        calls.append(1)
        if len(calls) == 3:
            raise MemoryError("no room")
        return whole(*arguments, **options)

    monkeypatch.setattr(made, "_warm_up", lambda question: {})
    monkeypatch.setattr(target, "score", failing)
    ledger = Ledger(tmp_path, settings("eagle2", "prompt_lookup"), "none", timed=True)
    made.run(QUESTIONS, ledger)
    failures = [row for row in rows_of(ledger).values() if isinstance(row, Failure)]
    assert {row.question for row in failures} == {"5", "6"} and "no room" in failures[0].error
    assert {row.question for row in rows_of(ledger).values()} == {q.id for q in QUESTIONS}


@pytest.mark.parametrize("long", [0, 2, 4])  # 4: alone in the last batch, beside fillers
def test_a_prompt_that_is_too_long_fails_alone(tmp_path, long):
    target = tiny()
    target.max_context = 64
    made = bench(target, 2)
    encode, text = made.chat.encode, QUESTIONS[long].turns[0]
    made.chat.encode = lambda history: [3] * 64 if history[0]["content"] == text else encode(history)
    ledger = Ledger(tmp_path, settings("eagle2", "prompt_lookup"), "none", timed=True)
    made.run(QUESTIONS, ledger)
    rows = rows_of(ledger).values()
    failed = {row.question for row in rows if isinstance(row, Failure)}
    assert failed == {QUESTIONS[long].id} == {row.question for row in rows if row.question == QUESTIONS[long].id}
    others = [q for q in QUESTIONS if q.id not in failed]
    assert not made.missing(others, ledger), "its neighbours were decoded"
    assert all("a prompt of 64 tokens in a context of 64" in row.error for row in rows if isinstance(row, Failure))


def test_answers_of_batches_are_scored(tmp_path):
    check = SimpleNamespace(scores=lambda text: (len(text) > 3, 0.5), require=lambda: None, description={"kind": "length"})
    asked = [replace(question, check=check) for question in QUESTIONS[:2]]
    ledger = Ledger(tmp_path, settings("eagle2", "prompt_lookup"), "none", timed=True)
    bench(tiny(), 2).run(asked, ledger)
    for row in rows_of(ledger).values():
        last = len(asked[[q.id for q in asked].index(row.question)].turns) == row.turn + 1
        assert (row.solved, row.rouge_l) == ((True, 0.5) if last else (None, None))


def test_a_whole_batch_has_to_fit_into_the_time_that_is_left(tmp_path):
    ledger = Ledger(tmp_path, settings("eagle2", "prompt_lookup"), "none", timed=True)
    made = bench(tiny(), 2)
    made.questions = QUESTIONS
    turns = len(QUESTIONS[0].turns) + len(QUESTIONS[1].turns)
    assert made._coming(QUESTIONS[0], ledger) == 3 * turns
    assert made._coming(QUESTIONS[4], ledger) == 3 * len(QUESTIONS[4].turns)


def test_a_cell_that_was_interrupted_is_completed_in_whole_batches(tmp_path, monkeypatch):
    target = tiny()
    ledger = Ledger(tmp_path, settings("eagle2", "prompt_lookup"), "none", timed=True)
    bench(target, 2).run(QUESTIONS[:3], ledger)
    made = bench(target, 2)
    made.run(QUESTIONS, ledger)
    assert not made.missing(QUESTIONS, ledger)
    assert {row.batch.size for row in rows_of(ledger).values()} == {2}
