//! The TCP sockets of a process, from `/proc`: what it really holds open, whatever its own counters say.

use anyhow::{Context, Result};
use rustix::process::Pid;
use std::{
    collections::HashSet,
    fs,
    net::{Ipv4Addr, SocketAddr, SocketAddrV4},
    process::Command,
};

/// A TCP socket of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Socket {
    /// Its own port, which tells it apart from others with the same peer.
    pub port: u16,
    /// The peer.
    pub peer: SocketAddrV4,
    /// Whether it still waits for the peer's first answer.
    pub connecting: bool,
}

/// `SYN_SENT` in `/proc/net/tcp`: see `include/net/tcp_states.h` of Linux.
const SYN_SENT: u8 = 2;

/// The IPv4 sockets that a process holds open to a peer.
pub fn open_to(pid: Pid, peer: &str) -> Result<Vec<Socket>> {
    let peer: SocketAddrV4 = peer.parse().with_context(|| peer.to_owned())?;
    // First the table, then the process: what is closed in between is not reported.
    let table = fs::read_to_string("/proc/net/tcp")?;
    let inodes = inodes(pid)?;
    Ok(table
        .lines()
        .skip(1)
        .filter_map(parse)
        .filter(|(socket, inode)| socket.peer == peer && inodes.contains(inode))
        .map(|(socket, _)| socket)
        .collect())
}

/// Those of the sockets between us and `peer` over which at least `bytes` have gone there: `ss` counts them.
pub fn carried(peer: &str, bytes: u64) -> Result<Vec<u16>> {
    let output = Command::new("ss")
        .args(["-tinOH", "dst", peer])
        .output()
        .context("ss (package iproute2)")?;
    Ok(String::from_utf8_lossy(&output.stdout)
        .lines()
        .filter(|line| sent(line).is_some_and(|n| n >= bytes))
        .filter_map(own_port)
        .collect())
}

fn sent(line: &str) -> Option<u64> {
    let (_, rest) = line.split_once("bytes_sent:")?;
    rest.split_whitespace().next()?.parse().ok()
}

fn own_port(line: &str) -> Option<u16> {
    let local: SocketAddr = line.split_whitespace().nth(3)?.parse().ok()?;
    Some(local.port())
}

fn inodes(pid: Pid) -> Result<HashSet<u64>> {
    let dir = format!("/proc/{}/fd", pid.as_raw_nonzero());
    Ok(fs::read_dir(&dir)
        .with_context(|| dir.clone())?
        .flatten()
        .filter_map(|entry| fs::read_link(entry.path()).ok())
        .filter_map(|target| {
            let text = target.to_str()?;
            text.strip_prefix("socket:[")?
                .strip_suffix(']')?
                .parse()
                .ok()
        })
        .collect())
}

/// A line of `/proc/net/tcp`: proc(5).
fn parse(line: &str) -> Option<(Socket, u64)> {
    let mut fields = line.split_whitespace();
    let local = address(fields.nth(1)?)?;
    let peer = address(fields.next()?)?;
    let state = u8::from_str_radix(fields.next()?, 16).ok()?;
    let inode = fields.nth(5)?.parse().ok()?;
    let socket = Socket {
        port: local.port(),
        peer,
        connecting: state == SYN_SENT,
    };
    Some((socket, inode))
}

/// `0100007F:1F90`: the address in the host's byte order, the port as a number.
fn address(text: &str) -> Option<SocketAddrV4> {
    let (ip, port) = text.split_once(':')?;
    let ip = u32::from_str_radix(ip, 16).ok()?;
    let port = u16::from_str_radix(port, 16).ok()?;
    Some(SocketAddrV4::new(Ipv4Addr::from(ip.to_ne_bytes()), port))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn our_own_sockets_come_and_go() {
        let me = rustix::process::getpid();
        let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
        let peer = listener.local_addr().expect("address").to_string();
        assert_eq!(open_to(me, &peer).expect("read"), []);
        let socket = TcpStream::connect(&peer).expect("connect");
        let open = open_to(me, &peer).expect("read");
        assert_eq!(open.len(), 1, "{open:?}");
        assert_eq!(open[0].port, socket.local_addr().expect("address").port());
        assert!(!open[0].connecting);
        drop(socket);
        assert_eq!(open_to(me, &peer).expect("read"), []);
    }

    #[test]
    fn lines_of_ss_are_read() {
        let line = "ESTAB 0 0 127.0.0.1:40000 127.0.0.1:8000 cubic wscale:7,7 bytes_sent:1234 bytes_acked:1 segs_out:3";
        assert_eq!(sent(line), Some(1234));
        assert_eq!(own_port(line), Some(40000));
        assert_eq!(sent("SYN-SENT 0 1 1.2.3.4:1 5.6.7.8:2 cubic"), None);
    }
}
