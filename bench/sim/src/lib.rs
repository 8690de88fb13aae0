//! A simulated vLLM pod.
//!
//! A [`Pod`] is plain data: the scheduler of vLLM (first come, first served, chunked prefill within a token budget), a
//! paged KV cache with prefix reuse, and a formula for the time of a step. It has no clock and no tasks; whoever drives it
//! says what time it is, in seconds from the run's start. Cloning one forks the world, which is how [`Pod::ttft`] knows
//! the exact time to first token that a request would see.
//!
//! The numbers of a pod are in a [`PodSpec`]; `pods.yaml` holds the kinds that come with the crate. What clients of the
//! published experiment send is in [`load`], and its statistics are in [`stats`]. The module `server` (feature `server`)
//! puts a pod behind the HTTP API and the KV events of vLLM, over sockets or in memory.

mod blocks;
mod dice;
mod job;
pub mod load;
mod output;
mod pod;
mod prompt;
#[cfg(feature = "server")]
pub mod server;
mod spec;
pub mod stats;
pub mod tokenizer;
mod words;

pub use self::{
    dice::Dice,
    output::{KvChange, Output, Stored},
    pod::{Arrival, Load, Pod},
    prompt::Prompt,
    spec::{Hiccups, PodSpec, SpecError},
    words::Words,
};
