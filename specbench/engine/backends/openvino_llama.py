"""The forward of Llama-like decoders as one OpenVINO graph: for float32 on a CPU, where it reads weights about as fast as
memory delivers them, whatever the number of tokens in a small tree.

The graph takes the cache as it lies in memory, [L, B, H, C, Dh], and never writes to it: a pass attends to all C rows, of
which the mask hides those that are not kept, and to its own N, which it returns. What a small model's pass costs beside its
products is the number of operators, 5 to 10 us each, so there are as few as possible: queries are scaled by their rotation,
and a layer's cached rows are copied in front of its new ones rather than multiplied apart.

Weights of a quantised target (`weight_only`) stay integers, which the processor turns into float32 as it multiplies.
Weights that bfloat16 holds exactly, as in most checkpoints, are read in that form by passes of a few tokens, in a second
graph: half the bytes for the same products. With more tokens those kernels are slower than float32's.

It is checked against the model's own forward when it is made. Layers alone, and some sublayers of them, run as
`FusedLlama`'s, of which this is one.
"""

import specbench.common.no_telemetry  # noqa: F401

# isort: split
from collections.abc import Sequence
from typing import Any

import numpy
import openvino
import torch
from openvino import opset15 as ops
from openvino.op.util import Variable, VariableInfo
from torch import Tensor, nn

from specbench.engine.backends import weight_only
from specbench.engine.backends.fused_llama import FusedLlama
from specbench.engine.backends.packed_linear import Packing
from specbench.engine.cache import KVCache
from specbench.engine.interface import Sublayers

Node = Any  # of OpenVINO's graph
FLOAT32 = openvino.Type.f32
NARROW = 4  # tokens of a pass; with 5 the kernels of halved weights take twice as long (measured with AVX-512)


