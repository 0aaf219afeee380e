"""200 events against commands at work (tests/soak.py says which), and that it would notice."""

import pytest
import soak

from bwsft.checkpoints import contents, folders
from bwsft.utils import claims

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_lost_and_nothing_is_silent(tmp_path, seed):
    soak.soak(tmp_path, 50, seed)


@pytest.mark.parametrize(("module", "guard", "broken", "event", "word"), [
    (claims, "NOT_THROUGH", 0, "in_the_way", "touched|took"),
    (contents, "refuse_other", lambda *args: None, "changed", "metrics|differ|another result"),
    (folders, "problems", lambda *args, **more: None, "damaged", "metrics|differ|traceback"),
])  # fmt: skip
def test_it_notices_a_broken_guard(tmp_path, monkeypatch, module, guard, broken, event, word):
    """The commands are forked from this process, so that they have the broken one too."""
    monkeypatch.setattr(soak, "EVENTS", {event: 1})
    monkeypatch.setattr(module, guard, broken)
    with pytest.raises(soak.Failed, match=word):
        soak.soak(tmp_path, 60, 0)
