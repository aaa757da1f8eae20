"""What the engine and its drafters cost: each public function measures one repetition.

    overhead              time of the loop outside the forwards of target and drafter
    against_transformers  the same greedy answers by Transformers' own `generate`, in turn
    against_peer          the same by another engine, beside plain decoding
    beside_work           the same here while another process keeps a core busy
    quality               perplexity of a changed target on its original's answers, KL to it, and how often both agree
    bandwidth             time in which the machine reads what a plain pass reads
    drafting              shares of drafting time: LM head, the drafter's own layers, growth and caches
    training              seconds, tokens a second and peak memory of a training step

Functions that are wrapped for timing are restored, so these may run between generations; `training` changes the drafter
and belongs into a process of its own (`specbench.evaluation.isolated`). Knows no concrete drafter.
"""

import gc
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from transformers import GenerationConfig

from specbench.common.errors import SpecBenchError
from specbench.common.timing import Clock, PeakMemory
from specbench.engine.backends import weight_only
from specbench.engine.backends.packed_linear import unpacked
from specbench.engine.decode import Limits, decode
from specbench.engine.interface import Batch, Step
from specbench.engine.peer import Peer
from specbench.engine.pretrained import quiet
from specbench.engine.sampling import Sampler
from specbench.engine.target import Target
from specbench.evaluation.drift import forced
from specbench.evaluation.runner import BoundDrafter

SEQUENCES, LENGTH, VOCABULARY = 8, 256, 8192  # of a training batch; ids that its classification loss runs over
STEPS = 5  # training steps, of which the median counts
READS, READ_BYTES = 11, 1 << 28  # of which the fastest counts; the most bytes of one, more than caches hold
GPU_READS = 16  # in a row on a GPU, where starting one and waiting for it takes a part of its time
Prompts = Sequence[list[int]]
Generate = Callable[[list[int], int], list[int]]  # a prompt, number of tokens -> an answer's ids
SPIN = "import os; parent = os.getppid(); print(flush=True)\nwhile os.getppid() == parent: pass"  # ends with this process
Timed = tuple[Any, str, str]  # owner of a function, its name, the part that its seconds belong to


def overhead(target: Target, bound: BoundDrafter, prompts: Prompts, tokens: int) -> dict[str, float]:
    """Time of the cycles outside forwards of target and drafter. share: of the cycles' time. ms_per_cycle: milliseconds."""
    clock = Clock(target.device)
    # A fused forward computes the logits, too, without a call of `run` or of the head.
    of_target = [(target, "score", "forward"), (target, "run", "forward"), (target.head, "forward", "forward")]
    of_drafter = [(owner, name, "forward") for owner, name, _ in bound.drafter.timed_functions()]
    with _timed([*of_target, *of_drafter], clock) as seconds:
        steps, inside = _steps(target, bound, prompts, tokens, clock, seconds)
    total = sum(s.draft_s + s.target_s + s.verify_s + s.rest_s for s in steps)
    outside = total - inside["forward"]
    return {"share": outside / total, "ms_per_cycle": 1000 * outside / len(steps)}


def assistance(bound: BoundDrafter) -> dict[str, Any]:
    """Arguments with which Transformers' `generate` drafts as this drafter does, see `Drafter.generation`; else empty."""
    return {} if bound.rule.simulated else dict(bound.drafter.generation)


def against_transformers(target: Target, bound: BoundDrafter, prompts: Prompts, tokens: int) -> dict[str, float]:
    """Greedy answers of as many tokens by this engine and by Transformers' `generate`, prompt by prompt in turn.

    The baseline is compared with plain generation, a draft model with assisted generation of the same chain length,
    prompt lookup with Transformers' own.

    Returns:
        ours, theirs: tokens a second, prefill included. ratio: of the two. identical: share of answers with the same ids.
    """
    arguments = assistance(bound)
    return _in_turn(target, bound, prompts, tokens, lambda: _generating(target, arguments, bound.drafter.passes))


def against_peer(target: Target, plain: BoundDrafter, peer: Peer, prompts: Prompts, tokens: int) -> dict[str, float]:
    """The same of plain decoding here and of another engine, which decodes plainly or by its own prompt lookup."""
    return _in_turn(target, plain, prompts, tokens, lambda: nullcontext(peer.greedy))


