"""The table printed at the end of a run, sweep or study: plain text of 80 columns, fastest drafter first, and a verdict.

speed-up = tokens/pass divided by cost, exactly: cost is the time of a cycle of the drafter over that of a plain cycle. So
each line shows why a drafter is fast or slow: by its acceptance or by its cost.
"""

import math
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

from rich.cells import cell_len, set_cell_size

from specbench.common.errors import visible
from specbench.records.blocks import Ledger
from specbench.records.metrics import BASELINE, PHASES, RATES
from specbench.records.statistics import interval
from specbench.reporting import engines, fastest, names, trainings
from specbench.reporting.cells import Entry
from specbench.reporting.claims import ClaimVerdict
from specbench.reporting.groups import Asked, groups, measured
from specbench.reporting.tables import ABSENT, alphas_by_step, notes, number, peak, shown, split

WIDTH, WIDE = 80, 120  # terminal columns: for every table, and for tables with more columns
GAP = "  "
MAX_SUMMARY = 300  # characters of a claim's summary
Column = tuple[str, Callable[[Entry], str]]


def show(entries: Sequence[Entry], details: bool = False, results: Path | None = None) -> None:
    """Print the tables of some entries. results: folder whose report is mentioned at the end."""
    page = None if results is None else f"Page with figures, traces and every number: specbench report results={results}"
    print("\n".join(lines(entries, terminal_width(), details, page)), flush=True)


def show_claims(verdicts: Iterable[ClaimVerdict], arms: Collection[str]) -> None:
    """Print the verdicts on claims that are only about these arms and plain decoding."""
    for v in verdicts:
        named = {test.get(side, BASELINE) for test in v.claim["tests"] for side in ("of", "over")}
        if named <= {BASELINE, *arms}:
            summary = v.summary if len(v.summary) <= MAX_SUMMARY else v.summary[: MAX_SUMMARY - 1] + "…"
            line = f"{v.shown}: {v.claim['says']} ({v.claim['source']}). {summary}"
            print("\n".join(textwrap.wrap(visible(line), terminal_width(), subsequent_indent="  ")))


def live(ledger: Ledger, questions: Sequence[str]) -> str:
    """The tables of a cell that is being measured."""
    entries = measured([Asked.of(ledger, questions)])
    return "\n".join(lines(entries, terminal_width(), concluded=False))


def terminal_width() -> int:
    """Columns of the terminal, at least `WIDTH`; `WIDTH` for piped output."""
    return max(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns) if sys.stdout.isatty() else WIDTH


def lines(
    entries: Sequence[Entry], width: int = WIDTH, details: bool = False, page: str | None = None, concluded: bool = True
) -> list[str]:
    """What `show` prints. concluded: with a verdict below each table."""
    printed: list[str] = []
    machines = len({e.machine for e in entries}) > 1
    for group in groups(names.labelled(entries)):
        printed += (
            [""] * bool(printed) + _wrapped(caption(group, machines), width) + _group(group, width, details, concluded)
        )
    return [*printed, *_wrapped(f"=> {page}", width)] if page and printed else printed


def _group(group: Sequence[Entry], width: int, details: bool, concluded: bool) -> list[str]:
    """One table with its notes and verdict."""
    newest, older = current(group)
    ordered = in_order(newest)
    replayed = ordered[0].replayed
    printed = table(ordered, replayed_columns() if replayed else main_columns(width >= WIDE), width)
    sentences: list[str] = []
    if any(row.drift is not None for e in ordered for row in e.rows):
        printed += ["", *table(ordered, drift_columns(), width)]
    if details:
        for columns in detail_columns():
            printed += ["", *table([e for e in ordered if e.name != BASELINE], columns, width)]
        sentences += map(_training, ordered)
    if older:
        sentences.append(f"{older} older set{'s' * (older > 1)} of rows, superseded by the above, not shown.")
    sentences += [f"{e.title}: {e.failed} generations FAILED" for e in ordered if e.failed] + notes(ordered)
    if concluded and len(ordered) > 1 and not replayed:
        sentences.append("=> " + " ".join([fastest.sentence(ordered), *reasons(ordered), *advice(ordered)]))
    return printed + [line for sentence in sentences for line in _wrapped(sentence, width)]


def current(group: Sequence[Entry]) -> tuple[list[Entry], int]:
    """The newest of the entries with one name, and the number of older ones."""
    newest: dict[str, Entry] = {}
    for e in group:
        if e.title not in newest or e.header["started"] >= newest[e.title].header["started"]:
            newest[e.title] = e
    return list(newest.values()), len(group) - len(newest)


