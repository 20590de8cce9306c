#!/bin/bash
# SLURM without torchrun: srun starts every rank itself, one per GPU.
#
#   sbatch extras/launch/slurm_srun.sh
#
# Submit it from the folder that has run.py and extras/slurm.py, which translates srun's variables to
# torchrun's (RANK, WORLD_SIZE, MASTER_ADDR, ...). --out must be a folder that all nodes share.
# In your own script, call this before ddp_setup.process_group():
#
#   from extras import slurm
#   slurm.set_launch_env_()
#
# --ntasks-per-node, --gpus-per-node   ranks and GPUs per node: the same number
# --signal=USR1@120   SLURM sends SIGUSR1 to all ranks 120 s before the time limit. They finish the
#                     step, save and stop. (Without torchrun, USR1 and TERM both work.)
# --requeue           after a node failure or `scontrol requeue`, the job starts again and resumes.
# --exclusive         the job has all CPU cores of its nodes; --cpu-bind=none lets each rank use them.
# --open-mode=append  the log of the first start is kept.
#
# The ranks meet at the first node, at a port that is computed from the job's and step's number.
# Set MASTER_ADDR or MASTER_PORT to change this.
#
#SBATCH --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 --exclusive --time=24:00:00
#SBATCH --signal=USR1@120 --requeue --open-mode=append

srun --cpu-bind=none python run.py --out /shared/run
