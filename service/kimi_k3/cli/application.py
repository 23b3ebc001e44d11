# SPDX-License-Identifier: Apache-2.0
"""The application: its commands in the order of ``--help``, and how each of them ends.

Whatever an operator can mend is one line on standard error; anything else keeps its traceback. A closed
standard output is ``/dev/null``, a full one is an error, and standard error never changes an exit code.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Annotated, Any

import typer

from kimi_k3 import __version__
from kimi_k3.cli import checkpoint, kernels, metrics
from kimi_k3.cli.conversion import convert_file, convert_report
from kimi_k3.cli.groups import group
from kimi_k3.cli.planning import backends, plan, preflight
from kimi_k3.cli.serving import demo, doctor, healthcheck, serve, sidecar
from kimi_k3.cli.verifying import app as verify
from kimi_k3.cli.watching import watch
from kimi_k3.errors import ExitCode, OperatorError, nearest
from kimi_k3.terminal import (
    NotWritten,
    ReaderGone,
    Terminated,
    end_cleanly,
    give_up_what_is_unwritten,
    mend_streams,
)

UsageError: Any = typer.BadParameter.__mro__[1]
"""The parser's usage error, wherever the installed typer keeps it."""

app = group("Serve Kimi-K3 with vLLM and see what happens.")
app.command()(serve)
app.command()(sidecar)
app.command()(healthcheck)
app.command()(watch)
app.command()(plan)
app.command()(preflight)
app.command()(backends)
app.command()(convert_report)
app.command()(convert_file)
app.command()(demo)
app.command()(doctor)
app.add_typer(checkpoint.app, name="checkpoint")
app.add_typer(kernels.app, name="kernels")
app.add_typer(metrics.app, name="metrics")
app.add_typer(verify, name="verify")


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)


def _print_version(asked: bool) -> None:
    if asked:
        version()
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
]


@app.callback()
def kimi_k3(version: Version = False) -> None:
    """Serve Kimi-K3 with vLLM and see what happens."""


def run(arguments: list[str]) -> int:
    """Run the command line and return its exit code; an operator's mistake becomes one line."""
    try:
        code = typer.main.get_command(app).main(arguments, prog_name="kimi-k3", standalone_mode=False)
        sys.stdout.flush()
    except OperatorError as error:
        return fail(str(error), error.exit_code)
    except UsageError as error:
        return fail(_usage(error), ExitCode.USAGE)
    except typer.Abort:
        print("kimi-k3: interrupted", file=sys.stderr)
        return ExitCode.INTERRUPTED
    except (ReaderGone, BrokenPipeError):
        return ExitCode.READER_GONE
    except Terminated as end:
        print(f"kimi-k3: ended by {end}", file=sys.stderr)
        return 128 + end.number
    except NotWritten as error:
        return fail(
            f"standard output: {error.strerror}; free some space or send it elsewhere", ExitCode.FAILED
        )
    finally:
        give_up_what_is_unwritten()
    return int(code or 0)


def fail(message: str, code: int) -> int:
    """Print the one line of an error."""
    print(f"kimi-k3: error: {message}", file=sys.stderr)
    return code


def _usage(error: Any) -> str:
    """One line for a usage error, with the nearest valid name when a name is not known."""
    context = error.ctx
    path = context.command_path if context is not None else "kimi-k3"
    what = " ".join(error.format_message().split())
    if (option := getattr(error, "option_name", None)) and context is not None:
        what = f"there is no option {option}"
        remedy = nearest(option, _options(context))
    elif what.startswith("No such command") and context is not None:
        name = what.split("'")[1]
        what = f"there is no command {name!r}"
        remedy = nearest(name, getattr(context.command, "commands", {}))
    else:
        what, remedy = what.rstrip("."), f"see '{path} --help'"
    command = path.removeprefix("kimi-k3").strip()
    return f"{command}: {what}; {remedy}" if command else f"{what}; {remedy}"


def _options(context: Any) -> Iterable[str]:
    for parameter in context.command.get_params(context):
        for spelling in (*parameter.opts, *parameter.secondary_opts):
            if spelling.startswith("-"):
                yield spelling


def main() -> None:
    """Run the command ``kimi-k3`` and exit."""
    mend_streams()
    try:
        end_cleanly("kimi_k3.cli")
        code = run(sys.argv[1:])
    except KeyboardInterrupt:
        code = ExitCode.INTERRUPTED
    sys.exit(code)
