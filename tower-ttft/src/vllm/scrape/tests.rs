use super::*;
use proptest::prelude::*;

const ONE: &[u8] = include_bytes!("../../../testdata/vllm/metrics.txt");
const TWO: &[u8] = include_bytes!("../../../testdata/vllm/metrics-dp2.txt");

fn parse(text: &str) -> Scrape {
    Scrape::parse(text.as_bytes()).unwrap()
}

fn now() -> Instant {
    Instant::now()
}

#[test]
fn reads_what_a_real_engine_says() {
    let scrape = Scrape::parse(ONE).unwrap();
    let at = now();
    let expected = LoadReport {
        at,
        running: 0,
        waiting: 0,
        kv_usage: 0.0,
        prefilled_tokens: Some(31_425),
        prefill_seconds: Some((23.871_942_708_000_46, 42)),
        preemptions: 0,
    };
    assert_eq!(scrape.report(None, at), expected);
    assert_eq!(scrape.report(Some(0), at), expected);
    assert_eq!(scrape.process_start.as_deref(), Some("1.79609785212e+09"));
    assert_eq!(scrape.ranks(), [0]);
    let cache = CacheConfig {
        block_size: Some(32),
        blocks: Some(8192),
    };
    assert_eq!(scrape.cache(None), cache);
    assert_eq!(scrape.prefix_cache(), Some((31_777, 352)));
    assert!(!scrape.asleep(None));
}

#[test]
fn reads_two_data_parallel_ranks_apart_and_together() {
    let scrape = Scrape::parse(TWO).unwrap();
    assert_eq!(scrape.ranks(), [0, 1]);
    assert_eq!(scrape.process_start, None);
    let prefill = |rank| scrape.report(rank, now()).prefill_seconds.unwrap();
    assert_eq!(prefill(Some(0)), (0.126_161_097_000_021_98, 2));
    assert_eq!(prefill(Some(1)), (0.047_654_309_999_870_75, 3));
    let (seconds, count) = prefill(None);
    assert_eq!(count, 5);
    assert!((seconds - 0.173_815_407).abs() < 1e-9);
    assert_eq!(scrape.cache(Some(1)).blocks, Some(4096));
    assert_eq!(scrape.cache(None).blocks, Some(8192));
    assert_eq!(scrape.cache(None).block_size, Some(32));
}

#[test]
fn sums_engines_and_models_in_either_order() {
    let lines = [
        "vllm:num_requests_waiting{engine=\"0\",model_name=\"m\"} 7",
        "vllm:num_requests_waiting{engine=\"1\",model_name=\"m\"} 0",
        "vllm:num_requests_running{engine=\"0\",model_name=\"m\"} 2.0",
        "vllm:num_requests_running{engine=\"0\",model_name=\"n\"} 1.0",
        "vllm:kv_cache_usage_perc{engine=\"0\",model_name=\"m\"} 0.9",
        "vllm:kv_cache_usage_perc{engine=\"1\",model_name=\"m\"} 0.3",
    ];
    let forth = lines.join("\n");
    let back = lines.iter().rev().copied().collect::<Vec<_>>().join("\r\n");
    for text in [forth, back] {
        let all = parse(&text).report(None, now());
        assert_eq!((all.running, all.waiting), (3, 7));
        assert!((all.kv_usage - 0.6).abs() < 1e-9);
        let zero = parse(&text).report(Some(0), now());
        assert_eq!((zero.running, zero.waiting, zero.kv_usage), (3, 7, 0.9));
        let one = parse(&text).report(Some(1), now());
        assert_eq!((one.running, one.waiting, one.kv_usage), (0, 0, 0.3));
    }
}

#[test]
fn takes_odd_text_as_it_comes() {
    let scrape = parse(concat!(
        "vllm:num_requests_running{engine=\"0\"} NaN\n",
        "vllm:num_requests_running 3 1700000000000\n",
        "vllm:num_requests_waiting{ model_name = \"a\\\"},b=\\\\\" , engine=\"0\", } 4\n",
        "vllm:num_requests_waiting{engine=\"x\"} 1\n",
        "vllm:num_requests_waiting{engine=\"0\" 99\n",
        "vllm:num_requests_waiting{engine=\"0\"} \n",
        "vllm:num_requests_waiting_by_reason{reason=\"capacity\"} 50\n",
        "vllm:num_requests_waiting{\n",
        "vllm:kv_cache_usage_perc{engine=\"0\"} +Inf\n",
        "vllm:cache_config_info{block_size=\"None\",num_gpu_blocks=\"0\"} 1\n",
        "vllm:prompt_tokens_by_source_total{source=\"local_cache_hit\"} 9\n",
        "\u{fffd}{}} = \n",
        "process_start_time_seconds NaN\n",
    ));
    let report = scrape.report(None, now());
    assert_eq!(
        (report.running, report.waiting, report.kv_usage),
        (3, 5, 0.0)
    );
    assert_eq!(report.prefilled_tokens, None);
    assert_eq!(report.prefill_seconds, None);
    assert_eq!(scrape.cache(None), CacheConfig::default());
    assert_eq!(scrape.process_start, None);
    // Out of range is clipped, not wrapped.
    let report =
        parse("vllm:num_requests_running -5\nvllm:num_requests_waiting 1e300").report(None, now());
    assert_eq!((report.running, report.waiting), (0, u32::MAX));
}

#[test]
fn what_is_not_vllm_says_nothing() {
    for text in [
        &b""[..],
        b"<html>no</html>",
        b"# HELP vllm:num_requests_running x\n",
        b"process_start_time_seconds 5\n",
        b"sglang:num_running_reqs 3\n",
        b"\xff\xfe\x00",
    ] {
        assert_eq!(Scrape::parse(text), None);
    }
}

#[test]
fn a_sleeping_engine_is_seen() {
    let text = "vllm:num_requests_running 0\nvllm:engine_sleep_state{engine=\"0\",sleep_state=\"awake\"} 0.0";
    assert!(parse(text).asleep(None));
    assert!(parse(text).asleep(Some(0)));
    assert!(!parse(text).asleep(Some(1)));
}

#[test]
fn a_flood_of_series_is_cut() {
    let text: String = (0..100_000)
        .map(|i| format!("vllm:num_requests_running{{engine=\"{i}\"}} 1\n"))
        .collect();
    assert_eq!(parse(&text).series.len(), MAX_SERIES);
}

proptest! {
    #[test]
    fn never_panics(
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..40),
        cut in any::<prop::sample::Index>(),
    ) {
        let mut text = TWO.to_vec();
        for (at, byte) in edits {
            let at = at.index(text.len());
            text[at] = byte;
        }
        text.truncate(cut.index(text.len()));
        if let Some(scrape) = Scrape::parse(&text) {
            let report = scrape.report(None, now());
            prop_assert!((0.0..=1.0).contains(&report.kv_usage));
        }
    }
}
