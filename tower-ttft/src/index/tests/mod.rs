//! Tests of the index as a whole.

mod fuzz;
mod model;
