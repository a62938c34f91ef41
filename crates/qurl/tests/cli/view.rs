//! Runs that can be seen: the report and the live page of real, small runs in a real browser.

use crate::browser::Browser;
use crate::common::{directory, qurl, qurl_in};
use crate::runs::support::{lines, signal, wait_for};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// A training run of a second or two.
fn train_arguments(run: &Path, steps: u64, more: &[&str]) -> Vec<String> {
    let mut arguments =
        vec!["train".to_string(), "--run".to_string(), run.display().to_string(), "--json".to_string()];
    let settings = [
        "model.new.hidden_size=32",
        "model.new.intermediate_size=64",
        "model.new.num_hidden_layers=2",
        "sft.steps=20",
        "sft.warmup_steps=5",
        "sft.batch_size=16",
        "data.train_batch_size=8",
        "rollout.n=8",
        "actor.ppo_mini_batch_size=4",
        "run.test_freq=2",
        "run.test_problems=16",
        "run.update_metrics_freq=2",
    ];
    for setting in settings.iter().chain(more) {
        arguments.extend(["--set".to_string(), setting.to_string()]);
    }
    arguments.extend(["--steps".to_string(), steps.to_string()]);
    arguments
}

fn train(run: &Path, steps: u64, more: &[&str]) -> Value {
    let arguments = train_arguments(run, steps, more);
    qurl(&arguments.iter().map(String::as_str).collect::<Vec<_>>(), "").json()
}

const HOSTILE: &str =
    "</script><img src=x onerror=\"window.pwned=1\"><script>window.pwned=1</script>\u{2028}{{data}}";

/// A response that tries to be markup, beside whatever the run sampled.
fn write_hostile_rollout(run: &Path) {
    let sample = json!({"step": 3, "problem": HOSTILE, "prompt": HOSTILE, "response": HOSTILE,
        "finish": "stop", "reward": 1.0,
        "reward_parts": {HOSTILE: 1.0}, "advantage": 0.7, "ids": [1, 2], "tokens": [HOSTILE, "\n"],
        "rho": [1.5, 0.6],
        "behav": [-1.0, -0.5], "prox": [-0.6, -1.0]});
    std::fs::create_dir_all(run.join("rollouts")).expect("made");
    std::fs::write(run.join("rollouts/step-000003.jsonl"), format!("{sample}\n{{\"step\":3,\"tok"))
        .expect("written");
}

/// Every plot that is shown has points and a drawn line; the names of those that are not shown.
fn check_plots(browser: &Browser) -> Vec<String> {
    let figures = browser.eval(
        "return [...document.querySelectorAll('figure')].map(f => [f.id, f.hidden, Number(f.dataset.points), \
         f.querySelectorAll('svg path.line, svg circle, svg rect').length])",
    );
    let mut hidden = Vec::new();
    for figure in figures.as_array().expect("figures") {
        let name = figure[0].as_str().expect("a name").to_string();
        if figure[1] == json!(true) && (name == "plot-reward-parts" || name.starts_with("plot-sft-")) {
            continue; // a task may have parts or not, and a run may be supervised
        }
        if figure[1] == json!(true) {
            hidden.push(name);
            continue;
        }
        assert!(figure[2].as_u64() > Some(0) && figure[3].as_u64() > Some(0), "an empty plot: {figure}");
    }
    assert!(figures.as_array().map_or(0, Vec::len) >= 20, "{figures}");
    hidden
}

