"""How much a teacher says beyond the label, which is what consistency with it can add.

    python experiments/teacher_says.py imagenette --data imagenette-train.tar --teacher deit_tiny.safetensors

The teacher sees training images as training crops them. One that is nearly always sure of the label is one
more label.
"""

import argparse
import json
import math

import numpy as np
import torch
from real_images import configure

from stam.data import open_scenes
from stam.data.augment import Augment
from stam.data.loader import BatchLoader, TrainingView
from stam.data.randomness import random_order
from stam.data.sampler import batches
from stam.weights import open_teacher


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dataset", choices=("imagenette", "aid"))
    parser.add_argument("--data", required=True)
    parser.add_argument("--teacher", required=True)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--set", default="{}", help="JSON, as for real_images.py")
    arguments = parser.parse_args()
    scenes = open_scenes(arguments.data).train
    classes = tuple(scenes.classes)
    config = configure(arguments.dataset, classes, json.loads(arguments.set), workers=0)
    teacher = open_teacher(arguments.teacher, classes, config.agent, config.class_indices)
    augment = Augment(config.data.augment, config.agent.image_size, config.agent.mean, config.agent.std)
    chosen = random_order(len(scenes), "teacher says", 0)[: arguments.images]
    planned = batches(np.sort(chosen), 100, drop_last=False)
    entropies, of_labels, right = [], [], []
    for number, raw in enumerate(BatchLoader(scenes, planned, TrainingView(config.data.decode_size), 0)):
        log_q = teacher(augment(raw.images, raw.sizes, (0, number)))
        entropies.append(-(log_q.exp() * log_q).sum(dim=1))
        of_labels.append(log_q.gather(1, raw.labels[:, None]).exp()[:, 0])
        right.append(log_q.argmax(dim=1) == raw.labels)
    entropy, of_label, correct = (torch.cat(parts) for parts in (entropies, of_labels, right))
    print(
        f"{len(entropy)} training images of {arguments.dataset}, cropped as in training: right in "
        f"{100 * correct.float().mean():.1f}%, the label has {of_label.mean():.3f} on average and more than "
        f"0.9 in {100 * (of_label > 0.9).float().mean():.0f}%; entropy {entropy.mean():.3f} on average, "
        f"{entropy.median():.3f} in the median, of at most {math.log(len(classes)):.2f}"
    )


if __name__ == "__main__":
    main()
