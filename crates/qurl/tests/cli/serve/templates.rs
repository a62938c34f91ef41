//! A chat template that takes all memory where a message says so: it comes with the model, and nobody vouches
//! for it.

use super::Server;
use crate::models::saved;
use qurl_model::Family;
use serde_json::json;

/// The most memory that a process ever had, in MiB.
#[cfg(target_os = "linux")]
fn peak(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("the server lives");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("a line");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") >> 10
}

/// The first such request used to leave a thread behind that took all memory; the next one ended the server.
#[cfg(target_os = "linux")]
#[test]
fn a_template_without_end_is_no_end_of_the_server() {
    let model = saved(Family::Qwen2);
    let template = "{% if messages[0].content == 'hi' %}{% set ns = namespace(x='aaaaaaaa') %}{% for i in \
                    range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{% endif %}what is";
    std::fs::write(model.path().join("chat_template.jinja"), template).expect("written");
    let mut server = Server::start(model.text(), &[]);
    let chat = |content: &str| json!({"messages": [{"role": "user", "content": content}], "max_tokens": 1});
    for _ in 0..5 {
        let refused = server.post("/v1/chat/completions", chat("hi"), 400);
        let message = refused["error"]["message"].as_str().expect("a message");
        assert!(message.contains("chat_template.jinja: the chat template was given up"), "{message}");
        server.post("/v1/chat/completions", chat("he"), 200);
    }
    assert!(matches!(server.child.try_wait(), Ok(None)), "the server lives");
    let peak = peak(server.child.id());
    assert!(peak < 1000, "{peak} MiB");
}
