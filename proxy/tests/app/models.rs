//! `/v1/models`: whose models are served under which names.

use super::{PORTS, PoolFile, engine, get, healthy, start, until};
use serde_json::{Value, json};

fn ids(list: &Value) -> Vec<&str> {
    let data = list["data"].as_array().expect("a list");
    data.iter()
        .map(|m| m["id"].as_str().expect("an id"))
        .collect()
}

#[tokio::test]
async fn models_of_all_engines_are_one_list() {
    let one = engine(&[("tiny", None), ("ad1", Some("tiny"))]).await;
    let two = engine(&[("big", None)]).await;
    let file = PoolFile::new(&format!(
        "{PORTS}models: [{{name: tiny, aliases: [small]}}, declared]\nendpoints: [http://{}, http://{}]\n",
        one.address, two.address
    ));
    let app = start(&file).await;
    let list = until(app.listen(), "/v1/models", "both engines' models", |a| {
        a.body.contains("big") && a.body.contains("ad1")
    })
    .await
    .json();
    // Declared ones first, and also without an endpoint.
    assert_eq!(ids(&list), ["tiny", "small", "ad1", "declared", "big"]);
    let model = |id: &str| {
        list["data"]
            .as_array()
            .unwrap()
            .iter()
            .find(|m| m["id"] == id)
            .unwrap()
            .clone()
    };
    assert_eq!(model("tiny")["max_model_len"], 4096);
    assert_eq!(model("small")["parent"], "tiny");
    assert_eq!(model("ad1")["parent"], "tiny");
    assert_eq!(model("declared")["max_model_len"], Value::Null);
    assert_eq!(
        get(app.listen(), "/v1/models/ad1").await.json(),
        model("ad1")
    );
    let missing = get(app.listen(), "/v1/models/nope").await;
    assert_eq!(missing.status, 404);
    assert!(missing.body.contains("`tiny`"), "{missing:?}");

    let models = app.directory().models().load();
    assert_eq!(models.get("ad1").unwrap().pool.name().as_ref(), "tiny");
    assert_eq!(models.get("small").unwrap().pool.name().as_ref(), "tiny");
    assert_eq!(models.get("big").unwrap().pool.name().as_ref(), "big");
    assert!(models.get("nope").is_none());
}

#[tokio::test]
async fn an_engine_that_is_down_takes_nothing_from_the_list() {
    let one = engine(&[("tiny", None)]).await;
    let two = engine(&[("big", None)]).await;
    let file = PoolFile::new(&format!(
        "{PORTS}endpoints: [http://{}, http://{}]\n",
        one.address, two.address
    ));
    let app = start(&file).await;
    let both = |a: &super::Answer| {
        a.json()
            .as_array()
            .unwrap()
            .iter()
            .all(|e| e["ready"] == true)
    };
    until(app.admin(), "/endpoints", "both are ready", both).await;
    drop(two);
    until(app.admin(), "/endpoints", "one is down", |a| {
        a.json()
            .as_array()
            .unwrap()
            .iter()
            .any(|e| e["engine"]["state"] == "down")
    })
    .await;
    // A model exists, whether or not an engine of it is up right now: no 404 that makes clients give up.
    assert_eq!(ids(&get(app.listen(), "/v1/models").await.json()).len(), 2);
    assert_eq!(get(app.listen(), "/health").await.status, 200);
}

#[tokio::test]
async fn an_engine_of_another_model_gets_no_requests_and_says_why() {
    let one = engine(&[("other", None)]).await;
    let file = PoolFile::new(&format!(
        "{PORTS}models: [tiny]\nendpoints: [{{url: 'http://{}', model: tiny}}]\n",
        one.address
    ));
    let app = start(&file).await;
    let seen = until(app.admin(), "/endpoints", "the mismatch", |a| {
        a.body.contains("gets no requests")
    })
    .await
    .json();
    assert_eq!(seen[0]["model"], Value::Null);
    assert_eq!(seen[0]["ready"], false);
    let condition = seen[0]["conditions"][0].as_str().unwrap();
    assert!(
        condition.contains("serves `other`, not `tiny`"),
        "{condition}"
    );
    assert!(
        condition.contains("--served-model-name tiny"),
        "{condition}"
    );
    let health = get(app.listen(), "/health").await;
    assert_eq!(health.status, 503);
    assert!(health.head.contains("retry-after: 1"), "{health:?}");
    // `other` was not asked for.
    assert_eq!(ids(&get(app.listen(), "/v1/models").await.json()), ["tiny"]);
}

#[tokio::test]
async fn the_endpoints_page_tells_what_is_known() {
    let one = engine(&[("tiny", None)]).await;
    let file = PoolFile::new(&format!(
        "{PORTS}endpoints: [{{url: 'http://{}', gpu: h100}}]\n",
        one.address
    ));
    let app = start(&file).await;
    healthy(&app).await;
    let page = until(app.admin(), "/endpoints", "a scrape", |a| {
        a.json()[0]["engine"]["scrape_age"].is_number()
    })
    .await
    .json();
    let e = &page[0];
    assert_eq!(e["url"], json!(format!("http://{}", one.address)));
    assert_eq!(
        (&e["model"], &e["ready"], &e["gpu"]),
        (&json!("tiny"), &json!(true), &json!("h100"))
    );
    assert_eq!(e["engine"]["state"], "ready");
    assert_eq!(e["ranks"][0]["booked"], 0);
    assert!(
        e["ranks"][0]["idlePrefill1k"].as_f64().unwrap() > 0.0,
        "{e}"
    );
    let conditions = e["conditions"].to_string();
    assert!(conditions.contains("KV events: "), "{conditions}");
}
