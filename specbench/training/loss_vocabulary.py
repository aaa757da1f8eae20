"""Over which ids a training's classification loss runs: the frequent ones or some of them, and some of the others."""

import torch
from torch import Tensor

from specbench.engine.interface import Batch
from specbench.training.corpus_reader import CorpusReader
from specbench.training.recipe import Phase, TrainSettings


def draw(ids: Tensor, text: Tensor, count: int) -> Tensor:
    """`count` of some ids: those that occur in a text, and others at random; all, as they stand, if there are no more."""
    if count >= len(ids):
        return ids
    in_text = torch.isin(ids, text)
    others, missing = ids[~in_text], max(0, count - int(in_text.sum()))
    return torch.cat([ids[in_text], others[torch.randperm(len(others), device=ids.device)[:missing]]])


class LossVocabulary:
    """The corpus's ids, most frequent first: as many as any phase needs, or all if others are drawn beside them."""

    def __init__(self, corpus: CorpusReader, settings: TrainSettings, device: torch.device):
        self.settings = settings
        self.ids = torch.empty(0, device=device)
        counts = [count for phase in settings.phases if (count := settings.vocabulary_in(phase)) is not None]
        if counts:
            self.ids = corpus.frequent(None if settings.others else max(counts)).to(device)

    def of(self, phase: Phase, batch: Batch) -> Tensor | None:
        """The ids of a batch's loss, drawn anew for each; None for the whole vocabulary."""
        settings, count = self.settings, self.settings.vocabulary_in(phase)
        if count is None:
            return None
        text = batch.tokens[batch.valid]
        frequent, rest = self.ids[:count], self.ids[count:]
        if settings.sampled is not None:
            frequent = draw(frequent, text, settings.sampled)
        return torch.cat([frequent, draw(rest, text, settings.others)]) if settings.others else frequent
