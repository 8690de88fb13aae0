//! A scripted vLLM and what tests say with it.

pub mod answer;
pub mod engine;

pub use self::{
    answer::*,
    engine::{FakeEngine, Seen, Step, within},
};
