"""One cell: some drafters and the baseline decode the same prompts in turn, and every generation becomes a row.

Knows the engine, prompts and rows; no configuration and no concrete drafter.
"""

import os
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from specbench.common.budget import Budget, Pace, longest
from specbench.common.errors import SpecBenchError, format_exception
from specbench.common.progress import progress, span
from specbench.common.timing import BackgroundLoad, Clock
from specbench.data.chat import Chat, Message
from specbench.data.prompts import Question
from specbench.data.scoring import Check
from specbench.engine.decode import Limits, Prefill, RunSettings, decode
from specbench.engine.drafter import Drafter, ServedEngine
from specbench.engine.interface import Taps
from specbench.engine.replay import ReplayTarget
from specbench.engine.sampling import Sampler
from specbench.engine.target import Target
from specbench.engine.verify import Rule
from specbench.evaluation import served
from specbench.evaluation.audit import audit
from specbench.evaluation.trace import Watched
from specbench.records.blocks import Ledger, locked
from specbench.records.metrics import BASELINE, OTHERS
from specbench.records.rows import Failure, LinkUse, QuestionEnd, Row
from specbench.remote.client import LinkLost
from specbench.remote.draft_only import concatenated, draft_alone
from specbench.remote.target import RemoteTarget

NOTHING_TO_REPLAY = "the baseline failed here, so there is no answer to draft against; run again"


@dataclass(frozen=True)
class BoundDrafter:
    """What decodes, under which name, by which rule of acceptance."""

    label: str
    drafter: Drafter
    rule: Rule


