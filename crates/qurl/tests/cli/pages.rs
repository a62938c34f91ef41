//! What a researcher does with the pages, in a real browser: zooms, switches axes, saves plots, compares
//! seeds, watches two runs at once, reads on a phone. The runs are written by hand, so that every figure is
//! known.

use crate::browser::Browser;
use crate::common::{directory, qurl_in};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// Steps of a run whose reward is `1 + step % 2 * 2` (1, 3, 1, 3, ...) and whose gradient norm grows tenfold
/// in 30 steps.
fn record(step: u64, reward: f64) -> Value {
    json!({"step": step, "reward": reward, "reward_group_std": 0.25, "groups": 4, "sampled_groups": 12,
           "mixed_groups": 6, "gen_batches": 3, "grad_norm": 10f64.powf(step as f64 / 30.0), "loss": -0.5,
           "lr": 1e-6, "reward_parts": {"right answer": 0.5, "format": 0.125}, "val_loss": 2.5,
           "response_tokens": 100, "timing": {"rollout": 1.0, "update": 2.0, "total": 3.0}})
}

fn rewards(step: u64) -> f64 {
    if step.is_multiple_of(2) { 3.0 } else { 1.0 }
}

fn append(run: &Path, record: &Value) {
    let mut file =
        std::fs::File::options().create(true).append(true).open(run.join("metrics.jsonl")).expect("opened");
    writeln!(file, "{record}").expect("written");
}

/// A run with a recipe of its own seed and these rewards of its steps.
fn write_run(run: &Path, seed: u64, steps: u64, reward: impl Fn(u64) -> f64) {
    std::fs::create_dir_all(run).expect("made");
    let recipe = format!(
        "[run]\ntotal_steps = 120\ntest_problems = 200\n[trainer]\nseed = {seed}\n\
         [algorithm.filter_groups]\nmax_num_gen_batches = 5\n"
    );
    std::fs::write(run.join("recipe.toml"), recipe).expect("written");
    for step in 1..=steps {
        let mut record = record(step, reward(step));
        if step.is_multiple_of(40) {
            record["test_accuracy"] = json!(if step == 40 { 0.9 } else { 0.2 });
        }
        append(run, &record);
    }
}

/// The page of `qurl report` with these arguments.
fn page(dir: &Path, arguments: &[&str]) -> String {
    let all = [&["report", "--out", "page.html", "--json"], arguments].concat();
    qurl_in(dir, &all, "").json();
    format!("file://{}", dir.join("page.html").display())
}

fn text(browser: &Browser, selector: &str) -> String {
    let found = browser.eval(&format!("return document.querySelector({selector:?}).textContent"));
    found.as_str().unwrap_or_else(|| panic!("{selector}: {found}")).to_string()
}

/// Where the horizontal axis of a plot ends.
fn last_tick(browser: &Browser, plot: &str) -> String {
    let ticks = format!("return [...document.querySelectorAll('#{plot} .plot > text')].at(-1).textContent");
    browser.eval(&ticks).as_str().expect("a text").to_string()
}

