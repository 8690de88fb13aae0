//! The `forebay-proxy` command.

fn main() {}
