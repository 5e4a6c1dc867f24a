"""The HTTP API under requests made up from its own schema: it may refuse anything, but never break."""

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from serving import RunningServer

from stam.web import Limits, Service

schemathesis = pytest.importorskip("schemathesis", reason="needs schemathesis: pip install '.[dev]'")
# schemathesis draws from `random` now and then, which hypothesis frowns upon
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")

OPERATIONS = [
    "GET /api/agent",
    "POST /api/sessions",
    "GET /api/sessions/{session_id}",
    "DELETE /api/sessions/{session_id}",
    "POST /api/sessions/{session_id}/glimpses",
    "POST /api/sessions/{session_id}/missed",
    "POST /api/sessions/{session_id}/rewind",
    "GET /api/sessions/{session_id}/map",
    "GET /api/scenes",
    "GET /api/scenes/{scene_id}",
    "GET /api/scenes/{scene_id}/thumbnail",
    "POST /api/view",
    "POST /api/animation",
]
NOTHING_TO_GET_WRONG = ["GET /api/agent", "GET /api/scenes", "POST /api/view"]


@pytest.fixture(scope="module")
def fuzzed(web_agent):
    service = Service(web_agent, limits=Limits(max_sessions=100_000))
    with RunningServer(service) as url:
        schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
        found = {operation.ok().label: operation.ok() for operation in schema.get_all_operations()}
        yield url, found


def test_every_operation_is_fuzzed(fuzzed):
    assert sorted(fuzzed[1]) == sorted(OPERATIONS)


BOUNDED = settings(
    max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=True
)


def fuzz(operation, mode, key=None):
    @BOUNDED
    @given(case=operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode)))
    def check(case):
        if key and "session_id" in (case.path_parameters or {}):
            case.path_parameters["session_id"] = key
        # a location may be in the schema's range and not on this agent's grid, an image may be no image
        case.call_and_validate(excluded_checks=[schemathesis.checks.positive_data_acceptance])

    check()


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_request_as_it_should_be_gets_a_documented_answer(fuzzed, name):
    url, operations = fuzzed
    key = httpx.post(f"{url}/api/sessions").json()["id"]
    fuzz(operations[name], "positive", None if name.startswith("DELETE") else key)


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name not in NOTHING_TO_GET_WRONG])
def test_a_request_as_it_should_not_be_is_refused(fuzzed, name):
    fuzz(fuzzed[1][name], "negative")
