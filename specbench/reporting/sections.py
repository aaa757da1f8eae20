"""The report's order, for a reader who has a minute: the answer, what it costs, what is accepted, who beats whom.

Then, for one who has longer: other runs, the claims, the papers' tables, the studies. What has no rows is one line.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from specbench.records.metrics import BASELINE
from specbench.records.rows import by_error
from specbench.reporting import (
    analysis,
    analysis_tables,
    claims,
    console,
    links,
    overview,
    published,
    tables,
    text,
    trainings,
    verdict,
)
from specbench.reporting.cells import Entry
from specbench.reporting.document import Block, Cell, Details, Figures, Link, Paragraph, Row, Section, Table, Tally
from specbench.reporting.groups import Captioned, groups

if TYPE_CHECKING:
    from specbench.reporting.bundle import Report

AFTER = "answer"  # the section that the page's traces stand behind


def sections(report: "Report") -> list[Section]:
    """All that both media show; traces are the page's alone."""
    found = [
        Section("answer", "Answer", "Which drafter is fastest", [*_lost(report), *_answer(report)]),
        Section("cost", "Cost", "What a drafter costs and what it yields", _cost(report)),
        Section("accepted", "Acceptance", "How much is accepted", _accepted(report)),
        Section("duels", "Duels", "Who beats whom", _duels(report)),
        Section("runs", "Other runs", "Other prompts, targets and machines", _runs(report)),
        Section("claims", "Claims", "Which claims hold here", _ledger(report)),
        Section("papers", "Papers", "The papers' tables, measured here", _papers(report)),
        Section("studies", "Studies", "Every drafter of every study", _studies(report)),
    ]
    return [section for section in found if section.blocks]


def _lost(report: "Report") -> list[Block]:
    """What a reader must know is missing, before anything else."""
    failed = by_error(report.failures).items()
    lost = [Paragraph(f"{', '.join(cells)}: {error}", lead="FAILED") for error, cells in failed]
    return [*lost, *(Paragraph(problem, lead="LEFT OUT") for problem in report.problems)]


def _answer(report: "Report") -> list[Block]:
    view = report.view
    group = view.timed(view.first)
    if not group:
        return [Paragraph(report.answer, "answer")]
    blocks: list[Block] = [Paragraph(report.answer, "answer"), Paragraph(console.caption(group, machine=True), "note")]
    blocks += [Paragraph(busy, lead="CAUTION") for busy in tables.notes(group)]
    if comments := [*console.reasons(group), *console.advice(group)]:
        blocks.append(Paragraph(" ".join(comments)))
    if differ := overview.apart(group):
        blocks.append(Paragraph(f"These rows differ in {', '.join(differ)}: such drafters are not compared below.", "note"))
    return [*blocks, Row([Figures(("speed_up",)), overview.numbers(group)])]


def _cost(report: "Report") -> list[Block]:
    view = report.view
    group = view.timed(view.first)
    if not group:
        return []
    said = (
        "speed-up = tokens a pass / cost, exactly. A drafter above the line 1x pays; further right its cycles are dearer, "
        "further up more of its drafts is accepted."
    )
    times = (
        "A cycle is one draft, one pass of the target over it, one verification. Expected (times): tau * T_AR / "
        "(T_draft + T_tree); only time that belongs to no phase makes the measured speed-up another. Expected "
        "(parameters): CORAL's estimate, by the parameters that passes multiply. The last column is no expectation: it "
        "is what tau and this drafting would make if a pass over a tree cost no more than one over a token."
    )
    folds = [Details("Where a cycle's time goes", [Paragraph(times, "note"), overview.times(group)], "tables/times.md")]
    if memory := tables.memory_lines(group):
        caption = "Peak memory while decoding, MiB, each drafter in a process of its own"
        folds.append(Details("Memory", [Table(tables.MEMORY, memory, caption)], "tables/peaks.md"))
    folds += _insights(report, analysis_tables.TIMED)
    if report.training:
        trained = Table(trainings.COST, report.training)
        folds.append(Details("What training cost", [trained, Figures(("learning_curves",))], "tables/trained.md"))
    return [Paragraph(said, "note"), Figures(("cost",)), *folds]


