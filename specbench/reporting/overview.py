"""What a reader wants to know first of a benchmark: who is fastest, what each drafter accepts, who beats whom, and why.

Speeds come from rows that were decoded with the clock, acceptances from replayed rows where there are any, since these
hold more questions. Two drafters are compared only if their rows were measured alike (`claims.config_differences`).
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from specbench.records.metrics import BASELINE, RATES, free_width_speed_up
from specbench.records.statistics import Interval, contrast, pooled
from specbench.reporting import console, verdict
from specbench.reporting.cells import Entry
from specbench.reporting.claims import config_differences
from specbench.reporting.document import Cell, Table
from specbench.reporting.groups import groups
from specbench.reporting.names import PAPER, SEPARATOR, labelled, tree_name
from specbench.reporting.tables import ABSENT, direction, number, shown

PHASES = ("draft", "target", "verify", "rest")
TOP = 6  # drafters in a figure or a matrix that is not of all
FREE = ("tree",)  # a benchmark is about drafters with their trees


@dataclass(frozen=True)
class Setting:
    """What was decoded, and how."""

    dataset: str
    temperature: float

    def __str__(self) -> str:
        return self.dataset if self.temperature == 0 else f"{self.dataset}, T={self.temperature:g}"


def where(e: Entry) -> tuple[str, str, str]:
    """What two drafters must have in common for one to be called better: target, precision, machine."""
    return e.model, e.dtype, e.machine


class Overview:
    """Entries of one target in one precision on one machine, by setting.

    Of several groups about one thing the largest counts, of those the newest.
    """

    def __init__(self, entries: Iterable[Entry]):
        self.entries = labelled(entries)
        timed: Counter[Setting] = Counter()
        replayed: Counter[Setting] = Counter()
        self.by_setting: dict[Setting | None, list[Entry]] = {}
        for e in self.entries:
            self.by_setting.setdefault(setting(e), []).append(e)
            (replayed if e.replayed else timed)[setting(e)] += e.summary.prompts
        self.settings = sorted({*timed, *replayed}, key=lambda s: (s.temperature, -timed[s], -replayed[s], s.dataset))

    @property
    def first(self) -> Setting | None:
        """The setting that the answer is about: greedy, with most generations."""
        return next(iter(self.settings), None)

    def timed(self, at: Setting | None) -> list[Entry]:
        """The largest group of a setting's drafters as decoded with the clock, fastest first."""
        found = groups(e for e in self.by_setting.get(at, []) if not e.replayed)
        largest: list[Entry] = max((group for _, group in found), key=_size, default=[])
        return ranking(self._best(largest))

    def known(self, at: Setting | None) -> list[Entry]:
        """A setting's drafters, the baseline among them, as their acceptance is known best."""
        return self._best(self.by_setting.get(at, []))

    def accepting(self, at: Setting | None) -> list[Entry]:
        """The same without the baseline, most accepting first."""
        found = [e for e in self.known(at) if e.name != BASELINE]
        return sorted(found, key=lambda e: e.summary.tau if math.isfinite(e.summary.tau) else 0.0, reverse=True)

    @staticmethod
    def _best(entries: Iterable[Entry]) -> list[Entry]:
        best: dict[str, Entry] = {}
        for e in entries:
            rival = best.get(e.title)
            if rival is None or _weight(e) > _weight(rival):
                best[e.title] = e
        return list(best.values())


def _size(group: Sequence[Entry]) -> tuple[int, str]:
    return sum(e.summary.prompts for e in group), max(str(e.header.get("started", "")) for e in group)


def _weight(e: Entry) -> tuple[bool, bool, int, str]:
    return not e.lossy, e.replayed, e.summary.prompts, str(e.header.get("started", ""))


def setting(e: Entry) -> Setting:
    return Setting(e.dataset, e.temperature)


def ranking(entries: Iterable[Entry]) -> list[Entry]:
    """Fastest first; the baseline's speed-up is 1."""

    def speed(e: Entry) -> float:
        return 1.0 if e.name == BASELINE else e.summary.speed_up.value if e.summary.speed_up else -1.0

    return sorted(entries, key=speed, reverse=True)


