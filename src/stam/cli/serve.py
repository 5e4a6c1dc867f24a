"""`stam serve AGENT`: a page to watch an agent look, and an HTTP API for remote sensors.

A system of the zoo has a page of its own: it needs whole scenes, so there are no sessions to feed.
"""

import sys
import threading
import webbrowser
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import tyro

from stam.cli.agents import open_agent, open_looker
from stam.cli.parsing import next_command, parse
from stam.data.checking import check_images
from stam.data.remote import is_url
from stam.data.scenes import Scenes, Subset
from stam.data.sources import DIGITS, open_for_evaluation
from stam.errors import StamError, require
from stam.evaluation.examples import choose_examples
from stam.learning.runs import RunFolder
from stam.model.agent import Looker
from stam.model.looker import Facts
from stam.weights import find_agent
from stam.weights.folder import read_agent_config
from stam.zoo import is_system_folder

if TYPE_CHECKING:  # what takes long to import is imported when it is used
    from stam.web import Limits, LookService, SceneService, Service
    from stam.web.scenes import SampleScene

_SMALL_AGENT = 128  # width; operations of a smaller core only wait for a second thread


@dataclass(frozen=True)
class Arguments:
    """What to serve, and where.

    Attributes:
        agent: A run folder, a weights folder, an agent that ships (such as digits), or hub:NAME; a system of
            the zoo too.
        port: Port to listen on; 0 takes a free one.
        host: Address to listen on. Any but this machine's own lets others in, and there is no password.
        images: A folder of images for the page to offer; by default those a run held out of its training, or
            images that ship.
        beside: A second agent that the page shows next to the first, looking at the same scene.
        threshold: Confidence above which the agent stops; its own by default.
        resize_size: The shorter side before the centre crop; by default as the agent was trained.
        max_sessions: Sessions open at once.
        idle_seconds: How long a session is kept after its latest use.
        lifetime_seconds: How long a session is kept at all.
        max_upload_mb: Megabytes of an uploaded image.
        max_connections: Connections open at once.
        client_seconds: How long a client may take to send a request, and to take the answer.
        threads: Cores to compute with; by default all, or one for a small agent, which only waits for others.
        fast: Use packed weights; --no-fast runs the plain modules.
        compile: Compile the agent for this CPU: a step of a single session takes two thirds of the time. It
            takes about a minute, once, and needs a causal core and a C++ compiler.
        open: Open the page in a browser.
    """

    agent: tyro.conf.Positional[str]
    port: int = 8000
    host: str = "127.0.0.1"
    images: Path | None = None
    beside: str | None = None
    threshold: float | None = None
    resize_size: int | None = None
    max_sessions: int = 256
    idle_seconds: float = 600.0
    lifetime_seconds: float = 3600.0
    max_upload_mb: float = 16.0
    max_connections: int = 512
    client_seconds: float = 30.0
    threads: int | None = None
    fast: bool = True
    compile: bool = False
    open: bool = False


def run(arguments: list[str]) -> None:
    """Runs the command."""
    given = parse(Arguments, "serve", arguments)
    require(given.threads is None or given.threads >= 1, f"--threads must be at least 1, got {given.threads}")
    from stam.web import serve

    found = find_agent(given.agent)
    is_system = is_system_folder(found.folder)
    service: SceneService = (_system_service if is_system else _agent_service)(given, found.name)
    following = f"figures {given.agent}" if is_system else f"export {given.agent} --out {found.name}.onnx"

    def ready(url: str) -> None:
        print(
            f"watch {found.name} look: {url}    (the API: {url}/openapi.json; stop with Ctrl+C)", flush=True
        )
        next_command(f"stam {following}")
        sys.stderr.flush()
        if given.open:
            threading.Timer(0.5, webbrowser.open, [url]).start()

    serve(service, given.host, given.port, ready)


def _agent_service(given: Arguments, name: str) -> "Service":
    from stam.web import Service

    width = read_agent_config(find_agent(given.agent).folder).width
    torch.set_num_threads(given.threads or default_threads(width))  # it is compiled for so many
    agent, resize_size = _open(given, given.agent)
    scenes = _scenes(given, agent.facts, resize_size)
    beside = None if given.beside is None else _beside_service(given, given.beside)
    return Service(agent, name, _limits(given), scenes, resize_size, beside)


def _beside_service(given: Arguments, source: str) -> "Service":
    from stam.web import Service

    found = find_agent(source)
    require(not is_system_folder(found.folder), f"--beside takes an agent: '{source}' is a system of the zoo")
    agent, resize_size = _open(given, source)
    return Service(agent, found.name, _limits(given), (), resize_size)


def _open(given: Arguments, source: str) -> tuple[Looker, int | None]:
    if given.compile:
        note = f"compiling {source} for this machine (about a minute the first time)"
        print(note, file=sys.stderr, flush=True)
    return open_agent(source, given.resize_size, given.threshold, given.fast, given.compile)


def _system_service(given: Arguments, name: str) -> "LookService":
    from stam.web import LookService

    require(not given.compile, "--compile is for agents with the causal core, not for systems of the zoo")
    require(given.threshold is None, "--threshold is for agents: a system of the zoo takes all its looks")
    require(given.beside is None, "--beside is for agents: serve the system of the zoo by itself")
    looker, resize_size = open_looker(given.agent, given.resize_size, given.fast)
    torch.set_num_threads(given.threads or torch.get_num_threads())
    scenes = _scenes(given, looker.facts, resize_size)
    return LookService(looker, name, _limits(given), scenes, resize_size)


def _scenes(given: Arguments, facts: Facts, resize_size: int | None) -> "list[SampleScene]":
    from stam.web.scenes import sample_scenes

    own = None if given.images is not None else _held_out(given.agent, facts)
    return sample_scenes(facts, given.images, resize_size, own)


def _held_out(agent: str, facts: Facts) -> Scenes | None:
    """Returns some images that a run held out of its training, where they still are; none for digits."""
    folder = find_agent(agent).run
    data = None if folder is None else RunFolder(folder).data_config()
    if folder is None or data is None or data.path == DIGITS or is_url(data.path):
        return None
    try:
        scenes = open_for_evaluation(
            data.path, facts.labels, seed=data.split_seed, record=RunFolder(folder).split()
        )
        if data.skip_unreadable:
            scenes = Subset(scenes, check_images(scenes, skip_unreadable=True).readable)
    except StamError as error:
        print(
            f"the page cannot offer the images of this run ({error}); --images FOLDER offers others",
            file=sys.stderr,
        )
        return None
    return Subset(scenes, choose_examples(scenes.labels, len(scenes)))


def _limits(given: Arguments) -> "Limits":
    from stam.web import Limits

    return Limits(
        max_sessions=given.max_sessions,
        idle_seconds=given.idle_seconds,
        lifetime_seconds=given.lifetime_seconds,
        max_upload_bytes=int(given.max_upload_mb * 1_000_000),
        max_connections=given.max_connections,
        client_seconds=given.client_seconds,
    )


def default_threads(width: int) -> int:
    """Returns how many threads PyTorch is to use for an agent of this width."""
    return 1 if width < _SMALL_AGENT else torch.get_num_threads()
