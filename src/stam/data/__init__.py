"""Labelled images: folders, tar shards, fMoW and the embedded digits; splits, batches and loading."""

from stam.data.cache import CachedScenes
from stam.data.checking import ImageReport, check_images
from stam.data.clutter import ClutteredScenes, open_clutter
from stam.data.digits import Box, ClutteredDigits, open_digits
from stam.data.fmow import FMOW_CLASSES, FmowReport, prepare_fmow
from stam.data.folder import ImageFolder, open_folder
from stam.data.images import IMAGE_SUFFIXES, decode_image
from stam.data.indexed import IndexedShards, open_indexed
from stam.data.loader import BatchLoader, EvaluationView, RawBatch, TrainingView, View, pad_images
from stam.data.packing import ShardReport, prepare_shards
from stam.data.sampler import batches, epoch_indices, evaluation_indices
from stam.data.scenes import PaintedScenes, Relabelled, Scenes, Subset
from stam.data.shards import TarShards, open_shards
from stam.data.sources import open_for_evaluation, open_scenes
from stam.data.splits import (
    SplitPlan,
    SplitRecord,
    Splits,
    load_record,
    save_record,
    stratified_split,
)
from stam.scene.pixels import prepare_for_evaluation

__all__ = [
    "FMOW_CLASSES",
    "IMAGE_SUFFIXES",
    "BatchLoader",
    "Box",
    "CachedScenes",
    "ClutteredDigits",
    "ClutteredScenes",
    "EvaluationView",
    "FmowReport",
    "ImageFolder",
    "ImageReport",
    "IndexedShards",
    "PaintedScenes",
    "RawBatch",
    "Relabelled",
    "Scenes",
    "ShardReport",
    "SplitPlan",
    "SplitRecord",
    "Splits",
    "Subset",
    "TarShards",
    "TrainingView",
    "View",
    "batches",
    "check_images",
    "decode_image",
    "epoch_indices",
    "evaluation_indices",
    "load_record",
    "open_clutter",
    "open_digits",
    "open_folder",
    "open_for_evaluation",
    "open_indexed",
    "open_scenes",
    "open_shards",
    "pad_images",
    "prepare_fmow",
    "prepare_for_evaluation",
    "prepare_shards",
    "save_record",
    "stratified_split",
]
