"""Smoothed metrics of a training, read from the device once every few steps."""

import math
from collections.abc import Mapping

from torch import Tensor

from specbench.common.errors import SpecBenchError

NEWEST = 0.02  # share of the newest value in a smoothed one


class Metrics:
    """Moving averages by name. Reading a value waits for the device, so those of the newest steps stay unread."""

    def __init__(self) -> None:
        self.smoothed: dict[str, float] = {}
        self.unread: list[dict[str, Tensor]] = []

    def add(self, metrics: Mapping[str, Tensor]) -> None:
        """Keep one step's values."""
        self.unread.append({name: value.detach() for name, value in metrics.items()})

    def read(self, steps: int) -> None:
        """Average the unread values in. steps: optimiser steps so far. Raises `SpecBenchError` if a loss is not finite."""
        for step, metrics in enumerate(self.unread, steps - len(self.unread)):
            values = {name: float(value) for name, value in metrics.items()}
            if not math.isfinite(values["loss"]):
                raise SpecBenchError(
                    f"the loss became {values['loss']} at step {step}; lower train.settings.lr or train.settings.clip"
                )
            for name, new in values.items():
                self.smoothed[name] = (1 - NEWEST) * self.smoothed.get(name, new) + NEWEST * new
        self.unread.clear()
