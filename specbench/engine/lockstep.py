"""Several sequences decoded together by the code that decodes one: they take turns, and meet where work can be shared.

Each sequence runs `decode` in a thread of its own, one thread at a time, until it calls a function that is shared. When
all of them wait, the calls of one function are made as one, in the thread that began, and those sequences go on:

    sequence 0   propose ... network |           | ... network |           | forward |              | verify ...
    sequence 1   propose ... network | network   | forward     |           |         |              | verify ...
    together                           of 0 and 1                network of 0          forward of both

Draft passes go first, so that a pass of the target waits for all. Whose turn it is never depends on time: results are the
same in every run.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

T = TypeVar("T")
Shared = Callable[[list[tuple[Any, ...]]], list[Any]]  # the arguments of several calls -> a result for each


class _Abandoned(BaseException):
    """Unwinds a sequence because another one failed."""


@dataclass(eq=False)
class _Call:
    """What a sequence waits for. order: of several functions that are waited for, the lowest is called."""

    sequence: "_Sequence"
    function: Shared
    order: int
    arguments: tuple[Any, ...]


class _Sequence:
    """A thread that runs only between `resume` and its next call, or its end."""

    def __init__(self, body: Callable[[], Any]):
        self.body = body
        self.result: Any = None
        self.waited = 0.0  # seconds, since its first turn
        self.error: BaseException | None = None  # raised by the body; or that it is to raise when it goes on
        self.over = False
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def resume(self) -> None:
        self._go.release()
        self._stopped.acquire()

    def wait(self) -> Any:
        """In its own thread: let the others go on; returns what its call gave."""
        begin = time.perf_counter()
        self._stopped.release()
        self._go.acquire()
        self.waited += time.perf_counter() - begin
        if self.error is not None:
            raise self.error
        return self.result

    def _run(self) -> None:
        self._go.acquire()
        try:
            if self.error is None:
                torch.set_num_threads(1)  # of this thread: what is not shared is small
                self.result = self.body()
        except BaseException as error:  # raised again in the thread that began
            self.error = error
        self.over = True
        self._stopped.release()

    def abandon(self) -> None:
        """End it, wherever it is."""
        if not self.over:
            self.error = _Abandoned()
            self.resume()
        self._thread.join()


class Lockstep:
    """Runs sequences in turn. See the module's documentation.

    Attributes:
        spent: of every call of a shared function: its order, and by the clock when it began and ended.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.spent: list[tuple[int, float, float]] = []
        self._waiting: list[_Call] = []
        self._running: _Sequence | None = None
        self._at_end: dict[int, list[Callable[[], None]]] = {}  # by the number of a sequence

    def at_end(self, number: int, action: Callable[[], None]) -> None:
        """Do something as soon as a sequence, by its number in `run`, is over."""
        self._at_end.setdefault(number, []).append(action)

    def own_seconds(self) -> float:
        """From a sequence: a clock that stands while it waits, so for shared functions and for other sequences."""
        assert self._running is not None
        return time.perf_counter() - self._running.waited

    def call(self, function: Shared, order: int, *arguments: Any) -> Any:
        """From a sequence: its own result of a shared function."""
        assert self._running is not None
        sequence = self._running
        self._waiting.append(_Call(sequence, function, order, arguments))
        return sequence.wait()

    def run(self, bodies: Sequence[Callable[[], T]]) -> list[T]:
        """Results of all bodies. The first error of one ends all and is raised."""
        threads = torch.get_num_threads()
        sequences = [_Sequence(body) for body in bodies]
        try:
            ready = sequences
            while ready:
                for sequence in ready:
                    self._resume(sequence)
                    if sequence.over:
                        for action in self._at_end.get(sequences.index(sequence), ()):
                            action()
                ready = self._answer()
        finally:
            for sequence in sequences:
                sequence.abandon()
            self._waiting = []
            torch.set_num_threads(threads)  # for threads to come; this one's has not changed
        return [sequence.result for sequence in sequences]

    def _resume(self, sequence: _Sequence) -> None:
        self._running = sequence
        sequence.resume()
        if sequence.error is not None:
            raise sequence.error

    def _answer(self) -> list[_Sequence]:
        """Make the calls of one function that is waited for; returns the sequences that can go on."""
        if not self._waiting:
            return []
        first = min(self._waiting, key=lambda call: call.order)
        calls = [call for call in self._waiting if call.function is first.function]
        begin = self.clock()
        results = first.function([call.arguments for call in calls])
        self.spent.append((first.order, begin, self.clock()))
        for call, result in zip(calls, results, strict=True):
            call.sequence.result = result
            self._waiting.remove(call)
        return [call.sequence for call in calls]
