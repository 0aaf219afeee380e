"""200 events against commands at work (tests/soak.py says which), and that it would notice."""

import pytest
import soak

from bwsft.checkpoints import contents

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_lost_and_nothing_is_silent(tmp_path, seed):
    soak.soak(tmp_path, 50, seed)


def test_it_notices_a_base_that_is_not_compared(tmp_path, monkeypatch):
    """The commands are forked from this process, so that they have the broken guard too."""
    monkeypatch.setattr(soak, "EVENTS", {"changed": 1})
    monkeypatch.setattr(contents, "refuse_other", lambda *args: None)
    with pytest.raises(soak.Failed, match="metrics|differ|another result"):
        soak.soak(tmp_path, 60, 0)
