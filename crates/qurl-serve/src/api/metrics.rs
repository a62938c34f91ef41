//! `GET /metrics`, for Prometheus: our own names, and beside them vLLM's for what trainers and dashboards
//! read of a vLLM.

use super::App;
use crate::service::{Histogram, Sizes, Snapshot};
use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use std::fmt::Write;
use std::sync::Arc;

/// `GET /metrics`
pub async fn metrics(State(app): State<Arc<App>>) -> Response {
    let (now, sizes) = (app.service.snapshot(), app.service.sizes());
    let mut text = exposition(&now);
    add_vllm(&mut text, &now, sizes, app.model_name());
    ([(CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response()
}

/// A metric with its values by their labels. Writing to a String cannot fail, here and below.
fn add(text: &mut String, (name, kind): (&str, &str), help: &str, values: &[(&str, f64)]) {
    _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
    for (labels, value) in values {
        match labels.is_empty() {
            true => _ = writeln!(text, "{name} {value}"),
            false => _ = writeln!(text, "{name}{{{labels}}} {value}"),
        }
    }
}

fn add_histogram(text: &mut String, name: &str, help: &str, labels: &str, histogram: &Histogram) {
    let (buckets, sum) = histogram.cumulative();
    _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} histogram");
    let (before, alone) = match labels.is_empty() {
        true => (String::new(), String::new()),
        false => (format!("{labels},"), format!("{{{labels}}}")),
    };
    let mut count = 0;
    for (bound, cumulative) in buckets {
        let bound = bound.map_or("+Inf".to_string(), |bound| bound.to_string());
        _ = writeln!(text, "{name}_bucket{{{before}le=\"{bound}\"}} {cumulative}");
        count = cumulative;
    }
    _ = writeln!(text, "{name}_sum{alone} {sum}\n{name}_count{alone} {count}");
}

/// Our own metrics.
fn exposition(now: &Snapshot) -> String {
    let mut text = String::new();
    let mut one = |name: &str, kind: &str, help: &str, values: &[(&str, f64)]| {
        add(&mut text, (&format!("qurl_{name}"), kind), help, values);
    };
    let (stats, plain) = (&now.stats, "");
    let ended = [
        ("outcome=\"done\"", now.done as f64),
        ("outcome=\"failed\"", now.failed as f64),
        ("outcome=\"aborted\"", now.aborted as f64),
        ("outcome=\"gone\"", now.gone as f64),
        ("outcome=\"refused\"", now.refused as f64),
    ];
    one("sequences_running", "gauge", "Sequences that hold pages", &[(plain, now.running as f64)]);
    one("sequences_waiting", "gauge", "Sequences that wait", &[(plain, now.waiting as f64)]);
    one("paused", "gauge", "Whether requests wait for a resume", &[(plain, f64::from(u8::from(now.paused)))]);
    one("healthy", "gauge", "Whether requests can be computed", &[(plain, f64::from(u8::from(now.healthy)))]);
    one("requests_total", "counter", "Requests by how they ended", &ended);
    one("prompt_tokens_total", "counter", "Tokens of prompts", &[(plain, now.prompt_tokens as f64)]);
    one("generated_tokens_total", "counter", "Sampled tokens", &[(plain, stats.decode_tokens as f64)]);
    one(
        "prefill_tokens_total",
        "counter",
        "Tokens computed for their keys and values",
        &[(plain, stats.prefill_tokens as f64)],
    );
    one(
        "shared_tokens_total",
        "counter",
        "Tokens of prompts whose pages another request had computed",
        &[(plain, stats.shared_tokens as f64)],
    );
    one("preemptions_total", "counter", "Sequences computed again", &[(plain, stats.preemptions as f64)]);
    one("steps_total", "counter", "Steps of the engine", &[(plain, stats.steps as f64)]);
    one("pages", "gauge", "Pages for keys and values", &[(plain, now.pages as f64)]);
    one("pages_used", "gauge", "Pages in use or kept", &[(plain, now.pages_used as f64)]);
    one("pages_in_use", "gauge", "Pages of requests in flight", &[(plain, now.pages_in_use as f64)]);
    one("weight_version", "gauge", "Version of the weights", &[(plain, now.weights.version as f64)]);
    for (name, help, histogram) in [
        ("first_token_seconds", "From arrival to the first token", &now.first_token),
        ("between_tokens_seconds", "Between tokens of a sample", &now.between_tokens),
        ("request_seconds", "From arrival to the end", &now.whole),
    ] {
        add_histogram(&mut text, &format!("qurl_{name}"), help, plain, histogram);
    }
    text
}

/// vLLM's names. Its requests are sequences here, of which a request with `n` has several.
fn add_vllm(text: &mut String, now: &Snapshot, sizes: Sizes, model: &str) {
    let model = model.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    let labels = format!("engine=\"0\",model_name=\"{model}\"");
    let mut one = |name: &str, kind: &str, help: &str, value: f64| {
        add(text, (&format!("vllm:{name}"), kind), help, &[(&labels, value)]);
    };
    let used = now.pages_in_use as f64 / now.pages.max(1) as f64;
    one("num_requests_running", "gauge", "Sequences that hold pages", now.running as f64);
    one("num_requests_waiting", "gauge", "Sequences that wait", now.waiting as f64);
    one("kv_cache_usage_perc", "gauge", "Share of the pages that requests in flight hold, 1 is all", used);
    for (name, help, value) in [
        ("prefix_cache_queries_total", "Tokens of prompts that were looked up", now.prompt_tokens),
        ("prefix_cache_hits_total", "Those of them that were there", now.stats.shared_tokens),
        ("prompt_tokens_total", "Tokens of prompts", now.prompt_tokens),
        ("generation_tokens_total", "Sampled tokens", now.stats.decode_tokens),
        ("num_preemptions_total", "Sequences computed again", now.stats.preemptions),
    ] {
        one(name, "counter", help, value as f64);
    }
    let reasons = [
        ("stop", now.stopped),
        ("length", now.cut),
        ("abort", now.aborted + now.gone),
        ("error", now.failed),
    ];
    let reasons =
        reasons.map(|(reason, count)| (format!("{labels},finished_reason=\"{reason}\""), count as f64));
    let reasons: Vec<(&str, f64)> = reasons.iter().map(|(labels, count)| (labels.as_str(), *count)).collect();
    add(text, ("vllm:request_success_total", "counter"), "Sequences by why they ended", &reasons);
    let (size, pages) = (sizes.page_size, sizes.pages);
    let cache = format!("block_size=\"{size}\",num_gpu_blocks=\"{pages}\",engine=\"0\"");
    add(text, ("vllm:cache_config_info", "gauge"), "Tokens of a page, and pages", &[(&cache, 1.0)]);
    for (name, help, histogram) in [
        ("time_to_first_token_seconds", "From arrival to the first token", &now.first_token),
        ("inter_token_latency_seconds", "Between tokens of a sample", &now.between_tokens),
        ("time_per_output_token_seconds", "The same under its older name", &now.between_tokens),
        ("e2e_request_latency_seconds", "From arrival to the end", &now.whole),
    ] {
        add_histogram(text, &format!("vllm:{name}"), help, &labels, histogram);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn told(now: &Snapshot) -> String {
        let mut text = exposition(now);
        let sizes = Sizes { max_running: 4, page_size: 16, pages: 8, accelerators: 0 };
        add_vllm(&mut text, now, sizes, "a \"model\"");
        text
    }

    #[test]
    fn metrics_are_whole_lines_with_rising_buckets() {
        let mut now = Snapshot { done: 3, ..Snapshot::default() };
        for milliseconds in [1, 3, 3, 700_000] {
            now.first_token.add(Duration::from_millis(milliseconds));
        }
        let text = told(&now);
        assert!(text.contains("qurl_requests_total{outcome=\"done\"} 3\n"), "{text}");
        assert!(text.contains("qurl_first_token_seconds_bucket{le=\"0.002\"} 1\n"));
        assert!(text.contains("qurl_first_token_seconds_bucket{le=\"0.005\"} 3\n"));
        assert!(text.contains("qurl_first_token_seconds_bucket{le=\"+Inf\"} 4\n"));
        assert!(text.contains("qurl_first_token_seconds_count 4\n"));
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let (name, value) = line.rsplit_once(' ').expect("a name and a value");
            let known = name.starts_with("qurl_") || name.starts_with("vllm:");
            assert!(known && value.parse::<f64>().is_ok(), "{line}");
        }
    }

    #[test]
    fn vllm_has_its_names() {
        let mut now = Snapshot { running: 2, waiting: 1, pages: 8, pages_in_use: 2, ..Snapshot::default() };
        (now.prompt_tokens, now.stopped, now.cut, now.aborted, now.gone) = (9, 5, 4, 2, 1);
        now.between_tokens.add(Duration::from_millis(3));
        let text = told(&now);
        let labels = "engine=\"0\",model_name=\"a \\\"model\\\"\"";
        for (name, more, value) in [
            ("num_requests_running", "", "2"),
            ("num_requests_waiting", "", "1"),
            ("kv_cache_usage_perc", "", "0.25"),
            ("prompt_tokens_total", "", "9"),
            ("prefix_cache_queries_total", "", "9"),
            ("request_success_total", ",finished_reason=\"stop\"", "5"),
            ("request_success_total", ",finished_reason=\"length\"", "4"),
            ("request_success_total", ",finished_reason=\"abort\"", "3"),
            ("inter_token_latency_seconds_count", "", "1"),
        ] {
            let line = format!("\nvllm:{name}{{{labels}{more}}} {value}\n");
            assert!(text.contains(&line), "{line} {text}");
        }
        let bucket = format!("vllm:inter_token_latency_seconds_bucket{{{labels},le=\"0.005\"}} 1\n");
        assert!(text.contains(&bucket), "{text}");
        assert!(
            text.contains("vllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"8\",engine=\"0\"} 1\n")
        );
    }
}
