"""A training batch in tests: losses after each glimpse, without updates in between."""

from collections.abc import Iterator
from types import SimpleNamespace

from stam.model.episode import rollout, sense_images
from stam.model.teacher import TeacherOutput


def training_episode(
    agent, objective, values, images, labels, log_q, first_location, policy, generator=None, features=None
) -> Iterator[SimpleNamespace]:
    sense, target = sense_images(images, agent.grid), TeacherOutput(log_q, features)
    for step in rollout(agent, sense, objective.num_glimpses, first_location, policy, generator):
        losses = objective.losses(agent, step, labels, target, values)
        yield SimpleNamespace(
            total=losses.total, parts=losses.parts, location=step.location, num_glimpses=step.num_glimpses
        )