def _accepted(report: "Report") -> list[Block]:
    view = report.view
    accepting = view.accepting(view.first)
    if not accepting:
        return []
    rows = max(accepting, key=lambda e: e.summary.prompts)
    said = f"tau: tokens that one pass of the target yields, the bonus included. {rows.summary.prompts} generations" + (
        ", replayed: they accept what decoding accepts, and hold no speeds." if rows.replayed else "."
    )
    steps = f"Acceptance by draft step of all drafters; steps tried fewer than {analysis.FEWEST} times are left out"
    others = [name for name in report.insights if name not in analysis_tables.TIMED]
    sets = [overview.acceptance(view), *([overview.speeds(view)] if view.timed(view.first) else [])]
    return [
        Paragraph(said, "note"),
        Figures(("step_alpha",)),
        Details(steps, [Table(tables.ALPHAS, [tables.alphas(e) for e in accepting])], "tables/steps.md"),
        *([Details("tau and speed-up by prompt set", sets, "tables/sets.md")] if len(view.settings) > 1 else []),
        *_insights(report, others),
    ]


def _insights(report: "Report", wanted: Iterable[str]) -> list[Details]:
    """Tables of the same rows, each behind a line, with its figure if there is one."""
    figures = {"positions": "positions", "calibration": "reliability"}
    return [
        Details(title, [*([Figures((figures[name],))] if name in figures else []), Table(*table)], f"tables/{name}.md")
        for name, (title, table) in report.insights.items()
        if name in wanted
    ]


def _duels(report: "Report") -> list[Block]:
    group = overview.top(report.view)
    if len(group) < 2:
        return []
    drafters = [e for e in report.view.timed(report.view.first) if e.name != BASELINE]
    few = verdict.too_little(group)
    coloured = "coloured (bold) where the 95% interval of this pair excludes no difference."
    said = (
        f"The first {len(group)} of the ranking, the line's drafter over the column's; "
        + (f"not coloured: {few}." if few else coloured)
        + (" All pairs: tables/versus.csv." if len(drafters) > len(group) else "")
    )
    return [Paragraph(said, "note"), overview.matrix(group, "speed_up" if group[0].summary.speed_up else "tau")]


# Other runs -----------------------------------------------------------------------------------------------------------


def _runs(report: "Report") -> list[Block]:
    """What was decoded beside that which the answer is about: one's own runs at once, those of a study behind a line."""
    shown = {(e.cell, e.key, len(e.rows)) for e in report.view.timed(report.view.first)}
    blocks: list[Block] = []
    for number, (_, group) in enumerate(groups(report.main)):
        if shown & {(e.cell, e.key, len(e.rows)) for e in group}:
            continue
        newest, _ = console.current(group)
        said = verdict.sentence(newest) if not newest[0].replayed else ""
        own = report.own or group[-1].study is None
        title = console.caption(newest, machine=True) + (f". {said}" if said and not own else "")
        parts = [*([Paragraph(said)] if said and own else []), overview.numbers(newest), *_beside(newest)]
        blocks.append(Details(title, parts, f"tables/run-{number + 1}.md", own))
    return blocks


def _beside(group: Sequence[Entry]) -> list[Block]:
    """What rows hold beside the decoding table."""
    beside = {
        "Problems solved": analysis_tables.solved(group),
        "Over the link": links.table(group),
        "Several clients of one server, tokens/s": links.clients(group),
    }
    found: list[Block] = [Table(columns, lines, title) for title, (columns, lines) in beside.items() if lines]
    return [*found, *(Paragraph(busy, "note") for busy in tables.notes(group))]


def _studies(report: "Report") -> list[Block]:
    """The decoding tables of each study with rows behind one line, and those without any behind another."""
    by_study: dict[str, list[Captioned]] = {}
    for caption, group in groups(report.rest):
        by_study.setdefault(group[0].study or group[0].collection or "runs", []).append((caption, group))
    blocks: list[Block] = []
    for name, found in sorted(by_study.items()):
        known = report.listed.get(name)
        title = f"{name}: {known['title']} ({report.state(name)})" if known else name
        parts = [block for _, group in found for block in _group(group)]
        own = all(group[-1].study is None for _, group in found)
        blocks.append(Details(title, parts, f"tables/study-{text.slug(name)}.md", own))
    if not report.own:
        drawings = Figures(("target_pass", "head_share", "vocabularies", "theory", "training_memory"))
        blocks.append(Details("Figures of the studies", [drawings], "figures.md"))
    idle = [name for name in report.listed if not report.known[name].entries]
    if idle and not report.own:
        lines = [[n, report.listed[n]["title"], "; ".join(report.listed[n]["source"]), report.state(n)] for n in idle]
        table = Table(("study", "what it is", "source", "state"), lines, look="words")
        blocks.append(Details(f"{len(idle)} studies without rows", [table], "studies.md"))
    return blocks


def _group(group: Sequence[Entry]) -> list[Block]:
    return [Paragraph(console.caption(group, machine=True), "note"), overview.numbers(group), *_beside(group)]


# Claims and papers ----------------------------------------------------------------------------------------------------

