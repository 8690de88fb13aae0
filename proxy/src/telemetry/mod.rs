//! What the process says of itself: logs, metrics of the process, panics.

pub mod log;
pub mod panics;
pub mod process;
