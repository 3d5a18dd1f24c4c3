#!/usr/bin/env bash
# A server on one card and one on two, both there at once and only one of them asked at a time: N clients on one card, N on two, 2 N on two.
# Before what counts each server answers a round of the same requests, so that programs and kernels are there. About 55 s on two H200.
#   MODEL, a file or the name of a shape; DEVICES of both; CLIENTS (N); PROMPT and TOKENS of a request; ROUNDS requests a client
set -euo pipefail
model=${MODEL:-llama-8b-Q4_K_S} devices=${DEVICES:-0,1} prompt=${PROMPT:-128} tokens=${TOKENS:-128} rounds=${ROUNDS:-3} n=${CLIENTS:-32}
tmp=$(mktemp -d); servers=()
trap '[ ${#servers[@]} = 0 ] || kill "${servers[@]}" 2>/dev/null; wait; rm -rf "$tmp"' EXIT
[ -f "$model" ] || { python3 -m vkback synth "$model" "$tmp/m.gguf" >/dev/null && model=$tmp/m.gguf; }
echo "model made at $SECONDS s"
serve() { # name, devices
    python3 -m vkback serve -m "$model" --device "$2" --port 0 --parallel "$n" -c "${CTX:-2048}" --ctx-per-sequence "${ROWS:-512}" --max-queue 256 \
        >/dev/null 2>"$tmp/$1" & servers+=($!); }
url_of() { # name; the last line is the front's, where there is one
    until [ "$1" = one ] && grep -q 'Uvicorn running' "$tmp/$1" || { [ "$1" = two ] && grep -q '^[0-9]* cards: ' "$tmp/$1" && tail -1 "$tmp/$1" | grep -q 'Uvicorn running'; }; do
        kill -0 "${servers[@]}" || { tail -20 "$tmp/$1" >&2; exit 1; }; sleep 0.2; done
    grep -o 'Uvicorn running on http://[0-9.:]*' "$tmp/$1" | tail -1 | cut -d' ' -f4; }
bench() { # url, clients, rounds
    timeout 60 python3 -m vkback bench serve --url "$1" --clients "$2" --requests $(($2 * $3)) --prompt-tokens "$prompt" --max-tokens "$tokens" --no-warmup 2>/dev/null |
        grep '^|' | tail -1; }
serve one "${devices%%,*}"; serve two "$devices"
one=$(url_of one); two=$(url_of two)
echo "both servers at $SECONDS s"
bench "$one" "$n" 1 >/dev/null & a=$!; bench "$two" $((2 * n)) 1 >/dev/null; wait $a
echo "warm at $SECONDS s"
measure() { bench "$2" "$3" "$rounds" | sed "s/^/$1 /" | tee -a "$tmp/rows"; }
measure one-card "$one" "$n"; measure two-cards "$two" "$n"; measure two-cards-2x-clients "$two" $((2 * n)); measure one-card-again "$one" "$n"
python3 - "$tmp/rows" <<'P'
import sys
rows = {line.split()[0]: [w.strip() for w in line.split("|")[1:-1]] for line in open(sys.argv[1])}
speed = {name: float(row[5]) for name, row in rows.items()}
one = (speed["one-card"] + speed["one-card-again"]) / 2
for name, t in speed.items():
    print(f"{name:22} {t:9.1f} t/s  {t / one:.2f}x  TTFT {rows[name][6]} ms  TPOT {rows[name][7]} ms  errors {rows[name][2]}")
P
