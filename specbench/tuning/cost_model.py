"""What a cycle costs on this machine, by its tree: timed in real cycles, kept in the cache, read by fitted trees.

All trees are timed in turn within one generation, so that other load on the machine affects all alike. A file of costs
records machine, versions, target and drafter, and is used under the same conditions only.

Passes over more nodes are the target's own, whichever drafter drew the nodes: they are timed with the first drafter and
reused for the others, scaled by what plain decoding takes beside each of them.
"""

import json
import statistics
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import with_config
from typing_extensions import TypedDict

from specbench.common import environment, hashing, timing
from specbench.common.errors import SpecBenchError
from specbench.common.io import OPEN, differing, read_json
from specbench.common.storage import atomic_path, cache_root
from specbench.engine.decode import Limits, decode
from specbench.engine.interface import DraftTree, Step
from specbench.engine.policies import Dynamic, Expandable, Root
from specbench.engine.sampling import Sampler
from specbench.engine.target import Target
from specbench.engine.tree import root_only
from specbench.engine.verify import Lossless
from specbench.records import identity
from specbench.tuning.acceptance import isotonic
from specbench.tuning.cost_aware import NODES, Costs, Passes
from specbench.tuning.target_cost import text

CONTEXT = 192  # tokens before the timed trees
TURNS = 7  # of all trees, of which the median counts
WARM_UP = 2  # turns before these: the first call of a size may load kernels; the second finds the hopeless ones
AGAIN = 5  # trees after which plain decoding, the reference of all, is timed once more
WIDTHS = (1, 2, 4, 7, 10)  # candidates of a node, and nodes expanded in a level
WIDE, DEEP = 8, 4  # top_k of the trees that are timed by nodes; levels of those that are timed by width
BUSY = 0.3  # cores of other load above which a timing is doubtful
HOPELESS = 5.0  # cycles of plain decoding: no draft tree repays a pass that takes longer

Entry = tuple[str, int]  # a table of `Costs`, and the index in it
PLAIN: Entry = ("verify", 1)


@dataclass(frozen=True)
class CostsFile:
    """A file of the cache. made_for: the conditions under which it was timed."""

    made_for: dict[str, Any]
    costs: Costs


@with_config(OPEN)
class TargetCosts(TypedDict):
    """The costs that do not depend on the drafter."""

    verify: Passes


@dataclass(frozen=True)
class TargetCostsFile:
    """A file of the cache with a target's passes, for all its drafters."""

    made_for: dict[str, Any]
    costs: TargetCosts


class RootOnly(Dynamic):
    """Plain decoding, with the drafter loaded."""

    def __init__(self) -> None:
        super().__init__(1, 1, 2)

    def has_fixed_shapes(self, sampler: Any) -> bool:
        return False

    def grow(self, drafter: Expandable, root: Root, sampler: Any, generator: torch.Generator | None) -> DraftTree:
        return root_only(root, drafter.root_logits().device)


def _trees(deepest: int) -> dict[Entry, Dynamic]:
    """What is timed; verify[1] is a cycle without a draft, level[k] one with DEEP levels of k nodes."""
    deep = min(DEEP, deepest)
    trees: dict[Entry, Dynamic] = {PLAIN: RootOnly()}
    trees |= {("verify", n): Dynamic(min(2, deepest), WIDE, n) for n in NODES if deepest > 1 or n <= WIDE + 1}
    for k in WIDTHS:
        trees["first", k] = Dynamic(1, k, k + 1)
        if deep > 1:
            trees["level", k] = Dynamic(deep, k, 1 + k)
    return trees


def grows_as_graphs(drafter: Any) -> bool:
    """Are the trees of a drafter's own policy grown in fixed shapes, see `captured_growth`? The timed ones are, then."""
    captured = getattr(drafter, "captured", None)
    return captured is not None and bool(captured.serves(drafter, Sampler()))