class OpenVinoLlama(FusedLlama):
    """A decoder's layers, final norm and LM head, compiled on the first pass and again when a further layer is read.

    Layers that were read once stay readable: drafters that read some and others that read none decode in turn.

    Args:
        quantised: how the layers' weights are rounded. halves: narrow passes have a graph with weights in bfloat16.
    """

    name = "openvino"

    def __init__(self, decoder: Any, head: nn.Linear, packing: Packing, quantised: str | None = None, halves: bool = False):
        super().__init__(decoder, head, packing)
        self.quantised, self.halves = quantised, halves
        self.readable: tuple[int, ...] = ()  # layers whose outputs the compiled graphs give
        self._requests: dict[bool, Any] = {}  # to the compiled graphs: of narrow passes, of others

    def __call__(
        self, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache | None, kept: Sublayers | None = None
    ) -> Tensor:
        if kept is not None:
            return super().__call__(tokens, positions, mask, cache, kept)
        return self._infer(tokens, positions, mask, cache, tokens.shape[1])[0]

    def score(
        self, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache | None, last_only: bool = False
    ) -> tuple[Tensor, Tensor]:
        return self._infer(tokens, positions, mask, cache, tokens.shape[1] - 1 if last_only else 0)

    def _infer(
        self, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache | None, first: int
    ) -> tuple[Tensor, Tensor]:
        """One pass: states [B, N, D], and the logits of the tokens from `first` on [B, N - first, V]."""
        hidden = self.decoder.embed_tokens(tokens)
        cos, sin = self.rotary(hidden, positions)
        keys, values = self._cached(hidden, cache)
        if mask is None:
            length, new = 0 if cache is None else cache.length, tokens.shape[1]
            mask = torch.ones(new, length + new, dtype=torch.bool).tril(length).expand(len(tokens), 1, -1, -1)
        split = (mask[..., :0], mask) if cache is None else cache.split_mask(mask)
        bias = self._bias_over(*split, keys.shape[3])
        inputs = [x.numpy() for x in (hidden, cos, sin, bias, keys, values, torch.tensor([first]))]
        request = self.request(self.halves and tokens.numel() <= NARROW)
        logits = hidden.new_empty(len(tokens), tokens.shape[1] - first, self.head.out_features)
        request.set_output_tensor(1, openvino.Tensor(logits.numpy(), shared_memory=True))
        result = request.infer(inputs, share_inputs=True, share_outputs=True)
        # Copies: the next pass overwrites its other outputs.
        states, new_keys, new_values = (torch.from_numpy(result[i]).clone() for i in (0, 2, 3))
        if cache is not None:
            cache.append_all(new_keys, new_values)
        for layer in self.read:
            self.outputs[layer] = torch.from_numpy(result[4 + self.readable.index(layer)]).clone()
        return states, logits

    def _cached(self, hidden: Tensor, cache: KVCache | None) -> tuple[Tensor, Tensor]:
        """Stored keys and values of all layers, 2 x [L, B, H, C, Dh]; defined up to the cache's length."""
        if cache is not None and not cache.empty:
            return cache.storage[hidden.device]
        empty = hidden.new_empty(len(self.norms), len(hidden), self.keys, 0, self.head_dim)
        return empty, empty

    def _bias_over(self, kept: Tensor, new: Tensor, rows: int) -> Tensor:
        """What is added to scores over C stored rows and N new ones. [B, 1, N, S], [B, 1, N, N] -> [B, 1, G * N, C + N]"""
        bias = torch.full((*new.shape[:3], rows + new.shape[3]), -torch.inf)
        bias[..., : kept.shape[3]].masked_fill_(kept, 0.0)
        bias[..., rows:].masked_fill_(new, 0.0)
        return bias.repeat(1, 1, self.queries // self.keys, 1)

    def request(self, halved: bool) -> Any:
        """A request to a compiled graph; its outputs are states, logits, new keys, new values and the readable layers."""
        if not {*self.read} <= {*self.readable}:
            self._requests.clear()  # their copies of the weights go before others are made
            self.readable = tuple(sorted({*self.readable, *self.read}))
        if halved not in self._requests:
            settings = {
                "INFERENCE_PRECISION_HINT": "f32",
                "PERFORMANCE_HINT": "LATENCY",
                "INFERENCE_NUM_THREADS": torch.get_num_threads(),
                "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,  # inputs stay float32: rows do not depend on their neighbours
            }
            compiled = openvino.Core().compile_model(_Graph(self, halved).build(), "CPU", settings)
            self._requests[halved] = compiled.create_infer_request()
        return self._requests[halved]


class _Graph:
    """Builds the graph of a decoder. Shapes: B sequences, N new tokens, C cache rows, G queries of a key."""

    def __init__(self, decoder: OpenVinoLlama, halved: bool):
        self.of, self.halved, self.layers = decoder, halved, decoder.decoder.layers
        width = decoder.decoder.embed_tokens.embedding_dim
        count, heads, head_dim = len(self.layers), decoder.keys, decoder.head_dim
        self.hidden = _input(-1, -1, width)
        self.rotary = _input(-1, -1, 1, head_dim), _input(-1, -1, 1, head_dim)
        scale = torch.ones(decoder.queries + heads, 1)
        scale[: decoder.queries] = decoder.scale
        self.angles = [ops.multiply(part, _constant(scale)) for part in self.rotary]  # [B, N, Hq + H, Dh]
        self.bias = _input(-1, 1, -1, -1)
        self.cache = _input(count, -1, heads, -1, head_dim), _input(count, -1, heads, -1, head_dim)
        self.first = ops.parameter([1], openvino.Type.i64)

    def build(self) -> Any:
        hidden, new, read = self.hidden, [], {}
        cached = list(zip(*(ops.split(part, _axis(0), len(self.layers)).outputs() for part in self.cache), strict=True))
        for index, layer in enumerate(self.layers):
            attended, key, value = self._attend(index, _norm(hidden, layer.input_layernorm), cached[index])
            hidden = ops.add(hidden, attended)
            hidden = ops.add(hidden, self._mlp(index, _norm(hidden, layer.post_attention_layernorm)))
            new.append((ops.unsqueeze(key, _axis(0)), ops.unsqueeze(value, _axis(0))))
            read[index] = hidden
        stored = [ops.concat(list(part), 0) for part in zip(*new, strict=True)]
        states = _norm(hidden, self.of.decoder.norm)
        scored = ops.slice(states, self.first, _ints(2**31 - 1), _ints(1), _ints(1))
        logits = _product(scored, self._weight(self.of.head.weight), self.of.head.bias)
        outputs = [states, logits, *stored, *(read[i] for i in self.of.readable)]
        inputs = [self.hidden, *self.rotary, self.bias, *self.cache, self.first]
        results = [ops.result(output) for output in outputs]
        return _as_language_model(results, inputs) if self.halved else openvino.Model(results, inputs)

    def _linear(self, product: str, layer: int, x: Node) -> Node:
        weight, bias = self.of.joined[product][layer]
        kind = self.of.quantised
        return _product(x, self._weight(weight) if kind is None else _compressed(weight, kind), bias)

    def _weight(self, weight: Tensor) -> Node:
        return _halved(weight) if self.halved else _constant(weight)

    def _attend(self, layer: int, x: Node, cached: Sequence[Node]) -> tuple[Node, Node, Node]:
        """Self-attention with its output product, and its new keys and values [B, H, N, Dh]."""
        queries, keys, head_dim = self.of.queries, self.of.keys, self.of.head_dim
        heads = ops.reshape(self._linear("qkv", layer, x), _ints(0, 0, queries + 2 * keys, head_dim), True)
        query_key, value = _split(heads, 2, queries + keys, keys)
        query, key = _split(self._rotate(query_key), 2, queries, keys)
        query, key, value = (ops.transpose(part, _ints(0, 2, 1, 3)) for part in (query, key, value))
        grouped = ops.reshape(query, _ints(0, keys, -1, head_dim), True)  # [B, H, G * N, Dh]
        rows = [ops.concat([ops.squeeze(old, _axis(0)), new], 2) for old, new in zip(cached, (key, value), strict=True)]
        weights = ops.softmax(ops.add(ops.matmul(grouped, rows[0], False, True), self.bias), 3)  # [B, H, G * N, C + N]
        mixed = ops.reshape(ops.matmul(weights, rows[1], False, False), _ints(0, queries, -1, head_dim), True)
        mixed = ops.reshape(ops.transpose(mixed, _ints(0, 2, 1, 3)), _ints(0, 0, queries * head_dim), True)
        return self._linear("out", layer, mixed), key, value

    def _rotate(self, x: Node) -> Node:
        """Rotary positions, and the scale of scores in the queries. x [B, N, Hq + H, Dh]"""
        cos, sin = self.angles
        first, second = ops.split(x, _axis(3), 2).outputs()
        return ops.add(ops.multiply(x, cos), ops.multiply(ops.concat([second, first], 3), sin))

    def _mlp(self, layer: int, x: Node) -> Node:
        gate, up = ops.split(self._linear("gate_up", layer, x), _axis(2), 2).outputs()
        return self._linear("down", layer, ops.multiply(ops.swish(gate), up))


def supports(decoder: Any) -> bool:
    """Has it SiLU in its MLPs, and float32 weights on a CPU? Asked of decoders that `FusedLlama` knows."""
    return decoder.config.hidden_act in ("silu", "swish") and all(
        p.dtype == torch.float32 and p.device.type == "cpu" for p in decoder.parameters()
    )


def _input(*shape: int) -> Node:
    return ops.parameter(openvino.PartialShape(list(shape)), FLOAT32)


def _constant(weight: Tensor) -> Node:
    return ops.constant(weight.detach().numpy(), shared_memory=True)


def _product(x: Node, weight: Node, bias: Tensor | None) -> Node:
    """x W^T + b."""
    y = ops.matmul(x, weight, False, True)
    return y if bias is None else ops.add(y, _constant(bias))


def _halved(weight: Tensor) -> Node:
    """Weights that bfloat16 holds exactly, so stored, in the form that OpenVINO does not widen when it compiles."""
    half = weight.detach().to(torch.bfloat16)
    stored = openvino.Tensor(half.view(torch.int16).numpy(), list(half.shape), openvino.Type.bf16)
    widened = ops.convert(openvino.op.Constant(stored, shared_memory=False), FLOAT32)
    widened.get_rt_info()["decompression_0"] = ""
    return widened


def _as_language_model(results: list[Node], inputs: list[Node]) -> Any:
    """The graph with an attention to a variable, which nothing reads.

    By that OpenVINO's CPU plugin tells language models from others (`getModelType`), and only these may multiply with
    halved weights.
    """
    described = VariableInfo()
    described.data_shape, described.data_type, described.variable_id = (
        openvino.PartialShape([1, 1, 1, 8]),
        FLOAT32,
        "unused",
    )
    variable = Variable(described)
    value = ops.read_value(ops.constant(numpy.zeros((1, 1, 1, 8), numpy.float32)), variable)
    unused = ops.result(ops.scaled_dot_product_attention(value, value, value))
    return openvino.Model([*results, unused], [ops.assign(value, variable)], inputs, [variable])


def _compressed(weight: Tensor, kind: str) -> Node:
    """Weights that are rounded already, in the operators that OpenVINO multiplies with without unpacking them first."""
    integers, scales, offsets = weight_only.rounded(weight, kind)
    if offsets is None:
        shifted = ops.convert(ops.constant(integers.numpy()), FLOAT32)
    else:
        shifted = ops.subtract(ops.convert(_nibbles(integers), FLOAT32), ops.constant(offsets.numpy()))
    return ops.reshape(ops.multiply(shifted, ops.constant(scales.numpy())), _ints(*weight.shape), False)


def _nibbles(integers: Tensor) -> Node:
    """Integers from 0 to 15, two a byte, the first one in the lower half."""
    low, high = integers.view(-1, 2).unbind(1)
    packed = (high << 4 | low).numpy()
    viewed = openvino.Tensor(packed, list(integers.shape), openvino.Type.u4)
    return openvino.op.Constant(viewed, shared_memory=False)  # a copy: nothing keeps `packed`


def _number(value: float) -> Node:
    return ops.constant(numpy.float32(value))


def _ints(*values: int) -> Node:
    return ops.constant(numpy.array(values, dtype=numpy.int64))


def _axis(value: int) -> Node:
    return ops.constant(numpy.int64(value))


def _split(x: Node, axis: int, *sizes: int) -> list[Node]:
    return ops.variadic_split(x, _axis(axis), _ints(*sizes)).outputs()


def _norm(x: Node, module: Any) -> Node:
    """Llama's RMSNorm, in the operators that OpenVINO joins to one."""
    variance = ops.reduce_mean(ops.power(x, _number(2)), _ints(-1), True)
    inverse = ops.divide(_number(1), ops.sqrt(ops.add(variance, _number(module.variance_epsilon))))
    return ops.multiply(ops.multiply(x, inverse), _constant(module.weight))
