"""Processes of one small training, which a test starts itself."""

import contextlib
import os
import random
import socket
from pathlib import Path


def arguments(folder, tokenizer, data, flags, resume=False):
    return [
        "train", "debug", "--resume" if resume else "--out", str(folder), "--data", str(data),
        "--tokenizer", str(tokenizer), "--dataset.template", "chat", "--dataset.holdout", "6",
        "--dataset.cache-dir", str(folder.parent / "cache"), "--steps", "4", "--seed", "3",
        "--block-size", "4", "--gen-length", "16", "--max-length", "40", "--batch-size", "8",
        "--micro-batch-size", "2", "--save-every", "2", "--keep-last", "0", "--eval.every", "2",
        "--eval.draws", "2", "--lora.rank", "0", "--lora.dropout", "0", "--optim.lr", "3e-3",
        "--init.d-model", "32", "--init.n-layers", "2", "--init.n-heads", "2",
        "--init.mlp-hidden-size", "64", "--device", "cpu", *flags,
    ]  # fmt: skip


def free_ports(count):
    """The first of `count` free ports, below those that the system gives to connections."""
    while True:
        first = random.randrange(10_000, 30_000)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first


def environment():
    """That of a process that runs a file of tests: it finds their helpers."""
    paths = filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH")))
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