def take(target: Target, drafter: Any, context: int = CONTEXT, verify: Mapping[int, float] | None = None) -> Costs:
    """Time a drafter's cycles after so many tokens of context.

    Args:
        verify: seconds of the target's passes by nodes, timed earlier with another drafter. None: they are timed, too.

    Raises:
        SpecBenchError: the drafter grows no trees that could be fitted.
    """
    before, deepest, captured = drafter.growth, drafter.deepest or DEEP, getattr(drafter, "captured", None)
    if captured is not None and not grows_as_graphs(drafter):
        drafter.captured = None
    trees = _trees(deepest)
    if verify is not None:
        trees = {entry: tree for entry, tree in trees.items() if entry == PLAIN or entry[0] != "verify"}
    try:
        steps = _timed(target, drafter, trees, min(context, target.max_context // 2))
    finally:
        drafter.set_tree_policy(before)
        if captured is not None:
            drafter.captured = captured
            captured.graphs.clear()  # those of the timed trees
    rest = {entry: statistics.median(s.target_s + s.verify_s + s.rest_s for s in timed) for entry, timed in steps.items()}
    draft = {entry: statistics.median(s.draft_s for s in timed) for entry, timed in steps.items()}
    levels = min(DEEP, deepest) - 1
    passes = {n: seconds for (table, n), seconds in rest.items() if table == "verify"}
    if verify is not None:
        passes = {n: seconds * rest[PLAIN] / verify[1] for n, seconds in verify.items()}
    return Costs(
        verify=_never_falling(passes),
        first={k: draft["first", k] for k in WIDTHS},
        level={k: max(0.0, draft["level", k] - draft["first", k]) / levels if levels else 0.0 for k in WIDTHS},
    )


def _timed(target: Target, drafter: Any, trees: Mapping[Entry, Dynamic], context: int) -> dict[Entry, list[Step]]:
    """Cycles of every tree, in turn; after the warm-up without those that are hopeless."""
    drafter.set_tree_policy(_largest(drafter))  # for which caches are allocated
    cycles = _cycles(target, drafter, text(target, context))
    steps: dict[Entry, list[Step]] = {entry: [] for entry in trees}
    for turn in range(WARM_UP + TURNS):
        for number, entry in enumerate(list(steps), 1):
            for timed in (entry, PLAIN) if number % AGAIN == 0 else (entry,):
                drafter.growth = trees[timed]
                steps[timed].append(next(cycles))
        if turn + 1 == WARM_UP:
            limit = HOPELESS * steps[PLAIN][-1].target_s
            hopeless = {e for e in steps if e[0] == "verify" and e != PLAIN and steps[e][-1].target_s > limit}
            steps = {entry: [] for entry in steps if entry not in hopeless}
    return steps


def _largest(drafter: Any) -> Dynamic:
    return Dynamic(min(DEEP, drafter.deepest or DEEP), WIDTHS[-1], NODES[-1])


def _never_falling(seconds: Mapping[int, float]) -> dict[int, float]:
    """By nodes, without disturbed timings: a pass over more nodes takes no less time."""
    sizes = sorted(seconds)
    _, curve = isotonic([0.0] * len(sizes), [seconds[n] for n in sizes], [1.0] * len(sizes))
    return dict(zip(sizes, curve[1:-1], strict=True))


def _cycles(target: Target, drafter: Any, prompt: list[int]) -> Iterator[Step]:
    """Without end: when one generation has filled the context another begins."""
    clock = timing.Clock(target.device)
    while True:
        drafter.growth = _largest(drafter)
        events = decode(target, drafter, prompt, Limits(target.max_context), Lossless(), Sampler(), clock=clock)
        yield from (event for event in events if isinstance(event, Step))


def made_for(target: Target, options: Mapping[str, Any]) -> dict[str, Any]:
    """What costs depend on. options: of the drafter and of decoding."""
    return {
        "hardware": environment.hardware(target.device),
        "versions": environment.versions(),
        "timing": identity.TIMING,
        "target": target.fingerprint(),
        "dtype": str(target.dtype),
        "kernels": target.kernels,
        **({} if target.quantised is None else {"quantised": target.quantised}),
        **options,
    }


def path_of(model: str, drafter: str, conditions: Mapping[str, Any]) -> Path:
    """Of the file in the cache."""
    return cache_root() / "costs" / model / f"{drafter}-{hashing.of(conditions)[:12]}.json"


def known(target: Target, drafter: Any, model: str, options: Mapping[str, Any]) -> bool:
    """Are the costs in the cache?"""
    return path_of(model, drafter.name, made_for(target, options)).is_file()


def of(target: Target, drafter: Any, model: str, options: Mapping[str, Any]) -> Costs:
    """The costs here, from the cache or timed now; warns if other load disturbed the timing."""
    conditions = made_for(target, options)
    path = path_of(model, drafter.name, conditions)
    if path.is_file():
        costs: Costs = read(path, conditions)
        return costs
    print(f"timing cycles of {drafter.name} on this machine, to fit its tree (once) ...", file=sys.stderr, flush=True)
    of_engine = {name: options.get(name) for name in ("backend", "forward")}
    of_target = made_for(target, {"hidden": drafter.taps.hidden, "kv": drafter.taps.kv, **of_engine})
    shared = path_of(model, "target", of_target)
    load = timing.BackgroundLoad()
    load.start()
    passes = read(shared, of_target, TargetCostsFile)["verify"] if shared.is_file() else None
    costs = take(target, drafter, verify=passes)
    busy = load.read() or 0.0
    write(path, costs, conditions)
    if busy > BUSY:
        print(
            f"specbench: other work took {busy:.1f} cores while costs of {drafter.name} were timed, so its tree may not be "
            f"the fastest; remove {path} to time them again",
            file=sys.stderr,
        )
    elif not shared.is_file() and drafter.deepest != 1:  # with one level there are few nodes
        write(shared, Costs(costs.verify, {}, {}), of_target)
    return costs


def write(path: Path, costs: Costs, conditions: Mapping[str, Any]) -> None:
    with atomic_path(path) as temporary:
        temporary.write_text(json.dumps(asdict(CostsFile(dict(conditions), costs)), indent=1) + "\n")


def read(path: Path, conditions: Mapping[str, Any], shape: Any = CostsFile) -> Any:
    """The costs. Raises `SpecBenchError` for a damaged file, and for one timed under other conditions, which it names."""
    content = read_json(path, shape)
    changed = differing(content.made_for, json.loads(json.dumps(conditions)))
    if names := dict.fromkeys(name.split(".")[0] for name in changed):
        raise SpecBenchError(f"{path} was timed with another {', '.join(names)}; remove it, and it is timed again")
    return content.costs
