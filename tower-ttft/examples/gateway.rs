//! A cache-aware reverse proxy in front of three engines: `cargo run --example gateway -- HOST:PORT HOST:PORT HOST:PORT`
use http_body_util::{Either, Full};
use hyper::{Request, Response, StatusCode, body::Incoming, service::service_fn};
use hyper_util::client::legacy::Client;
use hyper_util::rt::{TokioExecutor, TokioIo};
use std::{convert::Infallible, sync::Arc};
use tower::{ServiceBuilder, ServiceExt};
use tower_ttft::peek::{PeekLayer, PeekParams, ReplayBody};
use tower_ttft::pool::{Endpoint, EndpointInfo, Pool, PoolParams};
use tower_ttft::prompt::{EncodeLayer, Encoder, EncoderParams};
use tower_ttft::{Error, balance::Balance, chain, endpoint::EndpointId, policy::PolicySpec};

#[tokio::main]
async fn main() -> Result<(), Error> {
    let keys = chain::KeySpace::new(rand::random());
    let pool = Pool::new(PoolParams {
        model: "any".into(),
        keys,
        policy: PolicySpec::default(),
        seed: rand::random(),
        index_bytes: 64 << 20,
    });
    for host_port in std::env::args().skip(1) {
        let endpoint = pool.insert(EndpointId::new(host_port), EndpointInfo::default());
        endpoint.set_ready(true);
    }
    let client = Client::builder(TokioExecutor::new()).build_http::<ReplayBody<Incoming>>();
    let send = move |to: Endpoint| {
        (client.clone()).map_request(move |mut req: Request<_>| {
            let path = req.uri().path_and_query().map_or("/", |p| p.as_str());
            let uri = format!("http://{}{path}", to.id().address);
            *req.uri_mut() = uri.parse().unwrap_or_default();
            req
        })
    };
    let gateway = ServiceBuilder::new()
        .layer(PeekLayer::new(PeekParams::default()))
        .layer(EncodeLayer::new(Arc::new(Encoder::new(
            EncoderParams::new("any", keys),
        ))))
        .service(Balance::new(pool, send));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    println!("http://{}", listener.local_addr()?);
    loop {
        let (io, _) = listener.accept().await?;
        let gateway = gateway.clone();
        let service = service_fn(move |req: Request<Incoming>| {
            let answer = gateway.clone().oneshot(req);
            async { Ok::<_, Infallible>(answer.await.map_or_else(refuse, |r| r.map(Either::Left))) }
        });
        let http = hyper::server::conn::http1::Builder::new();
        tokio::spawn(async move { http.serve_connection(TokioIo::new(io), service).await });
    }
}

fn refuse<B>(e: Error) -> Response<Either<B, Full<bytes::Bytes>>> {
    let mut rsp = Response::new(Either::Right(Full::from(e.to_string())));
    *rsp.status_mut() = StatusCode::BAD_GATEWAY;
    rsp
}
