"""The frozen target: a causal LM run over trees; forward hooks read the layers that a drafter taps. Knows no drafter."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedConfig

from specbench.common import hashing
from specbench.common.errors import SpecBenchError, refusing
from specbench.engine import adapters, weights
from specbench.engine.backends import weight_only
from specbench.engine.backends.fused_llama import like_llama
from specbench.engine.cache import KVCache
from specbench.engine.captured import MARGIN, CapturedPasses
from specbench.engine.causal_lm import CausalLM
from specbench.engine.interface import DraftTree, Taps, TargetStates
from specbench.engine.language_model import Adapted
from specbench.engine.pretrained import random_model, read_model
from specbench.engine.tensors import finite, some
from specbench.engine.verify import LocalVerifier, Verifier, VerifyConfig
from specbench.records import identity

NON_IDENTITY = (
    "dtype",
    "transformers_version",
    "_name_or_path",
)  # keys of a configuration that do not say which model it is
SPARE = 128  # cache rows behind the context for the tree of a pass


class Target(CausalLM):
    """The frozen model that is sped up.

    Attributes:
        cache: keys and values of what is kept. taps: what the drafter of the current sequence reads.
        captured: its passes over trees in fixed shapes, see `capture`; None: they run as they come.
    """

    replayed = False

    def __init__(self, model: Any, path: Path | str | None = None):
        super().__init__(model.eval().requires_grad_(False), path)
        self.cache = self.new_cache(0)
        self.taps = Taps()
        self._tapped: dict[int, Tensor] = {}
        self.captured: CapturedPasses | None = None
        self._check()

    @classmethod
    def load(
        cls, path: Path | str, dtype: torch.dtype, device: torch.device, processes: int = 1, device_map: str | None = None
    ) -> "Target":
        """From a local folder of safetensors, or of pickled tensors without code; raises as `pretrained.read_model`.

        Args:
            device_map: `auto` spreads the layers over all GPUs instead of putting them on `device`.
            processes: if several, each holds its part of every decoder layer and gathers a layer when it runs (FSDP).
        """
        model = read_model(Path(path), dtype, device_map)
        _require_on_gpus(getattr(model, "hf_device_map", {}), device)
        if processes > 1:
            mesh = init_device_mesh(device.type, (processes,))
            for layer in model.get_decoder().layers:
                fully_shard(layer.requires_grad_(False), mesh=mesh, reshard_after_forward=True)
        if device_map is None:
            model.to(device)
        return cls(model, path)

    @classmethod
    def random(cls, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> "Target":
        """A target of this shape with random weights, for time and memory alone. It has no stop tokens."""
        target = cls(random_model(config, dtype, device))
        target.stop_ids, target.made_from = (), config
        return target

    def fingerprint(self) -> str:
        """As of any model; a random one's is that of its configuration."""
        if self.made_from is None:
            return super().fingerprint()
        return hashing.of({k: v for k, v in self.made_from.to_dict().items() if k not in NON_IDENTITY})[:16]

    @property
    def captures(self) -> bool:
        return self.captured is not None

    @property
    def shares_passes(self) -> bool:
        """Can one pass serve several sequences, see `batch`?"""
        return self.window is None and len(self.new_cache(0).stored) == 1 and not self.captures

    def merge_adapter(self, adapter: adapters.Adapter) -> None:
        """Become the target whose layers' weights an adapter changes.

        Raises `SpecBenchError` for another target's.
        """
        original, folder, provenance = self.fingerprint(), adapter.folder, adapter.provenance or {}
        if known := provenance.get("original_fingerprint"):
            made = {"target": provenance.get("target"), "target_fingerprint": known}
            hint = "leave it out, or choose its own model="
            weights.require_target(f"model.adapter={folder} was made for target", made, original, hint)
        adapters.merge(self.model, adapter)
        self.adapted = Adapted(identity.adapter_name(str(folder or "")), adapter.fingerprint(original))

    def quantise(self, kind: weight_only.Kind) -> None:
        """Become the target whose layers' weights are rounded; the fingerprint stays that of the files.

        Raises `SpecBenchError` if its layers are of a kind that no quantised forward is written for.
        """
        if self.window is not None or not like_llama(self.decoder):
            raise SpecBenchError(
                f"model.quantised={kind}: only layers as Llama's, Qwen2's or Mistral's without a window can be quantised, "
                f"not those of type {self.config.model_type}; leave it out"
            )
        weight_only.round_weights(self.decoder, kind)
        self.quantised = kind

    def reset(self, capacity: int, taps: Taps | None = None) -> None:
        self.taps = (taps or Taps()).resolve(self.layers)
        if self.captured is not None:  # one storage for all prompts, or each would be captured anew
            capacity = self.cache.step = max(capacity + MARGIN, self.max_context + SPARE, self.cache.step)
        self.cache.begin(capacity)

    def verifier(self, config: VerifyConfig) -> Verifier:
        return LocalVerifier(config, self.device)

    def capture(self) -> None:
        """From now on run trees by passes in fixed shapes, on CUDA as graphs; prompts run as they come.

        Call it before `optimize_for_inference`. The cache then has room for `max_context` at once, which should not be
        larger than needed. Raises `SpecBenchError` for a target that is spread over several devices.
        """
        if len(self.new_cache(0).stored) != 1:
            raise SpecBenchError("backend=graphs needs the whole target on one device; use backend=eager")
        self.captured = CapturedPasses(self.device)

    def prepare(self, nodes: int) -> None:
        """After a pass, capture those of trees of up to so many nodes, which would else be captured in a timed cycle."""
        nodes = min(nodes, self.max_context - self.cache.length)
        if self.captured is not None and nodes > 1:
            self.captured.prepare(self, nodes)

    @contextmanager
    def eagerly(self) -> Iterator[None]:
        captured, self.captured = self.captured, None
        try:
            yield
        finally:
            self.captured = captured

    def prefill(self, tokens: Tensor) -> TargetStates:
        """Run a prompt [N] from an empty cache and keep its rows; logits of the last position only."""
        positions = torch.arange(tokens.shape[0], device=self.device)
        found = self.read(tokens[None], positions[None], None, self.cache, last_only=True)
        states = self.states_of_pass(tokens, positions, *found)
        self.cache.keep()
        return states

    def forward(self, tree: DraftTree) -> TargetStates:
        """One pass over root + draft nodes; every node attends to prefix, ancestors and itself. Keeps nothing yet."""
        if self.captured is not None and not self.cache.empty:
            return self.states_of_pass(tree.tokens, self.cache.length + tree.depths, *self.captured.forward(self, tree))
        tokens, positions, mask, cache = self.inputs(tree)
        return self.states_of_pass(tree.tokens, positions[0], *self.read(tokens, positions, mask, cache))

    def inputs(self, tree: DraftTree) -> tuple[Tensor, Tensor, Tensor | None, KVCache]:
        """Arguments of `read` for a tree of N nodes behind the cache: [1, N], [1, N], [1, 1, N, S]."""
        start, mask = self.cache.length, None  # a lone root attends to everything
        if len(tree) > 1:
            mask = torch.ones(1, 1, len(tree), start + len(tree), dtype=torch.bool, device=self.device)
            mask[..., start:] = tree.ancestors
        return tree.tokens[None], (start + tree.depths)[None], mask, self.cache

    def read(
        self, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache, last_only: bool = False
    ) -> tuple[Tensor, ...]:
        """As `score`, and the outputs of the tapped layers, [B, T, D] each."""
        with self._reading(self.taps.hidden):
            last, logits = self.score(tokens, positions, mask, cache, last_only)
        return last, logits, *(self._tapped[i].to(self.device) for i in self.taps.hidden)

    def keep(self, nodes: Tensor) -> None:
        """Keep the cache rows of these nodes [1 + A] (root and accepted path), drop the others.

        Rows move: keys and values in the states of this pass are invalid afterwards, what was selected of them is not.
        """
        if self.captured is None:
            self.cache.keep(nodes)
        else:
            self.captured.keep(self.cache, nodes)

    def states_of_pass(
        self, tokens: Tensor, positions: Tensor, last: Tensor, logits: Tensor, *hidden: Tensor
    ) -> TargetStates:
        """What a pass over N tokens gave, whose rows are not kept yet. last, hidden [1, N, D], logits [1, N or 1, V]"""
        start = self.cache.length
        kv = self.cache.rows_of(self.taps.kv, start, start + len(tokens))
        if self.cache.devices is not None:
            kv = {i: self._to_device(rows) for i, rows in kv.items()}
        return TargetStates(
            tokens=tokens,
            positions=positions,
            last=last[0],
            logits=logits[0],
            hidden=dict(zip(self.taps.hidden, (h[0] for h in hidden), strict=True)),
            kv=kv,
        )

    def _to_device(self, kv: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
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
        kv = {} if cache is None else {i: self._to_device(cache.layer(i)) for i in taps.kv}
        return states.clone(), hidden, kv

    @torch.no_grad()
    def greedy(self, start: tuple[int, ...], count: int) -> Tensor:
        """[1, len(start) + count]: greedy text of the model's own, without a cache; for checks, not for decoding."""
        tokens = torch.tensor([start], device=self.device)
        for _ in range(count):
            positions = torch.arange(tokens.shape[1], device=self.device)[None]
            last = self.run(tokens, positions, None, None)[:, -1]
            tokens = torch.cat([tokens, self.logits(last).argmax(-1, keepdim=True)], 1)
        return tokens

    @contextmanager
    def _reading(self, layers: tuple[int, ...]) -> Iterator[None]:
        """The output of these layers goes into `_tapped` during one pass."""
        if self.fused is not None:
            self.fused.read, self.fused.outputs = layers, self._tapped

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
        """Refuse a model that cannot be run, or whose logits are not head(post-norm state), as all drafters assume."""
        kind, layers, positions = self.config.model_type, self.layers, self.max_context
        if layers < 1 or positions < 1:
            raise SpecBenchError(
                f"a model of type {kind} with {layers} layers for {positions} positions cannot be run; change config.json"
            )
        angles = [n for n, b in self.model.named_buffers() if n.endswith("inv_freq") and not finite(b)]
        if angles:  # attention would hide it: NaN scores weigh nothing
            raise SpecBenchError(
                f"the rope parameters in a config.json of type {kind} make {angles[0]} no number; correct them"
            )
        probe = torch.arange(4, device=self.device)[None].clamp(max=self.vocab_size - 1)
        refusal = f"a model of type {kind} cannot be run with the values in its config.json; correct them"
        with torch.no_grad(), refusing(refusal):
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


def _require_on_gpus(device_map: Mapping[str, Any], device: torch.device) -> None:
    """Raises `SpecBenchError` if a target for GPUs was spread over more than these. device_map: device by module."""
    outside = [name for name, place in device_map.items() if str(place) in ("cpu", "disk")]
    if outside and device.type != "cpu":
        raise SpecBenchError(
            f"model.device_map=auto: the GPUs have no room for {some(outside)}, which would run from the CPU or the disk; "
            "free GPU memory, use more GPUs, or choose a smaller model= or model.dtype"
        )
