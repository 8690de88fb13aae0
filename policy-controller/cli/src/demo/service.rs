//! What a Kubernetes Service does: a random pod for each connection, and then bytes both ways. Clients of the published
//! run open a connection for each request, so each request goes to a random pod.

use rand::{RngExt, SeedableRng, rngs::StdRng};
use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
};
use tokio::{
    io::copy_bidirectional,
    net::{TcpListener, TcpStream},
    task::JoinSet,
};

/// Balances until it is dropped.
#[derive(Debug)]
pub(super) struct Service {
    address: SocketAddr,
    _task: JoinSet<()>,
}

// === impl Service ===

impl Service {
    /// Balances over these pods.
    pub(super) async fn start(pods: Vec<SocketAddr>, seed: u64) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let address = listener.local_addr()?;
        let mut task = JoinSet::new();
        task.spawn(balance(listener, pods, seed));
        Ok(Self {
            address,
            _task: task,
        })
    }

    /// Where clients connect to.
    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }
}

async fn balance(listener: TcpListener, pods: Vec<SocketAddr>, seed: u64) {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut open = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                let Ok((client, _)) = accepted else { continue };
                if let Some(pod) = pods.get(rng.random_range(0..pods.len().max(1))) {
                    open.spawn(forward(client, *pod));
                }
            }
            Some(_) = open.join_next(), if !open.is_empty() => {}
        }
    }
}

/// An error on either side closes both; that is all that this layer can say.
async fn forward(mut client: TcpStream, pod: SocketAddr) {
    if let Ok(mut pod) = TcpStream::connect(pod).await {
        let _ = (client.set_nodelay(true), pod.set_nodelay(true));
        let _ = copy_bidirectional(&mut client, &mut pod).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    /// Says its name to whoever connects.
    async fn pod(name: u8) -> (SocketAddr, JoinSet<()>) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut task = JoinSet::new();
        task.spawn(async move {
            while let Ok((mut io, _)) = listener.accept().await {
                let _ = io.write_all(&[name]).await;
            }
        });
        (address, task)
    }

    #[tokio::test]
    async fn each_connection_draws_anew_and_evenly() {
        let pods = [pod(0).await, pod(1).await, pod(2).await];
        let addresses = pods.iter().map(|p| p.0).collect();
        let service = Service::start(addresses, 3).await.unwrap();
        let mut seen = [0; 3];
        for _ in 0..150 {
            let mut io = TcpStream::connect(service.address()).await.unwrap();
            let mut name = [9];
            io.read_exact(&mut name).await.unwrap();
            seen[usize::from(name[0])] += 1;
        }
        assert!(seen.iter().all(|n| (30..70).contains(n)), "{seen:?}");
    }
}
