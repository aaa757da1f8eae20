"""The report's sections: the answer, costs, acceptance, duels; then other runs, claims, the papers' tables, studies.

A section without rows is left out.
"""

from collections import Counter
from collections.abc import Container, Sequence
from typing import TYPE_CHECKING

from specbench.records.metrics import BASELINE
from specbench.records.rows import by_error
from specbench.reporting import (
    analysis,
    analysis_tables,
    claims,
    console,
    energy,
    engines,
    fastest,
    learning,
    links,
    overview,
    published,
    ranking,
    tables,
    text,
    trainings,
)
from specbench.reporting.cells import Entry
from specbench.reporting.document import (
    Block,
    Details,
    Figures,
    Link,
    Paragraph,
    Section,
    SideBySide,
    Table,
    TableCell,
    Tally,
)
from specbench.reporting.groups import groups

if TYPE_CHECKING:
    from specbench.reporting.bundle import Report

AFTER = "answer"  # anchor of the section that the page's traces follow


def sections(report: "Report") -> list[Section]:
    """Everything that Markdown and the page share."""
    timed = report.view.timed(report.view.first)
    accepting = report.view.accepting(report.view.first)
    made = [
        Section("answer", "Answer", "Which drafter is fastest", [*_problems(report), *_answer(report, timed)]),
        Section("cost", "Cost", "What a drafter costs and what it yields", _cost(report, timed)),
        Section("accepted", "Acceptance", "How much is accepted", _accepted(report, accepting)),
        Section("duels", "Pairs", "Pairwise comparison", _duels(report, timed)),
        Section("ranking", "Ranking", "Who accepts most on equal footing", _rankings(report)),
        Section("runs", "Other runs", "Other prompts, targets and machines", _runs(report, timed)),
        Section("claims", "Claims", "Which claims hold here", _ledger(report)),
        Section("papers", "Papers", "The papers' tables and figures, measured here", [*_papers(report), *_figures(report)]),
        Section("studies", "Studies", "Every drafter of every study", _studies(report)),
    ]
    return [section for section in made if section.blocks]


def _problems(report: "Report") -> list[Block]:
    """Failed cells and files that were left out."""
    failed = by_error(report.failures).items()
    blocks: list[Block] = [Paragraph(f"{', '.join(cells)}: {error}", lead="FAILED") for error, cells in failed]
    return [*blocks, *(Paragraph(problem, lead="LEFT OUT") for problem in report.problems)]


def _answer(report: "Report", timed: Sequence[Entry]) -> list[Block]:
    blocks: list[Block] = [Paragraph(report.answer, "answer")]
    if not timed:
        return blocks
    blocks.append(Paragraph(console.caption(timed, machine=True), "note"))
    blocks += [Paragraph(note, lead="CAUTION") for note in tables.notes(timed)]
    if comments := [*console.reasons(timed), *console.advice(timed)]:
        blocks.append(Paragraph(" ".join(comments)))
    if aspects := overview.differences(timed):
        blocks.append(
            Paragraph(f"These rows differ in {', '.join(aspects)}: such drafters are not compared below.", "note")
        )
    blocks.append(SideBySide([Figures(("speed_up",)), overview.numbers(timed)]))
    return [*blocks, *(Paragraph(note, "note") for note in trainings.about(timed))]


