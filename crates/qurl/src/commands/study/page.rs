//! What a study shows: as text, and as one HTML file without scripts that loads nothing.

use super::{Document, Row, State};
use qurl_train::study::Verdict;
use qurl_train::study::stats::Estimate;
use std::fmt::Write;

/// Colours of methods, told apart by those who see few colours, too.
const COLOURS: [&str; 12] = [
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999933", "#882255",
    "#44aa99", "#888888", "#6600aa",
];

/// A number in a few digits.
fn short(x: f64) -> String {
    match x.abs() {
        0.0 => "0".to_string(),
        size if !(1e-3..1e5).contains(&size) => format!("{x:.2e}"),
        _ => format!("{x:.4}"),
    }
}

fn interval(e: &Estimate) -> String {
    match e.n {
        1 => short(e.mean),
        _ => format!("{} [{}, {}]", short(e.mean), short(e.low), short(e.high)),
    }
}

/// Tables in Markdown.
pub fn text(document: &Document) -> String {
    let over = document.cells.iter().filter(|cell| cell.state == State::Over).count();
    let mut text = format!("{}: {over} of {} cells are over\n\n", document.name, document.cells.len());
    let header: String = document.metrics.iter().map(|m| format!(" {m} |")).collect();
    let _ = writeln!(
        text,
        "| recipe | method | n |{header}\n|---|---|---|{}",
        "---|".repeat(document.metrics.len())
    );
    for row in &document.rows {
        let figures: String = document.metrics.iter().map(|m| format!(" {} |", cell(row, m))).collect();
        let _ = writeln!(text, "| {} | {} | {} |{figures}", row.recipe, row.method, row.seeds);
    }
    if !document.verdicts.is_empty() {
        text += "\n| claim | recipe | verdict | n | difference |\n|---|---|---|---|---|\n";
    }
    for v in &document.verdicts {
        let n = v.estimate.map_or(0, |e| e.n);
        let _ = writeln!(text, "| {} | {} | {} | {n} | {} |", v.claim, v.recipe, v.verdict, difference(v));
    }
    text + &format!("\n{}/study.html\n", document.run)
}

fn cell(row: &Row, metric: &str) -> String {
    row.figures.get(metric).map_or("-".to_string(), interval)
}

/// The mean difference with its interval, and how likely it is by chance.
fn difference(v: &Verdict) -> String {
    let Some(e) = v.estimate else { return "-".to_string() };
    let margin = if v.margin == 0.0 { String::new() } else { format!(", margin {}", short(v.margin)) };
    let p = if e.mean > v.margin { v.p_above } else { v.p_below };
    format!("{}: {}{margin}, p {p:.3}", v.compared, interval(&e))
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// The page.
pub fn render(document: &Document) -> String {
    let name = escaped(&document.name);
    let mut html = format!(
        "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><title>{name} · QuRL</title>\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\
         <style>body{{font:15px/1.5 system-ui,sans-serif;margin:2em auto;max-width:70em;padding:0 1em}}\
         table{{border-collapse:collapse;margin:1em 0}}td,th{{border-bottom:1px solid #ccc;padding:.25em .7em;\
         text-align:left;font-variant-numeric:tabular-nums}}.holds{{color:#006b3c}}.not{{color:#a00}}\
         svg{{max-width:100%;height:auto}}figcaption{{font-weight:600}}</style>\n<h1>{name}</h1>\n<p>{}</p>\n",
        escaped(&document.about)
    );
    html += "<h2>Verdicts</h2>\n<p>Pairs of runs differ in the method alone. A claim holds where there are at least \
             five pairs, the 95% interval of their mean difference (Student's t) is above the margin and the exact \
             sign-flip test agrees (one-sided p at most 0.05); it does not hold where the same is true below it.</p>\n\
             <table><tr><th>claim<th>recipe<th>verdict<th>n<th>mean of paired differences, 95% interval, p\
             <th>differences, seed by seed</tr>\n";
    for v in &document.verdicts {
        let class = match v.verdict {
            "holds" => "holds",
            "does not hold" => "not",
            _ => "",
        };
        let n = v.estimate.map_or(0, |e| e.n);
        let pairs: Vec<String> = v.differences.iter().map(|d| short(*d)).collect();
        let _ = writeln!(
            html,
            "<tr><td>{}<td>{}<td class=\"{class}\">{}<td>{n}<td>{}<td>{}</tr>",
            escaped(&v.claim),
            escaped(&v.recipe),
            v.verdict,
            escaped(&difference(v)),
            pairs.join(", ")
        );
    }
    html += "</table>\n<h2>Figures</h2>\n<table><tr><th>recipe<th>method<th>n";
    document.metrics.iter().for_each(|metric| html += &format!("<th>{}", escaped(metric)));
    html += "</tr>\n";
    for row in &document.rows {
        let _ = write!(html, "<tr><td>{}<td>{}<td>{}", escaped(&row.recipe), escaped(&row.method), row.seeds);
        document.metrics.iter().for_each(|metric| html += &format!("<td>{}", cell(row, metric)));
        html += "</tr>\n";
    }
    html += "</table>\n";
    let mut recipes: Vec<&String> = document.rows.iter().map(|row| &row.recipe).collect();
    recipes.dedup();
    for recipe in recipes {
        let _ = writeln!(html, "<h2>{}</h2>", escaped(recipe));
        let rows: Vec<&Row> = document.rows.iter().filter(|row| row.recipe == *recipe).collect();
        html += &curves(document, recipe, &rows);
        document.metrics.iter().for_each(|metric| html += &intervals(metric, &rows));
    }
    html += "<h2>Cells</h2>\n<table><tr><th>cell<th>state<th>figures</tr>\n";
    for cell in &document.cells {
        let figures: Vec<String> =
            cell.figures.iter().map(|(key, value)| format!("{key} {}", short(*value))).collect();
        let state = match (cell.state, &cell.why) {
            (State::Over, _) => "over".to_string(),
            (State::Open, _) => "open".to_string(),
            (State::Failed, why) => format!("failed: {}", escaped(why.as_deref().unwrap_or_default())),
        };
        let (recipe, method) = (escaped(&cell.recipe), escaped(&cell.method));
        let _ = writeln!(
            html,
            "<tr><td>{recipe}/{method}/seed-{}<td>{state}<td>{}</tr>",
            cell.seed,
            escaped(&figures.join(", "))
        );
    }
    html + "</table>\n</html>\n"
}

/// Where values of a range lie on so many pixels.
fn scale(low: f64, high: f64, pixels: f64) -> impl Fn(f64) -> f64 {
    let width = if high > low { high - low } else { 1.0 };
    move |x| (x - low) / width * pixels
}

/// A dot and a line for each method.
fn intervals(metric: &str, rows: &[&Row]) -> String {
    let found: Vec<(&Row, &Estimate)> =
        rows.iter().filter_map(|row| Some((*row, row.figures.get(metric)?))).collect();
    let low = found.iter().map(|(_, e)| e.low).fold(f64::INFINITY, f64::min);
    let high = found.iter().map(|(_, e)| e.high).fold(f64::NEG_INFINITY, f64::max);
    if found.is_empty() || !(low.is_finite() && high.is_finite()) {
        return String::new();
    }
    let (x, height) = (scale(low, high, 420.0), 22 * found.len() + 26);
    let mut svg = format!(
        "<figure><figcaption>{}: mean and 95% interval over seeds</figcaption>\
         <svg viewBox=\"0 0 720 {height}\" width=\"720\" role=\"img\">\n",
        escaped(metric)
    );
    for (i, (row, e)) in found.iter().enumerate() {
        let (y, colour) = (22 * i + 14, colour(rows, row));
        let _ = writeln!(
            svg,
            "<text x=\"230\" y=\"{}\" text-anchor=\"end\" font-size=\"13\">{}</text>\
             <line x1=\"{:.1}\" x2=\"{:.1}\" y1=\"{y}\" y2=\"{y}\" stroke=\"{colour}\" stroke-width=\"2\"/>\
             <circle cx=\"{:.1}\" cy=\"{y}\" r=\"4\" fill=\"{colour}\"/>",
            y + 4,
            escaped(&row.method),
            245.0 + x(e.low),
            245.0 + x(e.high),
            245.0 + x(e.mean)
        );
    }
    let y = height - 6;
    svg + &format!(
        "<text x=\"245\" y=\"{y}\" font-size=\"11\">{}</text><text x=\"665\" y=\"{y}\" font-size=\"11\" \
         text-anchor=\"end\">{}</text></svg></figure>\n",
        short(low),
        short(high)
    )
}

fn colour(rows: &[&Row], row: &Row) -> &'static str {
    let place = rows.iter().position(|other| other.method == row.method).unwrap_or(0);
    COLOURS[place % COLOURS.len()]
}

