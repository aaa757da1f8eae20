"""Which draft tokens the target accepts. Pure functions of tensors and one generator; knows no model.

Every rule answers two questions for all nodes at once: is this node accepted if its parent is (`accepted`), and which token
does the target emit after this node if the path ends here (`bonus`)? The path is then the same for all rules: it ends at
the deepest node that is accepted with all its ancestors.

    greedy        a child is accepted if it is the argmax after its parent
    Algorithm D   deterministic candidates: draw y from p after every node; a child is accepted if it is y
    Algorithm S   sampled candidates: rejection with residuals, sibling by sibling in draw order
    typical       Medusa's threshold; NOT lossless
    simulated     Bernoulli draws, for targets without weights; measures no acceptance

The names Algorithm D and Algorithm S are this project's own, not a paper's.

Why D is lossless: y is drawn from p whatever the candidates are. Whether a draft branch contains y decides only how much
work is saved. Draws at nodes off the path are independent of those on it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Protocol

import torch
from pydantic import Field
from torch import Tensor

from specbench.common.errors import SpecBenchError
from specbench.common.types import MAX_DEPTH, Share, Weight
from specbench.engine.interface import DraftTree, TargetStates, Verification
from specbench.engine.sampling import Sampler, draw

Alphas = Annotated[Sequence[Share], Field(min_length=1, max_length=MAX_DEPTH)]  # probability of acceptance by depth
Decisions = tuple[Tensor, Tensor]  # accepted [N] bool (the root's is True), bonus [N] ids


class Rule(Protocol):
    """A verification rule. lossy: it does not preserve the target's distribution. simulated: it does not even read it."""

    lossy: bool
    simulated: bool

    def __call__(self, tree: DraftTree, logits: Tensor, sampler: Sampler, generator: torch.Generator | None) -> Decisions:
        """Decide for every node; if greedy, a node's bonus is its argmax. logits: [N, V] after every node."""


class Lossless:
    """Greedy at temperature 0; else Algorithm S for sampled candidates, Algorithm D for deterministic ones."""

    lossy, simulated = False, False

    def __call__(self, tree: DraftTree, logits: Tensor, sampler: Sampler, generator: torch.Generator | None) -> Decisions:
        if sampler.greedy or logits.device.type != "cpu":
            return decide(tree, logits, sampler, generator)
        return decide_along_path(tree, logits, sampler, generator)


def decide(tree: DraftTree, logits: Tensor, sampler: Sampler, generator: torch.Generator | None) -> Decisions:
    """What lossless verification decides for all nodes. logits: [M, V] after the first M nodes; the others are leaves."""
    if tree.q is not None and not sampler.greedy:
        return algorithm_s(tree, sampler.probabilities(logits), generator)
    return algorithm_d(tree, sampler.choose(logits, generator))


def decide_along_path(tree: DraftTree, logits: Tensor, sampler: Sampler, generator: torch.Generator | None) -> Decisions:
    """The same from the root downwards, only for nodes that the path reaches; no other is accepted or has a bonus.

    For a CPU, where a distribution and its draws take a millisecond a node and asking for the next node costs nothing.
    """
    accepted, bonus = torch.zeros_like(tree.tokens, dtype=torch.bool), torch.zeros_like(tree.tokens)
    node: int | None = 0
    while node is not None:
        family = torch.cat([torch.tensor([node]), (tree.parents == node).nonzero()[:, 0]])  # the node and its children
        q = None if tree.q is None else tree.q[node, None]
        star = replace(_part(tree, family), width=int(tree.ranks[family].max()) + 1, q=q)
        taken, emitted = decide(star, logits[node, None], sampler, generator)
        accepted[node], bonus[node] = True, emitted[0]
        node = next(iter(family[1:][taken[1:]].tolist()), None)
    return accepted, bonus


class Typical:
    """Medusa's typical acceptance: a token is accepted if p > min(epsilon, delta * exp(-entropy)). Lossy.

    Greedy decoding falls back to exact matching, as in the paper, where delta = sqrt(epsilon).
    """

    lossy, simulated = True, False

    def __init__(self, epsilon: Share = 0.09, delta: Weight = 0.3):
        self.epsilon, self.delta = epsilon, delta

    def __call__(self, tree: DraftTree, logits: Tensor, sampler: Sampler, generator: torch.Generator | None) -> Decisions:
        if sampler.greedy:
            return algorithm_d(tree, logits.argmax(-1))
        p = sampler.probabilities(logits)
        entropy = -(p * (p + 1e-5).log()).sum(-1)
        threshold = (self.delta * torch.exp(-entropy)).clamp(max=self.epsilon)
        parents = tree.parents.clamp(min=0)
        accepted = p[parents, tree.tokens] > threshold[parents]
        accepted[0] = True
        return accepted, draw(p, generator)


