"""Models, tokenizers and configurations of others, read from a folder: the only file that calls `from_pretrained`.

Only data is read: never code, which Transformers would offer to run; tensors from safetensors, or from pickles that hold
nothing else. Transformers fills missing tensors with random numbers and drops unknown ones; both are refused here.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedConfig
from transformers import modeling_gguf_pytorch_utils as gguf_reader
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import logging as transformers_logging

from specbench.common import hashing
from specbench.common.errors import SpecBenchError, refusing
from specbench.common.storage import user_path
from specbench.data.download import folder_from_hub
from specbench.engine.model_files import (
    CONFIG,
    GENERATION,
    check_text,
    main_file,
    require_sizes,
    require_sound,
    settings_files,
    weight_files,
)
from specbench.engine.tensors import dtype_name, finite, open_tensors, some

MODELS: Any = AutoModelForCausalLM  # whose stubs know half of its options
# Constants that older tools wrote into a file and newer ones compute.
COMPUTED = re.compile(r"rotary_emb\.(inv_freq|(cos|sin)_cached)$|\.masked_bias$|\.attn\.bias$")


# Reading -------------------------------------------------------------------------------------------------------------


def read_config(folder: Path) -> PreTrainedConfig:
    """The configuration in a folder. Raises `SpecBenchError` for values that no model can have."""
    with _refusing_folder(folder, f"{folder / CONFIG} is no configuration of a causal language model; correct it"):
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)


def read_model(folder: Path, dtype: torch.dtype, device_map: str | None = None) -> Any:
    """The causal language model in a folder.

    Raises `SpecBenchError` for no such model, damaged files, and tensors missing, left over, misshapen, or not finite.
    """
    config = read_config(folder)
    with _refusing_folder(folder, f"no causal language model can be read from {folder} by its {CONFIG}"):
        model, found = MODELS.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation="sdpa",
            device_map=device_map,
            weights_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused by `_require_whole`, by name
        )
    _require_whole(model, found, folder)
    return model


def read_ends(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """The model in a folder with layers on the meta device: only embedding, final norm and LM head are read.

    Raises as `read_model`, for what is read.
    """
    config = read_config(folder)
    bare = type(config).from_dict(config.to_dict() | {"num_hidden_layers": 0, "layer_types": []})
    settings: dict[str, Any] = {"dtype": dtype, "attn_implementation": "sdpa", "trust_remote_code": False}
    with _refusing_folder(folder, f"no causal language model can be read from {folder} by its {CONFIG}"):
        with torch.device("meta"):
            model = MODELS.from_config(config, **settings)
        with device:
            ends = MODELS.from_config(bare, **settings)
        if (folder / GENERATION).is_file():
            model.generation_config = GenerationConfig.from_pretrained(folder)
    own = ends.state_dict()
    found: dict[str, Tensor] = {}
    for path in weight_files(folder):
        with open_tensors(path) as opened:
            read = {name: tensor() for name, tensor in opened.items() if name in own}
        found |= {name: tensor for name, tensor in read.items() if tensor.shape == own[name].shape}
    tied = {name for name in own if ends.get_output_embeddings().weight is ends.get_input_embeddings().weight}
    ends.load_state_dict(found, strict=False)
    if missing := sorted(own.keys() - found.keys() - (tied & {"lm_head.weight"})):
        raise SpecBenchError(f"{folder} lacks tensors that its {CONFIG} asks for: {some(missing)}; fetch the model again")
    model.set_input_embeddings(ends.get_input_embeddings())
    model.set_output_embeddings(ends.get_output_embeddings())
    model.get_decoder().norm = ends.get_decoder().norm
    return model.requires_grad_(False)


def read_tokenizer(folder: Path) -> Any:
    """The tokenizer in a folder. Raises `SpecBenchError`."""
    with _refusing_folder(folder, f"no tokenizer can be read from {folder}; pass a complete folder"):
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def read_gguf(file: Path) -> tuple[Any, Any]:
    """Model, in float32, and tokenizer of a GGUF file."""
    options: dict[str, Any] = {"gguf_file": file.name, "trust_remote_code": False}
    with refusing(f"{file} cannot be read as GGUF; remove it, and it is fetched again"), quiet(), _barless_logs():
        model, found = MODELS.from_pretrained(file.parent, dtype=torch.float32, output_loading_info=True, **options)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **options)
    _require_whole(model, found, file)
    return model, tokenizer


@contextmanager
def _barless_logs() -> Iterator[None]:
    """The progress bar of Transformers' GGUF reader, which ignores `quiet`, is shown on terminals alone."""
    original: Any = gguf_reader.tqdm
    gguf_reader.tqdm = partial(original, disable=None)  # None: unless the output is a terminal
    try:
        yield
    finally:
        gguf_reader.tqdm = original


