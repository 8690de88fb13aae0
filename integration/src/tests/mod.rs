//! The tests, in the order in which they run: those that share engines stand together.

use crate::suite::Test;

pub mod clients;
pub mod driver;
pub mod faults;
pub mod residency;
pub mod tokens;

/// All tests of all suites.
pub fn all() -> Vec<Test> {
    [
        tokens::tests(),
        residency::tests(),
        faults::tests(),
        clients::tests(),
    ]
    .concat()
}
