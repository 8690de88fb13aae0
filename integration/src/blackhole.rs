//! A host that can stop to answer: an address in a network namespace of its own, behind a link that stays up. Once it
//! swallows, SYN and everything else goes there and nothing comes back, not even a refusal.

use anyhow::{Context, Result, bail};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::{fs::File, net::TcpListener, os::fd::AsFd, process::Command};

/// A host in a namespace. Dropping it removes the namespace and the link, both named after this process.
pub struct Blackhole {
    namespace: String,
    near: String,
    far: String,
    address: String,
}

const NEAR_MAC: &str = "02:fb:00:00:00:01";
const FAR_MAC: &str = "02:fb:00:00:00:02";

// === impl Blackhole ===

impl Blackhole {
    /// Makes the host and a listener on it. It needs root (CAP_NET_ADMIN and CAP_SYS_ADMIN).
    pub fn new() -> Result<(Self, tokio::net::TcpListener)> {
        let pid = std::process::id();
        // 198.18.0.0/15 is for tests of networks (RFC 2544): nobody lives there.
        let (c, d) = (pid >> 6 & 0xff, (pid & 0x3f) * 4);
        let host = Self {
            namespace: format!("forebay-{pid}"),
            near: format!("fb{pid}a"),
            far: format!("fb{pid}b"),
            address: format!("198.18.{c}.{}", d + 2),
        };
        let near_address = format!("198.18.{c}.{}/30", d + 1);
        host.make(&near_address)
            .context("a network namespace (as root, with iproute2)")?;
        let listener = host.listen()?;
        Ok((host, listener))
    }

    fn make(&self, near_address: &str) -> Result<()> {
        let Self {
            namespace,
            near,
            far,
            address,
        } = self;
        ip(&["netns", "add", namespace])?;
        ip(&["link", "add", near, "address", NEAR_MAC, "type", "veth"]
            .into_iter()
            .chain(["peer", "name", far, "address", FAR_MAC, "netns", namespace])
            .collect::<Vec<_>>())?;
        ip(&["addr", "add", near_address, "dev", near])?;
        ip(&["link", "set", near, "up"])?;
        let far_address = format!("{address}/30");
        ip(&["-n", namespace, "addr", "add", &far_address, "dev", far])?;
        ip(&["-n", namespace, "link", "set", far, "up"])?;
        // Its hardware address is known for good, so that nobody notices its silence below IP.
        ip(&["neigh", "replace", address, "lladdr", FAR_MAC]
            .into_iter()
            .chain(["dev", near, "nud", "permanent"])
            .collect::<Vec<_>>())
    }

    /// Binds within the namespace: a socket stays where it was made.
    fn listen(&self) -> Result<tokio::net::TcpListener> {
        let namespace = File::open(format!("/run/netns/{}", self.namespace))?;
        let address = format!("{}:0", self.address);
        let listener = std::thread::spawn(move || -> Result<TcpListener> {
            // Only this thread, which ends with it.
            move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?;
            Ok(TcpListener::bind(address)?)
        })
        .join();
        let Ok(listener) = listener else {
            bail!("the thread in the namespace panicked");
        };
        let listener = listener.context("bind within the namespace")?;
        listener.set_nonblocking(true)?;
        Ok(tokio::net::TcpListener::from_std(listener)?)
    }

    /// From now on it answers nothing.
    pub fn swallow(&self) -> Result<()> {
        let address = format!("{}/30", self.address);
        ip(&[
            "-n",
            &self.namespace,
            "addr",
            "del",
            &address,
            "dev",
            &self.far,
        ])
    }
}

impl Drop for Blackhole {
    fn drop(&mut self) {
        // Either may not exist if making it failed half way.
        let _ = ip(&["link", "del", &self.near]);
        let _ = ip(&["netns", "del", &self.namespace]);
    }
}

fn ip(args: &[&str]) -> Result<()> {
    let output = Command::new("ip").args(args).output().context("ip")?;
    if !output.status.success() {
        bail!(
            "ip {}: {}",
            args.join(" "),
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use tokio::{net::TcpStream, time::timeout};

    #[tokio::test]
    async fn a_swallowed_syn_gets_no_answer() {
        if !rustix::process::geteuid().is_root() {
            // The suite `faults` fails then and says why; `cargo test` is for everyone.
            return;
        }
        let (host, listener) = Blackhole::new().expect("a namespace");
        let address = listener.local_addr().expect("address");
        let reached = timeout(Duration::from_secs(2), TcpStream::connect(address)).await;
        assert!(matches!(reached, Ok(Ok(_))), "{reached:?}");
        host.swallow().expect("swallow");
        let silence = timeout(Duration::from_millis(300), TcpStream::connect(address)).await;
        assert!(silence.is_err(), "{silence:?}");
    }
}
