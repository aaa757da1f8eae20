"""The table that a run, a sweep, a study and a benchmark end with: 80 columns of plain text, fastest first, and a verdict.

speed-up = tokens/pass divided by cost, exactly: cost is the time of a cycle of the drafter over that of a plain cycle. So a
line says by itself why a drafter is fast or slow: it drafts well, or its cycles are dear.
"""

import math
import shutil
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

from rich.cells import cell_len, set_cell_size

from specbench.common.errors import visible
from specbench.records.blocks import Ledger
from specbench.records.metrics import BASELINE, PHASES
from specbench.reporting import names, verdict
from specbench.reporting.cells import Entry
from specbench.reporting.claims import Verdict
from specbench.reporting.groups import Asked, groups, measured
from specbench.reporting.tables import ABSENT, alphas_by_step, notes, number, peak, shown

WIDTH, WIDE = 80, 120  # columns of a terminal: what every table fits into, and where more is shown
GAP = "  "
MAX_SUMMARY = 300  # characters of a claim's summary
Column = tuple[str, Callable[[Entry], str]]


def show(entries: Sequence[Entry], details: bool = False, page: str | None = None) -> None:
    """Print the tables of some entries. page: where the report lies or how it is made, said at the end."""
    print("\n".join(lines(entries, terminal_width(), details, page)), flush=True)


def show_claims(verdicts: Iterable[Verdict], arms: Collection[str]) -> None:
    """What became of a study's claims about these arms and plain decoding."""
    for v in verdicts:
        if any(t.get(side, BASELINE) not in (BASELINE, *arms) for t in v.claim["tests"] for side in ("of", "over")):
            continue
        summary = v.summary if len(v.summary) <= MAX_SUMMARY else v.summary[: MAX_SUMMARY - 1] + "…"
        line = f"{v.verdict}: {v.claim['says']} ({v.claim['source']}). {summary}"
        print("\n".join(textwrap.wrap(visible(line), terminal_width(), subsequent_indent="  ")))


def live(ledger: Ledger, questions: Sequence[str]) -> str:
    """The tables of a cell as far as it is measured."""
    found = measured([Asked.of(ledger, questions)])
    return "\n".join(lines(found, terminal_width(), concluded=False))


def terminal_width() -> int:
    """Columns to write; piped output is as narrow as any terminal."""
    return max(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns) if sys.stdout.isatty() else WIDTH


def how_to_report(results: Path) -> str:
    """What is said of the page."""
    return f"Page with figures, traces and every number: specbench report results={results}"


def lines(
    entries: Sequence[Entry], width: int = WIDTH, details: bool = False, page: str | None = None, concluded: bool = True
) -> list[str]:
    """What `show` prints, line by line. concluded: with a verdict under each table."""
    found: list[str] = []
    machines = len({e.machine for e in entries}) > 1
    for group in groups(names.labelled(entries)):
        said = caption(group, machines)
        found += [*([""] if found else []), *_wrapped(said, width), *_group(group, width, details, concluded)]
    return [*found, *_wrapped(f"=> {page}", width)] if page and found else found


def _group(group: Sequence[Entry], width: int, details: bool, concluded: bool) -> list[str]:
    """One table with its verdict; of entries of one name the newest."""
    newest, folded = current(group)
    ordered = in_order(newest)
    wide = width >= WIDE
    columns = main_columns(wide) if not ordered[0].replayed else replayed_columns()
    found = table(ordered, columns, width)
    if details:
        for columns in detail_columns():
            found += ["", *table([e for e in ordered if e.name != BASELINE], columns, width)]
        found += [line for e in ordered for line in _wrapped(_training(e), width)]
    if folded:
        found += _wrapped(f"{folded} older set{'s' * (folded > 1)} of rows, superseded by the above, not shown.", width)
    failed = [f"{e.title}: {e.failed} generations FAILED" for e in ordered if e.failed]
    for line in (*failed, *notes(ordered)):
        found += _wrapped(line, width)
    if concluded and len(ordered) > 1 and not ordered[0].replayed:
        said = [verdict.sentence(ordered), *reasons(ordered), *advice(ordered)]
        found += _wrapped("=> " + " ".join(said), width)
    return found


