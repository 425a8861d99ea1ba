#!/bin/bash
# A fit on several nodes: one torchrun agent on each, one process for each GPU. Set PARTS and RUN to folders that all
# nodes can reach, and name the columns of ids after the script:
#   sbatch --export=ALL,PARTS=/shared/parts,RUN=/shared/run deploy/slurm.sh --left user --right item --dim 64
# --requeue starts the job again when a node is lost, and the fit continues from its last checkpoint.
#SBATCH --job-name=gramtower
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

: "${PARTS:?folder of Parquet files}" "${RUN:?folder of the run}"
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

srun --kill-on-bad-exit=1 torchrun \
    --nnodes "$SLURM_NNODES" --nproc-per-node "${PROCESSES:-${SLURM_GPUS_ON_NODE:-1}}" --max-restarts 3 \
    --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$head:${PORT:-29500}" \
    -m gramtower fit "$PARTS" --out "$RUN" "$@"
