//! The data plane of Forebay: an inference-aware gateway.

pub mod config;
pub mod http;
pub mod server;
