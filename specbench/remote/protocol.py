"""What travels between a client that drafts and a server that verifies. Knows messages and tensors, no socket and no model.

One message is one frame of msgpack, a map; what comes from outside is held to a declared shape before anything acts on it.
Every request carries a number, every answer the same number, so that what comes late is known as such.

    client                                            server
    hello    version                                  welcome  version, fingerprint, limits
    begin    prompt, what is tapped, rule, seed       answer   first token, states of the prompt
    pass     tokens and parents of a tree             answer   path, bonus, depth, states of what was kept
    end      (nothing comes back)
    (of a generation in which nothing is drafted an answer to `begin` comes for every token, unasked)
                                                      error    one line
                                                      alive    to find out who has vanished (0 bytes of answer)
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Annotated, Any, Literal

import msgpack
import torch
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from torch import Tensor
from typing_extensions import NotRequired, TypedDict

from specbench.common.errors import SpecBenchError
from specbench.engine.interface import Taps
from specbench.engine.sampling import Sampler
from specbench.engine.verify import Lossless, Rule, Typical, VerifyConfig

VERSION = 2
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.int8}
_SHAPE = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

Natural = Annotated[int, Field(ge=0, lt=2**31)]
Id = Natural
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
Layer = Annotated[int, Field(ge=0, lt=4096)]
Float = Annotated[float, Field(ge=0, le=1e6)]


@with_config(_SHAPE)
class Packed(TypedDict):
    """A tensor: dtype, shape, little-endian bytes; of int8 also what 127 stands for in each row, as float32."""

    d: Literal["float32", "bfloat16", "float16", "int8"]
    s: Annotated[list[Natural], Field(max_length=4)]
    b: bytes
    m: NotRequired[bytes]


@with_config(_SHAPE)
class Hello(TypedDict):
    kind: Literal["hello"]
    n: Natural
    version: Natural


@with_config(_SHAPE)
class Tapped(TypedDict):
    """`Taps`, with layers counted from 0."""

    hidden: list[Layer]
    kv: list[Layer]
    last: bool
    likeliest: Natural | None
    condensed: Digest | None
    unasked: bool


@with_config(_SHAPE)
class Judged(TypedDict):
    """`VerifyConfig`: the rule's name and numbers; temperature, top-p, top-k."""

    rule: Literal["lossless", "typical"]
    numbers: Annotated[list[Float], Field(max_length=2)]
    temperature: Float
    top_p: Annotated[float, Field(gt=0, le=1)]
    top_k: Natural
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None


@with_config(_SHAPE)
class Begin(TypedDict):
    """A generation.

    judged: None asks for the logits behind the prompt and decides nothing. resumed: send no states.
    eight: send states as int8.
    """

    kind: Literal["begin"]
    n: Natural
    prompt: Annotated[list[Id], Field(min_length=1)]
    capacity: Natural
    taps: Tapped
    judged: Judged | None
    resumed: bool
    eight: bool


@with_config(_SHAPE)
class Drawn(TypedDict):
    """Of a tree whose children were sampled: rows of q at nodes that have children, and who was drawn when."""

    nodes: list[Natural]
    q: Packed
    ranks: list[Natural]
    width: Natural
    replacement: bool


@with_config(_SHAPE)
class Pass(TypedDict):
    """A tree: ids with the root's first, parents of all but the root, nodes that may not be accepted."""

    kind: Literal["pass"]
    n: Natural
    tokens: Annotated[list[Id], Field(min_length=1)]
    parents: list[Natural]
    others: NotRequired[list[Natural]]
    drawn: NotRequired[Drawn]


@with_config(_SHAPE)
class End(TypedDict):
    kind: Literal["end"]
    n: Natural


@with_config(_SHAPE)
class Limits(TypedDict):
    """What a server takes. clients; bytes of a message; tokens of a prompt; positions; nodes of a tree."""

    clients: Natural
    message: Natural
    prompt: Natural
    context: Natural
    nodes: Natural


@with_config(_SHAPE)
class Welcome(TypedDict):
    kind: Literal["welcome"]
    n: Natural
    version: Natural
    fingerprint: str
    condensers: list[Digest]
    limits: Limits


@with_config(_SHAPE)
class Answer(TypedDict):
    """What became of a prompt (path and drafted are missing) or a tree.

    logits: behind a prompt; of all nodes where a drafter reviews them, or of their likeliest `ids`. seconds: of the pass.
    """

    kind: Literal["answer"]
    n: Natural
    path: NotRequired[list[Natural]]
    drafted: NotRequired[Natural]
    token: NotRequired[Id]
    last: NotRequired[Packed]
    hidden: NotRequired[list[Packed]]
    kv: NotRequired[list[Packed]]
    condensed: NotRequired[list[Packed]]
    logits: NotRequired[Packed]
    ids: NotRequired[list[list[Id]]]
    seconds: Float


