"""What the engine itself costs, on a real model: `make benchmarks`. Reported in the README, no pass or fail.

1. Seconds a cycle outside target and drafter forwards, as a share of decode time.
2. The baseline against Transformers' `generate`.      3. Vanilla SD against Transformers' assisted generation.
4. The cost of a target pass against the size of the tree (the report draws it).
5. Small trees for EAGLE-2 on this machine: tau and speed-up, on HumanEval so that MT-Bench is not tuned on.

Ratios are taken in one process, the two sides in turn; medians over rounds. Writes `benchmarks.json` into the folder
given as the first argument.
"""

import copy
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from specbench import measure
from specbench.engine.decode import Limits, Prefill, decode
from specbench.engine.grow import Chain, Dynamic
from specbench.engine.interface import Drafter, Step
from specbench.engine.sampling import Sampler
from specbench.engine.target import Target
from specbench.engine.tree import build
from specbench.engine.verify import Lossless

ROOT = Path(__file__).resolve().parents[1]
TOKENS, PROMPTS, ROUNDS = 64, 4, 3


def configured(drafter: str, target: Target, *overrides: str) -> Drafter:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        made = instantiate(compose("run", [f"drafter={drafter}", *overrides]).drafter)
    made.bind(target)
    return made


def generate(target: Target, drafter: Drafter, prompt: list[int]) -> tuple[list[int], list[Step], float]:
    """Ids, steps and seconds of one whole generation, prefill included."""
    begin = time.perf_counter()
    events = list(decode(target, drafter, prompt, Limits(TOKENS), Lossless(), Sampler()))
    seconds = time.perf_counter() - begin
    assert isinstance(events[0], Prefill)
    steps = [e for e in events[1:] if isinstance(e, Step)]
    return [events[0].token] + [t for s in steps for t in s.tokens], steps, seconds


class Stopwatch:
    """Sums the time spent inside some functions."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - begin

        return timed


def overhead(target: Target, drafter: Drafter, prompts: list[list[int]]) -> dict[str, float]:
    """Share of the cycles' time that is neither a forward of the target nor one of the drafter."""
    watch = Stopwatch()
    originals = target.run, target.head.forward
    network: Any = drafter.network  # type: ignore[attr-defined]
    owner, name = (network, "forward") if isinstance(network, torch.nn.Module) else (drafter, "network")
    total, inside, cycles = 0.0, 0.0, 0
    target.run = watch.around(target.run)  # type: ignore[method-assign]
    target.head.forward = watch.around(target.head.forward)  # type: ignore[method-assign]
    object.__setattr__(owner, name, watch.around(getattr(owner, name)))
    try:
        for prompt in prompts:
            events = decode(target, drafter, prompt, Limits(TOKENS), Lossless(), Sampler())
            next(events)
            prefill, begin = watch.seconds, time.perf_counter()
            cycles += sum(1 for _ in events)
            total += time.perf_counter() - begin
            inside += watch.seconds - prefill
    finally:
        target.run, target.head.forward = originals  # type: ignore[method-assign]
        object.__delattr__(owner, name)
    return {"share": 1 - inside / total, "ms_per_cycle": 1000 * (total - inside) / cycles}


def against_transformers(
    target: Target, drafter: Drafter, prompts: list[list[int]], assistant: Any = None
) -> dict[str, Any]:
    """Our seconds over theirs on the same prompts, in turn; are the ids the same?"""
    settings = copy.deepcopy(target.model.generation_config)
    settings.update(max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False, eos_token_id=None)
    extra: dict[str, Any] = {}
    if assistant is not None:
        assistant.generation_config.update(
            num_assistant_tokens=4,
            num_assistant_tokens_schedule="constant",
            assistant_confidence_threshold=0.0,
            do_sample=False,
            eos_token_id=None,
        )
        extra = {"assistant_model": assistant}
    ratios, same, ours_total, theirs_total = [], 0, 0.0, 0.0
    for _ in range(ROUNDS):
        for prompt in prompts:
            tokens, _, ours = generate(target, drafter, prompt)
            begin = time.perf_counter()
            out = target.model.generate(torch.tensor([prompt]), generation_config=settings, **extra)
            theirs = time.perf_counter() - begin
            ratios.append(theirs / ours)
            ours_total, theirs_total = ours_total + ours, theirs_total + theirs
            same += out[0, len(prompt) :].tolist() == tokens
    count = ROUNDS * len(prompts)
    return {
        "our_tokens_per_s": TOKENS * count / ours_total,
        "their_tokens_per_s": TOKENS * count / theirs_total,
        "speed_ratio_median": statistics.median(ratios),
        "same_tokens": f"{same}/{count}",
    }


