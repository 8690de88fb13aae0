//! The path of a request, one module per stage.
//!
//! `stack` puts them together: `router` takes each request through peeking, its model's pool (`route`) and its
//! prompt to `retry`, which asks the endpoint that the pool chooses ([`tower_ttft::balance`]) over `client` and
//! another one if `hold` sees no answer. `settle` has the last word on each request; what is known of it on the way
//! is in its `record`. Errors become answers in `rescue` and nowhere else.

pub mod client;
pub mod headers;
pub mod hold;
pub mod models;
pub mod path;
pub mod record;
pub mod reply;
pub mod request_id;
mod rescue;
pub mod retry;
mod route;
mod router;
pub mod settle;
pub mod stack;

pub use self::{
    models::{ModelPool, ModelPoolParams, ModelTarget, Models, PathPolicy, ServedName},
    stack::{HttpMetricFamilies, Limits, Local, Stack, StackParams},
};

/// A request body as engines get it.
pub type RequestBody = tower_ttft::peek::ReplayBody<hyper::body::Incoming>;

/// A response body as clients get it.
pub type Body = http_body_util::combinators::UnsyncBoxBody<bytes::Bytes, tower_ttft::Error>;