@with_config(_SHAPE)
class Error(TypedDict):
    kind: Literal["error"]
    n: Natural
    said: Annotated[str, Field(max_length=1000)]


@with_config(_SHAPE)
class Alive(TypedDict):
    kind: Literal["alive"]


REQUEST: TypeAdapter[Any] = TypeAdapter(Annotated[Hello | Begin | Pass | End, Field(discriminator="kind")])
REPLY: TypeAdapter[Any] = TypeAdapter(Annotated[Welcome | Answer | Error | Alive, Field(discriminator="kind")])


def encode(message: Mapping[str, Any]) -> bytes:
    data: bytes = msgpack.packb(message)
    return data


def decode(data: bytes, shape: TypeAdapter[Any]) -> Any:
    """A message of a shape. Raises `SpecBenchError` for anything else."""
    try:
        return shape.validate_python(msgpack.unpackb(data))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"])) or "message"
        raise SpecBenchError(f"a message of the wrong shape: {place}: {first['msg']}") from error
    except Exception as error:  # msgpack raises a dozen kinds
        raise SpecBenchError("a message that is no msgpack") from error


def sizes(message: Mapping[str, Any], kinds: Mapping[str, Iterable[str]]) -> dict[str, int]:
    """Bytes of a message's parts by kind, and of the rest as `frame`; together all bytes of the message.

    kinds: the keys that make up each kind.
    """
    found = {
        kind: sum(len(encode({key: message[key]})) - 1 for key in keys if key in message) for kind, keys in kinds.items()
    }
    found["frame"] = len(encode(message)) - sum(found.values())
    return {kind: count for kind, count in found.items() if count}


def pack(tensor: Tensor, eight: bool = False) -> Packed:
    """A tensor as bytes. eight: rounded to int8, each row of its last dimension by its own largest value."""
    plain = tensor.detach().to("cpu").contiguous()
    if eight:
        most = plain.float().abs().amax(-1, keepdim=True).clamp(min=1e-30)
        rounded = (plain.float() * (127 / most)).round().to(torch.int8)
        return {"d": "int8", "s": list(plain.shape), "b": _bytes(rounded), "m": _bytes(most)}
    name: Any = str(plain.dtype).removeprefix("torch.")
    return {"d": name, "s": list(plain.shape), "b": _bytes(plain)}


def _bytes(tensor: Tensor) -> bytes:
    found: bytes = tensor.view(-1).view(torch.uint8).numpy().tobytes()
    return found


def unpack(packed: Packed, device: torch.device, shape: tuple[int, ...]) -> Tensor:
    """The tensor, which must be of this shape. Raises `SpecBenchError`."""
    if tuple(packed["s"]) != shape or ("m" in packed) != (packed["d"] == "int8"):
        raise SpecBenchError(f"a tensor of {packed['s']}, where {list(shape)} were expected")
    found = _tensor(packed["b"], DTYPES[packed["d"]], shape)
    if "m" in packed:
        found = found * (_tensor(packed["m"], torch.float32, (*shape[:-1], 1)) / 127)
    return found.to(device)


def _tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    count = math.prod(shape)
    if len(data) != count * dtype.itemsize:
        raise SpecBenchError(f"{len(data)} bytes of a tensor, where {list(shape)} of {dtype.itemsize} each were expected")
    flat = torch.frombuffer(bytearray(data), dtype=dtype) if count else torch.empty(0, dtype=dtype)
    return flat.view(shape)


def tapped(taps: Taps) -> Tapped:
    """Names as they are, layers as lists."""
    said: Any = asdict(taps) | {"hidden": list(taps.hidden), "kv": list(taps.kv)}
    return said


def taps(said: Tapped) -> Taps:
    """Of what `tapped` makes of them. Raises `SpecBenchError` for a layer that is wanted twice."""
    if any(len(set(layers)) < len(layers) for layers in (said["hidden"], said["kv"])):
        raise SpecBenchError("a layer that is tapped twice")
    names: Any = said
    return Taps(**{**names, "hidden": tuple(said["hidden"]), "kv": tuple(said["kv"])})


def judged(terms: VerifyConfig) -> Judged:
    """Raises `SpecBenchError` for a rule that no server knows."""
    rule, s = terms.rule, terms.sampler
    name: Any = {Lossless: "lossless", Typical: "typical"}.get(type(rule))
    if name is None:
        raise SpecBenchError(f"verify={type(rule).__name__}: a server verifies by Lossless or Typical; set link=local")
    numbers = [rule.epsilon, rule.delta] if isinstance(rule, Typical) else []
    return {
        "rule": name,
        "numbers": numbers,
        "seed": terms.seed,
        "temperature": s.temperature,
        "top_p": s.top_p,
        "top_k": s.top_k,
    }


def terms(said: Judged) -> VerifyConfig:
    rule: Rule = Typical(*said["numbers"]) if said["rule"] == "typical" else Lossless()
    return VerifyConfig(rule, Sampler(said["temperature"], said["top_p"], said["top_k"]), said["seed"])
