"""PatchDrop: Uzkent, Ermon, "Learning When and Where to Zoom with Deep Reinforcement Learning", CVPR 2020.

A policy sees the whole scene at low resolution and opens or closes a gate for every patch of a grid, all at
once; a classifier sees the open patches at full resolution. In the end its logits are added to those of a
classifier of the low-resolution view (the two-stream classifier). Three stages, as in the paper: the
classifiers, each alone; the policy by REINFORCE with a self-critical baseline, all else fixed (its
pretraining); policy and high-resolution classifier together, with a wrong answer costing more (its joint
fine-tuning). In the second stage the open patches alone are classified: with the low-resolution view, most
answers would be right without them, and every gate would close for good.

Departs from the paper:
- the high-resolution classifier meets random gates in its first stage, not whole scenes only;
- one joint stage, with both streams, where the paper adds the low-resolution one in another stage.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stam.errors import require
from stam.model.looker import SceneTrace
from stam.model.randomness import RandomSource
from stam.shapes import Float, Int
from stam.zoo.backbone import Backbone
from stam.zoo.sensing import shrunk, whole_boxes
from stam.zoo.system import RANDOM, Stage, System, SystemConfig, is_right


@dataclass(frozen=True)
class PatchdropConfig(SystemConfig):
    """PatchDrop's settings.

    Attributes:
        low_size: Pixels of the whole scene at low resolution.
        num_patches: Patches in a row, and rows.
        wrong_reward: Reward of a wrong answer while the policy is trained alone (the paper's -sigma).
        joint_wrong_reward: The same while policy and classifier are trained together; -20 on fMoW.
        first_alpha: How certain a gate may be at first (the paper's alpha), so that all are tried.
        last_alpha: The same at the end.
        num_glimpses: The low-resolution view, and the open patches, which are sensed at once.
        backbone: Of the policy and of both classifiers: conv or deit-tiny.
    """

    low_size: int = 56
    num_patches: int = 4
    wrong_reward: float = -0.5
    joint_wrong_reward: float = -10.0
    first_alpha: float = 0.8
    last_alpha: float = 0.95
    num_glimpses: int = 2
    backbone: str = "deit-tiny"

    clutter: ClassVar[dict[str, Any]] = {"low_size": 15, "backbone": "conv"}

    def __post_init__(self) -> None:
        """Checks that patches cover the scene."""
        super().__post_init__()
        fits = self.image_size % self.num_patches == 0
        require(fits, f"num_patches {self.num_patches} does not divide image_size {self.image_size}")
        require(self.num_glimpses <= 2, "num_glimpses is at most 2: the low-resolution view, and the patches")


class Patchdrop(System):
    """PatchDrop."""

    name, paper, settings = "patchdrop", "Uzkent and Ermon 2020", PatchdropConfig
    whole_to_attend = whole_to_classify = True
    stages = (
        Stage("classifiers", 0.5, ("low", "low_classifier", "high", "high_classifier")),
        Stage("policy", 0.25, ("gatekeeper", "gate")),
        Stage("together", 0.25, ("gatekeeper", "gate", "high", "high_classifier"), rate=0.3),
    )

    def __init__(self, config: PatchdropConfig) -> None:
        super().__init__(config)
        self.low = Backbone(config.backbone, config.low_size, config.channels)  # f_lr
        self.low_classifier = nn.Linear(self.low.width, config.num_classes)
        self.high = Backbone(config.backbone, config.image_size, config.channels)  # f_cl
        self.high_classifier = nn.Linear(self.high.width, config.num_classes)
        self.gatekeeper = Backbone(config.backbone, config.low_size, config.channels)  # f_p
        self.gate = nn.Linear(self.gatekeeper.width, config.num_patches**2)

    def chances(self, images: Tensor) -> Float[Tensor, "batch patches"]:
        """Returns the probability s that each gate opens."""
        return self.gate(self.gatekeeper(shrunk(images, self.config.low_size))).float().sigmoid()

    def answer(self, images: Tensor, gates: Float[Tensor, "batch patches"]) -> Float[Tensor, "batch classes"]:
        """Classifies from the open patches and the low-resolution view (the two-stream classifier)."""
        return self.answer_high(images, gates) + self.answer_low(images)

    def answer_high(
        self, images: Tensor, gates: Float[Tensor, "batch patches"]
    ) -> Float[Tensor, "batch classes"]:
        """Classifies from the open patches alone."""
        side = self.config.num_patches
        mask = gates.view(-1, 1, side, side)
        size = self.config.image_size // side
        seen = images * mask.repeat_interleave(size, dim=2).repeat_interleave(size, dim=3).to(images.dtype)
        return self.high_classifier(self.high(seen)).float()

    def answer_low(self, images: Tensor) -> Float[Tensor, "batch classes"]:
        """Classifies from the low-resolution view alone."""
        return self.low_classifier(self.low(shrunk(images, self.config.low_size))).float()

    def losses(
        self, stage: str, images: Tensor, labels: Int[Tensor, " batch"], random: RandomSource
    ) -> dict[str, Tensor]:
        """Cross-entropy, or REINFORCE against what the policy's certain choice earns (self-critical)."""
        if stage == "classifiers":
            shape = (len(images), self.config.num_patches**2)
            open_share = random.uniform((len(images), 1), images.device)  # from no patch to all
            gates = (random.uniform(shape, images.device) < open_share).float()
            return {
                "high": F.cross_entropy(self.answer_high(images, gates), labels),
                "low": F.cross_entropy(self.answer_low(images), labels),
            }
        chances = self.chances(images)
        config, done = self.config, self.get_buffer("progress")
        last = config.last_alpha
        alpha = config.first_alpha + (last - config.first_alpha) * done if stage == "policy" else last
        tempered = alpha * chances + (1 - alpha) * (1 - chances)  # the paper's temperature scaling
        gates = (random.uniform(tuple(chances.shape), images.device) < tempered).float()
        classify = self.answer_high if stage == "policy" else self.answer
        answer = classify(images, gates)
        wrong = config.wrong_reward if stage == "policy" else config.joint_wrong_reward
        with torch.no_grad():
            certain = (chances > 0.5).float()
            baseline = self.reward(classify(images, certain), certain, labels, wrong)
            advantage = self.reward(answer, gates, labels, wrong) - baseline
        score = (gates * tempered.log() + (1 - gates) * (1 - tempered).log()).sum(dim=1)
        found = {"policy": -(score * advantage).mean()}
        if stage == "together":
            found["classification"] = F.cross_entropy(answer, labels)
        return found

    def reward(self, answer: Tensor, gates: Tensor, labels: Tensor, wrong: float) -> Float[Tensor, " batch"]:
        """Returns 1 - (share of open patches)^2 for a right answer, `wrong` for a wrong one (R)."""
        right = is_right(answer, labels)
        return right * (1 - gates.mean(dim=1) ** 2) + (1 - right) * wrong

    def rollout(self, images: Tensor, num_glimpses: int, policy: str, random: RandomSource) -> SceneTrace:
        """Senses the whole scene at low resolution, then all open patches at once."""
        config, batch = self.config, len(images)
        boxes, sizes = [whole_boxes(batch, images.device)], [[(config.low_size, config.low_size)]]
        answers = [self.answer_low(images)]
        if num_glimpses == 2:
            gates = self.gates(images, policy, random)
            side, size = config.num_patches, config.image_size // config.num_patches
            cells = torch.arange(side**2, device=images.device)
            corner = torch.stack((cells // side, cells % side), dim=1) / side
            box = torch.cat((corner, corner + 1 / side), dim=1)  # (patches, 4)
            boxes.append(box * gates[..., None])
            sizes.append([(size, size)] * side**2)
            answers.append(self.answer(images, gates))
        return SceneTrace.of(boxes, sizes, answers)

    def gates(self, images: Tensor, policy: str, random: RandomSource) -> Float[Tensor, "batch patches"]:
        """Returns which gates are open; the random policy opens as many of each scene, but others."""
        gates = (self.chances(images) > 0.5).float()
        if policy != RANDOM:
            return gates
        rank = random.uniform(tuple(gates.shape), images.device).argsort(dim=1).argsort(dim=1)
        return (rank < gates.sum(dim=1, keepdim=True)).float()
