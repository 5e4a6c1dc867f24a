import csv
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from http.client import IncompleteRead
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from agents import randomise, tiny_config
from images import make_image_folder
from PIL import Image
from serving import RunningServer

import stam
from stam.cli import main

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def agent_folder(tmp_path_factory):
    agent = stam.Agent(tiny_config(labels=("ant", "bee", "cat", "dog", "eel")))
    randomise(agent)
    folder = tmp_path_factory.mktemp("agents") / "agent"
    stam.weights.save_agent(agent.eval(), folder)
    return folder


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    random = np.random.default_rng(0)
    (folder / "deep" / "er").mkdir(parents=True)
    for name, size in (("a.png", (24, 32)), ("b.jpg", (100, 80)), ("deep/er/c.png", (48, 300))):
        Image.fromarray(random.integers(0, 256, (*size, 3), dtype=np.uint8)).save(folder / name)
    return folder


def predict(capsys, *arguments):
    main(["predict", *map(str, arguments)])
    return capsys.readouterr()


def test_files_and_folders(agent_folder, pictures, capsys):
    said = predict(capsys, agent_folder, pictures / "a.png", pictures)
    lines = said.out.splitlines()
    assert lines[0].split() == ["image", "label", "confidence", "glimpses", "seen"] and len(lines) == 5
    names = [line.split()[0] for line in lines[1:]]
    assert [Path(name).name for name in names] == ["a.png", "a.png", "b.jpg", "c.png"]
    assert lines[1].split()[1] in ("ant", "bee", "cat", "dog", "eel") and lines[1].split()[2].endswith("%")
    assert "next: stam serve" in said.err
    few = predict(capsys, agent_folder, pictures / "a.png", "--threshold", "1", "--max-glimpses", "2")
    assert few.out.splitlines()[1].split()[-1] == "unsure"
    sure = predict(capsys, agent_folder, pictures / "a.png", "--threshold", "0")
    assert "unsure" not in sure.out


def test_json_is_what_a_session_says(agent_folder, pictures, capsys):
    said = predict(capsys, agent_folder, pictures, "--json", "--threshold", "0.7")
    found = json.loads(said.out)
    agent = stam.load(agent_folder)
    assert len(found) == 3
    for entry in found:
        assert entry["seen"] == pytest.approx(entry["num_glimpses"] / 12) and entry["error"] is None
        assert entry["stopped_early"] == (entry["confidence"] > 0.7 and entry["num_glimpses"] < 12)
        assert len(entry["locations"]) == entry["num_glimpses"]
        assert entry["probabilities"][entry["label"]] == pytest.approx(entry["confidence"])
    sensor = stam.scene.sensor.ImageSensor(Image.open(pictures / "a.png"), agent.grid)
    first = agent.grid.index(tuple(found[0]["locations"][0]))
    step = agent.session(first_location=first, threshold=0.7).run(sensor)
    assert step.label == found[0]["label"]
    assert step.confidence == pytest.approx(found[0]["confidence"], abs=1e-5)
    again = json.loads(predict(capsys, agent_folder, pictures, "--json", "--threshold", "0.7").out)
    assert [entry["locations"] for entry in again] == [entry["locations"] for entry in found]


def test_glimpses_and_policy_can_be_set(agent_folder, pictures, capsys):
    options = ("--json", "--threshold", "1", "--max-glimpses", "4", "--policy", "spiral")
    found = json.loads(predict(capsys, agent_folder, pictures / "a.png", *options).out)[0]
    assert found["num_glimpses"] == 4 and not found["stopped_early"]
    assert [1, 2] in found["locations"][:2]  # the centre, where the spiral begins


