import asyncio
import base64
import copy
import io
import os
import socket
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from agents import tiny_config
from PIL import Image
from serving import RunningServer, bomb
from sessions import feed

import stam
from stam.scene.sensor import ImageSensor
from stam.web import Limits, Service, serve
from stam.web.photographs import photographs
from stam.web.scenes import sample_scenes
from stam.web.server import listen

PNG = {"content-type": "image/png"}
RAW = {"content-type": "application/octet-stream"}
JSON = {"content-type": "application/json"}
PAGE_FILES = [
    *("app.js", "api.js", "board.js", "camera.js", "panels.js", "scene.js", "thumbnails.js", "track.js"),
    *("words.js", "style.css", "icon.svg"),
]


def png(pixels) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def scene_pixels(seed=0, height=24, width=32):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def cut(pixels, location):
    row, column = location
    return np.ascontiguousarray(pixels[row * 8 : row * 8 + 8, column * 8 : column * 8 + 8])


@pytest.fixture
def client(web_agent):
    service = Service(web_agent, "tiny", Limits(max_sessions=5, max_upload_bytes=300_000))
    with RunningServer(service) as url, httpx.Client(base_url=url, timeout=30) as opened:
        yield opened


def open_session(client, **settings) -> dict:
    answer = client.post("/api/sessions", json=settings)
    assert answer.status_code == 201, answer.text
    return answer.json()


def test_the_agent_says_all_that_a_sensor_needs(client):
    info = client.get("/api/agent").json()
    assert info["labels"] == list("abcde") and info["grid"]["rows"] == 3 and info["grid"]["columns"] == 4
    assert info["grid"]["glimpse_size"] == [8, 8] and info["threshold"] == 0.9
    assert info["policies"] == ["learned", "random", "plus", "spiral", "centre-out"]
    assert info["limits"]["max_sessions"] == 5


@pytest.mark.parametrize("form", ["png", "raw"])
def test_a_remote_sensor_hears_what_a_session_says(client, web_agent, form):
    pixels = scene_pixels()
    session = open_session(client, first_location=[1, 2], threshold=0.5)
    sensor = ImageSensor(Image.fromarray(pixels), web_agent.grid)
    location = session["location"]
    for want in feed(web_agent.session(first_location=(1, 2), threshold=0.5), sensor, 12):
        glimpse = cut(pixels, location)
        body, headers = (png(glimpse), PNG) if form == "png" else (glimpse.tobytes(), RAW)
        glimpses = f"/api/sessions/{session['id']}/glimpses?num_glimpses={want.num_glimpses - 1}"
        step = client.post(glimpses, content=body, headers=headers).json()
        assert step["probabilities"] == pytest.approx(want.probabilities.tolist(), abs=1e-6)
        assert (step["stop"], step["num_glimpses"]) == (want.stop, want.num_glimpses)
        assert step["location"] == (None if want.location is None else list(want.location))
        assert step["policy_map"] is None
        location = step["location"]
    glimpses = f"/api/sessions/{session['id']}/glimpses?num_glimpses=12"
    answer = client.post(glimpses, content=png(glimpse), headers=PNG)
    assert answer.status_code == 409 and "every location has been seen" in answer.json()["error"]


def test_off_target_repeated_missed_rewound_and_closed(client):
    pixels = scene_pixels()
    key = open_session(client, first_location=[0, 0])["id"]
    where = f"/api/sessions/{key}"

    def post(place, **query):
        query |= {"row": place[0], "column": place[1]}
        return client.post(f"{where}/glimpses", content=png(cut(pixels, place)), headers=PNG, params=query)

    assert post((2, 3)).json()["num_glimpses"] == 1
    assert post((2, 3)).json()["num_glimpses"] == 1
    step = post((0, 1), map=True).json()
    assert len(step["policy_map"]) == 3 and sum(map(sum, step["policy_map"])) == pytest.approx(1, abs=1e-4)
    asked = client.get(where).json()
    assert asked["seen"] == [[2, 3], [0, 1]] and asked["step"]["label"] == step["label"]
    missed = client.post(f"{where}/missed").json()
    assert missed["missed"] == [asked["location"]] and missed["location"] != asked["location"]
    assert client.post(f"{where}/missed", json={"location": [1, 1]}).json()["missed"].count([1, 1]) == 1
    assert client.get(f"{where}/map").json()[2][3] == 0
    rewound = client.post(f"{where}/rewind", json={"num_glimpses": 1}).json()
    assert rewound["seen"] == [[2, 3]] and rewound["missed"] == []
    assert client.post(f"{where}/rewind", json={"num_glimpses": 0}).json()["step"] is None
    assert client.delete(where).status_code == 204
    assert client.get(where).status_code == 404


