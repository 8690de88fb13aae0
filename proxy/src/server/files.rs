//! The limit of open files: every client connection takes one, and every request under way one more to its engine.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Files that are not connections of the data path: listeners, event sockets, scrapes, logs, epoll.
const RESERVED: u64 = 128;

/// Where the kernel gives no limit: more connections than one process should have.
const UNLIMITED: u64 = 1 << 20;

/// Open files that this process may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenFiles {
    /// The limit now.
    pub limit: u64,
    /// The limit before it was raised.
    pub was: u64,
}

// === impl OpenFiles ===

impl OpenFiles {
    /// Raises the soft limit to the hard one, as servers may, and says what it is.
    pub fn raise() -> Self {
        let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
        let was = current.unwrap_or(UNLIMITED);
        if current != maximum {
            let raised = Rlimit {
                current: maximum,
                maximum,
            };
            // Refused: then the soft limit stays, and it is what counts.
            let _ = setrlimit(Resource::Nofile, raised);
        }
        Self {
            limit: getrlimit(Resource::Nofile).current.unwrap_or(UNLIMITED),
            was,
        }
    }

    /// Client connections, and requests under way, that fit: one file for each side.
    pub fn connections(&self) -> usize {
        let each = self.limit.saturating_sub(RESERVED) / 2;
        usize::try_from(each.clamp(16, UNLIMITED)).unwrap_or(usize::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_fits() {
        for (limit, connections) in [(1024, 448), (128, 16), (0, 16), (65_536, 32_704)] {
            assert_eq!(
                OpenFiles { limit, was: 0 }.connections(),
                connections,
                "{limit}"
            );
        }
    }

    #[test]
    fn raising_never_lowers() {
        let files = OpenFiles::raise();
        assert!(files.limit >= files.was, "{files:?}");
    }
}
