//! The end of a server.

use super::Server;
use crate::models::saved;
use qurl_model::Family;
use serde_json::json;
use std::io::Read;
use std::net::TcpStream;
use std::process::Command;

/// The first Ctrl-C lets answers in progress end; what a command line gets wrong is told.
#[test]
#[cfg(unix)]
fn a_stop_finishes_what_is_in_progress() {
    let model = saved(Family::Qwen2);
    let mut server = Server::start(model.text(), &[]);
    let body =
        json!({"prompt": "1+1=", "max_tokens": 90, "ignore_eos": true, "n": 60, "stream": true}).to_string();
    // Who is connected and says nothing holds nothing up.
    let _silent = TcpStream::connect(server.address).expect("connected");
    let mut stream = server.begin("/v1/completions", &body);
    let mut first = [0; 1];
    stream.read_exact(&mut first).expect("it begins");
    let told = Command::new("kill").args(["-INT", &server.child.id().to_string()]).status();
    assert!(told.is_ok_and(|told| told.success()));
    let mut rest = String::new();
    stream.read_to_string(&mut rest).expect("the rest");
    assert!(rest.contains("data: [DONE]"), "the answer ends");
    assert!(server.child.wait().expect("it ends").success());

    let run = |options: &[&str]| {
        crate::models::qurl(&[&["serve", "--model", model.text(), "--device", "cpu"], options].concat())
    };
    run(&["--max-model-len", "97"]).assert_bad(&["--max-model-len 97", "96"]);
    run(&["--api-key", ""]).assert_bad(&["--api-key", "empty"]);
    run(&["--tool-call-parser", "pythonic"]).assert_bad(&["--tool-call-parser", "hermes"]);
    run(&["--reasoning-parser", "none"]).assert_bad(&["--reasoning-parser", "qwen3"]);
    run(&["--weights-from", "/nowhere"]).assert_bad(&["--weights-from /nowhere"]);
    run(&["--host", "192.0.2.1"]).assert_bad(&["192.0.2.1", "cannot be listened on"]);
}
