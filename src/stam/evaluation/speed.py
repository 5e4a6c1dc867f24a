"""How fast training and looking are here, beside what the arithmetic allows and beside a plain loop."""

import gc
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from stam.config import AgentConfig
from stam.data import open_folder
from stam.evaluation import actor_multiply_adds, core_multiply_adds, step_multiply_adds
from stam.fast.cuda_graph import GraphedLook
from stam.learning.loop import Place, Plan, load_batches
from stam.learning.optimisation import autocast
from stam.learning.timing import in_turn, seconds
from stam.learning.training import AgentLearner
from stam.model.actor_critic import Actor
from stam.model.agent import Agent
from stam.model.teacher import Teacher
from stam.model.vit import VisionTransformer
from stam.settings import AugmentConfig, DataConfig, RunConfig, TrainingConfig
from stam.shapes import Float, Int


@dataclass(frozen=True)
class TrainingSpeed:
    """How fast an agent trains.

    Attributes:
        size: Of the core.
        batch_size: Scenes in a batch.
        num_glimpses: Glimpses in an episode.
        source: Where images come from: `device` or `files`.
        compiled: Whether kernels were fused and batches replayed as CUDA graphs.
        images_per_second: The median over the timed batches.
        spread: Lowest and highest of them.
        memory_gib: Most memory that training takes while it goes on (GPU).
        tera_flops: Arithmetic done, in 10^12 operations a second.
        first_seconds: Until the second batch was done, compiling included.
    """

    size: str
    batch_size: int
    num_glimpses: int
    source: str
    compiled: bool
    images_per_second: float
    spread: tuple[float, float]
    memory_gib: float | None
    tera_flops: float
    first_seconds: float


def training_speed(
    size: str = "tiny",
    batch_size: int = 64,
    num_glimpses: int = 21,
    device: str = "auto",
    fast: bool = True,
    num_batches: int = 5,
    from_files: bool = False,
    agent: AgentConfig | None = None,
    num_ops: int = 2,
    actor_objective: str = "actor-critic",
) -> TrainingSpeed:
    """Trains on random images for a few batches, teacher and optimiser included, and times them.

    Args:
        size: Core and teacher; ignored where `agent` is given.
        batch_size: Scenes in a batch.
        num_glimpses: Glimpses in an episode.
        device: Where.
        fast: Whether to use fused kernels and CUDA graphs, on a GPU.
        num_batches: How many batches to time, after the first two.
        from_files: Whether images are read from files and augmented; otherwise they are on the device.
        agent: The agent to time, instead of the paper's of that size.
        num_ops: Operations of RandAugment for each image, where images are read from files.
        actor_objective: How the actor learns.
    """
    config = RunConfig(
        agent=agent or AgentConfig.of_size(size, 1000),
        data=DataConfig("files", check=False, augment=AugmentConfig(num_ops=num_ops)),
        training=TrainingConfig(
            num_glimpses=num_glimpses,
            batch_size=batch_size,
            device=device,
            fast=fast,
            actor_objective=actor_objective,
        ),
    )
    held = _memory_held()
    with _folder_of_images(config, from_files) as folder:
        learner = make_learner(config)
        train = batches_from(learner, folder, num_batches + 2)
        first_seconds = seconds(lambda: [next(train) for _ in range(2)], learner.device)  # compiles, captures
        if learner.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        if from_files:  # the next batch is prepared meanwhile, so only the whole counts
            rates = [num_batches * batch_size / seconds(lambda: list(train), learner.device)]
        else:
            rates = [batch_size / seconds(lambda: next(train), learner.device) for _ in range(num_batches)]
        on_gpu = learner.device.type == "cuda"
        memory = (torch.cuda.max_memory_reserved() - held) / 2**30 if on_gpu else None
    median = statistics.median(rates)
    return TrainingSpeed(
        size,
        batch_size,
        num_glimpses,
        "files" if from_files else "device",
        learner.use_cuda_graph,
        median,
        (min(rates), max(rates)),
        memory,
        median * training_flops(config.agent, num_glimpses, batch_size) / 1e12,
        first_seconds,
    )


def _memory_held() -> int:
    """Returns the bytes of GPU memory that cannot be given back, as CUDA graphs made before leave some."""
    if not torch.cuda.is_initialized():
        return 0
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


class NoScenes:
    """Validation scenes of a run that is never validated."""

    classes: tuple[str, ...] = ()
    labels = np.zeros(0, dtype=np.int64)

    def __len__(self) -> int:
        return 0

    def load(self, index: int, decode_size: int | None = None) -> np.ndarray:
        """There is nothing to load."""
        raise IndexError(index)


