"""Messages between a client that drafts and a server that verifies. Knows no socket and no model.

A message is one frame with one msgpack map, decoded within bounds and validated against a declared shape. An answer carries
the number `n` of its request, so that a late one is recognised.

    client                                            server
    hello    version                                  welcome  version, fingerprint, limits
    begin    prompt, taps, rule, seed                 answer   first token, states of the prompt
    pass     tokens and parents of a tree             answer   path, bonus, depth, states of accepted nodes
    end      (no answer)
    (a stream, without drafts: after `begin` an answer follows for every token, without requests)
                                                      error    one line
                                                      alive    detects clients that are gone (no answer)
"""

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any, Literal, NotRequired

import msgpack
import torch
from pydantic import FailFast, Field, TypeAdapter, ValidationError
from torch import Tensor
from typing_extensions import TypedDict

from specbench.common.errors import SpecBenchError
from specbench.common.io import STRICT
from specbench.common.types import Temperature
from specbench.engine.interface import Taps
from specbench.engine.sampling import Sampler
from specbench.engine.tensors import dtype_name
from specbench.engine.verify import Lossless, Rule, Typical, VerifyConfig

VERSION = 5
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.int8}

Natural = Annotated[int, Field(ge=0, lt=2**31)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
Layer = Annotated[int, Field(ge=0, lt=4096)]
Naturals = Annotated[list[Natural], FailFast()]  # one error, not one for each of a million items
Layers = Annotated[list[Layer], FailFast()]
Float = Annotated[float, Field(ge=0, le=1e6)]


class ServerFull(SpecBenchError):
    """The server has as many clients as it takes."""


class WireTensor(TypedDict):
    """A tensor: dtype, shape, little-endian bytes; for int8 also the largest magnitude of each row, as float32."""

    d: Literal["float32", "bfloat16", "float16", "int8"]
    s: Annotated[list[Natural], FailFast(), Field(max_length=4)]
    b: bytes
    m: NotRequired[bytes]


class Hello(TypedDict):
    kind: Literal["hello"]
    n: Natural
    version: Natural


class TapsMessage(TypedDict):
    """`Taps`, with layers counted from 0."""

    hidden: Layers
    kv: Layers
    last: bool
    observe_top_k: Natural | None
    condensed: Digest | None
    free_running: bool


class VerifyMessage(TypedDict):
    """`VerifyConfig`: the rule's name and numbers; temperature, top-p, top-k."""

    rule: Literal["lossless", "typical"]
    numbers: Annotated[list[Float], FailFast(), Field(max_length=2)]
    temperature: Temperature
    top_p: Annotated[float, Field(gt=0, le=1)]
    top_k: Natural
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None


class Begin(TypedDict):
    """A generation. judged: None requests logits after the prompt. resumed: send no states. eight: send states as int8."""

    kind: Literal["begin"]
    n: Natural
    prompt: Annotated[list[Natural], FailFast(), Field(min_length=1)]
    capacity: Natural
    taps: TapsMessage
    judged: VerifyMessage | None
    resumed: bool
    eight: bool


class Drawn(TypedDict):
    """A tree's sampling: rows of q at nodes that have children, ranks and width of the tree, see `DraftTree`."""

    nodes: Naturals
    q: WireTensor
    ranks: Naturals
    width: Natural
    replacement: bool


class Pass(TypedDict):
    """A tree: ids, the root's first; parents of all nodes but the root; `others`: nodes that may not be accepted."""

    kind: Literal["pass"]
    n: Natural
    tokens: Annotated[list[Natural], FailFast(), Field(min_length=1)]
    parents: Naturals
    others: NotRequired[Naturals]
    drawn: NotRequired[Drawn]


class End(TypedDict):
    kind: Literal["end"]
    n: Natural


class Limits(TypedDict):
    """A server's limits: clients, bytes of a message, tokens of a prompt, positions, nodes of a tree."""

    clients: Natural
    message: Natural
    prompt: Natural
    context: Natural
    nodes: Natural


class Welcome(TypedDict):
    kind: Literal["welcome"]
    n: Natural
    version: Natural
    fingerprint: str
    dtype: Literal["float32", "bfloat16", "float16"]
    condensers: Annotated[list[Digest], FailFast()]
    limits: Limits


class Answer(TypedDict):
    """The answer to a prompt (without path and drafted) or a tree.

    logits: after a prompt; for drafters that observe trees, of all nodes or of their best `ids`. seconds: of the pass.
    """

    kind: Literal["answer"]
    n: Natural
    path: NotRequired[Naturals]
    drafted: NotRequired[Natural]
    token: NotRequired[Natural]
    last: NotRequired[WireTensor]
    hidden: NotRequired[Annotated[list[WireTensor], FailFast()]]
    kv: NotRequired[Annotated[list[WireTensor], FailFast()]]
    condensed: NotRequired[Annotated[list[WireTensor], FailFast()]]
    logits: NotRequired[WireTensor]
    ids: NotRequired[Annotated[list[Naturals], FailFast()]]
    seconds: Float


class Error(TypedDict):
    """full: the server has its clients already, so that the request may succeed later."""

    kind: Literal["error"]
    n: Natural
    message: Annotated[str, Field(max_length=1000)]
    full: NotRequired[bool]


class Alive(TypedDict):
    kind: Literal["alive"]


_BY_KIND = Field(discriminator="kind")
REQUEST: TypeAdapter[Any] = TypeAdapter(Annotated[Hello | Begin | Pass | End, _BY_KIND], config=STRICT)
REPLY: TypeAdapter[Any] = TypeAdapter(Annotated[Welcome | Answer | Error | Alive, _BY_KIND], config=STRICT)


# The kind that each item's bytes are counted as; all others, and the framing, are `frame`.
PARTS = {
    **dict.fromkeys(("tokens", "parents", "others"), "tree"),
    **dict.fromkeys(("path", "drafted", "token"), "tokens"),
    **dict.fromkeys(("logits", "ids"), "logits"),
    **{name: name for name in ("prompt", "last", "hidden", "kv", "condensed")},
    "drawn": "q",
}
# Bounds of what a message decodes to, whatever it announces; msgpack itself limits nesting to some hundred levels.
MAX_ITEMS, MAX_KEYS, MAX_CHARACTERS = 1 << 18, 32, 1 << 12
FRAME = 1 << 16  # bytes of a message beside ids and tensors, at most


def request_bytes(prompt: int, nodes: int, vocabulary: int) -> int:
    """Bytes of a request at most: a prompt, or a tree with a float32 probability of every id at every node."""
    return FRAME + 5 * prompt + nodes * (5 * 5 + 4 * vocabulary)


def encode(message: Any) -> bytes:
    return msgpack.packb(message)


def encode_counted(message: Mapping[str, Any]) -> tuple[bytes, dict[str, int]]:
    """A message as bytes, and sizes by kind, see `PARTS`."""
    parts = {key: encode(key) + encode(value) for key, value in message.items()}
    data = msgpack.Packer().pack_map_header(len(parts)) + b"".join(parts.values())
    return data, _by_kind({key: len(part) for key, part in parts.items()}, len(data))


def decode(data: bytes, shape: TypeAdapter[Any]) -> Any:
    """A message of a shape. Raises `SpecBenchError` for anything else."""
    return decode_counted(data, shape)[0]


def decode_counted(data: bytes, shape: TypeAdapter[Any]) -> tuple[Any, dict[str, int]]:
    """A message and sizes by kind, see `PARTS`. Raises `SpecBenchError` for anything but a message of this shape."""
    try:
        message, sizes = _unpack_map(data)
        return shape.validate_python(message), _by_kind(sizes, len(data))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"])) or "message"
        raise SpecBenchError(f"a message of the wrong shape: {place}: {first['msg']}") from error
    except Exception as error:  # msgpack raises a dozen kinds
        raise SpecBenchError("a message of the wrong shape: no msgpack map, or too large a one") from error


def _unpack_map(data: bytes) -> tuple[dict[str, Any], dict[str, int]]:
    """A map and the size of each item; counts and lengths are checked before anything of that size is built."""
    total = 0

    def counted(container: Any) -> Any:
        nonlocal total
        total += 1 + len(container)
        if total > MAX_ITEMS:
            raise ValueError(f"more than {MAX_ITEMS} items in lists and maps")
        return container

    size = max(1, len(data))
    limits = {
        "max_array_len": min(MAX_ITEMS, size),
        "max_map_len": MAX_KEYS,
        "max_str_len": MAX_CHARACTERS,
        "max_ext_len": 0,
    }
    unpacker = msgpack.Unpacker(max_buffer_size=size, max_bin_len=size, list_hook=counted, object_hook=counted, **limits)
    unpacker.feed(data)
    message, sizes = {}, {}
    if (count := unpacker.read_map_header()) > MAX_KEYS:
        raise ValueError(f"a map of {count} keys")
    for _ in range(count):
        begin, key = unpacker.tell(), unpacker.unpack()
        message[key] = unpacker.unpack()
        sizes[key] = unpacker.tell() - begin
    if unpacker.tell() != len(data):
        raise ValueError("bytes after the message")
    return message, sizes


def _by_kind(sizes: Mapping[str, int], total: int) -> dict[str, int]:
    """Sizes by kind of the items in `PARTS`; the rest of the message is `frame`."""
    kinds: dict[str, int] = {}
    for key, size in sizes.items():
        if key in PARTS:
            kinds[PARTS[key]] = kinds.get(PARTS[key], 0) + size
    return kinds | {"frame": total - sum(kinds.values())}


def pack(tensor: Tensor, int8: bool = False) -> WireTensor:
    """A tensor as bytes. int8: rounded, each row of the last dimension scaled by its largest magnitude."""
    plain = tensor.detach().to("cpu").contiguous()
    if int8:
        largest = plain.float().abs().amax(-1, keepdim=True).clamp(min=1e-30)
        rounded = (plain.float() * (127 / largest)).round().to(torch.int8)
        return {"d": "int8", "s": list(plain.shape), "b": _bytes(rounded), "m": _bytes(largest)}
    name: Any = dtype_name(plain.dtype)
    return {"d": name, "s": list(plain.shape), "b": _bytes(plain)}


def _bytes(tensor: Tensor) -> bytes:
    return tensor.view(-1).view(torch.uint8).numpy().tobytes()


def unpack(packed: WireTensor, device: torch.device, shape: tuple[int, ...]) -> Tensor:
    """A packed tensor. Raises `SpecBenchError` if it does not have this shape."""
    if tuple(packed["s"]) != shape or ("m" in packed) != (packed["d"] == "int8"):
        raise SpecBenchError(f"a tensor of {packed['s']}, where {list(shape)} were expected")
    tensor = _tensor(packed["b"], DTYPES[packed["d"]], shape)
    if "m" in packed:
        tensor = tensor * (_tensor(packed["m"], torch.float32, (*shape[:-1], 1)) / 127)
    return tensor.to(device)


def _tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    count = math.prod(shape)
    if len(data) != count * dtype.itemsize:
        raise SpecBenchError(f"{len(data)} bytes of a tensor, where {list(shape)} of {dtype.itemsize} each were expected")
    flat = torch.frombuffer(bytearray(data), dtype=dtype) if count else torch.empty(0, dtype=dtype)
    return flat.view(shape)


def pack_taps(taps: Taps) -> TapsMessage:
    """Taps as a message, layers as lists."""
    packed: Any = asdict(taps) | {"hidden": list(taps.hidden), "kv": list(taps.kv)}
    return packed


def unpack_taps(packed: TapsMessage) -> Taps:
    """Inverse of `pack_taps`. Raises `SpecBenchError` for a layer that is tapped twice."""
    if any(len(set(layers)) < len(layers) for layers in (packed["hidden"], packed["kv"])):
        raise SpecBenchError("a layer that is tapped twice")
    fields: Any = packed
    return Taps(**{**fields, "hidden": tuple(packed["hidden"]), "kv": tuple(packed["kv"])})


def pack_verify(config: VerifyConfig) -> VerifyMessage:
    """`VerifyConfig` as a message. Raises `SpecBenchError` for a rule that servers do not know."""
    rule = config.rule
    name: Any = {Lossless: "lossless", Typical: "typical"}.get(type(rule))
    if name is None:
        raise SpecBenchError(f"verify={type(rule).__name__}: a server verifies by Lossless or Typical; set link=local")
    numbers = [rule.epsilon, rule.delta] if isinstance(rule, Typical) else []
    packed: Any = {"rule": name, "numbers": numbers, "seed": config.seed, **asdict(config.sampler)}
    return packed


def unpack_verify(packed: VerifyMessage) -> VerifyConfig:
    """Inverse of `pack_verify`."""
    rule: Rule = Typical(*packed["numbers"]) if packed["rule"] == "typical" else Lossless()
    return VerifyConfig(rule, Sampler(packed["temperature"], packed["top_p"], packed["top_k"]), packed["seed"])