def test_the_same_image_gets_the_same_answer(agent_folder, pictures, capsys):
    copies = (pictures / "a.png", pictures / "b.jpg", pictures / "a.png", pictures / "a.png")
    for options in ((), ("--seed", "4"), ("--policy", "random"), ("--first-location", "2,0")):
        found = json.loads(predict(capsys, agent_folder, *copies, "--json", *options).out)
        for other in (found[2], found[3]):  # on some processors the rows of a batch are rounded differently
            assert other.pop("probabilities") == pytest.approx(found[0]["probabilities"], abs=1e-6)
            assert other.pop("confidence") == pytest.approx(found[0]["confidence"], abs=1e-6)
            assert other == {name: found[0][name] for name in other}
    assert found[0]["locations"][0] == found[1]["locations"][0] == [2, 0]
    fixed = json.loads(predict(capsys, agent_folder, pictures / "a.png", "--json").out)[0]
    assert fixed["locations"][0] == [1, 2]  # the centre of 3x4
    own = stam.load(agent_folder).predict(pictures / "a.png")
    assert [list(place) for place in own.path] == fixed["locations"] and own.label == fixed["label"]
    firsts = {
        tuple(
            json.loads(predict(capsys, agent_folder, copies[0], "--json", "--seed", seed).out)[0][
                "locations"
            ][0]
        )
        for seed in range(8)
    }
    assert len(firsts) > 2


def test_the_agent_need_not_come_first(agent_folder, pictures, capsys):
    first, second = pictures / "a.png", pictures / "b.jpg"
    right = predict(capsys, agent_folder, first, second, "--json")
    for words in ((first, agent_folder, second), (first, second, agent_folder)):
        assert predict(capsys, *words, "--json") == right


def test_pictures_are_drawn(agent_folder, pictures, tmp_path, capsys):
    strip, gif = tmp_path / "strip.png", tmp_path / "look.gif"
    said = predict(capsys, agent_folder, pictures, "--threshold", "1", "--strip", strip, "--gif", gif)
    assert f"wrote {strip}" in said.err and f"wrote {gif}" in said.err
    with Image.open(strip) as image:
        assert image.width > 8 * 168 and image.height > 3 * 126
    with Image.open(gif) as image:
        assert image.n_frames >= 3 * 12 and image.info["loop"] == 0


def read_rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def classes(pictures, tmp_path):
    """A folder of class folders: two pictures of a known class, and one whose class is not known."""
    for name, folder in (("a.png", "ant"), ("b.jpg", "bee/more"), ("a.png", "others")):
        (tmp_path / "classes" / folder).mkdir(parents=True)
        shutil.copy(pictures / name, tmp_path / "classes" / folder / name)
    return tmp_path / "classes"


def test_rows_are_written_and_counted(agent_folder, classes, tmp_path, capsys):
    out = tmp_path / "out.csv"
    said = predict(capsys, agent_folder, classes, "--csv", out)
    rows = read_rows(out)
    assert [row["truth"] for row in rows] == ["ant", "bee", ""]
    right = sum(row["label"] == row["truth"] for row in rows)
    assert f"3 rows are in {out}" in said.out
    assert f"accuracy {right / 2:.1%} on 2 of 3 images whose class is known" in said.out
    answers = json.loads(predict(capsys, agent_folder, classes, "--json").out)
    for row, answer in zip(rows, answers, strict=True):
        assert row["image"] == answer["image"] and row["label"] == answer["label"]
        assert float(row["confidence"]) == answer["confidence"]
        assert int(row["num_glimpses"]) == answer["num_glimpses"]
    # a class folder itself may be named, and a list of images with labels
    said = predict(capsys, agent_folder, classes / "ant")
    assert re.search(r"^accuracy \d+.0% on 1 images whose class is known$", said.out, re.MULTILINE)
    (tmp_path / "list.csv").write_text("path,label\nclasses/ant/a.png,dog\nclasses/bee/more/b.jpg,\n")
    said = predict(capsys, agent_folder, tmp_path / "list.csv", "--json")
    assert "on 1 of 2 images" in said.err and len(json.loads(said.out)) == 2


