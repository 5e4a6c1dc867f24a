"""Opens damaged files of every format we read: each must be opened, or refused in one line.

`python tests/fuzzing.py --inputs 100000` tries so many in all, in processes of their own, and reports how
many were opened and refused, tracebacks, crashes, what took more than ten seconds, and the most memory taken.
`tests/test_fuzzing.py` tries some of the same in every run of the tests.
"""

import argparse
import contextlib
import dataclasses
import functools
import io
import json
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from random import Random
from typing import Any

import numpy as np
import torch
from agents import randomise, tiny_config
from damage import damage_bytes, damage_json, damage_pth, damage_safetensors, save_pth
from deits import CLASSES, deit_state, to_hugging_face
from images import make_image_folder
from learners import learner
from made_up import made_up
from PIL import Image
from safetensors.torch import save_file
from zooing import glyph_file, small

import stam
from stam.cli.batch import COLUMNS, open_rows
from stam.cli.info import run_lines
from stam.cli.logging import _ids, _remember
from stam.cli.settings_file import read_settings
from stam.data import (
    SplitRecord,
    check_images,
    decode_image,
    load_record,
    open_scenes,
    prepare_shards,
    save_record,
)
from stam.data.clutter import open_clutter
from stam.data.fmow import _read_box, _read_boxes, _SkipError
from stam.data.listing import _digest, list_tar, listing_file, remembered
from stam.data.memory import recall, record_file, remember
from stam.data.scenes import read_ahead
from stam.data.shards import arrange
from stam.errors import StamError
from stam.evaluation import Evaluation, compare, load_evaluation, save_evaluation
from stam.evaluation.examples import Example, load_examples, save_examples
from stam.evaluation.results import Answers, Chance, Confusion, Mistake, PerClass, packed_right
from stam.learning.experiment import recipe_of, reopen
from stam.learning.loop import restore
from stam.learning.overview import overview
from stam.learning.recipes import get_recipe
from stam.learning.runs import RunFolder, read_metrics, recorded_resize_size
from stam.live.saving import load_session, save_session
from stam.model.vit import VisionTransformer
from stam.scene.grid import Grid
from stam.weights import find_agent, load_authors, load_deit, load_teacher_folder, save_agent, save_teacher
from stam.weights.hub import model_card
from stam.zoo import SYSTEMS, load_looker
from stam.zoo.saving import save_system
from stam.zoo.training import config_from, default_config, is_zoo_run, read_config

MOST_SECONDS = 10
MOST_MEMORY = 6 * 2**30  # a file that asks for more is a failure, not the end of the machine


@dataclass(frozen=True)
class Target:
    """A format, and what is done with a file of it.

    Attributes:
        path: Where the damaged file goes.
        damage: Returns a damaged file.
        use: Opens the file and does with it what commands do.
    """

    path: Path
    damage: Callable[[Random], bytes]
    use: Callable[[], Any]

    def try_one(self, seed_or_random: int | Random) -> str:
        """Opens one damaged file; returns `opened` or `refused`, and raises whatever else happens."""
        random = seed_or_random if isinstance(seed_or_random, Random) else Random(seed_or_random)
        content = self.damage(random)
        self.path.write_bytes(content)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.use()
        except StamError as error:
            assert "\n" not in str(error), f"an error of several lines: {error}"
            return "refused"
        return "opened"


def make_targets(folder: Path) -> dict[str, Target]:
    """Writes one sound file of each format, and returns how to damage and open it."""
    torch.manual_seed(0)
    agent = stam.Agent(tiny_config(labels=tuple("abcde")))
    randomise(agent)
    return {
        **_agent_targets(folder, agent.eval()),
        **_run_targets(folder, agent),
        **_zoo_targets(folder),
        **_result_targets(folder),
        **_weights_targets(folder),
        **_image_targets(folder),
        **_shard_targets(folder),
        **_list_targets(folder),
    }


def _json_target(path: Path, use: Callable[[], Any]) -> Target:
    sound = json.loads(path.read_text())
    return Target(path, lambda random: damage_json(sound, random).encode("utf-8", "surrogatepass"), use)


def _tensors_target(path: Path, use: Callable[[], Any]) -> Target:
    sound = path.read_bytes()
    return Target(path, lambda random: damage_safetensors(sound, random), use)


