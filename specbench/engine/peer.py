"""Another engine in this process, for comparison: on the same machine, of the same model, with as many threads.

It reads the model from the GGUF file of the wheel that the target comes from. Knows no engine in particular.
"""

from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from specbench.common import hashing
from specbench.common.environment import installed
from specbench.common.errors import SpecBenchError
from specbench.common.types import Few, Length, Name
from specbench.data import gguf_files
from specbench.data.download import Wheel, Wheels, file_from_wheel
from specbench.data.gguf_files import Precision
from specbench.engine.decode import Limits
from specbench.engine.drafter import ServedEngine
from specbench.engine.interface import Taps
from specbench.engine.sampling import Sampler


class Peer(ServedEngine):
    """An engine with its own weights, cache and loop. A subclass implements `open` and `answer`.

    Args:
        wheel: that the target comes from. precision: of the weights; None: as the wheel ships them.
        arithmetic: `float32`: states and cache are not rounded further; `engine`: as the engine does by itself.
        lookup: tokens that its own prompt lookup drafts, by n-grams of up to `max_ngram` tokens; 0: plain decoding.

    Attributes:
        package: of the Python package index. engine: its name.
    """

    package: str
    engine: str
    greedy_only = True
    taps = Taps(last=False)

    def __init__(
        self,
        name: Name,
        wheel: Wheel | Wheels | None,
        precision: Precision | None = None,
        arithmetic: Literal["float32", "engine"] = "float32",
        lookup: Few = 0,
        max_ngram: Length = 3,
    ):
        super().__init__(name)
        self.wheel, self.precision, self.arithmetic = wheel, precision, arithmetic
        self.lookup, self.max_ngram = lookup, max_ngram
        self.found: dict[str, Any] = {}

    def find_model(self) -> None:
        """Raises `SpecBenchError` if its package is not installed, or the model comes in no wheel."""
        if (found := installed(self.package)) is None:
            raise SpecBenchError(f"drafter={self.name} needs {self.package}: pip install -e '.[peers]'")
        if self.wheel is None:
            raise SpecBenchError(f"drafter={self.name} reads GGUF, and this model has no wheel with such a file")
        file = gguf_files.in_precision(file_from_wheel(self.wheel), self.precision)
        self.path = file.path
        self.found = {
            "id": file.path.name,
            "engine": self.engine,
            "version": found,
            "precision": file.precision,
            "arithmetic": self.arithmetic,
            "exact": file.exact,
            "lookup": self.lookup,
        }
        self.contents = {"served": hashing.of(self.found)}

    def bind(self, target: Any) -> None:
        """Load the model. Raises `SpecBenchError` if it is another than the target, or the target is not on the CPU."""
        if not self.found:
            self.find_model()
        assert self.wheel is not None
        if target.device.type != "cpu":
            raise SpecBenchError(
                f"drafter={self.name} runs on the CPU, the target on {target.device}; set model.device=cpu"
            )
        theirs = torch.from_numpy(np.array(gguf_files.first_embedding(file_from_wheel(self.wheel)))).bfloat16()
        if not torch.equal(theirs, target.embedding.weight[0].bfloat16()):
            raise SpecBenchError(
                f"drafter={self.name}: the wheel's file is another model than the target; leave model.path out"
            )
        self.open(self.path, torch.get_num_threads(), target.max_context)

    def open(self, path: Path, threads: int, context: int) -> None:
        """Load a GGUF file. context: most tokens of prompt and answer."""
        raise NotImplementedError(f"{type(self).__name__} opens no file")

    def greedy(self, prompt: list[int], tokens: int) -> list[int]:
        """The ids of an answer of so many tokens, where nothing stops it."""
        ids: list[int] = self.answer(prompt, "", Limits(tokens), Sampler(), None).ids
        return ids
