"""What a cycle costs on this machine, by its tree: timed in real cycles, kept in the cache, read by fitted trees.

All trees are timed in turn within one generation, so that what the machine does meanwhile meets all alike. What is kept
says on which machine, by which versions and for which target and drafter it was timed, and serves nothing else.

Passes over more nodes are the target's own, whichever drafter drew the nodes: they are timed with the first drafter and
kept for the others, scaled by what plain decoding takes beside each of them.
"""

import json
import statistics
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from specbench.common import environment, hashing, timing
from specbench.common.errors import SpecBenchError
from specbench.common.io import read_json
from specbench.common.storage import atomic_path, cache_root
from specbench.engine.decode import Limits, decode
from specbench.engine.interface import DraftTree, Step
from specbench.engine.policies import Dynamic, Expandable
from specbench.engine.sampling import Sampler
from specbench.engine.target import Target
from specbench.engine.tree import root_only
from specbench.engine.verify import Lossless
from specbench.records import identity
from specbench.tuning.acceptance import isotonic
from specbench.tuning.cost_aware import NODES, Costs
from specbench.tuning.target_cost import text

CONTEXT = 192  # tokens behind which trees are timed
TURNS = 7  # of all trees, of which the median counts
WARM_UP = 2  # turns before these: the first call of a size may load kernels, the second says whether it is hopeless
AGAIN = 5  # trees after which plain decoding, to which all are held, is timed once more
WIDTHS = (1, 2, 4, 7, 10)  # candidates of a node, and nodes expanded in a level
WIDE, DEEP = 8, 4  # top_k of the trees that are timed by nodes; levels of those that are timed by width
BUSY = 0.3  # cores that others may take before a timing is doubtful
HOPELESS = 5.0  # cycles of plain decoding: no draft tree repays a pass that takes longer

Try = tuple[str, int]  # which table, and where in it
PLAIN: Try = ("verify", 1)


@dataclass(frozen=True)
class Kept:
    """A file of the cache. made_for: what it was timed on, and for what."""

    made_for: dict[str, Any]
    costs: Costs


class _Nothing(Dynamic):
    """Plain decoding, by a drafter that is there."""

    def __init__(self) -> None:
        super().__init__(1, 1, 2)

    def grow(self, drafter: Expandable, root: int, sampler: Any, generator: torch.Generator | None) -> DraftTree:
        return root_only(root, drafter.root_logits().device)


def _trees(deepest: int) -> dict[Try, Dynamic]:
    """What is timed; verify[1] is a cycle without a draft, level[k] one with DEEP levels of k nodes."""
    deep = min(DEEP, deepest)
    found: dict[Try, Dynamic] = {PLAIN: _Nothing()}
    found |= {("verify", n): Dynamic(min(2, deepest), WIDE, n) for n in NODES if deepest > 1 or n <= WIDE + 1}
    for k in WIDTHS:
        found["first", k] = Dynamic(1, k, k + 1)
        if deep > 1:
            found["level", k] = Dynamic(deep, k, 1 + k)
    return found


