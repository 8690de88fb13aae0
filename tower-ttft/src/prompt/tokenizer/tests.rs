use super::{ChatTemplate, LoadError, LocalParams, LocalTokenizer};
use crate::{
    peek::Api,
    prompt::{LocalModel, Reason, Text, read::tests::request},
};
use proptest::prelude::*;
use serde_json::{Value, json};
use std::{
    fs,
    path::{Path, PathBuf},
};

/// A directory that goes away with its test.
pub(super) struct Dir(PathBuf);

impl Dir {
    pub(super) fn new() -> Self {
        let n = rand::random::<u64>();
        let path = std::env::temp_dir().join(format!("tower-ttft-{n:x}"));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub(super) fn path(&self) -> &std::path::Path {
        &self.0
    }

    pub(super) fn write(&self, name: &str, text: &str) {
        fs::write(self.0.join(name), text).unwrap();
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/tiny");

/// Its beginning-of-text token.
const BEGIN: u32 = 640;

fn tiny() -> LocalTokenizer {
    LocalTokenizer::load(Path::new(TINY), LocalParams::new(7)).unwrap()
}

/// A copy of the tiny tokenizer's directory with a change to one of its files.
fn changed(file: &str, change: impl FnOnce(&mut Value)) -> Dir {
    let dir = Dir::new();
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        dir.write(
            name,
            &fs::read_to_string(Path::new(TINY).join(name)).unwrap(),
        );
    }
    let mut json =
        serde_json::from_str(&fs::read_to_string(dir.path().join(file)).unwrap()).unwrap();
    change(&mut json);
    dir.write(file, &json.to_string());
    dir
}

fn load(dir: &Dir) -> Result<LocalTokenizer, LoadError> {
    LocalTokenizer::load(dir.path(), LocalParams::new(7))
}

fn render(local: &LocalTokenizer, api: Api, body: &Value) -> Result<Vec<String>, Reason> {
    let rendered = local.render(&request(api, &body.to_string()))?;
    Ok(rendered.texts.into_iter().map(|t| t.text).collect())
}

fn ids(local: &LocalTokenizer, api: Api, body: &Value) -> Vec<Vec<u32>> {
    let rendered = local.render(&request(api, &body.to_string())).unwrap();
    rendered
        .texts
        .iter()
        .map(|t| local.tokenize(t).unwrap())
        .collect()
}

#[test]
fn ids_are_those_of_the_library_that_made_it() {
    // Written by Hugging Face's tokenizers.
    let local = tiny();
    let prompt = |text: &str| ids(&local, Api::Completions, &json!({"prompt": text}));
    let hello = vec![
        640, 39, 370, 308, 548, 639, 11, 220, 16, 17, 18, 19, 20, 0, 198, 198, 160, 121, 254, 161,
        98, 121, 220, 127, 102,
    ];
    assert_eq!(prompt("Hello there, 12345!\n\n你好 e\u{301}"), [hello]);
    let code = vec![
        640, 288, 220, 87, 271, 220, 364, 66, 0, 58, 16, 11, 220, 17, 60, 26,
    ];
    assert_eq!(prompt("let x = vec![1, 2];"), [code]);
}

#[test]
fn special_tokens_go_around_texts_and_not_around_chats() {
    let local = tiny();
    let first = |api, body: Value| ids(&local, api, &body)[0][..2].to_vec();
    let messages = json!([{"role": "user", "content": "hi"}]);
    let start = first(Api::Chat, json!({"messages": messages}))[1];
    assert_eq!(
        first(Api::Completions, json!({"prompt": "<|im_start|>"})),
        [BEGIN, start]
    );
    assert_eq!(
        first(
            Api::Completions,
            json!({"prompt": "<|im_start|>a", "add_special_tokens": false})
        )[0],
        start
    );
    assert_eq!(
        first(Api::Chat, json!({"messages": messages})),
        [BEGIN, start]
    );
    // The template puts one; so does the tokenizer if it is told to, and for this API it always is.
    assert_eq!(
        first(
            Api::Chat,
            json!({"messages": messages, "add_special_tokens": true})
        ),
        [BEGIN, BEGIN]
    );
    assert_eq!(
        first(Api::Responses, json!({"input": "hi"})),
        [BEGIN, BEGIN]
    );
    assert_eq!(
        first(Api::Messages, json!({"messages": messages})),
        [BEGIN, start]
    );
    assert_eq!(
        first(Api::Embeddings, json!({"input": "<|im_start|>"})),
        [BEGIN, start]
    );
}

#[test]
fn without_a_post_processor_the_configuration_decides() {
    let without = |add: bool| {
        let dir = changed("tokenizer.json", |t| t["post_processor"] = Value::Null);
        let config = fs::read_to_string(dir.path().join("tokenizer_config.json")).unwrap();
        dir.write(
            "tokenizer_config.json",
            &config.replacen('{', &format!("{{\"add_bos_token\":{add},"), 1),
        );
        ids(
            &load(&dir).unwrap(),
            Api::Completions,
            &json!({"prompt": "a"}),
        )[0]
        .clone()
    };
    assert_eq!(without(true)[0], BEGIN);
    assert_eq!(without(true)[1..], without(false));
}

#[test]
fn truncation_and_padding_of_the_file_mean_nothing() {
    let dir = changed("tokenizer.json", |t| {
        t["truncation"] =
            json!({"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0});
        t["padding"] = json!({"strategy": {"Fixed": 50}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0, "pad_type_id": 0, "pad_token": "x"});
    });
    let long = json!({"prompt": "one two three four"});
    assert_eq!(
        ids(&load(&dir).unwrap(), Api::Completions, &long),
        ids(&tiny(), Api::Completions, &long)
    );
}

#[test]
fn the_ninth_turn_tokenizes_only_what_is_new() {
    let local = tiny();
    let said = |turn: usize, who: &str| {
        format!(
            "{who} says something long enough in turn {turn}: {}",
            "word ".repeat(200)
        )
    };
    let mut messages = vec![json!({"role": "system", "content": "Be brief. ".repeat(100)})];
    let mut last = 0;
    for turn in 0..9 {
        messages.push(json!({"role": "user", "content": said(turn, "the user")}));
        let before = local.cache_stats().miss_bytes;
        let body = json!({"messages": messages});
        ids(&local, Api::Chat, &body);
        last = local.cache_stats().miss_bytes - before;
        let text: usize = render(&local, Api::Chat, &body).unwrap()[0].len();
        if turn == 8 {
            assert!(text > 15_000, "a long conversation: {text}");
        }
        messages.push(json!({"role": "assistant", "content": said(turn, "the assistant")}));
    }
    // The answer before and the question now, with their roles.
    let new = (said(7, "the assistant").len() + said(8, "the user").len()) as u64;
    assert!(
        (new..new + 100).contains(&last),
        "{last} bytes tokenized, {new} are new"
    );
    // The same again costs nothing, and another conversation pays for its own words only.
    let before = local.cache_stats().miss_bytes;
    let body = json!({"messages": &messages[..messages.len() - 1]});
    assert_eq!(
        local.uncached(
            &local
                .render(&request(Api::Chat, &body.to_string()))
                .unwrap()
                .texts[0]
        ),
        0
    );
    ids(&local, Api::Chat, &body);
    assert_eq!(local.cache_stats().miss_bytes, before);
    ids(
        &local,
        Api::Chat,
        &json!({"messages": [messages[0], {"role": "user", "content": "short"}]}),
    );
    assert!(local.cache_stats().miss_bytes - before < 40);
}

#[test]
fn a_full_cache_still_gives_the_right_ids() {
    let mut params = LocalParams::new(7);
    params.cache_bytes = 1_000;
    let small = LocalTokenizer::load(Path::new(TINY), params).unwrap();
    let large = tiny();
    for i in 0..50 {
        let body = json!({"messages": [{"role": "user", "content": format!("message {i} ").repeat(1 + i % 7)}]});
        assert_eq!(ids(&small, Api::Chat, &body), ids(&large, Api::Chat, &body));
        assert!(small.cache_stats().bytes <= 1_000);
    }
}

#[test]
fn media_hides_what_follows_it() {
    let local = tiny();
    let image = json!({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}});
    let messages = json!([{"role": "system", "content": "s".repeat(50)}, {"role": "user", "content": [{"type": "text", "text": "what is this?"}, image, image]}]);
    let rendered = local
        .render(&request(
            Api::Chat,
            &json!({"messages": messages}).to_string(),
        ))
        .unwrap();
    let text = &rendered.texts[0];
    assert!(text.text.ends_with("<|im_start|>user\n"), "{}", text.text);
    let after = text.after_media.as_ref().unwrap();
    assert_eq!(after.parts, 2);
    assert_eq!(
        after.text_bytes,
        "\nwhat is this?<|im_end|>\n<|im_start|>assistant\n".len()
    );
}

#[test]
fn templates_are_chosen_by_tools_and_can_be_given() {
    let dir = changed("tokenizer_config.json", |c| {
        c["chat_template"] = json!([{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]);
    });
    let plain = json!({"messages": [{"role": "user", "content": "x"}]});
    let tools = json!({"messages": [{"role": "user", "content": "x"}], "tools": [{"function": {"name": "f"}}]});
    let local = load(&dir).unwrap();
    assert_eq!(render(&local, Api::Chat, &plain).unwrap(), ["plain"]);
    assert_eq!(render(&local, Api::Chat, &tools).unwrap(), ["tools"]);
    let given = |template: ChatTemplate| {
        let mut params = LocalParams::new(7);
        params.chat_template = Some(template);
        LocalTokenizer::load(dir.path(), params)
    };
    let named = given(ChatTemplate::Named("tool_use".into())).unwrap();
    assert_eq!(render(&named, Api::Chat, &plain).unwrap(), ["tools"]);
    let mine = given(ChatTemplate::Source("mine".into())).unwrap();
    assert_eq!(render(&mine, Api::Chat, &tools).unwrap(), ["mine"]);
    let error = given(ChatTemplate::Named("mine".into())).unwrap_err();
    let error = error.to_string();
    assert!(
        error.contains("no chat template `mine`") && error.contains(r#"["default", "tool_use"]"#),
        "{error}"
    );
    // A processor's template goes before the tokenizer's, but not with tools.
    dir.write("chat_template.json", r#"{"chat_template":"processor"}"#);
    let local = load(&dir).unwrap();
    assert_eq!(render(&local, Api::Chat, &plain).unwrap(), ["processor"]);
    assert_eq!(render(&local, Api::Chat, &tools).unwrap(), ["tools"]);
}

#[test]
fn without_a_template_only_chats_are_not_tokenized() {
    let dir = changed("tokenizer_config.json", |c| {
        c["chat_template"] = Value::Null
    });
    let local = load(&dir).unwrap();
    assert!(!local.has_template());
    let chat = json!({"messages": [{"role": "user", "content": "x"}]});
    assert_eq!(render(&local, Api::Chat, &chat), Err(Reason::Template));
    assert_eq!(
        render(&local, Api::Completions, &json!({"prompt": "x"})).unwrap(),
        ["x"]
    );
}

#[test]
fn the_servers_default_arguments_are_overridden_by_requests() {
    let mut params = LocalParams::new(7);
    params.default_chat_template_kwargs = json!({"enable_thinking": false})
        .as_object()
        .unwrap()
        .clone();
    let local = LocalTokenizer::load(Path::new(TINY), params.clone()).unwrap();
    let end = |extra: Value| {
        let mut body = json!({"messages": [{"role": "user", "content": "x"}]});
        body.as_object_mut()
            .unwrap()
            .extend(extra.as_object().unwrap().clone());
        render(&local, Api::Chat, &body).unwrap()[0].ends_with("<think></think>")
    };
    assert!(end(json!({})));
    assert!(!end(
        json!({"chat_template_kwargs": {"enable_thinking": true}})
    ));
    assert!(!end(json!({"reasoning_effort": "high"})));
    params.default_chat_template_kwargs = json!({"tokenize": true}).as_object().unwrap().clone();
    let error = LocalTokenizer::load(Path::new(TINY), params)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("default_chat_template_kwargs") && error.contains("remove"),
        "{error}"
    );
}

#[test]
fn load_errors_name_the_file_and_the_remedy() {
    let dir = changed("tokenizer.json", |_| ());
    let with = |name: &str, text: &str| {
        let old = fs::read_to_string(dir.path().join(name)).ok();
        dir.write(name, text);
        let error = load(&dir).unwrap_err().to_string();
        match old {
            Some(old) => dir.write(name, &old),
            None => fs::remove_file(dir.path().join(name)).unwrap(),
        }
        error
    };
    let broken = with("tokenizer.json", "{");
    assert!(
        broken.contains("tokenizer.json is not valid") && broken.contains("fetch it again"),
        "{broken}"
    );
    let odd = changed(
        "tokenizer.json",
        |t| t["pre_tokenizer"] = json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": true}),
    );
    let odd = load(&odd).unwrap_err().to_string();
    assert!(
        odd.contains("tokenizer.json") && odd.contains("leave the tokenizer out"),
        "{odd}"
    );
    let template = with("chat_template.jinja", "{% for %}");
    assert!(
        template.contains("chat template") && template.contains("give another one"),
        "{template}"
    );
    fs::remove_file(dir.path().join("tokenizer.json")).unwrap();
    let missing = load(&dir).unwrap_err().to_string();
    assert!(
        missing.contains("tokenizer.json is missing: copy it"),
        "{missing}"
    );
}

#[test]
fn tokens_that_are_looked_for_in_changed_text_are_not_cut_at() {
    let dir = changed("tokenizer.json", |t| {
        for token in t["added_tokens"].as_array_mut().unwrap() {
            if token["content"] == "<think>" {
                token["normalized"] = Value::from(true);
            }
        }
    });
    let local = load(&dir).unwrap();
    assert!(matches!(local.cuts, super::Cuts::Nowhere));
    for text in ["a<think>b", "<|im_start|>x<think>", ""] {
        let got = local.tokenize(&Text::new(text, true)).unwrap();
        assert_eq!(got, local.encode_whole(text, true).unwrap());
    }
    // Where nothing is changed they are.
    let dir = changed("tokenizer.json", |t| {
        t["normalizer"] = json!({"type": "Sequence", "normalizers": []});
        for token in t["added_tokens"].as_array_mut().unwrap() {
            token["normalized"] = Value::from(token["special"] == false);
        }
    });
    let local = load(&dir).unwrap();
    assert!(matches!(local.cuts, super::Cuts::Twice(_)));
    let text = "a<think>b</think><|im_start|>c<think>";
    assert_eq!(
        local.tokenize(&Text::new(text, true)).unwrap(),
        local.encode_whole(text, true).unwrap()
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Cut into segments and remembered, a text has the ids that it has as a whole.
    #[test]
    fn segments_are_exact(pieces in prop::collection::vec(prop_oneof![
        "\\PC{0,12}", "[ \n\ta-z0-9'.]{0,20}",
        prop::sample::select(vec!["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<|begin|>", "<|im_", "e\u{301}", "\u{338}", "Å", "  ", "\r\n"]).prop_map(String::from),
    ], 0..12), special in any::<bool>()) {
        let local = shared();
        let text = pieces.concat();
        let whole = local.encode_whole(&text, special).unwrap();
        let t = Text::new(text, special);
        prop_assert_eq!(&local.tokenize(&t).unwrap(), &whole);
        prop_assert_eq!(local.uncached(&t), 0);
        prop_assert_eq!(&local.tokenize(&t).unwrap(), &whole);
    }

    /// No body makes anything panic.
    #[test]
    fn any_body_is_rendered_or_refused(api in prop::sample::select(vec![Api::Chat, Api::Completions, Api::Responses, Api::Messages, Api::Embeddings, Api::Rerank]),
        fields in prop::collection::btree_map(prop::sample::select(vec![
            "messages", "prompt", "input", "tools", "tool_choice", "chat_template_kwargs", "documents", "instructions", "system",
            "thinking", "reasoning", "reasoning_effort", "add_generation_prompt", "continue_final_message", "truncate_prompt_tokens", "kv_transfer_params",
        ]), value(4), 0..6)) {
        let body = Value::Object(fields.into_iter().map(|(k, v)| (k.to_owned(), v)).collect());
        let req = request(api, &body.to_string());
        if let Ok(rendered) = shared().render(&req) {
            for text in &rendered.texts {
                let _ = shared().tokenize(text);
            }
        }
    }
}

/// One for all cases of a property.
fn shared() -> &'static LocalTokenizer {
    static SHARED: std::sync::LazyLock<LocalTokenizer> = std::sync::LazyLock::new(tiny);
    &SHARED
}

/// JSON of the kind that requests are made of.
fn value(depth: u32) -> impl Strategy<Value = Value> {
    let words = prop::sample::select(vec![
        "user",
        "assistant",
        "system",
        "developer",
        "tool",
        "text",
        "image_url",
        "function",
        "message",
        "function_call",
        "reasoning",
        "tool_use",
        "tool_result",
        "thinking",
        "none",
        "auto",
        "x",
        "",
    ]);
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i32>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        words.prop_map(Value::from),
        "\\PC{0,8}".prop_map(Value::from),
    ];
    let keys = prop::sample::select(vec![
        "role",
        "content",
        "type",
        "text",
        "name",
        "tool_calls",
        "function",
        "arguments",
        "id",
        "parameters",
        "input",
        "output",
        "call_id",
        "status",
        "summary",
        "image_url",
        "uuid",
        "thinking",
        "source",
        "tool_use_id",
        "tools",
        "input_schema",
        "prompt_token_ids",
        "effort",
    ]);
    leaf.prop_recursive(depth, 40, 5, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
            prop::collection::btree_map(keys.clone(), inner, 0..5).prop_map(|m| Value::Object(
                m.into_iter().map(|(k, v)| (k.to_owned(), v)).collect()
            )),
        ]
    })
}