def current(group: Sequence[Entry]) -> tuple[list[Entry], int]:
    """Of entries of one name, which older weights or code made, the newest; and how many were left out."""
    newest: dict[str, Entry] = {}
    for e in group:
        if e.title not in newest or e.header["started"] >= newest[e.title].header["started"]:
            newest[e.title] = e
    return list(newest.values()), len(group) - len(newest)


def in_order(group: Iterable[Entry]) -> list[Entry]:
    """Fastest first, the baseline at its 1.00; what cannot be ranked behind, and most accepting first without a clock."""

    def key(e: Entry) -> tuple[bool, float, float]:
        up = 1.0 if e.name == BASELINE else e.summary.speed_up.value if e.summary.speed_up else -1.0
        tau = e.summary.tau if math.isfinite(e.summary.tau) else 0.0
        return e.name != BASELINE and not e.replayed and verdict.unranked(e), -up if not e.replayed else 0.0, -tau

    return sorted(group, key=key)


def caption(group: Sequence[Entry], machine: bool = False) -> str:
    """`smollm2-135m, mtbench, 4 questions x 48 tokens, greedy; machine quiet`. machine: say which it was."""
    e = max(group, key=lambda e: e.summary.prompts)
    config = e.header["config"]
    questions = len(e.totals.questions)
    cap = (config.get("decode") or {}).get("max_new_tokens")
    length = f" x {cap:,} tokens" if isinstance(cap, int) else ""
    parts = [e.model, e.dataset, f"{questions} question{'s' * (questions > 1)}{length}"]
    parts.append("greedy" if e.temperature == 0 else f"T={e.temperature:g}")
    drawn = {name: config["sampler"].get(name, 0) for name in ("top_p", "top_k")}
    parts += [f"{name}={value:g}" for name, value in drawn.items() if value not in (0, 1)]
    parts += [e.dtype] * (e.dtype != "float32")
    link = (config.get("link") or {}).get("name", "local")
    parts += [f"link {link}"] * (link != "local")
    if e.replayed:
        return ", ".join(parts) + "; replayed: acceptance only"
    where = f" ({e.machine})" if machine else ""
    return ", ".join(parts) + f"; machine {'busy' if any(x.busy for x in group) else 'quiet'}{where}"


# Columns --------------------------------------------------------------------------------------------------------------


def _accepted_share(e: Entry) -> str:
    nodes = sum(sum(r.nodes) for r in e.rows)
    return f"{sum(sum(r.accepted) for r in e.rows) / nodes:.1%}" if nodes else ABSENT


DRAFTER: Column = ("drafter", lambda e: e.title)
TAU: Column = ("tokens/pass [95%]", lambda e: shown(e.summary.tau_interval))
SPEED: Column = ("tok/s", lambda e: number("{:.1f}", e.summary.speed))
ACCEPTED_SHARE: Column = ("accepted/drafted", _accepted_share)


def main_columns(wide: bool) -> list[Column]:
    """What every table shows."""
    columns: list[Column] = [
        DRAFTER,
        ("speed-up [95%]", lambda e: shown(e.summary.speed_up) if e.name != BASELINE else ABSENT if e.replayed else "1.00"),
        ("= tokens/pass", lambda e: number("{:.2f}", e.summary.tau)),
        ("/ cost", lambda e: number("{:.2f}", cost(e))),
        ("drafted", lambda e: number("{:.0f}", e.summary.nodes)),
        ("output", output),
    ]
    return [*columns, SPEED, ("accepted by step", alphas_by_step)] if wide else columns


def replayed_columns() -> list[Column]:
    """Of rows without seconds."""
    return [DRAFTER, TAU, ("drafted", lambda e: number("{:.0f}", e.summary.nodes)), ACCEPTED_SHARE]


def detail_columns() -> list[list[Column]]:
    """What `details=true` adds, table by table."""
    return [
        [DRAFTER, TAU, ("mean by prompt", lambda e: number("{:.2f}", e.summary.tau_macro)), ACCEPTED_SHARE],
        [DRAFTER, SPEED, ("/".join((*PHASES, "rest")), _split), ("peak memory", peak)],
        [DRAFTER, ("accepted by step 1, 2, ...", alphas_by_step)],
    ]


