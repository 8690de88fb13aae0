//! `/metrics` as vLLM writes it: the series that routers read.

use crate::{Load, PodSpec};
use std::fmt::Write;

/// What the server itself counts.
#[derive(Clone, Debug, Default)]
pub(super) struct Counts {
    /// Requests that were complete.
    pub(super) finished: u64,
    /// Seconds to the first token, their number, and how many were below each bucket's bound.
    pub(super) ttft: (f64, u64),
    pub(super) ttft_below: [u64; BUCKETS.len()],
    /// Seconds of whole requests, and their number.
    pub(super) e2e: (f64, u64),
}

/// vLLM's bounds of `time_to_first_token_seconds`.
pub(super) const BUCKETS: [f64; 22] = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
];

// === impl Counts ===

impl Counts {
    pub(super) fn first_token(&mut self, seconds: f64) {
        self.ttft.0 += seconds;
        self.ttft.1 += 1;
        for (n, bound) in self.ttft_below.iter_mut().zip(BUCKETS) {
            *n += u64::from(seconds <= bound);
        }
    }

    pub(super) fn done(&mut self, seconds: f64) {
        self.finished += 1;
        self.e2e.0 += seconds;
        self.e2e.1 += 1;
    }
}

/// The whole text. `started` is the process's start, seconds since the epoch.
pub(super) fn render(
    load: &Load,
    counts: &Counts,
    spec: &PodSpec,
    model: &str,
    started: f64,
) -> String {
    let mut out = String::with_capacity(8 << 10);
    let model = model.replace('\\', r"\\").replace('"', "\\\"");
    let labels = format!("engine=\"0\",model_name=\"{model}\"");
    let mut series = |kind: &str, name: &str, samples: &[(&str, &str, f64)]| {
        let _ = writeln!(out, "# HELP {name} Simulated.\n# TYPE {name} {kind}");
        for (suffix, label, value) in samples {
            let comma = if label.is_empty() { "" } else { "," };
            let _ = writeln!(out, "{name}{suffix}{{{labels}{comma}{label}}} {value:?}");
        }
    };
    let hits = load.hit_tokens as f64;
    let queries = load.queried_tokens as f64;
    let sleep = [
        ("", "sleep_state=\"awake\"", 1.0),
        ("", "sleep_state=\"weights_offloaded\"", 0.0),
        ("", "sleep_state=\"discard_all\"", 0.0),
    ];
    let sources = [
        ("", "source=\"local_compute\"", queries - hits),
        ("", "source=\"local_cache_hit\"", hits),
        ("", "source=\"external_kv_transfer\"", 0.0),
    ];
    let (running, waiting) = (f64::from(load.running), f64::from(load.waiting));
    series("gauge", "vllm:num_requests_running", &[("", "", running)]);
    series("gauge", "vllm:num_requests_waiting", &[("", "", waiting)]);
    series("gauge", "vllm:engine_sleep_state", &sleep);
    series(
        "gauge",
        "vllm:kv_cache_usage_perc",
        &[("", "", load.kv_usage)],
    );
    let queried = [("_total", "", queries)];
    series("counter", "vllm:prefix_cache_queries", &queried);
    series("counter", "vllm:prefix_cache_hits", &[("_total", "", hits)]);
    let preemptions = load.preemptions as f64;
    series(
        "counter",
        "vllm:num_preemptions",
        &[("_total", "", preemptions)],
    );
    series("counter", "vllm:prompt_tokens", &queried);
    let sources = sources.map(|(_, label, n)| ("_total", label, n));
    series("counter", "vllm:prompt_tokens_by_source", &sources);
    let generated = load.generated_tokens as f64;
    series(
        "counter",
        "vllm:generation_tokens",
        &[("_total", "", generated)],
    );
    let success = [(
        "_total",
        "finished_reason=\"length\"",
        counts.finished as f64,
    )];
    series("counter", "vllm:request_success", &success);

    let bounds: Vec<String> = BUCKETS.iter().map(|b| format!("le=\"{b:?}\"")).collect();
    let mut ttft: Vec<(&str, &str, f64)> = bounds
        .iter()
        .zip(counts.ttft_below)
        .map(|(bound, n)| ("_bucket", bound.as_str(), n as f64))
        .collect();
    ttft.push(("_bucket", "le=\"+Inf\"", counts.ttft.1 as f64));
    ttft.push(("_count", "", counts.ttft.1 as f64));
    ttft.push(("_sum", "", counts.ttft.0));
    series("histogram", "vllm:time_to_first_token_seconds", &ttft);
    for (name, (sum, count)) in [
        ("vllm:request_prefill_time_seconds", load.prefill_seconds),
        ("vllm:e2e_request_latency_seconds", counts.e2e),
    ] {
        let samples = [
            ("_bucket", "le=\"+Inf\"", count as f64),
            ("_count", "", count as f64),
            ("_sum", "", sum),
        ];
        series("histogram", name, &samples);
    }
    let _ = writeln!(
        out,
        "# HELP vllm:cache_config_info Simulated.\n# TYPE vllm:cache_config_info gauge\n\
         vllm:cache_config_info{{block_size=\"{}\",enable_prefix_caching=\"True\",engine=\"0\",\
         kv_cache_size_tokens=\"{}\",num_gpu_blocks=\"{}\"}} 1.0",
        spec.block_size,
        spec.kv_tokens(),
        spec.kv_blocks,
    );
    let _ = writeln!(
        out,
        "# HELP process_start_time_seconds Simulated.\n# TYPE process_start_time_seconds gauge\n\
         process_start_time_seconds {started:?}",
    );
    out
}
