"""A target whose greedy answer is known: it takes the place of `Target` in the loop, and runs no pass over trees.

Greedy decoding accepts exactly the target's own tokens. Once the baseline has generated an answer, one prefill of prompt
and answer yields the states that every later tree pass would compute for the tokens it keeps; the logits of other nodes
never matter. So drafting against known states accepts, cycle by cycle, what decoding accepts. Drafts can differ only where
passes of different shapes round differently: in float32 at a tie. A drafter that learns from rejected nodes
(`Drafter.observe_tree`) cannot be replayed: `decode` refuses it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from specbench.engine.interface import DraftTree, Taps, TargetStates
from specbench.engine.target import Target
from specbench.engine.verify import Verifier, VerifyConfig


class ReplayTarget:
    """Greedy decoding of one prompt, replayed for any number of drafters in turn.

    Args:
        target: its cache holds the whole text from here on, so nothing else may run on it unless `detach` was called.
        prompt, answer: ids; the answer as the baseline emitted it.
        taps: everything that any of the drafters reads.
    """

    replayed = True

    def __init__(self, target: Target, prompt: Sequence[int], answer: Sequence[int], taps: Taps):
        self.target, self.text, self.begin = target, [*prompt, *answer], len(prompt)
        self.device, self.max_context = target.device, target.max_context
        target.reset(len(self.text), taps)
        self.states = target.prefill(torch.tensor(self.text[:-1], device=self.device))  # nothing follows the last token

    def detach(self) -> "ReplayTarget":
        """Copy the states out of the target's cache: from here on the target may run again."""
        self.states = self.states.select(torch.arange(len(self.states.tokens), device=self.device))
        return self

    def reset(self, capacity: int, taps: Taps | None = None) -> None:
        self.taps = (taps or Taps()).resolve(self.target.layers)
        self.root = self.begin  # position of the root in the text

    def verifier(self, config: VerifyConfig) -> Verifier:
        return self.target.verifier(config)

    def prefill(self, tokens: Tensor) -> TargetStates:
        """The prompt's states [N, …], and one-hot logits [1, V] of the answer's first token."""
        positions = torch.arange(len(tokens), device=self.device)
        return self._states(tokens, positions, self.one_hot_logits([self.text[self.begin]]))

    def forward(self, tree: DraftTree) -> TargetStates:
        """States and next tokens of a pass at the nodes on the answer; at the others an id that no draft has."""
        tokens, parents, depths = tree.tokens.tolist(), tree.parents.tolist(), tree.depths.tolist()
        no_draft = next(i for i in range(len(tokens) + 1) if i not in tokens)
        on_answer: list[bool] = []
        next_tokens = []
        for node, (token, parent, depth) in enumerate(zip(tokens, parents, depths, strict=True)):
            rest = self.text[self.root + depth : self.root + depth + 2]  # the answer's token at this depth, and the next
            on_answer.append(node == 0 or (on_answer[parent] and rest[:1] == [token]))
            next_tokens.append(rest[1] if on_answer[node] and len(rest) > 1 else no_draft)
        positions = (self.root + tree.depths).clamp(max=len(self.text) - 2)
        return self._states(tree.tokens, positions, self.one_hot_logits(next_tokens))

    def keep(self, nodes: Tensor) -> None:
        self.root += len(nodes)

    def one_hot_logits(self, tokens: list[int]) -> Tensor:
        """Logits [N, V] whose argmax is these ids."""
        ids = torch.tensor(tokens, device=self.device)
        return torch.zeros(len(tokens), self.target.vocab_size, device=self.device).scatter_(1, ids[:, None], 1.0)

    def _states(self, tokens: Tensor, positions: Tensor, logits: Tensor) -> TargetStates:
        known = self.states
        return TargetStates(
            tokens=tokens,
            positions=positions,
            last=known.last[positions],
            logits=logits,
            hidden={i: known.hidden[i][positions] for i in self.taps.hidden},
            kv={i: (known.kv[i][0][:, positions], known.kv[i][1][:, positions]) for i in self.taps.kv},
        )
