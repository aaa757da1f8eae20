"""Replayed rows that several studies need are decoded once: a study copies what another has of the same cell and arm.

A replayed row holds counts alone. Two rows with equal keys of cell, arm and question (`identity.py`) and of the same answer
of the target are equal, whoever decoded them. A copy keeps the machine, commit and versions of its origin.
"""

from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from specbench.records import blocks, identity
from specbench.records.blocks import Block, BlockIndex, Ledger
from specbench.records.rows import Row

OF_A_BLOCK = ("kind", "schema", "started")  # of a header: every block has its own


def copy_missing(ledger: Ledger, folders: Iterable[Path], questions: Collection[str]) -> int:
    """Copy rows that a replayed cell lacks from other folders' blocks of the same cell; returns how many.

    questions: digests of those that are asked.
    """
    with blocks.locked(ledger.folder, "copying", wait=True):
        ledger.refresh()
        found = [index for folder in folders for index in blocks.scan_all(folder, ledger.baseline)]
        same = [k for k in found if k.cell == ledger.cell and k.header["decoding"] == identity.DECODING]
        drafters = [label for label in ledger.arms if label != ledger.baseline]
        # The answers come first, since a drafter's row is one of an answer.
        return sum(_copy(ledger, index, labels, questions) for labels in ([ledger.baseline], drafters) for index in same)


def _copy(ledger: Ledger, index: BlockIndex, labels: Collection[str], questions: Collection[str]) -> int:
    """Copy one block's rows that these arms lack, as a block of their own."""
    owners = {theirs: [own for own in labels if ledger.arms[own] == key] for theirs, key in index.arms.items()}

    def lacking(theirs: str, text: str, turn: int) -> list[str]:
        return [own for own in owners[theirs] if text in questions and not ledger.done(own, text, turn)]

    if not any(lacking(*generation) for generation in index.rows):
        return 0
    rows = [record for record in blocks.read_block(index.path)[1] if isinstance(record, Row)]
    found = [replace(r, drafter=own) for r in rows for own in lacking(r.drafter, r.text, r.turn) if _fits(r, own, ledger)]
    origin: dict[str, Any] = {name: value for name, value in index.header.items() if name not in OF_A_BLOCK}
    here: Any = ledger.block.header
    arms = {row.drafter: here["arms"][row.drafter] for row in found}
    block = Block(ledger.folder, {**origin, "study": here["study"], "arms": arms})
    for row in found:
        block.write(row)
    ledger.refresh()
    return len(found)


def _fits(row: Row, own: str, ledger: Ledger) -> bool:
    """Is a row an answer of the target, or of the answer that the other drafters of the cell replay?"""
    answer = None if own == ledger.baseline else ledger.answer(row.text, row.turn)
    return own == ledger.baseline or (answer is not None and answer.tokens == row.tokens)
