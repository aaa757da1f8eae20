"""What the overrides of a study's cell say of it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from specbench.records import blocks, identity

QUESTIONS = 80  # with which a cell without a limit counts as complete: as many as MT-Bench has


def option(overrides: Iterable[str], name: str, default: str) -> str:
    """An option's value among overrides; the last one counts."""
    values = [value for key, _, value in (o.partition("=") for o in overrides) if key.lstrip("+") == name]
    return values[-1] if values else default


@dataclass(frozen=True)
class CellOptions:
    """Data set, sampling and target of a cell; what its overrides leave out is as in `conf/run.yaml`.

    Attributes:
        questions: planned. tokens: that an answer has at most. quantised: how the target's weights are rounded.
        adapted: name of the target's adapter. cut_after: tokens after which the link breaks; None: never.
    """

    dataset: str
    questions: int
    tokens: int
    temperature: float
    top_p: float
    top_k: int
    link: str
    batch: int
    replayed: bool
    quantised: str | None
    adapted: str | None
    cut_after: int | None

    @classmethod
    def of(cls, overrides: Sequence[str]) -> "CellOptions":
        def value(name: str, default: str = "null") -> str | None:
            found = option(overrides, name, default)
            return None if found == "null" else found

        adapter, cut_after = value("model.adapter"), value("link.cut_after")
        return cls(
            dataset=option(overrides, "dataset", "mtbench"),
            questions=int(value("data.limit") or QUESTIONS),
            tokens=int(option(overrides, "decode.max_new_tokens", "1024")),
            temperature=float(option(overrides, "sampler.temperature", "0")),
            top_p=float(option(overrides, "sampler.top_p", "1")),
            top_k=int(option(overrides, "sampler.top_k", "0")),
            link=option(overrides, "link", "local"),
            batch=int(option(overrides, "batch", "1")),
            replayed=option(overrides, "replay", "false") == "true",
            quantised=value("model.quantised"),
            adapted=None if adapter is None else identity.adapter_name(adapter),
            cut_after=None if cut_after is None else int(cut_after),
        )

    @property
    def folder(self) -> str:
        """Name of the folder of its blocks, as `RunSpec.cell_folder` has it."""
        drawn, variant = (self.temperature, self.top_p, self.top_k), identity.variant(self.adapted, self.quantised)
        link = blocks.link_name(self.link, self.cut_after)
        return blocks.cell_name(self.dataset, drawn, self.tokens, link, self.replayed, self.batch, variant)
