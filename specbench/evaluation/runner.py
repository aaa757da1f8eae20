"""The runner of one cell: its drafters and the baseline decode the same prompts in turn; every generation becomes a row.

Imports no configuration and no concrete drafter.
"""

import os
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from specbench.common.budget import Budget, Pace, longest
from specbench.common.errors import SpecBenchError, format_exception, warn
from specbench.common.gpu import Meter
from specbench.common.progress import progress, span
from specbench.common.timing import BackgroundLoad, Clock, PhaseClock
from specbench.data.chat import Chat, Message, answer_text
from specbench.data.prompts import Question
from specbench.data.scoring import Check
from specbench.engine.decode import Limits, RunSettings, decode
from specbench.engine.drafter import Drafter, ServedEngine
from specbench.engine.interface import Taps
from specbench.engine.replay import ReplayTarget
from specbench.engine.sampling import Sampler
from specbench.engine.target import Target
from specbench.engine.tensors import dtype_name
from specbench.engine.verify import Rule
from specbench.evaluation import drift, phases, served, warm_up
from specbench.evaluation.audit import audit
from specbench.evaluation.trace import CalibratedDrafter
from specbench.records.blocks import Ledger, locked
from specbench.records.metrics import BASELINE, OTHERS
from specbench.records.rows import Failure, GpuUse, LinkUse, QuestionEnd, Row
from specbench.remote.target import RemoteTarget


@dataclass(frozen=True)
class BoundDrafter:
    """A drafter that is bound to the target, its label in rows, and its rule of acceptance."""

    label: str
    drafter: Drafter
    rule: Rule


