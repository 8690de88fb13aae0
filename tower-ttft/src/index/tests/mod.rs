//! Tests of the index as a whole.

mod cases;
mod fuzz;
mod model;
mod threads;