def in_order(group: Iterable[Entry]) -> list[Entry]:
    """Fastest first, the baseline at 1.00, unranked entries last; replayed entries by tau, highest first."""

    def key(e: Entry) -> tuple[bool, float, float]:
        tau = e.summary.tau if math.isfinite(e.summary.tau) else 0.0
        if e.replayed:
            return False, 0.0, -tau
        return e.name != BASELINE and fastest.unranked(e), -fastest.speed_up(e), -tau

    return sorted(group, key=key)


def caption(group: Sequence[Entry], machine: bool = False) -> str:
    """`smollm2-135m, mtbench, 4 questions x 48 tokens, greedy; machine quiet`. machine: include its name."""
    e = max(group, key=lambda e: e.summary.prompts)
    config = e.header["config"]
    questions = len(e.totals.questions)
    cap = (config.get("decode") or {}).get("max_new_tokens")
    length = f" x {cap:,} tokens" if isinstance(cap, int) else ""
    adapted = f" adapted by {e.adapted}" if e.adapted else ""
    parts = [f"{e.model}{adapted}", e.dataset, f"{questions} question{'s' * (questions > 1)}{length}"]
    parts.append("greedy" if e.temperature == 0 else f"T={e.temperature:g}")
    sampling = {name: config["sampler"].get(name, 0) for name in ("top_p", "top_k")}
    parts += [f"{name}={value:g}" for name, value in sampling.items() if value not in (0, 1)]
    drafts = dict.fromkeys(f"drafters in {dtype}" for x in group if (dtype := x.arm.get("draft_dtype")))
    parts += [e.precision] * (e.precision != "float32") + [*drafts] + [f"batch of {e.batch}"] * (e.batch > 1)
    link = (config.get("link") or {}).get("name", "local")
    parts += [f"link {link}"] * (link != "local")
    if e.replayed:
        return ", ".join(parts) + "; replayed: acceptance only"
    name = f" ({e.machine})" if machine else ""
    least = engines.floor(group) if machine else None
    read = f"; reading the model takes {least['ms']:.1f} ms a token" if least else ""
    busy = f"; machine {'busy' if any(x.busy for x in group) else 'quiet'}{name}{read}"
    return ", ".join(parts) + busy + _beside_original(group)


def _beside_original(group: Sequence[Entry]) -> str:
    """How much a quantised or adapted target differs from its original, if that was measured."""
    if (found := engines.quality(group)) is None:
        return ""
    perplexity = f"perplexity {found['perplexity']:.3f} (original {found['original']:.3f})"
    kl = f", KL {found['kl']:.4f} nats a token" if "kl" in found else ""
    return f"; {perplexity} on the original's answers{kl}, {found['agreement']:.1%} of the ids the same"


# Columns --------------------------------------------------------------------------------------------------------------


def _accepted_share(e: Entry) -> str:
    nodes = sum(sum(r.nodes) for r in e.rows)
    return f"{sum(sum(r.accepted) for r in e.rows) / nodes:.1%}" if nodes else ABSENT


DRAFTER: Column = ("drafter", lambda e: e.title)
TAU: Column = ("tokens/pass [95%]", lambda e: shown(e.summary.tau_interval))
SPEED: Column = ("tok/s", lambda e: number("{:.1f}", e.summary.speed))
ACCEPTED_SHARE: Column = ("accepted/drafted", _accepted_share)


def main_columns(wide: bool) -> list[Column]:
    """Columns of every timed table."""
    columns: list[Column] = [
        DRAFTER,
        ("speed-up [95%]", lambda e: shown(e.summary.speed_up) if e.name != BASELINE else "1.00"),
        ("= tokens/pass", lambda e: number("{:.2f}", e.summary.tau)),
        ("/ cost", lambda e: number("{:.2f}", cost(e))),
        ("drafted", lambda e: number("{:.0f}", e.summary.nodes)),
        ("output", output),
    ]
    return [*columns, SPEED, ("accepted by step", alphas_by_step)] if wide else columns


def replayed_columns() -> list[Column]:
    """Columns of a replayed table."""
    return [DRAFTER, TAU, ("drafted", lambda e: number("{:.0f}", e.summary.nodes)), ACCEPTED_SHARE]


