"""The same sequences padded and packed, and the acceptance that a table of drafts from every position stands for."""

from dataclasses import replace

import torch
from drafting import batch_of

from specbench.engine.interface import Batch
from specbench.training.replay import AcceptanceCounts

LENGTHS = (9, 14, 7, 11)
ROWS = ((0, 1), (2, 3))  # which of them share a row


def padded(target, lengths=LENGTHS, seed=0):
    """One sequence a row; behind it lies what would spoil any number it got into."""
    batch = batch_of(target, len(lengths), max(lengths), seed)
    valid = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]
    batch.states[~valid] = 1e3
    for k, v in batch.kv.values():
        k[(~valid)[:, None].expand(k.shape[:3])] = v[(~valid)[:, None].expand(v.shape[:3])] = 1e3
    return replace(batch, valid=valid, scored=valid & (torch.arange(max(lengths)) > 1))


def packed(batch, rows=ROWS):
    """The valid parts of a padded batch, several to a row, end to end."""
    lengths = batch.valid.sum(1).tolist()
    width = max(sum(lengths[i] for i in row) for row in rows)

    def lay(x, dim):  # x [B, …, T, …] with T at `dim` -> [rows, …, width, …]
        out = []
        for row in rows:
            parts = torch.cat([x[i].narrow(dim - 1, 0, lengths[i]) for i in row], dim - 1)
            shape = list(parts.shape)
            shape[dim - 1] = width - shape[dim - 1]
            out.append(torch.cat([parts, parts.new_zeros(shape)], dim - 1))
        return torch.stack(out)

    starts = []
    for row in rows:
        ends = torch.tensor([0, *(lengths[i] for i in row)]).cumsum(0).tolist()
        own = [torch.full((lengths[i],), at) for i, at in zip(row, ends, strict=False)]
        starts.append(torch.cat([*own, torch.full((width - ends[-1],), ends[-1])]))
    return Batch(
        tokens=lay(batch.tokens, 1),
        states=lay(batch.states, 1),
        valid=lay(batch.valid, 1),
        scored=lay(batch.scored, 1),
        hidden={i: lay(h, 1) for i, h in batch.hidden.items()},
        kv={i: (lay(k, 2), lay(v, 2)) for i, (k, v) in batch.kv.items()},
        starts=torch.stack(starts),
    )


@torch.no_grad()
def walked(drafter, batch, answers, steps):
    """What replaying chains of `steps` over a batch's answers counts, read off the table of `drafts`.

    answers: (row, place of its first token, length, index of the first answer token).
    """
    everywhere = torch.ones_like(batch.valid)
    table = [ids(everywhere, 1).view(batch.tokens.shape).tolist() for ids in drafter.drafts(batch, steps)]
    tokens, result = batch.tokens.tolist(), AcceptanceCounts()
    for row, first, length, begin in answers:
        result.begin()
        root, last = first + begin, first + length - 1
        while root < last:
            ahead = min(steps, last - root)  # draft j is made at place root + j - 1
            hits = [table[j][row][root + j] == tokens[row][root + j + 1] for j in range(ahead)]
            accepted = hits.index(False) if False in hits else ahead
            drafted = ahead
            if accepted == last - root:  # the last token comes as a bonus: what was drafted there was never put to the test
                accepted = drafted = accepted - 1
            result.add(accepted, drafted)
            root += accepted + 1
    return result
