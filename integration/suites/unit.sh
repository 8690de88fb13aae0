# Unit and property tests; sourced by `run`.

unit() {
  local began=$SECONDS log=$LOGS/unit.log ok=1 passed failed left
  # The tests against vLLM's own front end need vLLM: the suite `vllm` runs them.
  within 25 cargo test --locked --workspace --all-features --no-fail-fast -- \
    --skip ids_are_vllms --skip segments_are_exact_with_real_tokenizers > "$log" 2>&1 || ok=0
  read -r passed failed left < <(awk '/^test result: /{p+=$4; f+=$6; i+=$8} END {print p+0, f+0, i+0}' "$log")
  if [ "$ok" = 0 ]; then
    grep -E '^error|^test .* FAILED$|panicked at' -A 6 "$log" | head -n 80 | sed 's/^/    /'
    [ "$failed" -gt 0 ] || { failed=1; tail -n 15 "$log" | sed 's/^/    /'; }
  fi
  echo "$([ "$failed" = 0 ] && echo ok || echo FAILED) unit: $passed passed, $failed failed, $left ignored ($((SECONDS - began)) s)"
  entry unit "cargo test" "$passed" "$failed" "$left" $((SECONDS - began))
}

unit