def cost(e: Entry) -> float:
    """The time of a cycle over that of a plain one."""
    if e.name == BASELINE:
        return math.nan if e.replayed else 1.0
    return e.summary.tau / e.summary.speed_up.value if e.summary.speed_up and not e.replayed else math.nan


def output(e: Entry) -> str:
    """Whether the answers are the baseline's, in a word or two."""
    if e.name == BASELINE:
        return ABSENT
    if e.header.get("simulated"):
        return "SIMULATED"
    if e.served:
        return "SERVED"
    if e.lossy:
        return "LOSSY"
    if e.replayed or e.temperature > 0:
        return "replayed" if e.replayed else "sampled"
    found = [r.audit["verdict"] for r in e.rows if r.audit is not None]
    if bugs := sum(v == "bug" for v in found):
        return f"{bugs} DIFFER"
    ties = sum(v == "numerical tie" for v in found)
    return (f"{ties} tie{'s' * (ties > 1)}" if ties else "same") if found else "unknown"


def _split(e: Entry) -> str:
    return number("{:.0f}/{:.0f}/{:.0f}/{:.0f}%", *(100 * e.summary.split[phase] for phase in (*PHASES, "rest")))


def _training(e: Entry) -> str:
    if not e.weights.get("history"):
        return ""
    tokens = f"{e.weights['data']['unique_tokens']:,} different tokens, {e.weights['tokens_seen']:,} seen"
    return f"{e.title}: trained on {tokens}, in {e.weights['hours']:.1f} h"


# Sentences ------------------------------------------------------------------------------------------------------------


def reasons(group: Sequence[Entry]) -> list[str]:
    """Why a paper's tree loses here, or wins: of the one that accepts most."""
    papers = [e for e in verdict.ranked(group) if names.tree_name(e) == names.PAPER]
    if not papers:
        return []
    e = max(papers, key=lambda e: e.summary.tau)
    each = f"{e.title} drafts {e.summary.nodes:.0f} tokens a cycle for {e.summary.tau:.2f} a pass"
    if e.summary.speed_up is not None and e.summary.speed_up.value < 1:
        return [f"{each}, at {cost(e):.1f} times the cost of a plain cycle: too wide a tree for this machine."]
    return [f"{each}, at only {cost(e):.1f} times the cost of a plain cycle: wide passes are cheap here."]


def advice(group: Sequence[Entry]) -> list[str]:
    """What to do next."""
    drafters = verdict.ranked(group)
    trees = {names.tree_name(e) for e in group}
    if drafters and names.PAPER in trees and not trees & {"fitted", "rate", "fitted static"}:
        return ["Next: tree=fitted or tree=rate, which fit the tree to this machine."]
    if drafters and min(len(e.totals.questions) for e in drafters) < verdict.QUESTIONS:
        return [f"Next: data.limit={verdict.QUESTIONS} (LIMIT={verdict.QUESTIONS} for make bench) decides."]
    return []


# Text -----------------------------------------------------------------------------------------------------------------


def table(group: Sequence[Entry], columns: Sequence[Column], width: int) -> list[str]:
    """Lines of a table, none wider than `width`: the first column gives way, then the last."""
    cells = [[visible(make(e)) for _, make in columns] for e in group]
    heading = [visible(title) for title, _ in columns]
    widths = [max(cell_len(line[i]) for line in (heading, *cells)) for i in range(len(heading))]
    room = width - sum(widths[1:]) - len(GAP) * (len(widths) - 1)
    widths[0] = min(widths[0], max(room, 8))
    return [_line(line, widths, width) for line in (heading, *cells)]


def _line(line: Sequence[str], widths: Sequence[int], width: int) -> str:
    parts = [_fitted(line[0], widths[0])]
    parts += [" " * max(0, size - cell_len(value)) + value for value, size in zip(line[1:], widths[1:], strict=True)]
    return _fitted(GAP.join(parts), width).rstrip()


def _fitted(value: str, size: int) -> str:
    """As wide as asked for, cut where it is longer."""
    return set_cell_size(value, size) if cell_len(value) <= size else set_cell_size(value, size - 1) + "…"


def _wrapped(sentence: str, width: int) -> list[str]:
    return textwrap.wrap(visible(sentence), width, break_long_words=True, break_on_hyphens=False)
