"""Console: what `pipeplan` and `pipeplan-agent` share: exit statuses, extras, and tables in the terminal.

A command that fails ends with one clear sentence on standard error and an exit status that scripts can rely on.
A command that needs more than the core names the extra before it imports anything of it.
"""

import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
import typer.core
from pydantic import ValidationError
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pipeplan.cli.words import command_for, meant, option_for
from pipeplan.documents.files import require_model
from pipeplan.documents.names import Spec, parse_spec
from pipeplan.documents.validators import rule_of
from pipeplan.errors import (
    ConflictError,
    EndedBySignalError,
    ForbiddenError,
    InvalidInputError,
    MissingDependencyError,
    NotFoundError,
    PipeplanError,
    PreconditionFailedError,
    ServiceError,
    TooManyRequestsError,
    UnauthorizedError,
    require,
    shown,
)

DONE, FAILED, INVALID_INPUT, INFEASIBLE, INTERRUPTED, TERMINATED = 0, 1, 2, 3, 130, 143
NOT_FOUND, REFUSED, UNREACHABLE, CHANGED = 4, 5, 6, 7

SIGNALLED = 128
"""What a shell adds to the number of the signal that has ended a command."""

MEANINGS = {
    DONE: "done",
    FAILED: "anything else",
    INVALID_INPUT: "the input is wrong: the sentence names field, rule and value",
    INFEASIBLE: "no feasible plan, with the reasons",
    NOT_FOUND: "not found: no such plan, alias, profile, cluster, job or run",
    REFUSED: "refused by the service: the token, its scopes, a limit, or the present state",
    UNREACHABLE: "the service is out of reach, or cannot do it now",
    CHANGED: "changed since it was looked at or locked, or not proven",
    INTERRUPTED: "interrupted",
    TERMINATED: "ended by SIGTERM",
}
"""The meaning of every command's exit status; docs/ci.md has the same table."""

EPILOG = "Exit status: " + "; ".join(f"{status} {meaning.partition(':')[0]}" for status, meaning in MEANINGS.items())

STATUSES: dict[type[PipeplanError], int] = {
    InvalidInputError: INVALID_INPUT,
    NotFoundError: NOT_FOUND,
    PreconditionFailedError: CHANGED,
    ConflictError: REFUSED,
    UnauthorizedError: REFUSED,
    ForbiddenError: REFUSED,
    TooManyRequestsError: REFUSED,
    ServiceError: UNREACHABLE,
    PipeplanError: FAILED,
}
"""Exit statuses by kind of error; if an error is of several kinds, the first counts."""

MODULES = {
    "service": ("fastapi", "uvicorn", "sqlalchemy", "alembic", "jinja2", "prometheus_client"),
    "worker": ("torch", "transformers", "safetensors"),
}
"""The package that each extra installs, by its import name."""

EVERY_S, MOST_S = 5.0, 60.0
"""The least and the most time between two lines of progress where standard error is not a terminal."""

PIPED_WIDTH = 200
"""Columns of a table if standard output is not a terminal."""

_GUESSES = r" \(Possible|\. Did you"
"""Where typer's own guesses begin, by the letters alone."""

_UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""What typer raises for a command line that it cannot read. Typer exports only kinds of it, not the class itself."""


class GroupedCommand(typer.core.TyperCommand):
    """A command whose help has its options in groups: an option's `rich_help_panel` is the heading that it is under.

    Its errors name options as they are typed.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Reads the command line; an error about it knows the command, and the option as it was typed."""
        typed = list(args)
        try:
            return super().parse_args(ctx, args)
        except _UsageError as error:
            error.ctx = error.ctx or ctx  # type: ignore[attr-defined]
            name = getattr(error, "option_name", "--")
            if not name.startswith("--"):  # of -tp the parser names -t alone
                error.option_name = next((each for each in typed if each.startswith(name)), name)  # type: ignore[attr-defined]
            raise

    def invoke(self, ctx: Any) -> Any:
        """Runs the command, with other tools' words for its values taken as ours.

        An error about the field of an option names the option.
        """
        ctx.params = {name: meant(name, value) for name, value in ctx.params.items()}
        try:
            return super().invoke(ctx)
        except InvalidInputError as error:
            option = _option_of(error, self.params, ctx.params)
            if option is None:
                raise
            raise InvalidInputError(option, error.rule, error.value) from error

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes a section for every group, in the order of their first options; names are never cut."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                heading = "Arguments" if parameter.param_type_name == "argument" else "Options"
                groups.setdefault(getattr(parameter, "rich_help_panel", None) or heading, []).append(record)
        for heading, records in groups.items():
            with formatter.section(heading):
                formatter.write_dl(records)


def _option_of(error: InvalidInputError, parameters: Sequence[Any], given: Mapping[str, Any]) -> str | None:
    """The option from which the error's value comes, as it is typed; None if it is an argument, or a file's field.

    Documents and options share names of fields. The value of an option that was not given comes from a document.
    """
    field = error.field.removeprefix("options.")  # a request's
    field = field.rstrip("0123456789").removesuffix(".") if "." in field else field  # of an item of a list
    names = (field, field.removesuffix("_id"))  # requests have the ids of what the options name
    words = {f"--{name.replace('_', '-')}" for name in names}
    options = [each for each in parameters if each.param_type_name == "option"]
    parameter = next((each for each in options if each.name in names or words & {*each.opts}), None)
    if parameter is None:
        return None
    if given.get(parameter.name) in (None, (), []) and error.value is not None:
        return None
    off = error.value is False and parameter.secondary_opts
    typed: str = max(parameter.secondary_opts if off else parameter.opts, key=len)
    return typed


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"pipeplan {version('pipeplan')}")
        raise typer.Exit


VersionAsked = Annotated[
    bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Shows the version, and nothing else.")
]


def run_app(app: typer.Typer, arguments: Sequence[str] | None = None) -> None:
    """Runs a command-line app and ends the process; `arguments` are those of the process unless given."""
    _group_options(app)

    def command() -> None:
        status = app(args=arguments, standalone_mode=False) or DONE
        if status == INTERRUPTED:  # typer takes Ctrl-C for an exit with this status, and says nothing
            raise KeyboardInterrupt
        raise SystemExit(status)

    run_command(command)


def _group_options(app: typer.Typer) -> None:
    """Makes all commands of an app and of its groups, whoever added them, of the class whose errors name options."""
    for command in app.registered_commands:
        if command.cls in (None, typer.core.TyperCommand):
            command.cls = GroupedCommand
    for group in app.registered_groups:
        if group.typer_instance is not None:
            _group_options(group.typer_instance)


def run_command(command: Callable[[], object]) -> None:
    """Runs a command; errors of ours become a sentence and an exit status, never a traceback.

    A command line without what the command needs shows the command's help.
    """
    try:
        command()
    except EndedBySignalError as error:
        _fail(str(error), SIGNALLED + error.signal)
    except PipeplanError as error:
        missing = str(error).removesuffix(", got None")  # an option that was not given has no value to show
        _fail(missing, next(status for kind, status in STATUSES.items() if isinstance(error, kind)))
    except (KeyboardInterrupt, typer.Abort):
        _fail("interrupted", INTERRUPTED)
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()  # type: ignore[attr-defined]
            raise SystemExit(INVALID_INPUT) from error
        command_path = error.ctx.command_path  # type: ignore[attr-defined]
        said, hint = error.format_message(), _hint(error)  # type: ignore[attr-defined]
        if hint:
            said = f"{re.split(_GUESSES, said)[0].rstrip('.')}; {hint}"
        if said.startswith("Missing option"):  # click names the first one; it has read by now what was given
            params, given = error.ctx.command.params, error.ctx.params  # type: ignore[attr-defined]
            lacks = [f"'{each.opts[-1]}'" for each in params if each.required and each.name not in given]
            said = f"Missing option{'s' * (len(lacks) > 1)} {', '.join(lacks)}"
        sentence = rule_of(said.rstrip("."))
        if isinstance(error.__cause__, ValidationError):  # typer's parser leaves the value out
            sentence += f", got {shown(error.__cause__.errors()[0]['input'])}"
        _fail(f"{sentence} (`{command_path} --help` lists what there is)", INVALID_INPUT)


def _hint(error: Any) -> str | None:
    """What an option or a command that is not there means, if that is known."""
    command = error.ctx.command
    if type(error).__name__ == "NoSuchOption":
        own = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
        if command.name == "profile" and hasattr(command, "commands"):
            return "`pipeplan-agent profile` measures and estimates models"
        return option_for(error.option_name, own)
    typed = re.match(r"No such command '([^']*)'", error.format_message())
    return command_for(typed[1]) if typed else None


@contextmanager
def working(what: str, *, lines_from_start: bool = True) -> Iterator[Callable[[str], None]]:
    """Shows on standard error what takes a while, and that it goes on. Yields what shows that it is at another thing.

    Where there is no terminal, and without `lines_from_start`, nothing is shown until there is another thing.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        with progress_lines(what if lines_from_start else "") as say:
            yield say
        return
    with console.status(escape(what)) as status:
        yield lambda now: status.update(escape(now))