def take(target: Target, drafter: Any, context: int = CONTEXT, verify: Mapping[int, float] | None = None) -> Costs:
    """Time a drafter's cycles behind so many tokens of context.

    Args:
        verify: seconds of the target's passes by nodes, timed before, with another drafter. None: they are timed, too.

    Raises:
        SpecBenchError: the drafter grows no trees that could be fitted.
    """
    before, deepest = drafter.growth, drafter.deepest or DEEP
    trees = _trees(deepest)
    if verify is not None:
        trees = {at: tree for at, tree in trees.items() if at == PLAIN or at[0] != "verify"}
    try:
        found = _timed(target, drafter, trees, min(context, target.max_context // 2))
    finally:
        drafter.set_tree_policy(before)
    rest = {
        at: statistics.median(step.target_s + step.verify_s + step.rest_s for step in steps) for at, steps in found.items()
    }
    draft = {at: statistics.median(step.draft_s for step in steps) for at, steps in found.items()}
    levels = min(DEEP, deepest) - 1
    passes = {n: seconds for (what, n), seconds in rest.items() if what == "verify"}
    if verify is not None:
        passes = {n: seconds * rest[PLAIN] / verify[1] for n, seconds in verify.items()}
    return Costs(
        verify=_never_falling(passes),
        first={k: draft["first", k] for k in WIDTHS},
        level={k: max(0.0, draft["level", k] - draft["first", k]) / levels if levels else 0.0 for k in WIDTHS},
    )


def _timed(target: Target, drafter: Any, trees: Mapping[Try, Dynamic], context: int) -> dict[Try, list[Step]]:
    """Cycles of every tree, in turn; after the warm-up without those that are hopeless."""
    drafter.set_tree_policy(
        Dynamic(min(DEEP, drafter.deepest or DEEP), WIDTHS[-1], NODES[-1])
    )  # the largest: caches are made for it
    cycles = _cycles(target, drafter, text(target, context))
    found: dict[Try, list[Step]] = {at: [] for at in trees}
    for turn in range(WARM_UP + TURNS):
        for place, at in enumerate(list(found)):
            for timed in (at, PLAIN) if place % AGAIN == AGAIN - 1 else (at,):
                drafter.growth = trees[timed]
                found[timed].append(next(cycles))
        if turn + 1 == WARM_UP:
            found = {at: [] for at, steps in found.items() if not _hopeless(at, steps[-1], found[PLAIN][-1])}
    return found


def _hopeless(at: Try, step: Step, plain: Step) -> bool:
    """Does a pass over so many nodes take longer than any draft could be worth?"""
    return at[0] == "verify" and at != PLAIN and step.target_s > HOPELESS * plain.target_s


def _never_falling(seconds: Mapping[int, float]) -> dict[int, float]:
    """By nodes: a pass over more of them is not sooner done, so where one seems to be the clock was disturbed."""
    sizes = sorted(seconds)
    _, curve = isotonic([0.0] * len(sizes), [seconds[n] for n in sizes], [1.0] * len(sizes))
    return dict(zip(sizes, curve[1:-1], strict=True))


def _cycles(target: Target, drafter: Any, prompt: list[int]) -> Iterator[Step]:
    """Without end: where one generation has filled the context another begins."""
    clock = timing.Clock(target.device)
    while True:
        drafter.growth = Dynamic(min(DEEP, drafter.deepest or DEEP), WIDTHS[-1], NODES[-1])
        events = decode(target, drafter, prompt, Limits(target.max_context), Lossless(), Sampler(), clock=clock)
        yield from (event for event in events if isinstance(event, Step))


def made_for(target: Target, said: Mapping[str, Any]) -> dict[str, Any]:
    """What costs depend on. said: of the drafter and how it decodes, as a header has it."""
    return {
        "hardware": environment.hardware(target.device),
        "versions": environment.versions(),
        "timing": identity.TIMING,
        "target": target.fingerprint(),
        "dtype": str(target.dtype),
        "lean": target.fused is not None,
        **said,
    }


def path_of(model: str, drafter: str, conditions: Mapping[str, Any]) -> Path:
    """Where they are kept."""
    return cache_root() / "costs" / model / f"{drafter}-{hashing.of(conditions)[:12]}.json"


def known(target: Target, drafter: Any, model: str, said: Mapping[str, Any]) -> bool:
    """Are the costs in the cache?"""
    return path_of(model, drafter.name, made_for(target, said)).is_file()


def of(target: Target, drafter: Any, model: str, said: Mapping[str, Any]) -> Costs:
    """The costs here, from the cache or timed now. Where other work disturbed them, that is said."""
    conditions = made_for(target, said)
    path = path_of(model, drafter.name, conditions)
    if path.is_file():
        return read(path, conditions)
    print(f"timing cycles of {drafter.name} on this machine, to fit its tree (once) ...", file=sys.stderr, flush=True)
    alike = made_for(target, {"hidden": drafter.taps.hidden, "kv": drafter.taps.kv, "backend": said.get("backend")})
    shared = path_of(model, "target", alike)
    others = timing.BackgroundLoad()
    others.start()
    costs = take(target, drafter, verify=read(shared, alike).verify if shared.is_file() else None)
    busy = others.read() or 0.0
    write(path, costs, conditions)
    if busy <= BUSY and not shared.is_file() and drafter.deepest != 1:  # with one level there are few nodes
        write(shared, Costs(costs.verify, {}, {}), alike)
    if busy > BUSY:
        print(
            f"specbench: other work took {busy:.1f} cores while costs of {drafter.name} were timed, so its tree may not be "
            f"the fastest; remove {path} to time them again",
            file=sys.stderr,
        )
    return costs


def write(path: Path, costs: Costs, conditions: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as temporary:
        temporary.write_text(json.dumps(asdict(Kept(dict(conditions), costs)), indent=1) + "\n")


def read(path: Path, conditions: Mapping[str, Any]) -> Costs:
    """Raises `SpecBenchError` for a damaged file, and for one that was timed under other conditions, which it names."""
    kept: Kept = read_json(path, Kept)
    if differing := list(_differing(kept.made_for, json.loads(json.dumps(conditions)))):
        raise SpecBenchError(f"{path} was timed with another {', '.join(differing)}; remove it, and it is timed again")
    return kept.costs


def _differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name):
            yield name
