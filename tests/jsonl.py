"""JSONL files of tests."""

import json


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]