def send(client, key, pixels, place, **query):
    body = cut(pixels, place).tobytes()
    return client.post(f"/api/sessions/{key}/glimpses", content=body, headers=RAW, params=query)


@pytest.mark.parametrize("by", ["count", "place", "both"])
@pytest.mark.parametrize("policy", ["learned", "random"])
def test_a_glimpse_sent_again_is_taken_once_and_answered_alike(client, policy, by):
    pixels = scene_pixels()
    session = open_session(client, first_location=[1, 2], policy=policy, seed=3)
    where, count, seen = session["location"], 0, []
    while where is not None:
        said = {"count": {"num_glimpses": count}, "place": {"row": where[0], "column": where[1]}}
        query = said["count"] | said["place"] if by == "both" else said[by]
        answers = [send(client, session["id"], pixels, where, **query) for _ in range(3)]
        assert {answer.status_code for answer in answers} == {200}
        assert answers[0].json() == answers[1].json() == answers[2].json()
        seen.append(where)
        assert client.get(f"/api/sessions/{session['id']}").json()["seen"] == seen
        where, count = answers[0].json()["location"], count + 1
    assert count == 12


def test_a_glimpse_for_another_state_of_the_session_is_a_conflict(client):
    pixels = scene_pixels()
    key = open_session(client, first_location=[1, 2])["id"]
    first = send(client, key, pixels, (1, 2), num_glimpses=0).json()
    second = send(client, key, pixels, first["location"], num_glimpses=1).json()
    late = send(client, key, pixels, (1, 2), num_glimpses=0)
    early = send(client, key, pixels, second["location"], num_glimpses=3)
    other = send(client, key, pixels, second["location"], num_glimpses=1)  # not what was seen there
    elsewhere = send(client, key, pixels, (1, 2), num_glimpses=1, row=1, column=2)
    for answer in (late, early, other, elsewhere):
        assert answer.status_code == 409 and "2 have been seen" in answer.json()["error"]
        assert (answer.json()["num_glimpses"], answer.json()["location"]) == (2, second["location"])
    assert client.get(f"/api/sessions/{key}").json()["num_glimpses"] == 2


def test_a_glimpse_that_does_not_say_which_it_is_is_refused(client):
    key = open_session(client)["id"]
    answer = send(client, key, scene_pixels(), (0, 0))
    assert answer.status_code == 422 and "num_glimpses" in answer.json()["error"]


BAD_GLIMPSES = [
    (b"", PNG, 422, "cannot be read"),
    (b"not an image", PNG, 422, "broken, or none of PNG"),
    (png(scene_pixels(0, 8, 8))[:80], PNG, 422, "cannot read the image"),
    (png(scene_pixels(0, 8, 9)), PNG, 422, "a glimpse is 8x8 pixels, got 8x9"),
    (bomb(), PNG, 413, "far too many pixels"),
    (bomb(20_000, 4_000), PNG, 422, "a glimpse is 8x8 pixels"),
    (bomb(20_000, 6_000), PNG, 413, "far too many pixels"),
    (b"\0" * 191, RAW, 422, "192 bytes, row by row; got 191"),
    (b"\0" * 192, {"content-type": "text/plain"}, 415, "got 'text/plain'"),
    (b"\0" * 192, {}, 415, "got ''"),
    (b"\0" * 400_000, RAW, 413, "100000 bytes"),
]


@pytest.mark.parametrize(("body", "headers", "code", "message"), BAD_GLIMPSES)
def test_a_bad_glimpse_is_refused(client, body, headers, code, message):
    key = open_session(client)["id"]
    answer = client.post(f"/api/sessions/{key}/glimpses?num_glimpses=0", content=body, headers=headers)
    assert answer.status_code == code and message in answer.json()["error"]
    assert client.get(f"/api/sessions/{key}").json()["num_glimpses"] == 0


