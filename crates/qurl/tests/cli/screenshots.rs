//! The pictures in `docs/images`, made anew from real runs: `cargo test -p qurl --test cli screenshots
//! -- --ignored`. The runs take minutes; they stay in the target folder, so that changes to the page need no
//! new ones.

use crate::browser::Browser;
use crate::common::qurl_in;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// Ends its process at the end of the test.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        _ = self.0.kill();
        _ = self.0.wait();
    }
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn recipe(name: &str) -> String {
    root().join("recipes").join(name).display().to_string()
}

fn save(browser: &Browser, name: &str) {
    std::fs::write(root().join("docs/images").join(name), browser.screenshot()).expect("written");
}

/// Runs a command unless the file that it ends with is there.
fn once(dir: &Path, made: &str, arguments: &[&str]) {
    if !dir.join(made).exists() {
        let run = qurl_in(dir, arguments, "");
        assert_eq!(run.status, 0, "{}", run.stderr);
    }
}

#[test]
#[ignore = "trains for minutes and writes into docs/images"]
fn renewed() {
    let browser = Browser::start("screenshots", 1280, 1080).expect("Chromium and its driver");
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("screenshots");
    std::fs::create_dir_all(&dir).expect("made");
    once(&dir, "default/report.html", &["train", &recipe("default.toml"), "--run", "default"]);
    let methods = ["--methods", "full,naive,acr-uaq", "--seeds", "3"];
    let compare = ["compare", &recipe("tiny-grpo.toml"), "--run", "int4", "--set", "rollout.format=int4"];
    once(&dir, "int4/compare.json", &[&compare[..], &methods].concat());
    let page = |run: &str| {
        qurl_in(&dir, &["report", run, "--json"], "").json();
        format!("file://{}", dir.join(run).join("report.html").display())
    };

    browser.as_desk(1280, 1080);
    browser.open(&page("default"));
    for theme in ["light", "dark"] {
        browser.eval(&format!("document.documentElement.dataset.theme = '{theme}'; return 0"));
        save(&browser, &format!("report-{theme}.png"));
    }
    browser.open(&page("int4"));
    browser.eval("document.documentElement.dataset.theme = 'light'; return 0");
    save(&browser, "report-compare.png");

    // Two runs while they run.
    let runs = ["tiny-grpo", "tiny-dapo"].map(|name| {
        let run = dir.join(name);
        _ = std::fs::remove_dir_all(&run);
        let mut train = Command::new(env!("CARGO_BIN_EXE_qurl"));
        let recipe = recipe(&format!("{name}.toml"));
        train.args(["train", &recipe, "--steps", "400", "--quiet", "--run"]).arg(&run);
        let train = train.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the run starts");
        (run, Ended(train))
    });
    let mut dash = Command::new(env!("CARGO_BIN_EXE_qurl"));
    dash.arg("dash").args(runs.iter().map(|(run, _)| run)).args(["--port", "0", "--json"]);
    dash.stdout(Stdio::piped()).stderr(Stdio::null());
    let mut dash = Ended(dash.spawn().expect("the server starts"));
    let mut line = String::new();
    BufReader::new(dash.0.stdout.take().expect("a pipe")).read_line(&mut line).expect("its address");
    let told: serde_json::Value = serde_json::from_str(&line).expect("JSON");
    browser.as_desk(1280, 960);
    browser.open(told["url"].as_str().expect("an address"));
    browser.wait_for("return document.querySelectorAll('#plot-reward path.line:not(.raw)').length === 2");
    browser.wait_for("return Number(document.getElementById('plot-reward').dataset.points) > 300");
    save(&browser, "dash.png");
    drop(dash);

    browser.as_phone(390, 844);
    browser.open(&page("default"));
    save(&browser, "report-phone.png");
}
