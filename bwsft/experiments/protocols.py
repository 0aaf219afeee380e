"""EQUAL-TOKENS: how many updates a number of traversals takes."""

from __future__ import annotations

import contextlib
import io
import math

from bwsft import config as c


def updates_of_traversals(config: c.Config, traversals: int) -> int:
    """Updates after which the supervised region is `traversals` times the responses: every example
    once per traversal, or every block of every example where the objective takes one at a time.

    The count stops at the first update that reaches it.
    """
    from bwsft.checkpoints.resolve import plan_model, plan_tokenizer
    from bwsft.data.tokenizer import load_tokenizer
    from bwsft.training.run_data import plan_data

    with contextlib.redirect_stdout(io.StringIO()):
        tokenizer = load_tokenizer(plan_tokenizer(config))
        family = plan_model(config, tokenizer, None).family
        data = plan_data(config, tokenizer, family)
    return math.ceil(data.epoch * traversals / config.batch_size)
