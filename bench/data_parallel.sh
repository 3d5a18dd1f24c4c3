#!/usr/bin/env bash
# A server on one card and on two, with 32 clients on one, 32 on two and 64 on two. Takes about 100 s on two H200.
#   MODEL, a file or the name of a shape; DEVICES of both; PROMPT and TOKENS of a request; ROUNDS requests a client
set -euo pipefail
model=${MODEL:-llama-8b-Q4_K_S} devices=${DEVICES:-0,1} prompt=${PROMPT:-128} tokens=${TOKENS:-256} rounds=${ROUNDS:-3} n=${CLIENTS:-32}
tmp=$(mktemp -d); server=
trap '[ -z "$server" ] || kill $server 2>/dev/null; rm -rf "$tmp"' EXIT
[ -f "$model" ] || { python3 -m vkback synth "$model" "$tmp/m.gguf" >/dev/null && model=$tmp/m.gguf; }
echo "model made at $SECONDS s"
serve() { # devices
    python3 -m vkback serve -m "$model" --device "$1" --port 0 --parallel "$n" -c "${CTX:-2048}" --max-queue 256 >/dev/null 2>"$tmp/log" & server=$!
    until url=$(grep -o 'Uvicorn running on http://[0-9.:]*' "$tmp/log" | tail -1 | cut -d' ' -f4) && [ -n "$url" ]; do
        kill -0 $server || { tail -20 "$tmp/log"; exit 1; }; sleep 0.2; done
    # of several cards the last line is the front's
    while [ "${1/,/}" != "$1" ] && ! grep -q 'cards: ' "$tmp/log"; do sleep 0.2; done
    sleep 1; url=$(grep -o 'Uvicorn running on http://[0-9.:]*' "$tmp/log" | tail -1 | cut -d' ' -f4)
    echo "server on $1 at $SECONDS s"
}
stop() { kill $server; wait $server 2>/dev/null || true; server=; }
measure() { # clients, what
    timeout 60 python3 -m vkback bench serve --url "$url" --clients "$1" --requests $(($1 * rounds)) --prompt-tokens "$prompt" --max-tokens "$tokens" 2>/dev/null |
        grep '^|' | tail -1 | sed "s/^/$2 /" | tee -a "$tmp/rows"
}
serve "${devices%%,*}"; measure "$n" "one-card"; stop
serve "$devices"; measure "$n" "two-cards"; measure $((2 * n)) "two-cards-2x-clients"
curl -s "$url/metrics" | grep -E '^vkback_(requests_total.*finished|generated_tokens_total|front_)' || true
stop
python3 - "$tmp/rows" <<'P'
import sys
rows = {line.split()[0]: [w.strip() for w in line.split("|")[1:-1]] for line in open(sys.argv[1])}
speed = {name: float(row[5]) for name, row in rows.items()}
for name, t in speed.items():
    print(f"{name:22} {t:9.1f} t/s  {t / speed['one-card']:.2f}x  TTFT {rows[name][6]} ms  TPOT {rows[name][7]} ms  errors {rows[name][2]}")
P
