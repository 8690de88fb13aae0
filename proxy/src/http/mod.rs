//! The path of a request, one module per stage.

pub mod client;
pub mod headers;
pub mod models;
pub mod path;
pub mod request_id;
pub mod stack;

pub use self::{
    models::{ModelPool, ModelPoolParams, Models, PathPolicy},
    stack::{Limits, Local, Stack, StackParams},
};

/// A response body as clients get it.
pub type Body = http_body_util::combinators::UnsyncBoxBody<bytes::Bytes, tower_ttft::Error>;
