#!/bin/bash
# SLURM with torchrun: one torchrun per node, which starts one rank per GPU.
#
#   sbatch --gpus-per-node 8 extras/launch/slurm_torchrun.sh
#
# Submit it from the folder that has run.py. --out must be a folder that all nodes share.
#
# --signal=TERM@120   SLURM sends SIGTERM 120 s before the time limit. The ranks finish the step, save
#                     and stop. torchrun's agent kills its workers 30 s after SIGTERM; torch 2.13 has
#                     --shutdown-timeout to change this. Do not use USR1 here: the agent does not
#                     handle it and just ends.
# --requeue           after a node failure or `scontrol requeue`, the job starts again and resumes.
# --exclusive         the job has all CPU cores of its nodes; --cpu-bind=none lets each rank use them.
# --open-mode=append  the log of the first start is kept.
#
#SBATCH --nodes=2 --ntasks-per-node=1 --exclusive --time=24:00:00
#SBATCH --signal=TERM@120 --requeue --open-mode=append

# All agents meet at the first node of the job, at port 29400.
srun --cpu-bind=none torchrun --nnodes $SLURM_NNODES --nproc-per-node ${SLURM_GPUS_ON_NODE:-1} \
  --rdzv-backend c10d --rdzv-id $SLURM_JOB_ID \
  --rdzv-endpoint $(scontrol show hostnames | head -n 1):29400 run.py --out /shared/run
