//! How a pool chooses.

pub mod duration;
mod kinds;
mod spec;

pub use self::{
    kinds::{Contender, Policy, Sample, choose, policy},
    spec::{PolicySpec, Routing, SpecError},
};

pub(crate) use self::kinds::{FEWER_OF_TWO, LEAST_WORK};
