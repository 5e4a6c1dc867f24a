"""The optional packages, and whether they are installed."""

import importlib.util

EXTRAS = {  # name: the packages it brings, and what for
    "figures": (("matplotlib",), "stam figures, pages of stam compare"),
    "export": (("onnx", "onnxscript", "onnxruntime"), "stam export"),
    "gym": (("gymnasium",), "the Gymnasium environment"),
    "hub": (("huggingface_hub",), "hub:NAME, stam push"),
    "timm": (("timm",), "teachers of other architectures"),
    "logging": (("tensorboard",), "--tensorboard"),
    "wandb": (("wandb",), "--wandb"),
    "mlflow": (("mlflow",), "--mlflow"),
    "urls": (("fsspec",), "shards at https://, s3://, gs://"),
}


def is_installed(extra: str) -> bool:
    """Tells whether all packages of an extra are there."""
    return all(importlib.util.find_spec(package) is not None for package in EXTRAS[extra][0])
