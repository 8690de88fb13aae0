//! A scripted vLLM, a gateway in front of it, and clients that look closely.

pub mod answer;
pub mod client;
pub mod engine;
pub mod gateway;

pub use self::{
    answer::*,
    client::{Answer, Http, RawClient, get, post, send},
    engine::{FakeEngine, Seen, Step, within},
    gateway::{Gateway, Setup, add},
};
