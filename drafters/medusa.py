"""Medusa-1: heads that guess several tokens ahead from one state (arXiv:2401.10774).

Head k = 1 … K reads the target's post-norm state f_t and predicts the token k + 1 places on,

    p^(k)(t_{t+k+1}) = softmax(W2^(k) (SiLU(W1^(k) f_t) + f_t)),

the target's own head giving t_{t+1}, the root. All levels are computed at once: a node's token depends on its depth and
rank alone, so all parents share the candidates of a level, and the tree is a pruned product.

Training (Medusa, section 2.2.1): L = sum_k lambda^k CE(t_{t+k+1}, p^(k)), hard labels, lambda = 0.8. The sparse tree
(section 2.3.3) is chosen greedily from each head's accuracy by rank; measuring that is the last step of training.

Deviations and choices: W2 is the target's frozen LM head (official legacy trainer), since five heads of their own would
outweigh the default target; `head_per_level` gives each head its own, initialised from the target's (paper, and so in
conf/recipe/paper_medusa.yaml); between the two, `head_rank=r` (ours)
gives each the target's head and a trained correction of rank r, W2^(k) = W2 + B^(k) A^(k), with B zero at first: r = 12 on
the default target is 6 MB for five heads. W1 and its bias start at zero (the official code leaves the bias random), so that
training starts at the target's own prediction. A position counts if all tokens drafted from it, up to the label, are an
answer's (the official code requires it of the label alone, so that a head may predict across a short question). With a
confined vocabulary, positions whose label lies outside it do not count, and logits get minus the log of each id's chance of
being in it (`specbench.training.loss_vocabulary`).
"""

import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters.base import Pick, likeliest
from drafters.distillation import chosen_places, mean
from drafters.levels import LevelDrafter
from specbench.common.errors import SpecBenchError
from specbench.common.types import Depth, Ids, Layers, Name, OptionalUnits, Text, Weight
from specbench.engine.interface import Batch, TargetStates
from specbench.engine.policies import AccuracyTree, TreePolicy
from specbench.engine.target import Target
from specbench.engine.vocabulary import places
from specbench.engine.weights import Checkpoint, trained

NAMES = (  # of a block's tensors and of an output layer: the authors' files, then vLLM's
    re.compile(r"(?:medusa_heads?\.)?(?P<head>\d+)\.(?P<block>\d+)\.linear\.(?P<part>weight|bias)"),
    re.compile(r"blocks\.(?P<head>\d+)\.layers\.(?P<block>\d+)\.(?P<part>weight|bias)"),
    re.compile(r"(?:medusa_heads?\.)?(?P<head>\d+)\.\d+\.weight"),
    re.compile(r"lm_heads\.(?P<head>\d+)\.weight"),
)


def _parse(name: str) -> dict[str, str] | None:
    """Head, block and part of a published tensor; no block for an output layer, None for anything else."""
    return next((match.groupdict() for pattern in NAMES if (match := pattern.fullmatch(name))), None)


