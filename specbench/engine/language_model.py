"""What drafters share with a target, local or remote: embedding, LM head, sizes, stop tokens and identity."""

import functools
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig

from specbench.common.errors import SpecBenchError
from specbench.engine.backends import weight_only
from specbench.engine.backends.packed_linear import Packing
from specbench.engine.model_files import contents_of
from specbench.engine.pretrained import fingerprint_in_memory, fingerprint_of


class Adapted(NamedTuple):
    """What an adapter made of a target. name: of the adapter's folder."""

    name: str
    fingerprint: str


class LanguageModel:
    """A causal LM of Transformers, used unmodified, of which only embedding, final norm and LM head need be in memory.

    Attributes:
        decoder: its layers and final norm; the layers may be on the meta device.
        layers: number of the decoder's layers.
        max_context: positions the model was made for.
        path: the folder of its files and its tokenizer.
        packing: decides which products use packed weights.
        draft_dtype: in which its drafters multiply where that is faster; None: in its own.
        listing: the file that lists its most frequent ids, see `vocabulary`.
        quantised: how its layers' weights were rounded, see `backends.weight_only`; None: they were not.
        adapted: name and fingerprint of a target with an adapter, see `adapters`; None: it has none.
        made_from: the configuration of a target with random weights; None: its weights were loaded.
    """

    def __init__(self, model: Any, path: Path | str | None = None):  # a PreTrainedModel, whose attributes its stubs lack
        self.model = model
        self.path = path
        self.packing = Packing()
        self.draft_dtype: torch.dtype | None = None
        self.listing: Path | None = None
        self.quantised: weight_only.Kind | None = None
        self.adapted: Adapted | None = None
        self.made_from: PreTrainedConfig | None = None
        self.config: PreTrainedConfig = model.config.get_text_config()
        self.decoder: Any = model.get_decoder()
        if not hasattr(self.decoder, "layers"):
            raise SpecBenchError(
                f"model type {self.config.model_type} has no Llama-like decoder (`layers`); this harness cannot run it"
            )
        self.embedding: nn.Embedding = model.get_input_embeddings()
        self.head: nn.Linear = model.get_output_embeddings()
        self.layers = len(self.decoder.layers)
        self.hidden_size: int = self.config.hidden_size
        self.vocab_size: int = self.head.weight.shape[0]
        self.max_context: int = self.config.max_position_embeddings
        self.stop_ids = stop_ids(getattr(model, "generation_config", None), self.config)

    @property
    def kernels(self) -> str:
        """What computes its layers: `plain`, Transformers' own forward; see `backends.forwards` for others."""
        return "plain"

    @property
    def attention(self) -> dict[str, str]:
        """PyTorch's attention kernels, see `attention.kernels`; empty where it has but one, or the layers are not here."""
        return {}

    @property
    def computed_by(self) -> dict[str, Any]:
        """What computes its passes, as headers name it."""
        return {"kernels": self.kernels, **({"attention": found} if (found := self.attention) else {})}

    @property
    def captures(self) -> bool:
        """Does it run passes in fixed shapes, see `captured`?"""
        return False

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.head.weight.dtype

    @property
    def draft_packing(self) -> Packing:
        """Decides which products of its drafters use packed weights."""
        own = self.packing
        return own if self.draft_dtype is None else Packing(own.timed, own.room, self.draft_dtype)

    @functools.cached_property
    def draft_head(self) -> nn.Linear:
        """The LM head for drafters: another layer of the same weights where these multiply in another type."""
        if self.draft_dtype is None:
            return self.head
        outputs, inputs = self.head.weight.shape
        layer = nn.Linear(inputs, outputs, bias=self.head.bias is not None, device="meta")
        for name, parameter in self.head.named_parameters():
            layer.register_parameter(name, parameter)
        return layer

    def prepare(self, nodes: int) -> None:
        """Nothing here: passes in fixed shapes are those of a local target, see `Target.prepare`. nodes: of a tree."""

    def eagerly(self) -> AbstractContextManager[None]:
        """Inside, its passes run as they come, also those that are captured otherwise."""
        return nullcontext()

    def logits(self, last: Tensor, head: nn.Linear | None = None) -> Tensor:
        """LM head, or a part of it, on post-norm states, in the model's dtype. [..., D] -> [..., V]"""
        logits = (self.head if head is None else head)(last)
        cap = getattr(self.config, "final_logit_softcapping", None)
        return logits if not cap else torch.tanh(logits / cap) * cap

    def fingerprint(self) -> str:
        """Which model this is, see `pretrained.fingerprint`; read off its files, if there are any."""
        if self.adapted is not None:
            return self.adapted.fingerprint
        return fingerprint_in_memory(self.model) if self.path is None else fingerprint_of(Path(self.path))

    def contents(self) -> dict[str, str]:
        """SHA-256, by name, of the files it was loaded from; empty if there are none."""
        return {} if self.path is None else contents_of(Path(self.path))


def stop_ids(generation: GenerationConfig | None, config: PreTrainedConfig) -> tuple[int, ...]:
    """All end-of-sequence ids of the generation config, or of the model config where it has none."""
    eos = getattr(generation, "eos_token_id", None)
    eos = getattr(config, "eos_token_id", None) if eos is None else eos
    ids = () if eos is None else tuple(eos) if isinstance(eos, (list, tuple)) else (eos,)
    if not all(isinstance(i, int) for i in ids):
        raise SpecBenchError(
            f"eos_token_id in generation_config.json or config.json is no id or list of ids: {eos!r}; correct it"
        )
    return ids