class Bench:
    """Decodes questions with some contenders, generation by generation in turn, into one cell.

    A drafter that remembers earlier prompts (`state=run`) drafts by their order, from the cell's first prompt on: where any
    of its rows is missing all of them are decoded anew, or a cell that was interrupted would differ from one that was not.

    Args:
        replay: the baseline decodes; the others draft against its answers without target passes, see `ReplayTarget`. Those
            that learn from rejected drafts decode after all, and their seconds are left out like the others'.
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
        self.clock, self.others, self.warned = Clock(target.device), BackgroundLoad(), False
        self.remote = target if isinstance(target, RemoteTarget) else None
        if replay and target.dtype != torch.float32:
            kind = str(target.dtype).removeprefix("torch.")
            raise SpecBenchError(
                f"replay=true needs model.dtype=float32: in {kind} answers part at ties; or set replay=false"
            )
        taps = [c.drafter.taps.resolve(target.layers) for c in bound_drafters]
        self.taps = Taps(tuple({i for t in taps for i in t.hidden}), tuple({i for t in taps for i in t.kv}))

    def run(
        self,
        questions: Sequence[Question],
        ledger: Ledger,
        budget: Budget | None = None,
        below: Callable[[], str] | None = None,
        times: float = 1.0,
    ) -> None:
        """Decode what the cell lacks: whole questions, as long as the budget lasts by the durations of those before.

        Questions that another process is at are left to the end, and found done by then or taken over.

        Args:
            below: what stands under the bar of a terminal, question by question.
            times: how many times this cell's work is ahead, with the cells behind it; for the announcement.
        """
        budget = budget or Budget()
        anew = self._anew(questions, ledger, budget)
        todo = [q for q in questions if self._missing(q, ledger)]
        if not todo:
            return
        for question in todo:
            if question.check is not None:
                question.check.require()
        names = ["plain" if c.label == BASELINE else c.label for c in self.bound_drafters]
        title = ", ".join(names) if len(names) < 4 else f"{len(names)} drafters"
        self._announce(title, todo, ledger, self._warm_up(todo[0]), budget, times)
        pace = Pace()
        with progress(title, len(questions), "questions", below) as reached, _persisting(anew):
            reached(len(questions) - len(todo))
            queue = [(place, question, False) for place, question in enumerate(todo)]
            for place, question, wait in queue:  # which grows by those that another process is at
                if not budget.allows(pace.of(len(self._missing(question, ledger)))):
                    return
                if not self._whole(question, place, ledger, pace, wait):
                    queue.append((place, question, True))
                reached(len(questions) - sum(bool(self._missing(q, ledger)) for q in todo))

    def missing(self, questions: Sequence[Question], ledger: Ledger) -> int:
        """How many generations of these questions have no good row."""
        return sum(len(self._missing(question, ledger)) for question in questions)

    def _missing(self, question: Question, ledger: Ledger) -> list[tuple[str, int]]:
        """Labels and turns of a question that lack a good row."""
        return [
            (c.label, turn) for turn in range(len(question.turns)) for c in self.bound_drafters
            if not ledger.done(c.label, question.digest, turn)
        ]  # fmt: skip

    def _anew(self, questions: Sequence[Question], ledger: Ledger, budget: Budget) -> list[BoundDrafter]:
        """Contenders whose memory goes on from prompt to prompt and that lack a row: all of theirs are decoded again.

        Where time is limited they are left out, for half of their prompts would be worth nothing.
        """
        lacking = [
            c for c in self.bound_drafters
            if c.drafter.state == "run"
            and not all(ledger.done(c.label, q.digest, t) for q in questions for t in range(len(q.turns)))
        ]  # fmt: skip
        if lacking and budget.seconds is not None:
            names = ", ".join(c.label for c in lacking)
            print(f"specbench: {names} (state=run) needs all prompts in one go; run it without minutes=", file=sys.stderr)
            self.bound_drafters = [c for c in self.bound_drafters if c not in lacking]
            return []
        for bound in lacking:
            ledger.forget(bound.label)
        return lacking

    def _whole(self, question: Question, place: int, ledger: Ledger, pace: Pace, wait: bool) -> bool:
        """All that is missing of one question; False if another process is at it.

        Args:
            place: among those that were missing. wait: until that process is through with it.
        """
        with locked(ledger.folder, question.digest, wait) as ours:
            if not ours:
                return False
            ledger.refresh()
            missing = self._missing(question, ledger)
            if missing:
                begin = time.monotonic()
                self._question(question, self._in_turn(place), set(missing), ledger)
                seconds = time.monotonic() - begin
                pace.add(len(missing), seconds)
                ledger.write(QuestionEnd(question.id, len(missing), round(seconds, 3)))
        return True

    def _in_turn(self, place: int) -> list[BoundDrafter]:
        """The baseline, which the others need; these from question to question begin with another one.

        What a machine does meanwhile (it slows down when warm, others come and go) then meets all alike.
        """
        first, rest = self.bound_drafters[:1], self.bound_drafters[1:]
        turned = place % len(rest) if rest else 0
        return [*first, *rest[turned:], *rest[:turned]]

    def _question(
        self, question: Question, bound_drafters: Sequence[BoundDrafter], missing: set[tuple[str, int]], ledger: Ledger
    ) -> None:
        """What is missing of all turns of one question. The history holds the model's own earlier answers: the baseline's.

        Half precision can part a drafter's answer from the baseline's at a numerical tie; with one history the second
        turn still compares the same prompt. No other answer ever stands for the baseline's: where it failed, nothing is
        audited or replayed, and the next turn is not asked.
        """
        history: list[Message] = []
        for turn, text in enumerate(question.turns):
            history.append({"role": "user", "content": text})
            prompt = self.chat.encode(history)
            wanted = [c for c in bound_drafters if (c.label, turn) in missing]
            answer = self._turn(question, turn, prompt, wanted, ledger)
            if answer is None:
                return  # without an answer there is no next turn to ask
            history.append({"role": "assistant", "content": self.text(answer.tokens).strip()})

    def _turn(
        self, question: Question, turn: int, prompt: list[int], wanted: Sequence[BoundDrafter], ledger: Ledger
    ) -> Row | None:
        """Rows of one turn for those who lack one. Returns the baseline's; a replay takes it from any block."""
        first = self.bound_drafters[0]
        reference: Row | None = None
        if not wanted or self.replay:
            reference = ledger.answer(question.digest, turn)
        if wanted and reference is None and first not in wanted:
            wanted = [first, *wanted]  # seconds are compared inside one block
        known: ReplayTarget | None = None  # one for all that draft against this answer
        for bound in wanted:
            row = Row(bound.label, question.id, question.category, turn, len(prompt), [], 0.0, 0.0)
            row.text = question.digest
            if not self.replay or bound is first:
                done = self._timed(row, bound, prompt, reference, question)
            elif reference is None:
                done = Failure(row.drafter, row.question, turn, NOTHING_TO_REPLAY, row.text)
            elif bound.drafter.observes_trees:
                known = None  # its states are the target's, which decodes now
                done = self._guarded(row, self._followed, bound, self.target, prompt, reference.tokens)
            else:
                known = known or ReplayTarget(self.target, prompt, reference.tokens, self.taps)
                done = self._guarded(row, self._followed, bound, known, prompt, reference.tokens)
            ledger.write(done)
            if isinstance(done, Row) and bound is first:
                reference = done
        return reference

    def _timed(
        self, row: Row, bound: BoundDrafter, prompt: list[int], reference: Row | None, question: Question
    ) -> Row | Failure:
        """A row, decoded; of a question's last turn the answer is scored, if the question says how."""
        make = self._answered if isinstance(bound.drafter, ServedEngine) else self._decoded
        done = self._guarded(row, make, bound, prompt, reference)
        self._warn(row)
        if isinstance(done, Row) and question.check is not None and row.turn + 1 == len(question.turns):
            done = self._guarded(row, self._score, question.check)
        return done

    def _warn(self, row: Row) -> None:
        """Say once that other processes disturb the clock."""
        if not self.warned and row.link is None and (row.others or 0.0) > OTHERS * (os.cpu_count() or 1):
            self.warned = True
            taken = f"other processes take {row.others:.1f} cores"
            print(f"the machine is busy: {taken}; speeds will not count", file=sys.stderr, flush=True)

    def text(self, tokens: list[int]) -> str:
        """What a reader sees of an answer."""
        text: str = self.chat.tokenizer.decode([t for t in tokens if t not in self.target.stop_ids])
        return text

    def _guarded(self, row: Row, make: Callable[..., None], *arguments: Any) -> Row | Failure:
        """A row, filled; or what went wrong: the other generations are worth having."""
        try:
            make(row, *arguments)
            return row
        except Exception as error:
            return Failure(row.drafter, row.question, row.turn, format_exception(error), row.text)

    def _decoded(self, row: Row, bound: BoundDrafter, prompt: list[int], reference: Row | None) -> None:
        """Fill a row with one generation, timed."""
        limits = Limits(self.settings.max_new_tokens, self.target.stop_ids)
        rule = bound.rule
        generator = self._generator(row.question, row.turn, rule)
        self.others.start()
        events = decode(self.target, bound.drafter, prompt, limits, rule, self.sampler, generator, self.clock)
        begin = self.clock()
        lost: LinkLost | None = None
        if self.remote is not None:
            self.remote.cutting = bound.label != BASELINE  # with whose whole answer the others are compared
        try:
            for event in events:
                if isinstance(event, Prefill):
                    row.tokens.append(event.token)
                    row.prefill_s = event.seconds
                    begin = self.clock()
                else:
                    row.add(event)
        except LinkLost as error:
            if self.remote is None or not row.tokens or self.remote.then == "wait":
                raise
            lost = error
        row.decode_s = self.clock() - begin
        row.others = self.others.read()
        if self.remote is not None:
            row.link = LinkUse(**asdict(self.remote.traffic), cut=None if lost is None else str(lost))
            if lost is not None and self.remote.then == "continue":
                self._alone(row, bound.drafter, self.remote, limits)
        if self.sampler.greedy and reference is not None and not rule.lossy:
            if self.remote is not None:
                self.remote.cutting = False  # what is asked now is no part of the generation
            expected = reference.tokens if lost is None else reference.tokens[: len(row.tokens)]
            row.audit = audit(self.target, prompt, expected, row.tokens)
        if rule.simulated:
            row.audit = {"verdict": "simulated acceptance"}

    def _answered(self, row: Row, bound: BoundDrafter, prompt: list[int], reference: Row | None) -> None:
        """The same by another engine."""
        generator = self._generator(row.question, row.turn, bound.rule)
        seed = None if generator is None else generator.initial_seed()
        limits = Limits(self.settings.max_new_tokens, self.target.stop_ids)
        engine: Any = bound.drafter
        served.fill(row, engine, self.target, self.chat, prompt, limits, self.sampler, seed, reference)

    def _generator(self, question: str, turn: int, rule: Rule) -> torch.Generator | None:
        """The random numbers of one generation, by run seed, question and turn alone; None where nothing is drawn."""
        if self.sampler.greedy and not rule.simulated:
            return None
        own = zlib.crc32(f"{self.settings.seed} {question} {turn}".encode())
        return torch.Generator(self.target.device).manual_seed(own)

    def _score(self, row: Row, check: Check) -> None:
        """After its time was taken; a drafter's own continuation belongs to the answer."""
        row.solved = check.passed(self.text(row.tokens + row.alone))

    def _alone(self, row: Row, drafter: Drafter, target: RemoteTarget, limits: Limits) -> None:
        """The link is broken: what the drafter says of the rest by itself."""
        begin = self.clock()
        room = min(limits.max_new_tokens, target.max_context - row.prompt_tokens) - len(row.tokens)
        if room > 0:
            said = draft_alone(drafter, concatenated(target.kept), row.tokens[-1], room)
            row.alone = limits.cut(said, len(row.tokens))[0]
        row.alone_s = self.clock() - begin

    def _followed(
        self, row: Row, bound: BoundDrafter, target: Target | ReplayTarget, prompt: list[int], answer: list[int]
    ) -> None:
        """Fill a row with the cycles that a drafter has on the way to a known answer, without their seconds."""
        watched = Watched(bound.drafter)
        limits = Limits(len(answer), self.target.stop_ids)
        row.replayed = True
        events = decode(target, watched, prompt, limits, bound.rule, self.sampler)  # type: ignore[arg-type]
        for event in events:
            if isinstance(event, Prefill):
                row.tokens.append(event.token)
            else:
                row.add(replace(event, draft_s=0.0, target_s=0.0, verify_s=0.0, rest_s=0.0))
                watched.count(event)
        row.confidence = watched.bins()
        if target is self.target:
            row.audit = audit(self.target, prompt, answer, row.tokens)

    def _warm_up(self, question: Question) -> dict[str, float]:
        """First calls pay for kernels and memory that later ones find ready; they are not rows.

        Returns seconds a token, by label; nothing where there is no clock to warm up for.
        """
        if self.remote is not None:
            self.remote.cutting = False  # a link that breaks early is nothing to warm up for
        prompt = self.chat.encode([{"role": "user", "content": question.turns[0]}])[:64]  # any ids do; few always fit
        limits = Limits(16, self.target.stop_ids)
        found: dict[str, float] = {}
        for bound in list(self.bound_drafters) * (0 if self.replay else self.settings.warmup):
            row, begin = Row(bound.label, "", "", 0, 0, [], 0.0, 0.0), time.monotonic()
            if isinstance(bound.drafter, ServedEngine):
                self._answered(row, bound, prompt, None)
            else:
                for event in decode(self.target, bound.drafter, prompt, limits, bound.rule, self.sampler):
                    row.tokens += [event.token] if isinstance(event, Prefill) else event.tokens
            found[bound.label] = (time.monotonic() - begin) / max(1, len(row.tokens))
        return found

    def _announce(
        self, title: str, todo: Sequence[Question], ledger: Ledger, pace: dict[str, float], budget: Budget, times: float
    ) -> None:
        """Say how much is missing and how long that takes at most, see `longest`. pace: of the warm-up; empty: none was."""
        if not pace:
            return
        seconds = longest((self._missing(q, ledger) for q in todo), pace, self.settings.max_new_tokens, budget)
        much = f"{len(todo)} question{'s' * (len(todo) > 1)}, {span(seconds)} at most"
        if times > 1:
            whole = seconds * times if budget.left is None else min(seconds * times, max(budget.left, 0.0))
            much += f", {span(whole)} with the cells behind it"
        print(f"{title}: {much} ({self.settings.max_new_tokens:,} tokens an answer)", file=sys.stderr, flush=True)


@contextmanager
def _persisting(bound_drafters: list[BoundDrafter]) -> Iterator[None]:
    """What these drafters see goes from prompt to prompt inside, beginning with nothing; outside it never does."""
    drafters = [bound.drafter for bound in bound_drafters]
    for drafter in drafters:
        drafter.persist(True)
    try:
        yield
    finally:
        for drafter in drafters:
            drafter.persist(False)
