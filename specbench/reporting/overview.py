"""The main result: which drafter is fastest, what each accepts, which beats which, and where the time goes.

Speeds come from timed rows, acceptances from replayed rows if there are any, since these cover more questions. Drafters are
compared only if their conditions agree (`evidence.config_differences`).
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from specbench.records.metrics import BASELINE, PHASES, RATES, free_width_speed_up
from specbench.records.statistics import Interval, contrast, pooled
from specbench.reporting import console, fastest
from specbench.reporting.cells import Entry
from specbench.reporting.document import Table, TableCell
from specbench.reporting.evidence import config_differences
from specbench.reporting.groups import groups
from specbench.reporting.names import PAPER, SEPARATOR, labelled, tree_name
from specbench.reporting.tables import ABSENT, direction, number, shown, title

TOP = 6  # drafters in a figure or matrix of the best
MAX_PAIRED = 40  # drafters of which every pair is compared
MAX_SETTINGS = 24  # columns of a table by setting
FREE = ("tree",)  # aspects in which compared drafters may differ
PRELIMINARY = "preliminary"  # too few questions, or a busy machine
VERSUS = (
    "drafter",
    "against",
    "speed-up, ratio [95%]",
    "tau, difference [95%]",
    "faster? (this pair alone)",
    "accepts more? (this pair alone)",
)


@dataclass(frozen=True)
class Setting:
    """A prompt set and temperature."""

    dataset: str
    temperature: float

    def __str__(self) -> str:
        return self.dataset if self.temperature == 0 else f"{self.dataset}, T={self.temperature:g}"


def where(e: Entry) -> tuple[str, str, str]:
    """Target, precision and machine, in which ranked drafters must agree."""
    return e.model, e.precision, e.machine


class Overview:
    """Entries of one target in one precision on one machine, by setting."""

    def __init__(self, entries: Iterable[Entry]):
        known = labelled(entries)
        current = {e.name for e in known if not e.superseded}  # one drafter, one training: no row of earlier weights
        self.entries = [e for e in known if not e.superseded or e.name not in current]
        timed: Counter[Setting] = Counter()
        replayed: Counter[Setting] = Counter()
        self.by_setting: dict[Setting | None, list[Entry]] = {}
        for e in self.entries:
            setting = Setting(e.dataset, e.temperature)
            self.by_setting.setdefault(setting, []).append(e)
            (replayed if e.replayed else timed)[setting] += e.summary.prompts
        self.settings = sorted({*timed, *replayed}, key=lambda s: (s.temperature, -timed[s], -replayed[s], s.dataset))

    @property
    def first(self) -> Setting | None:
        """The setting of the main result: greedy, with most generations."""
        return next(iter(self.settings), None)

    def timed(self, setting: Setting | None) -> list[Entry]:
        """The largest timed group of a setting, fastest first; of equal ones the newest."""
        timed = groups(e for e in self.by_setting.get(setting, []) if not e.replayed)
        largest: list[Entry] = max(timed, key=_size, default=[])
        return ranking(_best(largest))

    def known(self, setting: Setting | None) -> list[Entry]:
        """A setting's drafters and baseline, each with the entry that covers most questions of its newest timed tree."""
        entries = self.by_setting.get(setting, [])
        fits = {e.title: e.key[1] for e in sorted(entries, key=_age) if not e.replayed}
        return _best(e for e in entries if e.key[1] == fits.get(e.title, e.key[1]))

    def accepting(self, setting: Setting | None) -> list[Entry]:
        """The same without the baseline, highest tau first."""
        drafters = [e for e in self.known(setting) if e.name != BASELINE]
        return sorted(drafters, key=lambda e: e.summary.tau if math.isfinite(e.summary.tau) else 0.0, reverse=True)


def _best(entries: Iterable[Entry]) -> list[Entry]:
    """Of entries with one name the lossless, replayed, largest, newest one."""

    def rank(e: Entry) -> tuple[bool, bool, int, str]:
        return not e.lossy, e.replayed, e.summary.prompts, _age(e)

    best: dict[str, Entry] = {}
    for e in entries:
        if e.title not in best or rank(e) > rank(best[e.title]):
            best[e.title] = e
    return list(best.values())


