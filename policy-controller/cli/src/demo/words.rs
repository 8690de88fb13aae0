//! Requests as the published run's client sends them, in the words of the simulated model.

use bytes::Bytes;
use forebay_sim::{Words, load::Sent};

/// The model's name.
pub(super) const MODEL: &str = "demo-27b";

/// A text of as many tokens, the same for the same ones.
fn text(tokens: &[u32]) -> String {
    // FNV-1a, here over whole numbers.
    let seed = tokens.iter().fold(0xcbf2_9ce4_8422_2325_u64, |h, t| {
        (h ^ u64::from(*t)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    Words::new(seed).text(tokens.len())
}

/// The body of a request.
pub(super) fn body(sent: &Sent) -> Bytes {
    Bytes::from(sent.chat.request(MODEL, sent.output, text).to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::demo::tokenizer;
    use forebay_sim::load::{Pattern, Script, Windows, Workload};
    use http::HeaderMap;
    use tower_ttft::peek::{self, Api};

    /// The most tokens that the template adds to a message's own, and before the answer.
    const TEMPLATE: usize = 16;

    fn prompts(workload: Workload, n: u32) -> Vec<(usize, Vec<u32>)> {
        let tokenizer = tokenizer::load(1).expect("it comes with the simulator");
        let pattern = Pattern::Closed { streams: 1 };
        let mut script = Script::new(workload, pattern, Windows::CAPACITY, 1);
        let prompt = |at| {
            let sent = script.send().expect("due at once");
            script.ended(sent.id, f64::from(at), true);
            let request = peek::read(Api::Chat, &HeaderMap::new(), body(&sent));
            assert!(request.stream && request.model.as_deref() == Some(MODEL));
            let rendered = tokenizer.render(&request).expect("readable");
            let own = sent.chat.messages.iter().map(|m| m.len()).sum();
            let ids = tokenizer.tokenize(&rendered.texts[0]).expect("words");
            (own, ids)
        };
        (0..n).map(prompt).collect()
    }

    #[test]
    fn prompts_have_about_the_tokens_that_were_meant() {
        for workload in Workload::ALL {
            for (own, ids) in prompts(workload, 3) {
                let most = own + 6 * TEMPLATE;
                assert!((own..most).contains(&ids.len()), "{own} {}", ids.len());
            }
        }
    }

    #[test]
    fn a_turn_begins_with_the_one_before() {
        let turns = prompts(Workload::Multiturn, 3);
        for pair in turns.windows(2) {
            let kept = pair[0].1.len() - TEMPLATE;
            assert_eq!(pair[0].1[..kept], pair[1].1[..kept]);
        }
    }
}
