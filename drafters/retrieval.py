"""What drafters that copy share: a memory that ends with a prompt or not, and reading the text as it grows."""

from collections.abc import Iterable, Iterator
from itertools import takewhile
from typing import Any

from specbench.common.types import Name
from specbench.engine.drafter import Drafter, State
from specbench.engine.interface import Taps, TargetStates


class Remembering(Drafter):
    """A drafter with a memory, from which it copies tokens.

    Attributes:
        persisting: does memory outlive a prompt at the moment?
    """

    persisting = False
    stop_ids: frozenset[int]

    def persist(self, on: bool) -> None:
        self.persisting = on and self.state == "run"
        self.clear()

    def reset(self, capacity: int) -> None:
        if not self.persisting:
            self.clear()

    def clear(self) -> None:
        """Empty the memory."""
        raise NotImplementedError(f"{type(self).__name__} does not say how to empty its memory")

    def emittable(self, tokens: Iterable[int]) -> Iterator[int]:
        """Up to a stop token: what was copied from behind it belongs to another answer, and it can come as the bonus."""
        return takewhile(lambda token: token not in self.stop_ids, tokens)


class Retriever(Remembering):
    """A drafter that looks up what it has seen. It multiplies nothing: any target will do, and there is nothing to train.

    A method fills in `clear` and `propose`; `read`, or `observe` whole, and `begin` where a beginning matters.
    """

    taps = Taps(last=False)

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
        """The ids are wanted on the host: one wait for the device beside the two of every cycle."""
        tokens = states.tokens.tolist()
        new = tokens[1:] if self.begun else [] if self.state == "none" else tokens  # the root was the last bonus
        self.begun = True
        self.read([*new, bonus])

    def begin(self) -> None:
        """A new text: nothing goes over from the last one's end to its beginning."""

    def read(self, tokens: list[int]) -> None:
        """The text goes on with these ids, the last of which is the coming cycle's root."""


class Matching(Retriever):
    """One that says of how many last tokens it knows what followed them."""

    @property
    def matched(self) -> int:
        raise NotImplementedError(f"{type(self).__name__} does not say how many tokens match")
