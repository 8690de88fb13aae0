# Shared by the scripts here; source it. Sets ROOT and CACHE.
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
CACHE=${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/forebay

say() { printf '%s\n' "$*" >&2; }

# key FILE… - a short key of the files' contents: what is built from them is cached under it.
key() { cat -- "$@" | sha256sum | cut -c1-12; }

# use_target - builds go to one place per set of dependencies and checkout, unless the caller has one: what is compiled
# knows the path of its sources, and cargo takes a build from another checkout for fresh.
use_target() {
  [ -z "${CARGO_TARGET_DIR:-}" ] || return 0
  CARGO_TARGET_DIR=$CACHE/target-$({ cat "$ROOT/Cargo.lock" "$ROOT/rust-toolchain.toml"; echo "$ROOT"; } | key -)
  export CARGO_TARGET_DIR
  mkdir -p "$CARGO_TARGET_DIR"
  touch "$CARGO_TARGET_DIR"
}

# publish TMP DEST - moves a finished directory into place, whole or not at all.
publish() { touch "$1/.complete" && mv -T "$1" "$2"; }

# prune PREFIX KEEP… - removes cache entries of one kind but those named and the youngest other one.
prune() {
  local prefix=$1 dir keep spared=; shift
  # shellcheck disable=SC2012 # the names are ours: a prefix and a hexadecimal key
  for dir in $(ls -dt "$CACHE/$prefix"-* 2>/dev/null); do
    for keep in "$@"; do [ "$dir" != "$keep" ] || continue 2; done
    if [ -z "$spared" ]; then spared=$dir; continue; fi
    rm -rf "$dir"
  done
}

# with_lock NAME COMMAND… - one at a time on this machine.
with_lock() {
  local name=$1; shift
  mkdir -p "$CACHE"
  ( flock 9; "$@" ) 9>"$CACHE/.lock-$name"
}

# find_python - a Python that vLLM runs on and that can make virtual environments.
find_python() {
  local p
  for p in ${PYTHON:+"$PYTHON"} "${HOME:-/root}"/.pyenv/versions/3.12.*/bin/python3.12 python3.12 python3.13 python3.11 python3; do
    if "$p" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1; then
      "$p" -c 'import sys; print(sys.executable)'
      return
    fi
  done
  say "no Python 3.11 to 3.13 with venv: install python3 and python3-venv, or name one in \$PYTHON"
  return 1
}
