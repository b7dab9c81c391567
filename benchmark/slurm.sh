#!/bin/bash
# Two hosts of eight GPUs under Slurm:
#   sbatch benchmark/slurm.sh --config configs/cuda.yaml --num-envs 16384 --minibatch-size 65536 --total-timesteps 480_000_000 --checkpoint-interval 20
# One torchrun per host; they meet at the first. The job's number names the run's folder, on storage that the hosts share,
# because after a restart any of them may be the one that reads the checkpoint. A requeued job goes on where it was.
#SBATCH --job-name=ppo_lstm_puffer_ddp
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@120
set -euo pipefail

HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export HEAD
# shellcheck disable=SC2016  (expanded on each host)
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 bash -c '
    is_host=$([ "$SLURM_NODEID" = 0 ] && echo 1 || echo 0)
    exec .venv/bin/python -m torch.distributed.run \
        --nnodes="$SLURM_NNODES" --nproc-per-node="$SLURM_GPUS_ON_NODE" --max-restarts=3 \
        --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$HEAD:$((20000 + SLURM_JOB_ID % 10000))" --rdzv-conf=is_host="$is_host" \
        ppo_lstm_puffer_ddp.py "$@"
' ppo "$@"
