//! Texts whose tokens are known: each token is one word of four letters and a space.

use crate::load::Chat;
use bytes::Bytes;
use serde::Deserialize;
use std::borrow::Cow;
use tower_ttft::{
    peek::InferenceRequest,
    prompt::{LocalModel, Reason, Rendered, Text},
};

/// Bytes of a token.
const WORD: usize = 5;

/// The simulated model's tokenizer and template.
#[derive(Clone, Copy, Debug)]
pub struct Words;

#[derive(Deserialize)]
struct Body<'a> {
    #[serde(borrow)]
    messages: Vec<Message<'a>>,
}

#[derive(Deserialize)]
struct Message<'a> {
    #[serde(borrow)]
    content: Content<'a>,
}

/// Clients send either form.
#[derive(Deserialize)]
#[serde(untagged)]
enum Content<'a> {
    Text(#[serde(borrow)] Cow<'a, str>),
    Parts(#[serde(borrow)] Vec<Part<'a>>),
}

#[derive(Deserialize)]
struct Part<'a> {
    #[serde(borrow)]
    text: Cow<'a, str>,
}

/// The text of tokens.
pub(super) fn text(tokens: &[u32]) -> String {
    let mut out = String::with_capacity(tokens.len() * WORD);
    for t in tokens {
        for shift in [15, 10, 5, 0] {
            // 32 letters: a to z, then A to F.
            let digit = (t >> shift & 31) as u8;
            out.push(char::from(if digit < 26 {
                b'a' + digit
            } else {
                b'A' + digit - 26
            }));
        }
        out.push(' ');
    }
    out
}

fn token(word: &[u8]) -> u32 {
    word.iter().take(WORD - 1).fold(0, |t, letter| {
        let digit = match letter {
            b'a'..=b'z' => letter - b'a',
            letter => letter.wrapping_sub(b'A').wrapping_add(26),
        };
        t << 5 | u32::from(digit & 31)
    })
}

/// A chat as the published run's client sends it.
pub(super) fn body(chat: &Chat, output: u32) -> Bytes {
    Bytes::from(chat.request(super::MODEL, output, text).to_string())
}

impl LocalModel for Words {
    fn render(&self, req: &InferenceRequest) -> Result<Rendered, Reason> {
        let body: Body<'_> = serde_json::from_slice(&req.body).map_err(|_| Reason::Unread)?;
        let [head, between, tail] = Chat::template();
        let mut out = text(&head);
        for (i, message) in body.messages.iter().enumerate() {
            if i > 0 {
                out += &text(&between);
            }
            match &message.content {
                Content::Text(t) => out += t,
                Content::Parts(parts) => parts.iter().for_each(|p| out += &p.text),
            }
        }
        out += &text(&tail);
        Ok(Rendered {
            texts: vec![Text::new(out, false)],
            truncate: None,
        })
    }

    fn uncached(&self, text: &Text) -> usize {
        text.text.len()
    }

    fn tokenize(&self, text: &Text) -> Result<Vec<u32>, Reason> {
        Ok(text.text.as_bytes().chunks_exact(WORD).map(token).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::{Pattern, Script, Windows, Workload};
    use http::HeaderMap;
    use tower_ttft::peek::{self, Api};

    #[test]
    fn bodies_become_the_tokens_they_were_made_of() {
        for workload in Workload::ALL {
            let pattern = Pattern::Closed { streams: 1 };
            let mut script = Script::new(workload, pattern, Windows::CAPACITY, 1);
            for at in 0..9 {
                let sent = script.send().expect("due at once");
                let body = body(&sent.chat, sent.output);
                let request = peek::read(Api::Chat, &HeaderMap::new(), body);
                assert!(request.stream && request.model.as_deref() == Some(super::super::MODEL));
                let rendered = Words.render(&request).expect("readable");
                let tokens = Words.tokenize(&rendered.texts[0]).expect("words");
                assert_eq!(tokens[..], sent.chat.tokens[..], "{workload:?}");
                script.ended(sent.id, f64::from(at), true);
            }
        }
    }
}