#[test]
fn the_report_of_a_run_opens_and_every_plot_has_data() {
    let dir = directory("report");
    train(&dir.join("int8"), 4, &[]);
    train(&dir.join("bf16"), 3, &["rollout.format=bf16"]);
    write_hostile_rollout(&dir.join("int8"));
    let one = qurl_in(&dir, &["report", "int8", "--json"], "").json();
    assert_eq!(one["runs"][0]["figures"]["steps"], 4);
    assert!(one["runs"][0]["figures"]["accuracy_before"].is_number(), "{one}");
    let many = qurl_in(&dir, &["report", "int8", "bf16", "--out", "many.html", "--json"], "").json();
    assert_eq!(many["runs"][1]["run"], "bf16");

    let Some(browser) = Browser::start("report", 1280, 900) else { return };
    let page = |file: &str| format!("file://{}", dir.join(file).display());
    browser.open(&page("int8/report.html"));
    // Only recipes with dynamic sampling, a reference model or a critic have these.
    let hidden = ["plot-gen-batches", "plot-reference-kl", "plot-value-loss"];
    assert_eq!(check_plots(&browser), hidden);
    assert_eq!(browser.eval("return document.title"), "int8 · QuRL");
    assert!(
        browser
            .eval("return document.getElementById('headline').textContent")
            .as_str()
            .is_some_and(|t| t.contains('→'))
    );
    // What a model wrote is text, and stays text.
    browser.eval(
        "const s = document.querySelector('#rollouts select[aria-label=Step]'); s.value = 3; \
                  s.dispatchEvent(new Event('change')); return 0",
    );
    let tokens = browser.eval("return document.querySelector('.sample .tokens span').textContent");
    assert_eq!(tokens, HOSTILE);
    assert_eq!(browser.eval("return [window.pwned === undefined, document.images.length]"), json!([true, 0]));
    let tints = "return [...document.querySelectorAll('.sample .tokens span')].map(s => \
                 getComputedStyle(s).backgroundColor)";
    let by_rho = browser.eval(tints);
    browser.eval("document.querySelector('[data-paint=advantage]').click(); return 0");
    assert_ne!(browser.eval(tints), by_rho, "the colours follow the choice");
    // Hovering reads values out; the theme can be switched.
    let tip = "const plot = document.querySelector('#plot-reward .plot').getBoundingClientRect(); const at \
               = { clientX: plot.left + plot.width / 2, clientY: plot.top + 20 }; \
               document.querySelector('#plot-reward .plot').dispatchEvent(new PointerEvent('pointermove', \
               at)); const tip = document.querySelector('#plot-reward .tip'); const box = \
               tip.getBoundingClientRect(); const cross = document.querySelector('#plot-reward \
               .cross').getBoundingClientRect().left; return [tip.textContent, box.left > cross || \
               box.right < cross, box.top >= plot.top]";
    let tip = browser.eval(tip);
    assert!(
        tip[0].as_str().is_some_and(|text| text.starts_with("step ") && text.contains("reward")),
        "{tip}"
    );
    assert_eq!((&tip[1], &tip[2]), (&json!(true), &json!(true)), "beside the cross-hair, inside the plot");
    let background = "return getComputedStyle(document.body).backgroundColor";
    let before = browser.eval(background);
    browser.eval("document.getElementById('theme').click(); return 0");
    assert_ne!(browser.eval(background), before);

    browser.open(&page("many.html"));
    assert_eq!(check_plots(&browser), hidden);
    let points = "return Number(document.getElementById('plot-reward').dataset.points)";
    assert_eq!(browser.eval(points), 7);
    browser.eval("document.querySelectorAll('#legend button')[1].click(); return 0");
    assert_eq!(browser.eval(points), 4, "the legend hides a run");
    let differences = browser
        .eval("return [...document.querySelectorAll('#settings tr.differs th')].map(t => t.textContent)");
    assert_eq!(differences, json!(["format", "total_steps"]));

    browser.as_phone(390, 800);
    browser.open(&page("int8/report.html"));
    check_plots(&browser);
    assert_eq!(
        browser.eval("return [innerWidth, document.documentElement.scrollWidth]"),
        json!([390, 390]),
        "fits a phone"
    );
    assert_eq!(
        browser.eval("return performance.getEntriesByType('resource').length"),
        0,
        "nothing is loaded"
    );
    assert_eq!(browser.console(), json!([]));
}

/// The plots of a page that are shown, each with at least one line.
fn drawn(browser: &Browser) -> Value {
    browser.eval(
        "return [...document.querySelectorAll('figure')] \
         .filter(f => !f.hidden && f.querySelector('path.line, rect')).map(f => f.id)",
    )
}

