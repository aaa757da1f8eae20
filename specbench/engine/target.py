"""Any unforked Hugging Face causal LM, run over trees with tapped states. Knows no drafter.

Knows Transformers' internals, as `lean` does: 4-D masks and explicit positions pass straight through sdpa, a cache
of preallocated rows stands in for the model's own, and forward hooks read the layers that a drafter taps.
"""

import os
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import GenerationConfig, PreTrainedConfig

from specbench.common import hashing
from specbench.common.errors import SpecBenchError, refusing
from specbench.engine.backends.fused_llama import FusedLlama, fused_forward
from specbench.engine.backends.packed_linear import optimize_for_inference
from specbench.engine.cache import KVCache, StaticRows
from specbench.engine.interface import DraftTree, Sublayers, Taps, TargetStates
from specbench.engine.pretrained import contents_of, fingerprint_in_memory, fingerprint_of, random_model, read_model
from specbench.engine.tensors import finite
from specbench.engine.verify import LocalVerifier, Verifier, VerifyConfig

UNDECIDING = ("dtype", "transformers_version", "_name_or_path")  # of a configuration: not which model it is
SPARE = 128  # rows behind the context that a tree may take in a compiled pass


def pick_device(device: str) -> torch.device:
    """`auto` is CUDA where there is one. Raises `SpecBenchError` for a GPU that this machine lacks."""
    if device == "auto":
        own = int(os.environ.get("LOCAL_RANK", 0))  # each process of a launch has a GPU of its own
        return torch.device("cuda", own) if torch.cuda.is_available() else torch.device("cpu")
    chosen = torch.device(device)
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise SpecBenchError(
            f"model.device={device}, but torch sees {torch.cuda.device_count()} GPUs here; use model.device=cpu or auto"
        )
    return chosen


