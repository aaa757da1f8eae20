"""How far held-out answers follow a drafter's trees, of all sizes, from one replay with a large one.

At every position of some held-out greedy answers the drafter drafts all that the largest tree would hold. What a smaller
tree would have drafted is a part of that, and which of its nodes the target would have accepted is known, since the answer
is. So every smaller tree is walked through the answers cycle by cycle, as decoding would. It is a property of weights and
target, not of a machine: it is measured where weights are made, and lies beside them.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specbench.common import hashing
from specbench.common.errors import SpecBenchError
from specbench.common.io import read_json
from specbench.common.progress import progress
from specbench.common.storage import atomic_path
from specbench.engine.decode import Limits, decode
from specbench.engine.interface import DraftTree
from specbench.engine.policies import Dynamic, Expandable, Pool
from specbench.engine.replay import ReplayTarget
from specbench.engine.sampling import Sampler
from specbench.engine.target import Target
from specbench.engine.tree import root_only
from specbench.engine.verify import Lossless
from specbench.records.schema import WEIGHTS
from specbench.training.features import Answer
from specbench.tuning.cost_aware import NODES, TOP_K, Acceptance

FILE = "acceptance.json"
LEVELS = 8  # of the large tree
ANSWERS, MOST = 16, 48  # held-out answers, and tokens of each
EDGES = [0.0, *(10 ** (-4 + i / 6) for i in range(24)), 1.0]  # of bins of a drafter's probability
SHOWN = 15  # likeliest nodes of a position, over which the calibration error is taken


@dataclass(frozen=True)
class Kept:
    """What lies beside the weights. weights: SHA-256 of those it was measured with."""

    weights: str
    acceptance: Acceptance


class Recorded(Dynamic):
    """Drafts all there is and verifies nothing: every cycle emits one token, so that no position is left out."""

    def __init__(self, depth: int):
        super().__init__(depth, TOP_K[-1], 2)
        self.pools: list[Pool] = []

    def grow(self, drafter: Expandable, root: int, sampler: Any, generator: torch.Generator | None) -> DraftTree:
        self.pools.append(self.draft(drafter))
        return root_only(root, self.pools[-1].tokens.device, passes=self.depth)


@dataclass(frozen=True)
class Drafted:
    """All pools of an answer, position by position, and what of them the answer follows.

    Attributes:
        values: [P, N] log-probabilities of paths. parents, ranks, depths: [P, N].
        path: [P, D] the pool's nodes that spell the answer, -1 from where it leaves the pool on.
        known: [P] tokens of the answer behind each position.
    """

    values: Tensor
    parents: Tensor
    ranks: Tensor
    depths: Tensor
    path: Tensor
    known: Tensor


@torch.no_grad()
def measure(target: Target, drafter: Any, answers: Sequence[Answer]) -> Acceptance:
    """Draft at every position of some held-out answers."""
    before = drafter.growth
    found: list[Drafted] = []
    try:
        with progress("following held-out answers", min(len(answers), ANSWERS), "answers") as show:
            for answer in answers[:ANSWERS]:
                show(len(found))
                found.append(_drafted(target, drafter, answer))
            show(len(found))
    finally:
        drafter.set_tree_policy(before)
    if not found:
        raise SpecBenchError("there are no held-out answers to measure a drafter's acceptance on")
    return aggregate(found)


def _drafted(target: Target, drafter: Any, answer: Answer) -> Drafted:
    recorded = Recorded(min(LEVELS, drafter.deepest or LEVELS))
    drafter.set_tree_policy(recorded)
    prompt, said = answer.ids[: answer.begin], answer.ids[answer.begin : answer.begin + MOST]
    known: Any = ReplayTarget(target, prompt, said, drafter.taps)
    for _ in decode(known, drafter, prompt, Limits(len(said)), Lossless(), Sampler()):
        pass
    pool = Pool(*(torch.stack(parts).cpu() for parts in zip(*recorded.pools, strict=True)))
    return match_answer(pool, torch.tensor(said), recorded.depth)


def match_answer(pool: Pool, said: Tensor, levels: int) -> Drafted:
    """Which nodes spell the answer. pool: [P, N] each; said: [P + 1] the answer, whose position p is the root of pool p."""
    positions = len(pool.tokens)
    path = torch.full((positions, levels), -1)
    at = torch.full((positions,), -1)  # the node that spells what came so far, -1: the root
    there = torch.ones(positions, dtype=torch.bool)
    for level in range(levels):
        following = torch.full((positions,), -1)  # behind the answer's end nothing is right
        rest = said[level + 1 : level + 1 + positions]
        following[: len(rest)] = rest
        right = (pool.depths == level + 1) & (pool.parents == at[:, None]) & (pool.tokens == following[:, None])
        there = there & right.any(-1)
        at = torch.where(there, right.int().argmax(-1), -2)
        path[:, level] = torch.where(there, at, -1)
    known = len(said) - 1 - torch.arange(positions)
    return Drafted(pool.values, pool.parents, pool.ranks, pool.depths, path, known)


def aggregate(found: Sequence[Drafted]) -> Acceptance:
    """Everything that is kept of some answers."""
    levels = found[0].path.shape[1]
    tau = {k: [[1.0] * len(NODES) for _ in range(levels)] for k in TOP_K}
    for k in TOP_K:
        for depth in range(levels):
            tau[k][depth] = _taus([sizes(one, k)[:, depth] for one in found])
    sure, right, weight = _bins(found)
    even, odd = _bins(found[::2]), found[1::2] or found
    correction = _acceptance(tau, ranks_of(found), *isotonic(*even), (0.0, 0.0), 1)
    error = _error(odd, lambda p: p), _error(odd, correction.worth)
    return _acceptance(tau, ranks_of(found), *isotonic(sure, right, weight), error, sum(len(one.path) for one in found))


def _acceptance(tau: Any, ranks: Any, sure: list[float], accepted: list[float], error: Any, positions: int) -> Acceptance:
    def short(values: Sequence[float]) -> list[float]:
        return [round(v, 5) for v in values]

    table = {k: [short(row) for row in rows] for k, rows in tau.items()}
    both = round(error[0], 5), round(error[1], 5)
    return Acceptance(table, [short(r) for r in ranks], short(sure), short(accepted), both, positions)


def sizes(drafted: Drafted, top_k: int) -> Tensor:
    """How many nodes a tree of a smaller top_k must verify to accept so deep: [P, depth of the tree, depth accepted].

    Its frontiers are a part of the large tree's, but for a node that the large one found ten better ones than; a path that
    leaves the tree needs more nodes than there are.
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
        order = values.masked_fill(~inside, -torch.inf).argsort(dim=1, descending=True, stable=True).argsort(1)
        for accepted in range(depth + 1):
            node = drafted.path[:, accepted]
            there = (node >= 0) & inside.gather(1, node.clamp(min=0)[:, None])[:, 0]
            place = order.gather(1, node.clamp(min=0)[:, None])[:, 0]
            needed[:, depth, accepted] = torch.where(there, place + 2, never)  # the root, and this one
    return needed


