"""What every command does around its job: any error ends in one line and exit code 2.

In a sweep the next job begins, and the exit code follows at the end.
"""

import argparse
import functools
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import hydra
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from specbench.common import storage
from specbench.common.errors import SpecBenchError, format_exception, one_line, visible
from specbench.config import catalog, usage, validation

CONF = str(storage.PROJECT / "conf")
QUOTES = "'\""


def handle_errors(job: Callable[..., None]) -> Callable[..., bool]:
    """Wrap a job: its errors are printed here, before Hydra adds lines of its own.

    Returns:
        The job; in a sweep it says whether it was done, elsewhere a failure ends the process with its exit code.
    """

    @functools.wraps(job)
    def wrapped(*args: Any) -> bool:
        try:
            job(*args)
        except KeyboardInterrupt:
            sys.exit(_complain("interrupted; run the same command again to continue"))
        except Exception as error:
            code = _complain(_no_choice(error) or format_exception(error))  # once: it may write a traceback down
            if not sweeping():
                sys.exit(code)
            return False
        return True

    return wrapped


def command(name: str) -> Callable[[Callable[..., None]], Callable[[], None]]:
    """Makes a job the main function of a command, called with the configuration that `conf/<name>.yaml` composes.

    A sweep goes on behind a job that failed; the command then ends with exit code 2.
    """

    def wrap(job: Callable[..., None]) -> Callable[[], None]:
        done: list[bool] = []  # of jobs in this process
        safe = handle_errors(job)

        @functools.wraps(job)
        def watched(config: DictConfig) -> None:
            done.append(safe(config))

        run: Callable[[], None] = hydra.main(version_base="1.3", config_path=CONF, config_name=name)(watched)

        def main() -> None:
            done.clear()
            run()
            if not all(done):
                sys.exit(2)

        return main

    return wrap


def choice(group: str) -> str:
    """Which file of a group the running command takes: `choice("study")`."""
    return str(HydraConfig.get().runtime.choices[group])


def typed_overrides() -> list[tuple[str, str]]:
    """The overrides that were typed: the option and the whole override, in order."""
    task = list(HydraConfig.get().overrides.task)
    parsed = OverridesParser.create().parse_overrides(task)
    return [(option.key_or_group, word) for option, word in zip(parsed, task, strict=True)]


def run_cli(main: Callable[[], None], name: str | None = None) -> None:
    """Run a command. name: of its configuration, to find the option that a misspelt one is near to."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # let Hydra's own errors reach us unformatted
    sys.argv[1:] = spelt_out(sys.argv[1:])
    try:
        if name is not None and usage.asks_for_help(sys.argv[1:]):
            print(usage.help_text(name, sys.argv[1:]))
            return
        if name is not None:
            catalog.require_optional(name, sys.argv[1:])
        main()
    except KeyboardInterrupt:
        sys.exit(_complain("interrupted; run the same command again to continue"))
    except Exception as error:
        sys.exit(_complain(_no_choice(error) or _no_option(error, name) or _unreadable(error) or format_exception(error)))


def spelt_out(typed: list[str]) -> list[str]:
    """What words of a command line stand for, as overrides.

    `link=tcp://host:port`  an address is no file under `conf/link`
    `drafter=[a,b]`         several drafters beside one baseline: the first one's options, and the names of all
    `prompts=FILE`          a data set of that file's prompts and name, see `conf/dataset/prompts.yaml`
    `model.path=DIR`        alone: a model of that folder's name, or its rows would stand under the default target's
    """
    words: list[str] = []
    for word in typed:
        name, _, value = word.partition("=")
        several = re.match(r"drafter=\[([^\]]*)\]$", word)
        if several:
            words += [f"drafter={several[1].split(',')[0].strip()}", f"drafters=[{several[1]}]"]
        elif name == "prompts":
            words += ["dataset=prompts", f"dataset.path={','.join(map(_quoted, value.split(',')))}"]
        elif name == "link" and value.startswith("tcp://"):
            words += ["link=direct", f"link.to={value}"]
        else:
            words.append(word)
    folders = [word.partition("=")[2] for word in words if word.startswith("model.path=")]
    if folders and folders[-1] not in ("", "null") and not any(re.match(r"model(\.name)?=", word) for word in words):
        words.append(f"model.name={called(Path(folders[-1].strip(QUOTES)).resolve().name, 'model')}")
    return words


def _quoted(value: str) -> str:
    """A text quoted, where it has to be, for Hydra's grammar."""
    plain = value[:1] in ("", *QUOTES) or re.fullmatch(r"[A-Za-z0-9./_-]+", value)
    return value if plain else "'" + value.replace("'", "\\'") + "'"


