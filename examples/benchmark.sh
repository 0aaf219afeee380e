#!/bin/sh
# A benchmark in seconds: the fused loss against full logits, checked against each other first.
# Without the options below it is the real one (8 x 256 tokens, 126,464 columns; on a GPU 32 x 256);
# benchmarks/README.md lists the others and says how to read the table. Last line: one JSON object.
cd "$(dirname "$0")/.." || exit 1
exec "${PYTHON:-python}" benchmarks/bench_loss.py --quick --no-memory --rounds 3 \
    --batch 4 --length 128 --hidden 128 --rows 32 --vocab 32000 --variants naive fused "$@"
