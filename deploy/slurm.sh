#!/usr/bin/env bash
# Train on the nodes of a SLURM cluster, one process a node with all GPUs that the node gives:
#
#   sbatch --nodes 2 --gpus-per-node 4 deploy/slurm.sh mine.yaml --learning-rate 1e-4
#
# The processes find each other through SLURM's variables. The job is put back into the queue, and then resumes, where
# its time is up (SIGTERM comes two minutes earlier: status 75) or a node is lost (69). The run directory, the model and
# the rows lie where every node sees them; PYTHON names the interpreter, if not the PATH's.
#SBATCH --job-name=zagora-jax
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --time=08:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=zagora-%j.log
set -uo pipefail

# Proxies would stand between the processes.
unset http_proxy https_proxy HTTP_PROXY HTTPS_PROXY

resume=()
if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then
    resume=(--resume)
fi

srun --kill-on-bad-exit=0 "${PYTHON:-python}" -m zagora_jax.train "$@" "${resume[@]}"
status=$?
case $status in
    69 | 75)
        echo "status $status: back into the queue, to resume"
        scontrol requeue "$SLURM_JOB_ID"
        ;;
esac
exit $status
