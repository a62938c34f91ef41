//! The HTML around the data.
//!
//! Everything a model or a file name says reaches the page as JSON in a data block and from there as text:
//! `<` is escaped, so no string can end the block, and the page has no way to turn text into markup. A
//! content security policy stands behind that: only the scripts of this folder run, and nothing is loaded
//! from anywhere.

use super::RunData;
use serde_json::{Value, json};
use std::hash::{DefaultHasher, Hash, Hasher};

const TEMPLATE: &str = include_str!("page.html");
/// The style sheet.
pub const STYLE: &str = include_str!("page.css");
/// The scripts, in one scope of their own.
pub const SCRIPT: &str = concat!(
    "(() => {\n\"use strict\";\n",
    include_str!("js/dom.js"),
    include_str!("js/data.js"),
    include_str!("js/scale.js"),
    include_str!("js/pointer.js"),
    include_str!("js/save.js"),
    include_str!("js/chart.js"),
    include_str!("js/phases.js"),
    include_str!("js/plots.js"),
    include_str!("js/summary.js"),
    include_str!("js/supervised.js"),
    include_str!("js/rollouts.js"),
    include_str!("js/toolbar.js"),
    include_str!("js/live.js"),
    include_str!("js/main.js"),
    "})();\n"
);

/// One file that shows these runs and loads nothing.
pub fn render(runs: &[RunData]) -> String {
    let runs: Vec<&RunData> = runs.iter().collect();
    let data = data_block(&runs, false);
    // Unknown to whoever wrote the text in the data, and the same whenever the data is.
    let mut hasher = DefaultHasher::new();
    data.hash(&mut hasher);
    let nonce = format!("{:016x}", hasher.finish());
    let policy = format!(
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; img-src data:; \
         style-src 'nonce-{nonce}'; script-src 'nonce-{nonce}'; base-uri 'none'; form-action 'none'\">"
    );
    let style = format!("<style nonce=\"{nonce}\">\n{STYLE}</style>");
    let script = format!("<script nonce=\"{nonce}\">\n{SCRIPT}</script>");
    fill(&title(&runs), &policy, &style, &data, &script)
}

/// The page of runs in progress; style and script come from the server that sends it, the policy as a
/// header.
pub fn live_page(runs: &[&RunData]) -> String {
    let style = "<link rel=\"stylesheet\" href=\"/page.css\">";
    fill(&title(runs), "", style, &data_block(runs, true), "<script src=\"/page.js\"></script>")
}

fn title(runs: &[&RunData]) -> String {
    match runs {
        [run] => format!("{} · QuRL", run.label),
        runs => format!("{} runs · QuRL", runs.len()),
    }
}

fn data_block(runs: &[&RunData], live: bool) -> String {
    let runs: Vec<Value> = runs.iter().map(|run| run.to_json()).collect();
    let data = json!({"version": env!("CARGO_PKG_VERSION"), "live": live, "runs": runs});
    format!("<script type=\"application/json\" id=\"data\">{}</script>", script_safe(&data.to_string()))
}

/// JSON that can stand inside a script element: the characters that HTML or JavaScript might take for their
/// own occur in strings only, and are written as escapes.
fn script_safe(json: &str) -> String {
    let mut safe = String::with_capacity(json.len());
    for c in json.chars() {
        match c {
            '<' | '>' | '&' | '\u{2028}' | '\u{2029}' => safe.push_str(&format!("\\u{:04x}", c as u32)),
            c => safe.push(c),
        }
    }
    safe
}

fn html_text(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// The template with its places filled, in one pass: what is filled in is not looked at again.
fn fill(title: &str, policy: &str, style: &str, data: &str, script: &str) -> String {
    let mut page = String::with_capacity(TEMPLATE.len() + style.len() + data.len() + script.len());
    for part in TEMPLATE.split("{{") {
        match part.split_once("}}") {
            None => page.push_str(part),
            Some((name, rest)) => {
                match name {
                    "title" => page.push_str(&html_text(title)),
                    "policy" => page.push_str(policy),
                    "style" => page.push_str(style),
                    "data" => page.push_str(data),
                    "script" => page.push_str(script),
                    _ => {}
                }
                page.push_str(rest);
            }
        }
    }
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_cannot_leave_its_block_and_means_the_same() {
        let nasty = json!({"text": "</script><script>alert(1)</script><!-- \u{2028} & {{script}}"});
        let safe = script_safe(&nasty.to_string());
        assert!(!safe.contains(['<', '>', '&', '\u{2028}']), "{safe}");
        assert_eq!(serde_json::from_str::<Value>(&safe).expect("JSON"), nasty);
    }

    #[test]
    fn the_page_has_one_of_everything() {
        let run = RunData { label: "<b>{{data}}".to_string(), ..RunData::default() };
        let page = render(std::slice::from_ref(&run));
        assert_eq!(page.matches("id=\"data\"").count(), 1);
        assert_eq!(page.matches("</script>").count(), 2);
        assert!(page.contains("<title>&lt;b&gt;{{data}} · QuRL</title>"));
        for elsewhere in ["http://", "https://", "//cdn", "@import", "url("] {
            let found = page.replace("http://www.w3.org/2000/svg", "").contains(elsewhere);
            assert!(!found, "the page mentions {elsewhere}");
        }
        assert!(!page.contains("innerHTML") && !page.contains("eval("));
        assert!(live_page(&[&run]).contains("src=\"/page.js\""));
    }
}
