"""Every documented command is run, at toy size, in the order it is documented."""

import argparse
import functools
import importlib.util
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from images import make_image_folder
from PIL import Image
from safetensors.torch import save_file

from stam import cli
from stam.data import digits
from stam.evaluation.cost import measure_cost
from stam.model.vit import VisionTransformer

ROOT = Path(__file__).parent.parent
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("src/stam/assets/*/README.md")]
TOY_AGENT = "--image-size 32 --glimpse-size 16 --width 64 --depth 1 --num-heads 1".split()
TOY_OPTIONS = {  # given to documented commands instead of their own values; --minutes is left out
    "train tiny": [
        "--no-fit",
        *TOY_AGENT,
        *"--actor-width 8 --critic-width 8 --num-glimpses 2 --epochs 1 --batch-size 4".split(),
        *"--num-workers 0 --teacher-training.epochs 1 --teacher-training.batch-size 4".split(),
        *"--teacher-training.warmup-epochs 0".split(),
    ],
    "train path": [  # from the shipped core, whose size stays
        *"--no-fit --num-glimpses 2 --epochs 1 --tau-epochs 1 --batch-size 4 --num-workers 0".split(),
        *"--teacher-training.epochs 1 --teacher-training.batch-size 4".split(),
        *"--teacher-training.warmup-epochs 0".split(),
    ],
    "train gfnet": [
        *"--image-size 32 --glimpse-size 16 --num-glimpses 2 --backbone conv --epochs 1".split(),
        *"--batch-size 4 --num-workers 0".split(),
    ],
    "train patchdrop": [
        *"--image-size 32 --low-size 8 --backbone conv --epochs 1 --batch-size 4 --num-workers 0".split(),
    ],
    "evaluate runs/gfnet": "--seeds 2".split(),
    "bench": "--device cpu --sizes tiny --batch-sizes 1 --num-glimpses 1 --batches 1".split(),
    "train digits": "--epochs 1 --tau-epochs 1 --num-glimpses 2 --batch-size 8 --validation-images 8".split(),
    "teacher tiny": [
        *(word.replace("--", "--agent.") for word in TOY_AGENT),
        *"--epochs 1 --batch-size 4 --warmup-epochs 0 --num-workers 0".split(),
    ],
    "evaluate": "--seeds 2 --glimpses 3".split(),
    "figures": "--kinds png".split(),
    "export": "--episodes 2".split(),
    "predict": "--max-glimpses 2".split(),
    "serve": "--port 0".split(),  # somebody may listen on the usual one
    "train --resume --out runs/digits --epochs": "--epochs 2".split(),
}


def blocks(file: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / file).read_text(), re.MULTILINE | re.DOTALL)


def documented_commands(file: str) -> list[str]:
    lines = "".join(blocks(file, "sh")).splitlines()
    return [line.split("  #")[0].strip() for line in lines if line.startswith(("stam ", "torchrun "))]


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A folder with everything the documents name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(digits, "_LENGTHS", {"train": 256, "test": 64})
    evaluating = sys.modules["stam.evaluation.evaluate"]
    few = functools.partial(measure_cost, batch_sizes=(1, 2), seconds=0)
    monkeypatch.setattr(evaluating, "measure_cost", few)
    make_image_folder(tmp_path / "path/to/images", train=4, val=2)
    Image.new("RGB", (60, 50), (90, 120, 60)).save("photo.jpg")
    vit = VisionTransformer(
        num_classes=1000,
        patch_size=(16, 16),
        image_patches=(14, 14),
        width=64,
        depth=1,
        num_heads=1,
        distilled=False,
    )
    save_file({name: value.clone() for name, value in vit.state_dict().items()}, "deit_tiny.safetensors")
    for name in ("airport", "zoo"):
        folder = tmp_path / "path/to/fmow/train" / name / f"{name}_0"
        folder.mkdir(parents=True)
        Image.new("RGB", (60, 50), (90, 120, 60)).save(folder / f"{name}_0_0_rgb.jpg")
        boxes = {"bounding_boxes": [{"box": [5, 5, 30, 20], "category": name}]}
        (folder / f"{name}_0_0_rgb.json").write_text(json.dumps(boxes))
    return tmp_path


def toy_options(words: list[str]) -> list[str]:
    for prefix, options in TOY_OPTIONS.items():
        if " ".join(words).startswith(prefix):
            return options
    return []


def at_toy_size(words: list[str]) -> list[str]:
    """Returns a documented command with its toy options, which may not be given twice."""
    toy = toy_options(words)
    kept: list[str] = []
    is_replaced = False
    for word in words:
        is_replaced = word in toy if word.startswith("--") else is_replaced
        kept += [] if is_replaced else [word]
    return [*kept, *toy]


@pytest.mark.parametrize(
    "file",
    [
        "README.md",
        *(
            f"docs/{name}.md"
            for name in "tutorial own-images export training performance zoo command-line".split()
        ),
    ],
)
def test_documented_commands_work(file, workplace, monkeypatch, request):
    import uvicorn

    from stam.cli import push

    served, pushed = [], []
    monkeypatch.setattr(push, "push", lambda *given: pushed.append(given) or "there")  # see test_hub.py
    monkeypatch.setattr(uvicorn, "run", lambda *args, **kwargs: served.append(args))
    monkeypatch.setattr(uvicorn.Server, "run", lambda *args, **kwargs: served.append(args))
    commands = documented_commands(file)
    assert len(commands) >= 3
    if all(command.startswith("stam bench") for command in commands):
        request.getfixturevalue("shallow")  # elsewhere weights that ship are loaded
    for command in commands:
        words = shlex.split(re.sub(r" --minutes \d+", "", command))[1:]  # see test_choosing.py
        if command.startswith("torchrun "):
            run_together(words)
            continue
        if words[0] == "train" and "--resume" in words:
            (workplace / words[words.index("--out") + 1] / "state.pt").unlink(missing_ok=True)
        cli.main(at_toy_size(words))
    assert not any("stam serve" in command for command in commands) or served
    assert not any("stam push" in command for command in commands) or pushed