#[test]
fn a_plot_can_be_zoomed_switched_smoothed_and_saved() {
    let dir = directory("pages-one");
    write_run(&dir.join("run"), 1, 120, rewards);
    let url = page(&dir, &["run"]);
    let Some(browser) = Browser::start("pages-one", 1280, 900) else { return };
    browser.open(&url);

    // Zoom: a drag over the middle half of one plot shows that stretch in all plots over steps.
    assert_eq!(last_tick(&browser, "plot-reward"), "120 step");
    browser.drag("#plot-reward .plot", 0.25, 0.75);
    let zoomed = last_tick(&browser, "plot-reward");
    let end: f64 = zoomed.strip_suffix(" step").and_then(|n| n.parse().ok()).expect("a number");
    assert!((80.0..100.0).contains(&end), "{zoomed}");
    assert_eq!(last_tick(&browser, "plot-grad-norm"), zoomed, "all plots show the same stretch");
    assert_eq!(browser.eval("return document.getElementById('reset-zoom').hidden"), false);
    browser.click("#plot-reward .plot", 2);
    assert_eq!(last_tick(&browser, "plot-reward"), "120 step", "a double click shows everything again");
    assert_eq!(browser.eval("return document.getElementById('reset-zoom').hidden"), true);

    // Axes: logarithmic where it says so, and back.
    let axis = "return [document.querySelector('#plot-grad-norm .plot').dataset.axis, \
                [...document.querySelectorAll('#plot-grad-norm .plot text')]
                .some((t) => t.textContent === 'log scale')]";
    assert_eq!(browser.eval(axis), json!(["log", true]));
    browser.click("#plot-grad-norm button.log", 1);
    assert_eq!(browser.eval(axis), json!(["linear", false]));
    browser.click("#plot-reward button.log", 1);
    assert_eq!(browser.eval("return document.querySelector('#plot-reward .plot').dataset.axis"), "log");
    browser.click("#plot-reward button.log", 1);
    // Zeros and losses below zero have no logarithm: the button says so.
    assert_eq!(browser.eval("return document.querySelector('#plot-loss button.log').disabled"), true);

    // Smoothing: by itself a twentieth of the run, its value shown, and the tooltip shows what is drawn.
    assert_eq!(text(&browser, "#smoothing"), "0.70");
    browser.point("#plot-reward .plot", 0.8);
    let tip = text(&browser, "#plot-reward .tip");
    assert!(tip.contains("smoothed by 0.7"), "{tip}");
    let drawn: f64 = browser
        .eval("return parseFloat(document.querySelector('#plot-reward .tip b').firstChild.textContent)")
        .as_f64()
        .expect("a number");
    assert!((1.5..2.5).contains(&drawn), "the mean of 1 and 3, not either of them: {tip}");
    assert!(tip.contains("(1)") || tip.contains("(3)"), "beside it what was measured: {tip}");
    let set = "const s = document.querySelector('input[type=range]'); s.value = 0; \
               s.dispatchEvent(new Event('input')); return 0";
    browser.eval(set);
    assert_eq!(text(&browser, "#smoothing"), "0.00");
    browser.point("#plot-reward .plot", 0.5);
    browser.point("#plot-reward .plot", 0.8);
    let tip = text(&browser, "#plot-reward .tip");
    assert!(!tip.contains("smoothed") && (tip.ends_with("reward1") || tip.ends_with("reward3")), "{tip}");

    // Saving: files in the formats that they say they are, with the figures of the run.
    browser.save_to(&dir);
    for way in ["svg", "png", "csv"] {
        browser.click("#plot-groups .save summary", 1);
        browser.click(&format!("#plot-groups [data-save={way}]"), 1);
    }
    let saved = |name: &str| -> Vec<u8> {
        for _ in 0..200 {
            match std::fs::read(dir.join(name)) {
                Ok(bytes) if !bytes.is_empty() => return bytes,
                _ => std::thread::sleep(std::time::Duration::from_millis(50)),
            }
        }
        panic!("{name} was not saved; console: {}", browser.console())
    };
    let csv = String::from_utf8(saved("groups.csv")).expect("text");
    let rows: Vec<&str> = csv.lines().collect();
    assert_eq!((rows[0], rows[1]), ("step,trained on,with different rewards,sampled", "1,4,6,12"));
    assert_eq!((rows.len(), rows[120]), (121, "120,4,6,12"));
    let png = saved("groups.png");
    let side = |at: usize| u32::from_be_bytes(png[at..at + 4].try_into().expect("four bytes"));
    assert!(
        png.starts_with(b"\x89PNG\r\n\x1a\n") && side(16) > 500 && side(20) > 400,
        "{}x{}",
        side(16),
        side(20)
    );
    let svg = String::from_utf8(saved("groups.svg")).expect("text");
    assert!(svg.contains(">Groups<") && svg.contains("with different rewards"), "{svg}");
    assert!(!svg.contains("var(") && !svg.contains("class="), "it needs no style sheet");
    assert_eq!(browser.console(), json!([]));
    browser.eval(&format!("location.href = 'file://{}'; return 0", dir.join("groups.svg").display()));
    browser.wait_for(
        "return document.documentElement.tagName === 'svg' && document.querySelectorAll('path').length > 2",
    );
}

