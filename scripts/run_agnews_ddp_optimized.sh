#!/bin/bash
# Written by: frameworm slurm --config configs/ag_news_ddp_4gpu_20ep_optimized.yaml --nodes 1 --gpus-per-node 4 --time 4:00:00
# Submit it from the folder that its paths start from: sbatch THIS_FILE
#SBATCH --job-name=ag_news_ddp_4gpu_20ep_optimized
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=32
#SBATCH --gpus-per-node=4
#SBATCH --time=4:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out

set -euo pipefail

step=""
told=0
# SLURM tells this script alone that the time is almost over; srun passes the signal on, and training saves and ends.
stop() {
  told=1
  echo "$(date '+%F %T') the job's time is almost over: saving"
  if [ -n "$step" ]; then kill -USR1 "$step" 2>/dev/null || true; fi
}
trap stop USR1

# One run folder per job: after a requeue the job has the same number and goes on there.
run="runs/ag_news_ddp_4gpu_20ep_optimized-$SLURM_JOB_ID"
logs="logs/ag_news_ddp_4gpu_20ep_optimized-$SLURM_JOB_ID/attempt-${SLURM_RESTART_COUNT:-0}"
mkdir -p runs "$logs"

# Left in the submitting shell, these would tell the workers of another job's ranks.
unset RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE NODE_RANK GROUP_RANK MASTER_ADDR MASTER_PORT

if ! command -v frameworm >/dev/null; then
  echo "frameworm is not on the PATH: activate its environment before sbatch, or write the script with --venv" >&2
  exit 2
fi

cpus="${SLURM_CPUS_PER_TASK:-1}"
threads=$((cpus / 4))
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}"

# The workers meet on the first node, at the address that SLURM itself uses for it. The port follows from the job's
# number and attempt, and moves on if something else on this node listens there.
first="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)"
address="$(scontrol show node "$first" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')"
export MASTER_ADDR="${address:-$first}"
port=$((20000 + (SLURM_JOB_ID * 31 + ${SLURM_RESTART_COUNT:-0}) % 12768))
while (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do port=$((port + 1)); done
export MASTER_PORT="$port"

echo "$(date '+%F %T') job $SLURM_JOB_ID, attempt ${SLURM_RESTART_COUNT:-0}, on $SLURM_JOB_NODELIST"
echo "run folder $run, logs $logs"
srun --cpus-per-task="$cpus" --wait=120 \
  frameworm train --config configs/ag_news_ddp_4gpu_20ep_optimized.yaml \
  --out "$run" --resume auto --log-dir "$logs" \
  --distributed --nproc-per-node 4 --stop-grace 100 &
step=$!
if [ "$told" = 1 ]; then kill -USR1 "$step" 2>/dev/null || true; fi
tail -n +1 -s 0.3 -F --pid="$step" "$logs/rank-00000.log" 2>/dev/null &
shown=$!

# A signal interrupts wait, which then has to be called again for the step's own exit code.
while kill -0 "$step" 2>/dev/null; do wait "$step" || true; done
code=0
wait "$step" || code=$?
while kill -0 "$shown" 2>/dev/null; do wait "$shown" || true; done

if [ "$told" = 1 ] && { [ "$code" -eq 75 ] || [ "$code" -eq 138 ]; }; then
  # 75: saved. 138: the signal came before there was anything to save.
  echo "$(date '+%F %T') stopped in time: back into the queue"
  if scontrol requeue "$SLURM_JOB_ID"; then exit 0; fi
  echo "the job cannot be requeued; continue by hand with: --out $run --resume auto" >&2
elif [ "$code" -ne 0 ]; then
  { grep -lE 'Traceback|Error|^frameworm: ' "$logs"/rank-*.log 2>/dev/null || true; } | head -n 4 |
    while IFS= read -r file; do
      if [ "$file" != "$logs/rank-00000.log" ]; then echo "last lines of $file:"; tail -n 15 "$file"; fi
    done >&2 || true
fi
exit "$code"