def _cost(report: "Report", timed: Sequence[Entry]) -> list[Block]:
    if not timed:
        return []
    formula = (
        "speed-up = tokens a pass / cost, exactly. A drafter above the line 1x pays; points further right cost more a "
        "cycle, points further up yield more tokens a pass."
    )
    times = (
        "A cycle is one draft, one pass of the target over it, one verification. Expected (times): tau * T_AR / "
        "(T_draft + T_tree); only time that belongs to no phase makes the measured speed-up another. Expected "
        "(parameters), where it is known: CORAL's estimate, by the parameters that passes multiply. The last column is no "
        "expectation: it is what tau and this drafting would make if a pass over a tree cost no more than one over a token."
    )
    cautions = [Paragraph(note, "note") for note in tables.notes(timed)]
    parts: list[Block] = [Paragraph(times, "note"), *cautions, overview.times(timed), Figures(("target_pass",))]
    folds = [Details("Where a cycle's time goes", parts, "tables/times.md")]
    if memory := tables.memory_lines(timed):
        caption = "Peak memory while decoding, MiB; on a CPU of a process for each drafter, on a GPU as torch allocated it"
        folds.append(Details("Memory", [Table(tables.MEMORY, memory, caption)], "tables/peaks.md"))
    if used := energy.lines(timed):
        caption = "Of generations on a GPU, as its driver counts: all that ran there, prompts included"
        folds.append(Details("Energy and clocks", [Table(energy.COLUMNS, used, caption)], "tables/energies.md"))
    folds += _insights(report, analysis_tables.TIMED)
    if report.training:
        trained = Table(trainings.COST, report.training)
        folds.append(Details("What training cost", [trained], "tables/trained.md"))
    if report.learning:
        curves = Figures(("learning_curves",))
        parts = [Paragraph(learning.NOTE, "note"), Table(learning.COLUMNS, report.learning), curves]
        folds.append(Details("What more training would bring", parts, "tables/learning.md"))
    return [Paragraph(formula, "note"), Figures(("cost",)), *folds]


def _accepted(report: "Report", accepting: Sequence[Entry]) -> list[Block]:
    if not accepting:
        return []
    largest = max(accepting, key=lambda e: e.summary.prompts)
    kind = ", replayed: they accept what decoding accepts, and hold no speeds." if largest.replayed else "."
    note = (
        f"tau: tokens that one pass of the target yields, the bonus included. {largest.summary.prompts} generations{kind}"
    )
    steps = f"Acceptance by draft step of all drafters; steps tried fewer than {analysis.FEWEST} times are left out"
    lines = [tables.alphas(e) for e in accepting]
    folds = [Details(steps, [Table(tables.ALPHAS, lines)], "tables/steps.md")]
    if len(report.view.settings) > 1:
        sets = [overview.acceptance(report.view)]
        sets += [overview.speeds(report.view)] if report.view.timed(report.view.first) else []
        folds.append(Details("tau and speed-up by prompt set", sets, "tables/sets.md"))
    folds += _insights(report, report.insights.keys() - {*analysis_tables.TIMED})
    return [Paragraph(note, "note"), Figures(("step_alpha",)), *folds]


def _insights(report: "Report", names: Container[str]) -> list[Details]:
    """Tables of `analysis_tables` with notes and figures."""
    first: dict[str, list[Block]] = {
        "positions": [Paragraph(analysis_tables.POSITIONS, "note"), Figures(("positions",))],
        "calibration": [Figures(("reliability",))],
    }
    return [
        Details(title, [*first.get(name, []), Table(*table)], f"tables/{name}.md")
        for name, (title, table) in report.insights.items()
        if name in names
    ]


def _duels(report: "Report", timed: Sequence[Entry]) -> list[Block]:
    group = overview.top(report.view)
    if len(group) < 2:
        return []
    problem = fastest.too_little(group)
    colours = "coloured (bold) where the 95% interval of this pair excludes no difference."
    note = f"The first {len(group)} of the ranking, the line's drafter over the column's; "
    note += f"not coloured: {problem}." if problem else colours
    drafters = sum(e.name != BASELINE for e in timed)
    if drafters > len(group):
        part = f" of the first {overview.MAX_PAIRED} drafters" if drafters > overview.MAX_PAIRED else ""
        note += f" All pairs{part}: tables/versus.csv."
    return [Paragraph(note, "note"), overview.matrix(group, "speed_up" if group[0].summary.speed_up else "tau")]


def _rankings(report: "Report") -> list[Block]:
    shipped = report.evidence.get("bench")
    return [block for evidence in report.evidence.values() for block in ranking.blocks(evidence, shipped)]


# Other runs -----------------------------------------------------------------------------------------------------------


def _runs(report: "Report", timed: Sequence[Entry]) -> list[Block]:
    """The main result's other groups: plain runs open, those of a study folded."""
    shown = {(e.cell, e.key, e.questions) for e in timed}
    blocks: list[Block] = []
    for number, group in enumerate(groups(report.main)):
        if shown & {(e.cell, e.key, e.questions) for e in group}:
            continue
        newest, _ = console.current(group)
        answer = fastest.sentence(newest) if not newest[0].replayed else ""
        own = report.no_studies or group[-1].study is None
        title = console.caption(newest, machine=True) + (f". {answer}" if answer and not own else "")
        parts = [*([Paragraph(answer)] if answer and own else []), overview.numbers(newest), *_beside(newest)]
        blocks.append(Details(title, parts, f"tables/run-{number + 1}.md", own))
    return blocks