class Simulated:
    """Assumed acceptance: at depth d the first child below the path is accepted with probability alpha[d - 1].

    For targets with random weights, where time and memory are real and acceptance can only be assumed. The last alpha
    serves all deeper levels. Draws come from the generator, also at temperature 0, and do not depend on earlier prompts.
    """

    lossy, simulated = True, True

    def __init__(self, alpha: Alphas):
        self.alpha = list(alpha)
        self._chances: dict[torch.device, Tensor] = {}  # of each depth; made once, since copying waits for a GPU

    def __call__(self, tree: DraftTree, logits: Tensor, sampler: Sampler, generator: torch.Generator | None) -> Decisions:
        n, device = len(tree), logits.device
        depths = torch.arange(tree.max_depth + 1, device=device)
        if device not in self._chances:
            self._chances[device] = torch.tensor(self.alpha, device=device)
        alpha = self._chances[device][(depths - 1).clamp(0, len(self.alpha) - 1)]
        passes = torch.rand(len(depths), device=device, generator=generator) < alpha  # [1 + depth] one draw a level
        nodes = torch.arange(n, device=device)
        first = torch.full((n,), n, device=device).scatter_reduce(0, tree.parents[1:], nodes[1:], "amin")  # best child
        accepted = passes[tree.depths] & (first[tree.parents.clamp(min=0)] == nodes)
        accepted[0] = True
        return accepted, logits.argmax(-1)


def algorithm_d(tree: DraftTree, next_tokens: Tensor) -> Decisions:
    """A child is accepted if it is the target's own token after its parent.

    next_tokens: [M] argmax or draw after the first M nodes; the others are leaves.
    """
    accepted = tree.tokens == next_tokens[tree.parents.clamp(min=0)]
    accepted[0] = True
    return accepted, next_tokens


def algorithm_s(tree: DraftTree, p: Tensor, generator: torch.Generator | None) -> Decisions:
    """Rejection sampling over siblings in draw order; its chain case is Leviathan's rule.

    The first child x is accepted with probability min(1, p(x) / q(x)). If it is rejected, the next one is tried with the
    residual p <- norm(max(0, p - q)), and with q as it was (with replacement) or without x, renormalised. If none is
    accepted, the token after the node is drawn from the last residual. Each round emits exactly p (Leviathan's lemma), so
    by induction the whole does. All nodes are treated at once; a node's outcome matters only if the path reaches it.

    p: [M, V] float32, the processed target distribution after the first M nodes; the others are leaves.
    """
    assert tree.q is not None
    n, m, tiny = len(tree), p.shape[0], torch.finfo(p.dtype).tiny
    children = torch.full((m, tree.width), n, device=p.device)  # [M, width] a node's child by rank; n stands for none
    children[tree.parents[1:], tree.ranks[1:]] = torch.arange(1, n, device=p.device)
    tokens = torch.cat([tree.tokens, tree.tokens[:1]])  # one slot more, where missing children write
    accepted = torch.zeros(n + 1, dtype=torch.bool, device=p.device)
    undecided = torch.ones(m, dtype=torch.bool, device=p.device)  # nodes with no accepted child yet
    q = tree.q[:m]
    for rank in range(tree.width):
        child = children[:, rank]
        token = tokens[child][:, None]
        p_x, q_x = p.gather(1, token)[:, 0], q.gather(1, token)[:, 0]
        coin = torch.rand(m, device=p.device, generator=generator)
        drawn = undecided & (child < n) & (q_x > 0)  # what q could not have drawn is no candidate
        accept, reject = drawn & (coin * q_x < p_x), drawn & (coin * q_x >= p_x)
        accepted[child] = accept
        undecided = undecided & ~accept
        if p.device.type == "cpu" and not undecided.any():
            break  # on a GPU, asking would wait
        p = torch.where(reject[:, None], _residual(p, q), p)
        if not tree.replacement:
            without = q.scatter(1, token, 0.0)
            without = without / without.sum(-1, keepdim=True).clamp_min(tiny)
            q = torch.where(reject[:, None], without, q)
    accepted[0] = True
    return accepted[:n], draw(p, generator)


def _residual(p: Tensor, q: Tensor) -> Tensor:
    """norm(max(0, p - q)); p itself where nothing is left, which only rounding can cause."""
    left = (p - q).clamp(min=0)
    mass = left.sum(-1, keepdim=True)
    return torch.where(mass > 0, left / mass.clamp_min(torch.finfo(p.dtype).tiny), p)


def verify(
    tree: DraftTree, logits: Tensor, rule: Rule, sampler: Sampler, generator: torch.Generator | None
) -> Verification:
    """The accepted path and the bonus, in one transfer to the host.

    logits: [N, V] of the target after every node, unprocessed. Raises `SpecBenchError` if they are NaN or infinite.
    """
    part, logits_of_part, original = (tree, logits, None) if tree.acceptable is None else _acceptable(tree, logits)
    accepted, bonus = rule(part, logits_of_part, sampler, generator)
    finite = _all_finite(logits, argmax=bonus if sampler.greedy and original is None else None)
    on_device = original is None and logits.device.type != "cpu"  # there a list of nodes is as good as a tensor
    if len(part) == 1:  # plain decoding: nothing to choose
        kept = torch.zeros_like(part.tokens) if on_device else None
        bonus_id, is_finite = torch.stack([bonus[0], finite.long()]).tolist()
        _require_finite(is_finite)
        return Verification([], [], [], bonus_id, drafted=0, kept=kept)
    last, on_path = _deepest_path(part, accepted)
    n = len(part)
    kept = torch.where(on_path, torch.arange(n, device=logits.device), n).sort().values if on_device else None
    found = _to_host(part, on_path, bonus[last][0], finite, kept)
    return found if original is None else replace(found, path=[original[node] for node in found.path])