def beside_work(target: Target, bound: BoundDrafter, prompts: Prompts, tokens: int) -> dict[str, float]:
    """Greedy decoding alone, and while another process keeps a core busy, prompt by prompt in turn.

    Returns:
        alone, beside: tokens a second, prefill included. ratio: of the second to the first.
    """

    @contextmanager
    def busy() -> Iterator[Generate]:
        with subprocess.Popen([sys.executable, "-c", SPIN], stdout=subprocess.PIPE) as process:
            try:
                assert process.stdout is not None
                process.stdout.readline()  # it runs
                yield lambda prompt, count: _answer(target, bound, prompt, count)
            finally:
                process.kill()

    speeds = _in_turn(target, bound, prompts, tokens, busy)
    return {"alone": speeds["ours"], "beside": speeds["theirs"], "ratio": speeds["theirs"] / speeds["ours"]}


def _in_turn(
    target: Target,
    bound: BoundDrafter,
    prompts: Prompts,
    tokens: int,
    other: Callable[[], AbstractContextManager[Generate]],
) -> dict[str, float]:
    """See `against_transformers`. other: opens what generates there; opening is not timed."""
    clock = Clock(target.device)
    emitted, same, ours, theirs = 0, 0, 0.0, 0.0
    for number, prompt in enumerate([prompts[0], *prompts]):
        begin = clock()
        answer = _answer(target, bound, prompt, tokens)
        middle = clock()
        with other() as generate:
            prepared = clock()
            generated = generate(prompt, len(answer))
            end = clock()
        if number:  # the first one warms up
            emitted, same = emitted + len(answer), same + (generated == answer)
            ours, theirs = ours + middle - begin, theirs + end - prepared
    return {"ours": emitted / ours, "theirs": emitted / theirs, "ratio": theirs / ours, "identical": same / len(prompts)}


def _answer(
    target: Target, bound: BoundDrafter, prompt: list[int], tokens: int, stop_ids: tuple[int, ...] = ()
) -> list[int]:
    events = decode(target, bound.drafter, prompt, Limits(tokens, stop_ids), bound.rule, Sampler())
    return [token for e in events for token in e.tokens]


@contextmanager
def _generating(target: Target, arguments: Mapping[str, Any], gamma: int) -> Iterator[Generate]:
    """Transformers' greedy generation after a prompt, of a number of tokens. arguments: see `assistance`.

    The models' own generation configurations are replaced meanwhile, since `generate` takes from them every setting that
    is None, such as the stop token.
    """
    models = [target.model, *(arguments[key] for key in arguments if key == "assistant_model")]
    configs = [model.generation_config for model in models]
    fixed = {
        "num_assistant_tokens": gamma,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }

    def generate(prompt: list[int], tokens: int) -> list[int]:
        ids = torch.tensor([prompt], device=target.device)
        settings = GenerationConfig(do_sample=False, max_new_tokens=tokens)
        out = target.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings, **arguments)
        return out[0, len(prompt) :].tolist()

    try:
        for model in models:
            model.generation_config = GenerationConfig(do_sample=False, **fixed)
        with quiet(), unpacked(models):
            yield generate
    finally:
        for model, config in zip(models, configs, strict=True):
            model.generation_config = config


@torch.inference_mode()
def quality(target: Target, original: Target, plain: BoundDrafter, prompts: Prompts, tokens: int) -> dict[str, float]:
    """A quantised or adapted target beside its original, both behind every prefix of the original's own greedy answers.

    Returns:
        perplexity: of these answers. original: by the original itself. kl: mean of KL(original || target), in nats a token.
        agreement: share of ids that are the most likely of both. tokens: number of ids.
    """
    losses, same, divergence = [], [], []
    for prompt in prompts:
        answer = _answer(original, plain, prompt, tokens, original.stop_ids)
        ids = torch.tensor(answer, device=target.device)[:, None]
        ours, theirs = (forced(model, prompt, answer).log_softmax(-1) for model in (target, original))
        losses.append(torch.stack([-score.gather(1, ids)[:, 0] for score in (ours, theirs)]))
        same.append(ours.argmax(-1) == theirs.argmax(-1))
        divergence.append((theirs.exp() * (theirs - ours)).sum(-1))
    perplexity, own = torch.cat(losses, 1).mean(1).exp().tolist()
    kl, agreed = float(torch.cat(divergence).mean()), torch.cat(same)
    agreement = float(agreed.float().mean())
    return {"perplexity": perplexity, "original": own, "kl": max(kl, 0.0), "agreement": agreement, "tokens": len(agreed)}