class Bench:
    """Decodes questions with some drafters, the baseline first, in turn, into one cell.

    The rows of a drafter that remembers earlier prompts (`state=run`) depend on the order of the prompts: if any of them is
    missing, all are decoded again, from the first prompt on.

    Args:
        replay: only the baseline decodes; the others draft against its answers without target passes, see `ReplayTarget`.
            Drafters that learn from rejected drafts need target passes all the same. Replayed rows hold no seconds.
    """

    def __init__(
        self,
        target: Target,
        chat: Chat,
        bound_drafters: Sequence[BoundDrafter],
        sampler: Sampler,
        settings: RunSettings,
        replay: bool = False,
    ):
        self.target, self.chat, self.bound_drafters = target, chat, bound_drafters
        self.sampler, self.settings, self.replay = sampler, settings, replay
        self.limits = Limits(settings.max_new_tokens, target.stop_ids)
        self.clock, self.background, self.meter = Clock(target.device), BackgroundLoad(), Meter(target.device)
        self.phases = PhaseClock(target.device)
        self.left_out: set[str] = set()  # labels of drafters that wait until all others are complete
        self.warned, self.remote = False, target if isinstance(target, RemoteTarget) else None
        if self.remote is not None:
            self.remote.cutting = False  # but while a drafter decodes
        if replay and target.dtype != torch.float32:
            message = f"replay=true: {dtype_name(target.dtype)} answers differ at ties"
            raise SpecBenchError(f"{message}; set model.dtype=float32, or replay=false")
        taps = [b.drafter.taps.resolve(target.layers) for b in bound_drafters]
        self.taps = Taps(tuple({i for t in taps for i in t.hidden}), tuple({i for t in taps for i in t.kv}))

    def run(
        self,
        questions: Sequence[Question],
        ledger: Ledger,
        budget: Budget | None = None,
        below: Callable[[], str] | None = None,
        total_work: float = 1.0,
    ) -> None:
        """Decode what the cell lacks, in whole questions, while the next one is likely to fit into the budget.

        A question that another process is decoding is left to the end, and skipped or finished then.

        Args:
            below: text under the progress bar of a terminal, updated after each question.
            total_work: work of this cell and all later ones, in units of this cell's; only announced.
        """
        budget = budget or Budget()
        restarted = self._restart_persisting(questions, ledger, budget)
        todo = [q for q in questions if self._missing(q, ledger)]
        if not todo or budget.over:
            return
        budget = Budget() if restarted else budget
        for check in [question.check for question in todo if question.check is not None]:
            check.require()
        names = ["plain" if b.label == BASELINE else b.label for b in self.bound_drafters]
        title = ", ".join(names) if len(names) < 4 else f"{len(names)} drafters"
        if token_s := self._warm_up(todo):
            work = self._duration(todo, ledger, token_s, budget, total_work)
            print(f"{title}: {work} ({self.settings.max_new_tokens:,} tokens an answer)", file=sys.stderr, flush=True)
        pace = Pace()
        with progress(title, len(questions), "questions", below) as reached, ExitStack() as stack:
            for bound in restarted:
                bound.drafter.persist(True)  # what it sees is kept from prompt to prompt, from here on
                stack.callback(bound.drafter.persist, False)
            reached(len(questions) - len(todo))
            queue = [(index, question, False) for index, question in enumerate(todo)]
            for index, question, wait in queue:  # questions of other processes are appended while it is read
                if not budget.allows(pace.of(self._coming(question, ledger))):
                    return
                if not self._decode_question(question, index, ledger, pace, wait):
                    queue.append((index, question, True))
                reached(len(questions) - sum(bool(self._missing(q, ledger)) for q in todo))

    def missing(self, questions: Sequence[Question], ledger: Ledger) -> int:
        """How many generations of these questions have no good row."""
        return sum(len(self._lacking(question, ledger)) for question in questions)

    def text(self, tokens: list[int]) -> str:
        """The text of an answer, without stop tokens."""
        return answer_text(self.chat.tokenizer, self.target.stop_ids, tokens)

    def _missing(self, question: Question, ledger: Ledger) -> list[tuple[str, int]]:
        """Labels and turns of a question that lack a good row, without the drafters that are left out."""
        return [(label, turn) for label, turn in self._lacking(question, ledger) if label not in self.left_out]

    def _lacking(self, question: Question, ledger: Ledger) -> list[tuple[str, int]]:
        """Labels and turns of a question that lack a good row."""
        all_turns = ((b.label, turn) for turn in range(len(question.turns)) for b in self.bound_drafters)
        return [(label, turn) for label, turn in all_turns if not ledger.done(label, question.digest, turn)]

    def _coming(self, question: Question, ledger: Ledger) -> int:
        """How many generations are decoded with a question, before the budget is asked again."""
        return len(self._missing(question, ledger))

    def _restart_persisting(self, questions: Sequence[Question], ledger: Ledger, budget: Budget) -> list[BoundDrafter]:
        """The `state=run` drafters that lack a row, whose rows no longer count.

        They need all prompts in one go. With limited time they are left out until all others are complete.
        """
        missing = {label for question in questions for label, _ in self._lacking(question, ledger)}
        restarted = [b for b in self.bound_drafters if b.drafter.state == "run" and b.label in missing]
        labels = {b.label for b in restarted}
        if restarted and budget.seconds is not None:
            when = "when all others are complete" if missing > labels else "now, whatever minutes= says"
            warn(f"{', '.join(sorted(labels))} (state=run) needs all prompts in one go, {when}")
        if budget.seconds is not None and missing > labels:
            self.left_out = labels
            return []
        for bound in restarted:
            ledger.forget(bound.label)
        return restarted

    def _decode_question(self, question: Question, index: int, ledger: Ledger, pace: Pace, wait: bool) -> bool:
        """Decode what one question lacks; False if another process holds it.

        Args:
            index: rotates the order of the drafters, so that slow changes of the machine's speed meet all alike.
            wait: until the other process is done with it.
        """
        with locked(ledger.folder, question.digest, wait) as ours:
            if not ours:
                return False
            ledger.refresh()
            if missing := set(self._missing(question, ledger)):
                begin = time.monotonic()
                self._turns(question, self._in_turn(index), missing, ledger)
                seconds = time.monotonic() - begin
                pace.add(len(missing), seconds)
                ledger.write(QuestionEnd(question.id, len(missing), round(seconds, 3)))
        return True

    def _in_turn(self, index: int) -> list[BoundDrafter]:
        """The baseline, then the other drafters, each of which is first in its turn."""
        baseline, rest = self.bound_drafters[:1], self.bound_drafters[1:]
        shift = index % len(rest) if rest else 0
        return [*baseline, *rest[shift:], *rest[:shift]]

    def _turns(
        self, question: Question, bound_drafters: Sequence[BoundDrafter], missing: set[tuple[str, int]], ledger: Ledger
    ) -> None:
        """Decode what is missing of all turns of one question.

        The history of all drafters holds the baseline's answers: in half precision a drafter's answer may differ at a
        numerical tie, and the next turn would compare different prompts. Where the baseline failed the next turn is
        not asked.
        """
        history: list[Message] = []
        for turn, text in enumerate(question.turns):
            history.append({"role": "user", "content": text})
            lacking = [b for b in bound_drafters if (b.label, turn) in missing]
            answer = self._turn(question, turn, self.chat.encode(history), lacking, ledger)
            if answer is None:
                return
            history.append({"role": "assistant", "content": self.text(answer.tokens).strip()})

    def _turn(
        self, question: Question, turn: int, prompt: list[int], lacking: Sequence[BoundDrafter], ledger: Ledger
    ) -> Row | None:
        """Write the missing rows of one turn. Returns the baseline's row; a replay takes it from any block."""
        baseline = self.bound_drafters[0]
        reference = ledger.answer(question.digest, turn) if self.replay or not lacking else None
        if lacking and reference is None and baseline not in lacking:
            lacking = [baseline, *lacking]  # seconds are compared inside one block
        shared: list[ReplayTarget] = []  # at most one, by all that draft against this answer
        for bound in lacking:
            row = phases.empty_row(bound.label, question, turn, prompt)
            record: Row | Failure
            if bound is baseline:
                record = self._timed(row, bound, prompt, reference, question)
                reference = record if isinstance(record, Row) else reference
            elif reference is None:
                reason = "the baseline failed here, so there is no answer to compare with; run again"
                record = Failure(row.drafter, row.question, turn, reason, row.text)
            elif self.replay:
                record = self._guarded(row, self._replayed, bound, shared, prompt, reference.tokens)
            else:
                record = self._timed(row, bound, prompt, reference, question)
            ledger.write(record)
        return reference

    def _timed(
        self, row: Row, bound: BoundDrafter, prompt: list[int], reference: Row | None, question: Question
    ) -> Row | Failure:
        """A timed generation, scored."""
        fill = self._served if isinstance(bound.drafter, ServedEngine) else self._decoded
        record = self._guarded(row, fill, bound, prompt, reference)
        if not self.warned and row.link is None and (row.others or 0.0) > OTHERS * (os.cpu_count() or 1):
            self.warned = True
            taken = f"other processes take {row.others:.1f} cores"
            print(f"the machine is busy: {taken}; speeds will not count", file=sys.stderr)
        return self._scored(record, question)

    def _scored(self, record: Row | Failure, question: Question) -> Row | Failure:
        """A record of the answer to a question's last turn, with its score if the question has a check."""
        if isinstance(record, Row) and question.check is not None and record.turn + 1 == len(question.turns):
            return self._guarded(record, self._score, question.check)
        return record

    def _guarded(self, row: Row, fill: Callable[..., None], *arguments: Any) -> Row | Failure:
        """The row, filled; or the failure, after which the other generations go on."""
        try:
            fill(row, *arguments)
            return row
        except Exception as error:
            return Failure(row.drafter, row.question, row.turn, format_exception(error), row.text)

    def _decoded(self, row: Row, bound: BoundDrafter, prompt: list[int], reference: Row | None) -> None:
        """Fill a row with one timed generation. reference: the baseline's row, against which the answer is audited."""
        generator = self._generator(row, bound.rule)
        self.background.start()
        self.meter.start()
        events = decode(self.target, bound.drafter, prompt, self.limits, bound.rule, self.sampler, generator, self.phases)
        with ExitStack() as stack:
            if self.remote is not None:
                self.remote.cutting = bound.label != BASELINE  # the others are compared with its whole answer
                stack.callback(setattr, self.remote, "cutting", False)
            lost = phases.fill(row, events, self.phases)
            whole = self.remote is None or self.remote.on_disconnect == "wait" or bound.label == BASELINE
            if lost is not None and (whole or not row.tokens):
                raise lost
            row.others, row.gpu = self.background.read(), GpuUse.read(self.meter)
            if self.remote is not None:
                row.link = LinkUse(**asdict(self.remote.traffic), cut=None if lost is None else str(lost))
                if lost is not None and self.remote.on_disconnect == "continue":
                    phases.continue_alone(row, bound.drafter, self.remote, self.limits, self.clock)
        self._check(row, bound.rule, prompt, reference, cut=lost is not None)

    def _check(self, row: Row, rule: Rule, prompt: list[int], reference: Row | None, cut: bool) -> None:
        """Compare an answer with the baseline's if greedy, measure its drift if sampled. cut: did the link break?"""
        if self.sampler.greedy and reference is not None and not rule.lossy:
            expected = reference.tokens[: len(row.tokens)] if cut else reference.tokens
            row.audit = audit(self.target, prompt, expected, row.tokens)
        if rule.simulated:
            row.audit = {"verdict": "simulated acceptance"}
        row.drift = drift.measure(self.target, self.sampler, [b.rule for b in self.bound_drafters], rule, prompt, row)

    def _served(self, row: Row, bound: BoundDrafter, prompt: list[int], reference: Row | None) -> None:
        """Fill a row with an answer of another engine."""
        seed = generator.initial_seed() if (generator := self._generator(row, bound.rule)) is not None else None
        served.fill(row, bound.drafter, self.target, self.chat, prompt, self.limits, self.sampler, seed, reference)

    def _generator(self, row: Row, rule: Rule) -> torch.Generator | None:
        """The random numbers of one generation, seeded by run seed, question and turn; None where nothing is drawn."""
        if self.sampler.greedy and not rule.simulated:
            return None
        seed = zlib.crc32(f"{self.settings.seed} {row.question} {row.turn}".encode())
        return torch.Generator(self.target.device).manual_seed(seed)

    def _score(self, row: Row, check: Check) -> None:
        row.solved, row.rouge_l = check.scores(self.text(row.tokens + row.alone))

    def _replayed(
        self, row: Row, bound: BoundDrafter, shared: list[ReplayTarget], prompt: list[int], answer: list[int]
    ) -> None:
        """Fill a row with the drafter's cycles on the way to a known answer, without their seconds.

        shared: the target's replay of this answer, made by the first drafter that can use it.
        """
        if bound.drafter.observes_trees:
            shared.clear()  # it views states of the target, which decodes now
        elif not shared:
            shared.append(ReplayTarget(self.target, prompt, answer, self.taps))
        target = shared[0] if shared else self.target
        drafter = CalibratedDrafter(bound.drafter)
        limits = Limits(len(answer), self.target.stop_ids)
        row.replayed = True
        events = decode(target, drafter, prompt, limits, bound.rule, self.sampler)  # type: ignore[arg-type]
        phases.fill_untimed(row, events, drafter.count)
        row.confidence = drafter.bins()
        if target is self.target:
            row.audit = audit(self.target, prompt, answer, row.tokens)

    def _warm_up(self, todo: Sequence[Question]) -> dict[str, float]:
        """Run each drafter, see `warm_up`. Returns seconds a token, by label; empty where nothing is timed."""
        prompt = warm_up.prompt(self.chat, todo, self.target.device, self.target.max_context)
        runs = {bound.label: partial(self._untimed, bound, prompt) for bound in self.bound_drafters}
        return warm_up.run(self.target.device, 0 if self.replay else self.settings.warmup, runs)

    def _untimed(self, bound: BoundDrafter, prompt: list[int]) -> int:
        """Decode a few tokens; returns how many."""
        if isinstance(bound.drafter, ServedEngine):
            self._served(row := Row(bound.label, "", "", 0, 0, [], 0.0, 0.0), bound, prompt, None)
            return len(row.tokens)
        limits = Limits(warm_up.TOKENS, self.target.stop_ids)
        events = decode(self.target, bound.drafter, prompt, limits, bound.rule, self.sampler)
        return warm_up.finish(self.target, bound.drafter, events)

    def _duration(
        self, todo: Sequence[Question], ledger: Ledger, token_s: dict[str, float], budget: Budget, total_work: float
    ) -> str:
        """`3 questions, about 6 min at most`, and the same for this cell and all later ones if there are any."""
        seconds = longest((self._missing(q, ledger) for q in todo), token_s, self.settings.max_new_tokens, budget)
        text = f"{len(todo)} question{'s' * (len(todo) > 1)}, {span(seconds)} at most"
        return text + (f", {span(budget.cap(seconds * total_work))} with the cells behind it" if total_work > 1 else "")
