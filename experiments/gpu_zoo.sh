#!/bin/sh
# All runs behind docs/zoo.md on one GPU, in parts that take less than ten minutes each.
#
#   DATA=data RUNS=runs RESULTS=results sh experiments/gpu_zoo.sh PART... [-- SECONDS]
#
# PART is one of: ram, digits-1, digits-2, aid-1, aid-2, aid-3, aid-stam, imagenette-1, imagenette-2, imagenette-3,
# imagenette-stam.
# SECONDS is the training time of each system on photographs, 40 by default. RAM_SECONDS is RAM's on digits.
# ZOO_OPTIONS are more options of experiments/zoo.py, such as '--epochs 1 --device cpu' for a try.
#
# DATA holds mnist.npz, aid.tar, imagenette-train.tar, imagenette-val.tar and deit_tiny.safetensors (an
# ImageNet-pretrained DeiT-Tiny), and pictures *.jpg to draw the systems with, if there are any.
# RESULTS gets one archive for each data set, written again after each system. A part that was cut short can
# be given again with the same RUNS: what has a result is left out.
set -u # a part that fails does not take the time of the others

root=$(dirname "$0")/..
python=${PYTHON:-python3}
DATA=${DATA:-data} RUNS=${RUNS:-runs} RESULTS=${RESULTS:-results}
export PYTHONPATH="$root/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
mkdir -p "$RUNS" "$RESULTS"

parts="" seconds=40 status=0
while [ $# -gt 0 ]; do
    if [ "$1" = "--" ]; then
        seconds=$2
        break
    fi
    parts="$parts $1"
    shift
done

digits() { # SYSTEM:SECONDS...
    # shellcheck disable=SC2086  # options are words
    "$python" "$root/experiments/zoo.py" "$DATA/mnist.npz" --out "$RUNS/clutter" \
        --pack "$RESULTS/clutter.tar.gz" ${ZOO_OPTIONS:-} --systems "$@"
}

photographs() { # NAME FILES SYSTEM... [--agents AGENT]
    name=$1 files=$2
    shift 2
    pictures=$(find "$DATA" -maxdepth 1 -name '*.jpg')
    # shellcheck disable=SC2086  # options are words, and a path of data has no blanks
    "$python" "$root/experiments/zoo.py" "$DATA/$files" --out "$RUNS/$name" --init "$DATA/deit_tiny.safetensors" \
        --pack "$RESULTS/$name.tar.gz" --seconds "$seconds" ${pictures:+--pictures $pictures} \
        ${ZOO_OPTIONS:-} --systems "$@"
}

stam() { # NAME FILES MINUTES BATCH
    "$python" "$root/experiments/own_images.py" "$DATA/$2" --out "$RUNS/stam-$1" --init "$DATA/deit_tiny.safetensors" \
        --core causal --actor-objective actor-critic --minutes "$3" --set "{\"training\": {\"batch_size\": $4}}" &&
        cp "$RUNS/stam-$1/own-images-learned.json" "$RUNS/$1/stam.json"
}

for part in $parts; do
    case $part in
    ram) digits ram:"${RAM_SECONDS:-420}" ;;
    digits-1) digits dram:100 gfnet:100 tnet:100 ;;
    digits-2) digits stn:60 stn-even patchdrop:80 saccader:80 ;;
    aid-1) photographs aid aid.tar gfnet tnet dram ;;
    aid-2) photographs aid aid.tar patchdrop stn ;;
    aid-3) photographs aid aid.tar saccader ram --agents aid-tiny ;;
    aid-stam) stam aid aid.tar 1.05 120 ;;
    imagenette-1) photographs imagenette 'imagenette-*.tar' gfnet tnet dram ;;
    imagenette-2) photographs imagenette 'imagenette-*.tar' patchdrop stn ;;
    imagenette-3) photographs imagenette 'imagenette-*.tar' saccader ram --agents imagenette-tiny ;;
    imagenette-stam) stam imagenette 'imagenette-*.tar' 1.1 176 ;;
    *)
        echo "unknown part '$part'" >&2
        exit 2
        ;;
    esac || status=1
done
exit $status
