"""Medusa-1: heads that guess several tokens ahead from one state (arXiv:2401.10774).

Head k = 1 … K reads the target's post-norm state f_t and predicts the token k + 1 places on,

    p^(k)(t_{t+k+1}) = softmax(W2^(k) (SiLU(W1^(k) f_t) + f_t)),

the target's own head supplying t_{t+1}, which is the root. All levels are known at once: what stands at a node depends on
its depth and rank alone, so the candidates of a level are shared by all parents, and the tree is a pruned product.

Training (Medusa, section 2.2.1): L = sum_k lambda^k CE(t_{t+k+1}, p^(k)), hard labels, lambda = 0.8. The sparse tree
(section 2.3.3) is chosen greedily from each head's accuracy by rank; measuring that is the last step of training.

Deviations and choices: W2 is the target's frozen LM head (official legacy trainer), since five heads of their own would
outweigh the default target; `head_per_level` gives each head its own, initialised from the target's (paper). W1 and its
bias start at zero (the official code leaves the bias random), so that training starts at the target's own prediction.
With a confined vocabulary, positions whose label lies outside it do not count.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters.blocks import TrainedDrafter
from specbench.checkpoints import Checkpoint
from specbench.engine.grow import Calibrated, Growth
from specbench.engine.interface import Batch, TargetStates
from specbench.engine.target import Target


def _bare(name: str) -> str:
    return name.removeprefix("medusa_head.").removeprefix("medusa_heads.")


class Medusa(TrainedDrafter):
    """K residual heads on the last state, no cache.

    Args:
        name: as tables show it. growth: a `Calibrated` tree takes the accuracies shipped with the weights; others work.
        weights: folder of trained weights.
        heads: K. layers: residual blocks a head.
        decay: lambda. head_per_level: each head has its own output layer instead of the target's.
    """

    def __init__(
        self,
        name: str,
        growth: Growth,
        weights: str | None = None,
        heads: int = 5,
        layers: int = 1,
        decay: float = 0.8,
        head_per_level: bool = False,
    ):
        super().__init__(name, growth, weights)
        self.heads, self.layers, self.decay, self.head_per_level = heads, layers, decay, head_per_level
        self.passes = 1

    def bind(self, target: Target) -> None:
        super().bind(target)
        accuracy = self.provenance.get("calibration")
        if accuracy is not None and isinstance(self.growth, Calibrated):
            self.growth.calibrate(accuracy)
        self.nodes = self.growth.nodes

    def build(self, target: Target) -> None:
        self.embedding, self.head = target.embedding, target.head
        self.target_logits = target.logits
        width = target.hidden_size
        self.blocks = nn.ModuleList(
            nn.ModuleList(nn.Linear(width, width) for _ in range(self.layers)) for _ in range(self.heads)
        )
        for parameter in self.blocks.parameters():
            nn.init.zeros_(parameter)
        outputs = [nn.Linear(width, target.vocab_size, bias=False) for _ in range(self.heads * self.head_per_level)]
        for output in outputs:
            output.load_state_dict({"weight": target.head.weight})
        self.outputs = nn.ModuleList(outputs)

    def fit(self, checkpoint: Checkpoint) -> None:
        """Heads, blocks and output layers are counted in the file: published configurations are known to be wrong."""
        places = [name.split(".") for name in map(_bare, checkpoint.tensors)]
        blocks = {(int(p[0]), int(p[1])) for p in places if p[2:3] == ["linear"] and p[0].isdigit()}
        if not blocks:
            raise checkpoint.refuse("no tensor is named like a block of a Medusa head (0.0.linear.weight)")
        self.heads, self.layers = 1 + max(h for h, _ in blocks), 1 + max(b for _, b in blocks)
        self.head_per_level = any(p[1:] == [str(self.layers), "weight"] for p in places)

    def official(self, checkpoint: Checkpoint, target: Target) -> tuple[dict[str, Tensor], set[str]]:
        """Medusa's files: `k.i.linear.*` of block i of head k, then `k.L.weight`, its output layer, if it has its own."""
        named: dict[str, Tensor] = {}
        for name, tensor in checkpoint.tensors.items():
            head, place, *rest = _bare(name).split(".")
            if rest[:1] == ["linear"]:
                named[f"blocks.{head}.{place}.{rest[1]}"] = tensor
            elif rest == ["weight"]:
                named[f"outputs.{head}.weight"] = tensor
        return named, set(checkpoint.tensors)

    def network(self, states: Tensor, level: int) -> Tensor:
        """What head `level` (from 0) makes of states, before the output layer. [..., D] -> [..., D]"""
        for block in self.blocks[level]:  # type: ignore[attr-defined]
            states = states + F.silu(block(states))
        return states

    # Decoding -----------------------------------------------------------------------------------------------------------

    def reset(self, capacity: int) -> None:
        pass

    def observe(self, states: TargetStates, bonus: int) -> None:
        """All heads at once, from the state that predicted the bonus."""
        last = torch.stack([self.network(states.last[-1], level) for level in range(self.heads)])  # [K, D]
        if self.head_per_level:
            self.levels = torch.stack([o(x) for o, x in zip(self.outputs, last, strict=True)])
        else:
            self.levels = self.target_logits(last)  # [K, V]

    def root_logits(self) -> Tensor:
        return self.levels[0]

    def expand(self, tokens: Tensor, parents: Tensor, depth: int, visible: Tensor) -> Tensor:
        return self.levels[depth].expand(tokens.shape[0], -1)

    # Training -----------------------------------------------------------------------------------------------------------

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """Head k at state i predicts token i + k + 1, if that token's own state counts. `agreement` is head 1's."""
        total = batch.states.new_zeros(())
        logged: dict[str, Tensor] = {}
        for level in range(self.heads):
            ahead = level + 2  # head k = level + 1 looks k + 1 tokens ahead
            counts = batch.scored[:, ahead - 1 : -1] & batch.valid[:, ahead:]
            states, labels = batch.states[:, :-ahead][counts], batch.tokens[:, ahead:][counts]  # [M, D], [M]
            output = self.outputs[level] if self.head_per_level else self.head
            rows: Any = output.weight
            if batch.vocabulary is not None:
                place = torch.full((rows.shape[0],), -100, device=labels.device)
                place[batch.vocabulary] = torch.arange(len(batch.vocabulary), device=labels.device)
                rows, labels = rows[batch.vocabulary], place[labels]
            logits = F.linear(self.network(states, level), rows).float()
            cross_entropy = F.cross_entropy(logits, labels)
            total = total + self.decay ** (level + 1) * cross_entropy
            if level < 2:
                logged[f"head_{level + 1}"] = cross_entropy.detach()
            if level == 0:
                logged["agreement"] = (logits.argmax(-1) == labels).float().mean()
        return logged | {"loss": total}

    @torch.no_grad()
    def calibrate(self, sequences: list[tuple[Tensor, Tensor, int]], top_k: int = 10) -> list[list[float]]:
        """Accuracy by head and rank on held-out answers, and the tree that follows from it.

        Args:
            sequences: (tokens [T], states [T, D], index of the first answer token).

        Returns:
            [K][top_k] shares, also handed to the growth.
        """
        hits, cases = torch.zeros(self.heads, top_k), torch.zeros(self.heads, 1)
        for tokens, states, begin in sequences:
            for level in range(self.heads):
                ahead = level + 2
                if len(tokens) <= begin + ahead - 1:
                    continue
                hidden = self.network(states[begin - 1 : -ahead], level)
                logits = self.outputs[level](hidden) if self.head_per_level else self.target_logits(hidden)
                labels = tokens[begin - 1 + ahead :]
                hits[level] += (logits.topk(top_k, -1).indices == labels[:, None]).sum(0).cpu()
                cases[level] += len(labels)
        accuracy = (hits / cases.clamp(min=1)).tolist()
        if isinstance(self.growth, Calibrated):
            self.growth.calibrate(accuracy)
            self.nodes = self.growth.nodes
        return accuracy