def _all_finite(logits: Tensor, argmax: Tensor | None) -> Tensor:
    """Are all numbers finite? A row's maximum is NaN if anything in it is. argmax: [N] where it is known already."""
    largest = logits.amax(-1) if argmax is None else logits.gather(1, argmax[:, None])
    return (largest - largest == 0).all()  # what `isfinite` computes, in fewer kernels


def _deepest_path(tree: DraftTree, accepted: Tensor) -> tuple[Tensor, Tensor]:
    """The last node [1] of the accepted path, and which nodes are on it, root included: [N] bool.

    Among nodes that are accepted with all ancestors the deepest wins; of equals (typical acceptance, repeated siblings) the
    first, i.e. likeliest.
    """
    reached = ~(tree.ancestors & ~accepted).any(-1)
    last = (reached * (tree.depths + 1)).argmax(0, keepdim=True)  # [1]: indexing by a scalar would synchronise
    return last, tree.ancestors[last][0]


def _to_host(tree: DraftTree, on_path: Tensor, bonus: Tensor, finite: Tensor, kept: Tensor | None) -> Verification:
    """The result as numbers of the host. kept: [N] on the device, indices of root and path first."""
    n = len(tree)
    by_node = torch.stack([on_path.long(), tree.tokens, tree.ranks])
    scalars = torch.stack([bonus, finite.long(), tree.depths.max()])
    numbers = torch.cat([by_node.flatten(), scalars]).tolist()  # the one device-to-host synchronisation of verification
    marks, ids, ranks = numbers[:n], numbers[n : 2 * n], numbers[2 * n : 3 * n]
    bonus_id, is_finite, drafted = numbers[3 * n :]
    _require_finite(is_finite)
    path = [node for node in range(1, n) if marks[node]]
    kept = None if kept is None else kept[: 1 + len(path)]
    return Verification(path, [ids[node] for node in path], [ranks[node] for node in path], bonus_id, drafted, kept)


def _require_finite(finite: int) -> None:
    if not finite:
        raise SpecBenchError("the target computed NaN or infinite logits; use another dtype (model.dtype=float32)")


@dataclass(frozen=True)
class VerifyConfig:
    """How one generation is verified.

    seed: of a generator for verification alone, so that drafting and verifying draw alike on one machine and on two;
    None: torch's default generator.
    """

    rule: Rule
    sampler: Sampler
    seed: int | None = None


class Verifier(Protocol):
    """Verifies the passes of one generation: in this process, or on the target's server."""

    def first(self, states: TargetStates) -> int:
        """The token that follows a prompt. Raises `SpecBenchError` for NaN or infinite logits."""

    def verify(self, tree: DraftTree, states: TargetStates) -> Verification:
        """As the function `verify`."""


class LocalVerifier:
    """Verification for a target in this process."""

    def __init__(self, config: VerifyConfig, device: torch.device):
        self.config = config
        self.generator = None if config.seed is None else torch.Generator(device).manual_seed(config.seed)

    def first(self, states: TargetStates) -> int:
        logits = states.logits[-1]
        _require_finite(int(logits.max().isfinite()))
        return int(self.config.sampler.choose(logits, self.generator))

    def verify(self, tree: DraftTree, states: TargetStates) -> Verification:
        return verify(tree, states.logits, self.config.rule, self.config.sampler, self.generator)


def _acceptable(tree: DraftTree, logits: Tensor) -> tuple[DraftTree, Tensor, list[int]]:
    """The tree without nodes that may not be accepted and their descendants.

    Returns tree and logits of the remaining nodes, and their indices in the whole tree. Synchronises twice.
    """
    assert tree.acceptable is not None
    nodes = (~(tree.ancestors & ~tree.acceptable).any(-1)).nonzero()[:, 0]
    q = None if tree.q is None else tree.q[nodes]
    return replace(_part(tree, nodes), q=q, acceptable=None, confidence=None), logits[nodes], nodes.tolist()


def _part(tree: DraftTree, nodes: Tensor) -> DraftTree:
    """The tree of a node and some of its descendants, each with its parent; without `q`. nodes: [n] in rising order"""
    index = torch.zeros_like(tree.parents)
    index[nodes] = torch.arange(nodes.shape[0], device=nodes.device)
    parents = index[tree.parents[nodes].clamp(min=0)]
    parents[0] = -1
    return replace(
        tree,
        tokens=tree.tokens[nodes],
        parents=parents,
        depths=tree.depths[nodes],
        ancestors=tree.ancestors[nodes][:, nodes],
        ranks=tree.ranks[nodes],
        q=None,
    )