def _taus(needed: Sequence[Tensor]) -> list[float]:
    """Tokens a cycle by size of the tree, in `NODES`. needed: by answer [P, depth accepted] nodes."""
    found = []
    for nodes in NODES:
        emitted = cycles = 0
        for one in needed:
            accepted = (one <= nodes).int().cumprod(1).sum(1).tolist()  # by position
            at = 0
            while at < len(accepted):
                step = min(accepted[at] + 1, len(accepted) - at)
                emitted, cycles, at = emitted + step, cycles + 1, at + step
        found.append(emitted / cycles)
    return found


def ranks_of(found: Sequence[Drafted]) -> list[list[float]]:
    """[depth - 1][rank]: how often that candidate was right, below nodes that were and that were gone on from."""
    levels, width = found[0].path.shape[1], TOP_K[-1]
    shares = []
    for depth in range(levels):
        tried, right = 0, [0] * width
        for one in found:
            parent = torch.full((len(one.path),), -1) if depth == 0 else one.path[:, depth - 1]
            on = (one.known > depth) & (torch.ones_like(parent, dtype=torch.bool) if depth == 0 else parent >= 0)
            on &= ((one.depths == depth + 1) & (one.parents == parent[:, None])).any(1)
            tried += int(on.sum())
            node = one.path[:, depth]
            hit = on & (node >= 0)
            for rank in one.ranks.gather(1, node.clamp(min=0)[:, None])[:, 0][hit].tolist():
                right[rank] += 1
        shares.append([r / max(tried, 1) for r in right])
    return shares