#[test]
fn named_figures_dynamic_sampling_and_a_collapse_are_shown() {
    let dir = directory("pages-named");
    write_run(&dir.join("run"), 1, 120, rewards);
    let url = page(&dir, &["run"]);
    let Some(browser) = Browser::start("pages-named", 1280, 900) else { return };
    browser.open(&url);
    let key = |plot: &str| {
        let names =
            format!("return [...document.querySelectorAll('#{plot} .key > span')].map((s) => s.textContent)");
        browser.eval(&names)
    };
    assert_eq!(key("plot-reward-parts"), json!(["format", "right answer"]), "whatever the parts are called");
    assert_eq!(key("plot-groups"), json!(["trained on", "with different rewards", "sampled"]));
    for plot in ["plot-gen-batches", "plot-reward-spread", "plot-more-val-loss"] {
        let points = format!("return Number(document.getElementById('{plot}').dataset.points)");
        assert_eq!(browser.eval(&points), 120, "{plot}");
    }
    let alarm = text(&browser, "#alarms .banner");
    assert_eq!(
        alarm,
        "Held-out accuracy has collapsed: from its best, 90.0% after step 40, to 20.0% after step 120."
    );
    assert!(text(&browser, ".headline").contains("20.0%"));
    // The contents lead to every part that is shown.
    let parts = browser.eval(
        "return [...document.querySelectorAll('.contents a')].filter((a) => !a.hidden) \
         .map((a) => [a.textContent, document.querySelector(a.getAttribute('href')) !== null])",
    );
    let parts = parts.as_array().expect("links");
    assert!(parts.len() >= 6 && parts.iter().all(|part| part[1] == json!(true)), "{parts:?}");
    assert!(
        parts.contains(&json!(["Groups and rewards", true]))
            && parts.contains(&json!(["More figures", true]))
    );
    assert!(!parts.contains(&json!(["Mismatch", true])), "nothing of it was measured");
    assert_eq!(browser.console(), json!([]));
}

#[test]
fn seeds_are_drawn_as_mean_and_band() {
    let dir = directory("pages-seeds");
    for seed in 1..=3u64 {
        write_run(&dir.join(format!("c/seed-{seed}/full")), seed, 120, |_| seed as f64);
        write_run(&dir.join(format!("c/seed-{seed}/other")), seed, 120, |_| 5.0);
        let recipe = dir.join(format!("c/seed-{seed}/other/recipe.toml"));
        let text = std::fs::read_to_string(&recipe).expect("a recipe");
        std::fs::write(recipe, text.replace("test_problems = 200", "test_problems = 100")).expect("written");
    }
    let url = page(&dir, &["c"]);
    let Some(browser) = Browser::start("pages-seeds", 1280, 900) else { return };
    browser.open(&url);
    let lines = "return [document.querySelectorAll('#plot-reward path.line:not(.raw)').length, \
                 document.querySelectorAll('#plot-reward path.band').length, \
                 [...document.querySelectorAll('#legend button')].map((b) => b.textContent)]";
    assert_eq!(browser.eval(lines), json!([2, 2, ["full", "other"]]));
    browser.point("#plot-reward .plot", 0.5);
    let tip = text(&browser, "#plot-reward .tip");
    assert!(
        tip.contains("full2 ± 1") && tip.contains("other5 ± 0"),
        "mean and sample deviation of 1, 2, 3: {tip}"
    );
    let table = text(&browser, "#summary");
    assert!(table.contains("full3 seeds") && table.contains("20.0% ± 0.0%"), "{table}");
    browser.click("[data-seeds=each]", 1);
    let each = browser.eval(lines);
    assert_eq!(each[0], 6, "each seed by itself: {each}");
    assert_eq!((&each[1], each[2].as_array().map(Vec::len)), (&json!(0), Some(6)));
    assert_eq!(each[2][0], "full, seed 1");
    assert_eq!(browser.console(), json!([]));
}

