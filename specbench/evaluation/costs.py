"""What the engine and its drafters cost: functions of a target and a drafter, each of which takes one repetition.

    overhead              what the loop adds to the forwards of target and drafter
    against_transformers  the same greedy answers by Transformers' own `generate`, both sides in turn
    drafting              where drafting goes: LM head, the drafter's own layers, growth and caches
    training              seconds, tokens a second and peak memory of a training step

What is wrapped to be timed is put back, so these may run between generations; `training` trains, and a peak of memory
cannot be taken back: it belongs into a process of its own (`specbench.evaluation.isolated`). Knows no concrete drafter.
"""

import gc
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from transformers import GenerationConfig

from specbench.common.errors import SpecBenchError
from specbench.common.timing import Clock, PeakMemory
from specbench.engine.backends.packed_linear import unpacked
from specbench.engine.decode import Limits, Prefill, decode
from specbench.engine.interface import Batch, Step
from specbench.engine.pretrained import quiet
from specbench.engine.sampling import Sampler
from specbench.engine.target import Target
from specbench.evaluation.runner import BoundDrafter

SEQUENCES, LENGTH, VOCABULARY = 8, 256, 8192  # of a training batch; ids that its classification loss runs over
STEPS = 5  # training steps, of which the median counts
Prompts = Sequence[list[int]]
Timed = tuple[Any, str, str]  # whose function, its name, the part that its seconds belong to


def overhead(target: Target, bound: BoundDrafter, prompts: Prompts, tokens: int) -> dict[str, float]:
    """What of the cycles is neither a forward of the target nor one of the drafter.

    Returns:
        share: of the cycles' time. ms_per_cycle: milliseconds of it.
    """
    clock = Clock(target.device)
    ours = [(target, "run", "forward"), (target.head, "forward", "forward")]
    theirs = [(owner, name, "forward") for owner, name, _ in _forwards(target, bound)]
    with _timed([*ours, *theirs], clock) as seconds:
        steps, inside = _steps(target, bound, prompts, tokens, clock, seconds)
    whole = sum(s.draft_s + s.target_s + s.verify_s + s.rest_s for s in steps)
    outside = whole - inside["forward"]
    return {"share": outside / whole, "ms_per_cycle": 1000 * outside / len(steps)}


def assistance(bound: BoundDrafter) -> dict[str, Any]:
    """What Transformers' `generate` is told so that it drafts as a contender does; nothing if it cannot.

    A draft model must be a whole language model and its candidates a chain; see `Drafter.generation`.
    """
    return {} if bound.rule.simulated else dict(bound.drafter.generation)


def against_transformers(target: Target, bound: BoundDrafter, prompts: Prompts, tokens: int) -> dict[str, float]:
    """Greedy answers of as many tokens by this engine and by Transformers' `generate`, prompt by prompt in turn.

    The baseline stands against plain generation, a draft model against assisted generation with as long a chain, prompt
    lookup against Transformers' own.

    Returns:
        ours, theirs: tokens a second, prefill included. ratio: of the two. identical: share of answers with the same ids.
    """
    clock, more = Clock(target.device), assistance(bound)
    emitted, same, ours, theirs = 0, 0, 0.0, 0.0
    for number, prompt in enumerate([prompts[0], *prompts]):
        begin = clock()
        answer = _answer(target, bound, prompt, tokens)
        middle = clock()
        with _generating(target, more, bound.drafter.passes) as generate:
            prepared = clock()
            found = generate(prompt, len(answer))
            end = clock()
        if number:  # the first one warms up
            emitted, same = emitted + len(answer), same + (found == answer)
            ours, theirs = ours + middle - begin, theirs + end - prepared
    return {"ours": emitted / ours, "theirs": emitted / theirs, "ratio": theirs / ours, "identical": same / len(prompts)}


def _answer(target: Target, bound: BoundDrafter, prompt: list[int], tokens: int) -> list[int]:
    events = decode(target, bound.drafter, prompt, Limits(tokens), bound.rule, Sampler())
    return [token for e in events for token in ([e.token] if isinstance(e, Prefill) else e.tokens)]


@contextmanager
def _generating(target: Target, more: Mapping[str, Any], gamma: int) -> Iterator[Callable[[list[int], int], list[int]]]:
    """Transformers' greedy generation of so many tokens. more: it is told, see `assistance`.

    What the models' own generation configurations want would come back wherever a setting is None, as the stop token is:
    these are set aside meanwhile.
    """
    models = [target.model, *(more[key] for key in more if key == "assistant_model")]
    kept = [model.generation_config for model in models]
    fixed = {
        "num_assistant_tokens": gamma,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }

    def generate(prompt: list[int], tokens: int) -> list[int]:
        ids = torch.tensor([prompt], device=target.device)
        settings = GenerationConfig(do_sample=False, max_new_tokens=tokens)
        out = target.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings, **more)
        found: list[int] = out[0, len(prompt) :].tolist()
        return found

    try:
        for model in models:
            model.generation_config = GenerationConfig(do_sample=False, **fixed)
        with quiet(), unpacked(models):
            yield generate
    finally:
        for model, own in zip(models, kept, strict=True):
            model.generation_config = own