def families(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Drafters, the one with the fastest arm first, each with its trees side by side. entries: fastest first."""
    found: dict[str, list[Entry]] = {}
    for e in entries:
        found.setdefault(e.title.partition(SEPARATOR)[0], []).append(e)
    return list(found.values())


def top(view: Overview) -> list[Entry]:
    """The fastest drafters that may be ranked; without a clock those that accept most."""
    return (verdict.ranked(view.timed(view.first)) or view.accepting(view.first))[:TOP]


def chosen(view: Overview) -> list[Entry]:
    """Whose acceptance is shown: the drafters highest in the ranking, each with its paper's tree where it has several."""
    accepting = {e.title: e for e in view.accepting(view.first)}
    found = families([*verdict.ranked(view.timed(view.first)), *accepting.values()])
    best = [next((e for e in arms if tree_name(e) == PAPER), arms[0]).title for arms in found]
    return [accepting[title] for title in best if title in accepting][:TOP]


# The answer -----------------------------------------------------------------------------------------------------------


def against(a: Entry, b: Entry, metric: str, ratio: bool) -> Interval | None:
    """One drafter against another, if their rows were measured alike."""
    if config_differences(a, b, FREE):
        return None
    return contrast(RATES[metric], a.totals, b.totals, ratio=ratio)


def apart(group: Sequence[Entry]) -> list[str]:
    """In what the rows of a group differ that should not, so that some of its drafters are not compared."""
    return sorted({aspect for e in group for aspect in config_differences(group[0], e, FREE)})


# Tables ---------------------------------------------------------------------------------------------------------------


def numbers(group: Sequence[Entry]) -> Table:
    """The table that a run ends with, see `console`; speed-ups coloured where enough questions tell them from 1."""
    ordered = console.in_order(group)
    columns = console.replayed_columns() if ordered[0].replayed else console.main_columns(wide=False)
    lines: list[list[str | Cell]] = [[make(e) for _, make in columns] for e in ordered]
    for e, line in zip(ordered, lines, strict=True):
        line[0] = e.title + (f" ({e.failed} FAILED)" if e.failed else "")
        if not e.replayed and e.name != BASELINE:
            line[1] = Cell(str(line[1]), _tone(e.summary.speed_up, 1.0, (e,)))
    return Table([title for title, _ in columns], lines)


def acceptance(view: Overview) -> Table:
    """tau by drafter and setting."""
    chosen = {at: {e.title: e for e in view.accepting(at)} for at in view.settings}
    return _by_setting(view, chosen, lambda e: shown(e.summary.tau_interval), "tau by dataset (generations)")


def speeds(view: Overview) -> Table:
    """Speed-up by drafter and setting."""
    chosen = {at: {e.title: e for e in view.timed(at) if e.name != BASELINE} for at in view.settings}
    return _by_setting(view, chosen, lambda e: shown(e.summary.speed_up), "speed-up by dataset (generations)")


def _by_setting(
    view: Overview, chosen: Mapping[Setting, Mapping[str, Entry]], show: Callable[[Entry], str], caption: str
) -> Table:
    """A line a drafter, most accepting first; a column a setting, with what its rows are, where they are all the same."""
    columns = ["drafter"]
    lines: dict[str, list[str | Cell]] = {e.title: [e.title] for at in view.settings for e in view.accepting(at)}
    for at, found in chosen.items():
        if not found:
            continue
        kinds = {_kind(e) for e in found.values()}
        alike = len(kinds) == 1
        columns.append(f"{at} ({kinds.pop()})" if alike else str(at))
        for name, line in lines.items():
            value = show(found[name]) if name in found else ABSENT
            aside = f" ({_kind(found[name])})" if name in found and not alike else ""
            line.append(Cell(ABSENT, "away") if value == ABSENT else value + aside)
    return Table(tuple(columns), list(lines.values()) if len(columns) > 1 else [], caption)


def _kind(e: Entry) -> str:
    return f"{e.summary.prompts} {'replayed' if e.replayed else 'timed'}"


def matrix(group: Sequence[Entry], metric: str) -> Table:
    """Every drafter against every other one: the line's over the column's, coloured where enough questions tell them so."""
    ratio = metric != "tau"
    caption = (
        "speed of the line's drafter over that of the column's"
        if ratio
        else "tau of the line's drafter minus that of the column's"
    )
    lines: list[list[str | Cell]] = [
        [a.title, *(_duel(a, b, metric, ratio) if a is not b else Cell("", "away") for b in group)]
        for a in group
    ]  # fmt: skip
    return Table(("", *(e.title for e in group)), lines, caption, "matrix")


def _duel(a: Entry, b: Entry, metric: str, ratio: bool) -> Cell:
    pair = f"{a.title} against {b.title}"
    if differ := config_differences(a, b, FREE):
        return Cell(ABSENT, "away", hint=f"{pair}: rows that differ in {', '.join(differ)} are not compared")
    effect = contrast(RATES[metric], a.totals, b.totals, ratio=ratio)
    if effect is None:
        return Cell(ABSENT, "away", hint=f"{pair}: nothing to compare")
    said = f"{effect.value:.2f}" if ratio else f"{effect.value:+.2f}"
    few = verdict.too_little((a, b))
    hint = f"{pair}: {shown(effect)}" + (f" ({few})" if few else "")
    return Cell(said, _tone(effect, 1.0 if ratio else 0.0, (a, b)), hint=hint)


def _tone(effect: Interval | None, neutral: float, of: Sequence[Entry]) -> str:
    if verdict.too_little(of):
        return ""
    return {"more": "good", "less": "bad"}.get(direction(effect, neutral, "more", "less"), "")


TOO_LITTLE = "preliminary"  # too few questions, or a busy machine
VERSUS = ("drafter", "against", "speed-up, ratio [95%]", "tau, difference [95%]", "faster?", "accepts more?")


def versus(group: Sequence[Entry]) -> list[list[str]]:
    """The matrices once more, a pair a line and with intervals. group: fastest first, the baseline left out."""
    drafters = [e for e in group if e.name != BASELINE]
    lines = []
    for i, a in enumerate(drafters):
        for b in drafters[i + 1 :]:
            speed, tau = against(a, b, "speed_up", ratio=True), against(a, b, "tau", ratio=False)
            calls = direction(speed, 1.0, "yes", "no"), direction(tau, 0.0, "yes", "no, less")
            if verdict.too_little((a, b)):
                calls = (TOO_LITTLE, TOO_LITTLE)
            lines.append([a.title, b.title, shown(speed), shown(tau), *calls])
    return lines


TIMES = (
    "drafter",
    "nodes",
    "draft, ms",
    "target, ms",
    "verify, ms",
    "rest, ms",
    "cycle, ms",
    "tau",
    "measured speed-up",
    "expected (times)",
    "expected (parameters)",
    "if a wide pass cost no more than a narrow one",
)


def times(group: Sequence[Entry]) -> Table:
    """Where the time of a cycle goes, and what speed-up tau and these times make: measured beside expected."""
    lines = []
    for e in group:
        sums, s = e.totals.pooled, e.summary
        cycle = 1000 * float(sums["seconds"] / sums["cycles"]) if sums["cycles"] else math.nan
        parts = [number("{:.1f}", cycle * s.split[phase]) for phase in PHASES]
        up = s.speed_up.value if s.speed_up and e.name != BASELINE else math.nan
        wide = pooled(free_width_speed_up, e.totals)
        expected = (s.expected, s.expected_by_parameters, wide) if e.name != BASELINE else (math.nan,) * 3
        lines.append(
            [
                e.title,
                number("{:.0f}", s.nodes),
                *parts,
                number("{:.1f}", cycle),
                number("{:.2f}", s.tau),
                *(number("{:.2f}", v) for v in (up, *expected)),
            ]
        )
    return Table(TIMES, lines)