@torch.inference_mode()
def bandwidth(target: Target, prompts: Prompts, tokens: int) -> dict[str, float]:
    """The least time of a plain pass: reading, once, the weights of layers and head, and the cache in mid-answer.

    Weights count as they are read: quantised ones packed, those that OpenVINO has in bfloat16 for narrow passes at two
    bytes, of a mixture of experts all. Reading is timed by the maximum of as many bytes, with as many threads; the fastest
    of several times counts.

    Returns:
        bytes: of a pass. gb_per_s: 10^9 bytes read a second. ms: a token. tokens_per_s.
    """
    halved = 2 if getattr(target.fused, "halves", False) else 1
    layers = sum(p.nbytes for p in target.decoder.layers.parameters())
    if target.quantised is None:
        layers //= halved
    else:
        layers = int(layers * weight_only.bits(target.quantised) / weight_only.FLOAT_BITS)
    kept = sum(map(len, prompts)) // len(prompts) + tokens // 2
    size = layers + target.head.weight.nbytes // halved + _cache_bytes(target, kept)
    sample = torch.ones(min(size, READ_BYTES) // 4, device=target.device)
    clock, seconds, times = Clock(target.device), [], GPU_READS if target.device.type == "cuda" else 1
    for _ in range(READS):
        begin = clock()
        for _ in range(times):
            sample.amax()
        seconds.append((clock() - begin) / times)
    rate = sample.nbytes / min(seconds)
    return {"bytes": size, "gb_per_s": rate / 1e9, "ms": 1000 * size / rate, "tokens_per_s": rate / size}


def _cache_bytes(target: Target, rows: int) -> int:
    """Bytes of keys and values of so many rows."""
    target.reset(rows)
    target.prefill(torch.zeros(rows, dtype=torch.long, device=target.device))
    return sum(part.nbytes for layer in range(target.layers) for part in target.cache.rows(layer, 0, rows))


def drafting(target: Target, bound: BoundDrafter, prompts: Prompts, tokens: int) -> dict[str, float]:
    """Drafting time. ms: a cycle. head, network, rest: shares of it; the rest is growing trees and keeping caches."""
    clock = Clock(target.device)
    # The target calls the same head: since the outermost function counts, its calls are not counted as drafting.
    with _timed([(target, "forward", "target"), *bound.drafter.timed_functions()], clock) as seconds:
        steps, inside = _steps(target, bound, prompts, tokens, clock, seconds)
    total = sum(step.draft_s for step in steps)
    head, network = (inside.get(part, 0.0) / total for part in ("head", "network"))
    return {"ms": 1000 * total / len(steps), "head": head, "network": network, "rest": 1 - head - network}


@contextmanager
def _timed(functions: Iterable[Timed], clock: Clock) -> Iterator[dict[str, float]]:
    """Inside, measures seconds in these functions, by part; of nested calls the outermost counts."""
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
            if name in vars(owner):  # set on the instance itself, else inherited from its class
                undo.callback(object.__setattr__, owner, name, vars(owner)[name])
            else:
                undo.callback(object.__delattr__, owner, name)
            object.__setattr__(owner, name, around(getattr(owner, name), part))
        yield seconds


def _steps(
    target: Target, bound: BoundDrafter, prompts: Prompts, tokens: int, clock: Clock, seconds: dict[str, float]
) -> tuple[list[Step], dict[str, float]]:
    """The cycles of some answers, and by how much `seconds` grew in them, prefill excluded."""
    all_steps: list[Step] = []
    inside = dict.fromkeys(seconds, 0.0)
    for number, prompt in enumerate([prompts[0], *prompts]):
        events = decode(target, bound.drafter, prompt, Limits(tokens), bound.rule, Sampler(), clock=clock)
        next(events)
        before = dict(seconds)
        steps = [event for event in events if isinstance(event, Step)]
        if number:  # the first one warms up
            all_steps += steps
            inside = {part: inside[part] + seconds[part] - before[part] for part in seconds}
    if not all_steps:
        raise SpecBenchError("there was no cycle to measure; raise decode.max_new_tokens, or model.max_context")
    return all_steps, inside


def training(target: Target, drafter: Any) -> dict[str, float]:
    """A training step, from forward to update, on random text of 8 x 256 tokens and random states.

    Returns:
        peak: bytes above what was held before the first step. seconds: a step. tokens_per_s. parameters: trained.
    """
    drafter.prepare_training(target)
    parameters = [p for p in drafter.parameters() if p.requires_grad]
    if not parameters:
        raise SpecBenchError("this drafter has nothing to train")
    drafter.train()
    optimizer, clock, memory = torch.optim.AdamW(parameters), Clock(target.device), PeakMemory(target.device)
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
    median = statistics.median(seconds[1:])  # the first one warms up
    return {
        "peak": memory.bytes() - before,
        "seconds": median,
        "tokens_per_s": tokens.numel() / median,
        "parameters": sum(p.numel() for p in parameters),
    }
