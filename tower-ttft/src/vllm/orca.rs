//! Load that comes with answers: the header `endpoint-load-metrics` in ORCA's TEXT and JSON forms
//! (<https://docs.google.com/document/d/1C1ybMmDKJIVlrbOLbywhu9iRYo4rilR-cT50OTtOFTs>), as vLLM sends it when a request asks
//! with `endpoint-load-metrics-format`. vLLM gives two numbers, and never on streams.

use serde::Deserialize;
use std::collections::HashMap;

/// The part of a load report that an answer carries.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct AnswerLoad {
    /// Requests waiting for admission.
    pub waiting: Option<u32>,
    /// Share of KV blocks in use by live requests, 0 to 1.
    pub kv_usage: Option<f64>,
}

#[derive(Deserialize)]
struct Json {
    #[serde(default)]
    named_metrics: HashMap<String, f64>,
}

/// Longer headers are not read.
const MAX_HEADER: usize = 4096;

// === impl AnswerLoad ===

impl AnswerLoad {
    /// Reads a header's value; none if it says nothing that is known here.
    pub fn parse(header: &str) -> Option<Self> {
        if header.len() > MAX_HEADER {
            return None;
        }
        let (format, rest) = header.trim().split_once(' ')?;
        let mut load = Self::default();
        match format {
            "TEXT" => {
                for pair in rest.split(',') {
                    if let Some((name, value)) = pair.split_once('=')
                        && let Ok(value) = value.trim().parse()
                        && let Some(name) = name.trim().strip_prefix("named_metrics.")
                    {
                        load.set(name, value);
                    }
                }
            }
            "JSON" => {
                let json: Json = serde_json::from_str(rest).ok()?;
                for (name, value) in json.named_metrics {
                    load.set(&name, value);
                }
            }
            _ => return None,
        }
        (load != Self::default()).then_some(load)
    }

    fn set(&mut self, name: &str, value: f64) {
        if !value.is_finite() {
            return;
        }
        match name {
            // Out of range is clipped.
            "num_requests_waiting" => self.waiting = Some(value.max(0.0) as u32),
            "kv_cache_usage_perc" => self.kv_usage = Some(value.clamp(0.0, 1.0)),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_both_forms() {
        let load = AnswerLoad {
            waiting: Some(3),
            kv_usage: Some(0.25),
        };
        for header in [
            "TEXT named_metrics.num_requests_waiting=3.0, named_metrics.kv_cache_usage_perc=0.25",
            "TEXT cpu_utilization=0.1,named_metrics.kv_cache_usage_perc=0.25,named_metrics.num_requests_waiting=3",
            r#"JSON {"named_metrics": {"num_requests_waiting": 3.0, "kv_cache_usage_perc": 0.25}}"#,
        ] {
            assert_eq!(AnswerLoad::parse(header), Some(load), "{header}");
        }
    }

    #[test]
    fn takes_what_it_can_of_odd_ones() {
        let waiting = |n| {
            Some(AnswerLoad {
                waiting: Some(n),
                kv_usage: None,
            })
        };
        assert_eq!(
            AnswerLoad::parse("TEXT named_metrics.num_requests_waiting=-1, x, y=z"),
            waiting(0)
        );
        assert_eq!(
            AnswerLoad::parse("TEXT named_metrics.num_requests_waiting=1e99"),
            waiting(u32::MAX)
        );
        for header in [
            "",
            "TEXT",
            "TEXT ",
            "TEXT named_metrics.num_requests_waiting=NaN",
            "JSON {",
            "JSON {}",
            "BIN AAAA",
            "named_metrics.num_requests_waiting=1",
            &format!("TEXT {}", "x".repeat(5000)),
        ] {
            assert_eq!(AnswerLoad::parse(header), None, "{header}");
        }
    }
}
