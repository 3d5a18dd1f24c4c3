#!/usr/bin/env bash
# How much quicker four workers sweep than one: the same tasks, four seconds of search each, four threads of llvmpipe a worker, cold caches.
# For a machine with 16 cores or more and lavapipe as a Vulkan driver. Prints seconds, and points that were timed in each.
set -euo pipefail
tmp=$(mktemp -d); trap 'rm -rf "$tmp"' EXIT
tasks=${TASKS:-16} share=${SHARE:-4} one=${ONE:-1} many=${MANY:-4}
quants=Q4_0,Q8_0,Q2_K,Q3_K,Q4_K,Q5_K,Q6_K,IQ4_XS
export LP_NUM_THREADS=${THREADS:-4} XDG_CACHE_HOME=
sweep() { # workers
    export VKBACK_TUNING=$tmp/t$1 VKBACK_CACHE=$tmp/c$1
    python3 -m vkback tune --quant "$quants" --shape "${SHAPES:-512x1024,1024x512}" --budget $((tasks * share / $1)) --workers "$1" --json 2>"$tmp/err$1" >"$tmp/out$1" ||
        { tail -20 "$tmp/err$1"; exit 1; }
    python3 -c 'import json, sys; d = json.load(open(sys.argv[1])); print(sys.argv[2], "workers:", round(d["seconds"], 1), "s with their start,",
        round(d["working_s"], 1), "s of work,", d["points"], "points,", sum(len(x["results"]) for x in d["devices"]), "tasks")' "$tmp/out$1" "$1"
}
sweep "$one"
sweep "$many"
python3 -c 'import json, sys; a, b = (json.load(open(f)) for f in sys.argv[1:3])
print("speedup", round(a["working_s"] / b["working_s"], 2), "of the work,", round(a["seconds"] / b["seconds"], 2), "of the command;",
      "points a second", round(a["points"] / a["working_s"], 2), "->", round(b["points"] / b["working_s"], 2),
      "=", round(b["points"] / b["working_s"] / (a["points"] / a["working_s"]), 2))' "$tmp/out$one" "$tmp/out$many"