def called(name: str, otherwise: str) -> str:
    """The name of a file or folder, changed so that it can name a folder of rows, see `specbench.common.types.Name`."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).lstrip("-.")[:100] or otherwise


def composed(name: str, overrides: list[str]) -> DictConfig:
    """The configuration of a command with these overrides, from within a job or outside of one."""
    if GlobalHydra.instance().is_initialized():
        return compose(name, overrides)
    with initialize_config_dir(CONF, version_base="1.3"):
        return compose(name, overrides)


def trained_drafter(name: str, vocabulary: int | None = None, *, _parent_: Any) -> DictConfig:
    """The options of a trained drafter, as its own file has them, within those of another: `${trained_drafter:eagle2}`.

    vocabulary: so many ids for it to draft from; None: as its file has it.

    Raises:
        SpecBenchError: there is no trained drafter of this name.
    """
    files: dict[str, Any] = {path.stem: OmegaConf.load(path) for path in sorted(Path(CONF, "drafter").glob("*.yaml"))}
    known = {stem: file.drafter for stem, file in files.items() if "weights" in file.get("drafter", {})}
    if name not in known:
        raise SpecBenchError(f"there is no trained drafter {name}{validation.nearest(name, known)}")
    found: DictConfig = known[name]
    if vocabulary is not None:
        found.vocabulary = vocabulary
    found._set_parent(_parent_)  # its own interpolations are into the whole configuration
    return found


OmegaConf.register_new_resolver("trained_drafter", trained_drafter)
OmegaConf.register_new_resolver("stem", lambda path: called(Path(str(path or "prompts")).stem, "prompts"))


def sweeping() -> bool:
    """Is this job one of several?"""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def _no_choice(error: BaseException) -> str | None:
    """The message on an unknown file of options, or on one that was not named; None for other errors."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        folder, _, name = error.missing_cfg_file.rpartition("/")
        return catalog.unknown(folder, name, error.options)
    unnamed = re.match(r"You must specify '(\w+)'", str(error)) if isinstance(error, ConfigCompositionException) else None
    return f"{unnamed[1]} is missing: name one with {unnamed[1]}=; {catalog.where(unnamed[1])}" if unnamed else None


def _unreadable(error: Exception) -> str | None:
    """The message on a command line at which Hydra's parser itself failed; None for other errors."""
    innermost = traceback.extract_tb(error.__traceback__)[-1].filename
    if isinstance(error, (HydraException, SpecBenchError)) or os.path.dirname(hydra.__file__) not in innermost:
        return None
    return f"{' '.join(sys.argv[1:])}: {one_line(error) or type(error).__name__}"


def _no_option(error: Exception, name: str | None) -> str | None:
    """The message on an override of an unknown option, with the nearest known one; None for other errors."""
    found = re.match(r"Could not override '([^']+)'", str(error)) if isinstance(error, HydraException) else None
    if found is None or name is None:
        return None
    typed = [word for word in sys.argv[1:] if word.startswith("study=")]  # without one there is no configuration
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--config-dir", "-cd")
    own = options.parse_known_args(sys.argv[1:])[0].config_dir  # where the user's own studies lie
    searched = [f"hydra.searchpath=[{_quoted('file://' + os.path.abspath(own))}]"] if own else []
    known: Any = OmegaConf.to_container(composed(name, [*(word.split(",")[0] for word in typed), *searched]))
    return f"{found[1]}: no such option{validation.nearest(found[1], dict.fromkeys(_keys(known)))}"


def _keys(node: Mapping[str, Any], place: str = "") -> Iterator[str]:
    for name, value in node.items():
        yield f"{place}{name}"
        if isinstance(value, Mapping):
            yield from _keys(value, f"{place}{name}.")


def _complain(line: str) -> int:
    print(f"specbench: {visible(line)}", file=sys.stderr)
    return 2
