"""Training an agent.

For every batch: the teacher looks at the whole images once, then the agent looks glimpse by glimpse. It is
updated after each, or where its core reads all steps in one pass, once at the end. Core and actor learn
together, or one after the other in stages of the training.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from sys import stderr
from typing import Any, cast

import torch
from torch import Tensor
from tqdm import tqdm

from stam.data import RawBatch, Scenes
from stam.data.augment import Augment
from stam.data.randomness import random_key
from stam.data.scenes import run_length
from stam.fast import cuda
from stam.fast.bf16_weights import Bf16Weights
from stam.fast.cuda_graph import GraphedFunction, Pipeline
from stam.fast.cuda_policy import FusedSampledPolicy
from stam.fast.known import unknown_part
from stam.learning import distributed, one_pass
from stam.learning.averaging import CoreSoup, MovingAverage, averaged_state
from stam.learning.exploration import noisy_orders
from stam.learning.gains import (
    ROWS_OF_UPDATE,
    SHARPNESS,
    Gains,
    Replay,
    SoftmaxPolicy,
    actor_loss,
    try_locations,
)
from stam.learning.loop import Learner, Meter, MetricLogger, Place, Plan, only_one, restore, run_loop
from stam.learning.objective import Objective, ValueNormaliser
from stam.learning.optimisation import (
    autocast,
    choose_device,
    gradients,
    is_half,
    make_optimiser,
    reset_state,
    restore_optimiser,
)
from stam.learning.runs import RunFolder
from stam.learning.validation import budgets, compare_policies, policies_to_try
from stam.model.agent import Agent, Looker, evaluating
from stam.model.core import OnePassCore
from stam.model.episode import rollout, sense_images
from stam.model.policy import Policy, SampledPolicy, random_locations
from stam.model.teacher import Teacher, TeacherOutput, require_features
from stam.settings import RunConfig, Stage, TrainingConfig
from stam.weights import save_agent

_TIMED_EPOCHS = 3

# takes how many epochs are done and the seconds of one; returns how many there shall be
FitToTime = Callable[[int, float], int]


def train(
    run: RunFolder,
    config: RunConfig,
    agent: Agent,
    teacher: Teacher,
    train_scenes: Scenes,
    val_scenes: Scenes,
    resume: bool = False,
    loggers: tuple[MetricLogger, ...] = (),
    fit_to_time: FitToTime | None = None,
) -> Agent:
    """Trains an agent in a run folder and returns the last one (or the average) in evaluation mode.

    Args:
        run: Where metrics, checkpoints and state go.
        config: The whole experiment.
        agent: The agent to train, as it starts.
        teacher: Says what the whole image shows.
        train_scenes: What to learn from.
        val_scenes: What to choose the best checkpoint by.
        resume: Whether to go on from the run's saved state.
        loggers: Called with every epoch's metrics, beside `metrics.jsonl`.
        fit_to_time: Changes the number of epochs once the speed is known from the first ones. A run that is
            resumed keeps the number it has.

    Raises:
        Interrupted: Ctrl-C; the state was saved and `resume` goes on from it.
    """
    learner = AgentLearner(config, agent, teacher, val_scenes)

    def run_until(epochs: int, called: str, also: tuple[MetricLogger, ...] = ()) -> None:
        whole = plan(len(train_scenes), learner.config, run_length(train_scenes))
        run_loop(
            learner,
            run,
            replace(whole, epochs=epochs),
            train_scenes,
            config.data,
            called,
            config.training.save_minutes,
            distributed.how_to_resume("train", run.path),
            (*loggers, *also),
        )

    with only_one(run):
        if resume:
            restore(learner, run)
        elif fit_to_time is not None and config.training.epochs > 2 * _TIMED_EPOCHS:
            ends: list[float] = []
            num_timed = max(_TIMED_EPOCHS, config.training.epochs // 10)
            run_until(num_timed, "first epochs", (lambda _: ends.append(time.monotonic()),))
            # the first epoch is not timed: kernels are compiled in it
            seconds = (ends[-1] - ends[0]) / (num_timed - 1) if ends else 0.0
            epochs = distributed.of_first(fit_to_time(num_timed, seconds))
            learner.change_epochs(epochs)
            if distributed.rank() == 0:
                run.change_epochs(learner.settings)
        run_until(learner.settings.epochs, "training")
    return learner.agent_to_use.eval()


def plan(num_scenes: int, config: RunConfig, run_length: int = 1) -> Plan:
    """Returns which scenes a training shows when.

    By default an epoch makes as many updates as an ordinary one over all scenes. Where a batch makes T
    updates, it shows 1/T of the scenes.
    """
    training = config.training
    updates_a_batch = 1 if config.agent.core == "causal" else training.num_glimpses
    share = training.epoch_share or 1 / updates_a_batch
    return Plan(num_scenes, training.epochs, training.batch_size, share, training.seed, run_length)


def glimpses_of_batch(training: TrainingConfig, core: str) -> int:
    """Returns how many glimpses of each image a batch learns from, each time it is encoded: what it costs."""
    short = min(training.short_episode_glimpses, training.num_glimpses)
    lengths = *[short] * training.short_episodes, training.num_glimpses
    if core == "causal":
        return sum(lengths)
    return sum(length * (length + 1) // 2 for length in lengths)


class AgentLearner(Learner):
    """An agent being trained, with its critic, value statistics and optimiser.

    Learning rates, tau, statistics and running means are tensors that change in place, since a GPU replays a
    batch as a CUDA graph.
    """

    def __init__(self, config: RunConfig, agent: Agent, teacher: Teacher, val_scenes: Scenes) -> None:
        settings = config.training
        self.config, self.settings, self.val_scenes = config, settings, val_scenes
        self.device = choose_device(settings.device)
        self.agent, self.teacher = agent.to(self.device).train(), teacher.to(self.device)
        agent.config = replace(agent.config, sharpness=SHARPNESS if config.uses_gains else None)
        require_features(teacher, agent.config.width, settings.feature_weight)
        groups = {"core": agent.core.named_parameters()}
        if agent.actor is not None:
            groups["actor"] = agent.actor.named_parameters()
        if agent.actor is not None and not config.uses_gains:
            groups["critic"] = agent.add_critic().named_parameters()
        self.rates = {name: torch.zeros((), device=self.device) for name in groups}
        self.optimiser = make_optimiser(groups, settings.weight_decay, self.rates)
        self.averaged = MovingAverage(agent, settings.ema_batches) if settings.ema_batches > 1 else None
        self.soup = CoreSoup(agent.core) if settings.num_cores > 1 else None
        self.stage_number = 0  # of the stage of the latest batch
        self.stage_is_over = False  # as far as it has been trained
        self.objective = Objective(settings.num_glimpses, settings.consistency, settings.feature_weight)
        self.values = ValueNormaliser(settings.num_glimpses).to(self.device)
        self.augment, self.augment_large = (
            Augment(augment, agent.grid.image_size, agent.config.mean, agent.config.std)
            for augment in (config.data.augment, config.data.augment.with_large_crops())
        )
        self.generator = torch.Generator(self.device)
        self.random = distributed.random_source(self.generator)
        if distributed.is_distributed():
            distributed.share_batch_norms(agent)
        self.tau = torch.ones((), device=self.device)
        self.replay = Replay()
        self.meter = Meter()
        self.glimpses_read = 0  # by all updates of the batch in hand: what one takes grows with them
        self._accelerate()

    def _accelerate(self) -> None:
        """Chooses what computes: the plain modules, or on a GPU fused kernels and CUDA graphs.

        In half precision, copies of the weights in bfloat16 are made once an update, on both paths.
        """
        fast = self.settings.fast and self.device.type == "cuda"
        changed = unknown_part(self.agent) if fast else None
        if changed is not None:
            tqdm.write(f"{changed} is not as it was built: its plain modules train, which is slower", stderr)
        self.looker: Looker = cuda.fuse(self.agent) if fast else self.agent  # a changed agent stays plain
        self.teach = (cuda.fuse_teacher(self.teacher) if fast else self.teacher).predict
        self.bf16_weights = Bf16Weights(self.agent) if is_half(self.device, self.settings.precision) else None
        self.pipeline = Pipeline(self.device)
        self.use_cuda_graph = fast and distributed.can_be_captured()
        self._graphed: GraphedFunction | None = None
        self._graphed_part = ""  # what learns in it

    def train_batch(self, place: Place, raw: RawBatch) -> None:
        """Augments a batch and learns from it; on a GPU it augments while the last batch is learned from."""
        seed = (self.settings.seed, place.epoch, place.batch)
        process = distributed.rank(), distributed.world_size()
        with self.pipeline.preparing(raw.images, raw.labels):
            augment = self.augment_large if self.settings.has_large_crops(place.epoch) else self.augment
            images = augment(raw.images.to(self.device, non_blocking=True), raw.sizes, seed, process)
            labels = raw.labels.to(self.device, non_blocking=True)
        with self.pipeline.using(images, labels):
            self.learn_from(images, labels, place)

    def learn_from(self, images: Tensor, labels: Tensor, place: Place) -> None:
        """Learns from a batch of augmented images."""
        if self.bf16_weights is not None:
            images = images.bfloat16()  # all readers round them: once is enough, and takes half the memory
        self.tau.fill_(self.settings.tau(place.epoch))
        for name, rate in self.learning_rates(place.epoch).items():
            self.rates[name].fill_(rate)
        key = random_key("batch", self.settings.seed, place.epoch, place.batch)
        self.generator.manual_seed(key >> 1)  # a seed has 63 bits
        first = random_locations(self.agent.grid, len(images), self.device, self.random)
        self._enter_stage(place.epoch)
        run_batch = partial(self.run_batch, self.policy())
        if self.use_cuda_graph:
            if self._graphed_part != self.learning_part:
                is_first, self._graphed_part = self._graphed is None, self.learning_part
                self._graphed = GraphedFunction(run_batch, self.generator, announced=is_first)
            cast(GraphedFunction, self._graphed)(images, labels, first)
        else:
            run_batch(images, labels, first)
        if self.averaged is not None:
            self.averaged.update_parameters(self.agent)

    @property
    def stage(self) -> Stage:
        """The stage of the training that the latest batch belongs to."""
        return self.settings.stages[min(self.stage_number, len(self.settings.stages) - 1)]

    @property
    def learning_part(self) -> str:
        """What learns in this stage: `both` core and actor, the `core` or the `actor`."""
        return self.stage.learns

    def _enter_stage(self, epoch: int) -> None:
        """Makes ready for the stage of an epoch, where it is another one than before.

        Stages are told by their number: when the number of epochs changes, so do the epochs of each.
        """
        number = self.settings.stages.index(self.settings.stage(epoch))
        if number == self.stage_number:
            self.stage_is_over = False  # or it has been extended
            return
        self._end_stage(followed_by=self.settings.stages[number])
        self.stage_number, self.stage_is_over = number, False
        is_another_core = self.soup is not None and self.learning_part == "core"
        core = cast(CoreSoup, self.soup).start if is_another_core else self.agent_to_use.core
        self.agent.core.load_state_dict(core.state_dict())
        reset_state(self.optimiser)
        if self.averaged is not None:
            self.averaged.n_averaged.zero_()
            self.averaged.num_batches = self.settings.ema_batches_of(self.stage)
        self.replay = Replay()
        if self.learning_part == "actor":
            self.best = -1.0  # of agents whose actor has learned

    def _end_stage(self, followed_by: Stage | None) -> None:
        """Adds a core that has learned alone to the soup; the last one of them becomes the average of all."""
        if self.soup is not None and self.learning_part == "core" and not self.stage_is_over:
            core = self.agent_to_use.core
            self.soup.add(core)
            if followed_by is None or followed_by.learns != "core":
                self.soup.copy_to(core)
        self.stage_is_over = True

    def run_batch(self, policy: Policy, images: Tensor, labels: Tensor, first_location: Tensor) -> None:
        """Shows a batch to the teacher, then glimpse by glimpse to the agent, and updates it.

        All of it is one CUDA graph on a GPU.
        """
        settings = self.settings
        with autocast(self.device, settings.precision):
            taught = self.teach(images)
        self.glimpses_read = 0
        run = self.update_once if isinstance(self.looker.core, OnePassCore) else self.update_at_each_glimpse
        self.meter.add(*run(policy, images, labels, taught, first_location))  # all at once: one kernel launch

    def update_at_each_glimpse(
        self, policy: Policy, images: Tensor, labels: Tensor, taught: TeacherOutput, first_location: Tensor
    ) -> list[dict[str, Tensor]]:
        """Updates the agent after each glimpse of all episodes; returns the parts of each loss of the last.

        By default that is the only one. Short episodes of a few glimpses from other locations go before it.
        """
        settings = self.settings
        for _ in range(settings.short_episodes):
            other = random_locations(self.agent.grid, len(images), self.device, self.random)
            self.run_episode(policy, images, labels, taught, other, num_updates=self.num_short_glimpses)
        return self.run_episode(policy, images, labels, taught, first_location, settings.num_glimpses)

    def update_once(
        self, policy: Policy, images: Tensor, labels: Tensor, taught: TeacherOutput, first_location: Tensor
    ) -> list[dict[str, Tensor]]:
        """Updates the agent by the mean loss of all steps of all episodes; returns the parts of each loss.

        The episodes are those of `update_at_each_glimpse`. While the actor learns alone there is only the
        whole one, and nothing but the actor is updated.
        """
        settings, whole, gains = self.settings, self.settings.num_glimpses, None
        episodes = [(1, first_location, whole)]
        if settings.short_episodes > 0 and self.learning_part != "actor":
            count = settings.short_episodes
            other = random_locations(self.agent.grid, count * len(images), self.device, self.random)
            episodes.insert(0, (count, other, self.num_short_glimpses))
        if self.learning_part == "core":
            paths = [(copies, self._noisy_path(first, count)) for copies, first, count in episodes]
        else:
            paths = []
            # a context of its own: autocast keeps weights that were rounded without gradient
            with self._half_precision(), evaluating(self.agent if self.learns_gains else self.agent.core):
                for copies, first, count in episodes:
                    scenes = images.repeat_interleave(copies, 0) if copies > 1 else images
                    path = one_pass.explore(self.looker, scenes, first, policy, self.random, count, whole)
                    paths.append((copies, path))
                    self.on_progress(len(paths) / (3 * len(episodes)))  # the rest takes the other thirds
                if self.learns_gains:
                    gains = try_locations(self.looker, images, path, labels, taught.log_q, self.random)
        logged = []
        if self.learning_part != "actor":
            with self._half_precision():
                total, parts = self._path_losses(policy, images, labels, taught, paths)
            self._update(total)
            logged.append({name: part.detach().mean() for name, part in parts.items()})
        return logged if gains is None else [*logged, *self._improve_actor(gains)]

    def _noisy_path(self, first_location: Tensor, num_glimpses: int) -> one_pass.Path:
        locations = noisy_orders(self.agent.grid, first_location, num_glimpses, self.random)
        return one_pass.Path(locations, num_glimpses, None)

    def _path_losses(
        self,
        policy: Policy,
        images: Tensor,
        labels: Tensor,
        taught: TeacherOutput,
        paths: Sequence[tuple[int, one_pass.Path]],
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss of some episodes, and its parts after each step of the last path.

        Each path holds so many episodes of every image, one image after the other.
        """
        totals: list[Tensor] = []
        parts: dict[str, Tensor] = {}
        for copies, path in paths:
            batch = images, labels, taught
            if copies > 1:
                batch = (
                    images.repeat_interleave(copies, 0),
                    labels.repeat_interleave(copies, 0),
                    taught.repeated(copies),
                )
            drop_masks = self.looker.sample_drop_path(len(batch[0]), self.random)
            retraced = one_pass.retrace(self.looker, batch[0], path, policy, drop_masks)
            parts = one_pass.path_losses(self.objective, self.looker, retraced, *batch[1:], self.values)
            totals.append(copies * self.objective.total({name: part.sum() for name, part in parts.items()}))
        total = torch.stack(totals).sum() / sum(copies * path.num_steps for copies, path in paths)
        return total, parts

    @property
    def learns_gains(self) -> bool:
        """Whether the actor learns in this stage, from what every location is worth."""
        return self.config.uses_gains and self.learning_part != "core"

    def _improve_actor(self, gains: Gains) -> list[dict[str, Tensor]]:
        """Updates the actor by what was tried in this and the last batches; returns each loss."""
        actor, rows = self.looker.actor, self.replay.add(gains)
        assert actor is not None
        logged = []
        for _ in range(self.settings.actor_steps):
            with self._half_precision():
                loss = actor_loss(actor, self.replay.draw(rows, self.random))
            self._update(loss)
            logged.append({"actor": loss.detach()})
        return logged

    def run_episode(
        self,
        policy: Policy,
        images: Tensor,
        labels: Tensor,
        taught: TeacherOutput,
        first_location: Tensor,
        num_updates: int,
    ) -> list[dict[str, Tensor]]:
        """Updates the agent after each of the first glimpses of an episode; returns the parts of each loss.

        A short episode is the beginning of a whole one: the critic's targets go on as if all T glimpses
        followed.
        """
        sense, whole = sense_images(images, self.agent.grid), self.settings.num_glimpses
        episode = rollout(self.looker, sense, whole, first_location, policy, self.random)
        parts: list[dict[str, Tensor]] = []
        for _ in range(num_updates):
            with self._half_precision():  # a generator computes in the context of who calls next
                step = next(episode)
                losses = self.objective.losses(self.looker, step, labels, taught, self.values)
            self._update(losses.total)
            self.glimpses_read += len(parts) + 1
            self.on_progress(self.glimpses_read / glimpses_of_batch(self.settings, self.config.agent.core))
            parts.append({name: part.detach() for name, part in losses.parts.items()})
        return parts

    @property
    def num_short_glimpses(self) -> int:
        """Glimpses of a short episode that are learned from."""
        return min(self.settings.short_episode_glimpses, self.settings.num_glimpses)

    def _update(self, loss: Tensor) -> None:
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        if self.bf16_weights is not None:
            self.bf16_weights.hand_over_gradients()  # from the copies to the float32 weights
        distributed.average(gradients(self.optimiser))
        self.optimiser.step()

    @contextmanager
    def _half_precision(self) -> Iterator[None]:
        """Within it, modules compute in half precision, if that is asked for, with the latest weights.

        It is entered anew for each update: autocast keeps the weights it has rounded until it is left.
        """
        with autocast(self.device, self.settings.precision):
            if self.bf16_weights is None:
                yield
            else:
                with self.bf16_weights.in_use():
                    yield

    def policy(self) -> Policy:
        """Returns the policy to train with: sampled if it is learned, otherwise the agent's fixed one."""
        if self.looker.actor is None:
            return self.looker.policy()
        if self.config.uses_gains:
            return SoftmaxPolicy(self.looker.actor)
        sampled = FusedSampledPolicy if isinstance(self.looker, cuda.FusedLooker) else SampledPolicy
        return sampled(self.looker.actor, self.tau)

    def change_epochs(self, epochs: int) -> None:
        """Gives the training another number of epochs, in proportion to which its schedules go on."""
        self.settings = self.settings.with_epochs(epochs)
        if self.averaged is not None:
            self.averaged.num_batches = self.settings.ema_batches_of(self.stage)
        self.config = replace(self.config, training=self.settings)

    def learning_rates(self, epoch: int) -> dict[str, float]:
        """Returns the learning rate of each part in an epoch."""
        settings = self.settings
        actor_lr = settings.base_lr if settings.actor_lr is None else settings.actor_lr
        bases = {"core": settings.base_lr, "actor": actor_lr, "critic": settings.critic_lr}
        sizes = {"actor": ROWS_OF_UPDATE if self.config.uses_gains else None}
        return {part: settings.learning_rate(bases[part], epoch, sizes.get(part)) for part in self.rates}

    @property
    def agent_to_use(self) -> Agent:
        """The agent that is validated and saved: with averaged weights, if they are."""
        return self.agent if self.averaged is None else cast(Agent, self.averaged.module)

    def end_epoch(self, epoch: int) -> dict[str, Any]:
        """Returns the epoch's mean losses, and accuracies when a validation is due."""
        settings = self.settings
        metrics: dict[str, Any] = {"tau": settings.tau(epoch)}
        learning = {"core": {"core"}, "actor": {"actor"}}.get(self.learning_part, set(self.rates))
        rates = self.learning_rates(epoch)
        metrics |= {f"lr/{part}": rate for part, rate in rates.items() if part in learning}
        if epoch + 1 == self.stage.end:
            self._end_stage(next((stage for stage in settings.stages if stage.begin == epoch + 1), None))
        means = self.meter.means()
        metrics |= {name if name == "reward" else f"loss/{name}": mean for name, mean in means.items()}
        if self.validates_after(epoch, settings.validate_every, settings.epochs):
            metrics |= self._validate(is_last=epoch + 1 == settings.epochs)
        return metrics

    def _validate(self, is_last: bool) -> dict[str, float]:
        """Returns accuracies on validation scenes, the last time by the best of several policies.

        That one is the agent's policy from then on.
        """
        agent, settings = self.agent_to_use, self.settings
        policies = policies_to_try(self.config.agent, settings) if is_last else [agent.config.policy]
        found = compare_policies(agent, self.config, self.val_scenes, policies)
        best = max(found, key=lambda policy: sum(found[policy]))
        agent.config = replace(agent.config, policy=best)
        accuracy = found[best]
        metrics = {f"val/accuracy@{n}": accuracy[n - 1] for n in budgets(settings.num_glimpses)}
        if len(found) > 1:
            metrics["val/actor_glimpses"] = float(best.partition(":")[2] or settings.num_glimpses)
        return metrics | {"val/score": sum(accuracy) / len(accuracy)}

    def state_dict(self) -> dict[str, Any]:
        """Returns everything that changes while training."""
        state = {
            "agent": self.agent.state_dict(),
            "values": self.values.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "meter": self.meter.state_dict(),
            "policy": self.agent_to_use.config.policy,
            "replay": self.replay.kept,
            "stage": (self.stage_number, self.stage_is_over),
        }
        kept = {"averaged": self.averaged, "soup": self.soup}
        return state | {name: each.state_dict() for name, each in kept.items() if each is not None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes back to a saved state."""
        self.agent.load_state_dict(state["agent"])
        self.values.load_state_dict(state["values"])
        restore_optimiser(self.optimiser, state["optimiser"], self.rates)
        self.meter.sums = {name: value.to(self.device) for name, value in state["meter"].items()}
        kept = state.get("replay", {})
        self.replay.kept = {rows: tuple(part.to(self.device) for part in kept[rows]) for rows in kept}
        if self.averaged is not None:
            self.averaged.load_state_dict(averaged_state(state))
        if self.soup is not None:
            self.soup.load_state_dict(state["soup"])
        self.stage_number, self.stage_is_over = state.get("stage", (0, False))
        if self.averaged is not None:
            self.averaged.num_batches = self.settings.ema_batches_of(self.stage)
        agent = self.agent_to_use
        agent.config = replace(agent.config, policy=state.get("policy", agent.config.policy))

    def save(self, folder: Path) -> None:
        """Saves the agent for use."""
        save_agent(self.agent_to_use, folder, own=True)

    def progress(self, metrics: dict[str, Any]) -> dict[str, str]:
        """Returns the loss (the actor's, where it learns alone), and the accuracy at a few budgets."""
        loss = metrics.get("loss/supervised", metrics.get("loss/actor"))
        shown = {"loss": f"{loss:.3f}"}
        accuracy = {key.split("@")[1]: value for key, value in metrics.items() if "accuracy@" in key}
        few = {1, len(accuracy) // 2, len(accuracy) - 1}
        chosen = [count for index, count in enumerate(accuracy) if index in few]
        return shown | {f"acc@{count}": f"{100 * accuracy[count]:.1f}" for count in chosen}
