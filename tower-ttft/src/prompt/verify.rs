//! Comparing our tokens with an engine's, before and while they are believed.
use super::{Encoder, RemoteTokenizer};
use crate::peek::{self, Api, InferenceRequest};
use bytes::Bytes;
use http::HeaderMap;
use std::time::Duration;

/// What a comparison found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// So many probes had the same tokens.
    Same(usize),
    /// A probe (its index) has other tokens than the engine's, from this position on. All prompts of the model are
    /// approximate now.
    Different {
        /// Which probe.
        probe: usize,
        /// The first token that differs.
        at: usize,
    },
    /// There is no local tokenizer or the engine did not answer: nothing is known, nothing changes.
    Unknown,
}

// === impl Encoder ===

impl Encoder {
    /// Asks an engine for the tokens of some requests and compares them with ours. If any differ, the encoder makes
    /// all prompts approximate ([`Reason::Mismatch`](super::Reason::Mismatch)) until a later comparison finds them equal.
    ///
    /// `patience` bounds each question.
    pub async fn verify(
        &self,
        probes: &[InferenceRequest],
        remote: &dyn RemoteTokenizer,
        patience: Duration,
    ) -> Verdict {
        let mut same = 0;
        for (probe, req) in probes.iter().enumerate() {
            let Some(ours) = self.local_ids(req) else {
                continue;
            };
            let Ok(Ok(theirs)) = tokio::time::timeout(patience, remote.tokenize(req)).await else {
                continue;
            };
            if let Some(at) = difference(&ours, &theirs.prompts) {
                self.set_mismatched(true);
                tracing::warn!(
                    model = %self.model(), probe, at,
                    "the local tokenizer gives other tokens than the engine: prompts are approximate until they agree",
                );
                return Verdict::Different { probe, at };
            }
            same += 1;
        }
        if same == 0 {
            return Verdict::Unknown;
        }
        self.set_mismatched(false);
        Verdict::Same(same)
    }

    /// Chats and completions in which tokenizers and templates usually differ if they do: roles, turns, Unicode,
    /// digits, white space, code. `model` is the name that the engine serves.
    pub fn probes(model: &str) -> Vec<InferenceRequest> {
        let chats = [
            r#"[{"role":"user","content":"Hello there."}]"#,
            r#"[{"role":"system","content":"You answer in one word."},{"role":"user","content":"2 + 2?"},{"role":"assistant","content":"Four."},{"role":"user","content":"and 12345678 x 3?  \n\n  \tThanks!"}]"#,
            r#"[{"role":"user","content":"Größe: 5 µm, naïve café, 你好，世界, привет, שלום, 🙂👩‍👩‍👧, e\u0301, \u00a0\u200b"}]"#,
            r#"[{"role":"user","content":"fn main() {\n    let x = vec![1, 2, 3];\n\t// it's, I'll, WE'RE\n}\n"}]"#,
        ];
        let mut probes: Vec<_> = chats
            .iter()
            .map(|messages| probe(Api::Chat, model, "messages", messages))
            .collect();
        probes.push(probe(
            Api::Completions,
            model,
            "prompt",
            r#""Once upon a time""#,
        ));
        probes
    }
}

/// The first position at which they differ.
fn difference(ours: &[Vec<u32>], theirs: &[Vec<u32>]) -> Option<usize> {
    if ours.len() != theirs.len() {
        return Some(0);
    }
    ours.iter()
        .zip(theirs)
        .find_map(|(a, b)| (a != b).then(|| a.iter().zip(b).take_while(|(x, y)| x == y).count()))
}

fn probe(api: Api, model: &str, field: &str, value: &str) -> InferenceRequest {
    let model = serde_json::Value::from(model);
    let body = format!("{{\"model\":{model},\"{field}\":{value}}}");
    peek::read(api, &HeaderMap::new(), Bytes::from(body))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        chain::KeySpace,
        prompt::{
            Encode, EncoderParams, Reason, RemoteError, RemotePrompt, Source,
            encoder::tests::ByteModel,
        },
    };
    use futures::future::BoxFuture;
    use parking_lot::Mutex;
    use std::sync::Arc;

    struct Engine(Mutex<Option<u32>>);

    impl RemoteTokenizer for Engine {
        fn tokenize<'a>(
            &'a self,
            req: &'a InferenceRequest,
        ) -> BoxFuture<'a, Result<RemotePrompt, RemoteError>> {
            let add = *self.0.lock();
            let mut ids = ByteModel::ids_of(req);
            Box::pin(async move {
                let add = add.ok_or(RemoteError::Failed)?;
                if let Some(last) = ids.last_mut() {
                    *last += add;
                }
                Ok(RemotePrompt {
                    prompts: vec![ids],
                    source: Source::Tokenize,
                })
            })
        }
    }

    #[tokio::test(start_paused = true)]
    async fn other_tokens_make_prompts_approximate_until_they_agree_again() {
        let mut params = EncoderParams::new("m", KeySpace::new(1));
        params.local = Some(Arc::new(ByteModel::default()));
        let encoder = Encoder::new(params);
        let probes = Encoder::probes("m");
        let engine = Engine(Mutex::new(Some(0)));
        let patience = Duration::from_secs(1);
        assert_eq!(
            encoder.verify(&probes, &engine, patience).await,
            Verdict::Same(5)
        );
        assert_eq!(encoder.encode(&probes[0]).await.source, Source::Local);

        *engine.0.lock() = Some(1);
        let verdict = encoder.verify(&probes, &engine, patience).await;
        assert!(
            matches!(verdict, Verdict::Different { probe: 0, at } if at > 0),
            "{verdict:?}"
        );
        let prompt = encoder.encode(&probes[0]).await;
        assert_eq!(prompt.source, Source::Approximate(Reason::Mismatch));

        // No answer changes nothing, equal tokens do.
        *engine.0.lock() = None;
        assert_eq!(
            encoder.verify(&probes, &engine, patience).await,
            Verdict::Unknown
        );
        assert!(encoder.is_mismatched());
        *engine.0.lock() = Some(0);
        assert_eq!(
            encoder.verify(&probes, &engine, patience).await,
            Verdict::Same(5)
        );
        assert_eq!(encoder.encode(&probes[0]).await.source, Source::Local);
    }
}
