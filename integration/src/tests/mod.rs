//! The tests, in the order in which they run: those that share engines stand together.

use crate::suite::Test;

pub mod client_gone;
pub mod clients;
pub mod death;
pub mod driver;
pub mod faults;
pub mod prediction;
pub mod residency;
pub mod routing;
pub mod tokens;

/// All tests of all suites.
pub fn all() -> Vec<Test> {
    [
        tokens::tests(),
        residency::tests(),
        routing::tests(),
        prediction::tests(),
        faults::tests(),
        client_gone::tests(),
        death::tests(),
        clients::tests(),
    ]
    .concat()
}
