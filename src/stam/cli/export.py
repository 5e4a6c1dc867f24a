"""`stam export AGENT --out FILE.onnx`: one step of an agent as an ONNX graph."""

from dataclasses import dataclass
from pathlib import Path

import tyro

from stam.cli.parsing import next_command, parse
from stam.errors import StamError, require
from stam.files import is_text, shown
from stam.integrations.onnx import TOLERANCE, check_parity, export_onnx
from stam.weights import load


@dataclass(frozen=True)
class Arguments:
    """What to export, and where to.

    Attributes:
        agent: A run folder, a weights folder, an agent that ships (such as digits), or hub:NAME.
        out: The file to write.
        episodes: Episodes to run with ONNX and PyTorch side by side afterwards; 0 checks nothing.
    """

    agent: tyro.conf.Positional[str]
    out: Path
    episodes: int = 10


def run(arguments: list[str]) -> None:
    """Runs the command."""
    given = parse(Arguments, "export", arguments)
    require(given.episodes >= 0, f"--episodes must be 0 or more, got {given.episodes}")
    require(given.out.suffix == ".onnx", f"--out '{given.out}' must end in .onnx")
    require(is_text(given.out), f"--out '{shown(given.out)}' is not UTF-8: name another file")
    require(given.out.absolute().parent.is_dir(), f"--out '{given.out}' is in a folder that does not exist")
    agent = load(given.agent)
    export_onnx(agent, given.out)
    print(f"wrote {given.out} ({given.out.stat().st_size / 1e6:.1f} MB)")
    if given.episodes:
        parity = check_parity(agent, given.out, given.episodes)
        print(
            f"{parity.num_episodes} episodes against PyTorch, after every glimpse: probabilities differ by "
            f"at most {parity.probabilities:.1e}, the policy by {parity.policy:.1e} (allowed: {TOLERANCE:g})"
        )
        if not parity.ok:
            raise StamError("the exported graph does not say what the agent says: do not use it; report this")
    next_command(f"python examples/onnx_runner.py {given.out}")
