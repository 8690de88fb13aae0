//! OpenAI's chat completions, completions and embeddings.
use super::{Ask, Chat, Kwargs, Ways, field, list, switch, truncate};
use crate::{
    peek::InferenceRequest,
    prompt::{Reason, json::Json, read},
};

/// `/v1/chat/completions`.
pub(super) fn chat(req: &InferenceRequest, ways: Ways) -> Result<Chat<'_>, Reason> {
    if !read::is_null(req, "chat_template") {
        return Err(Reason::Unsupported);
    }
    let messages = list(field(req, "messages")?.ok_or(Reason::Unsupported)?)?
        .into_iter()
        .map(message)
        .collect::<Result<_, _>>()?;
    let choice = field(req, "tool_choice")?;
    let none = choice.as_ref().and_then(Json::as_str) == Some("none");
    let tools = match field(req, "tools")? {
        Some(_) if none && ways.exclude_tools_when_none => None,
        Some(tools) => Some(self::tools(list(tools)?)?),
        None => None,
    };
    let mut kwargs = Kwargs::of(field(req, "chat_template_kwargs")?)?;
    kwargs.effort(field(req, "reasoning_effort")?);
    generation(req, &mut kwargs, true)?;
    if let Some(documents) = field(req, "documents")? {
        kwargs.merge("documents", documents);
    }
    Ok(Chat {
        messages,
        tools,
        kwargs,
        add_special_tokens: switch(req, "add_special_tokens", false)?,
        truncate: truncate(req)?,
    })
}

/// `/v1/completions` with text.
pub(super) fn completions(req: &InferenceRequest) -> Result<Ask<'_>, Reason> {
    let strange = ["prompt_embeds", "suffix"]
        .iter()
        .any(|f| !read::is_null(req, f));
    if strange {
        return Err(Reason::Unsupported);
    }
    texts(req, field(req, "prompt")?)
}

/// `/v1/embeddings` and `/pooling`, with text or with messages.
pub(super) fn embeddings(req: &InferenceRequest) -> Result<Ask<'_>, Reason> {
    if !read::is_null(req, "padding") {
        return Err(Reason::Unsupported);
    }
    let input = field(req, "input")?;
    let messages = match (field(req, "messages")?, input) {
        (Some(messages), _) => messages,
        (None, Some(Json::Array(items))) if items.iter().all(is_message) && !items.is_empty() => {
            Json::Array(items)
        }
        (None, input) => return texts(req, input),
    };
    if !read::is_null(req, "chat_template") {
        return Err(Reason::Unsupported);
    }
    let messages = list(messages)?;
    if messages.iter().any(|m| matches!(m, Json::Array(_))) {
        return Err(Reason::Unsupported);
    }
    let mut kwargs = Kwargs::of(field(req, "chat_template_kwargs")?)?;
    generation(req, &mut kwargs, false)?;
    Ok(Ask::Chat(Chat {
        messages: messages
            .into_iter()
            .map(message)
            .collect::<Result<_, _>>()?,
        tools: None,
        kwargs,
        add_special_tokens: switch(req, "add_special_tokens", false)?,
        truncate: truncate(req)?,
    }))
}

/// A message as vLLM's request model has it: typed dictionaries in the order of their types, then the rest.
pub(super) fn message(mut m: Json<'_>) -> Result<Json<'_>, Reason> {
    if !matches!(m, Json::Object(_)) {
        return Err(Reason::Unsupported);
    }
    // The older name of a field. A null in the newer one does not count.
    if let Some(reasoning) = m.take("reasoning_content")
        && m.some("reasoning").is_none()
    {
        m.set("reasoning", reasoning);
    }
    if let Some(Json::Array(calls)) = m.take("tool_calls") {
        let calls = calls
            .into_iter()
            .map(|c| nested(c, &["id", "function", "type"], &["arguments", "name"]));
        let calls = calls.collect();
        m.set("tool_calls", Json::Array(calls));
    }
    if m.text("role") == Some("developer")
        && let Some(Json::Array(tools)) = m.take("tools")
    {
        let order = ["name", "description", "parameters", "strict"];
        let tools = tools
            .into_iter()
            .map(|t| nested(t, &["function", "type"], &order));
        let tools = tools.collect();
        m.set("tools", Json::Array(tools));
    }
    Ok(m)
}

/// An object and the `function` in it, both in order.
fn nested<'a>(mut outer: Json<'a>, order: &[&str], inner: &[&str]) -> Json<'a> {
    if let Some(function) = outer.take("function") {
        outer.set("function", function.reordered(inner));
    }
    outer.reordered(order)
}

