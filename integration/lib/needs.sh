# Which commands must be there, and which Debian packages have them; source it.

package_of() {
  case $1 in
    cargo) echo "rustup (https://rustup.rs)" ;;
    readelf) echo binutils ;;
    flock | setpriv) echo util-linux ;;
    sha256sum) echo coreutils ;;
    python3) echo "python3 python3-venv" ;;
    *) echo "$1" ;;
  esac
}

# need COMMAND… - says what is missing and where it comes from.
need() {
  local c missing=()
  for c in "$@"; do command -v "$c" >/dev/null || missing+=("$c"); done
  [ ${#missing[@]} -gt 0 ] || return 0
  for c in "${missing[@]}"; do say "missing: $c (package: $(package_of "$c"))"; done
  exit 69
}