@torch.inference_mode()
def target_pass(target: Target, prompt: list[int]) -> dict[int, float]:
    """Median milliseconds of one pass over a tree of 1 … 64 nodes, a star below the root."""
    target.reset(len(prompt) + 80)
    target.prefill(torch.tensor(prompt))
    found: dict[int, list[float]] = {n: [] for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)}
    for _ in range(11):
        for n in found:
            zeros = torch.zeros(n - 1, dtype=torch.long)
            tree = build(
                torch.arange(n), torch.cat([torch.tensor([-1]), zeros]), (torch.arange(n) > 0).long(), torch.arange(n), 1, n
            )
            begin = time.perf_counter()
            target.forward(tree)
            found[n].append(1000 * (time.perf_counter() - begin))
            target.cache.truncate(len(prompt))
    return {n: statistics.median(v) for n, v in found.items()}


PRESETS: dict[str, Any] = {
    "chain 1": lambda: Chain(1),
    "chain 2": lambda: Chain(2),
    "chain 3": lambda: Chain(3),
    "depth 1, top-k 2, nodes 3": lambda: Dynamic(1, 2, 3),
    "depth 2, top-k 2, nodes 4": lambda: Dynamic(2, 2, 4),
    "depth 2, top-k 3, nodes 6": lambda: Dynamic(2, 3, 6),
    "depth 3, top-k 4, nodes 8": lambda: Dynamic(3, 4, 8),
    "depth 4, top-k 6, nodes 16": lambda: Dynamic(4, 6, 16),
    "depth 6, top-k 10, nodes 60": lambda: Dynamic(6, 10, 60),
}


def presets(target: Target, drafter: Any, prompts: list[list[int]]) -> dict[str, dict[str, float]]:
    """tau and speed-up of the decode phase over the baseline, all trees on each prompt in turn."""
    none = configured("none", target)
    growths = {"none": None} | {name: make() for name, make in PRESETS.items()}
    emitted, passes, seconds = dict.fromkeys(growths, 0), dict.fromkeys(growths, 0), dict.fromkeys(growths, 0.0)
    for prompt in prompts:
        for name, growth in growths.items():
            if growth is not None:
                drafter.growth, drafter.nodes = growth, growth.nodes
            steps = generate(target, none if growth is None else drafter, prompt)[1]
            emitted[name] += sum(len(s.tokens) for s in steps)
            passes[name] += len(steps)
            seconds[name] += sum(s.draft_s + s.target_s + s.verify_s + s.rest_s for s in steps)
    speed = {name: emitted[name] / seconds[name] for name in growths}
    return {n: {"tau": emitted[n] / passes[n], "speed_up": speed[n] / speed["none"]} for n in growths if n != "none"}


def main(folder: Path) -> None:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = compose("run", ["data.limit=4"])
    target, chat = instantiate(config.model).load()
    questions = instantiate(config.dataset).load()[:PROMPTS]
    prompts = [chat.encode([{"role": "user", "content": q.turns[0]}]) for q in questions]
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        functions = instantiate(compose("run", ["dataset=humaneval", f"data.limit={PROMPTS}"]).dataset).load()
    code = [chat.encode([{"role": "user", "content": q.turns[0]}]) for q in functions]
    none, vanilla = configured("none", target), configured("vanilla", target)
    for drafter in (none, vanilla):
        generate(target, drafter, prompts[0])  # warm up
    found: dict[str, Any] = {
        "machine": measure.hardware(target.device),
        "versions": measure.versions(),
        "commit": measure.commit(),
        "dtype": str(target.dtype),
        "overhead": {
            name: overhead(target, configured(name, target), prompts)
            for name in ("vanilla", "eagle1", "eagle2", "eagle2_small")
        },
        "generate": against_transformers(target, none, prompts),
        "assisted_generate": against_transformers(target, vanilla, prompts, vanilla.lm.model),  # type: ignore[attr-defined]
        "target_pass_ms": target_pass(target, prompts[0]),
        "presets": presets(target, configured("eagle2", target), code),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "benchmarks.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