def run_together(words: list[str]) -> None:
    """Runs what `torchrun` is told to; the program itself may not be on the path."""
    of_stam = words[words.index("stam") + 1 :]
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *rendezvous, *words, *toy_options(of_stam)],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        check=True,
        timeout=120,
    )


def documented_scripts() -> list[str]:
    """Every call of a script in the documents and model cards, in the text or set apart."""
    found = []
    for file in DOCUMENTS:
        text = file.read_text()
        inline = re.findall(r"`(python (?!docs)\w+/[^`]+)`", text)
        apart = re.findall(r"^(?: {4}|\$ )?(python \w+/(?:[^\n]*\\\n)*[^\n]*)", text, re.MULTILINE)
        found += [" ".join(call.replace("\\\n", " ").split()) for call in inline + apart]
    return sorted({call.replace("SIZE", "tiny").replace("THREADS", "1") for call in found})


@pytest.mark.parametrize("call", documented_scripts())
def test_documented_scripts_take_their_arguments(call, monkeypatch):
    """What they then do is tested at toy size, in test_experiments.py and elsewhere."""

    class Parsed(BaseException):
        pass

    def stop(parser: argparse.ArgumentParser, *args: object, **kwargs: object) -> None:
        raise Parsed(parse(parser, *args, **kwargs))

    _, script, *arguments = shlex.split(call)
    parse = argparse.ArgumentParser.parse_args
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    monkeypatch.syspath_prepend(ROOT / Path(script).parent)
    with pytest.raises(Parsed) as parsed:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    given = vars(parsed.value.args[0])
    if Path(script).name == "real_images.py":
        configure = importlib.import_module("real_images").configure
        changes = json.loads(given["set"])
        for agent in given["agents"]:
            end = "" if agent == "learned" else f"-{agent}"
            assert configure(f"{given['dataset']}{end}", ("a", "b"), changes, workers=0)


@pytest.mark.parametrize("file", sorted(path.relative_to(ROOT).as_posix() for path in DOCUMENTS))
def test_tables_and_links_are_whole(file):
    """A row without a table above it, or with a cell too many, is shown as it is written."""
    lines = re.sub(r"^```.*?^```", "", (ROOT / file).read_text(), flags=re.MULTILINE | re.DOTALL).splitlines()
    cells = [len(re.findall(r"(?<!\\)\|", line)) if line.lstrip().startswith("|") else 0 for line in lines]
    for above, here, line, below in zip([0, *cells], cells, lines, [*lines[1:], ""], strict=False):
        begins = not above and re.fullmatch(r" *\|[-:| ]+\|", below)
        assert not here or here == above or begins, line
    for target in re.findall(r"\]\(([^)#\s]+)", "\n".join(lines)):
        assert target.startswith("https://") or (ROOT / file).parent.joinpath(target).exists(), target


def test_the_readmes_python_runs_and_says_what_it_is_said_to(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for block in blocks("README.md", "python"):
        exec(compile(block, "README.md", "exec"), {})
    first, path, last = capsys.readouterr().out.splitlines()
    label, confidence, count = first.split()
    stated = re.search(r"found.glimpses\) +# (\w+) ([\d.]+) (\d+)", (ROOT / "README.md").read_text())
    assert (label, f"{float(confidence):.2f}", count) == stated.groups()
    assert path.startswith("[(3, 3), (4, 3), ") and last.split()[0] == label
    with Image.open(tmp_path / "looking.png") as picture:
        assert picture.width > 168


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130


@pytest.mark.parametrize("page", ["tutorial", "live", "slides", "export", "zoo"])
def test_the_pages_python_runs(page, workplace):
    """The blocks of a page are one program."""
    names, found = {}, blocks(f"docs/{page}.md", "python")
    assert found
    for block in found:
        exec(compile(block, f"docs/{page}.md", "exec"), names)


def test_stam_demo(workplace, capsys):
    cli.main(["demo", "--epochs", "1", "--num-scenes", "4", "--out", "demo"])
    shown = capsys.readouterr()
    assert "spiral" in shown.out and "looking.png" in shown.out
    assert "next: stam serve demo" in shown.err
    table = [line.split() for line in shown.out.splitlines() if re.match(r"^ +\d+ ", line)]
    assert [int(row[0]) for row in table] == list(range(1, 15)) and all(len(row) == 5 for row in table)
    picture = np.asarray(Image.open("demo/looking.png"))
    assert picture.std() > 10


def test_every_command_has_help_and_a_module(capsys):
    for name in cli.COMMANDS:
        with pytest.raises(SystemExit) as stopped:
            cli.main([name, "--help"])
        assert stopped.value.code == 0, name
        assert "usage: stam" in capsys.readouterr().out


def test_the_settings_page_is_current():
    spec = importlib.util.spec_from_file_location("make_settings", ROOT / "docs/make_settings.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.page() == (ROOT / "docs/settings.md").read_text(), "run python docs/make_settings.py"


def test_every_promise_names_tests_that_exist():
    """What docs/reliability.md names: tests, files, and benchmarks."""
    text = (ROOT / "docs/reliability.md").read_text()
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = set(re.findall(r"\btest_\w+(?![\w.])", text))
    assert len(named) > 50
    assert [name for name in sorted(named) if f"def {name}(" not in tests] == []
    paths = re.findall(r"\b(?:tests|benchmarks|src)/[\w/]+\.py", text)
    assert [path for path in paths if not (ROOT / path).is_file()] == []
