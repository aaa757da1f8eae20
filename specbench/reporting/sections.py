"""The report's order, for a reader who has a minute: the answer, what is accepted, who beats whom, where time goes.

Then, for one who has longer: the claims, the papers' tables, every cell.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from specbench.metrics import BASELINE
from specbench.records.rows import by_error
from specbench.reporting import claims, insight, insight_tables, links, overview, published, tables, verdict
from specbench.reporting.cells import Entry
from specbench.reporting.document import Block, Cell, Figures, Fold, Says, Section, Table, Tally
from specbench.reporting.groups import groups
from specbench.reporting.overview import Overview

if TYPE_CHECKING:
    from specbench.reporting.bundle import Report


def sections(report: "Report") -> list[Section]:
    """All that both media show; traces are the page's alone."""
    found = [
        Section("answer", "Answer", "Which drafter is fastest", [*_lost(report), *_answer(report)]),
        Section("accepted", "Acceptance", "How much is accepted", _accepted(report.view)),
        Section("duels", "Differences", "Who beats whom", _duels(report.view)),
        Section("time", "Time", "Where the time goes, and the memory", _time(report.view)),
        Section("why", "Why", "What lies behind acceptance", _why(report)),
        Section("others", "Other targets", "Other targets and machines", _others(report.others)),
        Section("claims", "Claims", "Which published claims hold here", _ledger(report)),
        Section("papers", "Papers", "The papers' tables, measured beside published", _papers(report)),
        Section("cells", "Everything", "Every drafter of every cell", _cells(report)),
    ]
    return [section for section in found if section.blocks]


def _lost(report: "Report") -> list[Block]:
    """What a reader must know is missing, before anything else."""
    failed = by_error(report.failures).items()
    lost = [Says(f"{', '.join(cells)}: {error}", lead="FAILED") for error, cells in failed]
    return [*lost, *(Says(problem, lead="LEFT OUT") for problem in report.problems)]


def _answer(report: "Report") -> list[Block]:
    view = report.view
    group = view.timed(view.first)
    if not group:
        return [Says(report.answer, "answer")]
    most = max(e.summary.prompts for e in group)
    said = f"{group[0].caption}, {most} generations a drafter. 95% intervals, coloured (bold) where they exclude 1."
    blocks: list[Block] = [Says(report.answer, "answer"), Says(said, "note")]
    blocks += [Says(busy, lead="CAUTION") for busy in tables.disturbances(group)]
    if differ := overview.apart(group):
        blocks.append(Says(f"These rows differ in {', '.join(differ)}: such drafters are not compared below.", "note"))
    return [*blocks, Figures(("speed_up",), wide=True), overview.numbers(group)]


def _accepted(view: Overview) -> list[Block]:
    accepting = view.accepting(view.first)
    if not accepting:
        return []
    said = (
        "tau: tokens that one pass of the target yields, the bonus included. Replayed rows follow the baseline's answers "
        "without target passes: they accept what decoding accepts, hold more questions and no speeds."
    )
    steps = f"Acceptance by draft step; steps tried fewer than {insight.FEWEST} times are left out"
    blocks: list[Block] = [Says(said, "note"), overview.acceptance(view)]
    timed = overview.speeds(view)
    if len(timed.columns) > 2:
        blocks.append(timed)
    blocks.append(Figures(("step_alpha", "tau_speed_up")))
    return [*blocks, Fold(steps, [Table(tables.ALPHAS, [tables.alphas(e) for e in accepting])])]


def _duels(view: Overview) -> list[Block]:
    timed = [e for e in view.timed(view.first) if e.summary.speed_up is not None]
    accepting = view.accepting(view.first)
    squares = [
        overview.matrix(group, metric)
        for group, metric in ((timed, "speed_up"), (accepting, "tau"))
        if len(group) > 1
    ]  # fmt: skip
    said = (
        f"On {view.first}. A cell is about the drafter of its line against that of its column. It is coloured (bold) only "
        "where the 95% interval excludes no difference at all; questions are resampled, for both drafters the same."
    )
    return [Says(said, "note"), *squares] if squares else []


