"""What drafters that copy text share: a memory, for one prompt or several, and reading the text as it grows."""

from collections.abc import Iterable, Iterator
from itertools import takewhile
from typing import Any

from specbench.common.types import Name
from specbench.engine.drafter import Drafter, State
from specbench.engine.interface import Taps, TargetStates


class Remembering(Drafter):
    """A drafter with a memory, from which it copies tokens."""

    persisting = False  # is memory kept from prompt to prompt at the moment?
    stop_ids: frozenset[int]

    def persist(self, on: bool) -> None:
        self.persisting = on and self.state == "run"
        self.clear()

    def reset(self, capacity: int) -> None:
        if not self.persisting:
            self.clear()

    def clear(self) -> None:
        """Empty the memory."""
        raise NotImplementedError(f"{type(self).__name__} cannot empty its memory")

    def emittable(self, tokens: Iterable[int]) -> Iterator[int]:
        """Tokens up to a stop token, which can still be the bonus; what follows it belongs to another answer."""
        return takewhile(lambda token: token not in self.stop_ids, tokens)


class Retriever(Remembering):
    """A drafter that looks up earlier text, without a network.

    A subclass implements `clear` and `propose`; `read`, or all of `observe`, and `begin` if the start of a text matters.
    """

    taps = Taps(last=False)
    batches = True

    def __init__(self, name: Name, nodes: int, state: State = "prompt"):
        super().__init__(name)
        self.nodes, self.state, self.begun = nodes, state, False

    def bind(self, target: Any) -> None:
        self.device, self.stop_ids = target.device, frozenset(target.stop_ids)
        self.clear()

    def reset(self, capacity: int) -> None:
        super().reset(capacity)
        self.begun = False
        self.begin()

    def observe(self, states: TargetStates, bonus: int) -> None:
        """Copies the ids to the host: one more synchronisation a cycle."""
        tokens = states.tokens.tolist()
        new = tokens[1:] if self.begun else [] if self.state == "none" else tokens  # the root was the last bonus
        self.begun = True
        self.read([*new, bonus])

    def begin(self) -> None:
        """Start a new text, unconnected to the end of the last one."""

    def read(self, tokens: list[int]) -> None:
        """Continue the text with these ids, the last of which is the coming cycle's root."""


class Matching(Retriever):
    """A retriever that knows how many last tokens of the text occurred in it before.

    Attributes:
        longest: so many at most; None: any number.
    """

    longest: int | None = None

    @property
    def matched(self) -> int:
        raise NotImplementedError(f"{type(self).__name__} counts no matching tokens")
