"""What clients that are slow, rude or many cost the service."""

import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from serving import RunningServer, bomb

from stam.errors import StamError
from stam.web import Limits, Service
from stam.web.memory import return_freed_memory
from stam.web.server import build_server

PNG = {"content-type": "image/png"}
HALF_A_BODY = b"\r\n".join(
    (
        b"POST /api/view HTTP/1.1",
        b"Host: 127.0.0.1",
        b"Content-Type: image/png",
        b"Content-Length: 9000",
        b"",
        b"PNG",
    )
)


def connect(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=30)


def is_closed(client: socket.socket) -> bool:
    """Waits for the service to close a connection; a time-out is an error."""
    try:
        while client.recv(65536):
            pass
    except ConnectionError:
        pass
    return True


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET /api/agent HTTP/1.1\r\nHost: 127.0",
        HALF_A_BODY,
        b"GET /api/agent HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    ],
    ids=["nothing", "half a head", "half a body", "nothing more"],
)
def test_clients_that_stop_sending_are_closed_and_others_served(web_agent, sent):
    service = Service(web_agent, limits=Limits(client_seconds=0.5))
    with RunningServer(service) as url, ExitStack() as sockets:
        clients = [sockets.enter_context(connect(url)) for _ in range(100)]
        for client in clients:
            client.sendall(sent)
        assert httpx.get(f"{url}/api/agent", timeout=30).status_code == 200
        assert all(is_closed(client) for client in clients)
        assert httpx.get(f"{url}/api/agent", timeout=30).status_code == 200


def test_a_client_that_dribbles_is_closed(web_agent):
    """Each byte in time, and no end of them."""
    with RunningServer(Service(web_agent, limits=Limits(client_seconds=0.5))) as url:
        for head in (b"GET /api/agent HTTP/1.1\r\nx-header: ", HALF_A_BODY):
            with connect(url) as client, pytest.raises(ConnectionError):
                client.sendall(head)
                for _ in range(600):
                    client.sendall(b"a")
                    time.sleep(0.05)


def test_a_client_that_takes_no_answers_is_closed(web_agent):
    running = RunningServer(Service(web_agent, limits=Limits(client_seconds=0.5)))
    running.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with running as url, connect(url) as client, pytest.raises(ConnectionError):
        for _ in range(100_000):
            client.sendall(b"GET /api/agent HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")


def test_a_client_that_is_waited_for_by_the_agent_is_not_closed(web_agent):
    """It is the service that is slow here."""

    class SlowService(Service):
        def read_scene(self, body):
            time.sleep(1.5)
            return super().read_scene(body)

    service = SlowService(web_agent, limits=Limits(client_seconds=0.5))
    with RunningServer(service) as url, httpx.Client(base_url=url, timeout=30) as client:
        scene = client.get("/api/scenes/0").content
        assert client.post("/api/view", content=scene, headers=PNG).status_code == 200


def test_more_connections_than_allowed_are_told_so(web_agent):
    limits = Limits(max_connections=4, client_seconds=2)
    with RunningServer(Service(web_agent, limits=limits)) as url, ExitStack() as sockets:
        clients = [sockets.enter_context(connect(url)) for _ in range(4)]
        assert httpx.get(f"{url}/api/agent", timeout=30).status_code == 503
        assert all(is_closed(client) for client in clients)
        assert httpx.get(f"{url}/api/agent", timeout=30).status_code == 200


def test_a_client_that_leaves_in_the_middle_is_not_worth_a_traceback(web_agent):
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    with RunningServer(Service(web_agent), log_level="warning") as url:
        logging.getLogger("uvicorn.error").addHandler(handler)
        key = httpx.post(f"{url}/api/sessions").json()["id"]
        glimpses = f"/api/sessions/{key}/glimpses?num_glimpses=0"
        for path in ("/api/view", glimpses, "/api/sessions"):
            head = HALF_A_BODY.replace(b"/api/view", path.encode())
            for body in (head, head.replace(b"image/png", b"application/json")):
                with connect(url) as client:
                    client.sendall(body)
                    time.sleep(0.05)
        assert httpx.get(f"{url}{glimpses.split('/glimpses')[0]}").json()["num_glimpses"] == 0
    logging.getLogger("uvicorn.error").removeHandler(handler)
    assert said == []


