use super::*;
use http::HeaderValue;
use proptest::prelude::*;

fn parsed(api: Api, body: &str) -> InferenceRequest {
    let req = read(
        api,
        &HeaderMap::new(),
        Bytes::copy_from_slice(body.as_bytes()),
    );
    assert_eq!(req.read, BodyRead::Parsed, "{body}");
    req
}

#[test]
fn what_routing_needs() {
    let body = r#"{"model":"org\/name","messages":[{"role":"user","content":"hi"}],"max_tokens":5,"max_completion_tokens":7,"n":3,"stream":true,"stream_options":{"include_usage":true,"continuous_usage_stats":false},"cache_salt":"s","priority":-2,"unknown":[1]}"#;
    let req = parsed(Api::Chat, body);
    assert_eq!(req.model.as_deref(), Some("org/name"));
    assert!(req.stream && req.include_usage);
    assert_eq!(
        (req.max_tokens, req.n, req.priority),
        (Some(7), 3, Some(-2))
    );
    assert_eq!(req.cache_salt.as_deref(), Some("s"));
    assert_eq!(
        req.field("messages"),
        Some(&br#"[{"role":"user","content":"hi"}]"#[..])
    );
    assert_eq!(req.field("unknown"), Some(&b"[1]"[..]));
    assert_eq!(req.fields.len(), 10);
    assert!(req.duplicates.is_empty());
    assert_eq!(&req.body[..], body.as_bytes());
}

#[test]
fn defaults() {
    let req = parsed(Api::Chat, "{}");
    assert_eq!(
        (req.model, req.max_tokens, req.priority, req.cache_salt),
        (None, None, None, None)
    );
    assert_eq!((req.stream, req.include_usage, req.n), (false, false, 1));
    // What vLLM takes for missing, and what it refuses, is missing.
    for body in [
        r#"{"model":null,"stream":null,"n":null,"max_tokens":null,"priority":null,"cache_salt":null,"stream_options":null}"#,
        r#"{"model":"","stream":"","n":"","max_tokens":"","priority":"","cache_salt":"","stream_options":""}"#,
        r#"{"model":1,"stream":2,"n":0.5,"max_tokens":0,"priority":18446744073709551616,"cache_salt":3,"stream_options":{"include_usage":null}}"#,
        r#"{"model":"\ud83d","stream":[],"n":-1,"max_tokens":-1,"priority":{},"cache_salt":[],"stream_options":{"include_usage":[]}}"#,
    ] {
        let req = parsed(Api::Chat, body);
        assert_eq!(
            (req.model, req.max_tokens, req.priority, req.cache_salt),
            (None, None, None, None),
            "{body}"
        );
        assert_eq!(
            (req.stream, req.include_usage, req.n),
            (false, false, 1),
            "{body}"
        );
    }
}

#[test]
fn values_are_coerced_as_vllm_does() {
    let req = parsed(
        Api::Chat,
        r#"{"stream":"true","n":"2","max_tokens":16.0,"priority":"-7","stream_options":{"include_usage":"on"}}"#,
    );
    assert!(req.stream && req.include_usage);
    assert_eq!(
        (req.n, req.max_tokens, req.priority),
        (2, Some(16), Some(-7))
    );
    assert!(parsed(Api::Chat, r#"{"stream":1}"#).stream);
    let absurd = parsed(
        Api::Chat,
        r#"{"n":99999999999999999999999,"max_tokens":99999999999999999999999}"#,
    );
    assert_eq!((absurd.n, absurd.max_tokens), (u32::MAX, Some(u64::MAX)));
}

#[test]
fn each_api_names_its_output_budget() {
    let body = r#"{"max_output_tokens":1,"max_tokens":2,"max_completion_tokens":3}"#;
    for (api, max_tokens) in [
        (Api::Chat, Some(3)),
        (Api::Completions, Some(2)),
        (Api::Messages, Some(2)),
        (Api::Responses, Some(1)),
        (Api::Embeddings, None),
    ] {
        assert_eq!(parsed(api, body).max_tokens, max_tokens, "{api:?}");
    }
    let older = parsed(
        Api::Chat,
        r#"{"max_tokens":2,"max_completion_tokens":null}"#,
    );
    assert_eq!(older.max_tokens, Some(2));
}

#[test]
fn of_equal_keys_the_last_counts_and_controlled_ones_are_told() {
    let req = parsed(
        Api::Chat,
        r#"{"model":"a","stream":true,"mod\u0065l":"b","stream":false,"cache_salt":"x","priority":1,"priority":2,"x":1,"x":2}"#,
    );
    assert_eq!(req.model.as_deref(), Some("b"));
    assert!(!req.stream);
    assert_eq!(req.priority, Some(2));
    assert_eq!(req.field("x"), Some(&b"2"[..]));
    assert_eq!(req.duplicates, ["model", "priority"]);
    let keys: Vec<_> = req.fields.iter().map(|(k, _)| &**k).collect();
    assert_eq!(keys, ["model", "stream", "cache_salt", "priority", "x"]);
    let nested = parsed(
        Api::Chat,
        r#"{"stream_options":{"include_usage":false,"include_usage":true}}"#,
    );
    assert!(nested.include_usage);
}

#[test]
fn forms() {
    let headers = HeaderMap::from_iter([(
        header::CONTENT_TYPE,
        HeaderValue::from_static("multipart/form-data; boundary=B"),
    )]);
    let body = "--B\r\nContent-Disposition: form-data; name=model\r\n\r\na\r\n--B\r\nContent-Disposition: form-data; name=model\r\n\r\nb\r\n--B--";
    let req = read(Api::Audio, &headers, Bytes::from_static(body.as_bytes()));
    assert_eq!(req.model.as_deref(), Some("b"));
    assert_eq!(req.duplicates, ["model"]);
    assert_eq!(req.read, BodyRead::Parsed);
}

#[test]
fn many_equal_keys_are_no_burden() {
    let body = format!(
        "{{{}\"model\":\"m\"}}",
        "\"k\":0,".repeat(json::MAX_FIELDS - 1)
    );
    let req = parsed(Api::Chat, &body);
    assert_eq!(req.fields.len(), 2);
    assert_eq!(req.model.as_deref(), Some("m"));
}

proptest! {
    #[test]
    fn no_body_crashes_it(body in prop::collection::vec(prop_oneof![any::<u8>(), prop::sample::select(&b"{}[]\":,\\u\r\n-BContent-Disposition: form-data; name=model"[..])], 0..120), form in any::<bool>()) {
        let mut headers = HeaderMap::new();
        if form {
            headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("multipart/form-data; boundary=B"));
        }
        let req = read(Api::Chat, &headers, body.into());
        for (key, _) in req.fields.iter() {
            prop_assert!(req.field(key).is_some());
        }
    }
}
