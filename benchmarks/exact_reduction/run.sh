#!/usr/bin/env bash
# The exact reduction against the fast one: 20 million parameters on 2 and 4 ranks, one and two microbatches per
# rank, and the small GPT of recipes/. About half an hour on two cores with nothing else running.
# Prints the tables, and keeps them with every block's time in results/.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
cd "$here/../.."
mkdir -p "$here/results"

large=(--set model.layers=6 --set model.hidden=512 --set model.heads=8 --set model.ffn_hidden=1472 --set data.seq_len=96)

measure() {  # name, ranks, microbatches per rank, pairs of blocks, steps of a block, settings of the model ...
  local name="$1" ranks="$2" microbatches="$3" repeats="$4" steps="$5"
  shift 5
  local words=(recipes/gpt-stdlib.toml --nproc "$ranks" --steps "$steps" --repeats "$repeats" --out "$here/results/$name.json"
    --set train.threads_per_rank=1 --set train.device=cpu --set train.microbatch_size=4
    --set "train.global_batch_size=$((4 * ranks * microbatches))" "$@")
  echo "### $name, load before: $(cut -d' ' -f1-3 /proc/loadavg)"
  python "$here/steps.py" "${words[@]}"
  echo
}

measure 20M-2ranks 2 1 100 1 "${large[@]}"
measure 20M-4ranks 4 1 60 1 "${large[@]}"
measure 20M-2ranks-2microbatches 2 2 40 1 "${large[@]}"
measure 20M-3ranks-3microbatches 3 3 20 1 "${large[@]}"
measure 0.2M-2ranks 2 1 200 5