@pytest.mark.parametrize(
    ("method", "path", "options", "code", "message"),
    [
        ("GET", "/api/sessions/nobody", {}, 404, "no session 'nobody'"),
        ("GET", "/api/sessions/a b", {}, 422, "session_id"),
        ("POST", "/api/sessions", {"json": {"policy": "spirl"}}, 422, "policy"),
        (
            "POST",
            "/api/sessions",
            {"content": b'{"policy": "\\ud800"}', "headers": {"Content-Type": "application/json"}},
            422,
            "policy",
        ),
        ("POST", "/api/sessions", {"json": {"colour": 1}}, 422, "colour"),
        ("POST", "/api/sessions", {"json": {"threshold": 2}}, 422, "threshold"),
        ("POST", "/api/sessions", {"json": {"first_location": [3, 0]}}, 422, "not on the grid"),
        (
            "POST",
            "/api/sessions",
            {"content": b"{", "headers": {"Content-Type": "application/json"}},
            422,
            "JSON",
        ),
        ("GET", "/api/scenes/99", {}, 404, "no scene 99"),
        ("PUT", "/api/agent", {}, 405, "Not Allowed"),
        ("GET", "/api/nothing", {}, 404, "Not Found"),
        ("POST", "/api/view", {"content": bomb(), "headers": PNG}, 413, "too many pixels"),
        ("POST", "/api/view", {"content": bomb(7_000, 7_000), "headers": PNG}, 413, "at most 40000000"),
        ("POST", "/api/view", {"content": b"GIF89a", "headers": PNG}, 422, "cannot be read"),
        ("POST", "/api/view", {"content": b"x" * 300_001, "headers": PNG}, 413, "300000 bytes"),
        ("POST", "/api/view", {"content": b"x", "headers": RAW}, 415, "send an image"),
        ("GET", "/docs", {}, 404, "Not Found"),
    ],
)
def test_a_wrong_request_gets_a_clear_answer(client, method, path, options, code, message):
    answer = client.request(method, path, **options)
    assert answer.status_code == code and message in answer.json()["error"]


def test_a_body_that_lies_about_its_length_is_stopped_as_it_arrives(client):
    def drip():
        for _ in range(50):
            yield b"x" * 10_000

    for path, headers, most in (("/api/view", PNG, 300_000), ("/api/sessions", JSON, 100_000)):
        answer = client.post(path, content=drip(), headers=headers)
        assert answer.status_code == 413 and f"{most} bytes" in answer.json()["error"]


def test_half_a_location_is_refused(client):
    key = open_session(client)["id"]
    answer = client.post(f"/api/sessions/{key}/glimpses?row=1", content=b"\0" * 192, headers=RAW)
    assert answer.status_code == 422 and "both row and column" in answer.json()["error"]


def test_too_many_sessions_are_refused_until_one_is_closed(client):
    keys = [open_session(client)["id"] for _ in range(5)]
    answer = client.post("/api/sessions")
    assert answer.status_code == 429 and "close one" in answer.json()["error"]
    assert int(answer.headers["retry-after"]) > 0
    client.delete(f"/api/sessions/{keys[0]}")
    open_session(client)


def test_an_idle_session_expires(web_agent):
    service = Service(web_agent, limits=Limits(idle_seconds=0.05))
    with RunningServer(service) as url, httpx.Client(base_url=url) as client:
        key = open_session(client)["id"]
        time.sleep(0.1)
        assert client.get(f"/api/sessions/{key}").status_code == 404


def test_scenes_are_offered_at_the_agents_size(client):
    scenes = client.get("/api/scenes").json()
    assert len(scenes) >= 12 and all(
        scene["label"] is None for scene in scenes
    )  # it knows no class of theirs
    answer = client.get(f"/api/scenes/{scenes[0]['id']}")
    assert answer.headers["content-type"] == "image/png"
    assert Image.open(io.BytesIO(answer.content)).size == (32, 24)
    small = client.get("/api/scenes/0/thumbnail")
    assert small.headers["content-type"] == "image/jpeg" and len(small.content) < 10_000
    assert Image.open(io.BytesIO(small.content)).size == (112, 84)
    assert client.get("/api/scenes/999/thumbnail").status_code == 404


def animation(**changes) -> dict:
    steps = [{"location": [1, column], "label": "a", "confidence": 0.25 * column} for column in range(3)]
    scene = base64.b64encode(png(scene_pixels(1))).decode()
    return {"scene": scene, "steps": steps, "truth": "a"} | changes


