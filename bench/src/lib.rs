//! The published experiments and micro-benchmarks.
//!
//! A benchmark is a module with a `run` that fills a [`report::Report`]; the binary names it and prints the report.

pub mod crew;
pub mod decision;
pub mod grid;
pub mod index;
pub mod overhead;
pub mod plot;
pub mod prediction;
pub mod report;
pub mod stack;
pub mod stats;
pub mod world;
pub mod worlds;

pub use forebay_sim::load;

/// The error of a benchmark that could not run.
pub type Error = Box<dyn std::error::Error + Send + Sync>;
