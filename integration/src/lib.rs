//! Tests of Forebay against real parts: vLLM engines, the OpenAI Python client, curl.
//!
//! [`engine`], [`gateway`], [`tap`] and [`throttle`] are the parts; [`lab`] shares what is expensive; [`suite`] runs
//! [`tests`] and reports. `integration/README.md` says how to add one.

pub mod blackhole;
pub mod cache;
pub mod engine;
pub mod fake;
pub mod gateway;
pub mod http;
pub mod lab;
pub mod paths;
pub mod process;
pub mod raw;
pub mod sockets;
pub mod suite;
pub mod tap;
pub mod tests;
pub mod throttle;