def drafting(target: Target, bound: BoundDrafter, prompts: Prompts, tokens: int) -> dict[str, float]:
    """Milliseconds of drafting a cycle, and what it goes into.

    Returns:
        ms: a cycle. head, network, rest: shares of it; the rest is growing trees and keeping caches.
    """
    clock = Clock(target.device)
    # The target multiplies the same head: the outermost function counts, so that its passes stay apart.
    with _timed([(target, "forward", "target"), *_forwards(target, bound)], clock) as seconds:
        steps, inside = _steps(target, bound, prompts, tokens, clock, seconds)
    whole = sum(step.draft_s for step in steps)
    head, network = (inside.get(part, 0.0) / whole for part in ("head", "network"))
    return {"ms": 1000 * whole / len(steps), "head": head, "network": network, "rest": 1 - head - network}


def _forwards(target: Target, bound: BoundDrafter) -> list[Timed]:
    """What a drafter multiplies, and layers of the target that it runs on top of its own, or instead of any."""
    return [*bound.drafter.timed_functions(), (target, "tail", "network"), (target, "subset", "network")]


@contextmanager
def _timed(functions: Iterable[Timed], clock: Clock) -> Iterator[dict[str, float]]:
    """Seconds inside some functions, by part; of calls inside one another the outermost counts."""
    functions = list(functions)
    seconds = {part: 0.0 for _, _, part in functions}
    inside = False

    def around(function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            if inside:
                return function(*args, **kwargs)
            inside, begin = True, clock()
            try:
                return function(*args, **kwargs)
            finally:
                seconds[part] += clock() - begin
                inside = False

        return timed

    with ExitStack() as undo:
        for owner, name, part in functions:
            undo.callback(_put_back, owner, name, vars(owner).get(name))
            object.__setattr__(owner, name, around(getattr(owner, name), part))
        yield seconds


def _put_back(owner: Any, name: str, before: Any) -> None:
    """before: what stood on the instance itself; None where its class had the function."""
    if before is None:
        object.__delattr__(owner, name)
    else:
        object.__setattr__(owner, name, before)


def _steps(
    target: Target, bound: BoundDrafter, prompts: Prompts, tokens: int, clock: Clock, seconds: dict[str, float]
) -> tuple[list[Step], dict[str, float]]:
    """The cycles of some answers, and what `seconds` grew by in them, prefill aside."""
    found: list[Step] = []
    inside = dict.fromkeys(seconds, 0.0)
    for number, prompt in enumerate([prompts[0], *prompts]):
        events = decode(target, bound.drafter, prompt, Limits(tokens), bound.rule, Sampler(), clock=clock)
        next(events)
        before = dict(seconds)
        steps = [event for event in events if isinstance(event, Step)]
        if number:  # the first one warms up
            found += steps
            inside = {part: inside[part] + seconds[part] - before[part] for part in seconds}
    if not found:
        raise SpecBenchError("there was no cycle to measure; raise decode.max_new_tokens, or model.max_context")
    return found, inside


def training(target: Target, drafter: Any) -> dict[str, float]:
    """A training step, from forward to update, on random text of 8 x 256 tokens and random states.

    Returns:
        peak: bytes above what was held before the first step. seconds: a step. tokens_per_s. parameters: trained.
    """
    own = [p for p in drafter.parameters() if p.requires_grad]
    if not own:
        raise SpecBenchError("this drafter has nothing to train")
    drafter.train()
    optimizer, clock, memory = torch.optim.AdamW(own), Clock(target.device), PeakMemory(target.device)
    tokens = torch.randint(target.vocab_size, (SEQUENCES, min(LENGTH, target.max_context)), device=target.device)
    states = torch.randn(*tokens.shape, target.hidden_size, dtype=target.dtype, device=target.device)
    everywhere = torch.ones_like(tokens, dtype=torch.bool)
    ids = torch.arange(min(VOCABULARY, target.vocab_size), device=target.device)
    gc.collect()
    memory.start()
    before, seconds = memory.bytes(), []
    for _ in range(STEPS + 1):
        begin = clock()
        batch = Batch(tokens, states, everywhere, everywhere, ids)
        if drafter.taps.kv or drafter.taps.hidden:
            batch.states, batch.hidden, batch.kv = target.tapped(tokens, drafter.taps)
        drafter.loss(batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(clock() - begin)
    middle = statistics.median(seconds[1:])  # the first one warms up
    return {
        "peak": memory.bytes() - before,
        "seconds": middle,
        "tokens_per_s": tokens.numel() / middle,
        "parameters": sum(p.numel() for p in own),
    }