/// Held-out accuracy by steps, a line for each method: the mean of the seeds that were measured there.
fn curves(document: &Document, recipe: &str, rows: &[&Row]) -> String {
    let mut lines: Vec<(&Row, Vec<(f64, f64)>)> = Vec::new();
    for row in rows {
        let mut sums: std::collections::BTreeMap<u64, (f64, f64)> = Default::default();
        let cells = document.cells.iter().filter(|c| c.recipe == recipe && c.method == row.method);
        for (step, accuracy) in cells.flat_map(|cell| &cell.tests) {
            let sum = sums.entry(*step).or_default();
            *sum = (sum.0 + accuracy, sum.1 + 1.0);
        }
        lines.push((row, sums.into_iter().map(|(step, (sum, n))| (step as f64, sum / n)).collect()));
    }
    let points = || lines.iter().flat_map(|(_, line)| line);
    let last = points().map(|p| p.0).fold(0.0, f64::max);
    let low = points().map(|p| p.1).fold(f64::INFINITY, f64::min);
    let high = points().map(|p| p.1).fold(f64::NEG_INFINITY, f64::max);
    if last == 0.0 || !(low.is_finite() && high.is_finite()) {
        return String::new();
    }
    let (x, y) = (scale(0.0, last, 480.0), scale(low, high, 200.0));
    let mut svg = format!(
        "<figure><figcaption>held-out accuracy, mean over seeds</figcaption><svg viewBox=\"0 0 720 260\" \
         width=\"720\" role=\"img\">\n<path d=\"M50 20V220H530\" fill=\"none\" stroke=\"#888\"/>\
         <text x=\"45\" y=\"224\" font-size=\"11\" text-anchor=\"end\">{}</text>\
         <text x=\"45\" y=\"24\" font-size=\"11\" text-anchor=\"end\">{}</text>\
         <text x=\"530\" y=\"236\" font-size=\"11\" text-anchor=\"end\">step {last}</text>\n",
        short(low),
        short(high)
    );
    for (i, (row, line)) in lines.iter().enumerate() {
        let path: Vec<String> =
            line.iter().map(|p| format!("{:.1},{:.1}", 50.0 + x(p.0), 220.0 - y(p.1))).collect();
        let (colour, at) = (colour(rows, row), 28 + 18 * i);
        let _ = writeln!(
            svg,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.8\"/>\
             <text x=\"545\" y=\"{at}\" font-size=\"13\" fill=\"{colour}\">{}</text>",
            path.join(" "),
            escaped(&row.method)
        );
    }
    svg + "</svg></figure>\n"
}