def _size(group: Sequence[Entry]) -> tuple[int, str]:
    return sum(e.summary.prompts for e in group), max(map(_age, group))


def _age(e: Entry) -> str:
    return e.header["started"]


def ranking(entries: Iterable[Entry]) -> list[Entry]:
    """Fastest first, entries without a speed-up last."""
    return sorted(entries, key=fastest.speed_up, reverse=True)


def families(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Entries by drafter, in the order of the drafters' first entries."""
    by_drafter: dict[str, list[Entry]] = {}
    for e in entries:
        by_drafter.setdefault(e.title.partition(SEPARATOR)[0], []).append(e)
    return list(by_drafter.values())


def top(view: Overview) -> list[Entry]:
    """The fastest drafters that can be ranked; without timed ones, those with the highest tau."""
    return (fastest.ranked(view.timed(view.first)) or view.accepting(view.first))[:TOP]


def chosen(view: Overview) -> list[Entry]:
    """The drafters whose acceptance is shown: the first in the ranking, with the paper's tree if there are several."""
    accepting = {e.title: e for e in view.accepting(view.first)}
    by_drafter = families([*fastest.ranked(view.timed(view.first)), *accepting.values()])
    titles = [next((e for e in arms if tree_name(e) == PAPER), arms[0]).title for arms in by_drafter]
    return [accepting[title] for title in titles if title in accepting][:TOP]


def differences(group: Sequence[Entry]) -> list[str]:
    """Aspects in which some drafters of a group differ, so that they are not compared."""
    return sorted({aspect for e in group for aspect in config_differences(group[0], e, FREE)})


# Tables ---------------------------------------------------------------------------------------------------------------


def numbers(group: Sequence[Entry]) -> Table:
    """The console's table, with a tone for speed-ups that differ from 1."""
    ordered = console.in_order(group)
    columns = console.replayed_columns() if ordered[0].replayed else console.main_columns(wide=False)
    lines: list[list[str | TableCell]] = [[make(e) for _, make in columns] for e in ordered]
    for e, line in zip(ordered, lines, strict=True):
        line[0] = title(e)
        if not e.replayed and e.name != BASELINE:
            line[1] = TableCell(str(line[1]), _tone(e.summary.speed_up, 1.0, (e,)))
    return Table([heading for heading, _ in columns], lines)


def acceptance(view: Overview) -> Table:
    """tau by drafter and setting."""
    entries = {s: {e.title: e for e in view.accepting(s)} for s in view.settings[:MAX_SETTINGS]}
    return _by_setting(view, entries, lambda e: shown(e.summary.tau_interval), "tau by dataset (generations)")


def speeds(view: Overview) -> Table:
    """Speed-up by drafter and setting."""
    entries = {s: {e.title: e for e in view.timed(s) if e.name != BASELINE} for s in view.settings[:MAX_SETTINGS]}
    return _by_setting(view, entries, lambda e: shown(e.summary.speed_up), "speed-up by dataset (generations)")


def _by_setting(
    view: Overview, entries: Mapping[Setting, Mapping[str, Entry]], show: Callable[[Entry], str], caption: str
) -> Table:
    """A line a drafter and a column a setting; the kind of rows is in the heading, or in each cell if kinds differ."""
    columns = ["drafter"]
    lines: dict[str, list[str | TableCell]] = {e.title: [e.title] for s in entries for e in view.accepting(s)}
    for setting, by_title in entries.items():
        if not by_title:
            continue
        kinds = {_kind(e) for e in by_title.values()}
        one_kind = len(kinds) == 1
        columns.append(f"{setting} ({kinds.pop()})" if one_kind else str(setting))
        for name, line in lines.items():
            value = show(by_title[name]) if name in by_title else ABSENT
            kind = f" ({_kind(by_title[name])})" if name in by_title and not one_kind else ""
            line.append(TableCell(ABSENT, "away") if value == ABSENT else value + kind)
    if len(view.settings) > MAX_SETTINGS:
        caption += f"; without {len(view.settings) - MAX_SETTINGS} datasets with fewer generations"
    return Table(tuple(columns), list(lines.values()) if len(columns) > 1 else [], caption)


def _kind(e: Entry) -> str:
    return f"{e.summary.prompts} {'replayed' if e.replayed else 'timed'}"


def matrix(group: Sequence[Entry], metric: str) -> Table:
    """The metric (tau or a speed) of every drafter against every other one."""
    if metric == "tau":
        caption = "tau of the line's drafter minus that of the column's"
    else:
        caption = "speed of the line's drafter over that of the column's"
    lines: list[list[str | TableCell]] = []
    for a in group:
        lines.append([a.title, *(TableCell("", "away") if a is b else _duel(a, b, metric) for b in group)])
    return Table(("", *(e.title for e in group)), lines, caption, "matrix")


def _duel(a: Entry, b: Entry, metric: str) -> TableCell:
    pair, ratio = f"{a.title} against {b.title}", metric != "tau"
    if aspects := config_differences(a, b, FREE):
        return TableCell(ABSENT, "away", hint=f"{pair}: rows that differ in {', '.join(aspects)} are not compared")
    effect = contrast(RATES[metric], a.totals, b.totals, ratio=ratio)
    if effect is None:
        return TableCell(ABSENT, "away", hint=f"{pair}: nothing to compare")
    problem = fastest.too_little((a, b))
    hint = f"{pair}: {shown(effect)}" + (f" ({problem})" if problem else "")
    value = f"{effect.value:.2f}" if ratio else f"{effect.value:+.2f}"
    return TableCell(value, _tone(effect, 1.0 if ratio else 0.0, (a, b)), hint=hint)


def _tone(effect: Interval | None, neutral: float, compared: Sequence[Entry]) -> str:
    tone = direction(effect, neutral, "good", "bad")
    return "" if fastest.too_little(compared) or tone not in ("good", "bad") else tone


def versus(group: Sequence[Entry]) -> list[list[str]]:
    """Every pair of the first `MAX_PAIRED` drafters with intervals, in the order of `VERSUS`. group: fastest first."""
    drafters = [e for e in group if e.name != BASELINE][:MAX_PAIRED]
    lines = []
    for i, a in enumerate(drafters):
        for b in drafters[i + 1 :]:
            speed, tau = _against(a, b, "speed_up"), _against(a, b, "tau")
            words = direction(speed, 1.0, "yes", "no"), direction(tau, 0.0, "yes", "no, less")
            if fastest.too_little((a, b)):
                words = (PRELIMINARY, PRELIMINARY)
            lines.append([a.title, b.title, shown(speed), shown(tau), *words])
    return lines


def _against(a: Entry, b: Entry, metric: str) -> Interval | None:
    if config_differences(a, b, FREE):
        return None
    return contrast(RATES[metric], a.totals, b.totals, ratio=metric != "tau")


def times(group: Sequence[Entry]) -> Table:
    """The time of a cycle by phase, and measured beside expected speed-up."""
    columns = (
        "drafter", "nodes", *(f"{phase}, ms" for phase in (*PHASES, "rest")), "cycle, ms", "tau", "measured speed-up",
        "expected (times)", "expected (parameters)", "if a wide pass cost no more than a narrow one",
    )  # fmt: skip
    lines = []
    for e in group:
        sums, s = e.totals.pooled, e.summary
        cycle = 1000 * float(sums["seconds"] / sums["cycles"]) if sums["cycles"] else math.nan
        phases = [number("{:.1f}", cycle * s.split[phase]) for phase in (*PHASES, "rest")]
        speed_ups = [math.nan] * 4
        if e.name != BASELINE:
            measured, wide = s.speed_up.value if s.speed_up else math.nan, pooled(free_width_speed_up, e.totals)
            speed_ups = [measured, s.expected, s.expected_by_parameters, wide]
        rates = [number("{:.2f}", value) for value in (s.tau, *speed_ups)]
        lines.append([e.title, number("{:.0f}", s.nodes), *phases, number("{:.1f}", cycle), *rates])
    kept = [i for i in range(len(columns)) if any(line[i] != ABSENT for line in lines)]
    return Table([columns[i] for i in kept], [[line[i] for i in kept] for line in lines])