class Medusa(LevelDrafter):
    """K residual heads on the last state, no cache.

    Args:
        growth: an `AccuracyTree` takes the accuracies shipped with the weights; others work.
        heads: K. layers: residual blocks a head. decay: lambda.
        head_per_level: each head has its own output layer instead of the target's.
        head_rank: rank of each head's correction of the target's output layer, 0 for none.
    """

    phased: tuple[str, ...] = ("decay",)
    shape_options: tuple[str, ...] = ("heads", "layers", "head_per_level", "head_rank")
    batches = True
    formats: tuple[str, ...] = ("vllm",)
    head_bias = False  # do own output layers carry one?

    def __init__(
        self,
        name: Name,
        growth: TreePolicy,
        weights: Text | None = None,
        heads: Depth = 5,
        layers: Layers = 1,
        decay: Weight = 0.8,
        head_per_level: bool = False,
        head_rank: OptionalUnits = 0,
        vocabulary: Ids | None = None,
    ):
        self.heads = self.deepest = heads
        super().__init__(name, growth, weights, vocabulary)
        if head_per_level and head_rank:
            raise SpecBenchError(f"drafter.head_rank={head_rank} corrects the target's head; leave out head_per_level")
        self.layers, self.decay, self.head_per_level = layers, decay, head_per_level
        self.head_rank = head_rank
        if not isinstance(growth, AccuracyTree):
            self.require_depth(f"drafter.heads={heads}")

    def bind(self, target: Target) -> None:
        super().bind(target)
        if isinstance(self.growth, AccuracyTree):
            if measured := self.provenance.get("calibration"):
                self.growth.calibrate(measured)
            else:
                self.growth.guess(self.heads)
        self.require_depth(f"drafter.heads={self.heads}")
        self.nodes = self.growth.nodes

    def build(self, target: Target) -> None:
        self.share_ends(target)
        width = target.hidden_size
        self.blocks = nn.ModuleList(
            nn.ModuleList(nn.Linear(width, width) for _ in range(self.layers)) for _ in range(self.heads)
        )
        for parameter in self.blocks.parameters():
            nn.init.zeros_(parameter)
        own = self.heads * self.head_per_level
        outputs = [nn.Linear(width, target.vocab_size, bias=self.head_bias) for _ in range(own)]
        for output in outputs:
            output.load_state_dict({"weight": target.head.weight}, strict=False)
        self.outputs = nn.ModuleList(outputs)
        rank = self.head_rank
        self.corrections = nn.ModuleList(
            nn.Sequential(nn.Linear(width, rank, bias=False), nn.Linear(rank, target.vocab_size, bias=False))
            for _ in range(self.heads if rank else 0)
        )
        for correction in self.corrections:
            nn.init.zeros_(correction[1].weight)  # type: ignore[index]

    # Published weights ---------------------------------------------------------------------------------------------------

    def infer_shape(self, checkpoint: Checkpoint) -> None:
        """Heads, blocks and output layers: by the tensors, since published configurations are known to be wrong."""
        parsed = [tensor for name in checkpoint.tensors if (tensor := _parse(name))]
        blocks = [tensor for tensor in parsed if "block" in tensor]
        if not blocks:
            raise checkpoint.refuse("no tensor is named like a block of a Medusa head (0.0.linear.weight)")
        self.heads = self.deepest = 1 + max(int(p["head"]) for p in blocks)
        self.layers = 1 + max(int(p["block"]) for p in blocks)
        self.head_per_level = len(parsed) > len(blocks) and not checkpoint.config.get("original_lm_head", False)
        self.head_rank = 0

    def map_checkpoint(self, checkpoint: Checkpoint, target: Target) -> tuple[dict[str, Tensor], set[str]]:
        """`k.i.linear.*` of block i of head k, `k.L.weight` of its output layer if it has its own; or vLLM's names."""
        named: dict[str, Tensor] = {}
        used = set()
        for name, tensor in checkpoint.tensors.items():
            parsed = _parse(name)
            if parsed is None:
                continue
            used.add(name)
            if "block" in parsed:
                named[f"blocks.{parsed['head']}.{parsed['block']}.{parsed['part']}"] = tensor
            elif self.head_per_level:
                named[f"outputs.{parsed['head']}.weight"] = tensor
            else:
                checkpoint.require_shared("output layer", tensor, self.head.weight)
        return named, used

    def export_tensors(self, server: str, target: Target) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """vLLM's names. It does not share the target's head with Medusa: the file holds a copy, or one a head."""
        if server not in self.formats:
            return super().export_tensors(server, target)
        tensors = {}
        for name, tensor in trained(self).items():
            part, head, *rest = name.split(".")
            if part == "blocks":
                tensors[f"blocks.{head}.layers.{'.'.join(rest)}"] = tensor
            elif part == "outputs":
                tensors[f"lm_heads.{head}.weight"] = tensor
        shared = self.head.weight.detach()
        correction: Any
        for level, correction in enumerate(self.corrections):
            tensors[f"lm_heads.{level}.weight"] = shared + correction[1].weight.detach() @ correction[0].weight.detach()
        if not self.head_per_level and not self.head_rank:
            tensors["lm_heads.0.weight"] = shared
        return tensors, {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": target.hidden_size,
            "vocab_size": target.vocab_size,
            "truncated_vocab_size": target.vocab_size,
            "num_heads": self.heads,
            "num_hidden_layers": self.layers,
            "medusa_fc_bias": True,
            "original_lm_head": not self.head_per_level and not self.head_rank,
        }

    def network(self, states: Tensor, level: int) -> Tensor:
        """Residual blocks of head `level` (from 0), before the output layer. [..., D] -> [..., D]"""
        return residual_blocks(states, self.blocks[level])  # type: ignore[arg-type]

    # Decoding -----------------------------------------------------------------------------------------------------------

    def observe(self, states: TargetStates, bonus: int) -> None:
        """Run all heads on the state that predicted the bonus."""
        last = torch.stack([self.network(states.last[-1], level) for level in range(self.heads)])  # [K, D]
        if self.head_per_level:
            self.levels = torch.stack([o(x) for o, x in zip(self.outputs, last, strict=True)])
            return
        self.levels = self.target_logits(last)  # [K, V]
        if self.head_rank:
            self.levels = self.levels + torch.stack([c(x) for c, x in zip(self.corrections, last, strict=True)])

    # Training -----------------------------------------------------------------------------------------------------------

    def output(self, hidden: Tensor, level: int, ids: Tensor | None = None) -> Tensor:
        """Logits of head `level` (from 0) over some ids, or all, from `network`'s output. [M, D] -> [M, K]"""
        own: Any = self.outputs[level] if self.head_per_level else self.head
        if ids is None:
            logits = own(hidden) if self.head_per_level else self.target_logits(hidden)
        else:
            logits = F.linear(hidden, own.weight[ids], None if own.bias is None else own.bias[ids])
        if not self.head_rank:
            return logits
        correction: Any = self.corrections[level]
        rows = correction[1].weight
        return logits + F.linear(correction[0](hidden), rows if ids is None else rows[ids])

    def inputs(self, batch: Batch) -> Callable[[int, Tensor, Tensor], Tensor]:
        """What heads read: head `level` at states of these rows [M] and columns [M] of the batch. -> [M, …]"""
        return lambda level, rows, columns: batch.states[rows, columns]

    def head_loss(
        self, cross_entropy: Tensor, logits: Tensor, hidden: Tensor, states: Tensor, count: int, vocabulary: Tensor | None
    ) -> Tensor:
        """A head's loss from its cross-entropy with the text.

        Args:
            logits: [M, K] over the vocabulary, or all ids. hidden: [M, D] `network`'s output.
            states: [M, D] the target's, which predict the same tokens. count: of the M, without the padding at the end.
        """
        return cross_entropy

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """Head k at state i predicts token i + k + 1; `agreement` is head 1's."""
        total, read = batch.states.new_zeros(()), self.inputs(batch)
        logged: dict[str, Tensor] = {}
        counts = batch.scored[:, 1:]  # [B, T - ahead] by state: do all tokens drafted from it, up to the label, count?
        for level in range(self.heads):
            ahead = level + 2  # head k = level + 1 looks k + 1 tokens ahead
            if batch.tokens.shape[1] <= ahead:
                break
            counts = counts[:, :-1] & batch.scored[:, ahead - 1 : -1] & batch.same_sequence(ahead)
            rows, columns, count = chosen_places(counts)  # [M] each: `count` states, then padding
            labels = batch.tokens[rows, columns + ahead]
            if batch.vocabulary is not None:
                labels = places(batch.vocabulary, len(self.head.weight))[labels]
            labels[count:] = -1
            hidden = self.network(read(level, rows, columns), level)
            logits = self.output(hidden, level, batch.vocabulary).float()
            unbiased = logits if batch.vocabulary_bias is None else logits + batch.vocabulary_bias
            cross_entropy = F.cross_entropy(unbiased, labels, ignore_index=-1, reduction="sum") / (labels >= 0).sum().clamp(
                min=1
            )
            states = batch.states[rows, columns + ahead - 1]
            loss = self.head_loss(cross_entropy, logits, hidden, states, count, batch.vocabulary)
            total = total + self.decay ** (level + 1) * loss
            if level < 2:
                logged[f"head_{level + 1}"] = cross_entropy.detach()
            if level == 0:
                logged["agreement"] = mean((logits.argmax(-1) == labels)[:count].float())
        return logged | {"loss": total}

    def drafts(self, batch: Batch, steps: int) -> Iterator[Pick]:
        """Step j is head j at the state j positions back; there are no more steps than heads."""
        read = self.inputs(batch)
        for step in range(1, min(steps, self.heads) + 1):
            yield partial(self._drafted, partial(read, step - 1), step)

    def _drafted(self, read: Callable[[Tensor, Tensor], Tensor], step: int, chosen: Tensor, k: int) -> Tensor:
        """Head `step`'s predictions of the token after each chosen position. chosen [B, T] -> [M, k]"""
        rows, columns = chosen.nonzero(as_tuple=True)
        found = read(rows, (columns - step).clamp(min=0))
        return likeliest(found, lambda part: self.output(self.network(part, step - 1), step - 1), k)

    @torch.no_grad()
    def calibrate(self, sequences: Iterable[tuple[Tensor, Tensor, int]], top_k: int = 10) -> list[list[float]]:
        """Accuracy [K][top_k] by head and rank on held-out answers, also given to an `AccuracyTree`."""
        top_k = min(top_k, self.head.out_features)
        hits, cases = torch.zeros(self.heads, top_k), torch.zeros(self.heads, 1)
        for tokens, states, begin in sequences:
            every = torch.ones_like(tokens, dtype=torch.bool)[None]
            read = self.inputs(Batch(tokens[None], states[None], every, every))
            for level in range(self.heads):
                ahead = level + 2
                if len(tokens) <= begin + ahead - 1:
                    continue
                columns = torch.arange(begin - 1, len(tokens) - ahead, device=tokens.device)
                logits = self.output(self.network(read(level, torch.zeros_like(columns), columns), level), level)
                labels = tokens[begin - 1 + ahead :]
                hits[level] += (logits.topk(top_k, -1).indices == labels[:, None]).sum(0).cpu()
                cases[level] += len(labels)
        accuracy = (hits / cases.clamp(min=1)).tolist()
        if isinstance(self.growth, AccuracyTree):
            self.growth.calibrate(accuracy)
            self.nodes = self.growth.nodes
        return accuracy


def residual_blocks(x: Tensor, blocks: Iterable[nn.Module], dropout: float = 0.0) -> Tensor:
    """x + SiLU(block(x)), block after block, with dropout before each. [..., D] -> [..., D]"""
    for block in blocks:
        x = F.dropout(x, dropout, training=dropout > 0)
        x = x + F.silu(block(x))
    return x
