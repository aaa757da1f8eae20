"""Drafters of the tiny target, trained for a moment; batches and files that they take."""

import copy
from functools import cache

import torch
from conftest import make, tiny
from decoding import plain

from specbench.engine import vocabulary
from specbench.engine.interface import Batch, Taps

# Drafters that draft a chain from every position of a text at once (`drafts`), and are trained on packed rows.
FAMILY = (
    "vanilla",
    "medusa",
    "medusa2",
    "hydra",
    "eagle2",
    "eagle2_unshifted",
    "eagle2_feature",
    "eagle2_token",
    "hass",
    "eagle3",
    "coral",
    "mtp",
    "eagle2_router",
    "dflash",
)


def batch_of(target, rows=8, length=24, seed=0):
    """Greedy text of the target from random starts, with its states."""
    generator = torch.Generator().manual_seed(seed)
    tokens = []
    for _ in range(rows):
        start = torch.randint(0, 60, (4,), generator=generator).tolist()
        tokens.append(start + plain(target, start, length - 4))
    tokens = torch.tensor(tokens, device=target.device)
    layers = tuple(range(target.layers))
    states, hidden, kv = target.tapped(tokens, Taps(hidden=layers, kv=layers))
    everywhere = torch.ones_like(tokens, dtype=torch.bool)
    return Batch(tokens, states, everywhere, everywhere.clone(), hidden=hidden, kv=kv)


def trained(drafter, target, shift=0):
    """A drafter of the tiny target after a short training; `shift` displaces the tokens it is shown."""
    weights, losses = _training(drafter, shift)
    made = make(drafter, target)
    made.load_state_dict(weights)
    return made, losses


@cache
def _training(drafter, shift):
    """What came of it, for every test that asks: state and losses."""
    target = tiny()
    made, batch = make(drafter, target), batch_of(target)
    if hasattr(made, "base"):  # a second stage on top of a finished first one
        made.base.load_state_dict(_training(made.base.name, shift)[0])
    if shift:
        batch.tokens = batch.tokens.roll(shift, 1)
    losses = optimise(made, batch, 60)
    return copy.deepcopy(made.state_dict()), losses


def optimise(made, batch, steps):
    optimizer = torch.optim.AdamW([p for p in made.parameters() if p.requires_grad], 3e-3)
    made.train()
    losses = []
    for _ in range(steps):
        metrics = made.loss(batch)
        metrics["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(metrics["loss"].detach()))
    made.eval()
    return losses


def save_tokenizer(folder, words):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(WordLevel({w: i for i, w in enumerate(words)}, unk_token=words[0]))
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token=words[0]).save_pretrained(folder)


ORDER = torch.randperm(61, generator=torch.Generator().manual_seed(3))  # not the ids' own, or a missing map would pass


def listing(target, folder, ids=ORDER, **changes):
    """Give a target the list of its ids."""
    target.listing = folder / vocabulary.FILE
    vocabulary.save(target.listing, ids, {"target": "tiny", "target_fingerprint": target.fingerprint()} | changes)
    return target
