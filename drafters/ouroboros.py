"""Ouroboros: a draft model drafts with Lookahead, and phrases of its pool lengthen the draft (arXiv:2402.13720).

    draft     x_1 … x_gamma, greedily, in passes of the draft model that hold a window and guesses (see `lookahead`)
    lengthen  K suffixes below x_gamma: the pool's latest phrases of N tokens that begin with it
    verify    all of it in one pass of the target, whose next token after x_i is y_i
    learn     phrases from the target's tokens, also after drafts that it rejected:

                  each suffix is replaced by the target's tokens at its positions
                  x_i … x_(i+N-2), y_(i+N-2) behind the first rejected draft, where y = x in between

The pool saves passes of the draft model, makes drafts longer, and carries the target's corrections back into drafting.
Nothing is trained. The draft model is `vanilla`'s: the one trained here, or any by `base.path`.

Deviations and choices: guesses are used while the window still fills. The target's phrases go into the pool behind the
suffixes it corrected, where the authors' code may replace others if a rejected draft repeats the last one's token. Equal
phrases are stored once, suffixes that begin alike share nodes. A draft ends before a stop token and gets no suffix then.
Rows of accepted drafts stay in the draft model's cache. The method is defined for greedy decoding: commands refuse a
temperature, though candidates are deterministic and Algorithm D would be lossless.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from drafters.lookahead import Level, Pool, Window
from drafters.retrieval import Remembering
from drafters.vanilla import Vanilla
from specbench.common.types import Depth, Few, Name, Seed, Width
from specbench.engine.drafter import Delegating, Drafter, State
from specbench.engine.interface import DraftTree, Sampler, Taps, TargetStates
from specbench.engine.policies import to_target_ids
from specbench.engine.sampling import argmax
from specbench.engine.target import Target
from specbench.engine.tree import Trie


class Ouroboros(Delegating, Remembering, nn.Module):
    """A draft model with a window and a pool of phrases.

    Args:
        base: the draft model; its tree policy is not used.
        gamma: tokens that it drafts. suffixes: K, phrases behind them.
        window, level, guesses: W, N and G of its Lookahead.
        state: what the pool holds when a generation begins. seed: of the window's first tokens.

    Attributes:
        text: the verified tokens, and in a cycle the drafts behind them. verified: number of the former.
        offered: the cycle's suffixes, latest first, each with its nodes.
    """

    taps = Taps(last=False, observe_top_k=1)  # its own, not the draft model's
    greedy_only = True
    observes_trees = True

    def __init__(
        self,
        name: Name,
        base: Vanilla,
        gamma: Depth = 12,
        suffixes: Few = 3,
        window: Width = 20,
        level: Level = 7,
        guesses: Width = 20,
        state: State = "none",
        seed: Seed = 0,
    ):
        nn.Module.__init__(self)
        Drafter.__init__(self, name)
        self.base, self.gamma, self.suffixes, self.state = base, gamma, suffixes, state
        self.window = Window(window, level, guesses)
        self.guesses, self.seed = guesses, seed
        self.nodes, self.passes = 1 + gamma + suffixes * (level - 1), gamma

    @property
    def weights_owner(self) -> Drafter:
        return self.base.weights_owner

    def bind(self, target: Target) -> None:
        super().bind(target)
        self.device, self.stop_ids = target.device, frozenset(target.stop_ids)
        self.clear()

    def clear(self) -> None:
        self.pool = Pool(self.guesses)

    def reset(self, capacity: int) -> None:
        Remembering.reset(self, capacity)
        self.base.cache.begin(capacity + self.window.nodes)
        self.text: list[int] = []
        self.drafts: list[int] = []
        self.verified = 0

    def observe(self, states: TargetStates, bonus: int) -> None:
        """Run the prompt; later keep the draft model's rows of accepted drafts. It has not run the bonus yet."""
        tokens = states.tokens.tolist()
        if not self.text:
            positions = torch.arange(len(tokens), device=self.device)
            self.base.lm.run(states.tokens[None], positions[None], None, self.base.cache)
            self.base.cache.keep()
            self.window.begin(bonus, tokens, self.seed)
            if self.state != "none":
                self.pool.read(tokens, self.window.level)
            self.text = [*tokens, bonus]
        else:
            accepted = tokens[1:]  # the old root was the last bonus
            self.base.cache.truncate(self.verified + min(len(accepted), len(self.drafts)))
            self.text[self.verified :] = [*accepted, bonus]
        self.verified = len(self.text)

    def propose(self, root: int, sampler: Sampler, generator: torch.Generator | None) -> DraftTree:
        """Draft `gamma` tokens with Lookahead's window, then add phrases of the pool that go on from the last one."""
        passes = 0
        while len(self.text) < self.verified + self.gamma:
            new = self._ahead()
            passes += 1
            self.text += self.emittable(new)
            if self.stop_ids & set(new):
                break
        self.drafts = drafts = self.text[self.verified : self.verified + self.gamma]
        trie = Trie(root, self.nodes)
        trie.add(drafts)
        self.offered: list[tuple[tuple[int, ...], list[int]]] = []
        if len(drafts) == self.gamma:
            for phrase in self.pool.after(drafts[-1])[: self.suffixes]:
                nodes = trie.add([*drafts, *self.emittable(phrase)])
                self.offered.append((phrase, nodes[self.gamma :]))
        return replace(trie.tree(self.device), passes=passes)

    def _ahead(self) -> list[int]:
        """One pass of the draft model: the accepted guess and the token after it. Keeps the rows of what it ran of them."""
        cache, root = self.base.cache, self.text[-1]
        trie, guessed = self.window.trie(root, map(self.emittable, self.pool.after(root)))
        states, before = self._run(self.text[cache.length : -1], trie.tree(self.device))
        logits = self.base.target_logits(torch.cat([states[:guessed], self.window.last(states)]))
        next_tokens = to_target_ids(self.base, argmax(logits)).tolist()
        path = trie.walk(next_tokens[:guessed])
        cache.keep(torch.tensor([*range(before + 1), *(before + node for node in path)], device=self.device))
        self.window.update(next_tokens[guessed:], self.pool)
        return [*(trie.tokens[node] for node in path), next_tokens[path[-1] if path else 0]]

    def _run(self, missing: list[int], tree: DraftTree) -> tuple[Tensor, int]:
        """Run tokens that the cache lacks and a tree behind them; the tree's states, and the number of missing tokens."""
        start, before = self.base.cache.length, len(missing)
        tokens, depths = tree.tokens, tree.depths
        if missing:
            tokens = torch.cat([torch.tensor(missing, device=self.device), tokens])
            depths = torch.cat([torch.arange(before, device=self.device), before + depths])
        visible = torch.ones(len(tokens), start + len(tokens), dtype=torch.bool, device=self.device).tril(start)
        visible[before:, start + before :] = tree.ancestors
        states = self.base.lm.run(tokens[None], start + depths[None], visible[None, None], self.base.cache)[0]
        return states[before:], before

    def observe_tree(self, tree: DraftTree, states: TargetStates) -> None:
        """Add the target's phrases to the pool. Target token i stands for draft i + 1."""
        target_tokens = argmax(states.logits).tolist()
        drafts, level = self.drafts, self.window.level
        uncut = [(p, nodes) for p, nodes in reversed(self.offered) if len(nodes) > level - 3]  # by a stop token
        for phrase, _ in uncut:
            del self.pool.known[drafts[-1]][phrase]
        for _, nodes in uncut:  # in this order the latest stays the latest
            self.pool.keep([drafts[-1], *(target_tokens[node] for node in [self.gamma, *nodes][: level - 1])])
        rejected = next((i for i, draft in enumerate(drafts) if target_tokens[i] != draft), len(drafts))
        for i in range(rejected, len(drafts) - level + 2):
            between = drafts[i + 1 : i + level - 1]
            if between == target_tokens[i + 1 : i + level - 1]:
                self.pool.keep([drafts[i], *between, target_tokens[i + level - 1]])
