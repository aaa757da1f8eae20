"""The command `specbench`: `specbench X` is `python -m specbench.X`; help and lists import neither torch nor Hydra.

specbench run drafter=eagle2 dataset=mtbench
specbench run --help drafter=lookahead
specbench list drafters
"""

import runpy
import signal
import sys
import textwrap

from specbench import __version__
from specbench.common.errors import SpecBenchError, nearest, visible, warn
from specbench.config import listing, usage

LISTS = f"""usage: specbench list {"|".join(listing.KINDS)} [--model=NAME]

What there is to choose from, one line each: what it is, what it needs, whether it is here. Nothing is downloaded.

drafters: `here` is about weights for the target --model, by default that of specbench run; others are trained \
by specbench train, or taken from the hub where they are published.
models: memory is that of the weights in bfloat16 (GPUs, CPUs with AMX) to float32 (other CPUs); what is not here is \
downloaded on first use.
datasets: what is not here is downloaded on first use; data.root=FOLDER takes FOLDER/NAME.jsonl instead.
studies: the table or figure that each reproduces; whether there are rows of it under results.
Lines are cut at the terminal's width, or at COLUMNS."""


def main() -> None:
    """Run the command line; the exit code is that of the command, 2 for none or an unknown one."""
    command, *rest = sys.argv[1:] or [""]
    if command in usage.COMMANDS and not usage.asks_for_help(rest):
        sys.argv[1:] = rest
        runpy.run_module(f"specbench.{command}", run_name="__main__", alter_sys=True)
        sys.exit(0)
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a closed pipe (`| head`) ends the process quietly
    try:
        print(_text(command, rest))
    except SpecBenchError as error:
        warn(str(error))
        sys.exit(2)
    sys.exit(0 if command else 2)


def _text(command: str, rest: list[str]) -> str:
    """What a command prints that imports no model. Raises `SpecBenchError` for an unknown command."""
    if command in usage.COMMANDS:
        return usage.help_text(command, rest)
    if command == "list":
        return _wrapped(LISTS) if usage.asks_for_help(rest) else listing.list_text(rest)
    if command == "--version":
        return f"specbench {__version__}"
    if command in ("", "help", *usage.FLAGS):
        return _overview()
    known = [*usage.COMMANDS, "list", "--version", "help", *usage.FLAGS]
    raise SpecBenchError(f"{visible(command)}: there is no such command{nearest(command, known)}")


def _overview() -> str:
    rows = [(command, usage.summary(command)) for command in usage.COMMANDS]
    rows += [("list", f"List {', '.join(listing.KINDS)}: what each needs, whether it is here")]
    rows += [("--version", "Print the version")]
    lines = [line for command, summary in rows for line in usage.row(command, summary, column=14)]
    examples = [f"  {line}" for line in (__doc__ or "").splitlines() if line.startswith("specbench ")]
    closing = "specbench COMMAND --help: its options, their defaults and meanings"
    return "\n".join(["usage: specbench COMMAND ...", "", *lines, "", *examples, "", closing])


def _wrapped(text: str) -> str:
    return "\n".join(line for block in text.splitlines() for line in textwrap.wrap(block, usage.WIDTH) or [""])


if __name__ == "__main__":
    main()
