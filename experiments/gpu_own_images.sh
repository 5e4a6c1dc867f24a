#!/bin/sh
# Runs behind docs/results.md ("Your own images") and docs/performance.md ("Early exit") on one GPU, in parts.
#
#   DATA=data RUNS=runs RESULTS=results sh experiments/gpu_own_images.sh PART...
#
# PART is one of: early-exit, trials, imagenette, aid-causal, imagenette-causal, aid-actor-critic,
# imagenette-actor-critic (the last two with the causal core too).
# Parts that are timed should be alone on the GPU: all but trials.
#
# DATA holds the folders aid and imagenette (train/CLASS/*, val/CLASS/*) and deit_tiny.safetensors (an
# ImageNet-pretrained DeiT-Tiny). MINUTES is the time of the causal runs, 4 by default. TRIALS is the list of
# trials, PROCESSES how many run at once. RESULTS gets what the tables are made of.
set -u # a part that fails does not take the time of the others

root=$(dirname "$0")/..
python=${PYTHON:-python3}
DATA=${DATA:-data} RUNS=${RUNS:-runs} RESULTS=${RESULTS:-results} MINUTES=${MINUTES:-4}
TRIALS=${TRIALS:-$root/experiments/results/subset-trials.json} PROCESSES=${PROCESSES:-4}
export PYTHONPATH="$root/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 OPENBLAS_NUM_THREADS=1
mkdir -p "$RUNS" "$RESULTS"

own_images() { # NAME DATA OPTION...
    name=$1 data=$2
    shift 2
    "$python" "$root/experiments/own_images.py" "$DATA/$data" --out "$RUNS/$name" \
        --init "$DATA/deit_tiny.safetensors" --policies learned learned:8 plus centre-out spiral "$@" &&
        for policy in learned learned-8 plus centre-out spiral; do
            cp "$RUNS/$name/own-images-$policy.json" "$RESULTS/$name-$policy.json"
        done
}

status=0
for part in "$@"; do
    case $part in
    early-exit)
        for core in reencoding causal; do
            "$python" "$root/benchmarks/early_exit.py" --device cuda --core "$core" --scenes 1 --batch 16 64 256 512 1024 --json
        done
        ;;
    trials)
        "$python" "$root/experiments/subsets.py" --data "aid=$DATA/aid/train" "imagenette=$DATA/imagenette/train" \
            --init "$DATA/deit_tiny.safetensors" --work "$RUNS/subsets" --out "$RESULTS/subsets.json" \
            --trials "$TRIALS" --processes "$PROCESSES"
        ;;
    imagenette) own_images imagenette imagenette ;;
    aid-causal) own_images aid-causal aid --core causal --minutes "$MINUTES" ;;
    imagenette-causal) own_images imagenette-causal imagenette --core causal --minutes "$MINUTES" ;;
    aid-actor-critic | imagenette-actor-critic)
        own_images "$part" "${part%-actor-critic}" --core causal --minutes "$MINUTES" --actor-objective actor-critic
        ;;
    *)
        echo "unknown part '$part'" >&2
        exit 2
        ;;
    esac || status=1
done
exit $status