def make_teacher(config: AgentConfig) -> Teacher:
    """Returns an untrained teacher as large as the agent's core."""
    model = VisionTransformer(
        num_classes=config.num_classes,
        patch_size=config.grid.patch_size,
        image_patches=config.grid.image_patches,
        width=config.width,
        depth=config.depth,
        num_heads=config.num_heads,
        mlp_ratio=config.mlp_ratio,
    )
    return Teacher(model, config.num_classes)


def make_learner(config: RunConfig, agent: Agent | None = None) -> AgentLearner:
    """Returns an agent, by default an untrained one, that learns from an untrained teacher."""
    return AgentLearner(config, agent or Agent(config.agent), make_teacher(config.agent), NoScenes())


def random_batch(learner: AgentLearner) -> tuple[Tensor, Tensor]:
    """Returns a batch of random images and labels, on the learner's device."""
    agent, batch_size = learner.config.agent, learner.settings.batch_size
    generator = torch.Generator(learner.device).manual_seed(0)
    shape = (batch_size, agent.channels, *agent.grid.image_size)
    images = torch.randn(shape, device=learner.device, generator=generator)
    labels = torch.randint(agent.num_classes, (batch_size,), device=learner.device, generator=generator)
    return images, labels


def batches_from(learner: AgentLearner, folder: Path | None, num_batches: int) -> Iterator[None]:
    """Trains on image files, or where no folder is given on random images; yields after each batch."""
    if folder is None:
        images, labels = random_batch(learner)
        for index in range(num_batches):
            learner.learn_from(images, labels, Place(0, index, False))
            yield
        return
    scenes = open_folder(folder).train
    plan = Plan(len(scenes), num_batches, learner.settings.batch_size, 1.0, 0)
    planned = [next(iter(plan.batches_from((epoch, 0)))) for epoch in range(num_batches)]
    for place, raw in load_batches(scenes, planned, learner.config.data):
        learner.train_batch(place, raw)
        yield


