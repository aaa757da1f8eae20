"""Windows of a text, in which a draft will not know the target's newest states: masks of Beagle's and MoA's training."""

import torch
from torch import Tensor

from specbench.engine.interface import Batch


def random_windows(batch: Batch, shortest: int, longest: int) -> Tensor:
    """[B, T] position of its sequence at which each query's window begins; windows end to end, of random lengths.

    The first window of a row begins before it. Where a sequence begins inside a window, its queries attend to everything
    before them up to the next one.
    """
    rows, length = batch.tokens.shape
    device = batch.tokens.device
    lengths = torch.randint(shortest, longest + 1, (rows, length), device=device)
    passed = (torch.rand(rows, 1, device=device) * lengths[:, :1]).long()
    begins = lengths.cumsum(1) - passed  # [B, T] columns at which windows begin, except the row's first
    column = torch.arange(length, device=device).expand(rows, length).contiguous()
    past = torch.searchsorted(begins, column, right=True)  # [B, T] windows begun up to here
    last = torch.cat([begins.new_full((rows, 1), -1), begins], 1).gather(1, past)
    start = last - (0 if batch.starts is None else batch.starts)
    return torch.where(start < 0, batch.positions, start)


def window_starts(positions: Tensor, window: int, offset: int) -> Tensor:
    """The first position of each position's window; its own before the first whole window. [B, T] -> [B, T]"""
    return torch.where(positions < offset, positions, positions - (positions - offset) % window)


def early_mask(batch: Batch, window: int, offset: int) -> Tensor:
    """[B, T, T] bool: a query attends to the states before its window, of its own sequence.

    length 6, window 2, offset 1      . . . . . .
                                      x . . . . .
                                      x . . . . .
                                      x x x . . .
                                      x x x . . .
                                      x x x x x .
    """
    starts = window_starts(batch.positions, window, offset)
    return batch.restrict_mask(batch.positions[:, None, :] < starts[:, :, None])


def late_mask(batch: Batch, window: int, offset: int) -> Tensor:
    """[B, T, 2 T] bool: true states as in `early_mask`, then predicted ones of the same window, strictly before."""
    true = early_mask(batch, window, offset)
    before = batch.positions[:, None, :] < batch.positions[:, :, None]
    return torch.cat([true, batch.restrict_mask(before) & ~true], -1)