def config_of(values: Mapping[str, Any], option: str) -> PreTrainedConfig:
    """A configuration from its values. option: its name, for messages."""
    require_sizes(values, option)
    plain: dict[str, Any] = {k: dict(v) if isinstance(v, Mapping) else v for k, v in values.items()}
    with refusing(f"{option} is no configuration of a causal language model; correct it"), quiet():
        return AutoConfig.for_model(**plain)


def random_model(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> Any:
    """A model of this shape at its initial weights."""
    refusal = f"no causal language model can be built from this configuration of type {config.model_type}"
    with refusing(refusal), quiet(), device:
        return MODELS.from_config(config, dtype=dtype, attn_implementation="sdpa", trust_remote_code=False)


def draft_model_folder(source: str) -> Path:
    """The folder of a draft model, given itself or by its hub id. Raises `SpecBenchError` if it cannot be found."""
    folder = user_path(source)
    if folder.is_dir():
        return folder
    try:
        return folder_from_hub(source)
    except SpecBenchError as error:
        raise SpecBenchError(
            f"no draft model at drafter.path={source}: no folder here, and not to be had from the hub; pass a folder"
        ) from error


# Checks --------------------------------------------------------------------------------------------------------------


def _require_whole(model: Any, info: Mapping[str, Any], path: Path) -> None:
    """Refuse a model that is not what its files hold. info: Transformers' loading info. path: the folder, or the file."""
    file = path / main_file(path) if path.is_dir() else path
    wrong = [f"{name} is {list(shape)}, not {list(asked)}" for name, shape, asked in sorted(info["mismatched_keys"])]
    if wrong:
        raise SpecBenchError(f"{file} does not fit the {CONFIG} beside it: {some(wrong)}; fetch the model again")
    if missing := sorted(info["missing_keys"]):
        raise SpecBenchError(f"{file} lacks tensors that the {CONFIG} beside it asks for: {some(missing)}; fetch it again")
    if left := sorted(n for n in info["unexpected_keys"] if not COMPUTED.search(n)):
        raise SpecBenchError(
            f"{file} holds tensors that the {CONFIG} beside it has no place for: {some(left)}; fetch the model again"
        )
    if info["error_msgs"]:
        raise SpecBenchError(f"{file} was not read whole: {some(' '.join(e.split()) for e in info['error_msgs'])}")
    named = model.state_dict(keep_vars=True).items()
    if bad := [name for name, tensor in named if not tensor.is_meta and not finite(tensor)]:
        dtype = dtype_name(model.dtype)
        raise SpecBenchError(f"{file}, read as {dtype}, holds NaN or infinity in {some(bad)}; fetch it again")


@contextmanager
def _refusing_folder(folder: Path, refusal: str) -> Iterator[None]:
    """`refusing` around a call that reads a folder; names the damaged file if there is one."""
    if not folder.is_dir():
        raise SpecBenchError(f"{refusal} (there is no such folder)")
    require_sound(folder)
    try:
        with refusing(refusal), quiet():
            yield
    except SpecBenchError:
        check_text(settings_files(folder))
        for path in weight_files(folder):
            with open_tensors(path):
                pass
        raise


@contextmanager
def quiet() -> Iterator[None]:
    """Without Transformers' warnings: what matters of them is refused here."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


# What is in the files ------------------------------------------------------------------------------------------------


def fingerprint_of(folder: Path) -> str:
    """`fingerprint` of a folder's tensors, read once for the same files."""
    files = weight_files(folder)

    def read() -> str:
        with ExitStack() as stack:
            opened = [stack.enter_context(open_tensors(path)) for path in files]
            return fingerprint((name, read()) for tensors in opened for name, read in tensors.items())

    hashes = sorted(hashing.of_file(path) for path in files)
    return hashing.remembered(f"fingerprint {' '.join(hashes)}", "1", read)


def fingerprint_in_memory(model: Any) -> str:
    """`fingerprint` of a model without files, by the names that its files would have."""
    return fingerprint(revert_weight_conversion(model, model.state_dict()).items())


def fingerprint(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """16 hexadecimal digits of names, shapes and values of all a model's tensors.

    The same in float32 and bfloat16, in one file or several, with or without the decoder's prefix, constants that can be
    computed, or a second copy of tied embeddings.
    """
    found: dict[str, tuple[list[int], str]] = {}
    for name, tensor in tensors:
        plain = tensor.detach().to("cpu", torch.bfloat16 if tensor.is_floating_point() else None).contiguous()
        data = hashlib.sha256(plain.view(-1).view(torch.uint8).numpy().data)
        found[name.removeprefix("model.")] = list(tensor.shape), data.hexdigest()
    head = found.pop("lm_head.weight", None)
    if head is not None and head not in found.values():
        found["lm_head.weight"] = head
    lines = [[name, *found[name]] for name in sorted(found) if not COMPUTED.search(name)]
    return hashing.of(lines)[:16]