/// A supervised run has plots of its own, and the warm start of a run is among its plots and figures.
#[test]
fn the_report_of_supervised_training_opens() {
    let dir = directory("report-sft");
    let sets = [
        "model.new.hidden_size=32",
        "model.new.intermediate_size=64",
        "sft.batch_size=8",
        "sft.validation_freq=5",
    ];
    let sets: Vec<&str> = sets
        .iter()
        .chain(&["sft.test_problems=16", "sft.warmup_steps=2"])
        .flat_map(|set| ["--set", set])
        .collect();
    let sft = |run: &str| {
        qurl_in(&dir, &[&["sft", "--steps", "12", "--run", run, "--json"], &sets[..]].concat(), "").json()
    };
    let (first, _) = (sft("a"), sft("b"));
    train(&dir.join("rl"), 2, &[]);
    qurl_in(&dir, &["report", "a", "b", "--out", "many.html"], "");
    qurl_in(&dir, &["report", "a", "rl", "--out", "mixed.html"], "");

    let Some(browser) = Browser::start("report-sft", 1280, 900) else { return };
    let page = |file: &str| format!("file://{}", dir.join(file).display());
    browser.open(&page("a/report.html"));
    let plots = [
        "plot-sft-loss",
        "plot-sft-grad-norm",
        "plot-sft-lr",
        "plot-sft-speed",
        "plot-sft-seconds",
        "plot-sft-phases",
    ];
    let shown = drawn(&browser);
    let own = shown.as_array().expect("a list").iter().filter(|id| {
        id.as_str().is_some_and(|id| !id.starts_with("plot-more-")) // figures without a plot of their own
    });
    assert_eq!(json!(own.collect::<Vec<_>>()), json!(plots), "its own plots and no others");
    let points = "return Number(document.getElementById('plot-sft-loss').dataset.points)";
    assert_eq!(
        browser.eval(points),
        12 + 4,
        "losses, and the validation loss before, after 5, 10 and 12 steps"
    );
    let headline = browser.eval("return document.querySelector('.headline').textContent");
    let before = format!("{:.2}", first["validation_loss_before"].as_f64().expect("a loss"));
    assert!(
        headline.as_str().is_some_and(|t| t.starts_with("Validation loss") && t.contains(&before)),
        "{headline} {before}"
    );
    browser.open(&page("many.html"));
    assert_eq!(browser.eval(points), 32);
    assert_eq!(
        browser
            .eval("return document.querySelector('#summary thead').textContent.includes('validation loss')"),
        true
    );

    browser.open(&page("rl/report.html"));
    let shown = drawn(&browser);
    assert!(
        shown.as_array().is_some_and(
            |ids| ids.contains(&json!("plot-warm-loss")) && !ids.contains(&json!("plot-sft-loss"))
        )
    );
    assert_eq!(browser.eval("return Number(document.getElementById('plot-warm-lr').dataset.points)"), 20);
    assert_eq!(
        browser.eval(
            "return [...document.querySelectorAll('.tile .name')].some(n => n.textContent === 'Warm start')"
        ),
        true
    );
    browser.open(&page("mixed.html"));
    let shown = drawn(&browser);
    let both = ["plot-reward", "plot-warm-loss", "plot-sft-loss"].map(|id| json!(id));
    assert!(both.iter().all(|id| shown.as_array().is_some_and(|ids| ids.contains(id))), "{shown}");
    assert_eq!(browser.console(), json!([]));
}

/// Ends its process when a test fails before it does.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        _ = self.0.kill();
        _ = self.0.wait();
    }
}

#[test]
fn the_live_page_follows_a_run_and_closes() {
    let Some(browser) = Browser::start("dash", 1280, 900) else { return };
    let dir = directory("dash");
    let run = dir.join("going");
    let mut dash = Command::new(env!("CARGO_BIN_EXE_qurl"));
    let dash = dash.arg("dash").arg(&run).args(["--port", "0", "--json"]).stdout(Stdio::piped()).spawn();
    let mut dash = Ended(dash.expect("the server starts"));
    let mut line = String::new();
    BufReader::new(dash.0.stdout.take().expect("a pipe")).read_line(&mut line).expect("its address");
    let url =
        serde_json::from_str::<Value>(&line).expect("JSON")["url"].as_str().expect("an address").to_string();
    browser.open(&url);
    let steps = "return Number(document.getElementById('plot-reward').dataset.points)";
    assert_eq!(browser.eval(steps), 0, "nothing yet");
    browser
        .wait_for("return document.getElementById('status').textContent === 'waiting for the run to begin'");

    let training = Command::new(env!("CARGO_BIN_EXE_qurl"))
        .args(train_arguments(&run, 60, &["run.test_freq=20", "data.train_batch_size=4"]))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    let mut training = Ended(training.expect("the run starts"));
    // Held in the middle, so that the page sees it there however slow the browser is.
    assert!(wait_for(&mut training.0, || lines(&run) > 0));
    signal(&training.0, "STOP");
    browser.wait_for("return Number(document.getElementById('plot-reward').dataset.points) > 0");
    assert_eq!(browser.eval("return document.getElementById('status').dataset.state"), "running");
    let first = browser.eval(steps).as_u64().expect("a count");
    assert!(first < 60, "the page saw the run only at its end");
    signal(&training.0, "CONT");
    browser
        .wait_for(&format!("return Number(document.getElementById('plot-reward').dataset.points) > {first}"));
    assert!(training.0.wait().expect("the run ends").success());
    browser.wait_for("return document.getElementById('status').dataset.state === 'finished'");
    browser.wait_for("return Number(document.getElementById('plot-reward').dataset.points) === 60");
    check_plots(&browser);
    let headline = browser.eval("return document.getElementById('headline').textContent");
    assert!(headline.as_str().is_some_and(|text| text.contains('→')), "{headline}");
    assert_eq!(browser.console(), json!([]));

    let id = dash.0.id().to_string();
    assert!(Command::new("kill").args(["-INT", &id]).status().expect("kill").success());
    assert!(dash.0.wait().expect("the server ends").success(), "Ctrl-C is a clean end");
}

