"""To the hub and from it, with its own library against a server on this machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from agents import randomise, tiny_config
from hub import TOKEN, Hub

import stam
from stam.cli import main
from stam.weights.hub import model_card

SOURCE = str(Path(stam.__file__).parent.parent)
BOTH_WAYS = """
import sys
import stam
from stam.cli import main

main(["push", sys.argv[1], "me/tiny", "--private"])
own = stam.load(sys.argv[1])
again = stam.weights.start_agent("hub:me/tiny", own.config)
assert again.core.pos_embed.equal(own.core.pos_embed)  # 9x16 patches, not 12x12
found = stam.load("hub:me/tiny")
assert found.config == own.config
assert all(value.equal(own.state_dict()[name]) for name, value in found.state_dict().items())
main(["info", "hub:me/tiny"])
try:
    stam.load("hub:me/nothing")
except stam.errors.WeightsError as error:
    print("refused:", error)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    agent = stam.Agent(
        tiny_config(image_size=(36, 64), glimpse_size=4, labels=("ant", "bee", "cat", "dog", "eel"))
    )
    randomise(agent)
    run = tmp_path_factory.mktemp("runs") / "run"
    stam.weights.save_agent(agent.eval(), run / "best")
    (run / "state.pt").write_bytes(b"never sent")
    return run


def python(script: str, *arguments: object, url: str, token: str = TOKEN) -> subprocess.CompletedProcess:
    """Runs Python with the hub at a URL; its library reads where that is when it is imported."""
    environment = os.environ | {
        "PYTHONPATH": SOURCE,
        "HF_ENDPOINT": url,
        "HF_HOME": str(arguments[0]) + "-hub",
        "HF_TOKEN": token,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=120)


def test_a_run_goes_to_the_hub_and_comes_back(folder):
    pytest.importorskip("huggingface_hub", reason="the extra `hub` is not installed")
    with Hub() as hub:
        done = python(BOTH_WAYS, folder, url=hub.url)
        assert done.returncode == 0, done.stderr
        assert f"to {hub.url}/me/tiny" in done.stdout and "an agent, in" in done.stdout
        assert "refused: could not fetch 'me/nothing' from the hub" in done.stdout
        sent = hub.files["me/tiny"]
        assert set(sent) == {"model.safetensors", "config.json", "README.md"} and hub.private == {"me/tiny"}
        assert sent["model.safetensors"] == (folder / "best/model.safetensors").read_bytes()
        card = sent["README.md"].decode()
        assert card.startswith("---\nlibrary_name: stam") and 'stam.load("hub:me/tiny")' in card
        assert "5: ant, bee, cat, dog, eel" in card
        fetched = {each.rpartition("/")[2] for each in hub.requests if each.startswith("GET")}
        assert fetched == {"model.safetensors", "config.json"}  # nothing that could run
        stranger = "import sys; from stam.cli import main; main(['push', sys.argv[1], 'me/tiny'])"
        done = python(stranger, folder, url=hub.url, token="hf_of_nobody")
        assert done.returncode == 2 and "could not write 'me/tiny' to the hub" in done.stderr
        assert "Traceback" not in done.stderr


def test_mistakes_are_one_line(folder, capsys, monkeypatch):
    hub = pytest.importorskip("huggingface_hub", reason="the extra `hub` is not installed")
    monkeypatch.setattr(hub, "get_token", lambda: None)
    for words, said in (
        ((folder, "tiny"), "'tiny' is no repository: name it as OWNER/NAME, such as me/best"),
        ((folder, "me/tiny"), "nobody is logged in to the hub: set HF_TOKEN"),
        (("nothing", "me/tiny"), "no agent at 'nothing'"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(["push", *map(str, words)])
        complaint = capsys.readouterr().err
        assert stopped.value.code == 2 and said in complaint and complaint.count("\n") == 1
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(SystemExit):
        main(["push", str(folder), "me/tiny"])
    assert "needs the package 'huggingface_hub': pip install" in capsys.readouterr().err


def test_an_agent_that_ships_keeps_its_card():
    card = model_card(stam.weights.package_folder("digits"), "me/digits")
    assert card.startswith("---\n") and "# digits" in card and "scikit-learn" in card
