//! The data plane of Forebay: an inference-aware gateway.

pub mod admin;
pub mod app;
pub mod cli;
pub mod config;
pub mod http;
pub mod server;
pub mod telemetry;
