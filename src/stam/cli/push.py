"""`stam push AGENT OWNER/NAME`: a run's agent to the Hugging Face hub."""

from dataclasses import dataclass

import tyro

from stam.cli.parsing import next_command, parse
from stam.weights import find_agent
from stam.weights.hub import push


@dataclass(frozen=True)
class Arguments:
    """What to write, and where to.

    Attributes:
        agent: A run folder, whose best agent is taken, or a weights folder; of a teacher or a system of the
            zoo too.
        repository: OWNER/NAME on the hub; it is made where there is none.
        private: Make it so that only its owner sees it.
        message: What the commit says.
    """

    agent: tyro.conf.Positional[str]
    repository: tyro.conf.Positional[str]
    private: bool = False
    message: str = ""


def run(arguments: list[str]) -> None:
    """Runs the command."""
    given = parse(Arguments, "push", arguments)
    found = find_agent(given.agent)
    url = push(found.folder, given.repository, given.private, given.message)
    print(f"wrote {found.folder} to {url}")
    next_command(f"stam info hub:{given.repository}")