def test_rows_are_there_though_it_is_interrupted_and_it_goes_on(
    agent_folder, classes, tmp_path, capsys, monkeypatch
):
    from stam.cli import predict as command

    out, look_at = tmp_path / "out.csv", command.look_at
    (classes / "ant/broken.png").write_bytes(b"no image")

    def interrupted(*given):
        if out.read_text().count("\n") > 2:  # rows are in the file before the next images are looked at
            raise KeyboardInterrupt
        return look_at(*given)

    monkeypatch.setattr(command, "_BATCH", 2)
    monkeypatch.setattr(command, "look_at", interrupted)
    with pytest.raises(SystemExit) as stopped:
        predict(capsys, agent_folder, classes, "--csv", out)
    assert stopped.value.code == 130 and "--resume goes on" in capsys.readouterr().err
    assert len(read_rows(out)) == 2
    monkeypatch.undo()
    with pytest.raises(SystemExit) as stopped:
        predict(capsys, agent_folder, classes, "--csv", out)
    assert stopped.value.code == 2 and "exists: pass --resume" in capsys.readouterr().err
    whole = out.read_bytes()
    out.write_bytes(whole + b"half a ro")
    with pytest.raises(SystemExit) as ended:
        predict(capsys, agent_folder, classes, "--csv", out, "--resume")
    said = capsys.readouterr()
    assert (
        ended.value.code == 2 and "1 of 4 images could not be read" in said.err
    )  # before it was interrupted
    assert "2 images are done, 2 are left" in said.err and f"4 rows are in {out}" in said.out
    assert "on 2 of 4 images whose class is known" in said.out
    rows = read_rows(out)
    assert [Path(row["image"]).name for row in rows] == ["a.png", "broken.png", "b.jpg", "a.png"]
    assert out.read_bytes().startswith(whole) and "cannot read" in rows[1]["error"]
    with pytest.raises(SystemExit):
        predict(capsys, agent_folder, classes, "--csv", out.with_name("other.csv"))
    assert "1 of 4 images could not be read: see" in capsys.readouterr().err


def test_rows_of_another_agent_are_not_gone_on_with(agent_folder, pictures, tmp_path, capsys):
    out, picture = tmp_path / "out.csv", pictures / "a.png"
    out.touch()  # as a program leaves it that made the file and was stopped
    predict(capsys, agent_folder, picture, "--csv", out)
    (row,) = read_rows(out)
    out.write_text(out.read_text().replace(f",{row['label']},", ",wolf,"))
    with pytest.raises(SystemExit) as stopped:
        predict(capsys, agent_folder, pictures, "--csv", out, "--resume")
    assert stopped.value.code == 2
    assert "has answers of another agent, such as 'wolf'" in capsys.readouterr().err
    assert len(read_rows(out)) == 1


