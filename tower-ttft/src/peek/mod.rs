//! Reads what routing needs from a request's body without changing a byte of it.
//!
//! [`PeekLayer`] buffers each body up to a cap and within a [`Budget`] of memory that all requests share, reads it the
//! way vLLM will ([`json`]), and passes on the same request with a [`ReplayBody`] and an [`InferenceRequest`] extension.
//! A body that is too large, encoded or unreadable is passed on all the same, unread: the engine's answer is the answer.

mod body;
mod budget;
mod coerce;
pub mod json;
mod multipart;
mod read;
mod request;
mod service;
mod splice;
#[cfg(test)]
mod testing;

pub use self::{
    body::ReplayBody,
    budget::{Budget, Share},
    read::read,
    request::{Api, BodyRead, InferenceRequest},
    service::{Peek, PeekError, PeekLayer, PeekParams},
    splice::splice,
};