/// A page that was opened before the run began becomes the page of a supervised run.
#[test]
fn the_live_page_follows_supervised_training() {
    let Some(browser) = Browser::start("dash-sft", 1280, 900) else { return };
    let dir = directory("dash-sft");
    let run = dir.join("going");
    std::fs::create_dir_all(&run).expect("made");
    let mut dash = Command::new(env!("CARGO_BIN_EXE_qurl"));
    let dash = dash.arg("dash").arg(&run).args(["--port", "0", "--json"]).stdout(Stdio::piped()).spawn();
    let mut dash = Ended(dash.expect("the server starts"));
    let mut line = String::new();
    BufReader::new(dash.0.stdout.take().expect("a pipe")).read_line(&mut line).expect("its address");
    let address: Value = serde_json::from_str(&line).expect("JSON");
    browser.open(address["url"].as_str().expect("an address"));
    let sets = [
        "model.new.hidden_size=32",
        "model.new.intermediate_size=64",
        "sft.batch_size=8",
        "sft.test_problems=16",
    ];
    let training = Command::new(env!("CARGO_BIN_EXE_qurl"))
        .args(["sft", "--steps", "150", "--run", &run.display().to_string(), "--set", "sft.warmup_steps=2"])
        .args(sets.iter().flat_map(|set| ["--set", set]))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    let mut training = Ended(training.expect("the run starts"));
    browser.wait_for(
        "const plot = document.getElementById('plot-sft-loss'); \
         return plot !== null && Number(plot.dataset.points) > 0",
    );
    assert!(training.0.wait().expect("the run ends").success());
    browser.wait_for("return document.getElementById('status').dataset.state === 'finished'");
    // 150 losses, and the validation loss before the first step and after 50, 100 and 150.
    browser.wait_for("return Number(document.getElementById('plot-sft-loss').dataset.points) === 154");
    assert!(
        browser.eval("return document.getElementById('plot-reward').offsetParent === null").as_bool()
            == Some(true)
    );
    assert_eq!(browser.console(), json!([]));
}

#[test]
fn mistakes_are_named() {
    let dir = directory("report-mistakes");
    qurl_in(&dir, &["report", "absent"], "").assert_bad(&["absent: there is no such directory"]);
    qurl_in(&dir, &["report", "."], "").assert_bad(&["is empty: no run has begun here"]);
    std::fs::write(dir.join("notes.txt"), "").expect("written");
    let no_run =
        ["is no run: it holds notes.txt, but neither recipe.toml nor metrics.jsonl", "`qurl compare` made"];
    qurl_in(&dir, &["report", "."], "").assert_bad(&no_run);
    qurl_in(&dir, &["dash", "."], "").assert_bad(&no_run);
    qurl_in(&dir, &["dash", "notes.txt"], "").assert_bad(&["notes.txt: is a file"]);
    qurl_in(&dir, &["report"], "").assert_bad(&["RUN"]);
    qurl_in(&dir, &["dash"], "").assert_bad(&["RUN"]);
    qurl_in(&dir, &["dash", ".", "--host", "nowhere"], "").assert_bad(&["nowhere"]);
    qurl_in(&dir, &["completions", "tcsh"], "").assert_bad(&["tcsh", "bash"]);
    let script = qurl_in(&dir, &["completions", "bash"], "");
    assert!(script.status == 0 && script.stdout.contains("qurl") && script.stdout.contains("--run"));
    qurl_in(&dir, &["man", "pages"], "");
    let page = |name: &str| std::fs::read_to_string(dir.join("pages").join(name)).expect(name);
    assert!(page("qurl.1").contains("qurl\\-train(1)") && page("qurl-train.1").contains("\\-\\-resume"));
    assert!(page("qurl-recipe-init.1").contains("Example: qurl recipe init"));
    assert!(!dir.join("pages/qurl-reward-guard.1").exists(), "a hidden command");
    std::fs::write(dir.join("file"), "").expect("written");
    qurl_in(&dir, &["man", "file"], "").assert_bad(&["file: manual pages cannot be written there"]);
}