def test_a_look_is_drawn_as_a_gif(client):
    answer = client.post("/api/animation", json=animation(milliseconds=100))
    assert answer.headers["content-type"] == "image/gif"
    assert Image.open(io.BytesIO(answer.content)).n_frames == 4
    unsure = client.post("/api/animation", json=animation(milliseconds=100, unsure=True))
    assert unsure.status_code == 200 and unsure.content != answer.content
    step = {"location": [1, 9], "label": "a", "confidence": 0.5}
    for given, said in (
        (animation(scene="?"), "not base64"),
        (animation(scene=base64.b64encode(png(scene_pixels(1, 8, 8))).decode()), "24x32 pixels, got 8x8"),
        (animation(steps=[step]), "location"),
        (animation(steps=[step] * 13), "13 given"),
        (animation(steps=[]), "steps"),
        (animation(more=1), "more"),
    ):
        refused = client.post("/api/animation", json=given)
        assert refused.status_code == 422 and said in refused.json()["error"], refused.text


def test_a_second_agent_has_sessions_of_its_own(web_agent):
    other = stam.Agent(tiny_config(num_classes=3, labels=tuple("xyz"))).eval()
    service = Service(web_agent, "one", beside=Service(other, "two", scenes=()))
    with RunningServer(service) as url, httpx.Client(base_url=url) as client:
        assert client.get("/api/agent").json()["beside"] == "two"
        assert client.get("/beside/api/agent").json()["labels"] == list("xyz")
        key = client.post("/beside/api/sessions").json()["id"]
        glimpse = png(scene_pixels(1)[:8, :8])
        step = client.post(
            f"/beside/api/sessions/{key}/glimpses?num_glimpses=0", content=glimpse, headers=PNG
        )
        assert step.json()["label"] in "xyz"
        missing = client.get(f"/api/sessions/{key}")
        assert missing.status_code == 404 and "error" in missing.json()
        assert client.get("/beside/api/sessions/none").json()["error"]


def test_an_upload_is_brought_to_size_and_not_kept(client):
    answer = client.post("/api/view", content=png(scene_pixels(1, 100, 300)), headers=PNG)
    assert Image.open(io.BytesIO(answer.content)).size == (32, 24)
    same = scene_pixels(2)
    answer = client.post("/api/view", content=png(same), headers={"content-type": "image/png; charset=x"})
    assert (np.asarray(Image.open(io.BytesIO(answer.content))) == same).all()


