"""The forward of Llama-like decoders as one OpenVINO graph: for float32 on a CPU, where it reads weights about as fast as
memory delivers them, whatever the number of tokens in a small tree.

The graph takes the cache as it lies in memory, [L, B, H, C, Dh], and never writes to it. A query's scores over cached rows
and over the rows of its own pass are one softmax, so neither is copied behind the other; the pass returns its new rows:

    softmax([Q K_cache^T + bias_cache | Q K_new^T + bias_new]) = [W_cache | W_new],   out = W_cache V_cache + W_new V_new

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
from torch import Tensor

from specbench.engine.backends.fused_llama import FusedLlama
from specbench.engine.backends.packed_linear import Packing
from specbench.engine.cache import KVCache
from specbench.engine.interface import Sublayers

Node = Any  # of OpenVINO's graph
FLOAT32 = openvino.Type.f32


class OpenVinoLlama(FusedLlama):
    """A decoder's layers and final norm, compiled on the first pass and again when a further layer is read.

    Layers that were read once stay readable: drafters that read some and others that read none decode in turn.
    """

    name = "openvino"

    def __init__(self, decoder: Any, packing: Packing):
        super().__init__(decoder, packing)
        self.readable: tuple[int, ...] = ()  # layers whose outputs the compiled graph gives
        self._compiled: Any = None  # a request to it

    def __call__(
        self, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache | None, kept: Sublayers | None = None
    ) -> Tensor:
        if kept is not None:
            return super().__call__(tokens, positions, mask, cache, kept)
        hidden = self.decoder.embed_tokens(tokens)
        cos, sin = self.rotary(hidden, positions)
        keys, values = self._cached(hidden, cache)
        bias = self._biases(mask, len(tokens), tokens.shape[1], 0 if cache is None else cache.length, keys.shape[3])
        inputs = [x.numpy() for x in (hidden, cos, sin, *bias, keys, values)]
        result = self._request().infer(inputs, share_inputs=True, share_outputs=True)
        # Copies: the next pass overwrites its outputs.
        states, new_keys, new_values = (torch.from_numpy(result[i]).clone() for i in range(3))
        if cache is not None:
            cache.append_all(new_keys, new_values)
        for layer in self.read:
            self.outputs[layer] = torch.from_numpy(result[3 + self.readable.index(layer)]).clone()
        return states

    def _cached(self, hidden: Tensor, cache: KVCache | None) -> tuple[Tensor, Tensor]:
        """Stored keys and values of all layers, 2 x [L, B, H, C, Dh]; defined up to the cache's length."""
        if cache is not None and cache.length:
            return cache.storage[hidden.device]
        empty = hidden.new_empty(len(self.norms), len(hidden), self.keys, 0, self.head_dim)
        return empty, empty

    def _biases(self, mask: Tensor | None, batch: int, new: int, length: int, rows: int) -> tuple[Tensor, Tensor]:
        """What is added to scores: of C cached rows [B, 1, 1 or G * N, C], of N new ones [B, 1, G * N, N]."""
        groups = self.queries // self.keys
        if mask is None:
            cached, below = torch.ones(batch, 1, 1, length, dtype=torch.bool), torch.ones(new, new, dtype=torch.bool).tril()
            below = below.expand(batch, 1, new, new)
        else:
            cached, below = mask[..., :length], mask[..., length:]
        past = torch.full((*cached.shape[:-1], rows), -torch.inf)
        past[..., :length].masked_fill_(cached, 0.0)
        past = past if mask is None else past.repeat(1, 1, groups, 1)
        return past, torch.zeros(below.shape).masked_fill_(~below, -torch.inf).repeat(1, 1, groups, 1)

    def _request(self) -> Any:
        """A request to the compiled graph, whose outputs are states, new keys, new values and the readable layers."""
        if self._compiled is None or not {*self.read} <= {*self.readable}:
            self._compiled = None  # its copies of the weights go before others are made
            self.readable = tuple(sorted({*self.readable, *self.read}))
            settings = {
                "INFERENCE_PRECISION_HINT": "f32",
                "PERFORMANCE_HINT": "LATENCY",
                "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            }
            model = _Graph(self).build()
            self._compiled = openvino.Core().compile_model(model, "CPU", settings).create_infer_request()
        return self._compiled


class _Graph:
    """Builds the graph of a decoder. Shapes: B sequences, N new tokens, C cache rows, G queries of a key."""

    def __init__(self, decoder: OpenVinoLlama):
        self.of, self.layers = decoder, decoder.decoder.layers
        width = decoder.decoder.embed_tokens.embedding_dim
        count, heads, head_dim = len(self.layers), decoder.keys, decoder.head_dim
        self.hidden = _input(-1, -1, width)
        self.rotary = _input(-1, -1, 1, head_dim), _input(-1, -1, 1, head_dim)
        self.biases = _input(-1, 1, -1, -1), _input(-1, 1, -1, -1)
        self.cache = _input(count, -1, heads, -1, head_dim), _input(count, -1, heads, -1, head_dim)

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
        outputs = [_norm(hidden, self.of.decoder.norm), *stored, *(read[i] for i in self.of.readable)]
        inputs = [self.hidden, *self.rotary, *self.biases, *self.cache]
        return openvino.Model([ops.result(output) for output in outputs], inputs)

    def _linear(self, product: str, layer: int, x: Node) -> Node:
        weight, bias = self.of.joined[product][layer]
        y = ops.matmul(x, _constant(weight), False, True)
        return y if bias is None else ops.add(y, _constant(bias))

    def _attend(self, layer: int, x: Node, cached: Sequence[Node]) -> tuple[Node, Node, Node]:
        """Self-attention with its output product, and its new keys and values [B, H, N, Dh]."""
        queries, keys, head_dim = self.of.queries, self.of.keys, self.of.head_dim
        heads = ops.reshape(self._linear("qkv", layer, x), _ints(0, 0, queries + 2 * keys, head_dim), True)
        query_key, value = _split(heads, 2, queries + keys, keys)
        query, key = _split(self._rotate(query_key), 2, queries, keys)
        query, key, value = (ops.transpose(part, _ints(0, 2, 1, 3)) for part in (query, key, value))
        grouped = ops.reshape(query, _ints(0, keys, -1, head_dim), True)  # [B, H, G * N, Dh]
        mixed = self._weigh(ops.multiply(grouped, _number(self.of.scale)), key, value, cached)
        batch = _size(self.hidden, 0)
        mixed = ops.reshape(mixed, ops.concat([batch, _ints(queries, -1, head_dim)], 0), False)
        mixed = ops.reshape(ops.transpose(mixed, _ints(0, 2, 1, 3)), _ints(0, 0, queries * head_dim), True)
        return self._linear("out", layer, mixed), key, value

    def _weigh(self, query: Node, key: Node, value: Node, cached: Sequence[Node]) -> Node:
        """Values of cached and new rows, weighted by one softmax. [B, H, G * N, Dh]"""
        keys, values = (ops.squeeze(part, _axis(0)) for part in cached)
        scores = [
            ops.add(ops.matmul(query, rows, False, True), bias) for rows, bias in zip((keys, key), self.biases, strict=True)
        ]
        lengths = ops.concat([_size(part, 3) for part in scores], 0)
        weights = ops.softmax(ops.concat(scores, 3), 3)
        old, new = ops.variadic_split(weights, _axis(3), lengths).outputs()
        return ops.add(ops.matmul(old, values, False, False), ops.matmul(new, value, False, False))

    def _rotate(self, x: Node) -> Node:
        """Rotary positions. x [B, N, heads, Dh]"""
        cos, sin = self.rotary
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


def _number(value: float) -> Node:
    return ops.constant(numpy.float32(value))


def _ints(*values: int) -> Node:
    return ops.constant(numpy.array(values, dtype=numpy.int64))


def _axis(value: int) -> Node:
    return ops.constant(numpy.int64(value))


def _size(x: Node, axis: int) -> Node:
    """The length of one axis, [1]."""
    return ops.gather(ops.shape_of(x), _ints(axis), _axis(0))


def _split(x: Node, axis: int, *sizes: int) -> list[Node]:
    return ops.variadic_split(x, _axis(axis), _ints(*sizes)).outputs()


def _norm(x: Node, module: Any) -> Node:
    """Llama's RMSNorm, in the operators that OpenVINO joins to one."""
    variance = ops.reduce_mean(ops.power(x, _number(2)), _ints(-1), True)
    inverse = ops.divide(_number(1), ops.sqrt(ops.add(variance, _number(module.variance_epsilon))))
    return ops.multiply(ops.multiply(x, inverse), _constant(module.weight))
