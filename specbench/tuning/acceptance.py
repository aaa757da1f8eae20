"""How far held-out answers follow a drafter's trees, of all sizes, from one replay with a large one.

At every position of some held-out greedy answers the drafter drafts the largest tree. A smaller tree is a part of that, and
which of its nodes the target would accept follows from the answer. So every smaller tree is walked through the answers
cycle by cycle, as decoding would. This depends on weights and target, not on the machine: it is measured where weights are
made, and lies beside them.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import AfterValidator
from torch import Tensor

from specbench.common import hashing
from specbench.common.errors import SpecBenchError
from specbench.common.io import read_json
from specbench.common.progress import progress
from specbench.common.storage import atomic_path
from specbench.common.types import Sha256
from specbench.engine.interface import DraftTree
from specbench.engine.policies import Dynamic, Expandable, Pool, Root
from specbench.engine.target import Target
from specbench.engine.tree import root_only
from specbench.records.schema import WEIGHTS
from specbench.training.corpus_reader import HeldOutAnswer
from specbench.training.replay import cycles, replay_target
from specbench.tuning.cost_aware import NODES, TOP_K, TreeAcceptance, check_acceptance

FILE = "acceptance.json"
LEVELS = 8  # of the large tree
ANSWERS, ANSWER_TOKENS = 16, 48  # held-out answers, and tokens of each at most
EDGES = [0.0, *(10 ** (-4 + i / 6) for i in range(24)), 1.0]  # of bins of a drafter's probability
ERROR_NODES = 15  # likeliest nodes of a position, over which the calibration error is taken


@dataclass(frozen=True)
class AcceptanceFile:
    """What lies beside the weights. weights: SHA-256 of those it was measured with."""

    weights: Sha256
    acceptance: Annotated[TreeAcceptance, AfterValidator(check_acceptance)]


class RecordingPolicy(Dynamic):
    """Drafts the largest tree and verifies none of it: every cycle emits one token, so every position is drafted from."""

    def __init__(self, depth: int):
        super().__init__(depth, TOP_K[-1], 2)
        self.pools: list[Pool] = []

    def has_fixed_shapes(self, sampler: Any) -> bool:
        return False

    def grow(self, drafter: Expandable, root: Root, sampler: Any, generator: torch.Generator | None) -> DraftTree:
        self.pools.append(self.draft(drafter))
        return root_only(root, self.pools[-1].tokens.device, passes=self.depth)


@dataclass(frozen=True)
class Drafted:
    """All pools of an answer, by position, and which of their nodes the answer follows.

    Attributes:
        values: [P, N] log-probabilities of paths. parents, ranks, depths: [P, N].
        path: [P, D] the nodes that spell the answer, -1 from where it leaves the pool on.
        known: [P] tokens of the answer behind each position.
    """

    values: Tensor
    parents: Tensor
    ranks: Tensor
    depths: Tensor
    path: Tensor
    known: Tensor


def _order(values: Tensor) -> Tensor:
    """[P, N] how many nodes of a position have higher values than this one."""
    return values.argsort(dim=1, descending=True, stable=True).argsort(1)


@torch.no_grad()
def measure(target: Target, drafter: Any, answers: Sequence[HeldOutAnswer]) -> TreeAcceptance:
    """Draft at every position of some held-out answers. Raises `SpecBenchError` if there are none."""
    if not answers:
        raise SpecBenchError("there are no held-out answers to measure a drafter's acceptance on")
    before = drafter.growth
    drafts: list[Drafted] = []
    try:
        with progress("following held-out answers", min(len(answers), ANSWERS), "answers") as show:
            show(0)
            for answer in answers[:ANSWERS]:
                drafts.append(_drafted(target, drafter, answer))
                show(len(drafts))
    finally:
        drafter.set_tree_policy(before)
    return aggregate(drafts)


def _drafted(target: Target, drafter: Any, answer: HeldOutAnswer) -> Drafted:
    policy = RecordingPolicy(min(LEVELS, drafter.deepest or LEVELS))
    drafter.set_tree_policy(policy)
    for _ in cycles(replay_target(target, answer, drafter.taps, ANSWER_TOKENS), drafter):
        pass
    tokens = answer.ids[answer.begin :][:ANSWER_TOKENS]
    pool = Pool(*(torch.stack(parts).cpu() for parts in zip(*policy.pools, strict=True)))
    return match_answer(pool, torch.tensor(tokens), policy.depth)


def match_answer(pool: Pool, answer: Tensor, levels: int) -> Drafted:
    """Which nodes spell the answer. pool: [P, N] each; answer: [P + 1] ids, whose position p is the root of pool p."""
    positions = len(pool.tokens)
    path = torch.full((positions, levels), -1)
    node = torch.full((positions,), -1)  # that spells the answer so far, -1: the root
    inside = torch.ones(positions, dtype=torch.bool)
    for level in range(levels):
        following = torch.full((positions,), -1)  # behind the answer's end no node is right
        rest = answer[level + 1 : level + 1 + positions]
        following[: len(rest)] = rest
        right = (pool.depths == level + 1) & (pool.parents == node[:, None]) & (pool.tokens == following[:, None])
        inside = inside & right.any(-1)
        node = torch.where(inside, right.int().argmax(-1), -2)
        path[:, level] = torch.where(inside, node, -1)
    known = len(answer) - 1 - torch.arange(positions)
    return Drafted(pool.values, pool.parents, pool.ranks, pool.depths, path, known)


def aggregate(drafts: Sequence[Drafted]) -> TreeAcceptance:
    """The acceptance over several answers. The error of a correction made from half of them is taken on the other half."""
    needed = {k: [nodes_needed(one, k) for one in drafts] for k in TOP_K}
    levels = range(drafts[0].path.shape[1])
    tau = {k: [_rounded(_taus([one[:, depth] for one in needed[k]])) for depth in levels] for k in TOP_K}
    correction = TreeAcceptance({}, [], *_curve(drafts[::2]), (0.0, 0.0), 1)
    others = drafts[1::2] or drafts
    error = round(_error(others, lambda p: p), 5), round(_error(others, correction.worth), 5)
    ranks = [_rounded(shares) for shares in ranks_of(drafts)]
    return TreeAcceptance(tau, ranks, *_curve(drafts), error, sum(len(one.path) for one in drafts))


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(v, 5) for v in values]


def nodes_needed(drafted: Drafted, top_k: int) -> Tensor:
    """How many nodes a tree of a smaller top_k must verify to accept so deep: [P, depth of the tree, depth accepted].

    Misses nodes that only the smaller tree would expand, since the large one found ten better ones. A path that leaves the
    tree needs more nodes than there are.
    """
    values, depths = drafted.values, drafted.depths
    positions, count = values.shape
    levels = drafted.path.shape[1]
    never = count + 1
    needed = torch.full((positions, levels, levels), never)
    inside = torch.zeros_like(values, dtype=torch.bool)  # [P, N] nodes of the smaller tree's pool so far
    frontier = torch.zeros(positions, count + 1, dtype=torch.bool)  # by node; the last stands for the root
    frontier[:, -1] = True
    for depth in range(levels):
        level = (depths == depth + 1) & (drafted.ranks < top_k) & frontier.gather(1, drafted.parents % (count + 1))
        inside = inside | level
        best = values.masked_fill(~level, -torch.inf).topk(min(top_k, count)).indices
        frontier = torch.zeros_like(frontier).scatter(1, best, True)
        frontier[:, :-1] &= level
        order = _order(values.masked_fill(~inside, -torch.inf))
        node = drafted.path[:, : depth + 1]
        there = (node >= 0) & inside.gather(1, node.clamp(min=0))
        before = order.gather(1, node.clamp(min=0))
        needed[:, depth, : depth + 1] = torch.where(there, before + 2, never)  # the root and this node too
    return needed


def _taus(needed: Sequence[Tensor]) -> list[float]:
    """Tokens a cycle by size of the tree, in `NODES`. needed: by answer [P, depth accepted] nodes."""
    taus = []
    for nodes in NODES:
        emitted = cycles = 0
        for one in needed:
            accepted = (one <= nodes).int().cumprod(1).sum(1).tolist()  # by position
            at = 0
            while at < len(accepted):
                step = min(accepted[at] + 1, len(accepted) - at)
                emitted, cycles, at = emitted + step, cycles + 1, at + step
        taus.append(emitted / cycles)
    return taus


def ranks_of(drafts: Sequence[Drafted]) -> list[list[float]]:
    """[depth - 1][rank]: how often that candidate was right, below expanded nodes that were right."""
    shares = []
    for depth in range(drafts[0].path.shape[1]):
        tried, right = 0, torch.zeros(TOP_K[-1], dtype=torch.long)
        for one in drafts:
            parent = torch.full((len(one.path),), -1) if depth == 0 else one.path[:, depth - 1]
            expanded = (one.known > depth) & ((one.depths == depth + 1) & (one.parents == parent[:, None])).any(1)
            if depth:
                expanded &= parent >= 0
            tried += int(expanded.sum())
            node = one.path[:, depth]
            hit = expanded & (node >= 0)
            ranks = one.ranks.gather(1, node.clamp(min=0)[:, None])[:, 0][hit]
            right += ranks.bincount(minlength=TOP_K[-1])
        shares.append([r / max(tried, 1) for r in right.tolist()])
    return shares


def _nodes(drafts: Sequence[Drafted], per_position: int | None = None) -> tuple[Tensor, Tensor]:
    """Probabilities of nodes within the answers, and whether they were right: of all, or of a position's likeliest."""
    probabilities, rights = [], []
    for one in drafts:
        right = torch.zeros_like(one.values, dtype=torch.bool)
        for depth in range(one.path.shape[1]):
            on = one.path[:, depth] >= 0
            right[on, one.path[on, depth]] = True
        chosen = one.depths <= one.known[:, None]
        if per_position is not None:
            chosen &= _order(one.values) < per_position
        probabilities.append(one.values[chosen].exp())
        rights.append(right[chosen])
    return torch.cat(probabilities), torch.cat(rights)


