#!/usr/bin/env bash
# Train on every host of a Cloud TPU slice, from the machine that has gcloud and this repository:
#
#   TPU=my-v5e-16 ZONE=us-west4-a MODEL=/mnt/models/Qwen2.5-0.5B-Instruct RUNS=/mnt/runs bash launch/tpu_pod.sh
#
# Change: the keys at the end, and python3.11 to what the hosts have (3.11 to 3.13). MODEL and RUNS must be the same folders on
# every host (NFS, Filestore or a mounted bucket): each host reads its part of the weights there, and writes its part of a
# checkpoint. The same command again continues the run.
set -euo pipefail
: "${TPU:?name of the TPU VM}" "${ZONE:?its zone}" "${MODEL:?Hugging Face folder, seen by every host}" "${RUNS:?folder of runs, seen by every host}"

gcloud compute tpus tpu-vm ssh "$TPU" --worker=all --zone="$ZONE" --command "mkdir -p pods_jax"
gcloud compute tpus tpu-vm scp --recurse --worker=all --zone="$ZONE" pods_jax configs pyproject.toml README.md "$TPU":pods_jax/
gcloud compute tpus tpu-vm ssh "$TPU" --worker=all --zone="$ZONE" --command "
  set -e
  cd pods_jax
  python3.11 -m venv .venv
  .venv/bin/pip install --quiet --editable '.[tpu]'
  .venv/bin/python -m pods_jax.train \
    --mesh.distributed true --mesh.fsdp -1 --mesh.tensor 2 \
    --run.name gsm8k --run.dir '$RUNS' \
    --model.path '$MODEL' --model.compute_dtype bfloat16 \
    --data.task gsm8k --data.prompts_per_step 32 --data.max_prompt_length 256 \
    --rollout.n 64 --rollout.max_completion_length 1024 --selection.m 16 \
    --update.micro_batch 128 --update.remat layer
"