def _beside(group: Sequence[Entry]) -> list[Block]:
    """Further tables and notes below the decoding table."""
    beside = {
        "Problems solved": analysis_tables.solved(group),
        "Summaries": analysis_tables.summaries(group),
        "Drift of sampled answers": analysis_tables.drift(group),
        "Over the link": links.table(group),
        "Several clients of one server, tokens/s": links.clients(group),
        "Other engines, the same prompts in turn": engines.table(group),
    }
    made: list[Block] = [Table(columns, lines, title) for title, (columns, lines) in beside.items() if lines]
    return [*made, *(Paragraph(note, "note") for note in [*trainings.about(group), *tables.notes(group)])]


def _studies(report: "Report") -> list[Block]:
    """The decoding tables of each study, and a table of the studies without rows."""
    by_study: dict[str, list[list[Entry]]] = {}
    for group in groups(report.rest):
        by_study.setdefault(group[0].study or group[0].collection or "runs", []).append(group)
    blocks: list[Block] = []
    files: Counter[str] = Counter()  # names can be equal but for what a file name cannot hold
    for name, own_groups in sorted(by_study.items()):
        study = report.studies.get(name)
        title = f"{name}: {study['title']} ({report.state(name)})" if study else name
        parts = [block for group in own_groups for block in _group(group)]
        own = all(group[-1].study is None for group in own_groups)
        files[file := text.slug(name)] += 1
        number = f"_{files[file]}" if files[file] > 1 else ""
        blocks.append(Details(title, parts, f"tables/study-{file}{number}.md", own))
    if report.no_studies:
        return blocks
    idle = {name: study for name, study in report.studies.items() if not report.evidence[name].entries}
    if idle:
        lines = [[name, study["title"], "; ".join(study["source"]), report.state(name)] for name, study in idle.items()]
        table = Table(("study", "what it is", "source", "state"), lines, look="words")
        blocks.append(Details(f"{len(idle)} studies without rows", [table], "studies.md"))
    return blocks


def _group(group: Sequence[Entry]) -> list[Block]:
    return [Paragraph(console.caption(group, machine=True), "note"), overview.numbers(group), *_beside(group)]


# Claims and papers ----------------------------------------------------------------------------------------------------

TONES = {claims.REPRODUCED: "good", claims.NOT_REPRODUCED: "bad", claims.INCONCLUSIVE: "open"}
UNDECIDED = (claims.PRELIMINARY, claims.NOT_TESTABLE, claims.NOT_RUN)
LEDGER = ("verdict", "claim", "source", "measured against the claim")


def _ledger(report: "Report") -> list[Block]:
    """The judged claims, the papers' before this project's goals; folded, those that could not be judged."""
    live = [v for v in report.verdicts if report.evidence[v.study].entries]
    decided = [v for v in live if v.verdict not in UNDECIDED]
    blocks: list[Block] = []
    if decided:
        chips = [TableCell(f"{count} {kind}", TONES[kind]) for kind, count in claims.tally(decided).items()]
        rule = (
            "A claim compares arms of its own study alone, measured alike. Reproduced: the 95% interval of every effect "
            "lies on its side. Not reproduced: one lies on the other. Preliminary: its study plans more, or speeds do not "
            "count. In brackets behind a source: what it printed."
        )
        parts: list[Block] = [Paragraph(rule, "note")]
        for caption, goals in (("The papers' claims", False), ("This project's goals", True)):
            if own := [v for v in decided if claims.is_goal(v) == goals]:
                parts.append(Table(LEDGER, list(map(_claim, own)), caption, "words"))
        blocks += [
            Tally(f"{len(decided)} judged", chips),
            *([Paragraph(report.target_note, "note")] if report.target_note else []),
        ]
        blocks.append(Details("Every claim that was judged", parts, "claims.md", True))
    for kind in () if report.no_studies else UNDECIDED:
        if own := [v for v in live if v.verdict == kind]:
            table = Table(LEDGER, list(map(_claim, own)), look="words")
            part = ", of studies that were run in part" if kind == claims.NOT_RUN else ""
            blocks.append(Details(f"{len(own)} claims {kind}{part}", [table], f"claims-{text.slug(kind)}.md"))
    if idle := len(report.verdicts) - len(decided if report.no_studies else live):
        note = f"{idle} claims and goals belong to studies of which nothing was run here."
        blocks.append(Paragraph(note, "note"))
    return blocks


