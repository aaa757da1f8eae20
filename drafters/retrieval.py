"""What drafters that copy share: a memory that ends with a prompt or not, and reading the text as it grows."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from itertools import takewhile
from typing import Any

from specbench.common.types import Name
from specbench.engine.interface import State, Taps, TargetStates


class Remembering(ABC):
    """A drafter with a memory, from which it copies tokens.

    Attributes:
        state: what its memory holds when a generation begins, see `interface.State`.
        remembering: does memory outlive a prompt at the moment?
    """

    state: State
    remembering = False
    stop_ids: frozenset[int]

    def remember(self, on: bool) -> None:
        self.remembering = on and self.state == "run"
        self.forget()

    def reset(self, capacity: int) -> None:
        if not self.remembering:
            self.forget()

    @abstractmethod
    def forget(self) -> None:
        """Empty the memory."""

    def emittable(self, tokens: Iterable[int]) -> Iterator[int]:
        """Up to a stop token: what was copied from behind it belongs to another answer, and it can come as the bonus."""
        return takewhile(lambda token: token not in self.stop_ids, tokens)


class Retriever(Remembering):
    """A drafter that looks up what it has seen. It multiplies nothing: any target will do, and there is nothing to train.

    A method fills in `forget` and `propose`; `read`, or `observe` whole, and `begin` where a beginning matters.

    Attributes:
        nodes: of its trees at most, the root included.
    """

    taps = Taps(last=False)
    passes, active_parameters = 0, 0

    def __init__(self, name: Name, nodes: int, state: State = "prompt"):
        self.name, self.nodes, self.state = name, nodes, state
        self.begun = False

    def bind(self, target: Any) -> None:
        self.device, self.stop_ids = target.device, frozenset(target.stop_ids)
        self.forget()

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