def test_stopping_cuts_off_requests_with_an_answer_and_without_a_traceback(web_agent):
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record)
    with ExitStack() as sockets:
        with RunningServer(Service(web_agent), log_level="warning", timeout_graceful_shutdown=0.2) as url:
            logging.getLogger("uvicorn.error").addHandler(handler)
            clients = [sockets.enter_context(connect(url)) for _ in range(3)]
            for client in clients:
                client.sendall(HALF_A_BODY)
            assert httpx.get(f"{url}/api/agent", timeout=30).status_code == 200  # the others have arrived
        logging.getLogger("uvicorn.error").removeHandler(handler)
        for client in clients:
            assert client.recv(65536).startswith(b"HTTP/1.1 503")
    assert [record.exc_info for record in said] == [None]
    assert "Cancel 3 running task(s)" in said[0].getMessage()


def test_images_are_decoded_one_at_a_time_and_few_are_taken_in(web_agent):
    """Forty megapixels take half a gigabyte while they are decoded, and 40 kB on the wire."""
    decoding, most, entered, let_go = 0, 0, threading.Event(), threading.Event()

    class WatchedService(Service):
        def read_scene(self, body):
            nonlocal decoding, most
            decoding += 1
            most = max(most, decoding)
            entered.set()
            let_go.wait(30)
            decoding -= 1
            return super().read_scene(body)

    service = WatchedService(web_agent, limits=Limits(max_uploads=3))
    codes = []
    with RunningServer(service) as url:
        scene = httpx.get(f"{url}/api/scenes/0").content

        def upload():
            codes.append(httpx.post(f"{url}/api/view", content=scene, headers=PNG, timeout=60).status_code)

        threads = [threading.Thread(target=upload) for _ in range(3)]
        for thread in threads:
            thread.start()
        entered.wait(30)
        while service._num_uploads < 3:
            time.sleep(0.01)
        refused = httpx.post(f"{url}/api/view", content=scene, headers=PNG, timeout=60)
        assert refused.status_code == 503 and "3 images are being uploaded" in refused.json()["error"]
        assert refused.headers["retry-after"] == "1"
        let_go.set()
        for thread in threads:
            thread.join()
        assert codes == [200, 200, 200] and most == 1
        assert httpx.post(f"{url}/api/view", content=bomb(), headers=PNG).status_code == 413
        assert service._num_uploads == 0


def test_freed_memory_is_given_back_while_the_service_is_used(web_agent, monkeypatch):
    service = Service(web_agent)
    returned = []
    monkeypatch.setattr("stam.web.server.return_freed_memory", lambda: returned.append(True))
    server = build_server(service)
    assert server.config.ws == "none", "a connection for web sockets is no connection of ours"

    async def ticks():
        for counter in range(1, 401):
            if counter == 150:
                server.server_state.total_requests += 5
            await server.on_tick(counter)

    asyncio.run(ticks())
    service.pool.close()
    assert len(returned) == 1


def has_glibc() -> bool:
    try:
        return bool(os.confstr("CS_GNU_LIBC_VERSION"))
    except (AttributeError, OSError, ValueError):
        return False


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not has_glibc(), reason="needs glibc's allocator")
def test_holes_between_blocks_go_back_to_the_system():
    blocks = [bytes(20_000) for _ in range(5_000)]  # 100 MB
    del blocks[::2]
    kept = blocks[::50]
    del blocks
    before = resident()
    return_freed_memory()
    assert before - resident() > 50_000_000 and len(kept) == 50


FREE_LARGE_BLOCKS = """
import os, sys
from pathlib import Path
from stam.web.memory import keep_large_blocks_apart

if sys.argv[1] == "apart":
    keep_large_blocks_apart()
for _ in range(3):
    large, behind = b"x" * 20_000_000, b"y" * 1_000
    before = int(Path("/proc/self/statm").read_text().split()[1])
    del large
    pages = before - int(Path("/proc/self/statm").read_text().split()[1])
print(pages * os.sysconf("SC_PAGE_SIZE"))
"""


@pytest.mark.skipif(not has_glibc(), reason="needs glibc's allocator")
@pytest.mark.parametrize(("how", "least"), [("apart", 19_000_000), ("as it is", -1_000_000)])
def test_large_blocks_go_back_to_the_system_at_once(how, least):
    """In a process of its own, since it is a setting of the whole process."""
    freed = int(subprocess.check_output([sys.executable, "-c", FREE_LARGE_BLOCKS, how]))
    assert freed >= least and (how == "apart" or freed < 1_000_000)


@pytest.mark.parametrize("name", ["max_uploads", "max_connections", "client_seconds"])
def test_limits_must_allow_something(name):
    with pytest.raises(StamError, match=f"{name} must be above 0"):
        Limits(**{name: 0})


def test_limits_are_told(web_agent):
    with RunningServer(Service(web_agent)) as url:
        told = json.loads(httpx.get(f"{url}/api/agent").text)["limits"]
    assert (told["max_uploads"], told["max_connections"], told["client_seconds"]) == (4, 512, 30)
