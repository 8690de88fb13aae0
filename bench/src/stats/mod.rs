//! The statistics of the published run, and how sure their figures are.

mod bootstrap;

pub use self::bootstrap::{Draw, Interval, bootstrap};
pub use forebay_sim::stats::*;
