use super::*;
use crate::observe::Usage;

fn classified(api: Api, raw: &str) -> Classified {
    classify_event(api, &SseEvent::new(raw.as_bytes()))
}

fn usage(prompt_tokens: u32, completion_tokens: u32, cached_tokens: Option<u32>) -> Option<Usage> {
    Some(Usage {
        prompt_tokens,
        completion_tokens,
        cached_tokens,
    })
}

/// Shapes as vLLM 0.32 sent them, shortened.
#[test]
fn chat() {
    use EventKind::*;
    for (raw, kind, tokens) in [
        (
            r#"data: {"id":"c","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],"prompt_token_ids":null}"#,
            Empty,
            None,
        ),
        (
            r#"data: {"id":"c","choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}],"usage":{"prompt_tokens":13,"total_tokens":13,"completion_tokens":0,"completion_tokens_details":null}}"#,
            Empty,
            usage(13, 0, None),
        ),
        (
            r#"data: {"id":"c","choices":[{"index":0,"delta":{"content":" files"},"logprobs":null,"finish_reason":null,"token_ids":null}]}"#,
            Token,
            None,
        ),
        (
            r#"data: {"id":"c","choices":[{"index":0,"delta":{"content":"retch"},"finish_reason":"length"}],"usage":{"prompt_tokens":13,"total_tokens":16,"completion_tokens":3}}"#,
            Token,
            usage(13, 3, None),
        ),
        (
            r#"data: {"id":"c","choices":[{"index":0,"delta":{"content":""},"finish_reason":"stop"}]}"#,
            Empty,
            None,
        ),
        (
            r#"data: {"id":"c","choices":[{"index":0,"delta":{"content":"\ud83d"},"finish_reason":null}]}"#,
            Token,
            None,
        ),
        (
            r#"data: {"id":"c","choices":[{"index":0,"delta":{"reasoning":"so"}}]}"#,
            Token,
            None,
        ),
        (
            r#"data: {"id":"c","choices":[{"index":0,"delta":{"reasoning_content":"so","content":null}}]}"#,
            Token,
            None,
        ),
        (
            r#"data: {"id":"c","choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"id":"t","function":{"name":"f","arguments":""}}]}}]}"#,
            Token,
            None,
        ),
        (
            r#"data: {"id":"c","choices":[{"index":0,"delta":{"tool_calls":[ ],"content":null,"reasoning":""}}]}"#,
            Empty,
            None,
        ),
        (
            r#"data: {"id":"c","choices":[{"index":0,"delta":{"content":""}},{"index":1,"delta":{"content":"x"}}]}"#,
            Token,
            None,
        ),
        (
            r#"data: {"id":"c","choices":[],"usage":{"prompt_tokens":13,"total_tokens":16,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":0,"created_cache_tokens":0}}}"#,
            Usage,
            usage(13, 3, Some(0)),
        ),
        (
            r#"data: {"id":"c","choices":[{"index":0,"delta":{"content":""},"finish_reason":"abort"}]}"#,
            AbortEmpty,
            None,
        ),
        (
            r#"data: {"id":"c","choices":[{"index":0,"delta":{"content":"x"},"finish_reason":"abort"}]}"#,
            Token,
            None,
        ),
        (
            r#"data: {"id":"c","error":null,"choices":[{"index":0,"delta":{"content":"\"error\":{\"code\":500}"}}]}"#,
            Token,
            None,
        ),
        ("data: [DONE]", Terminal, None),
        ("data:[DONE]", Terminal, None),
        (": keep-alive", Comment, None),
        ("retry: 3000", Comment, None),
        ("data: not json", Other, None),
        ("data: {}", Other, None),
        ("data", Other, None),
        (r#"data: {"choices":3}"#, Other, None),
        (r#"data: {"choices":[3,null,"delta"]}"#, Empty, None),
    ] {
        let found = classified(Api::Chat, raw);
        assert_eq!(found.kind, kind, "{raw}");
        assert_eq!(found.usage.map(|u| u.usage()), tokens, "{raw}");
    }
}

#[test]
fn completions_and_token_ids() {
    use EventKind::*;
    for (raw, kind) in [
        (
            r#"data: {"object":"text_completion","choices":[{"index":0,"text":" sh","finish_reason":null,"token_ids":null}]}"#,
            Token,
        ),
        (
            r#"data: {"object":"text_completion","choices":[{"index":0,"text":"","finish_reason":null,"token_ids":[17]}]}"#,
            Token,
        ),
        (
            r#"data: {"object":"text_completion","choices":[{"index":0,"text":"","finish_reason":"abort","token_ids":[]}]}"#,
            AbortEmpty,
        ),
        (
            r#"data: {"request_id":"g","usage":null,"output_mode":"tokens","choices":[{"index":0,"finish_reason":null,"token_ids":[4667]}]}"#,
            Token,
        ),
    ] {
        assert_eq!(classified(Api::Completions, raw).kind, kind, "{raw}");
        assert_eq!(classified(Api::Other, raw).kind, kind, "{raw}");
    }
}

#[test]
fn responses() {
    use EventKind::*;
    for (raw, kind, tokens) in [
        (
            "event: response.created\ndata: {\"response\":{\"id\":\"r\",\"output\":[],\"usage\":null},\"sequence_number\":0,\"type\":\"response.created\"}",
            Empty,
            None,
        ),
        (
            "event: response.output_item.added\ndata: {\"item\":{\"id\":\"m\",\"content\":[],\"type\":\"message\"},\"output_index\":0,\"type\":\"response.output_item.added\"}",
            Empty,
            None,
        ),
        (
            "event: response.output_item.added\ndata: {\"item\":{\"id\":\"m\",\"name\":\"f\",\"type\":\"function_call\"},\"type\":\"response.output_item.added\"}",
            Token,
            None,
        ),
        (
            "event: response.output_text.delta\ndata: {\"content_index\":0,\"delta\":\" files\",\"item_id\":\"m\",\"type\":\"response.output_text.delta\"}",
            Token,
            None,
        ),
        (
            "event: response.output_text.delta\ndata: {\"delta\":\"\",\"type\":\"response.output_text.delta\"}",
            Empty,
            None,
        ),
        (
            "data: {\"delta\":\"hm\",\"type\":\"response.reasoning_text.delta\"}",
            Token,
            None,
        ),
        (
            "data: {\"delta\":\"{\",\"type\":\"response.function_call_arguments.delta\"}",
            Token,
            None,
        ),
        (
            "data: {\"text\":\" files\",\"type\":\"response.output_text.done\"}",
            Empty,
            None,
        ),
        (
            "event: response.completed\ndata: {\"response\":{\"id\":\"r\",\"error\":null,\"usage\":{\"input_tokens\":13,\"input_tokens_details\":{\"cached_tokens\":8},\"output_tokens\":3}},\"type\":\"response.completed\"}",
            Terminal,
            usage(13, 3, Some(8)),
        ),
        (
            "data: {\"response\":{},\"type\":\"response.incomplete\"}",
            Terminal,
            None,
        ),
        ("data: [DONE]", Other, None),
    ] {
        let found = classified(Api::Responses, raw);
        assert_eq!(found.kind, kind, "{raw}");
        assert_eq!(found.usage.map(|u| u.usage()), tokens, "{raw}");
    }
    let failed = classified(
        Api::Responses,
        "event: response.failed\ndata: {\"response\":{\"error\":{\"code\":\"server_error\",\"message\":\"no\"}},\"type\":\"response.failed\"}",
    );
    assert!(matches!(&failed.kind, EventKind::Error(e) if &*e.message == "no" && e.code.is_none()));
}

#[test]
fn messages() {
    use EventKind::*;
    for (raw, kind, tokens) in [
        (
            r#"{"type":"message_start","message":{"id":"c","content":[],"usage":{"input_tokens":13,"output_tokens":0}}}"#,
            Empty,
            usage(13, 0, None),
        ),
        (
            r#"{"type":"content_block_start","content_block":{"type":"text","text":""},"index":0}"#,
            Empty,
            None,
        ),
        (
            r#"{"type":"content_block_start","content_block":{"type":"thinking","thinking":""},"index":0}"#,
            Empty,
            None,
        ),
        (
            r#"{"type":"content_block_start","content_block":{"type":"tool_use","name":"f","input":{}},"index":0}"#,
            Token,
            None,
        ),
        (
            r#"{"type":"content_block_delta","delta":{"type":"text_delta","text":" files"},"index":0}"#,
            Token,
            None,
        ),
        (
            r#"{"type":"content_block_delta","delta":{"type":"thinking_delta","thinking":"hm"},"index":0}"#,
            Token,
            None,
        ),
        (
            r#"{"type":"content_block_delta","delta":{"type":"input_json_delta","partial_json":""},"index":0}"#,
            Empty,
            None,
        ),
        (r#"{"type":"content_block_stop","index":0}"#, Empty, None),
        (
            r#"{"type":"message_delta","delta":{"stop_reason":"max_tokens"},"usage":{"input_tokens":5,"output_tokens":3,"cache_creation_input_tokens":0,"cache_read_input_tokens":8}}"#,
            Usage,
            usage(13, 3, Some(8)),
        ),
        (r#"{"type":"message_stop"}"#, Terminal, None),
        (r#"{"type":"ping"}"#, Other, None),
    ] {
        let found = classified(Api::Messages, &format!("event: x\ndata: {raw}"));
        assert_eq!(found.kind, kind, "{raw}");
        assert_eq!(found.usage.map(|u| u.usage()), tokens, "{raw}");
    }
}

#[test]
fn errors() {
    let own = |code: Option<u16>, kind: Option<&str>, message: &str| {
        EventKind::Error(EngineError {
            code,
            kind: kind.map(Into::into),
            message: message.into(),
        })
    };
    for (raw, error) in [
        (
            r#"data: {"error": {"message": "EngineCore encountered an issue. See stack trace (above) for the root cause.", "type": "InternalServerError", "param": null, "code": 500}}"#,
            own(
                Some(500),
                Some("InternalServerError"),
                "EngineCore encountered an issue. See stack trace (above) for the root cause.",
            ),
        ),
        (
            r#"data: {"error":{"message":"busy","code":"503"}}"#,
            own(Some(503), None, "busy"),
        ),
        (
            r#"data: {"error":"out of memory"}"#,
            own(None, None, "out of memory"),
        ),
        (
            r#"data: {"object":"error","message":"old","type":"BadRequestError","code":400}"#,
            own(Some(400), Some("BadRequestError"), "old"),
        ),
        (
            "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"api_error\",\"message\":\"m\"}}",
            own(None, Some("api_error"), "m"),
        ),
        ("event: error\ndata: boom", own(None, None, "")),
    ] {
        for api in [Api::Chat, Api::Messages, Api::Responses] {
            let found = classified(api, raw);
            assert_eq!(found.kind, error, "{raw}");
            let shown = format!("{found:?}");
            assert!(
                !shown.contains("stack trace") && !shown.contains("memory"),
                "{shown}"
            );
        }
    }
}

#[test]
fn whole_answers() {
    for (raw, kind) in [
        (
            r#"{"id":"c","object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"mutable","refusal":null},"finish_reason":"length"}],"usage":{"prompt_tokens":13,"total_tokens":14,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":0}}}"#,
            EventKind::Token,
        ),
        (
            r#"{"choices":[{"index":0,"text":"","finish_reason":"abort"}],"usage":{"prompt_tokens":4,"completion_tokens":0}}"#,
            EventKind::AbortEmpty,
        ),
        (
            r#"{"choices":[{"index":0,"message":{"content":null,"tool_calls":[{"id":"t"}]},"finish_reason":"tool_calls"}]}"#,
            EventKind::Token,
        ),
        ("[]", EventKind::Other),
        ("", EventKind::Other),
    ] {
        assert_eq!(classify_json(raw.as_bytes()).kind, kind, "{raw}");
    }
}
