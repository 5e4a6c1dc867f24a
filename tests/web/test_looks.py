"""A system of the zoo behind HTTP, and its page."""

import io

import httpx
import numpy as np
import pytest
import torch
from PIL import Image
from serving import RunningServer
from zooing import glyph_scenes, small

import stam
from stam.cli import main
from stam.errors import StamError
from stam.prediction import Looking, predict
from stam.web import Limits, LookService
from stam.web.scenes import SampleScene
from stam.zoo import save_system

PNG = {"content-type": "image/png"}


def png(pixels) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def service(name: str = "gfnet", **limits) -> LookService:
    glyphs = glyph_scenes()
    scenes = [SampleScene(f"Glyph {n}", "x", lambda n=n: glyphs.load(n)) for n in range(3)]
    return LookService(small(name), name, Limits(**limits), scenes)


@pytest.fixture(scope="module")
def client():
    with RunningServer(service()) as url, httpx.Client(base_url=url, timeout=30) as opened:
        yield opened


def test_it_says_what_looks(client):
    info = client.get("/api/looker").json()
    assert (info["name"], info["image_size"], info["most_glimpses"]) == ("gfnet", [24, 24], 3)
    assert info["whole_to_attend"] and info["policies"] == ["learned", "random"]
    assert client.get("/api/scenes").json()[1] == {"id": 1, "name": "Glyph 1", "label": "x"}


def test_a_scene_is_looked_at_and_every_box_is_told(client):
    scene = client.get("/api/scenes/0").content
    looks = client.post("/api/looks", content=scene, headers=PNG).json()
    assert [look["pixels"] for look in looks] == [64, 128, 192]
    assert looks[0]["views"] == [{"box": [0, 0, 1, 1], "size": [8, 8]}]
    top, left, bottom, right = looks[1]["views"][0]["box"]
    assert bottom - top == pytest.approx(8 / 24) and right - left == pytest.approx(8 / 24)
    for look in looks:
        assert look["confidence"] == pytest.approx(max(look["probabilities"]), abs=1e-5)
    random = client.post("/api/looks?policy=random&seed=1", content=scene, headers=PNG).json()
    again = client.post("/api/looks?policy=random&seed=1", content=scene, headers=PNG).json()
    other = client.post("/api/looks?policy=random&seed=2", content=scene, headers=PNG).json()
    assert random == again != other


def test_mistakes_are_answered_in_words(client):
    scene = client.get("/api/scenes/0").content
    for path, content, code, said in (
        ("/api/looks?policy=luck", scene, 422, "is unknown: allowed"),
        ("/api/looks", png(np.zeros((30, 24, 3), np.uint8)), 422, "a scene is 24x24 pixels, got 30x24"),
        ("/api/looks", b"no image", 422, "cannot be read"),
        ("/api/looks", bytes(10**6), 413, "send less"),
        ("/api/looks?seed=-1", scene, 422, "seed"),
    ):
        answer = client.post(path, content=content, headers=PNG)
        assert answer.status_code == code and said in answer.json()["error"], answer.text
    assert client.get("/api/sessions").status_code == 404


def test_an_image_is_brought_to_size(client):
    fitted = client.post("/api/view", content=png(np.full((90, 60, 3), 200, np.uint8)), headers=PNG).content
    assert Image.open(io.BytesIO(fitted)).size == (24, 24)
    assert client.post("/api/looks", content=fitted, headers=PNG).status_code == 200


def test_a_system_that_says_nonsense_is_not_served_or_believed():
    broken = small("gfnet")
    with torch.no_grad():
        for parameter in broken.parameters():
            parameter.mul_(1e30)  # finite, and loaded as such, but no answer is
    pixels = np.full((24, 24, 3), 200, np.uint8)
    with RunningServer(LookService(broken, "broken")) as url:
        answer = httpx.post(f"{url}/api/looks", content=png(pixels), headers=PNG, timeout=30)
        assert answer.status_code >= 400 and "not numbers" in answer.json()["error"]
    with pytest.raises(StamError, match="not numbers"):
        predict(broken, pixels, Looking())


def test_the_page_is_its_own_and_loads_nothing_from_elsewhere(client):
    page = client.get("/")
    assert (
        "watch a system look" in page.text and "default-src 'self'" in page.headers["content-security-policy"]
    )
    for name in (
        "looks.js",
        "looks.css",
        "style.css",
        "api.js",
        "camera.js",
        "panels.js",
        "thumbnails.js",
        "words.js",
    ):
        assert client.get(f"/{name}").status_code == 200


def test_serve_opens_a_run_of_the_zoo(tmp_path, monkeypatch, capsys):
    save_system(small("patchdrop"), tmp_path / "run")
    served = []

    def serve(service, host, port, ready):
        ready("http://here")
        served.append(service)

    monkeypatch.setattr("stam.web.serve", serve)
    main(["serve", str(tmp_path / "run")])
    assert type(served[0]) is LookService and served[0].looker.name == "patchdrop"
    assert f"stam figures {tmp_path / 'run'}" in capsys.readouterr().err
    for option in (["--threshold", "0.5"], ["--compile"]):
        with pytest.raises(SystemExit) as left:
            main(["serve", str(tmp_path / "run"), *option])
        assert left.value.code == 2 and f"{option[0]} is for agents" in capsys.readouterr().err
    assert isinstance(served[0].looker, stam.zoo.System)
