"""The runner of a cell whose questions are decoded several at once."""

import time
from collections.abc import Sequence
from typing import Any

from specbench.common.budget import Budget, Pace
from specbench.common.errors import format_exception
from specbench.data.chat import Message
from specbench.data.prompts import Question
from specbench.engine.batch import DecodedBatch, decode_together
from specbench.engine.decode import Limits
from specbench.evaluation import phases, warm_up
from specbench.evaluation.audit import audit
from specbench.evaluation.runner import Bench, BoundDrafter
from specbench.records.blocks import Ledger
from specbench.records.rows import Batched, Failure, GpuUse, QuestionEnd, Row


class BatchBench(Bench):
    """Decodes questions `batch` at a time, with each drafter in turn; the baseline of a batch is a batch of plain decoding.

    A last batch that is not full is filled up with other questions, whose answers are not written.

    Args:
        arguments: as `Bench` takes them.
    """

    def __init__(self, *arguments: Any, batch: int):
        super().__init__(*arguments)
        self.batch = batch
        self.questions: Sequence[Question] = []
        self._tried: set[str] = set()  # digests of questions that were in a batch of this run, and may have failed there

    def run(self, questions: Sequence[Question], ledger: Ledger, budget: Budget | None = None, *rest: Any) -> None:
        self.questions, self._tried = questions, set()
        super().run(questions, ledger, budget, *rest)

    def _untimed(self, bound: BoundDrafter, prompt: list[int]) -> int:
        """As for one sequence, with a whole batch: kernels are made for its shapes."""
        limits = Limits(warm_up.TOKENS, self.target.stop_ids)
        batch = decode_together(
            self.target, bound.drafter, [prompt] * self.batch, limits, bound.rule, self.sampler, [None] * self.batch
        )
        return sum(len(event.tokens) for one in batch.events for event in one)

    def _decode_question(self, question: Question, index: int, ledger: Ledger, pace: Pace, wait: bool) -> bool:
        """Decode the batch that begins with a question, unless an earlier batch held it."""
        group = self._batch_of(question, ledger)
        if not group:
            return True
        others = [q for q in self.questions if q not in group] or list(self.questions)
        filled = group + (others * self.batch)[: self.batch - len(group)]
        self._tried |= {q.digest for q in group}
        begin = time.monotonic()
        count = sum(len(self._missing(q, ledger)) for q in group)
        self._group(filled, len(group), self._in_turn(index), ledger)
        seconds = time.monotonic() - begin
        pace.add(count, seconds)
        for q in group:
            ledger.write(QuestionEnd(q.id, count // len(group), round(seconds / len(group), 3)))
        return True

    def _coming(self, question: Question, ledger: Ledger) -> int:
        return sum(len(self._missing(q, ledger)) for q in self._batch_of(question, ledger))

    def _batch_of(self, question: Question, ledger: Ledger) -> list[Question]:
        """The questions of the batch that begins with this one; none if an earlier batch of this run held it."""
        if question.digest in self._tried:
            return []
        lacking = [q for q in self.questions if self._missing(q, ledger) and q.digest not in self._tried]
        return lacking[lacking.index(question) :][: self.batch]

    def _group(
        self, questions: Sequence[Question], real: int, bound_drafters: Sequence[BoundDrafter], ledger: Ledger
    ) -> None:
        """Decode all turns of some questions, of which the first `real` are written. As in `_turns`, history is plain."""
        histories: list[list[Message]] = [[] for _ in questions]
        for turn in range(max(len(q.turns) for q in questions[:real])):
            for history, question in zip(histories, questions, strict=True):
                asked = question.turns[turn % len(question.turns)]  # fillers may have fewer turns
                history.append({"role": "user", "content": asked})
            answers = self._batch_turn(questions, real, turn, histories, bound_drafters, ledger)
            if answers is None:
                return
            for history, row in zip(histories, answers, strict=True):
                history.append({"role": "assistant", "content": self.text(row.tokens).strip()})

    def _batch_turn(
        self,
        questions: Sequence[Question],
        real: int,
        turn: int,
        histories: Sequence[list[Message]],
        bound_drafters: Sequence[BoundDrafter],
        ledger: Ledger,
    ) -> list[Row] | None:
        """Write a turn's rows. Returns the baseline's; None if it failed."""
        prompts = [self.chat.encode(history) for history in histories]
        own = self._that_fit(questions, real, turn, prompts, ledger)
        if not own:
            return None
        wanted = {b.label: [i for i in own if self._wants(b, questions[i], turn, ledger)] for b in bound_drafters}
        references: list[Row] | None = None
        for bound in bound_drafters:
            if bound is not self.bound_drafters[0] and not wanted[bound.label]:
                continue
            rows = [phases.empty_row(bound.label, q, turn, prompt) for q, prompt in zip(questions, prompts, strict=True)]
            records = self._batched(rows, bound, prompts, references)
            if references is None:
                references = rows if isinstance(records[0], Row) else None
            asked = [i for i in own if turn < len(questions[i].turns)]
            for i in asked if bound is self.bound_drafters[0] else wanted[bound.label]:
                ledger.write(self._scored(records[i], questions[i]))
            if references is None:
                return None
        return references

    def _that_fit(
        self, questions: Sequence[Question], real: int, turn: int, prompts: list[list[int]], ledger: Ledger
    ) -> list[int]:
        """Indices of the questions that are decoded and written; the others' prompts are too long.

        That is a failure of theirs alone, and in `prompts` one that fits takes their place.
        """
        fitting = [i for i, prompt in enumerate(prompts) if 0 < len(prompt) < self.target.max_context]
        for i in range(real):
            if i not in fitting and turn < len(questions[i].turns):
                row = phases.empty_row(self.bound_drafters[0].label, questions[i], turn, prompts[i])
                ledger.write(self._guarded(row, self._within_context))
        if fitting:
            prompts[:] = [prompts[i if i in fitting else fitting[0]] for i in range(len(prompts))]
        return [i for i in range(real) if i in fitting]

    def _within_context(self, row: Row) -> None:
        self.limits.within(row.prompt_tokens, self.target.max_context)

    def _wants(self, bound: BoundDrafter, question: Question, turn: int, ledger: Ledger) -> bool:
        return turn < len(question.turns) and not ledger.done(bound.label, question.digest, turn)

    def _batched(
        self, rows: list[Row], bound: BoundDrafter, prompts: list[list[int]], references: list[Row] | None
    ) -> Sequence[Row | Failure]:
        """Fill a batch's rows; or its failures, after which the other batches go on."""
        generators = [self._generator(row, bound.rule) for row in rows]
        self.background.start()
        self.meter.start()
        try:
            batch = decode_together(
                self.target, bound.drafter, prompts, self.limits, bound.rule, self.sampler, generators, self.clock
            )
            fill(rows, batch, self.background.read(), GpuUse.read(self.meter))
            for row, prompt, reference in zip(rows, prompts, references or [], strict=references is not None):
                if self.sampler.greedy and not bound.rule.lossy:
                    row.audit = audit(self.target, prompt, reference.tokens, row.tokens)
                if bound.rule.simulated:
                    row.audit = {"verdict": "simulated acceptance"}
        except Exception as error:
            return [Failure(row.drafter, row.question, row.turn, format_exception(error), row.text) for row in rows]
        return rows


def fill(rows: Sequence[Row], batch: DecodedBatch, others: float | None, use: GpuUse | None = None) -> None:
    """Counts of each sequence, and its share of the batch's seconds and energy by the tokens that its cycles emitted."""
    for row, events in zip(rows, batch.events, strict=True):
        phases.fill_untimed(row, events)
    tokens = sum(len(row.tokens) - 1 for row in rows)
    for row, ended in zip(rows, batch.ended, strict=True):
        share = (len(row.tokens) - 1) / max(1, tokens)
        row.prefill_s, row.decode_s = batch.prefilled / len(rows), share * batch.seconds
        row.draft_s, row.target_s, row.verify_s = (
            share * seconds for seconds in (batch.drafting, batch.verifying, batch.checking)
        )
        row.rest_s = row.decode_s - row.draft_s - row.target_s - row.verify_s
        row.batch = Batched(len(rows), tokens, batch.prefilled, batch.seconds, max(0.0, ended - batch.prefilled))
        row.others, row.gpu = others, None if use is None else use.share(share)
