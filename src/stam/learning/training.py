"""Training an agent, readable in one sitting.

For every batch: the teacher looks at the whole images once, then the agent looks glimpse by glimpse and is
updated after each.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stam.data import RawBatch, Scenes
from stam.data.augment import Augment, mild
from stam.data.mixing import mix_each, smooth_targets
from stam.data.randomness import random_key
from stam.fast import kernels
from stam.fast.bf16_weights import RoundedWeights
from stam.fast.cuda_graph import Pipeline, RecordedFunction
from stam.learning import distributed
from stam.learning.averaging import average_of
from stam.learning.loop import Learner, Meter, MetricLogger, Place, Plan, host_random, restore, run_loop
from stam.learning.objective import StepLosses, ValueNormaliser, training_episode
from stam.learning.optimisation import (
    autocast,
    choose_device,
    gradients,
    is_half,
    make_optimiser,
    restore_optimiser,
)
from stam.learning.runs import RunFolder
from stam.learning.validation import budgets, validate
from stam.model.agent import Agent
from stam.model.policy import Policy, RandomPolicy, SampledPolicy, random_locations
from stam.model.teacher import Teacher, require_features
from stam.settings import RunConfig, TrainingConfig
from stam.weights import save_agent


def train(
    run: RunFolder,
    config: RunConfig,
    agent: Agent,
    teacher: Teacher,
    train_scenes: Scenes,
    val_scenes: Scenes,
    resume: bool = False,
    loggers: tuple[MetricLogger, ...] = (),
) -> Agent:
    """Trains an agent in a run folder and returns it in evaluation mode.

    Args:
        run: Where metrics, checkpoints and state go.
        config: The whole experiment.
        agent: The agent to train, as it starts.
        teacher: Says what the whole image shows.
        train_scenes: What to learn from.
        val_scenes: What to choose the best checkpoint by.
        resume: Whether to go on from the run's saved state.
        loggers: Called with every epoch's metrics, beside `metrics.jsonl`.

    Raises:
        Interrupted: Ctrl-C; the state was saved and `resume` goes on from it.
    """
    learner = AgentLearner(config, agent, teacher, val_scenes)
    if resume:
        restore(learner, run)
    training = config.training
    run_loop(
        learner,
        run,
        plan(len(train_scenes), training),
        train_scenes,
        config.data,
        "training",
        training.save_minutes,
        f"{distributed.launcher()} train --resume --out {run.path}",
        loggers,
    )
    if learner.averaged is not None:
        learner.averaged.settle()
    return learner.agent.eval()


def plan(num_scenes: int, training: TrainingConfig) -> Plan:
    """Returns which scenes a training shows when: by default 1/T of them an epoch."""
    share = training.epoch_share or 1 / training.num_glimpses
    return Plan(num_scenes, training.epochs, training.batch_size, share, training.seed)


class AgentLearner(Learner):
    """An agent being trained, with its critic, value statistics and optimiser.

    What a batch reads beside its images changes in place (rates, tau, statistics), so that a GPU can replay
    a recorded batch; see `recording`.
    """

    def __init__(self, config: RunConfig, agent: Agent, teacher: Teacher, val_scenes: Scenes) -> None:
        self.config, self.training, self.val_scenes = config, config.training, val_scenes
        self.device = choose_device(config.training.device)
        self.agent, self.teacher = agent.to(self.device).train(), teacher.to(self.device)
        parts = {"core": agent.core.named_parameters()}
        if agent.actor is not None:
            parts |= {
                "actor": agent.actor.named_parameters(),
                "critic": agent.add_critic().named_parameters(),
            }
        self.averaged = average_of(agent, self.training.averaged_batches, self.training.start_share)
        self.rounded = RoundedWeights(agent) if is_half(self.device, self.training.precision) else None
        self.rates = {part: torch.zeros((), device=self.device) for part in parts}
        self.optimiser = make_optimiser(parts, self.training.weight_decay, self.rates)
        training = self.training
        self.objective = training.objective(agent.config.handover)
        self.values = ValueNormaliser(self.objective.num_chosen, discount=training.discount).to(self.device)
        require_features(teacher, agent.config.width, training.feature_weight)
        self.augment, self.augment_mildly = (
            Augment(augment, agent.grid.image_size, agent.config.mean, agent.config.std)
            for augment in (config.data.augment, mild(config.data.augment))
        )
        self.generator = torch.Generator(self.device)
        self.tau = torch.ones((), device=self.device)
        self.meter = Meter()
        self.pipeline = Pipeline(self.device)
        alone = not distributed.is_distributed()  # exchanges between processes are not recorded
        self.record = self.training.compile and self.device.type == "cuda" and alone
        self._recorded: RecordedFunction | None = None  # it holds for one kind of policy
        self._recorded_policy: type[Policy] | None = None

    def train_batch(self, place: Place, raw: RawBatch) -> None:
        """Takes one optimiser step after each glimpse of a batch."""
        seed = (self.training.seed, place.epoch, place.batch)
        with self.pipeline.preparing():
            augment = self.augment_mildly if self.training.is_mild(place.epoch) else self.augment
            images = augment(raw.images.to(self.device, non_blocking=True), raw.sizes, seed)
            labels = raw.labels.to(self.device, non_blocking=True)
            images, labels = self._mixed(images, labels, seed)
        with self.pipeline.using(images, labels):
            self.learn_from(images, labels, place)

    def _mixed(self, images: Tensor, labels: Tensor, seed: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Mixes images in pairs, if that is asked for; labels become distributions then."""
        mixup, cutmix = self.training.mixup, self.training.cutmix
        if mixup == 0 and cutmix == 0:
            return images, labels
        random = host_random("mixing", *seed)
        targets = smooth_targets(labels, self.agent.config.num_classes, smoothing=0.0)
        return mix_each(images, targets, mixup, cutmix, random)

    def learn_from(self, images: Tensor, labels: Tensor, place: Place) -> None:
        """Learns from a batch of augmented images, with their classes or how likely each class is."""
        if is_half(self.device, self.training.precision):
            images = images.bfloat16()  # all readers round them: once is enough, and takes half the memory
        self.tau.fill_(self.training.tau(place.epoch))
        for part, rate in self.learning_rates(place.epoch).items():
            self.rates[part].fill_(rate)
        self.generator.manual_seed(random_key("batch", self.training.seed, place.epoch, place.batch) >> 1)
        first = random_locations(self.agent.grid, len(images), self.device, self.generator)
        policy = self.policy(place.epoch)
        if self.record:
            self._replay(policy, images, labels, first)
        else:
            self.learn(policy, images, labels, first)
        if self.averaged is not None:
            self.averaged.update()

    def _replay(self, policy: Policy, images: Tensor, labels: Tensor, first_location: Tensor) -> None:
        if self._recorded is None or type(policy) is not self._recorded_policy:
            self._recorded_policy = type(policy)
            learn = partial(self.learn, policy)
            self._recorded = RecordedFunction(learn, self.generator, announced=True)
        self._recorded(images, labels, first_location)

    def learn(self, policy: Policy, images: Tensor, labels: Tensor, first_location: Tensor) -> None:
        """Shows a batch to the teacher, then glimpse by glimpse to the agent, and updates it after each."""
        with kernels.switched(self.training.compile):
            self._learn(policy, images, labels, first_location)

    def _learn(self, policy: Policy, images: Tensor, labels: Tensor, first_location: Tensor) -> None:
        with self._autocast():
            target = self._target(images)
        training = self.training
        few = min(training.extra_glimpses, training.num_glimpses)
        for _ in range(training.extra_looks):
            other = random_locations(self.agent.grid, len(images), self.device, self.generator)
            for _ in self._updates(policy, images, labels, target, other, few):
                pass
        updates = self._updates(policy, images, labels, target, first_location, training.num_glimpses)
        parts = [{name: part.detach() for name, part in step.parts.items()} for step in updates]
        self.meter.add(*parts)  # all at once: every addition is a launch

    def _updates(
        self,
        policy: Policy,
        images: Tensor,
        labels: Tensor,
        target: tuple[Tensor, Tensor | None],
        first_location: Tensor,
        num_glimpses: int,
    ) -> Iterator[StepLosses]:
        """Updates the agent after each glimpse of an episode, which may be broken off before its end."""
        log_q, features = target
        episode = training_episode(
            self.agent,
            self.objective,
            self.values,
            images,
            labels,
            log_q,
            first_location,
            policy,
            self.generator,
            features,
        )
        for _ in range(num_glimpses):
            with self._autocast(), self._rounded():  # anew for each update
                step = next(episode)
            self.optimiser.zero_grad(set_to_none=True)
            step.total.backward()
            if self.rounded is not None:
                self.rounded.hand_over_gradients()
            distributed.average(gradients(self.optimiser))
            self.optimiser.step()
            yield step

    def _target(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns log q, and the teacher's features if they are to be followed too."""
        if self.training.feature_weight > 0:
            return self.teacher.explain(images)
        return self.teacher(images), None

    def _autocast(self) -> torch.autocast:
        return autocast(self.device, self.training.precision)

    def _rounded(self) -> AbstractContextManager[None]:
        return nullcontext() if self.rounded is None else self.rounded.in_use()

    def _averaged(self) -> AbstractContextManager[None]:
        return nullcontext() if self.averaged is None else self.averaged.in_use()

    def policy(self, epoch: int) -> Policy:
        """Returns who picks the locations in an epoch: nobody knows yet during a warm-up."""
        if epoch < self.training.warmup_epochs:
            return RandomPolicy()
        if self.agent.actor is None:
            return self.agent.policy()
        return SampledPolicy(self.agent.actor, self.tau, self.agent.config.handover)

    def learning_rates(self, epoch: int) -> dict[str, float]:
        """Returns the learning rate of each part in an epoch."""
        training = self.training
        actor_lr = training.base_lr if training.actor_lr is None else training.actor_lr
        bases = {"core": training.base_lr, "actor": actor_lr, "critic": training.critic_lr}
        return {part: training.learning_rate(bases[part], epoch) for part in self.rates}

    def end_epoch(self, epoch: int) -> dict[str, Any]:
        """Returns the epoch's mean losses, and accuracies when a validation is due."""
        training = self.training
        metrics: dict[str, Any] = {"tau": training.tau(epoch)}
        metrics |= {f"lr/{part}": rate for part, rate in self.learning_rates(epoch).items()}
        means = self.meter.means()
        metrics |= {name if name == "reward" else f"loss/{name}": mean for name, mean in means.items()}
        if self.validates_after(epoch, training.validate_every, training.epochs):
            with self._averaged():
                accuracy = validate(self.agent, self.config, self.val_scenes)
            metrics |= {f"val/accuracy@{n}": accuracy[n - 1] for n in budgets(training.num_glimpses)}
            metrics["val/score"] = sum(accuracy) / len(accuracy)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Returns everything that changes while training."""
        state = {
            "agent": self.agent.state_dict(),
            "values": self.values.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "meter": self.meter.state_dict(),
        }
        return state if self.averaged is None else state | {"averaged": self.averaged.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes back to a saved state."""
        self.agent.load_state_dict(state["agent"])
        self.values.load_state_dict(state["values"])
        restore_optimiser(self.optimiser, state["optimiser"], self.rates)
        self.meter.sums = {name: value.to(self.device) for name, value in state["meter"].items()}
        if self.averaged is not None:
            self.averaged.load_state_dict(state["averaged"])

    def save(self, folder: Path) -> None:
        """Saves the agent for use."""
        with self._averaged():
            save_agent(self.agent, folder)

    def progress(self, metrics: dict[str, Any]) -> dict[str, str]:
        """Returns the loss, and the accuracy at a few budgets."""
        shown = {"loss": f"{metrics['loss/supervised']:.3f}"}
        accuracy = {key.split("@")[1]: value for key, value in metrics.items() if "accuracy@" in key}
        few = {1, len(accuracy) // 2, len(accuracy) - 1}
        chosen = [count for index, count in enumerate(accuracy) if index in few]
        return shown | {f"acc@{count}": f"{100 * accuracy[count]:.1f}" for count in chosen}