def _agent_targets(folder: Path, agent: stam.Agent) -> dict[str, Target]:
    for name in ("agent", "agent weights"):
        save_agent(agent, folder / name)
    settings: dict[str, Any] = {"width": 8, "depth": 1, "num_heads": 2, "distilled": False}
    vit = VisionTransformer(num_classes=2, patch_size=(4, 4), image_patches=(2, 3), **settings)
    record = {"labels": ["a", "b"], "image_size": [8, 12], "vit": settings | {"patch_size": [4, 4]}}
    save_teacher(vit, folder / "teacher", record)
    session = agent.session(first_location=3)
    for _ in range(3):
        session.observe(torch.randn(3, 8, 8))
    session.missed()
    save_session(session, folder / "session")

    def use_agent() -> None:
        stam.load(folder / "agent")
        model_card(folder / "agent", "me/agent")

    return {
        "config.json of an agent": _json_target(folder / "agent/config.json", use_agent),
        "config.json of a teacher": _json_target(
            folder / "teacher/config.json", lambda: load_teacher_folder(folder / "teacher")
        ),
        "model.safetensors": _tensors_target(
            folder / "agent weights/model.safetensors", lambda: stam.load(folder / "agent weights")
        ),
        "saved session": _tensors_target(
            folder / "session", lambda: load_session(folder / "session", agent).missed()
        ),
    }


def _run_targets(folder: Path, agent: stam.Agent) -> dict[str, Target]:
    run = RunFolder.create(folder / "run")
    run.write_record(
        "tiny", get_recipe("tiny"), SplitRecord(("a", "b"), 2, 1, "x", 0, ("a/1", "b/1"), ("a/2",))
    )
    save_agent(agent, run.path / "best")
    for epoch in range(3):
        run.log({"epoch": epoch, "loss/supervised": 1 / (epoch + 1), "val/accuracy@2": 0.5, "val/score": 0.5})
    split, state = folder / "split.json", folder / "state"
    save_record(SplitRecord(("a", "b"), 2, 1, "x", 0, ("a/1", "b/1"), ("a/2",)), split)
    RunFolder.create(state).save_state({"position": [1, 0], "best": 0.5, "agent": agent.state_dict()})
    sound = (state / "state.pt").read_bytes()
    whole = torch.load(state / "state.pt", weights_only=True)

    def use_run() -> None:
        recorded_resize_size(find_agent(run.path), None)
        recipe_of(reopen(run.path, "train"))
        run_lines(overview(run.path))
        read_settings(run.record_file, "train").over("tiny")
        run.config()

    remember("fuzz", 5, [1, 3])
    timed, settings = RunFolder.create(folder / "timed"), folder / "mine.toml"
    timed.write_record("tiny", get_recipe("tiny"), SplitRecord(("a", "b"), 2, 1, "x"))
    for epoch in range(3):
        timed.log({"epoch": epoch, "seconds": 2.0 * epoch}, "timing.jsonl")
    own_json, trackers = folder / "mine.json", folder / "tracked" / "trackers.json"
    own_json.write_text(json.dumps({"recipe": "tiny", "data": {"path": "x"}, "training": {"epochs": 3}}))
    trackers.parent.mkdir()
    _remember(trackers.parent, "wandb", "abc123")
    _remember(trackers.parent, "mlflow", "def456")
    settings.write_text('recipe = "tiny"\n[data]\npath = "x"\n[training]\nepochs = 3\nbase_lr = 1e-4\n')
    return {
        "timing.jsonl": Target(
            timed.path / "timing.jsonl",
            functools.partial(_damage_lines, (timed.path / "timing.jsonl").read_text()),
            lambda: overview(timed.path),
        ),
        "settings .toml": Target(
            settings,
            functools.partial(damage_bytes, settings.read_bytes()),
            lambda: read_settings(settings, "train").over("tiny"),
        ),
        "settings .json": _json_target(own_json, lambda: read_settings(own_json, "train").over("tiny")),
        "trackers.json": _json_target(trackers, lambda: _ids(trackers.parent)),
        "run.json": _json_target(run.record_file, use_run),
        "split.json": _json_target(split, lambda: load_record(split)),
        "metrics.jsonl": Target(
            run.metrics_file,
            functools.partial(_damage_lines, run.metrics_file.read_text()),
            lambda: read_metrics(run.metrics_file),
        ),
        "state.pt": Target(
            state / "state.pt", lambda random: damage_pth(sound, whole, random), RunFolder(state).load_state
        ),
        "state.pt of an agent": _state_target(folder / "trained"),
        "remembered image check": _json_target(record_file("fuzz"), lambda: recall("fuzz", 5)),
    }