def test_digit_agents_get_digits_and_folders_are_listed(tmp_path):
    digits = stam.Agent(tiny_config(num_classes=10, image_size=56, labels=tuple("0123456789"))).facts
    scenes = sample_scenes(digits)
    assert len(scenes) == 24 and scenes[0].load().shape == (56, 56, 3) and scenes[0].label in digits.labels
    for index in range(60):
        (tmp_path / "abc"[index % 3]).mkdir(exist_ok=True)
        Image.fromarray(scene_pixels(index)).save(tmp_path / "abc"[index % 3] / f"{index}.png")
    listed = sample_scenes(stam.Agent(tiny_config(labels=tuple("abcde"))).facts, tmp_path)
    assert len(listed) == 48 and {scene.label for scene in listed} == set("abc")
    assert listed[0].load().shape == (24, 32, 3)
    with pytest.raises(stam.StamError, match="no folder of images"):
        sample_scenes(digits, tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(stam.StamError, match="no images in"):
        sample_scenes(digits, tmp_path / "empty")


def test_photographs_are_brought_to_the_agents_size():
    first, second = (scene.load() for scene in sample_scenes(stam.Agent(tiny_config()).facts)[:2])
    assert first.shape == second.shape == (24, 32, 3) and (first != second).any()


def test_shipped_images_have_sources_and_suit_the_agent():
    folder = Path(stam.web.photographs.__file__).parent
    shipped = photographs()
    assert {each.file for each in shipped} == {path.name for path in folder.glob("*.jpg")}
    assert all(each.source and each.licence and each.title for each in shipped)
    assert sum(each.path.stat().st_size for each in shipped) < 1_000_000
    assert sum(not each.is_drawn for each in shipped) >= 12
    for name, first in (("imagenette-tiny", "cassette_player"), ("aid-tiny", "Mountain")):
        facts = stam.load(name).facts
        scenes = sample_scenes(facts)
        assert len(scenes) >= 7 and scenes[0].label == first
        assert {scene.label for scene in scenes} <= {None, *facts.labels}


def test_the_page_loads_nothing_from_elsewhere(client):
    page = client.get("/")
    assert page.status_code == 200 and "default-src 'self'" in page.headers["content-security-policy"]
    for name in PAGE_FILES:
        file = client.get(f"/{name}")
        assert file.status_code == 200
        assert "http" not in file.text.replace("http://www.w3.org/2000/svg", "")
    assert "//" not in page.text


def test_a_stranger_through_another_name_is_refused(client):
    for host in ("evil.example", "127.0.0.1.evil.example", "[::2]:8000", "::1", "*", ""):
        refused = client.get("/api/agent", headers={"host": host})
        assert refused.status_code == 400 and refused.text == "Invalid host header", host
        assert "default-src 'self'" in refused.headers["content-security-policy"]
    for host in ("127.0.0.1", "127.0.0.1:8000", "localhost", "LOCALHOST:8000", "[::1]", "[::1]:8000"):
        assert client.get("/api/agent", headers={"host": host}).status_code == 200, host
    answer = client.post("/api/sessions", headers={"origin": "http://evil.example"})
    assert answer.status_code == 403 and "other sites" in answer.json()["error"]
    own = str(client.base_url).rstrip("/")
    assert client.post("/api/sessions", headers={"origin": own}).status_code == 201


def test_a_hundred_remote_sensors_at_once_and_none_mixed_up(web_agent):
    async def look(client, index):
        pixels = scene_pixels(index)
        opened = await client.post("/api/sessions", json={"first_location": [index % 3, index % 4]})
        session, said = opened.json(), []
        location = session["location"]
        for count in range(2):
            body = cut(pixels, location).tobytes()
            glimpses = f"/api/sessions/{session['id']}/glimpses?num_glimpses={count}"
            answer = await client.post(glimpses, content=body, headers=RAW)
            assert answer.status_code == 200, answer.text
            said.append(answer.json())
            location = said[-1]["location"]
        await client.delete(f"/api/sessions/{session['id']}")
        return said

    async def all_of_them(url):
        limits = httpx.Limits(max_connections=100)
        async with httpx.AsyncClient(base_url=url, limits=limits, timeout=60) as client:
            return await asyncio.gather(*(look(client, index) for index in range(100)))

    service = Service(web_agent)
    with RunningServer(service) as url:
        everything = asyncio.run(all_of_them(url))
        assert len(service.pool) == 0
    for index, said in enumerate(everything):
        sensor = ImageSensor(Image.fromarray(scene_pixels(index)), web_agent.grid)
        alone = feed(web_agent.session(first_location=(index % 3, index % 4)), sensor, 2)
        for step, want in zip(said, alone, strict=True):
            assert step["probabilities"] == pytest.approx(want.probabilities.tolist(), abs=1e-5)
            assert step["location"] == list(want.location)


def test_a_port_in_use_is_said_so(web_agent):
    with RunningServer(Service(web_agent)) as url:
        port = int(url.rsplit(":", 1)[1])
        with pytest.raises(stam.StamError, match=f"cannot listen on 127.0.0.1 port {port}: .* --port"):
            serve(Service(web_agent), port=port)
    with pytest.raises(stam.StamError, match="cannot listen"):
        serve(Service(web_agent), port=99999)


def test_small_answers_are_sent_at_once():
    """asyncio sets TCP_NODELAY only on sockets that name their protocol; without it a request takes 40 ms."""
    with listen("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP


def test_an_agent_that_says_nonsense_is_not_served(web_agent):
    broken = copy.deepcopy(web_agent)
    with torch.no_grad():
        broken.core.head.bias.fill_(float("nan"))
    with RunningServer(Service(broken, "broken")) as url, httpx.Client(base_url=url, timeout=30) as client:
        key = open_session(client, first_location=[0, 0])["id"]
        body = cut(scene_pixels(), (0, 0)).tobytes()
        answer = client.post(f"/api/sessions/{key}/glimpses?num_glimpses=0", content=body, headers=RAW)
        assert answer.status_code >= 400 and "not numbers" in answer.json()["error"]


def test_names_of_images_may_be_any_bytes(web_agent, tmp_path):
    odd = tmp_path / os.fsdecode(b"caf\xe9.png")
    odd.write_bytes(b"no image")
    scenes = sample_scenes(web_agent.facts, tmp_path)
    service = Service(web_agent, str(odd), scenes=scenes)
    with RunningServer(service) as url, httpx.Client(base_url=url, timeout=30) as client:
        (scene,) = client.get("/api/scenes").json()
        assert scene["name"] == r"caf\udce9.png"
        assert client.get("/api/agent").json()["name"].endswith(r"caf\udce9.png")
        answer = client.get("/api/scenes/0")
        assert answer.status_code == 422 and r"caf\udce9.png" in answer.json()["error"]