def _nodes(found: Sequence[Drafted], shown: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
    """(probability, was it right) of nodes whose fate is known, by answer: of all, or of a position's likeliest."""
    for one in found:
        right = torch.zeros_like(one.values, dtype=torch.bool)
        for depth in range(one.path.shape[1]):
            on = one.path[:, depth] >= 0
            right[on, one.path[on, depth]] = True
        asked = one.depths <= one.known[:, None]
        if shown is not None:
            asked &= one.values.argsort(dim=1, descending=True, stable=True).argsort(1) < shown
        yield one.values[asked].exp(), right[asked]


def _bins(found: Sequence[Drafted]) -> tuple[list[float], list[float], list[float]]:
    """By bin of probability that holds any: the mean probability, the share that was right, how many."""
    sure, right = (torch.cat(parts) for parts in zip(*_nodes(found), strict=True))
    place = torch.bucketize(sure, torch.tensor(EDGES[1:-1]))
    parts = [(sure[place == b].double(), right[place == b].double()) for b in range(len(EDGES) - 1)]
    kept = [(float(s.mean()), float(r.mean()), float(len(s))) for s, r in parts if len(s)]
    return [k[0] for k in kept], [k[1] for k in kept], [k[2] for k in kept]


def isotonic(sure: Sequence[float], right: Sequence[float], weight: Sequence[float]) -> tuple[list[float], list[float]]:
    """The never falling curve nearest to some shares, weighted (pool adjacent violators), from (0, 0) to 1."""
    blocks: list[tuple[float, float, int]] = []  # mean, weight, points
    for share, w in zip(right, weight, strict=True):
        blocks.append((share, w, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (a, wa, na), (b, wb, nb) = blocks[-2:]
            blocks[-2:] = [((a * wa + b * wb) / (wa + wb), wa + wb, na + nb)]
    curve = [mean for mean, _, points in blocks for _ in range(points)]
    return [0.0, *sure, 1.0], [0.0, *curve, curve[-1]]


def _error(found: Sequence[Drafted], corrected: Any) -> float:
    """Expected calibration error, in tenths, over the nodes that a tree would verify first."""
    sure, right = (torch.cat(parts) for parts in zip(*_nodes(found, SHOWN), strict=True))
    sure = corrected(sure)
    place = (sure * 10).long().clamp(0, 9)
    gaps = [float((sure[place == b].sum() - right[place == b].sum()).abs()) for b in range(10)]
    return sum(gaps) / max(len(sure), 1)


# Beside the weights -----------------------------------------------------------------------------------------------------


def write(folder: Path, acceptance: Acceptance) -> None:
    """Beside the weights that it was measured with."""
    kept = Kept(hashing.of_file(folder / WEIGHTS), acceptance)
    with atomic_path(folder / FILE) as temporary:
        temporary.write_text(json.dumps(asdict(kept)) + "\n")


def read(folder: Path) -> Acceptance:
    """Raises `SpecBenchError` for one that is missing, damaged, or of other weights than lie beside it."""
    mend = "measure it (python -m specbench.train drafter=… train.until=acceptance)"
    if not (folder / FILE).is_file():
        raise SpecBenchError(f"{folder / FILE} is not there, so no tree can be fitted; {mend}, or use another tree=")
    kept: Kept = read_json(folder / FILE, Kept)
    if kept.weights != hashing.of_file(folder / WEIGHTS):
        raise SpecBenchError(f"{folder / FILE} was measured with other weights than {WEIGHTS} beside it; {mend} again")
    return kept.acceptance
