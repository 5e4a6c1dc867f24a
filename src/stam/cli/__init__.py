"""The command line: `stam COMMAND ...`. Thin: a command reads its arguments and calls the library."""

import errno
import importlib
import io
import os
import sys

from stam.errors import Interrupted, StamError, did_you_mean
from stam.files import shown

COMMANDS = {  # name: what it does, and an example
    "list": ("agents, recipes and extras; the runs in a folder", "stam list runs"),
    "info": ("what an agent or a run is", "stam info imagenette-tiny"),
    "demo": ("train on the embedded digits and draw the result", "stam demo"),
    "train": ("train an agent", "stam train path/to/images --out runs/mine"),
    "teacher": ("fine-tune a whole-image teacher", "stam teacher tiny path/to/images --out runs/teacher"),
    "evaluate": ("accuracy after each glimpse, over seeds", "stam evaluate runs/mine"),
    "compare": ("several runs side by side", "stam compare runs/a runs/b --out comparison.html"),
    "figures": ("every figure of a run", "stam figures runs/mine"),
    "predict": ("classify images glimpse by glimpse", "stam predict runs/mine image.jpg"),
    "serve": ("watch an agent look, in a browser", "stam serve runs/mine"),
    "export": ("one step of an agent as ONNX", "stam export runs/mine --out agent.onnx"),
    "push": ("an agent to the Hugging Face hub", "stam push runs/mine me/mine"),
    "bench": ("how fast training and looking are here", "stam bench --json"),
    "prepare": ("turn a dataset's own layout into class folders", "stam prepare fmow SOURCE --out FOLDER"),
}


def usage() -> str:
    """Returns the overview that a bare or wrong command prints."""
    width = max(map(len, COMMANDS))
    lines = ["usage: stam COMMAND [ARGUMENTS]    (stam COMMAND --help says more)", ""]
    for name, (purpose, example) in COMMANDS.items():
        lines.append(f"  {name:<{width}}  {purpose:<48} {example}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Runs a command; a user's mistake ends in one line on stderr and exit code 2."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a file name may be bytes that are not text
    try:
        _run(sys.argv[1:] if arguments is None else arguments)
        if sys.stdout is not None:  # a program may be started without one
            sys.stdout.flush()
    except Interrupted as error:
        _complain(str(error))
        sys.exit(128 + error.number)  # as a shell says it: 130 after Ctrl-C
    except StamError as error:
        sys.exit(_complain(str(error)))
    except KeyboardInterrupt:
        print("\nstam: interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output went away, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP, errno.EIO, errno.ESTALE, errno.EMFILE):
            sys.exit(_complain(f"{error.strerror}: {shown(error.filename or 'while reading'):.200}"))
        if error.errno not in (errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EDQUOT):
            raise
        sys.exit(
            _complain(f"{error.strerror}: {error.filename or 'while writing'}: free space or check rights")
        )


def _run(arguments: list[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage(), flush=True)
        sys.exit(0 if arguments else 2)
    name, *rest = arguments
    if name == "--version":
        from stam import __version__

        print(f"stam {__version__}")
    elif name in COMMANDS:
        importlib.import_module(f"stam.cli.{name}").run(rest)
    else:
        sys.exit(_complain(f"unknown command '{name}': {did_you_mean(name, COMMANDS)}\n\n{usage()}"))


def _complain(message: str) -> int:
    if message:  # of several processes that stop together, one says it
        print(f"stam: {message}", file=sys.stderr)
    return 2