def _state_target(folder: Path) -> Target:
    """The state of a training, read and put into a learner."""
    run, trained = RunFolder.create(folder), learner()
    whole = trained.state_dict() | {"position": [1, 0], "best": 0.5}
    run.save_state(whole)
    sound, saved = run.state_file.read_bytes(), torch.load(run.state_file, weights_only=True)
    return Target(
        run.state_file, lambda random: damage_pth(sound, saved, random), lambda: restore(trained, run)
    )


def _zoo_targets(folder: Path) -> dict[str, Target]:
    """A system of the zoo: its two files, and what its run records."""
    for name in ("system", "system weights"):
        save_system(small("ram"), folder / name)
    run = RunFolder.create(folder / "zoo run")
    run.write_record("ram", default_config("ram", "x"), SplitRecord(("a", "b"), 2, 1, "x"))
    digits = glyph_file(folder)
    sound = digits.read_bytes()

    def use_run() -> None:
        run_lines(overview(run.path))
        file = read_settings(run.record_file, "train")
        if is_zoo_run(run.path) and file.system in SYSTEMS:
            config_from(file.values)
            read_config(run)

    def use_digits() -> None:
        splits = open_clutter(digits)
        splits.train.load(0)
        splits.val.load(0)

    return {
        "config.json of the zoo": _json_target(
            folder / "system/config.json", lambda: load_looker(folder / "system")
        ),
        "model.safetensors of the zoo": _tensors_target(
            folder / "system weights/model.safetensors", lambda: load_looker(folder / "system weights")
        ),
        "run.json of the zoo": _json_target(run.record_file, use_run),
        "digits .npz": Target(digits, functools.partial(damage_bytes, sound), use_digits),
    }


def _damage_lines(text: str, random: Random) -> bytes:
    lines = text.splitlines()
    which = random.randrange(len(lines))
    lines[which] = damage_json(json.loads(lines[which]), random)
    content = "\n".join(lines).encode("utf-8", "surrogatepass")
    return content if random.random() < 0.8 else damage_bytes(content, random)


def _answered(evaluation: Evaluation) -> Evaluation:
    """Adds what was answered to each scene."""
    classes, count = len(evaluation.data.classes), evaluation.data.num_scenes
    confusion = Confusion((3 * count,) * classes, ((0, 0, 2), (0, 1, 1), (1, 1, 3)))
    right = np.ones((count, len(evaluation.seeds), evaluation.num_glimpses), dtype=bool)
    answers = Answers(
        confusion=confusion,
        early_exit=confusion,
        per_class=PerClass((1,) * classes, (0.5,) * classes, (0.2,) * classes, (0.8,) * classes),
        mistakes=(Mistake(0, "a/1.png", 0, 1, 0.75, (0, 1, 2, 3)),),
        chance=Chance(0.25, 0.01),
        right=packed_right(right),
    )
    return dataclasses.replace(evaluation, answers=answers)


def _result_targets(folder: Path) -> dict[str, Target]:
    result, examples = folder / "evaluation.json", folder / "examples.npz"
    evaluation = _answered(made_up(grid=Grid(32, 16, 8), num_scenes=4))
    save_evaluation(evaluation, result)
    grid, random = evaluation.grid, np.random.default_rng(0)
    one = Example(
        image=random.integers(0, 256, (32, 32, 3), dtype=np.uint8),
        label=1,
        grid=grid,
        classes=("a", "b"),
        locations=np.arange(4),
        predictions=np.zeros(4, dtype=np.int64),
        confidences=np.full(4, 0.5, dtype=np.float32),
        maps=np.zeros((4, 4), dtype=np.float32),
        boxes=np.tile(np.array([0, 0, 0.5, 0.5], dtype=np.float32), (4, 1, 1)),
        sizes=np.full((4, 1, 2), 16),
        pixels=256 * np.arange(1, 5),
    )
    save_examples([one, one], examples)
    sound = examples.read_bytes()

    def use_result() -> None:
        found = load_evaluation(result)
        found.chance_in_words()
        compared = compare([found])
        compared.to_markdown()
        compared.to_json()
        compare([evaluation, found]).to_markdown()

    return {
        "evaluation.json": _json_target(result, use_result),
        "examples.npz": Target(
            examples, lambda random: damage_bytes(sound, random), lambda: load_examples(examples)
        ),
    }