def _curve(drafts: Sequence[Drafted]) -> tuple[list[float], list[float]]:
    """Points of probability, and the share of nodes of that probability that was right: never falling."""
    sure, right = _nodes(drafts)
    index = torch.bucketize(sure, torch.tensor(EDGES[1:-1]))
    bins = [(sure[index == b].double(), right[index == b].double()) for b in range(len(EDGES) - 1)]
    points = [(float(s.mean()), float(r.mean()), float(len(s))) for s, r in bins if len(s)]
    xs, ys = isotonic(*zip(*points, strict=True))
    return _rounded(xs), _rounded(ys)


def isotonic(sure: Sequence[float], right: Sequence[float], weight: Sequence[float]) -> tuple[list[float], list[float]]:
    """The nearest never falling curve through weighted shares (pool adjacent violators), from (0, 0) to 1."""
    blocks: list[tuple[float, float, int]] = []  # mean, weight, points
    for share, w in zip(right, weight, strict=True):
        blocks.append((share, w, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (a, wa, na), (b, wb, nb) = blocks[-2:]
            blocks[-2:] = [((a * wa + b * wb) / (wa + wb), wa + wb, na + nb)]
    curve = [mean for mean, _, points in blocks for _ in range(points)]
    return [0.0, *sure, 1.0], [0.0, *curve, curve[-1]]


def _error(drafts: Sequence[Drafted], correct: Callable[[Tensor], Tensor]) -> float:
    """Expected calibration error, in tenths, over the nodes that a tree would verify first."""
    sure, right = _nodes(drafts, ERROR_NODES)
    sure = correct(sure)
    tenth = (sure * 10).long().clamp(0, 9)
    gaps = [float((sure[tenth == b].sum() - right[tenth == b].sum()).abs()) for b in range(10)]
    return sum(gaps) / max(len(sure), 1)


def write(folder: Path, acceptance: TreeAcceptance, weights: str) -> None:
    """Beside the weights that it was measured with. weights: their SHA-256."""
    content = AcceptanceFile(weights, acceptance)
    with atomic_path(folder / FILE) as temporary:
        temporary.write_text(json.dumps(asdict(content)) + "\n")


def read(folder: Path) -> TreeAcceptance:
    """Raises `SpecBenchError` for one that is missing, damaged, or of other weights than lie beside it."""
    hint = "measure it (python -m specbench.train drafter=… train.until=acceptance)"
    if not (folder / FILE).is_file():
        raise SpecBenchError(f"{folder / FILE} is not there, so no tree can be fitted; {hint}, or use another tree=")
    content: AcceptanceFile = read_json(folder / FILE, AcceptanceFile)
    if content.weights != hashing.of_file(folder / WEIGHTS):
        raise SpecBenchError(f"{folder / FILE} was measured with other weights than {WEIGHTS} beside it; {hint} again")
    return content.acceptance
