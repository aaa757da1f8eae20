"""The loop: one token's way from the prompt to its acceptance. Knows no concrete drafter, dataset or config."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from specbench.common.errors import SpecBenchError
from specbench.common.types import Repetitions, Seed, Tokens
from specbench.engine.drafter import Drafter
from specbench.engine.interface import Step, VerificationTarget
from specbench.engine.sampling import Sampler
from specbench.engine.verify import Rule, Verifier, VerifyConfig

Clock = Callable[[], float]


@dataclass(frozen=True)
class RunSettings:
    """How prompts are decoded.

    Attributes:
        max_new_tokens: per turn. seed: of sampling; every generation derives its own from it.
        warmup: untimed generations before the first row, by baseline and drafter each.
    """

    max_new_tokens: Tokens = 1024
    seed: Seed = 0
    warmup: Repetitions = 1


@dataclass(frozen=True)
class Limits:
    """Where a generation ends: at the first stop id (which is emitted), at the cap, or at the context's end."""

    max_new_tokens: int
    stop_ids: tuple[int, ...] = ()
    max_context: int = 1 << 30

    def cut(self, tokens: list[int], already: int) -> tuple[list[int], bool]:
        """The part of newly emitted tokens that counts, and whether the generation ends with it."""
        kept = tokens[: self.max_new_tokens - already]
        for i, token in enumerate(kept):
            if token in self.stop_ids:
                return kept[: i + 1], True
        return kept, already + len(kept) >= self.max_new_tokens

    def within(self, prompt: int, room: int) -> "Limits":
        """The same behind a prompt of `prompt` tokens in a context of `room`. Raises `SpecBenchError` if that is full."""
        room = min(room, self.max_context)
        if not prompt:
            raise SpecBenchError("the prompt is empty; give it at least one token")
        if prompt >= room:
            raise SpecBenchError(
                f"a prompt of {prompt} tokens in a context of {room}; shorten it or raise model.max_context"
            )
        return Limits(min(self.max_new_tokens, room - prompt), self.stop_ids)


@dataclass(frozen=True)
class Prefill:
    """What precedes the first cycle: the first token, and the seconds it took, of which `draft_s` the drafter's."""

    token: int
    seconds: float
    draft_s: float

    @property
    def tokens(self) -> list[int]:
        """As `Step` has them."""
        return [self.token]


@torch.inference_mode()
def decode(
    target: VerificationTarget,
    drafter: Drafter,
    prompt: list[int],
    limits: Limits,
    rule: Rule,
    sampler: Sampler,
    generator: torch.Generator | None = None,
    clock: Clock = time.perf_counter,
) -> Iterator[Prefill | Step]:
    """Decode one prompt: yields one `Prefill`, then one `Step` a cycle; their tokens in turn are the answer.

    `clock` must wait for the device. The drafter draws from the generator, verification from one seeded by it. Raises
    `SpecBenchError` for a prompt that is empty or leaves no room, NaN in logits, or a drafter that cannot be replayed.
    """
    begin = clock()
    limits = limits.within(len(prompt), target.max_context)
    _reset(target, drafter, capacity=len(prompt) + limits.max_new_tokens + drafter.nodes)
    verifier = _new_verifier(target, rule, sampler, generator)
    states = target.prefill(torch.tensor(prompt, device=target.device))
    root = verifier.first(states)
    before = clock()
    drafter.observe(states, root)
    now = clock()
    yield Prefill(root, seconds=now - begin, draft_s=now - before)
    emitted, over = 1, limits.cut([root], 0)[1]
    while not over:
        t_begin = clock()
        tree = drafter.propose(root, sampler, generator)  # draft tokens below the root
        t_drafted = clock()
        states = target.forward(tree)  # one pass over root and nodes, ancestors-only mask
        t_computed = clock()
        verified = verifier.verify(tree, states)  # the accepted path and one bonus
        t_verified = clock()
        tokens, over = limits.cut([*verified.tokens, verified.bonus], emitted)
        emitted, accepted = emitted + len(tokens), len(tokens) - 1
        kept = verified.rows(target.device)
        t_emitted = clock()
        if drafter.observes_trees:
            drafter.observe_tree(tree, states)
        seen = states.select(kept)  # before keeping: tapped keys and values are views of the rows that it moves
        t_selected = clock()
        target.keep(kept)  # the root's and the path's cache rows stay, the others go
        t_kept = clock()
        if not over:
            drafter.observe(seen, verified.bonus)  # what the next draft may condition on
        t_observed = clock()
        yield Step(
            tokens=tokens,
            nodes=len(tree) - 1,
            drafted=verified.drafted if len(tokens) > len(verified.path) else accepted,  # cut inside the path: no deeper
            accepted=accepted,
            ranks=verified.ranks[:accepted],
            passes=tree.passes,
            draft_s=(t_drafted - t_begin) + (t_selected - t_emitted) + (t_observed - t_kept),
            target_s=(t_computed - t_drafted) + (t_kept - t_selected),
            verify_s=t_verified - t_computed,
            rest_s=(t_emitted - t_verified) + (clock() - t_observed),
        )
        root = verified.bonus


def _reset(target: VerificationTarget, drafter: Drafter, capacity: int) -> None:
    """Make target and drafter ready for a sequence of at most `capacity` rows."""
    if drafter.observes_trees and target.replayed:
        raise SpecBenchError(
            f"drafter={drafter.name} learns from the target's logits of rejected drafts, which a replay does not have; "
            "decode it"
        )
    target.reset(capacity, drafter.taps.observing() if drafter.observes_trees else drafter.taps)
    drafter.reset(capacity)


def _new_verifier(target: VerificationTarget, rule: Rule, sampler: Sampler, generator: torch.Generator | None) -> Verifier:
    """The verifier of a generation, with a seed drawn from its generator."""
    seed = None if generator is None else int(torch.randint(1 << 62, (), generator=generator, device=generator.device))
    return target.verifier(VerifyConfig(rule, sampler, seed))
