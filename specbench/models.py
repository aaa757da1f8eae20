"""A target model as a configuration names it: where it comes from and how it runs. Knows no drafter."""

from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from specbench.assets import Wheel, model_folder
from specbench.datasets import Chat
from specbench.engine.target import Target, pick_device, pick_dtype
from specbench.errors import SpecBenchError


@dataclass(frozen=True)
class ModelSpec:
    """One `conf/model/*.yaml`.

    Attributes:
        name: also the folder of its results and weights.
        path, hub, revision, wheel: where it comes from; see `specbench.assets.model_folder`.
        device: auto, cpu, cuda, cuda:1 … dtype: auto, float32, bfloat16, float16.
        max_context: rows the cache may take, at most what the model was made for.
        system: system prompt; None leaves it to the chat template.
    """

    name: str
    path: str | None = None
    hub: str | None = None
    revision: str | None = None
    wheel: Wheel | None = None
    device: str = "auto"
    dtype: str = "auto"
    max_context: int = 4096
    system: str | None = None

    def load(self) -> tuple[Target, Chat]:
        """The model and its chat format. Raises `SpecBenchError` for anything missing or unusable."""
        device = pick_device(self.device)
        dtype = pick_dtype(self.dtype, device)
        transformers_logging.disable_progress_bar()
        folder: Path = model_folder(self.name, self.path, self.hub, self.revision, self.wheel)
        target = Target.load(folder, dtype, device)
        target.max_context = min(target.max_context, self.max_context)
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError) as error:
            raise SpecBenchError(f"no tokenizer can be read from {folder}: {error}") from error
        if len(tokenizer) > target.vocab_size:
            raise SpecBenchError(
                f"the tokenizer in {folder} has {len(tokenizer)} ids, the model {target.vocab_size}: they do not belong "
                "together; pass a complete folder as model.path"
            )
        return target, Chat(tokenizer, self.system)