/// Tools as vLLM's request model dumps them: all known fields, in its order, and no others.
pub(super) fn tools(tools: Vec<Json<'_>>) -> Result<Json<'_>, Reason> {
    tools
        .into_iter()
        .map(|mut t| {
            if t.some("type")
                .is_some_and(|t| t.as_str() != Some("function"))
            {
                return Err(Reason::Unsupported);
            }
            let defer = t.take("defer_loading");
            let mut function = t.take("function").ok_or(Reason::Unsupported)?;
            if let Some(defer) = &defer
                && function.some("defer_loading").is_none()
            {
                function.set("defer_loading", defer.clone());
            }
            let mut dumped = Json::object([
                ("type", Json::str("function")),
                ("function", self::function(function)?),
            ]);
            if let Some(defer) = defer {
                dumped.set("defer_loading", defer);
            }
            Ok(dumped)
        })
        .collect::<Result<Vec<_>, _>>()
        .map(Json::Array)
}

/// The definition of a function as vLLM dumps it.
pub(super) fn function(mut f: Json<'_>) -> Result<Json<'_>, Reason> {
    let name = f.take("name").filter(|n| n.as_str().is_some());
    let mut dumped = Json::object([
        ("name", name.ok_or(Reason::Unsupported)?),
        ("description", f.take("description").unwrap_or(Json::Null)),
        ("parameters", f.take("parameters").unwrap_or(Json::Null)),
    ]);
    for key in ["strict", "defer_loading"] {
        match f.take(key) {
            None => {}
            Some(value @ Json::Bool(_)) => dumped.set(key, value),
            Some(_) => return Err(Reason::Unsupported),
        }
    }
    Ok(dumped)
}

/// The two switches every template knows.
fn generation<'a>(
    req: &'a InferenceRequest,
    kwargs: &mut Kwargs<'a>,
    default: bool,
) -> Result<(), Reason> {
    let add = switch(req, "add_generation_prompt", default)?;
    let go_on = switch(req, "continue_final_message", false)?;
    kwargs.merge("add_generation_prompt", Json::Bool(add));
    kwargs.merge("continue_final_message", Json::Bool(go_on));
    Ok(())
}

fn texts<'a>(req: &'a InferenceRequest, input: Option<Json<'a>>) -> Result<Ask<'a>, Reason> {
    let texts = match input {
        Some(text @ Json::Str(_)) => vec![text],
        Some(Json::Array(texts)) if texts.iter().all(|t| t.as_str().is_some()) => texts,
        _ => return Err(Reason::Unsupported),
    };
    if texts.is_empty() {
        return Err(Reason::Unsupported);
    }
    Ok(Ask::Texts {
        texts,
        add_special_tokens: switch(req, "add_special_tokens", true)?,
        truncate: truncate(req)?,
    })
}

fn is_message(value: &Json<'_>) -> bool {
    value.text("role").is_some()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{peek::Api, prompt::read::tests::request};

    fn ask(body: &str, ways: Ways) -> Result<Chat<'static>, Reason> {
        let req = request(Api::Chat, body);
        let c = chat(&req, ways)?;
        Ok(Chat {
            messages: c.messages.into_iter().map(Json::into_owned).collect(),
            tools: c.tools.map(Json::into_owned),
            kwargs: c.kwargs.into_owned(),
            ..Chat {
                messages: vec![],
                tools: None,
                kwargs: Kwargs::default(),
                add_special_tokens: c.add_special_tokens,
                truncate: c.truncate,
            }
        })
    }

    #[test]
    fn tools_are_dumped_with_all_fields_in_order() {
        let body = r#"{"messages":[],"tools":[
            {"function":{"strict":true,"name":"f","parameters":{"b":1,"a":[1.0,null]},"x":1,"description":"d"},"type":"function","y":2},
            {"type":"function","function":{"name":"g","strict":null},"defer_loading":true},
            {"function":{"name":"h"}}]}"#;
        let want = br#"[
            {"type":"function","function":{"name":"f","description":"d","parameters":{"b":1,"a":[1.0,null]},"strict":true}},
            {"type":"function","function":{"name":"g","description":null,"parameters":null,"defer_loading":true},"defer_loading":true},
            {"type":"function","function":{"name":"h","description":null,"parameters":null}}]"#;
        assert_eq!(
            ask(body, Ways::default()).unwrap().tools,
            Some(Json::parse(want).unwrap())
        );
    }

    #[test]
    fn tools_go_only_if_the_server_drops_them() {
        let body = r#"{"messages":[],"tool_choice":"none","tools":[{"function":{"name":"h"}}]}"#;
        assert!(ask(body, Ways::default()).unwrap().tools.is_some());
        let ways = Ways {
            exclude_tools_when_none: true,
            ..Ways::default()
        };
        assert!(ask(body, ways).unwrap().tools.is_none());
    }

    #[test]
    fn messages_get_the_order_of_their_types() {
        let m = br#"{"reasoning_content":"r","tool_calls":[{"function":{"zz":1,"name":"f","arguments":"{}"},"index":3,"type":"function","id":"1"}],"role":"assistant"}"#;
        let got = message(Json::parse(m).unwrap()).unwrap();
        let want = br#"[{"id":"1","function":{"arguments":"{}","name":"f","zz":1},"type":"function","index":3}]"#;
        assert_eq!(got.get("tool_calls"), Some(&Json::parse(want).unwrap()));
        assert_eq!(got.text("reasoning"), Some("r"));
        assert_eq!(got.get("reasoning_content"), None);
    }

    #[test]
    fn switches_and_effort_reach_the_template() {
        let body = r#"{"messages":[],"reasoning_effort":"none","add_special_tokens":true,"truncate_prompt_tokens":-1,
            "continue_final_message":true,"add_generation_prompt":false,"documents":[{"text":"t"}],"chat_template_kwargs":{"add_generation_prompt":true,"x":1}}"#;
        let c = ask(body, Ways::default()).unwrap();
        assert!(c.add_special_tokens && c.truncate.is_none());
        for (key, value) in [
            ("add_generation_prompt", Json::Bool(false)),
            ("continue_final_message", Json::Bool(true)),
            ("enable_thinking", Json::Bool(false)),
            ("x", Json::Int(1)),
        ] {
            assert_eq!(c.kwargs.get(key), Some(&value), "{key}");
        }
        assert!(c.kwargs.has("documents"));
        assert!(ask(r#"{"messages":[],"chat_template":"x"}"#, Ways::default()).is_err());
    }

    #[test]
    fn embeddings_take_texts_or_messages() {
        let of = |body: &str| {
            let req = request(Api::Embeddings, body);
            embeddings(&req).map(|a| match a {
                Ask::Texts {
                    texts,
                    add_special_tokens,
                    ..
                } => (texts.len(), add_special_tokens, None),
                Ask::Chat(c) => (
                    c.messages.len(),
                    c.add_special_tokens,
                    Some(c.kwargs.is_true("add_generation_prompt")),
                ),
            })
        };
        assert_eq!(of(r#"{"input":"a"}"#), Ok((1, true, None)));
        assert_eq!(of(r#"{"input":["a","b"]}"#), Ok((2, true, None)));
        let messages = r#"[{"role":"user","content":"x"}]"#;
        assert_eq!(
            of(&format!(r#"{{"messages":{messages}}}"#)),
            Ok((1, false, Some(false)))
        );
        assert_eq!(
            of(&format!(r#"{{"input":{messages}}}"#)),
            Ok((1, false, Some(false)))
        );
        for bad in [
            r#"{"input":[]}"#,
            r#"{"input":[1,"a"]}"#,
            "{}",
            r#"{"input":"a","padding":"max_length"}"#,
        ] {
            assert!(of(bad).is_err(), "{bad}");
        }
    }
}
