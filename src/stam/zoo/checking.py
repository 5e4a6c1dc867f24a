"""Does something look as evaluation, figures and predictions expect? A checker for lookers of your own."""

from typing import Any

import torch
from torch import Tensor

from stam.errors import StamError
from stam.model.looker import LookTrace, SceneLooker


class LookerError(StamError):
    """A looker that breaks its contract."""


def check_looker(looker: Any, num_scenes: int = 3) -> None:
    """Raises `LookerError` with the first thing that is wrong with a looker; passes in silence.

    It looks at scenes of noise, with every policy and every number of looks, and checks shapes, boxes, the
    count of pixels, that what it says after some looks does not depend on looks to come, that a scene is
    looked at alike in any batch, and that the scenes are left as they were.

    Args:
        looker: The looker, in evaluation mode.
        num_scenes: Scenes to look at, at least 2.
    """
    _require(
        isinstance(looker, SceneLooker), "it needs facts, device, episodic, ready and look (SceneLooker)"
    )
    facts = looker.facts
    _require(len(facts.labels) >= 2, f"facts.labels must name two classes or more, got {facts.labels}")
    _require(len(set(facts.labels)) == len(facts.labels), "facts.labels must differ from each other")
    _require(facts.most_glimpses >= 1, f"facts.most_glimpses must be 1 or more, got {facts.most_glimpses}")
    known = not facts.policies or facts.policy in facts.policies
    _require(known, f"facts.policy '{facts.policy}' is not one of facts.policies {facts.policies}")
    shape = (num_scenes, len(facts.mean), *facts.image_size)
    images = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(looker.device)
    for policy in facts.policies or (facts.policy,):
        before = images.clone()
        whole = _look(looker, images, facts.most_glimpses, policy)
        _require(images.equal(before), f"{policy}: look changed the scenes it was given")
        _check_trace(whole, num_scenes, facts.most_glimpses, len(facts.labels), policy)
        again = _look(looker, images, facts.most_glimpses, policy)
        _require(_alike(whole, again), f"{policy}: the same generator must give the same looks")
        for count in range(1, facts.most_glimpses):
            part = _look(looker, images, count, policy)
            _check_trace(part, num_scenes, count, len(facts.labels), policy)
            ahead = f"{policy}: with {count} looks it says otherwise than after {count} of more"
            _require(_alike(part, whole, count), ahead)
    own = _look(looker, images, facts.most_glimpses, facts.policy)
    alone = _look(looker, images[:1], facts.most_glimpses, facts.policy)
    close = torch.allclose(own.probabilities[:1], alone.probabilities, atol=1e-3)
    _require(close, "a scene is looked at otherwise in another batch: draw first for the first scene")
    for count in (0, facts.most_glimpses + 1):
        _require_refused(looker, images, count, None, f"{count} looks")
    if facts.policies:
        _require_refused(looker, images, 1, "no-such-policy", "an unknown policy")


def _look(looker: SceneLooker, images: Tensor, count: int, policy: str) -> LookTrace:
    return looker.look(images, count, policy=policy, generator=torch.Generator().manual_seed(1))


def _check_trace(trace: LookTrace, batch: int, count: int, classes: int, policy: str) -> None:
    _require(
        isinstance(trace, LookTrace), f"{policy}: look must return a trace (stam.model.looker.LookTrace)"
    )
    parts = trace.boxes.shape[2] if trace.boxes.ndim == 4 else 0
    _require(parts >= 1, f"{policy}: boxes must be (batch, looks, parts, 4), got {tuple(trace.boxes.shape)}")
    for name, found, expected in (
        ("boxes", tuple(trace.boxes.shape), (batch, count, parts, 4)),
        ("sizes", tuple(trace.sizes.shape), (count, parts, 2)),
        ("pixels", tuple(trace.pixels.shape), (batch, count)),
        ("probabilities", tuple(trace.probabilities.shape), (batch, count, classes)),
        *(("readouts", tuple(each.shape), (batch, count, classes)) for each in trace.readouts),
    ):
        _require(found == expected, f"{policy}: {name} must be {expected}, got {found}")
    _require(bool(torch.isfinite(trace.boxes).all()), f"{policy}: boxes hold NaN or infinity")
    _require(bool(torch.isfinite(trace.probabilities).all()), f"{policy}: probabilities hold NaN or infinity")
    ones = trace.probabilities.float().sum(dim=-1)
    _require(
        torch.allclose(ones, torch.ones_like(ones), atol=1e-3), f"{policy}: probabilities must add up to 1"
    )
    corners, ends = trace.boxes[..., :2], trace.boxes[..., 2:]
    absent = (trace.boxes == 0).all(dim=-1)
    sound = (ends > corners).all(dim=-1) | absent
    _require(bool(sound.all()), f"{policy}: a box is top, left, bottom, right with an area, or all 0")
    seen = ((ends > 0) & (corners < 1)).all(dim=-1) | absent
    _require(bool(seen.all()), f"{policy}: a box lies wholly outside of the scene: boxes are shares, 0 to 1")
    areas = trace.sizes.prod(dim=-1).to(trace.boxes.device) * ~absent
    counted = areas.sum(dim=-1).cumsum(dim=1)
    _require(
        bool((trace.pixels.to(counted) == counted).all()),
        f"{policy}: pixels must be those of all parts so far, {counted[0].tolist()} in the first scene, "
        f"got {trace.pixels[0].tolist()}",
    )


def _alike(one: LookTrace, other: LookTrace, count: int | None = None) -> bool:
    """Tells whether two traces agree on their first looks."""
    parts = min(one.boxes.shape[2], other.boxes.shape[2])
    return torch.allclose(
        one.boxes[:, :count, :parts], other.boxes[:, :count, :parts], atol=1e-4
    ) and torch.allclose(one.probabilities[:, :count], other.probabilities[:, :count], atol=1e-4)


def _require_refused(looker: SceneLooker, images: Tensor, count: int, policy: str | None, what: str) -> None:
    try:
        looker.look(images, count, policy=policy)
    except StamError:
        return
    except Exception as error:
        raise LookerError(f"{what} must raise a StamError, got {type(error).__name__}: {error}") from error
    raise LookerError(f"{what} must raise a StamError, but was accepted")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise LookerError(message)