def _why(report: "Report") -> list[Block]:
    found = report.insights
    if not found:
        return []
    said = (
        "From the same rows: where in an answer drafts are accepted, what is verified in vain, what better choices would "
        "bring, how far drafters' probabilities can be believed, and tau as other papers and programs count it."
    )
    drawings = Figures(("lengths", "positions", "categories", "reliability"))
    folds = [Fold(title, [Table(columns, lines)]) for title, (columns, lines) in found.values()]
    return [Says(said, "note"), drawings, *folds]


def _time(view: Overview) -> list[Block]:
    group = view.timed(view.first)
    if not group:
        return []
    said = (
        "A cycle is one draft, one pass of the target over it, one verification. Expected (times): tau * T_AR / "
        "(T_draft + T_tree), from measured seconds of a plain cycle, of drafting and of the pass over the tree; only time "
        "that belongs to no phase makes the measured speed-up another. Expected (parameters): CORAL's estimate, by the "
        "parameters that passes multiply; absent where rows did not count their draft passes. The last column is no "
        "expectation: it is what tau and this drafting would make if a pass over a tree cost no more than one over a token."
    )
    blocks: list[Block] = [
        Says(said, "note"),
        overview.times(group),
        Figures(("time_split", "predictions", "target_pass", "head_share")),
    ]
    memory = tables.memory_lines(group)
    caption = "Peak memory while decoding, MiB, each drafter in a process of its own"
    return [*blocks, *([Table(tables.MEMORY, memory, caption)] if memory else [])]


def _others(others: Sequence[Overview]) -> list[Block]:
    blocks: list[Block] = []
    for view in others:
        group = view.timed(view.first) or view.accepting(view.first)
        if not group:
            continue
        blocks += [Says(f"{group[0].caption}.", "note"), Says(verdict.sentence(group), "answer"), overview.numbers(group)]
    return blocks


TONES = {claims.REPRODUCED: "good", claims.NOT_REPRODUCED: "bad", claims.INCONCLUSIVE: "open"}


UNDECIDED = (claims.NOT_TESTABLE, claims.NOT_RUN)
LEDGER = ("verdict", "claim", "source", "published", "measured here")


def _ledger(report: "Report") -> list[Block]:
    """What was judged, and behind a line each what needs more than is here, and what was not run."""
    if not report.verdicts:
        return []
    counts = claims.tally(report.verdicts)
    chips = [Cell(f"{count} {kind}", TONES.get(kind, "away")) for kind, count in counts.items()]
    rule = (
        "A claim compares arms of its own study alone, measured alike. Reproduced: the 95% interval of every effect lies "
        "on its side. Not reproduced: one lies on the other. Not testable here: the study needs what is not there."
    )
    judged = [Says(report.judged, "note")] if report.judged else []
    decided = _claims(v for v in report.verdicts if v.verdict not in UNDECIDED)
    rest = {kind: _claims(v for v in report.verdicts if v.verdict == kind) for kind in UNDECIDED if kind in counts}
    return [
        Tally(f"{len(report.verdicts)} claim{'s' * (len(report.verdicts) > 1)}", chips),
        *judged,
        Says(rule, "note"),
        *([decided] if decided.lines else []),
        *(Fold(f"{counts[kind]} {kind}", [table]) for kind, table in rest.items()),
    ]


def _claims(verdicts: Iterable[claims.Verdict]) -> Table:
    lines: list[list[str | Cell]] = []
    for v in verdicts:
        says, source, printed, measured, verdict = claims.cells(v)
        effects = Cell("", parts=tuple(measured.split("; ")))
        lines.append([Cell(verdict, TONES.get(verdict, "away")), says, source, printed, effects])
    return Table(LEDGER, lines, look="words")


STUDIES = ("study", "what it is", "source", "state")