@contextmanager
def progress_lines(what: str = "", *, every_s: float = EVERY_S) -> Iterator[Callable[[str], None]]:
    """The same where there is no terminal: a line now and then, as soon as there is something to say.

    While it stays the same thing, the time between two lines doubles, up to MOST_S: logs stay short.
    """
    said, ended, started_s, stream = [what], threading.Event(), time.monotonic(), sys.stderr

    def write() -> None:
        written, wait_s = "", every_s
        while not ended.wait(wait_s):
            now = said[0]
            wait_s = min(2 * wait_s, MOST_S) if now and now == written else every_s
            written = now
            if now:
                print(f"{printable(now)} ({time.monotonic() - started_s:.0f} s)", file=stream, flush=True)

    def say(now: str) -> None:
        said[0] = now

    thread = threading.Thread(target=write, name="progress", daemon=True)
    thread.start()
    try:
        yield say
    finally:
        ended.set()
        thread.join()


@contextmanager
def fields_of(document: str) -> Iterator[None]:
    """Puts the document before the fields of its errors, as options have them: `--model-name` is a model's name."""
    try:
        yield
    except InvalidInputError as error:
        raise InvalidInputError(f"{document}_{error.field}", error.rule, error.value) from error


def require_extra(*extras: Literal["service", "worker"], what: str = "this command") -> None:
    """Raises MissingDependencyError unless the extras are installed that a command, or one of its options, needs."""
    missing = {extra: [name for name in MODULES[extra] if find_spec(name) is None] for extra in extras}
    lacking = {extra: names[0] for extra, names in missing.items() if names}
    if lacking:
        modules, names = " and ".join(lacking.values()), ",".join(lacking)
        raise MissingDependencyError(f"{what} needs {modules}: pip install 'pipeplan[{names}]'")


def typed_spec(text: str, *, field: str) -> Spec:
    """The SPEC that a user typed.

    Raises InvalidInputError as `parse_spec` does, for a Hugging Face model that is not here, for a folder's name alone,
    and if the text names a family without any option beside a model's folder of the same name: the folder's weights
    are meant then, and the family has random ones.
    """
    folder = field == "model" and "/" not in text and Path(text).is_dir()
    require(not folder, field, f"must be hf:./{text} for the folder of this name", text)
    spec = parse_spec(text, field=field)
    if spec.path is not None:
        require_model(Path(spec.path))
    beside = spec.is_hugging_face and spec.path is None and (Path(spec.name) / "config.json").is_file()
    rule = f"must be hf:./{spec.name} for the folder of this name, or hf:{spec.name}? for the family"
    require(not beside or "?" in text, field, rule, text)
    return spec


def table_of(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table.

    Unprintable characters in a cell are escaped: names come from anywhere, and a terminal might obey them.
    """
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold", no_wrap=heading == "Plan")
    for row in rows:
        table.add_row(*(printable(cell).replace("\n", r"\n") for cell in row))
    return table


def printable(text: str) -> str:
    """The text with what is not printable escaped, except the ends of lines: names in it come from anywhere."""
    return "".join(
        char if char.isprintable() or char == "\n" else char.encode("unicode_escape").decode() for char in text
    )


def show_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints a table on standard output; cells are not markup."""
    plain_console().print(table_of(headings, rows))


def plain_console(*, on_error_stream: bool = False) -> Console:
    """A console that prints names as they are: brackets in them are not markup."""
    width = None if sys.stdout.isatty() else PIPED_WIDTH
    return Console(stderr=on_error_stream, markup=False, highlight=False, width=width)


def _fail(sentence: str, status: int) -> None:
    print(f"error: {printable(sentence)}", file=sys.stderr)  # noqa: T201 (this is the console)
    raise SystemExit(status)
