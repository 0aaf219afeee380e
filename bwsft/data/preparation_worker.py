"""A process that tokenizes some of a data set's shards, for preparation.py.

It takes its job as a line of JSON on stdin, which stays open for as long as it is wanted, and
prints how many records it has done, a number a line.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import IO

from bwsft.data import preparation
from bwsft.data.chat_template import Template
from bwsft.data.examples import DataOptions
from bwsft.data.sources import open_source
from bwsft.data.tokenizer import load_tokenizer, tokenizer_digest
from bwsft.utils.freed_memory import give_back

TOLD = 256  # records from one number to the next


def main() -> int:
    job = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=end_with, args=(sys.stdin.buffer,), daemon=True).start()
    tokenizer = load_tokenizer(job["tokenizer"])
    source = open_source(job["source"], job["subset"], job["split"])
    if (tokenizer_digest(tokenizer), source.digest) != (job["words"], job["digest"]):
        return 1
    options = DataOptions(**job["options"])
    template = Template(tokenizer, options.template, options.template_args)
    give_back()
    shards = preparation.write_shards(
        Path(job["parts"]), source, template, options, job["size"], Told(), shared=True
    )
    for _ in shards:
        pass
    return 0


def end_with(stdin: IO[bytes]) -> None:
    """End this process when the one that started it is gone."""
    stdin.read()
    os._exit(1)


class Told:
    """Counts records and now and then prints the count."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, records: int) -> None:
        self.count += records
        if self.count >= TOLD:
            sys.stdout.write(f"{self.count}\n")
            sys.stdout.flush()
            self.count = 0


if __name__ == "__main__":
    sys.exit(main())
