//! The path of a request against a scripted vLLM.
#![allow(
    unreachable_pub,
    reason = "the words of tests are for the tests of this crate"
)]

#[path = "../support/mod.rs"]
mod support;

#[path = "../app/mod.rs"]
mod app;
mod chaos;
mod client;
mod failures;
mod gone;
mod lessons;
mod odd;
mod quiet;
mod streams;