def _weights_targets(folder: Path) -> dict[str, Target]:
    deit, plain = deit_state(True), deit_state(False)
    named = to_hugging_face(deit, "deit.")
    authors = _authors_state(deit)
    targets = {}
    for name, state, legacy in (
        ("DeiT .pth", deit, False),
        ("DeiT .pth before torch 1.6", plain, True),
        ("DeiT of Hugging Face", named, False),
    ):
        path = folder / f"{name}.pth"
        sound = save_pth({"model": state}, legacy)
        targets[name] = Target(
            path,
            functools.partial(
                lambda sound, state, legacy, random: damage_pth(sound, state, random, legacy),
                sound,
                state,
                legacy,
            ),
            functools.partial(_use_deit, path),
        )
    path = folder / "authors.pth"
    targets["the authors' .pth"] = Target(
        path,
        lambda random: damage_pth(save_pth(authors), authors, random),
        lambda: load_authors(path, num_heads=1),
    )
    tensors = folder / "deit.safetensors"
    save_file(deit, tensors)
    targets["DeiT .safetensors"] = _tensors_target(tensors, functools.partial(_use_deit, tensors))
    return targets


def _use_deit(path: Path) -> None:
    load_deit(path, CLASSES, image_size=64, actor_width=8)


def _authors_state(deit: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A checkpoint in the authors' naming."""
    agent = stam.Agent(
        stam.AgentConfig(
            CLASSES,
            image_size=64,
            glimpse_size=32,
            patch_size=16,
            width=64,
            depth=2,
            num_heads=1,
            actor_width=8,
        )
    )
    state = dict(deit)
    for name, value in agent.actor.state_dict().items():
        if name == "location_embedding":
            state["loc_pos_embed"] = value[None]
        else:
            state[f"location_module.{name}"] = value
    return state


def _image_targets(folder: Path) -> dict[str, Target]:
    pixels = Image.effect_noise((40, 30), 90).convert("RGB")
    targets = {}
    for kind in ("png", "jpeg", "bmp", "gif", "tiff", "webp", "ppm"):
        buffer = io.BytesIO()
        pixels.save(buffer, kind)
        path, sound = folder / f"image.{kind}", buffer.getvalue()
        targets[f"image .{kind}"] = Target(
            path,
            functools.partial(lambda sound, random: damage_bytes(sound, random), sound),
            functools.partial(decode_image, path),
        )
    boxes = folder / "boxes.json"
    boxes.write_text(json.dumps({"bounding_boxes": [{"category": "airport", "box": [1, 2, 30, 40]}] * 2}))

    def use_boxes() -> None:
        with contextlib.suppress(_SkipError):
            for box in _read_boxes(boxes):
                with contextlib.suppress(_SkipError):
                    _read_box(box)

    return targets | {"boxes of fMoW": _json_target(boxes, use_boxes)}


def _list_targets(folder: Path) -> dict[str, Target]:
    listed = folder / "list.csv"
    rows = [f"image{index}.png,{'ab'[index % 2]},{'val' if index > 3 else 'train'}" for index in range(6)]
    for index in range(6):
        Image.new("RGB", (4, 4)).save(folder / f"image{index}.png")
    sound = "\n".join(["path,label,split", *rows]).encode()
    answers = folder / "answers.csv"
    written = [",".join(COLUMNS), *(f"image{index}.png,a,0.9,3,,False,a," for index in range(6))]

    def use_answers() -> None:
        with open_rows(answers, resume=True):
            pass

    return {
        "answers of stam predict .csv": Target(
            answers, functools.partial(damage_bytes, "\r\n".join([*written, ""]).encode()), use_answers
        ),
        "list of images .csv": Target(
            listed, functools.partial(damage_bytes, sound), lambda: open_scenes(str(listed))
        ),
    }


def _shard_targets(folder: Path) -> dict[str, Target]:
    make_image_folder(folder / "images", classes=2, train=3, val=1, size=8)
    names = ("shards.json", "train.npy", "train-000000.tar")
    for name in names:
        prepare_shards(open_scenes(folder / "images"), folder / f"shards for {name}")
    index, table, tar = (folder / f"shards for {name}" / name for name in names)
    rows, whole, alone = table.read_bytes(), tar.read_bytes(), folder / "train.tar"

    def use(root: Path) -> None:
        train = open_scenes(root).train
        check_images(train, progress=False)
        train.fingerprint()
        read_ahead(train, np.arange(len(train)))
        for number in range(min(len(train), 10)):
            train.load(number)

    def use_tar() -> None:
        check_images(open_scenes(alone, val_fraction=0.3).train, progress=False)

    # a tar behind a URL: its listing is remembered, and optional as all that is remembered
    with tar.open("rb") as file:
        remembered("fuzz", shard := PurePosixPath("train.tar"), lambda: list_tar(file, shard))

    def use_listing() -> None:
        members = remembered("fuzz", shard, list)
        if members:
            arrange(members, PurePosixPath(), "train.tar")

    listed = json.loads(listing_file("fuzz").read_text())

    def damage_listing(random: Random) -> bytes:
        """Damages a listing; half of the time its digest is right, so that its rows are looked at."""
        content = damage_json(listed, random)
        with contextlib.suppress(ValueError, RecursionError):
            found = json.loads(content)
            if isinstance(found, dict) and "members" in found and random.random() < 0.5:
                content = json.dumps(found | {"digest": _digest(found["members"])})
        return content.encode("utf-8", "surrogatepass")

    return {
        "remembered tar listing": Target(listing_file("fuzz"), damage_listing, use_listing),
        "shards.json": _json_target(index, lambda: use(index.parent)),
        "train.npy of shards": Target(
            table, lambda random: damage_bytes(rows, random), lambda: use(table.parent)
        ),
        "shard .tar": Target(tar, lambda random: damage_bytes(whole, random), lambda: use(tar.parent)),
        "tar without an index": Target(alone, lambda random: damage_bytes(whole, random), use_tar),
    }


class TooSlowError(BaseException):
    """Something takes too long; no reader takes it for an error of a file, as it does a `TimeoutError`."""


def _too_slow(*_: object) -> None:
    raise TooSlowError(f"more than {MOST_SECONDS} s")


def _work(name: str, seeds: range, progress: Any, outcomes: Any) -> None:
    """Tries one format in a process of its own."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, _too_slow)
    with tempfile.TemporaryDirectory() as place:
        os.environ["XDG_CACHE_HOME"] = place
        target = make_targets(Path(place))[name]
        resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
        counts: Counter[str] = Counter()
        failures = []
        for seed in seeds:
            progress.value = seed
            signal.alarm(MOST_SECONDS)
            try:
                counts[target.try_one(seed)] += 1
            except BaseException as error:
                kind = "too slow" if isinstance(error, TooSlowError) else "traceback"
                counts[kind] += 1
                failures.append(f"{name}, seed {seed}: {kind}\n{traceback.format_exc(limit=-3)}")
            finally:
                signal.alarm(0)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    outcomes.put((counts, failures[:20], peak))


_COLUMNS = ("opened", "refused", "traceback", "crash", "too slow")


def _try_format(name: str, seeds: range) -> tuple[Counter[str], list[str], float]:
    """Tries one format in a process of its own; returns the outcomes, some failures, and the memory taken."""
    context = multiprocessing.get_context("spawn")
    progress, outcomes = context.Value("q", -1), context.Queue()
    worker = context.Process(target=_work, args=(name, seeds, progress, outcomes))
    worker.start()
    while worker.is_alive() and outcomes.empty():
        time.sleep(0.05)
    if outcomes.empty():
        return Counter(crash=1), [f"{name}: crashed at seed {progress.value}"], 0.0
    found = outcomes.get()
    worker.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--inputs", type=int, default=2_000, help="damaged files in all (default: 2000)")
    parser.add_argument("--only", default="", help="formats whose name holds this")
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default: 0)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        os.environ["XDG_CACHE_HOME"] = place
        names = [name for name in make_targets(Path(place)) if arguments.only in name]
    each = -(-arguments.inputs // len(names))
    total: Counter[str] = Counter()
    most = 0.0
    print(f"{'format':28s}" + "".join(f"{column:>10s}" for column in (*_COLUMNS, "MB", "s")))
    for name in names:
        began = time.monotonic()
        counts, failures, peak = _try_format(name, range(arguments.seed, arguments.seed + each))
        numbers = (*(counts[column] for column in _COLUMNS), round(peak), round(time.monotonic() - began))
        print(f"{name:28s}" + "".join(f"{number:10d}" for number in numbers), flush=True)
        for failure in failures[:5]:
            print(failure, file=sys.stderr, flush=True)
        total += counts
        most = max(most, peak)
    print(f"{total.total()} inputs: {dict(total)}; at most {most:.0f} MB")
    sys.exit(bool(total["traceback"] or total["crash"] or total["too slow"]))


if __name__ == "__main__":
    main()
