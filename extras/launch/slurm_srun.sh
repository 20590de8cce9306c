#!/bin/bash
# SLURM without torchrun: srun starts every rank itself, one per GPU.
#
#   sbatch extras/launch/slurm_srun.sh
#
# Submit it from the folder that has run.py. --out must be a folder that all nodes share. Each node
# must have the same number of ranks.
#
# --ntasks-per-node, --gpus-per-node   ranks and GPUs per node: the same number
# --signal=USR1@120   SLURM sends SIGUSR1 to all ranks 120 s before the time limit. They finish the
#                     step, save and stop. (Without torchrun, USR1 and TERM both work.)
# --requeue           after a node failure or `scontrol requeue`, the job starts again and resumes.
# --exclusive         the job has all CPU cores of its nodes; --cpu-bind=none lets each rank use them.
# --open-mode=append  the log of the first start is kept.
#
#SBATCH --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 --exclusive --time=24:00:00
#SBATCH --signal=USR1@120 --requeue --open-mode=append

# The ranks meet at the first node, at a port that depends on the job.
export MASTER_ADDR=$(scontrol show hostnames | head -n 1)
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))

# Each rank translates SLURM's variables into those of torchrun. "8(x2)" means 8 tasks on 2 nodes.
srun --cpu-bind=none bash -c '
  export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID
  export WORLD_SIZE=$SLURM_STEP_NUM_TASKS LOCAL_WORLD_SIZE=${SLURM_STEP_TASKS_PER_NODE%%[(,]*}
  exec python run.py "$@"
' - --out /shared/run