def test_a_shell_may_leave_the_home_folder_to_us(agent_folder, pictures, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    predict(capsys, agent_folder, pictures / "a.png", "--csv=~/out.csv", "--strip=~/strip.png")
    assert read_rows(tmp_path / "out.csv") and (tmp_path / "strip.png").is_file()
    stam.weights.save_agent(stam.load(agent_folder), "~/agent")
    assert (tmp_path / "agent/config.json").is_file()


def test_a_threshold_is_a_share(agent_folder, pictures, capsys):
    with pytest.raises(SystemExit) as stopped:
        predict(capsys, agent_folder, pictures / "a.png", "--threshold", "90")
    assert stopped.value.code == 2
    assert "threshold must be in [0, 1], got 90" in capsys.readouterr().err


def test_an_unreadable_image_does_not_stop_the_others(agent_folder, pictures, tmp_path, capsys):
    (tmp_path / "broken.png").write_bytes(b"no image")
    with pytest.raises(SystemExit) as ended:
        predict(capsys, agent_folder, tmp_path / "broken.png", pictures / "a.png", "--json")
    said = capsys.readouterr()
    assert ended.value.code == 2 and "1 of 2 images could not be read" in said.err
    found = json.loads(said.out)
    assert "cannot read" in found[0]["error"] and found[0]["label"] is None and found[1]["label"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-agent", "{pictures}"], "no agent at 'no-agent'"),
        (["{agent}"], "name at least one image"),
        (["{agent}", "{pictures}", "--resume"], "--resume goes on with a file: name it with --csv"),
        (["{agent}", "{pictures}", "--csv", "no/where.csv"], "--csv 'no/where.csv': its folder does not"),
        (
            ["{agent}", "{pictures}", "--csv", "{pictures}/a.png", "--resume"],
            "was not written by stam predict",
        ),
        (["{agent}", "none.png"], "no image or folder at 'none.png'"),
        (
            ["{agent}", "{pictures}", "--strip", "no/where.png"],
            "--strip 'no/where.png': its folder does not exist",
        ),
        (["{agent}", "{pictures}", "--threshold", "7"], "threshold must be in"),
        (["{agent}", "{pictures}", "--policy", "spirl"], "did you mean 'spiral'"),
        (["{agent}", "{pictures}", "--max-glimpses", "0"], "max_glimpses must be at least 1, got 0"),
        (["{agent}", "{pictures}", "--seed", str(10**30)], "seed must be from 0 to 2**63 - 1"),
        (
            ["{agent}", "{pictures}", "--first-location", "here"],
            "--first-location must be ROW,COL, such as 3,3",
        ),
        (["{agent}", "{pictures}", "--first-location", "3,0"], "not on the grid"),
        (["{agent}", "{pictures}", "--strip", "{pictures}/x.what"], "could not write"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(agent_folder, pictures, capsys, arguments, message):
    filled = [part.format(agent=agent_folder, pictures=pictures) for part in arguments]
    (pictures / "none.png").unlink(missing_ok=True)
    with pytest.raises(SystemExit) as ended:
        predict(capsys, *filled)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def test_a_runs_own_resize_is_used(agent_folder, tmp_path):
    from stam.cli.agents import open_agent

    assert open_agent(agent_folder)[1] is None and open_agent(agent_folder, 30)[1] == 30
    assert open_agent(Path("digits"))[1] is None
    run = tmp_path / "run"
    stam.weights.save_agent(stam.load(agent_folder), run / "best")
    (run / "run.json").write_text(json.dumps({"config": {"data": {"resize_size": 27}}}))
    assert open_agent(run)[1] == 27 and open_agent(run / "best")[1] == 27


def test_file_names_that_are_not_text_are_shown(agent_folder, pictures, tmp_path):
    odd = tmp_path / os.fsdecode(b"caf\xe9.png")
    shutil.copy(pictures / "a.png", odd)
    environment = os.environ | {
        "PYTHONPATH": str(Path(stam.__file__).parent.parent),
        "PYTHONIOENCODING": "utf-8",
    }
    for option in ("--no-fast", "--json"):
        command = [sys.executable, "-m", "stam", "predict", agent_folder, odd, option]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 0 and r"caf\udce9.png" in done.stdout, done.stderr


def test_preprocessing_belongs_to_the_weights(pictures, tmp_path, capsys):
    from stam.cli.agents import open_agent
    from stam.evaluation.opening import open_run

    agent = stam.Agent(tiny_config(labels=("deep", "bee", "cat", "dog", "eel"), preprocess_size=40))
    randomise(agent)
    copied = tmp_path / "copied"
    stam.weights.save_agent(agent.eval(), copied)
    assert json.loads((copied / "config.json").read_text())["agent"]["preprocess_size"] == 40
    assert open_agent(copied)[1] == 40 and open_agent(copied, 30)[1] == 30
    assert open_run(copied, data=str(pictures)).resize_size == 40
    own, asked, other = (
        predict(capsys, copied, pictures, "--json", "--max-glimpses", "3", *options).out
        for options in ((), ("--resize-size", "40"), ("--resize-size", "60"))
    )
    assert own == asked and own != other


def test_serve_opens_a_page(agent_folder, pictures, monkeypatch, capsys):
    uvicorn = pytest.importorskip("uvicorn")
    servers = []
    run = uvicorn.Server.run

    def remembered(server, sockets=None):
        servers.append(server)
        run(server, sockets)

    monkeypatch.setattr(uvicorn.Server, "run", remembered)
    command = ["serve", str(agent_folder), "--port", "0", "--images", str(pictures), "--threshold", "0.55"]
    thread = threading.Thread(target=main, args=(command,))
    thread.start()
    while not (servers and servers[0].started):
        time.sleep(0.02)
    url = re.search(r"http://[\d.:]+", capsys.readouterr().out)[0]
    try:
        assert httpx.get(f"{url}/api/agent").json()["threshold"] == 0.55
        names = [scene["name"] for scene in httpx.get(f"{url}/api/scenes").json()]
        assert names == ["a.png", "b.jpg", "deep/er/c.png"]
        assert "STAM" in httpx.get(url).text
    finally:
        servers[0].should_exit = True
        thread.join()


def test_serve_offers_the_images_a_run_held_out(tmp_path, monkeypatch, capsys):
    images = make_image_folder(tmp_path / "images")
    run = tmp_path / "run"
    settings = "--no-fit --init none --device cpu --policy random --image-size 32 --glimpse-size 16".split()
    settings += "--patch-size 8 --width 16 --depth 1 --num-heads 2 --epochs 1 --num-glimpses 2".split()
    settings += "--teacher-training.epochs 1 --teacher-training.base-lr 1e-3".split()
    main(["train", "tiny", str(images), "--out", str(run), *settings])
    served = []

    def serve(service, host, port, ready):
        served.append([(scene.name, scene.label, scene.load().shape) for scene in service.scenes])

    monkeypatch.setattr("stam.web.serve", serve)
    main(["serve", str(run)])
    main(["serve", str(run), "--images", str(images / "train" / "class1")])
    images.rename(tmp_path / "moved")
    capsys.readouterr()
    main(["serve", str(run)])
    own, asked, gone = served
    assert len(own) == 9 and all(name.startswith("val/") and shape == (32, 32, 3) for name, _, shape in own)
    assert [label for _, label, _ in own[:3]] != [own[0][1]] * 3  # another class each time
    assert len({label for _, label, _ in own[:3]}) == 3
    assert [name for name, _, _ in asked] == [f"{index}.png" for index in range(6)]
    assert "cat" in " ".join(name for name, _, _ in gone)  # photographs that ship
    assert "cannot offer the images of this run" in capsys.readouterr().err


def run_example(monkeypatch, capsys, name, *arguments):
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    return capsys.readouterr().out


def test_the_example_of_a_slow_sensor_shows_time_saved(tmp_path, monkeypatch, capsys):
    agent = stam.Agent(tiny_config(num_classes=10, image_size=56, labels=tuple("0123456789")))
    randomise(agent)
    stam.weights.save_agent(agent.eval(), tmp_path / "digits")
    given = ("--latency", "0.01", "--scenes", "2")
    said = run_example(monkeypatch, capsys, "slow_remote_sensor.py", tmp_path / "digits", *given)
    assert "saved" in said and said.count("glimpses, ") == 2


def test_the_example_of_an_http_client_survives_lost_answers(agent_folder, monkeypatch, capsys):
    from stam.web import Service

    posts = []

    def lossy(request, timeout):
        answer = open_url(request, timeout=timeout)
        if "/glimpses" in request.full_url:
            posts.append(request.full_url)
            if len(posts) % 3:
                answer.close()
                raise (TimeoutError("lost on its way"), IncompleteRead(b'{"la'))[len(posts) % 2]
        return answer

    open_url = urllib.request.urlopen
    monkeypatch.setattr(urllib.request, "urlopen", lossy)
    with RunningServer(Service(stam.load(agent_folder))) as url:
        said = run_example(monkeypatch, capsys, "http_client.py", url)
    looks = re.findall(r"^ *(\d+) at (\[.*?\])", said, re.MULTILINE)
    assert len(posts) == 3 * len(looks) and [int(number) for number, _ in looks] == [
        number + 1 for number in range(len(looks))
    ]
    assert len({place for _, place in looks}) == len(looks)


def test_the_example_of_an_http_client_runs(agent_folder, monkeypatch, capsys):
    from stam.web import Service

    with RunningServer(Service(stam.load(agent_folder))) as url:
        said = run_example(monkeypatch, capsys, "http_client.py", url)
    assert " 1 at [" in said and "% sure" in said


def test_serve_compiles_an_agent_that_is_asked_to(tmp_path, monkeypatch, capsys):
    from stam.fast import cpu_compiled

    threads, served = [], []

    def take_the_plain_step(core, num_patches):
        threads.append(torch.get_num_threads())
        return cpu_compiled._Step(core, num_patches).eval()

    monkeypatch.setattr(cpu_compiled, "compile_step", take_the_plain_step)
    monkeypatch.setattr("stam.web.serve", lambda service, *_: served.append(service))
    for core in ("causal", "reencoding"):
        stam.weights.save_agent(stam.Agent(tiny_config(core=core)).eval(), tmp_path / core)
    main(["serve", str(tmp_path / "causal"), "--compile", "--threads", "2"])
    assert threads == [2] and "compiling" in capsys.readouterr().err
    assert isinstance(served[0].pool.agent, cpu_compiled.CompiledLooker)
    for core, *options in (("reencoding", "--compile"), ("causal", "--compile", "--no-fast")):
        with pytest.raises(SystemExit) as left:
            main(["serve", str(tmp_path / core), *options])
        assert left.value.code == 2
    error = capsys.readouterr().err
    assert "--core causal" in error and "--no-fast" in error
