# Tests against real parts; sourced by `run`.

real_tests() {
  local began=$SECONDS names=() s
  for s in vllm faults clients; do if wants "$s"; then names+=("$s"); fi; done
  if ! wait "$installing"; then
    echo "FAILED: vLLM and the models could not be installed"
    tail -n 20 "$LOGS/install.log" | sed 's/^/    /'
    entry real install 0 1 0 $((SECONDS - began))
    return
  fi
  if wants vllm; then
    # Qwen3, Llama 3.1 and DeepSeek V3 against vLLM's own front end and transformers, without a server.
    check vllm "tokens against transformers" 20 env FOREBAY_TOKENIZERS="$(integration/vllm/model)/tokenizers" \
      FOREBAY_ORACLE_PYTHON="$(integration/vllm/install)/bin/python" FOREBAY_ORACLE_CASES="$([ -n "$full" ] && echo 400 || echo 100)" \
      cargo test --locked --workspace --all-features --test prompt_oracle
  fi
  check build "gateway and tests" 25 cargo build --locked -p forebay-proxy -p forebay-integration
  within "$([ -n "$full" ] && echo 180 || echo 40)" "$CARGO_TARGET_DIR/debug/forebay-integration" \
    test "${names[@]}" ${full:+--full} ${real_args[@]+"${real_args[@]}"} --summary "$LOGS/real.json" 2>&1 | tee "$LOGS/real.log" | grep -v ' passed, ' || true
  if [ -s "$LOGS/real.json" ]; then
    while read -r suite passed failed seconds; do
      entry "$suite" "against real parts" "$passed" "$failed" 0 "$seconds"
    done < <(python3 - "$LOGS/real.json" <<'PY'
import collections, json, sys
total = collections.defaultdict(lambda: [0, 0, 0.0])
for test in json.load(open(sys.argv[1]))["tests"]:
    t = total[test["suite"]]
    t[0 if test["passed"] else 1] += 1
    t[2] += test["seconds"]
for suite, (passed, failed, seconds) in total.items():
    print(suite, passed, failed, int(seconds))
PY
)
  else
    echo "FAILED real: the tests did not finish; the end of $LOGS/real.log:"
    tail -n 20 "$LOGS/real.log" | sed 's/^/    /'
    entry real "did not finish" 0 1 0 $((SECONDS - began))
  fi
}

real_tests