@contextmanager
def _folder_of_images(config: RunConfig, wanted: bool) -> Iterator[Path | None]:
    """Makes a folder of JPEG files for one batch; smooth noise, so that they decode like photographs."""
    if not wanted:
        yield None
        return
    with tempfile.TemporaryDirectory() as name:
        generator = np.random.default_rng(0)
        for label in range(2):
            (Path(name) / str(label)).mkdir()
        for index in range(config.training.batch_size * 5 // 4 + 6):  # a tenth is held out
            coarse = generator.integers(0, 256, (40, 52, 3), dtype=np.uint8)
            picture = Image.fromarray(coarse).resize((416, 320), Image.Resampling.BICUBIC)
            picture.save(Path(name) / str(index % 2) / f"{index}.jpg", quality=90)
        yield Path(name)


def training_flops(config: AgentConfig, num_glimpses: int, batch_size: int = 1) -> float:
    """Returns the operations a training batch needs for one scene, two for each multiply-add.

    A backward counts as two forwards. Beside the pass with gradient there is one without: the look-ahead, or
    with a causal core the rollout, in which the actor decides too.
    """
    is_causal = config.core == "causal"
    total = core_multiply_adds(config, config.grid.num_patches)  # the teacher
    for count in range(1, num_glimpses + 1):
        total += (4 if is_causal else 3) * step_multiply_adds(config, count)
        if count < num_glimpses and config.has_actor:
            total += 0 if is_causal else step_multiply_adds(config, count + 1)
            total += (4 if is_causal else 3) * actor_multiply_adds(config, count, batch_size)
    return 2.0 * total


def peak_tera_flops(device: torch.device) -> float:
    """Measures a large matrix product, in the precision that training uses there."""
    on_gpu = device.type == "cuda"
    side, dtype = (8192, torch.bfloat16) if on_gpu else (1024, torch.float32)
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    times = [seconds(lambda: a @ b, device) for _ in range(8)][3:]
    return 2 * side**3 / statistics.median(times) / 1e12


@dataclass(frozen=True)
class LookSpeed:
    """How fast an agent looks, beside a plain loop that encodes everything again at every glimpse.

    Attributes:
        size: Of the core.
        batch_size: Scenes looked at together.
        num_glimpses: Glimpses in each.
        images_per_second: Ours, in the precision evaluation uses.
        plain_images_per_second: The plain loop's, without our kernels, in float32.
        plain_half_images_per_second: The same in bfloat16, on a GPU.
        first_seconds: Our first look.
    """

    size: str
    batch_size: int
    num_glimpses: int
    images_per_second: float
    plain_images_per_second: float
    plain_half_images_per_second: float | None
    first_seconds: float


@torch.no_grad()
def look_speed(
    size: str = "tiny", batch_size: int = 8, num_glimpses: int = 21, device: str = "cpu", rounds: int = 5
) -> LookSpeed:
    """Times `Agent.look` and the plain loop in turn, so that a busy machine slows both alike."""
    place = torch.device(device)
    agent = Agent(AgentConfig.of_size(size, 1000)).to(place).eval()
    images = torch.randn(batch_size, 3, *agent.grid.image_size, device=place)
    first = torch.arange(batch_size, device=place) % agent.grid.num_locations
    fast = place.type == "cuda"

    def plain() -> None:
        plain_look(agent, images, num_glimpses, first)

    def plain_half() -> None:
        with autocast(place, "bfloat16"):
            plain()

    looker = agent.prepared()
    graphed = GraphedLook(looker, num_glimpses, looker.policy) if fast else None

    def ours() -> None:
        with autocast(place, "auto"):
            if graphed is None:
                agent.look(images, num_glimpses, first)
            else:
                graphed(images, first)

    first_seconds = seconds(ours, place)
    runs: dict[str, Callable[[], None]] = {"plain": plain, "ours": ours}
    times = in_turn(runs | ({"plain_half": plain_half} if fast else {}), place, rounds)
    rates = {name: batch_size / statistics.median(values) for name, values in times.items()}
    return LookSpeed(
        size, batch_size, num_glimpses, rates["ours"], rates["plain"], rates.get("plain_half"), first_seconds
    )


def plain_encode(
    agent: Agent, patches: Float[Tensor, "batch patches pixels"], positions: Int[Tensor, "batch patches"]
) -> Float[Tensor, "batch tokens width"]:
    """Encodes patches as any transformer does: every block computes every token."""
    core = agent.core
    readout = core.readout_tokens().expand(len(patches), -1, -1)
    x = torch.cat((readout, core.embed(patches, positions)), dim=1)
    for block in core.blocks:
        x = block(x)
    return core.norm(x)


def plain_look(agent: Agent, images: Tensor, num_glimpses: int, first_location: Tensor) -> Tensor:
    """Looks as the paper writes it, nothing saved: every token in every block, every location in full."""
    core, actor, grid = agent.core, agent.actor, agent.grid
    assert isinstance(actor, Actor)
    locations = first_location[:, None]
    for count in range(1, num_glimpses + 1):
        patches = grid.patches(grid.cut(images, locations))
        features = plain_encode(agent, patches, agent.positions[locations].flatten(1))[:, :2]
        core.classify(features)
        if count == num_glimpses:
            break
        state = features.flatten(1)[:, None].expand(-1, grid.num_locations, -1)
        places = actor.location_embedding.expand(len(images), -1, -1)
        rows = F.linear(torch.cat((state, places), dim=2), actor.fc0.weight, actor.fc0.bias).flatten(0, 1)
        logits = actor.after_first_layer(rows).view(len(images), -1).scatter(1, locations, -torch.inf)
        locations = torch.cat((locations, logits.argmax(dim=1, keepdim=True)), dim=1)
    return locations


@dataclass(frozen=True)
class Agreement:
    """The mean losses of a few training batches on one path, and how far they are from the reference.

    Attributes:
        path: `plain` modules, `fused` kernels, or those in a CUDA `graph`; and the precision.
        losses: Each loss, batch after batch.
        differences: For each batch the largest distance from the plain float32 path, relative to its losses
            where they are above 1.
    """

    path: str
    losses: dict[str, list[float]]
    differences: list[float]


def loss_agreement(
    agent: AgentConfig, device: str, batch_size: int = 64, num_glimpses: int = 8, num_batches: int = 4
) -> list[Agreement]:
    """Trains alike on every path that runs on a device and compares the losses."""
    on_gpu = torch.device(device).type == "cuda"
    paths = [("plain", "float32"), ("plain", "bfloat16")]
    paths += [("fused", "bfloat16"), ("graph", "bfloat16")] if on_gpu else []
    results: list[Agreement] = []
    for path, precision in paths:
        torch.manual_seed(0)
        training = TrainingConfig(
            num_glimpses=num_glimpses,
            batch_size=batch_size,
            base_lr=1e-4,
            device=device,
            precision=precision,
            fast=path != "plain",
        )
        config = RunConfig(agent=agent, training=training)
        learner = make_learner(config)
        learner.use_cuda_graph = path == "graph"
        losses: dict[str, list[float]] = {}
        for _ in batches_from(learner, None, num_batches):
            for name, mean in learner.meter.means().items():
                losses.setdefault(name, []).append(mean)
        reference = results[0].losses if results else losses
        differences = [
            max(
                abs(losses[name][batch] - mean[batch]) / max(1.0, abs(mean[batch]))
                for name, mean in reference.items()
            )
            for batch in range(num_batches)
        ]
        results.append(Agreement(f"{path} {precision}", losses, differences))
    return results