def _papers(report: "Report") -> list[Block]:
    """Tables that a study rebuilt, then what every study is about, then what is published and not measured."""
    blocks: list[Block] = []
    for paper in report.papers:
        if paper.measured:
            title = f"{paper.title}: study {paper.study}, {paper.measured} cells measured"
            blocks.append(Fold(title, [Says(paper.targets, "note"), paired(paper), *_notes(paper)], open=True))
    if blocks:
        said = (
            "Measured (bold) above published (grey); a dash was not measured. Other target, other machine: compare orders."
        )
        blocks.insert(0, Says(said, "note"))
    blocks += [Figures(("router_speed_up", "router_tau")), Figures(("theory",), wide=True)]
    if report.listed:
        blocks.append(Table(STUDIES, _studies(report), "The studies", "words"))
    rest = [
        Fold(p.title, [Says(p.targets, "note"), published_alone(p), *_notes(p)], file=f"tables/{p.slug}.md")
        for p in report.papers
        if not p.measured
    ]
    return [*blocks, *([Fold(f"Published and not measured here: {len(rest)} tables and figures", rest)] if rest else [])]


def _studies(report: "Report") -> list[list[str]]:
    return [[name, study["title"], "; ".join(study["source"]), report.state(name)] for name, study in report.listed.items()]


def _notes(paper: published.PaperTable) -> list[Block]:
    notes = [Says(note, "note") for note in (*paper.notes, *(f"tau: {c}" for c in paper.conventions))]
    return [Fold(f"notes on the published numbers ({len(notes)})", notes)] if notes else []


def paired(paper: published.PaperTable) -> Table:
    """A rebuilt table: measured and published a cell."""
    lines: list[list[str | Cell]] = []
    for row, pairs in zip(paper.cells, paper.pairs(), strict=True):
        ours = any(pair and pair.measured is not None for pair in pairs)
        lines.append([Cell(row, "" if ours else "away"), *(_pair(pair, ours) for pair in pairs)])
    return Table(("measured / published", *paper.columns), lines, look="pairs")


def _pair(pair: published.Pair | None, ours: bool) -> Cell:
    """ours: was anything of its row measured?"""
    if pair is None or (pair.measured is None and not pair.published):
        return Cell("")
    measured, tone = published.shown(pair) or tables.ABSENT, "" if ours else "away"
    return Cell(measured, tone, beside=pair.published or tables.ABSENT, hint=pair.said)


def published_alone(paper: published.PaperTable) -> Table:
    """A table as its paper has it."""
    lines = [[row, *(p.published if p else "" for p in line)] for row, line in zip(paper.cells, paper.pairs(), strict=True)]
    return Table(("published", *paper.columns), lines, look="pairs")


def _cells(report: "Report") -> list[Block]:
    """The decoding tables, those of a study behind one line."""
    by_study: dict[str, list[Block]] = {}
    for caption, group in [*groups(report.main), *groups(report.rest)]:
        name = group[0].study
        title = f"study {name}: {report.listed[name]['title']}" if name in report.listed else name or group[0].collection
        lines = [tables.cells(e) for e in _baseline_first(group)]
        found = by_study.setdefault(title or "runs", [])
        found.append(Table(tables.COLUMNS, lines, f"{caption}, {group[0].summary.prompts} generations"))
        beside = {
            "Problems solved": insight_tables.solved(group),
            "Over the link": links.table(group),
            "Several clients of one server, tokens/s": links.clients(group),
        }
        found += [Table(columns, lines, title) for title, (columns, lines) in beside.items() if lines]
        found += [Says(busy, "note") for busy in tables.disturbances(group)]
    blocks: list[Block] = [Fold(title, parts) for title, parts in by_study.items()]
    if report.training:
        blocks.append(Table(tables.TRAINING, report.training, "What the drafters cost to train"))
    return [*blocks, Figures(("learning_curves", "training_memory"), wide=True)]


def _baseline_first(group: Sequence[Entry]) -> list[Entry]:
    return sorted(group, key=lambda e: e.name != BASELINE)
