//! Chat templates as transformers renders them (`utils/chat_template_utils.py` of version 5).

mod dates;
mod dump;
mod environment;
mod format;
mod generation;
mod python;

use super::{
    Reason,
    chat::{Chat, ContentFormat, Kwargs, MEDIA_MARK, conversation, developer_to_system},
    json::Json,
    model::{Media, Text},
};
use minijinja::{Environment, Value};
use std::{borrow::Cow, sync::Arc, time::SystemTime};

/// What transformers puts behind the final message to find its end again.
const CONTINUE_TAG: &str = "CONTINUE_FINAL_MESSAGE_TAG ";

/// The name of the only template in an environment.
const NAME: &str = "chat";

/// The clock that templates ask for the date.
pub(super) type Clock = Arc<dyn Fn() -> SystemTime + Send + Sync>;

/// A compiled chat template.
pub(super) struct Template {
    environment: Environment<'static>,
    format: ContentFormat,
    knows_developer: bool,
    mentions_content: bool,
    /// `bos_token` and the like.
    specials: Vec<(String, String)>,
}

/// Why there is no rendered text. What the template said is not kept: it may quote the prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum RenderError {
    #[error("the template refused the messages")]
    Refused,
    #[error("the final message cannot be continued")]
    Continue,
}

// === impl Template ===

impl Template {
    /// Compiles a template. `format` overrides what its source says about the form of content.
    ///
    /// # Errors
    /// The syntax error, for the operator: it quotes the template, never a prompt.
    pub(super) fn new(
        source: &str,
        specials: Vec<(String, String)>,
        format: Option<ContentFormat>,
        now: Clock,
    ) -> Result<Self, minijinja::Error> {
        let rewritten = generation::without_tags(source);
        let mut environment = environment::chat(now);
        environment.add_template_owned(NAME, rewritten.to_string())?;
        Ok(Self {
            format: format.unwrap_or_else(|| format::detect(&rewritten)),
            knows_developer: ["\"developer\"", "'developer'"]
                .iter()
                .any(|n| source.contains(n)),
            mentions_content: source.contains("content"),
            environment,
            specials,
        })
    }

    /// Whether the template refuses system messages that are not first. vLLM finds that out with a bare environment,
    /// so a template that uses transformers' own functions counts as refusing.
    pub(super) fn wants_system_first(source: &str) -> bool {
        let mut bare = environment::bare();
        if bare.add_template_owned(NAME, source.to_owned()).is_err() {
            return true;
        }
        let message = |role: &str| {
            Json::Object(vec![
                ("role".into(), Json::Str(role.to_owned().into())),
                ("content".into(), Json::Str("t".into())),
            ])
        };
        let messages = ["system", "user", "system", "user"].map(|r| environment::value(message(r)));
        let context = environment::map(
            [
                ("messages".into(), Value::from(messages.to_vec())),
                ("add_generation_prompt".into(), Value::from(false)),
            ]
            .into_iter(),
        );
        let rendered = bare.get_template(NAME).and_then(|t| t.render(context));
        rendered.is_err()
    }

    /// The text of a conversation.
    pub(super) fn chat(&self, chat: Chat<'_>) -> Result<Text, Reason> {
        let (mut messages, parts) = conversation(chat.messages, self.format)?;
        if messages.is_empty() {
            return Err(Reason::Template);
        }
        if !self.knows_developer {
            messages = developer_to_system(messages);
        }
        let mut text = self
            .render(messages, chat.tools, chat.kwargs)
            .map_err(|_| Reason::Template)?;
        let mut after_media = None;
        if parts > 0 {
            // A template that dropped the part leaves nothing that could be trusted.
            let at = text.find(MEDIA_MARK).ok_or(Reason::Unsupported)?;
            after_media = Some(Media {
                parts,
                text_bytes: text.len() - at - MEDIA_MARK.len(),
            });
            text.truncate(at);
        }
        Ok(Text {
            text,
            add_special_tokens: chat.add_special_tokens,
            after_media,
        })
    }

    fn render(
        &self,
        mut messages: Vec<Json<'_>>,
        tools: Option<Json<'_>>,
        kwargs: Kwargs<'_>,
    ) -> Result<String, RenderError> {
        let go_on = kwargs.is_true("continue_final_message");
        let mut last_text = None;
        if go_on {
            if kwargs.is_true("add_generation_prompt") || !self.mentions_content {
                return Err(RenderError::Continue);
            }
            let last = messages.last_mut().ok_or(RenderError::Continue)?;
            last_text = Some(tag_end(last).ok_or(RenderError::Continue)?);
        }
        let mut context: Vec<(Cow<'_, str>, Value)> = self
            .specials
            .iter()
            .map(|(k, v)| (Cow::Borrowed(k.as_str()), Value::from(v.as_str())))
            .collect();
        // Later values override earlier ones.
        context.push(("documents".into(), Value::from(())));
        context.push((
            "tools".into(),
            tools.map_or(Value::from(()), environment::value),
        ));
        for (key, value) in kwargs.into_pairs() {
            context.push((key, environment::value(value)));
        }
        let messages: Vec<Value> = messages.into_iter().map(environment::value).collect();
        context.push(("messages".into(), Value::from(messages)));
        let context = environment::map(context.into_iter());
        let rendered = self
            .environment
            .get_template(NAME)
            .and_then(|t| t.render(context))
            .map_err(|_| RenderError::Refused)?;
        match last_text {
            None => Ok(rendered),
            Some(text) => cut_at_tag(rendered, &text).ok_or(RenderError::Continue),
        }
    }
}

/// Puts the tag behind the last text of a message and returns that text.
fn tag_end(message: &mut Json<'_>) -> Option<String> {
    let content = match message {
        Json::Object(pairs) => pairs
            .iter_mut()
            .find_map(|(k, v)| (k == "content").then_some(v))?,
        _ => return None,
    };
    let tag = |s: &mut Cow<'_, str>| {
        let text = s.to_string();
        s.to_mut().push_str(CONTINUE_TAG);
        text
    };
    match content {
        Json::Str(s) => Some(tag(s)),
        Json::Array(parts) => parts.iter_mut().rev().find_map(|p| match p {
            Json::Object(pairs) => pairs.iter_mut().find_map(|(k, v)| match v {
                Json::Str(s) if k == "text" => Some(tag(s)),
                _ => None,
            }),
            _ => None,
        }),
        _ => None,
    }
}

