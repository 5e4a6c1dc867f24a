"""The authors' checkpoints; what they compute is in tests/model/test_conformance.py."""

import pytest
from deits import deit_state

from stam import weights
from stam.errors import WeightsError


def test_the_authors_checkpoint_needs_all_its_parts():
    with pytest.raises(WeightsError, match="not a STAM checkpoint of the authors: it lacks 'loc_pos_embed'"):
        weights.load_authors(deit_state(True))