def pick_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on a GPU and on a CPU with AMX, else float32.

    avx512_bf16 alone does not pay in decoding: one token is no faster, 8 to 64 are slower, and answers part at ties.
    """
    if dtype != "auto":
        chosen: torch.dtype = getattr(torch, dtype)
        return chosen
    if device.type != "cpu":
        return torch.bfloat16
    capabilities: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()
    return torch.bfloat16 if capabilities.get("amx_bf16") else torch.float32


class _Appender:
    """What a decoder layer asks of a cache, answered by a function."""

    def __init__(self, append: Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]):
        self.append = append

    def update(self, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.append(layer, keys, values)


@contextmanager
def _skipping(layers: Iterable[Any], kept: Sublayers) -> Iterator[None]:
    """Sublayers that are not kept add zeros to the residual stream meanwhile."""

    def no_attention(hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        return torch.zeros_like(hidden_states), None

    skipped: list[tuple[nn.Module, Any]] = []
    for index, layer in enumerate(layers):
        skipped += [(layer.self_attn, no_attention)] * (index not in kept.attention)
        skipped += [(layer.mlp, torch.zeros_like)] * (index not in kept.mlp)
    for module, nothing in skipped:
        module.forward = nothing
    try:
        yield
    finally:
        for module, _ in skipped:
            del module.forward


class CausalLM:
    """An unforked causal LM as embedding, decoder and head, run with explicit positions, masks and our cache."""

    def __init__(self, model: Any):  # a PreTrainedModel, whose attributes its stubs do not know
        self.model = model
        self.config: PreTrainedConfig = model.config.get_text_config()
        self.decoder: Any = model.get_decoder()
        if not hasattr(self.decoder, "layers"):
            raise SpecBenchError(
                f"model type {self.config.model_type} has no Llama-like decoder (`layers`); this harness cannot run it"
            )
        self.embedding: nn.Embedding = model.get_input_embeddings()
        self.head: nn.Linear = model.get_output_embeddings()
        self.layers = len(self.decoder.layers)
        window = getattr(self.config, "sliding_window", None)
        self.kinds = set(getattr(self.config, "layer_types", None) or ["sliding_attention" if window else "full_attention"])
        self.window: int | None = window if window and self.kinds != {"full_attention"} else None
        self.lean: FusedLlama | None = None

    def optimize_for_inference(self) -> None:
        """Make passes over few tokens fast, for decoding: a lean forward where one is known, fast products where they pay.

        Once weights and device are final, and not for training. What is computed stays the same but for rounding.
        """
        self.lean = self.lean or fused_forward(self)
        optimize_for_inference([self.head] if self.lean else [self.decoder, self.head])

    def new_cache(self, capacity: int, only: Collection[int] | None = None) -> KVCache:
        """An empty cache for this model, wherever its layers lie. only: layers whose attention runs; None: all."""
        devices = [next(layer.parameters()).device for layer in self.decoder.layers]
        return KVCache(self.layers, capacity, devices if len(set(devices)) > 1 else None, only)

    def logits(self, last: Tensor, head: nn.Linear | None = None) -> Tensor:
        """LM head, or a part of it, on post-norm states, in the model's dtype. [..., D] -> [..., V]"""
        logits = (self.head if head is None else head)(last)
        cap = getattr(self.config, "final_logit_softcapping", None)
        return logits if not cap else torch.tanh(logits / cap) * cap

    def run(self, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache | None) -> Tensor:
        """The decoder alone, without the LM head.

        Args:
            tokens, positions: [B, T].
            mask: bool [B, 1, T, S], True where a query may look; None for plainly causal from an empty cache, or for
                one token a sequence that sees everything.
            cache: rows are appended to it, not yet kept; None for a pass that stores nothing.

        Returns:
            [B, T, D] post-norm states.
        """
        if self.lean is not None and not torch.is_grad_enabled():
            return self.lean(tokens, positions, mask, None if cache is None else cache.append)
        out = self.decoder(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=self._masks(tokens, positions, mask, cache),
            past_key_values=cache,
            use_cache=cache is not None,
        )
        return out.last_hidden_state

    def tail(
        self,
        hidden: Tensor,
        positions: Tensor,
        mask: Tensor,
        count: int,
        append: Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]],
    ) -> Tensor:
        """The last `count` layers and the final norm, on states that need not be the model's own.

        Args:
            hidden: [B, T, D] what enters those layers. positions: [B, T]. mask: bool [B, 1, T, S].
            append: called per layer with its index and the new keys and values [B, H, T, Dh]; returns all S of each.

        Returns:
            [B, T, D] post-norm.
        """
        if getattr(self.config, "sliding_window", None):
            raise SpecBenchError(f"{self.config.model_type}: target layers with a sliding window cannot be run alone")
        if self.lean is not None and not torch.is_grad_enabled():
            return self.decoder.norm(self.lean.layers(self.layers - count, hidden, positions, mask, append))
        rotary = self.decoder.rotary_emb(hidden, positions)
        for layer in self.decoder.layers[-count:]:
            hidden = layer(
                hidden, attention_mask=mask, position_embeddings=rotary, past_key_values=_Appender(append), use_cache=True
            )
            hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        return self.decoder.norm(hidden)

    def subset(
        self, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache | None, kept: Sublayers
    ) -> Tensor:
        """As `run`, through the kept sublayers alone. cache: one that stores at least the kept attention's rows."""
        if self.lean is not None and not torch.is_grad_enabled():
            return self.lean(tokens, positions, mask, None if cache is None else cache.append, kept)
        with _skipping(self.decoder.layers, kept):
            return self.run(tokens, positions, mask, cache)

    def sublayers(self) -> list[tuple[nn.Module, nn.Module]]:
        """Attention and MLP of every layer.

        Raises:
            SpecBenchError: layers that are not made of these two.
        """
        found: list[tuple[Any, Any]] = [
            (getattr(layer, "self_attn", None), getattr(layer, "mlp", None)) for layer in self.decoder.layers
        ]
        if any(part is None for both in found for part in both):
            raise SpecBenchError(
                f"model type {self.config.model_type} has layers without `self_attn` and `mlp`; none of them can be skipped"
            )
        return found

    def _masks(
        self, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache | None
    ) -> Tensor | dict[str, Tensor] | None:
        """The mask each layer type needs, of a pass whose rows come behind a cache's."""
        if self.window is None:
            return mask
        start = cache.length if cache is not None else 0
        batch, t = tokens.shape
        if mask is None:
            device = tokens.device
            keys = torch.arange(start + t, device=device)
            mask = (keys[None, :] <= start + torch.arange(t, device=device)[:, None]).expand(batch, 1, t, start + t)
        past = torch.arange(start, device=tokens.device).expand(batch, start)  # slot = position
        return self.by_kind(mask, positions, torch.cat([past, positions], 1))

    def by_kind(self, mask: Tensor, positions: Tensor, of_keys: Tensor) -> Tensor | dict[str, Tensor]:
        """Sliding-window layers also lose the keys that lie a window behind. mask [B, 1, T, S], positions [B, T], [B, S]"""
        if self.window is None:
            return mask
        near = mask & (positions[:, :, None] - of_keys[:, None, :] < self.window)[:, None]
        return near if len(self.kinds) == 1 else {"full_attention": mask, "sliding_attention": near}


