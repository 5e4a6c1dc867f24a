#!/usr/bin/env bash
# On one GPU: every kind of agent trained alike on cluttered digits, over seeds, all at once. Writes to $OUT.
set -uo pipefail
export PYTHONPATH=src PYTHONUNBUFFERED=1
runs=$(mktemp -d)
python3 experiments/digits_policies.py --out "$runs" --seeds 3 --eval-seeds 10 --epochs "${EPOCHS:-36}" --processes 12 \
  --threads 1 2>"$runs/errors" || tail -c 600 "$runs/errors"
cp "$runs/results.json" "$OUT/"
cp -r "$runs/digits-learned-0/last" "$OUT/learned"
cp "$runs/digits-learned-0/metrics.jsonl" "$OUT/"
