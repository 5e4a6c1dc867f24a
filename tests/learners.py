"""A small learner for tests."""

import torch

from stam.config import AgentConfig
from stam.evaluation.speed import make_learner
from stam.learning.training import AgentLearner
from stam.settings import RunConfig, TrainingConfig

AGENT = AgentConfig(
    num_classes=5,
    image_size=32,
    glimpse_size=8,
    patch_size=4,
    width=32,
    depth=2,
    num_heads=2,
    actor_width=32,
    critic_width=16,
)


def learner(**training) -> AgentLearner:
    torch.manual_seed(0)
    settings = TrainingConfig(**({"num_glimpses": 4, "batch_size": 16, "device": "cpu"} | training))
    config = RunConfig(agent=AGENT, training=settings)
    return make_learner(config)
