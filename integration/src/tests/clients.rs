//! Clients that people use, unmodified: OpenAI's Python client and curl.

use crate::{
    engine::{MODEL, Profile},
    gateway::{Decision, Gateway, GatewaySpec},
    lab::Lab,
    suite::Test,
    test,
};
use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use std::{process::Stdio, sync::Arc};
use tokio::process::Command;

/// The tests.
pub fn tests() -> Vec<Test> {
    vec![
        test!("clients", openai, "openai_python_client", [A], 300),
        test!("clients", curl, "curl", [A], 60),
    ]
}

async fn openai(lab: Arc<Lab>) -> Result<String> {
    let pair = lab.pair(Profile::A).await?;
    let gateway = Gateway::started(&lab.paths, &GatewaySpec::new(pair.iter())).await?;
    let output = Command::new(&lab.paths.python)
        .arg(lab.paths.root.join("integration/clients/openai_client.py"))
        .args([&gateway.base_url(), MODEL])
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output()
        .await?;
    let out = String::from_utf8_lossy(&output.stdout);
    ensure!(
        output.status.success(),
        "{}\n{out}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    let checks: Vec<Value> = out
        .lines()
        .map(serde_json::from_str)
        .collect::<Result<_, _>>()
        .context("the client's report")?;
    let names: Vec<_> = checks.iter().filter_map(|c| c["check"].as_str()).collect();
    ensure!(names.len() == 9, "checks: {names:?}");
    // Turns 2 and later find their conversation where it is cached.
    let conversation = checks
        .iter()
        .find(|c| c["check"] == "conversation")
        .context("the conversation's report")?;
    let followed = conversation["followed"].as_f64().context("followed")?;
    if followed < 0.95 {
        let elsewhere = gateway.decisions(30).await?;
        let elsewhere: Vec<_> = elsewhere
            .iter()
            .filter(|d| !follows(d))
            .map(|d| &d.0)
            .collect();
        bail!("{conversation}; not where most is cached: {elsewhere:?}");
    }
    gateway.check().await?;
    Ok(format!(
        "{}; {:.0} % of the later turns were answered where their prefix is cached",
        names.join(", "),
        followed * 100.0
    ))
}

/// Whether a request went where most of its prompt was believed to be cached.
fn follows(decision: &Decision) -> bool {
    let chosen = decision.chosen().ok().and_then(|c| c.cached());
    decision.candidates().iter().all(|c| c.cached() <= chosen)
}

async fn curl(lab: Arc<Lab>) -> Result<String> {
    let pair = lab.pair(Profile::A).await?;
    let gateway = Gateway::started(&lab.paths, &GatewaySpec::new(pair.iter())).await?;
    let base = gateway.base_url();
    let models: Value = serde_json::from_str(&run(&[&format!("{base}/models")]).await?)?;
    ensure!(models["data"][0]["id"] == MODEL, "{models}");
    let body = json!({"model": MODEL, "stream": true, "max_tokens": 8, "messages": [{"role": "user", "content": "Hello"}]});
    let url = format!("{base}/chat/completions");
    for protocol in ["--http1.1", "--http2-prior-knowledge"] {
        let stream = run(&[
            "-N",
            protocol,
            "-H",
            "content-type: application/json",
            "-d",
            &body.to_string(),
            &url,
        ])
        .await?;
        ensure!(
            stream.starts_with("data: {") && stream.ends_with("data: [DONE]\n\n"),
            "{protocol}: {stream}"
        );
    }
    let unknown = json!({"model": "unknown", "messages": []}).to_string();
    let status = run(&[
        "-o",
        "/dev/null",
        "-w",
        "%{http_code}",
        "-H",
        "content-type: application/json",
        "-d",
        &unknown,
        &url,
    ])
    .await?;
    ensure!(status == "404", "an unknown model: {status}");
    gateway.check().await?;
    Ok("models, a stream over HTTP/1.1 and HTTP/2, an unknown model".into())
}

async fn run(args: &[&str]) -> Result<String> {
    let output = Command::new("curl")
        .args(["-sS", "--max-time", "30"])
        .args(args)
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output()
        .await
        .context("curl")?;
    ensure!(
        output.status.success(),
        "curl {args:?}: {} {}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(String::from_utf8(output.stdout)?)
}