/// The rendered text up to the tag, without the space that a template trimmed.
fn cut_at_tag(mut rendered: String, text: &str) -> Option<String> {
    if !rendered.contains(python::strip(text, None)) {
        return None;
    }
    let at = rendered.rfind(CONTINUE_TAG.trim_end())?;
    let kept = rendered.get(at..)?.starts_with(CONTINUE_TAG);
    rendered.truncate(at);
    if !kept {
        let end = python::rstrip(&rendered, None).len();
        rendered.truncate(end);
    }
    Some(rendered)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn template(source: &str) -> Template {
        Template::new(
            source,
            vec![("bos_token".into(), "<s>".into())],
            None,
            Arc::new(|| SystemTime::UNIX_EPOCH),
        )
        .unwrap()
    }

    fn messages(text: &str) -> Vec<Json<'_>> {
        match Json::parse(text.as_bytes()).unwrap() {
            Json::Array(items) => items,
            _ => vec![],
        }
    }

    fn render(source: &str, given: &str, kwargs: &str) -> Result<String, RenderError> {
        let kwargs = Kwargs::of(Some(Json::parse(kwargs.as_bytes()).unwrap())).unwrap();
        template(source).render(messages(given), None, kwargs)
    }

    const TURNS: &str = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}";

    #[test]
    fn names_that_templates_ask_for_are_defined() {
        let source = "{{ tools is defined }} {{ tools is none }} {{ documents is none }} {{ eos_token is defined }} {{ bos_token }}";
        assert_eq!(
            render(source, "[1]", "{}").unwrap(),
            "True True True False <s>"
        );
        assert_eq!(
            render(
                "{{ bos_token }}{{ x }}",
                "[1]",
                r#"{"bos_token":"B","x":[1]}"#
            )
            .unwrap(),
            "B[1]"
        );
    }

    #[test]
    fn a_final_message_is_continued() {
        let given = r#"[{"role":"user","content":"q"},{"role":"assistant","content":"Once "}]"#;
        let on = r#"{"continue_final_message":true}"#;
        assert_eq!(
            render(TURNS, given, on).unwrap(),
            "<s>[user]q\n[assistant]Once "
        );
        // A template that trims loses the space, and so does the prompt.
        let trims = TURNS.replace("m.content", "m.content | trim");
        assert_eq!(
            render(&trims, given, on).unwrap(),
            "<s>[user]q\n[assistant]Once"
        );
        let both = r#"{"continue_final_message":true,"add_generation_prompt":true}"#;
        assert_eq!(render(TURNS, given, both), Err(RenderError::Continue));
        let drops = "{% for m in messages[:1] %}{{ m.content }}{% endfor %}";
        assert_eq!(render(drops, given, on), Err(RenderError::Continue));
        let parts = r#"[{"role":"assistant","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}]"#;
        let source =
            "{% for m in messages %}{% for c in m.content %}<{{ c.text }}>{% endfor %}{% endfor %}";
        assert_eq!(render(source, parts, on).unwrap(), "<a><b");
    }

    #[test]
    fn what_a_template_refuses_is_an_error_without_its_words() {
        let error = render(
            "{{ raise_exception('secret ' ~ messages[0].content) }}",
            r#"[{"content":"prompt"}]"#,
            "{}",
        );
        assert_eq!(error, Err(RenderError::Refused));
        assert!(!error.unwrap_err().to_string().contains("secret"));
    }

    #[test]
    fn syntax_errors_are_told_at_once() {
        let e = Template::new("{% for %}", vec![], None, Arc::new(SystemTime::now));
        assert!(e.is_err());
    }

    #[test]
    fn system_first_is_found_out_as_vllm_does() {
        let guard = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}{% endfor %}";
        assert!(Template::wants_system_first(guard));
        assert!(!Template::wants_system_first(
            "{% for m in messages %}{{ m.content }}{% endfor %}"
        ));
        assert!(
            Template::wants_system_first("{{ bos_token + 'x' }}"),
            "no bos_token there"
        );
        assert!(!Template::wants_system_first("{{ bos_token }}"));
        assert!(Template::wants_system_first(
            "{% generation %}x{% endgeneration %}"
        ));
        assert!(Template::wants_system_first("{{ strftime_now('%d') }}"));
    }
}
