# Counts and times what the suites do; source it. One line for each check; the output of those that fail.

PASSED=0 FAILED=0 LEFT_OUT=0
# Tests that may be left out by the tests themselves (#[ignore] or a missing part): none.
LEFT_OUT_CAP=0
# Seconds that a run of the fast tier may take in all, whatever hangs.
RUN_LIMIT=4500

report_start() {
  TIER=${1#--}
  [ "$TIER" = fast ] || RUN_LIMIT=14400
  LOGS=$CACHE/logs-$$
  rm -rf "$LOGS"
  mkdir -p "$LOGS"
  prune logs "$LOGS"
  ENTRIES=$LOGS/entries.jsonl
  : > "$ENTRIES"
}

# entry SUITE NAME PASSED FAILED LEFT_OUT SECONDS
entry() {
  printf '{"suite": "%s", "name": "%s", "passed": %d, "failed": %d, "left_out": %d, "seconds": %d}\n' "$@" >> "$ENTRIES"
  PASSED=$((PASSED + $3)) FAILED=$((FAILED + $4)) LEFT_OUT=$((LEFT_OUT + $5))
}

# within MINUTES COMMAND… - runs it for at most that long, and no longer than the whole run has left.
within() {
  local limit=$(($1 * 60)) left=$((RUN_LIMIT - SECONDS)); shift
  # In the foreground, so that Ctrl-C reaches the command too.
  timeout --foreground --kill-after=10 $((left < 10 ? 10 : left < limit ? left : limit)) "$@"
}

# check SUITE NAME MINUTES COMMAND… - one check: passes if the command succeeds within so many minutes.
check() {
  local suite=$1 name=$2 limit=$3 began=$SECONDS log took; shift 3
  log=$LOGS/$suite-${name// /-}.log
  if within "$limit" "$@" > "$log" 2>&1; then
    took=$((SECONDS - began))
    echo "ok $suite: $name ($took s)"
    entry "$suite" "$name" 1 0 0 "$took"
  else
    took=$((SECONDS - began))
    echo "FAILED $suite: $name ($took s): $*"
    tail -n 40 "$log" | sed 's/^/    /'
    entry "$suite" "$name" 0 1 0 "$took"
  fi
}

report_end() {
  local file=${FOREBAY_SUMMARY:-$CACHE/summary.json} not_run=() s
  for s in "${ALL[@]}"; do wants "$s" || not_run+=("$s"); done
  if [ "$LEFT_OUT" -gt "$LEFT_OUT_CAP" ]; then
    echo "FAILED: $LEFT_OUT tests were left out, at most $LEFT_OUT_CAP may be"
    FAILED=$((FAILED + 1))
  fi
  python3 - "$ENTRIES" "$LOGS" "$file" <<PY
import json, pathlib, sys
entries, logs, out = map(pathlib.Path, sys.argv[1:])
real = logs / "real.json"
json.dump({
    "commit": "$(git -C "$ROOT" rev-parse HEAD 2>/dev/null || echo unknown)",
    "tier": "$TIER", "seconds": $SECONDS,
    "passed": $PASSED, "failed": $FAILED, "left_out": $LEFT_OUT,
    "not_run": "${not_run[*]-}".split(),
    "entries": [json.loads(l) for l in entries.read_text().splitlines()],
    "real": json.loads(real.read_text()) if real.exists() else None,
}, out.open("w"), indent=1)
PY
  echo
  [ ${#not_run[@]} -eq 0 ] || echo "not run: ${not_run[*]}"
  echo "left out: $LEFT_OUT; ${SECONDS} s; logs in $LOGS, summary in $file"
  echo "$PASSED passed, $FAILED failed"
  [ "$FAILED" -eq 0 ]
}