TONES = {claims.REPRODUCED: "good", claims.NOT_REPRODUCED: "bad", claims.INCONCLUSIVE: "open"}
UNDECIDED = (claims.NOT_TESTABLE, claims.NOT_RUN)
LEDGER = ("verdict", "claim", "source", "measured against the claim")


def _ledger(report: "Report") -> list[Block]:
    """What was judged, the papers' claims before this project's goals; one line each for what was not."""
    live = [v for v in report.verdicts if report.known[v.study].entries]
    idle = len(report.verdicts) - len(live)
    blocks: list[Block] = []
    if decided := [v for v in live if v.verdict not in UNDECIDED]:
        chips = [Cell(f"{count} {kind}", TONES[kind]) for kind, count in claims.tally(decided).items()]
        rule = (
            "A claim compares arms of its own study alone, measured alike. Reproduced: the 95% interval of every effect "
            "lies on its side. Not reproduced: one lies on the other. In brackets behind a source: what it printed."
        )
        parts: list[Block] = [Paragraph(rule, "note")]
        for caption, own in (("The papers' claims", False), ("This project's goals", True)):
            if found := [v for v in decided if claims.is_goal(v) == own]:
                parts.append(Table(LEDGER, list(map(_claim, found)), caption, "words"))
        blocks += [Tally(f"{len(decided)} judged", chips), *([Paragraph(report.judged, "note")] if report.judged else [])]
        blocks += [Details("Every claim that was judged", parts, "claims.md", True)]
    if report.own:
        idle = len(report.verdicts) - len(decided)
    else:
        for kind in UNDECIDED:
            if found := [v for v in live if v.verdict == kind]:
                table = Table(LEDGER, list(map(_claim, found)), look="words")
                blocks.append(Details(f"{len(found)} claims {kind}", [table], f"claims-{text.slug(kind)}.md"))
    if idle:
        blocks.append(
            Paragraph(f"{idle} claims of papers and goals of this project are about what was not run here.", "note")
        )
    return blocks


def _claim(v: claims.Verdict) -> list[str | Cell]:
    source = v.claim["source"] if claims.is_goal(v) else f"{v.claim['source']} ({v.claim['published']})"
    measured = Cell("", parts=tuple(v.said.split("; ")))
    return [Cell(v.verdict, TONES.get(v.verdict, "away")), v.claim["says"], source, measured]


def _papers(report: "Report") -> list[Block]:
    """Tables of which a study measured something, each behind a line; the others are files."""
    measured = [paper for paper in report.papers if paper.measured]
    if not measured:
        return []
    said = "Only rows and columns with something measured; what a paper measured on another target is in its file."
    blocks: list[Block] = [Paragraph(said, "note")]
    for paper in measured:
        title = f"{paper.title}: study {paper.study}, {paper.measured} cells measured"
        blocks.append(Details(title, [Paragraph(paper.targets, "note"), paired(paper)], f"tables/{paper.slug}.md"))
    rest = [Link(p.title, f"tables/{p.slug}.md") for p in report.papers if not p.measured]
    title = f"{len(rest)} published tables and figures of which nothing was measured here"
    return [*blocks, *([Details(title, rest, "papers.md")] if rest else [])]


def paper_file(paper: published.PaperTable) -> list[Block]:
    """What stands in the file of a paper's table: what was measured, all that was published, and its notes."""
    notes = [Paragraph(f"- {note}") for note in (*paper.notes, *(f"tau: {c}" for c in paper.conventions))]
    lines = [[row, *(p.published if p else "" for p in line)] for row, line in zip(paper.cells, paper.pairs(), strict=True)]
    alone = Table(("published", *paper.columns), lines, look="pairs")
    return [Paragraph(paper.targets, "note"), *([paired(paper)] if paper.measured else []), alone, *notes]


def paired(paper: published.PaperTable) -> Table:
    """What was measured of a table, with what was published for the same target."""
    pairs = paper.pairs()
    columns = [i for i in range(len(paper.columns)) if any(_ours(line[i]) for line in pairs)]
    lines: list[list[str | Cell]] = [
        [row, *(_pair(line[i]) for i in columns)]
        for row, line in zip(paper.cells, pairs, strict=True)
        if any(map(_ours, line))
    ]
    return Table(("measured / published", *(paper.columns[i] for i in columns)), lines, look="pairs")


def _ours(pair: published.Pair | None) -> bool:
    return pair is not None and (pair.measured is not None or (pair.alike and bool(pair.published)))


def _pair(pair: published.Pair | None) -> Cell:
    if pair is None or (pair.measured is None and not pair.published):
        return Cell("")
    printed = (pair.published if pair.alike else published.ELSEWHERE) if pair.published else tables.ABSENT
    return Cell(published.shown(pair) or tables.ABSENT, "", beside=printed, hint=pair.said)
