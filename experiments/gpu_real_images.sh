#!/usr/bin/env bash
# On one GPU: the experiments on real photographs, stage by stage. Data and weights lie in $DATA; writes to $OUT.
#   gpu_real_images.sh aid-search | aid | imagenette-search | imagenette-half | imagenette
set -uo pipefail
export PYTHONPATH=src PYTHONUNBUFFERED=1
stage=$1
runs=$(mktemp -d)
init=$DATA/deit_tiny_patch16_224.fp16.safetensors
# what the searches compare unless TRIALS says otherwise: rates, and a policy that is drawn more greedily
trials='{"recipe": {}, "rate-1e-5": {"training": {"base_lr": 1e-5}}, "tau-30": {"training": {"tau_end": 30.0}}}'
everyone="learned random plus spiral hard no-consistency"
run() {
  # numbers are written after each agent: what ends the run early takes none of them away
  timeout "${LIMIT:-550}" python3 experiments/real_images.py "$@" --init "$init" --out "$runs" --results "$OUT/$stage" 2>"$runs/errors" ||
    tail -c 3000 "$runs/errors"
}
case $stage in
  aid-search)
    run aid --data "$DATA/aid.tar" --hold-out --seeds 3 --trials "${TRIALS:-$trials}" \
      --set '{"training": {"epochs": 10, "tau_epochs": 5}, "teacher": {"epochs": 20}}'
    ;;
  imagenette-search)
    run imagenette --data "$DATA/imagenette-train.tar" --hold-out --seeds 3 --trials "${TRIALS:-$trials}" \
      --set '{"training": {"epochs": 10, "tau_epochs": 5, "averaged_batches": 60}}'
    ;;
  imagenette-half) # long trainings on one half of the images, measured on the other
    run imagenette --data "$DATA/imagenette-train.tar" --hold-out 0.5 --seeds 3 --trials "${TRIALS:-$trials}" \
      --set '{"training": {"epochs": 40, "tau_epochs": 20, "averaged_batches": 60}}'
    ;;
  aid) run aid --data "$DATA/aid.tar" --agents ${AGENTS:-$everyone} --set "${SET:-{\}}" --views "${VIEWS:-{\}}" ;;
  imagenette) run imagenette --data "$DATA/imagenette-train.tar" --agents ${AGENTS:-$everyone} --set "${SET:-{\}}" --views "${VIEWS:-{\}}" \
    --members "${MEMBERS:-1}" ;;
esac
for kept in learned teacher; do
  for folder in "$runs/$kept/half" "$runs/$kept/last"; do
    if [ -d "$folder" ] && [ ! -d "$OUT/$kept" ]; then cp -r "$folder" "$OUT/$kept"; fi
  done
done
cp "$runs/learned/metrics.jsonl" "$OUT/$stage-metrics.jsonl" 2>/dev/null
true
