"""Loads the target of each cell of a sweep; one that failed to load is not tried again."""

from collections.abc import Sequence
from typing import Any

from specbench.common.errors import SpecBenchError, one_line, warn
from specbench.config.cli import sweeping
from specbench.config.run_spec import RunSpec
from specbench.data.chat import Chat
from specbench.engine.memory import NoRoom
from specbench.engine.target import Target
from specbench.evaluation import arms


class TargetUnavailable(SpecBenchError):
    """A target that could not be loaded. A sweep prints this at the first attempt only."""


class Targets:
    """Loads the targets of one command, which may be a sweep of many cells.

    A target that failed to load is not tried again, since a failing download takes long each time. One that lacked memory
    is: the next cell's drafters may be smaller.
    """

    def __init__(self) -> None:
        self._reused = arms.Reused()
        self._unavailable: dict[str, str] = {}  # by model and link: the error

    def load(self, spec: RunSpec, beside: Sequence[Any] = ()) -> tuple[Target, Chat]:
        """Target and chat format of a run, see `arms.load`.

        Raises `TargetUnavailable` if it cannot be loaded, or could not be before, and `SpecBenchError` if it does not fit
        the run's other options, or into memory.
        """
        key = f"{spec.model} {spec.link}"
        if key in self._unavailable:
            raise TargetUnavailable(self._unavailable[key])
        try:
            return arms.load(spec, beside, self._reused)
        except NoRoom:
            raise
        except SpecBenchError as error:
            self._unavailable[key] = one_line(error)
            if sweeping():
                warn(one_line(error))
            raise TargetUnavailable(one_line(error)) from error
