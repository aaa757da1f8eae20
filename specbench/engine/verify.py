"""Which draft tokens the target accepts. Pure functions of tensors and one generator; knows no model.

Every rule answers two questions for all nodes at once: would the edge to this node be taken, if its parent is reached
(`taken`), and what does the target say after this node, if the path ends here (`bonus`). The walk is then the same for
all: the deepest node whose edges are all taken.

    greedy        a child is taken if it is the argmax after its parent
    Algorithm D   deterministic candidates: draw y from p after every node; a child is taken if it is y
    Algorithm S   sampled candidates: rejection with residuals, sibling by sibling in draw order
    typical       Medusa's threshold; NOT lossless
    simulated     a coin, for targets without weights; says nothing of acceptance

Why D is lossless: y is drawn from p whatever the candidates are. Whether a draft branch happens to spell y decides
only how much work is saved. Draws at nodes off the path are independent of those on it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Protocol

import torch
from pydantic import Field
from torch import Tensor

from specbench.common.errors import SpecBenchError
from specbench.common.types import Share, Weight
from specbench.engine.interface import DraftTree, TargetStates, Verdict
from specbench.engine.sampling import Sampler, draw

Alphas = Annotated[Sequence[Share], Field(min_length=1)]  # probability of acceptance by depth


class Rule(Protocol):
    """A verification rule. lossy: it does not preserve the target's distribution. simulated: it does not even ask it."""

    lossy: bool
    simulated: bool

    def __call__(
        self, tree: DraftTree, logits: Tensor, sampler: Sampler, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        """logits [N, V] after every node -> taken [N] bool (the root's is True), bonus [N] ids."""


class Lossless:
    """Greedy at temperature 0; else Algorithm S for sampled candidates, Algorithm D for deterministic ones."""

    lossy, simulated = False, False

    def __call__(
        self, tree: DraftTree, logits: Tensor, sampler: Sampler, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        if tree.q is not None and not sampler.greedy:
            return algorithm_s(tree, sampler.probabilities(logits), generator)
        return algorithm_d(tree, sampler.choose(logits, generator))


class Typical:
    """Medusa's typical acceptance: take a token if p > min(epsilon, delta * exp(-entropy)). Lossy for temperature > 0.

    Greedy decoding falls back to exact matching, as in the paper. Source: Medusa, section on typical acceptance;
    delta = sqrt(epsilon) there.
    """

    lossy, simulated = True, False

    def __init__(self, epsilon: Share = 0.09, delta: Weight = 0.3):
        self.epsilon, self.delta = epsilon, delta

    def __call__(
        self, tree: DraftTree, logits: Tensor, sampler: Sampler, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        if sampler.greedy:
            return algorithm_d(tree, logits.argmax(-1))
        p = sampler.probabilities(logits)
        entropy = -(p * (p + 1e-5).log()).sum(-1)
        threshold = (self.delta * torch.exp(-entropy)).clamp(max=self.epsilon)
        parents = tree.parents.clamp(min=0)
        taken = p[parents, tree.tokens] > threshold[parents]
        taken[0] = True
        return taken, draw(p, generator)


class Simulated:
    """Acceptance by a coin: at depth d the best candidate below the path is taken with probability alpha[d - 1].

    For targets with random weights, where time and memory are real and acceptance can only be assumed. Deeper levels
    than alpha has go on with its last value. The coins come from the generator of the generation, also at temperature 0,
    so they depend on nothing that was decoded before.
    """

    lossy, simulated = True, True

    def __init__(self, alpha: Alphas):
        self.alpha = list(alpha)

    def __call__(
        self, tree: DraftTree, logits: Tensor, sampler: Sampler, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        n, device = len(tree), logits.device
        depths = torch.arange(tree.max_depth + 1, device=device)
        alpha = torch.tensor(self.alpha, device=device)[(depths - 1).clamp(0, len(self.alpha) - 1)]
        heads = torch.rand(len(depths), device=device, generator=generator) < alpha  # [1 + depth] one coin a level
        nodes = torch.arange(n, device=device)
        first = torch.full((n,), n, device=device).scatter_reduce(0, tree.parents[1:], nodes[1:], "amin")  # best child
        taken = heads[tree.depths] & (first[tree.parents.clamp(min=0)] == nodes)
        taken[0] = True
        return taken, logits.argmax(-1)


def algorithm_d(tree: DraftTree, said: Tensor) -> tuple[Tensor, Tensor]:
    """said [N]: the target's own next token after every node, argmax or draw. A child is taken if it is that token."""
    taken = tree.tokens == said[tree.parents.clamp(min=0)]
    taken[0] = True
    return taken, said


def algorithm_s(tree: DraftTree, p: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Rejection sampling over siblings in draw order; its chain case is Leviathan's rule.

    For the first child x: take it with probability min(1, p(x) / q(x)). If it is rejected, go on with the residual
    p <- norm(max(0, p - q)), and with q as it was (with replacement) or without x, renormalised. If none is taken, the
    token after the node is drawn from the last residual. Each round emits exactly p (methods: Leviathan's lemma), so
    by induction the whole does. All nodes are treated at once; a node's outcome matters only if the walk gets there.

    p: [N, V] float32, the processed target distribution after every node.
    """
    assert tree.q is not None
    n, tiny = len(tree), torch.finfo(p.dtype).tiny
    children = torch.full((n, tree.width), n, device=p.device)  # [N, width] node n's child by rank; n stands for none
    children[tree.parents[1:], tree.ranks[1:]] = torch.arange(1, n, device=p.device)
    tokens = torch.cat([tree.tokens, tree.tokens[:1]])  # one slot more, where missing children write
    taken = torch.zeros(n + 1, dtype=torch.bool, device=p.device)
    undecided = torch.ones(n, dtype=torch.bool, device=p.device)  # nodes with no child taken yet
    q = tree.q
    for rank in range(tree.width):
        child = children[:, rank]
        token = tokens[child][:, None]
        p_x, q_x = p.gather(1, token)[:, 0], q.gather(1, token)[:, 0]
        coin = torch.rand(n, device=p.device, generator=generator)
        drawn = undecided & (child < n) & (q_x > 0)  # what q could not have drawn is no candidate
        accept, reject = drawn & (coin * q_x < p_x), drawn & (coin * q_x >= p_x)
        taken[child] = accept
        undecided = undecided & ~accept
        p = torch.where(reject[:, None], _residual(p, q), p)
        if not tree.replacement:
            without = q.scatter(1, token, 0.0)
            without = without / without.sum(-1, keepdim=True).clamp_min(tiny)
            q = torch.where(reject[:, None], without, q)
    taken[0] = True
    return taken[:n], draw(p, generator)


def _residual(p: Tensor, q: Tensor) -> Tensor:
    """norm(max(0, p - q)); p itself where nothing is left, which rounding alone can bring about."""
    left = (p - q).clamp(min=0)
    mass = left.sum(-1, keepdim=True)
    return torch.where(mass > 0, left / mass.clamp_min(torch.finfo(p.dtype).tiny), p)


def verify(
    tree: DraftTree, logits: Tensor, rule: Rule, sampler: Sampler, generator: torch.Generator | None
) -> tuple[Verdict, int]:
    """The accepted path and the bonus, in one transfer to the host; also the drafted depth, of acceptable nodes.

    Args:
        logits: [N, V] of the target after every node, unprocessed.

    Raises:
        SpecBenchError: the target computed NaN or infinite logits.
    """
    finite = torch.isfinite(logits.amax(-1)).all()  # a row's maximum is NaN if anything in it is
    numbered = None  # of the nodes that are left, where not all may be accepted
    if tree.acceptable is not None:
        tree, logits, numbered = _acceptable(tree, logits)
    taken, bonus = rule(tree, logits, sampler, generator)
    reached = ~(tree.ancestors & ~taken).any(-1)  # [N] every edge from the root down is taken
    # Among nodes reached the deepest wins; of equals (typical acceptance, repeated siblings) the first, i.e. likeliest.
    last = (reached * (tree.depths + 1)).argmax(0, keepdim=True)  # [1]: a single number would be read to index by it
    on_path = tree.ancestors[last][0]
    summary = torch.stack([on_path.long(), tree.tokens, tree.ranks])
    scalars = torch.stack([bonus[last][0], finite.long(), tree.depths.max()])
    table = torch.cat([summary.flatten(), scalars]).tolist()  # the one device-to-host synchronisation of verification

    n = len(tree)
    path = [node for node in range(1, n) if table[node]]
    numbers = path if numbered is None else [numbered[node] for node in path]
    ids, ranks, (said, is_finite, drafted) = table[n : 2 * n], table[2 * n : 3 * n], table[3 * n :]
    if not is_finite:
        raise SpecBenchError("the target computed NaN or infinite logits; use another dtype (model.dtype=float32)")
    return Verdict(numbers, [ids[node] for node in path], [ranks[node] for node in path], said), drafted


@dataclass(frozen=True)
class VerifyConfig:
    """How one generation is judged.

    Attributes:
        seed: of a generator for verification alone, so that who drafts and who verifies can be two machines and draw as
            one would; None: torch's own.
    """

    rule: Rule
    sampler: Sampler
    seed: int | None = None


class Verifier(Protocol):
    """What decides after each pass of one generation: here, or where the target is."""

    def first(self, states: TargetStates) -> int:
        """The token that follows a prompt."""

    def verify(self, tree: DraftTree, states: TargetStates) -> tuple[Verdict, int]:
        """As the function `verify`."""


class LocalVerifier:
    """The judge of a target in this process."""

    def __init__(self, terms: VerifyConfig, device: torch.device):
        self.terms = terms
        self.generator = None if terms.seed is None else torch.Generator(device).manual_seed(terms.seed)

    def first(self, states: TargetStates) -> int:
        return int(self.terms.sampler.choose(states.logits[-1], self.generator))

    def verify(self, tree: DraftTree, states: TargetStates) -> tuple[Verdict, int]:
        return verify(tree, states.logits, self.terms.rule, self.terms.sampler, self.generator)


def _acceptable(tree: DraftTree, logits: Tensor) -> tuple[DraftTree, Tensor, list[int]]:
    """The tree without nodes that may not be accepted and what is below them: to a rule they are not there.

    Returns:
        Tree and logits of the nodes that stay, and their numbers in the whole tree. The device is waited for twice.
    """
    assert tree.acceptable is not None
    nodes = (~(tree.ancestors & ~tree.acceptable).any(-1)).nonzero()[:, 0]
    place = torch.zeros_like(tree.parents)
    place[nodes] = torch.arange(nodes.shape[0], device=nodes.device)
    parents = torch.where(nodes > 0, place[tree.parents[nodes].clamp(min=0)], -1)
    part = replace(
        tree,
        tokens=tree.tokens[nodes],
        parents=parents,
        depths=tree.depths[nodes],
        ancestors=tree.ancestors[nodes][:, nodes],
        ranks=tree.ranks[nodes],
        q=None if tree.q is None else tree.q[nodes],
        acceptable=None,
        confidence=None,
    )
    return part, logits[nodes], nodes.tolist()
