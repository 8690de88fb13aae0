# Format, lints and the promises of the house; sourced by `run`.

check quality "format" 2 cargo fmt --all --check
check quality "lints" 20 cargo clippy --locked --workspace --all-features --all-targets -- -D warnings
# What one crate needs must not come from another one's features.
while read -r package features; do
  check quality "alone $package ${features:-default}" 10 \
    cargo check --locked -q -p "$package" ${features:+--no-default-features} ${features:+--features "${features#none}"}
done < <(integration/quality/crates_alone.py)
check quality "documentation" 10 env RUSTDOCFLAGS="-D warnings" cargo doc --locked --no-deps --workspace --all-features
check quality "licences and dependencies" 5 integration/quality/cargo-deny check bans licenses sources
check quality "house" 2 integration/quality/house.py
