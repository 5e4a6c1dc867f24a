"""Pretrains the core and the teacher that ship with the package, on cluttered digits.

    python experiments/pretrain_digits.py --out src/stam/assets --seconds 75

The teacher is trained on whole scenes. The core starts from the teacher's weights and is trained on random
subsets of glimpses, with the labels and the teacher's predictions as targets. It can classify glimpses but
has no policy. Both are saved in half precision.
"""

import argparse
import math
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import stam
from stam.data import ClutteredDigits
from stam.learning.objective import kl_divergence
from stam.learning.optimisation import choose_device, parameter_groups
from stam.model.teacher import Teacher
from stam.model.vit import VisionTransformer
from stam.scene.pixels import normalise
from stam.settings import cosine
from stam.weights import load_deit, read_state_dict, save_agent, save_teacher

SIZES: dict[str, Any] = {"image_size": 56, "glimpse_size": 8, "patch_size": 4}


def paint(split: str, seed: int, num_scenes: int) -> tuple[np.ndarray, np.ndarray]:
    scenes = ClutteredDigits(split, seed=seed, num_scenes=num_scenes)
    return scenes.load_batch(np.arange(num_scenes))[..., 0], scenes.labels


def load_scenes(split: str, seeds: range, num_scenes: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Generates scenes in parallel and returns grey levels (N, 56, 56) and labels on the device."""
    with ProcessPoolExecutor() as pool:
        parts = list(pool.map(paint, *zip(*((split, seed, num_scenes) for seed in seeds), strict=True)))
    grey, labels = (np.concatenate(part) for part in zip(*parts, strict=True))
    return torch.from_numpy(grey).to(device), torch.from_numpy(labels).to(device)


def as_images(grey: Tensor) -> Tensor:
    return normalise(grey[:, None].expand(-1, 3, -1, -1))


def whole_scene_accuracy(model: VisionTransformer, grey: Tensor, labels: Tensor) -> float:
    with torch.no_grad():
        log_p = torch.cat([Teacher(model, 10)(as_images(part)) for part in grey.split(500)])
    return (log_p.argmax(1) == labels).float().mean().item()


def subset_accuracy(agent: stam.Agent, grey: Tensor, labels: Tensor, num_glimpses: int) -> list[float]:
    generator = torch.Generator().manual_seed(0)
    correct = torch.zeros(num_glimpses, device=grey.device)
    for part, wanted in zip(grey.split(500), labels.split(500), strict=True):
        trace = agent.look(as_images(part), num_glimpses, policy="random", generator=generator)
        correct += (trace.predictions == wanted[:, None]).float().sum(0)
    return (correct / len(labels)).tolist()


def optimise(model: torch.nn.Module, seconds: float, peak_lr: float, loss_of_batch) -> None:  # type: ignore[no-untyped-def]
    """Runs AdamW on `loss_of_batch()` for a number of seconds, with a short warm-up and a cosine schedule."""
    optimiser = torch.optim.AdamW(parameter_groups({"all": model.named_parameters()}, 0.05), fused=True)
    began, step = time.monotonic(), 0
    while (progress := (time.monotonic() - began) / seconds) < 1:
        rate = cosine(peak_lr, 1e-6, progress) * min(1.0, (step + 1) / 300)
        for group in optimiser.param_groups:
            group["lr"] = rate
        loss = loss_of_batch()
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        step += 1
        if step % 500 == 0:
            print(f"  {step} steps, {time.monotonic() - began:.0f} s, loss {loss.item():.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=75, help="for the teacher, and again for the core")
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--num-heads", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--num-sets", type=int, default=32, help="sets of scenes, each with its own seed")
    parser.add_argument("--num-scenes", type=int, default=10_000, help="scenes in a set")
    parser.add_argument("--teacher", type=Path, help="a trained teacher: only the core is pretrained")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    device = choose_device(arguments.device)
    torch.manual_seed(arguments.seed)
    began = time.monotonic()
    # seed 0 is left to the agents that start from this core
    grey, labels = load_scenes("train", range(100, 100 + arguments.num_sets), arguments.num_scenes, device)
    test_grey, test_labels = load_scenes("test", range(1), min(2000, arguments.num_scenes), device)
    print(f"{len(grey)} training scenes in {time.monotonic() - began:.0f} s", flush=True)
    size: dict[str, Any] = {
        "width": arguments.width,
        "depth": arguments.depth,
        "num_heads": arguments.num_heads,
    }

    def draw() -> tuple[Tensor, Tensor]:
        chosen = torch.randint(len(grey), (arguments.batch_size,), device=device)
        return as_images(grey[chosen]), labels[chosen]

    grid = stam.Grid(**SIZES)
    vit = {"patch_size": grid.patch_size, **size, "distilled": False}
    model = VisionTransformer(num_classes=10, image_patches=grid.image_patches, drop_path=0.1, **vit).to(
        device
    )
    half_precision = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")

    def teacher_loss() -> Tensor:
        images, wanted = draw()
        model.train()
        with half_precision:
            (logits,) = model.classify_images(images, model.sample_drop_path(len(images)))
        return F.cross_entropy(logits.float(), wanted, label_smoothing=0.05)

    if arguments.teacher is not None:
        model.load_state_dict(read_state_dict(arguments.teacher / "model.safetensors"))
    else:
        optimise(model, arguments.seconds, 2e-3, teacher_loss)
    accuracy = whole_scene_accuracy(model, test_grey, test_labels)
    print(f"teacher: {100 * accuracy:.2f}% of {len(test_labels)} test scenes", flush=True)
    record: dict[str, Any] = {"labels": [str(digit) for digit in range(10)], "image_size": 56, "vit": vit}
    teacher = Teacher(model, 10)
    save_teacher(model, arguments.out / "digits-teacher", record, half=True)

    config = stam.AgentConfig(
        num_classes=10, **SIZES, **size, drop_path=0.0, policy="random", labels=tuple(record["labels"])
    )
    start = {name: value.cpu() for name, value in model.state_dict().items()}
    settings = {
        name: getattr(config, name) for name in ("image_size", "glimpse_size", "num_heads", "drop_path")
    }
    agent = load_deit(start, 10, **settings, policy="random", labels=config.labels).to(device).train()

    def core_loss() -> Tensor:
        images, wanted = draw()
        count = 1 + int((grid.num_locations - 1) * torch.rand(()).item() ** 1.5)  # small numbers more often
        order = torch.rand(len(images), grid.num_locations, device=device).argsort(dim=1)[:, :count]
        patches = grid.patches(grid.cut(images, order))
        with half_precision:
            features = agent.core(patches, agent.positions[order].flatten(1))
            class_logits, distill_logits = agent.core.classify(features)
            log_q = teacher(images)
        soft = kl_divergence(log_q, distill_logits.float().log_softmax(1)).mean()
        return F.cross_entropy(class_logits.float(), wanted) + soft

    optimise(agent, arguments.seconds, 1e-3, core_loss)
    curve = subset_accuracy(agent.eval(), test_grey, test_labels, grid.num_locations)
    shown = {count: f"{100 * curve[count - 1]:.1f}" for count in (1, 4, 8, 12, 14, 16, 24, 32, 49)}
    print(f"core, random glimpses: {shown}", flush=True)
    assert math.isfinite(sum(curve))
    save_agent(agent, arguments.out / "digits-core", half=True)
    print(f"all in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