def _claim(v: claims.ClaimVerdict) -> list[str | TableCell]:
    source = v.claim["source"] if claims.is_goal(v) else f"{v.claim['source']} ({v.claim['published']})"
    measured = TableCell("", parts=tuple(v.summary.split("; ")))
    return [TableCell(v.shown, TONES.get(v.verdict, "away")), v.claim["says"], source, measured]


def _papers(report: "Report") -> list[Block]:
    """The published tables of which something was measured; the others as links to their files."""
    measured = [paper for paper in report.papers if paper.measured]
    if not measured:
        return []
    note = "Only rows and columns with something measured; what a paper measured on another target is in its file."
    blocks: list[Block] = [Paragraph(note, "note")]
    for paper in measured:
        title = f"{paper.title}: study {paper.study}, {paper.measured} cell{'s' * (paper.measured > 1)} measured"
        blocks.append(Details(title, [Paragraph(paper.targets, "note"), paired(paper)], f"tables/{paper.slug}.md"))
    if rest := [Link(p.title, f"tables/{p.slug}.md") for p in report.papers if not p.measured]:
        title = f"{len(rest)} published tables and figures without a measured value beside theirs"
        blocks.append(Details(title, rest, "papers.md"))
    return blocks


def _figures(report: "Report") -> list[Block]:
    """The figures that studies declare, and a table of those that wait for rows."""
    if report.no_studies:
        return []
    drawn = [(figure.name, figure.chart) for figure in report.figures if figure.chart is not None]
    blocks: list[Block] = []
    if drawn:
        shown: list[Block] = []
        for name, chart in drawn:
            shown += [Figures((name,)), *chart.tables]
        blocks.append(Details(f"{len(drawn)} figures of the papers, from their studies' rows", shown, "figures.md"))
    if missing := [figure for figure in report.figures if figure.chart is None]:
        lines = [[figure.source, figure.title, figure.missing] for figure in missing]
        table = Table(("figure", "what it shows", "what it waits for"), lines, look="words")
        blocks.append(Details(f"{len(missing)} figures without rows", [table], "figures-missing.md"))
    return blocks


def paper_file(paper: published.PaperTable) -> list[Block]:
    """The file of a paper's table: measured values, all published values, notes."""
    notes = [Paragraph(f"- {note}") for note in (*paper.notes, *(f"tau: {c}" for c in paper.conventions))]
    lines = [[row, *(p.published if p else "" for p in line)] for row, line in zip(paper.cells, paper.pairs(), strict=True)]
    printed = Table(("published", *paper.columns), lines, look="pairs")
    return [Paragraph(paper.targets, "note"), *([paired(paper)] if paper.measured else []), printed, *notes]


def paired(paper: published.PaperTable) -> Table:
    """Rows and columns with measured values or with values published for the same target."""
    pairs = paper.pairs()
    columns = [i for i in range(len(paper.columns)) if any(_relevant(line[i]) for line in pairs)]
    lines: list[list[str | TableCell]] = [
        [row, *(_pair(line[i]) for i in columns)]
        for row, line in zip(paper.cells, pairs, strict=True)
        if any(map(_relevant, line))
    ]
    return Table(("measured / published", *(paper.columns[i] for i in columns)), lines, look="pairs")


def _relevant(pair: published.Pair | None) -> bool:
    return pair is not None and (pair.measured is not None or (pair.alike and bool(pair.published)))


def _pair(pair: published.Pair | None) -> TableCell:
    if pair is None or (pair.measured is None and not pair.published):
        return TableCell("")
    printed = (pair.published if pair.alike else published.ELSEWHERE) if pair.published else tables.ABSENT
    return TableCell(published.shown(pair) or tables.ABSENT, beside=printed, hint=pair.source)