class Target(CausalLM):
    """The frozen model that is sped up, with its cache and the layers that a drafter taps.

    Attributes:
        embedding, head: the model's input embedding and LM head, shared by drafters, never trained.
        stop_ids: every stop token of the generation config.
        max_context: positions the model was made for.
        path: the folder it was loaded from, where its tokenizer lies too.
        made_from: the configuration of a target without weights.
        listing: where the list of its most frequent ids should lie, see `vocabulary`.
    """

    replayed = False

    def __init__(self, model: Any, path: Path | str | None = None):
        super().__init__(model.eval().requires_grad_(False))
        self.path = path
        self.listing: Path | None = None
        self.made_from: PreTrainedConfig | None = None
        self.hidden_size: int = self.config.hidden_size
        self.vocab_size: int = self.head.weight.shape[0]
        self.max_context: int = self.config.max_position_embeddings
        self.device, self.dtype = self.head.weight.device, self.head.weight.dtype
        self.stop_ids = stop_ids(getattr(model, "generation_config", None), self.config)
        self.cache = self.new_cache(0)
        self.taps = Taps()
        self._tapped: dict[int, Tensor] = {}
        self._compiled: Callable[..., tuple[Tensor, Tensor]] | None = None
        self._rows: StaticRows | None = None
        self._check()

    @classmethod
    def load(
        cls, path: Path | str, dtype: torch.dtype, device: torch.device, processes: int = 1, device_map: str | None = None
    ) -> "Target":
        """From a local folder of safetensors, or of pickled tensors without code.

        Args:
            device_map: `auto` spreads the layers over all GPUs instead of putting them on `device`.
            processes: of several each holds its part of every decoder layer and gathers a layer when it runs (FSDP).

        Raises:
            SpecBenchError: no causal language model is there, or not a whole one; see `pretrained.read_model`.
        """
        model = read_model(Path(path), dtype, device_map)
        if processes > 1:
            mesh = init_device_mesh(device.type, (processes,))
            for layer in model.get_decoder().layers:
                fully_shard(layer.requires_grad_(False), mesh=mesh, reshard_after_forward=True)
        if device_map is None:
            model.to(device)
        return cls(model, path)

    @classmethod
    def random(cls, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> "Target":
        """A target of this shape without its weights, for time and memory alone. It never stops by itself."""
        target = cls(random_model(config, dtype, device))
        target.stop_ids, target.made_from = (), config
        return target

    def fingerprint(self) -> str:
        """Which model this is, by all its tensors, alike in float32 and bfloat16; of a random one by its shape.

        Of a folder's model it is read off the files, so it does not matter where the tensors lie now and in how many parts.
        """
        if self.made_from is not None:
            said = {k: v for k, v in self.made_from.to_dict().items() if k not in UNDECIDING}
            return hashing.of(said)[:16]
        return fingerprint_in_memory(self.model) if self.path is None else fingerprint_of(Path(self.path))

    def contents(self) -> dict[str, str]:
        """SHA-256, by name, of the files it was loaded from; empty if there are none."""
        return {} if self.path is None else contents_of(Path(self.path))

    def reset(self, capacity: int, taps: Taps | None = None) -> None:
        """Start a new sequence. capacity: the most rows it can need (prompt + new tokens + one tree)."""
        self.taps = (taps or Taps()).resolve(self.layers)
        if self._compiled is not None:  # one size for all prompts, or each would be compiled anew
            capacity = max(capacity, self.max_context + SPARE)
        self.cache.begin(capacity)

    def verifier(self, terms: VerifyConfig) -> Verifier:
        """Who says what is accepted of the coming generation's trees."""
        return LocalVerifier(terms, self.device)

    def compile(self, backend: str = "inductor") -> None:
        """From now on run trees through one compiled pass of static shapes; prompts stay eager.

        A pass sees all rows that the cache can hold, most of them masked, so `max_context` should not be larger than
        needed. Source: gpt-fast, as in EAGLE, Table 4.
        """
        mode = "reduce-overhead" if self.device.type == "cuda" and backend == "inductor" else None  # CUDA graphs
        self._compiled = torch.compile(self._static_pass, backend=backend, dynamic=False, mode=mode)

    def prefill(self, tokens: Tensor) -> TargetStates:
        """Run a prompt [N] from an empty cache and keep its rows; logits of the last position only."""
        positions = torch.arange(tokens.shape[0], device=self.device)
        states = self._states(tokens, positions, mask=None, last_only=True)
        self.cache.keep()
        return states

    def forward(self, tree: DraftTree) -> TargetStates:
        """One pass over root + draft nodes; every node sees the prefix, its ancestors and itself. Keeps nothing yet."""
        start = self.cache.length
        if self._compiled is not None and not self.taps.hidden:  # hooks are not compiled
            return self._forward_static(tree, start)
        # A lone root sees everything, a chain is causal, but only an explicit mask knows what the cache already holds.
        mask = None
        if len(tree) > 1:
            mask = torch.ones(len(tree), start + len(tree), dtype=torch.bool, device=self.device)
            mask[:, start:] = tree.ancestors
        return self._states(tree.tokens, start + tree.depths, mask)

    def _forward_static(self, tree: DraftTree, start: int) -> TargetStates:
        """The same in shapes that do not depend on how much the cache holds."""
        assert self._compiled is not None
        n, end = len(tree), start + len(tree)
        positions, of_keys = start + tree.depths, torch.arange(self.cache.capacity, device=self.device)
        of_keys[start:end] = positions
        mask = torch.zeros(n, self.cache.capacity, dtype=torch.bool, device=self.device)
        mask[:, :start] = True
        mask[:, start:end] = tree.ancestors
        if self._rows is None or not self._rows.of(self.cache):
            self._rows = self.cache.whole()
        masks = self.by_kind(mask[None, None], positions[None], of_keys[None])
        slots = torch.arange(start, end, device=self.device)
        last, logits = self._compiled(tree.tokens[None], positions[None], masks, slots)
        self.cache.pending = n
        return TargetStates(
            tokens=tree.tokens,
            positions=positions,
            last=last[0].clone(),  # the next replay of a graph would overwrite it
            logits=logits[0].clone(),
            hidden={},
            kv={i: self.cache.rows(i, start, end) for i in self.taps.kv},
        )

    def _static_pass(
        self, tokens: Tensor, positions: Tensor, masks: Tensor | dict[str, Tensor], slots: Tensor
    ) -> tuple[Tensor, Tensor]:
        assert self._rows is not None
        self._rows.slots = slots
        out = self.decoder(
            input_ids=tokens, position_ids=positions, attention_mask=masks, past_key_values=self._rows, use_cache=True
        )
        return out.last_hidden_state, self.logits(out.last_hidden_state)

    def keep(self, nodes: Tensor) -> None:
        """Keep the cache rows of these nodes [1 + A] (root and accepted path), drop the others.

        Rows move: the keys and values in the states of this pass are void afterwards, what was selected of them is not.
        """
        self.cache.keep(nodes)

    def _states(self, tokens: Tensor, positions: Tensor, mask: Tensor | None, last_only: bool = False) -> TargetStates:
        start = self.cache.length
        with self._reading(self.taps.hidden):
            last = self.run(tokens[None], positions[None], None if mask is None else mask[None, None], self.cache)[0]
        last = last.to(self.device)  # of a model spread over several devices, the head's
        end = start + tokens.shape[0]
        return TargetStates(
            tokens=tokens,
            positions=positions,
            last=last,
            logits=self.logits(last[-1:] if last_only else last),
            hidden={i: self._tapped[i][0].to(self.device) for i in self.taps.hidden},
            kv={i: self._at_home(self.cache.rows(i, start, end)) for i in self.taps.kv},
        )

    def _at_home(self, kv: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return kv[0].to(self.device), kv[1].to(self.device)

    @torch.no_grad()  # not inference mode: what is returned takes part in training
    def tapped(
        self, tokens: Tensor, taps: Taps, positions: Tensor | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, dict[int, Tensor], dict[int, tuple[Tensor, Tensor]]]:
        """States and tapped layers of B right-padded texts [B, T], for training online.

        Args:
            positions: [B, T], mask: bool [B, 1, T, T], where rows hold several texts; None: causal from 0.

        Returns:
            [B, T, D], {layer: [B, T, D]}, {layer: ([B, H, T, Dh], [B, H, T, Dh])}.
        """
        taps = taps.resolve(self.layers)
        cache = self.new_cache(tokens.shape[1]) if taps.kv else None
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        with self._reading(taps.hidden):
            states = self.run(tokens, positions, mask, cache)
        hidden = {i: self._tapped[i].clone() for i in taps.hidden}
        kv = {}
        if cache is not None:
            kv = {i: self._at_home(cache.layer(i)) for i in taps.kv}
        return states.clone(), hidden, kv

    @torch.no_grad()
    def greedy(self, start: tuple[int, ...], count: int) -> Tensor:
        """[1, len(start) + count]: a little text of the model's own, without the cache; for checks, not for decoding."""
        tokens = torch.tensor([start], device=self.device)
        for _ in range(count):
            positions = torch.arange(tokens.shape[1], device=self.device)[None]
            last = self.run(tokens, positions, None, None)[:, -1]
            tokens = torch.cat([tokens, self.logits(last).argmax(-1, keepdim=True)], 1)
        return tokens

    @contextmanager
    def _reading(self, layers: tuple[int, ...]) -> Iterator[None]:
        """The output of these layers goes into `_tapped` during one pass."""
        if self.lean is not None:
            self.lean.read, self.lean.seen = layers, self._tapped

        def reader(index: int):
            def hook(_module, _inputs, output):
                self._tapped[index] = output[0] if isinstance(output, tuple) else output

            return hook

        handles = [self.decoder.layers[i].register_forward_hook(reader(i)) for i in layers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _check(self) -> None:
        """Refuse a model that cannot be run, or whose logits are not head(post-norm state): all drafters build on that."""
        kind, layers, positions = self.config.model_type, self.layers, self.max_context
        if layers < 1 or positions < 1:
            raise SpecBenchError(
                f"a model of type {kind} with {layers} layers for {positions} positions cannot be run; mend its config.json"
            )
        angles = [n for n, b in self.model.named_buffers() if n.endswith("inv_freq") and not finite(b)]
        if angles:  # attention would hide it: it takes what is no number for nothing
            raise SpecBenchError(
                f"the rope parameters in a config.json of type {kind} make {angles[0]} no number; mend them"
            )
        probe = torch.arange(4, device=self.device)[None].clamp(max=self.vocab_size - 1)
        with (
            torch.no_grad(),
            refusing(f"a model of type {kind} cannot be run with the values in its config.json; mend them"),
        ):
            ours, theirs = self.logits(self.decoder(probe).last_hidden_state), self.model(probe).logits
        if not theirs.isfinite().all():
            raise SpecBenchError(
                f"a model of type {kind} gives logits that are no numbers in {self.dtype}; check the values in its "
                "config.json, or use model.dtype=float32"
            )
        if not torch.allclose(ours.float(), theirs.float(), atol=1e-2, rtol=1e-2):
            raise SpecBenchError(
                f"model type {kind} does more than its LM head after the final norm (scaled logits?); this harness does "
                "not support it"
            )


def stop_ids(generation: GenerationConfig | None, config: PreTrainedConfig) -> tuple[int, ...]:
    """All end-of-sequence ids of the generation config, or of the model config where it has none."""
    eos = getattr(generation, "eos_token_id", None)
    eos = getattr(config, "eos_token_id", None) if eos is None else eos
    found = () if eos is None else tuple(eos) if isinstance(eos, (list, tuple)) else (eos,)
    if not all(isinstance(i, int) for i in found):
        raise SpecBenchError(
            f"eos_token_id in generation_config.json or config.json is no id or list of ids: {eos!r}; mend it"
        )
    return found
