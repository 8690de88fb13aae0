//! An engine that answers at once: enough of vLLM's surface for a proxy to take it into its pool.

use bytes::Bytes;
use futures::stream;
use http::{Method, Request, Response};
use http_body_util::{BodyExt, Full, StreamBody, combinators::BoxBody};
use hyper::{body::Frame, body::Incoming, service::service_fn};
use hyper_util::rt::TokioIo;
use std::{convert::Infallible, io};
use tokio::net::TcpListener;

const EVENTS: usize = 16;
const MODEL: &str = "tiny";

/// Serves until the listener fails.
pub async fn serve(listener: TcpListener) -> io::Result<()> {
    loop {
        let (socket, _) = listener.accept().await?;
        socket.set_nodelay(true)?;
        tokio::spawn(
            hyper::server::conn::http1::Builder::new()
                .serve_connection(TokioIo::new(socket), service_fn(answer)),
        );
    }
}

async fn answer(
    req: Request<Incoming>,
) -> Result<Response<BoxBody<Bytes, Infallible>>, hyper::Error> {
    let (head, body) = req.into_parts();
    body.collect().await?;
    let text = |content_type: &'static str, text: String| {
        let mut rsp = Response::new(Full::new(Bytes::from(text)).boxed());
        rsp.headers_mut().insert(
            http::header::CONTENT_TYPE,
            http::HeaderValue::from_static(content_type),
        );
        rsp
    };
    Ok(match (&head.method, head.uri.path()) {
        (&Method::POST, "/v1/chat/completions") => {
            let mut rsp = Response::new(StreamBody::new(stream::iter(events())).boxed());
            rsp.headers_mut().insert(
                http::header::CONTENT_TYPE,
                http::HeaderValue::from_static("text/event-stream; charset=utf-8"),
            );
            rsp
        }
        (_, "/health") => text("text/plain", String::new()),
        (_, "/version") => text("application/json", r#"{"version":"0.32.0"}"#.into()),
        (_, "/v1/models") => text(
            "application/json",
            format!(
                r#"{{"object":"list","data":[{{"id":"{MODEL}","object":"model","created":1,"owned_by":"vllm","root":"{MODEL}","parent":null,"max_model_len":32768}}]}}"#
            ),
        ),
        (_, "/metrics") => text("text/plain; version=1.0.0; charset=utf-8", metrics()),
        _ => {
            let mut rsp = text("application/json", r#"{"detail":"Not Found"}"#.into());
            *rsp.status_mut() = http::StatusCode::NOT_FOUND;
            rsp
        }
    })
}

fn events() -> Vec<Result<Frame<Bytes>, Infallible>> {
    let event = |delta: &str, finish: &str| {
        format!(
            "data: {{\"id\":\"chatcmpl-0\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"{MODEL}\",\"choices\":[{{\"index\":0,\"delta\":{delta},\"logprobs\":null,\"finish_reason\":{finish}}}]}}\n\n"
        )
    };
    let mut out = vec![event(r#"{"role":"assistant","content":""}"#, "null")];
    out.extend((0..EVENTS).map(|i| {
        let finish = if i + 1 == EVENTS {
            "\"length\""
        } else {
            "null"
        };
        event(r#"{"content":" word"}"#, finish)
    }));
    out.push("data: [DONE]\n\n".into());
    out.into_iter()
        .map(|e| Ok(Frame::data(Bytes::from(e))))
        .collect()
}

fn metrics() -> String {
    format!(
        "process_start_time_seconds 1.0\n\
         vllm:num_requests_running{{engine=\"0\",model_name=\"{MODEL}\"}} 0.0\n\
         vllm:num_requests_waiting{{engine=\"0\",model_name=\"{MODEL}\"}} 0.0\n\
         vllm:kv_cache_usage_perc{{engine=\"0\",model_name=\"{MODEL}\"}} 0.0\n\
         vllm:cache_config_info{{block_size=\"16\",engine=\"0\",num_gpu_blocks=\"8192\"}} 1.0\n"
    )
}
