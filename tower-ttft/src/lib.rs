//! Tower layers that send each LLM request to the engine where its first token comes soonest.
//!
//! The path of a request through this crate, top to bottom:
//!
//! 1. [`peek`] buffers the body up to a cap, reads what routing needs and changes no byte of it;
//! 2. [`prompt`] turns the request into tokens and a [`chain::Chain`] of prefix keys;
//! 3. [`balance`] asks the [`pool::Pool`] for an endpoint (waiting in [`queue`] while there is none) and sends;
//! 4. [`observe`] watches the answer for its first token, its usage and its end.
//!
//! Beside the path, [`index`] knows which endpoint holds which blocks, [`load`] what work is ahead at each, and
//! [`predict`] turns both into a predicted time to first token (TTFT) that a [`policy`] prices.
//!
//! The crate holds mechanisms only: HTTP, tower and tokens. It knows no Kubernetes and no gRPC. All clocks are
//! [`tokio::time`], all randomness and hash seeds are injected, so that everything runs in paused virtual time.

pub mod balance;
pub mod chain;
pub mod endpoint;
pub mod events;
pub mod index;
pub mod load;
pub mod observe;
pub mod peek;
pub mod policy;
pub mod pool;
pub mod predict;
pub mod prompt;
pub mod queue;
#[cfg(feature = "vllm")]
pub mod vllm;

/// The error type between layers.
pub type Error = Box<dyn std::error::Error + Send + Sync>;
