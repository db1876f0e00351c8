#!/bin/bash
# Train on several machines of a SLURM cluster: `sbatch scripts/slurm.sh out_dir=out/mine model=gpt2_1558m parallel=fsdp`.
# All machines must see this folder, out_dir and the token shards under the same paths. See runtime/README.md.
#SBATCH --job-name=hotswap
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@600
#SBATCH --requeue
#SBATCH --open-mode=append
set -eu

read -r first < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
# After SIGUSR1, 10 minutes before the time limit, the processes have 5 minutes to write a checkpoint
exec srun torchrun \
    --nnodes="$SLURM_JOB_NUM_NODES" --nproc_per_node="$SLURM_GPUS_ON_NODE" \
    --rdzv_backend=c10d --rdzv_id="$SLURM_JOB_ID" --rdzv_endpoint="$first:29500" \
    --max-restarts=3 --signals-to-handle=SIGTERM,SIGUSR1 --shutdown-timeout=300 \
    train.py train.resume=auto runtime.requeue=true "$@"