#[test]
fn a_phone_shows_one_part_at_a_time() {
    let dir = directory("pages-phone");
    write_run(&dir.join("run"), 1, 120, rewards);
    let url = page(&dir, &["run"]);
    let Some(browser) = Browser::start("pages-phone", 1280, 900) else { return };
    browser.as_phone(390, 844);
    browser.open(&url);
    let open = "return [...document.querySelectorAll('section')] \
                .filter((s) => !s.hidden && s.querySelector('details').open).map((s) => s.id)";
    assert_eq!(browser.eval(open), json!(["learning"]));
    assert_eq!(browser.eval("return document.documentElement.scrollWidth"), 390, "nothing sticks out");
    // The contents open what they lead to, and it is drawn for the width it gets.
    browser.eval("document.querySelector('.contents a[href=\"#groups-and-rewards\"]').click(); return 0");
    browser.wait_for("return document.querySelector('#groups-and-rewards details').open");
    browser.wait_for(
        "const p = document.querySelector('#plot-groups .plot'); \
                      return p.clientWidth > 200 && p.getAttribute('viewBox') === `0 0 ${p.clientWidth} 222`",
    );
    assert_eq!(browser.eval("return document.documentElement.scrollWidth"), 390);
    browser.eval("document.querySelector('#learning summary').click(); return 0");
    assert_eq!(browser.eval(open), json!(["groups-and-rewards"]));
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

/// The server of the live page of these runs, and its address.
fn dash(runs: &[PathBuf]) -> (Ended, String) {
    let mut dash = Command::new(env!("CARGO_BIN_EXE_qurl"));
    dash.arg("dash").args(runs).args(["--port", "0", "--json"]).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut dash = Ended(dash.spawn().expect("the server starts"));
    let mut line = String::new();
    BufReader::new(dash.0.stdout.take().expect("a pipe")).read_line(&mut line).expect("its address");
    let told: Value = serde_json::from_str(&line).expect("JSON");
    (dash, told["url"].as_str().expect("an address").to_string())
}

#[test]
fn two_runs_are_followed_at_once_and_one_that_has_not_begun_is_waited_for() {
    let Some(browser) = Browser::start("pages-live", 1280, 900) else { return };
    let dir = directory("pages-live");
    let runs = [dir.join("first"), dir.join("not/yet")];
    write_run(&runs[0], 1, 3, rewards);
    let (_dash, url) = dash(&runs);
    browser.open(&url);
    let points = |count: u64| {
        browser.wait_for(&format!(
            "return Number(document.getElementById('plot-reward').dataset.points) === {count}"
        ));
    };
    points(3);
    browser.wait_for("return document.getElementById('status').textContent === '2 runs, 0 finished'");
    append(&runs[0], &record(4, 1.0));
    points(4);
    // The second begins: its name and its line are there without loading the page again.
    write_run(&runs[1], 2, 2, |_| 2.0);
    let legend = "return [...document.querySelectorAll('#legend button')].map((b) => b.textContent)";
    browser.wait_for("return document.querySelectorAll('#legend button').length === 1");
    assert_eq!(browser.eval(legend), json!(["first"]), "seeds of one recipe are one line");
    browser.click("[data-seeds=each]", 1);
    assert_eq!(browser.eval(legend), json!(["first, seed 1", "first, seed 2"]));
    points(6);
    append(&runs[1], &record(3, 2.0));
    append(&runs[0], &record(5, 1.0));
    points(8);
    std::fs::write(runs[0].join("summary.json"), "{\"accuracy_after\": 0.5}").expect("written");
    browser.wait_for("return document.getElementById('status').textContent === '2 runs, 1 finished'");
    assert_eq!(browser.console(), json!([]));
}
