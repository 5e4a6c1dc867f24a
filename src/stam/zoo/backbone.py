"""What turns pixels into features: a DeiT for photographs, a small convolutional network for grey digits."""

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stam.config import CORE_SIZES
from stam.errors import require_choice
from stam.model.vit import VisionTransformer
from stam.shapes import Float
from stam.weights import adapt_deit, find_core, load_strictly
from stam.weights.folder import MODEL_FILE

BACKBONES = ("conv", *(f"deit-{size}" for size in CORE_SIZES))
_PATCH = 16
_MAP_LAYERS = 10  # of the small network, before it forgets where things are


class Backbone(nn.Module):
    """Encodes square crops of one size as a feature vector each.

    A DeiT takes patches of 16 pixels. A crop whose side is no multiple of 16 is enlarged to the next one:
    what is sensed and counted stays as it was.

    Attributes:
        width: Features of a crop.
    """

    def __init__(self, kind: str, side: int, channels: int) -> None:
        super().__init__()
        require_choice("backbone", kind, BACKBONES)
        self.kind, self.channels = kind, channels
        if kind == "conv":
            self.side, self.width = side, 256
            self.net: nn.Module = _small_network(side, channels)
            return
        self.side = -(-side // _PATCH) * _PATCH
        width, depth, num_heads = CORE_SIZES[kind.removeprefix("deit-")]
        self.net = VisionTransformer(
            num_classes=1,
            patch_size=(_PATCH, _PATCH),
            image_patches=(self.side // _PATCH, self.side // _PATCH),
            channels=channels,
            width=width,
            depth=depth,
            num_heads=num_heads,
            distilled=False,
        )
        self.net.head = nn.Identity()  # type: ignore[assignment]
        self.width = width

    def forward(self, images: Float[Tensor, "batch channels side side"]) -> Float[Tensor, "batch width"]:
        """Returns the features: of a DeiT, its class token's."""
        images = self._fitting(images)
        if isinstance(self.net, VisionTransformer):
            return self.net(*self.net.all_patches(images))[:, 0]
        return self.net(images)

    def with_map(
        self, images: Tensor
    ) -> tuple[Float[Tensor, "batch width"], Float[Tensor, "batch maps rows columns"]]:
        """Returns the features, and a map of features for places: a DeiT's patches before its last block."""
        images = self._fitting(images)
        if not isinstance(self.net, VisionTransformer):
            places = self.net[:_MAP_LAYERS](images)  # type: ignore[index]
            return self.net[_MAP_LAYERS:](places), places  # type: ignore[index]
        net = self.net
        patches, positions = net.all_patches(images)
        tokens = torch.cat(
            (net.readout_tokens().expand(len(images), -1, -1), net.embed(patches, positions)), dim=1
        )
        for block in net.blocks[:-1]:
            tokens = block(tokens)
        features = net.norm(net.blocks[-1](tokens, None, 1))[:, 0]
        return features, tokens[:, 1:].transpose(1, 2).unflatten(2, net.image_patches)

    @property
    def map_width(self) -> int:
        """Features of a place of the map."""
        return 64 if self.kind == "conv" else self.width

    @property
    def map_side(self) -> int:
        """Places of the map in a row, and rows."""
        return self.side // 2 // 2 if self.kind == "conv" else self.side // _PATCH

    def _fitting(self, images: Tensor) -> Tensor:
        """Returns images in the size the network takes."""
        if images.shape[-1] == self.side:
            return images
        return F.interpolate(images, size=(self.side, self.side), mode="bilinear", align_corners=False)

    def each(
        self, crops: Float[Tensor, "batch crops channels side side"]
    ) -> Float[Tensor, "batch crops width"]:
        """Encodes several crops of each scene."""
        return self(crops.flatten(0, 1)).unflatten(0, crops.shape[:2])

    def start(self, source: str) -> None:
        """Takes the weights of a DeiT; positions are interpolated to its own grid of patches.

        Args:
            source: A weights file, a run, `package:NAME` or `hub:NAME`.
        """
        net, found = self.net, find_core(source)
        if found is None or not isinstance(net, VisionTransformer):  # a small network starts at random
            return
        state, _ = adapt_deit(found / MODEL_FILE if found.is_dir() else found, 1, image_size=self.side)
        kept = {name: value for name, value in state.items() if not name.startswith(("dist_token", "head"))}
        if "dist_token" in state:  # its position comes second
            kept["pos_embed"] = torch.cat((state["pos_embed"][:, :1], state["pos_embed"][:, 2:]), dim=1)
        load_strictly(net, kept, source)


def _small_network(side: int, channels: int) -> nn.Module:
    """Four convolutions and one layer, about what the papers use on digits."""
    left = side // 2 // 2
    return nn.Sequential(
        *(nn.Conv2d(channels, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()),
        nn.MaxPool2d(2),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()),
        nn.MaxPool2d(2),
        *(nn.Flatten(), nn.Linear(64 * left * left, 256), nn.ReLU()),
    )


def mlp(*widths: int) -> nn.Sequential:
    """Returns linear layers with ReLU between them."""
    layers: list[Any] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
