"""Pretrained DeiTs made up for tests, in every naming and kind of file."""

import argparse
from pathlib import Path

import torch
from agents import randomise
from safetensors.torch import save_file

from stam.model.vit import VisionTransformer

WIDTH, CLASSES = 64, 6


def deit_state(distilled: bool, side: int = 4) -> dict[str, torch.Tensor]:
    """A pretrained DeiT in timm's naming: 16 px patches, `side` x `side` of them, one head of width 64."""
    vit = VisionTransformer(
        num_classes=CLASSES,
        patch_size=(16, 16),
        image_patches=(side, side),
        width=WIDTH,
        depth=2,
        num_heads=1,
        distilled=distilled,
    )
    randomise(vit, seed=7)
    return {name: value.clone() for name, value in vit.state_dict().items()}


def to_hugging_face(state: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """The same in Hugging Face's naming."""
    distilled, renamed = "dist_token" in state, {}
    plain = {
        "cls_token": "embeddings.cls_token",
        "dist_token": "embeddings.distillation_token",
        "pos_embed": "embeddings.position_embeddings",
    }
    for name, value in state.items():
        if name in plain:
            renamed[prefix + plain[name]] = value
        elif name.startswith("patch_embed.proj."):
            renamed[name.replace("patch_embed.proj", prefix + "embeddings.patch_embeddings.projection")] = (
                value
            )
        elif name.startswith("norm."):
            renamed[prefix + name.replace("norm", "layernorm")] = value
        elif name.startswith("head_dist."):
            renamed[name.replace("head_dist", "distillation_classifier")] = value
        elif name.startswith("head."):
            renamed[name.replace("head", "cls_classifier" if distilled else "classifier")] = value
        else:
            _, layer, module, *rest = name.split(".")
            base = f"{prefix}encoder.layer.{layer}."
            if module in ("norm1", "norm2"):
                which = "layernorm_before" if module == "norm1" else "layernorm_after"
                renamed[f"{base}{which}.{rest[0]}"] = value
            elif rest[0] == "qkv":
                for part, rows in zip(("query", "key", "value"), value.chunk(3), strict=True):
                    renamed[f"{base}attention.attention.{part}.{rest[1]}"] = rows
            else:
                to = {"proj": "attention.output.dense", "fc1": "intermediate.dense", "fc2": "output.dense"}
                renamed[f"{base}{to[rest[0]]}.{rest[1]}"] = value
    return renamed


def write(folder: Path, state: dict[str, torch.Tensor], kind: str) -> Path:
    """Writes a state dict as one of the many kinds of files there are."""
    path = folder / {"safetensors": "w.safetensors"}.get(kind, "w.pth")
    if kind == "safetensors":
        save_file(state, path)
    elif kind == "pth":
        torch.save({"model": state, "epoch": 3, "args": argparse.Namespace(lr=0.1)}, path)
    elif kind == "ddp":
        torch.save({"state_dict": {f"module.{name}": value for name, value in state.items()}}, path)
    elif kind == "deit":
        torch.save(to_hugging_face(state, "deit."), path)
    elif kind == "vit":
        torch.save(to_hugging_face(state, "vit."), path)
    elif kind == "half":
        torch.save({name: value.half() for name, value in state.items()}, path)
    return path