def detail_columns() -> list[list[Column]]:
    """Columns of the tables that `details=true` adds."""
    return [
        [DRAFTER, TAU, ("mean by prompt", lambda e: number("{:.2f}", e.summary.tau_macro)), ACCEPTED_SHARE],
        [
            DRAFTER,
            SPEED,
            ("/".join((*PHASES, "rest")), lambda e: split(e, "{:.0f}/{:.0f}/{:.0f}/{:.0f}%")),
            ("peak memory", peak),
        ],
        [DRAFTER, ("accepted by step 1, 2, ...", alphas_by_step)],
    ]


def drift_columns() -> list[Column]:
    """Columns of the table of sampled answers some of which a lossy rule accepted."""

    def drift(metric: str) -> Callable[[Entry], str]:
        return lambda e: shown(interval(RATES[metric], e.totals))

    return [DRAFTER, TAU, ("perplexity [95%]", drift("answer_perplexity")), ("KL, nats [95%]", drift("answer_kl"))]


def cost(e: Entry) -> float:
    """The time of a cycle over that of a plain one; NaN without seconds."""
    if e.name == BASELINE and not e.replayed:
        return 1.0
    return e.summary.tau / e.summary.speed_up.value if e.summary.speed_up and not e.replayed else math.nan


def output(e: Entry) -> str:
    """Do the answers equal the baseline's? In a word or two."""
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
    verdicts = Counter(r.audit["verdict"] for r in e.rows if r.audit is not None)
    if verdicts["bug"]:
        return f"{verdicts['bug']} DIFFER"
    if ties := verdicts["numerical tie"]:
        return f"{ties} tie{'s' * (ties > 1)}"
    return "same" if verdicts else "unknown"


def _training(e: Entry) -> str:
    if not e.weights.get("history"):
        return ""
    different, seen, _, hours = trainings.amounts([e.weights])
    return f"{e.title}: trained on {different} different tokens, {seen} seen, hours: {hours}"


# Sentences ------------------------------------------------------------------------------------------------------------


def reasons(group: Sequence[Entry]) -> list[str]:
    """Why the paper's tree with the highest tau is slow or fast on this machine."""
    papers = [e for e in fastest.ranked(group) if names.tree_name(e) == names.PAPER]
    if not papers:
        return []
    e = max(papers, key=lambda e: e.summary.tau)
    drafts = f"{e.title} drafts {e.summary.nodes:.0f} tokens a cycle for {e.summary.tau:.2f} a pass"
    if fastest.speed_up(e) < 1:
        return [f"{drafts}, at {cost(e):.1f} times the cost of a plain cycle: too wide a tree for this machine."]
    return [f"{drafts}, at only {cost(e):.1f} times the cost of a plain cycle: wide passes are cheap here."]


def advice(group: Sequence[Entry]) -> list[str]:
    """A suggestion of what to run next."""
    drafters = fastest.ranked(group)
    trees = {names.tree_name(e) for e in group}
    if drafters and names.PAPER in trees and not trees & {"fitted", "rate", "fitted static"}:
        return ["Next: tree=fitted or tree=rate, which fit the tree to this machine."]
    questions = min((len(e.totals.questions) for e in drafters), default=fastest.QUESTIONS)
    if questions < fastest.QUESTIONS:
        if questions < (_limit(drafters[0]) or math.inf):  # the whole set
            return [f"Next: a prompt set of {fastest.QUESTIONS} questions or more, which a verdict takes."]
        again = f"; all {fastest.QUESTIONS} have to be measured" if any(e.outdated for e in drafters) else ""
        return [f"Next: data.limit={fastest.QUESTIONS} (LIMIT={fastest.QUESTIONS} for make bench) decides{again}."]
    return []


def _limit(e: Entry) -> int | None:
    """How many questions were asked for at most."""
    limit = e.header["config"].get("data", {}).get("limit")
    return limit if isinstance(limit, int) else None


# Text -----------------------------------------------------------------------------------------------------------------


def table(group: Sequence[Entry], columns: Sequence[Column], width: int) -> list[str]:
    """Lines of a table, at most `width` wide: the first column is shortened, then the whole line."""
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
    """Padded or shortened to a width."""
    return set_cell_size(value, size) if cell_len(value) <= size else set_cell_size(value, size - 1) + "…"


def _wrapped(sentence: str, width: int) -> list[str]:
    return textwrap.wrap(visible(sentence), width, break_long_words=True, break_on_hyphens=False)
