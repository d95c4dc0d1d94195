#!/usr/bin/env bash
# What must be known of a GPU, in under six minutes: equal bits, throughput beside other systems,
# latency at an offered load, memory drift. Usage, from a clone after `make env`:
#
#   bench/gpu.sh FOLDER [MODEL]
#
# Results are JSON files in FOLDER, beside what each step said. Uses no network: MODEL (default:
# the packaged one) must be on this machine. Exit status 1 if a step failed or ran out of time.
set -uo pipefail

folder=${1:?usage: bench/gpu.sh FOLDER [MODEL]}
model=${2:-smollm2}
mkdir -p "$folder" || exit 2
folder=$(cd "$folder" && pwd)
cd "$(dirname "$0")/.." || exit 2

python=${PYTHON:-.venv/bin/python}
if ! "$python" -c 'import processor, torch' 2>"$folder/environment.log"; then
    echo "bench/gpu.sh: no environment in .venv: run \`make env\` first" >&2
    exit 2
fi
if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "bench/gpu.sh: torch sees no GPU here; the figures are this CPU's" >&2
fi

export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 PYTHONUNBUFFERED=1
export PROCESSOR_MODEL__SOURCE=$model
failed=()

# step NAME SECONDS COMMAND...: standard output and error go to NAME.log
step() {
    local name=$1 limit=$2 begun=$SECONDS status
    shift 2
    timeout --kill-after=5 "$limit" "$@" >"$folder/$name.log" 2>&1
    status=$?
    if [ "$status" -eq 0 ]; then
        echo "$name: $((SECONDS - begun)) s"
    else
        failed+=("$name")
        [ "$status" -eq 124 ] && echo "$name: stopped after $limit s" >>"$folder/$name.log"
        echo "$name: FAILED (status $status), see $folder/$name.log:" >&2
        tail -n 5 "$folder/$name.log" >&2
    fi
}

processor=$(dirname "$python")/processor
step self-check 60 bash -c 'exec "$0" engine self-check --events 2000 --references 20 --json >"$1"' \
    "$processor" "$folder/self-check.json"
step bench 130 "$processor" bench --prefix 2000 --suffix 150 --batch 1,4,16,32 --rounds 9 \
    --json "$folder/bench.json" --plot "$folder/bench.png"
step load 60 "$python" -m processor.bench.load --rate 780 --events 20000 \
    --json "$folder/load.json"
step drift 90 "$python" -m processor.bench.drift --events 100000 --json "$folder/drift.json"

if [ ${#failed[@]} -gt 0 ]; then
    echo "gpu.sh: ${#failed[@]} of 4 steps failed: ${failed[*]}; results in $folder"
    exit 1
fi
echo "gpu.sh: all 4 steps done in $SECONDS s; $(tail -n 1 "$folder/load.log"); results in $folder"
