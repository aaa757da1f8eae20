"""Over which ids a training's classification loss runs: the frequent ones or some of them, and some of the others.

Ids of the batch's own text, among them all labels, are always there; others by chance. A loss against the text's tokens
would learn probabilities that are too low for ids that are often drawn and too high for rare ones, unless the logit of each
id gets minus the log of its chance, as in sampled softmax (Jean et al., arXiv:1412.2007): the sum over drawn ids is then an
unbiased estimate of that over all. A loss against the target's probabilities over the same ids needs no such correction,
unless the drafter does not see all that they depend on.
"""

import math
from typing import Any

import torch
from torch import Tensor

from specbench.engine.interface import Batch
from specbench.training.corpus_reader import CorpusReader
from specbench.training.recipe import Phase, TrainSettings


def draw(ids: Tensor, text: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`count` of some ids: those that occur in a text, and others at random; all, as they stand, if there are no more.

    Returns:
        ids [K], and [K] minus the log of the chance with which each was drawn.
    """
    if count >= len(ids):
        return ids, torch.zeros(len(ids), device=ids.device)
    in_text = torch.isin(ids, text)
    others, missing = ids[~in_text], max(0, count - int(in_text.sum()))
    drawn = torch.cat([ids[in_text], others[torch.randperm(len(others), device=ids.device)[:missing]]])
    bias = torch.zeros(len(drawn), device=ids.device)
    if missing:
        bias[-missing:] = math.log(len(others) / missing)
    return drawn, bias


def _all_ids(corpus: CorpusReader, count: int) -> Tensor:
    """All ids of a vocabulary: those of the corpus, most frequent first, and those that it lacks. -> [count]"""
    occurring = corpus.frequent(None)
    absent = torch.ones(count, dtype=torch.bool).index_fill(0, occurring, False)
    return torch.cat([occurring, absent.nonzero().flatten()])


class LossVocabulary:
    """Ids, the corpus's most frequent ones first: as many as any phase needs; all, if others are drawn beside them.

    Ids that the corpus lacks are among the others, too: never in a loss, they would keep the probabilities of the weights
    that training begins with, and be drafted in vain.
    """

    def __init__(self, corpus: CorpusReader, settings: TrainSettings, drafter: Any, device: torch.device):
        self.settings = settings
        self.ids = torch.empty(0, device=device)
        counts = [count for phase in settings.phases if (count := settings.vocabulary_in(phase)) is not None]
        if counts:
            self.ids = corpus.frequent(max(counts))
            if settings.others:  # of the target's vocabulary: a head of the drafter's own may have fewer ids
                self.ids = _all_ids(corpus, drafter.embedding.num_embeddings)
            self.ids = self.ids.to(device)

    def confine(self, batch: Batch, phase: Phase) -> None:
        """Set the ids of a batch's loss and their bias, drawn anew for each; leave both as they are for all ids."""
        settings, count = self.settings, self.settings.vocabulary_in(phase)
        if count is None:
            return
        text = batch.tokens[batch.valid]
        frequent, rest = self.ids[:count], self.ids[count:]
        parts = [draw(frequent, text, len(frequent) if settings.sampled is None else settings.sampled)]
        parts += [draw(rest, text, settings.others)] if settings.others else []
        batch.vocabulary, batch.vocabulary_bias = map(torch.cat, zip(*parts, strict=True))
