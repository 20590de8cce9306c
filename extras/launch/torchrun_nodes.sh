#!/bin/bash
# Several machines without a scheduler. Run the same command on each machine:
#
#   extras/launch/torchrun_nodes.sh HOST --out /shared/run
#
# HOST is the name or address of one of the machines, as all the others can reach it, with port 29400
# open. Run it in the folder that has run.py. All words after HOST are flags of run.py.
#
#   NODES=2   number of machines. "1:2" means: at least 1, at most 2. When one machine is lost, the
#             others start again from the newest checkpoint (as often as RESTARTS says).
#   GPUS=8    ranks per machine
#   RESTARTS=3
#
# If a machine's own name does not lead to the network between the machines, name the interface and
# the address (see `ip addr`):  GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0 LOCAL_ADDR=10.0.0.1
#
# On a slow network, a larger --accum costs no more traffic, because each step sends its gradients
# once.
#
# torchrun waits 10 minutes for missing machines. To stop the training, send SIGTERM to torchrun on
# any machine: all ranks finish the step, save and stop. This must take less than 30 seconds, because
# torchrun then kills them (torch 2.13 has --shutdown-timeout to change this).
set -eu
host=${1:?HOST is missing: extras/launch/torchrun_nodes.sh HOST [flags of run.py]}
shift

# Without this variable, ranks that were started again would read old addresses, and a machine that
# was lost could not join again (torch 2.13, pytorch issue 135712).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

exec torchrun --nnodes "${NODES:-2}" --nproc-per-node "${GPUS:-8}" \
  --max-restarts "${RESTARTS:-3}" ${LOCAL_ADDR:+--local-addr "$LOCAL_ADDR"} \
  --rdzv-backend c10d --rdzv-id 1 --rdzv-endpoint "$host:29400" run.py "$@"
