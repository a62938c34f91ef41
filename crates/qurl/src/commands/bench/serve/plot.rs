//! The figures of a server over the rates of arrival, as one HTML file without scripts.

use super::load::Figures;
use std::fmt::Write;

const WIDTH: f64 = 420.0;
const HEIGHT: f64 = 260.0;
const MARGIN: f64 = 46.0;
const COLOURS: [&str; 6] = ["#3366cc", "#dc6b2f", "#2f9e63", "#8a4fbf", "#b8860b", "#555555"];

/// One number of a measurement.
type Figure = fn(&Figures) -> f64;

/// What is drawn over the rates, with its name and unit.
const PLOTS: [(&str, Figure); 4] = [
    ("new tokens a second", |f| f.tokens_per_s),
    ("time to the first token, median (ms)", |f| 1e3 * f.first_token_s.p50),
    ("time between tokens, median (ms)", |f| 1e3 * f.between_tokens_s.p50),
    ("time between tokens, 99% (ms)", |f| 1e3 * f.between_tokens_s.p99),
];

/// The page: a plot for each figure, in it a line for each format. All at once is drawn at the rate that was
/// reached.
pub fn page(title: &str, rows: &[(String, &Figures)]) -> String {
    let title = escaped(title);
    let mut page = format!(
        "<!doctype html><meta charset=\"utf-8\"><title>{title} under load</title><style>body{{font:14px \
         system-ui;margin:2em}}svg{{margin:0 1em 1em 0}}text{{font:11px system-ui;fill:#444}}</style>\
         <h1>{title} under load</h1>\n"
    );
    for (name, value) in PLOTS {
        plot(&mut page, name, rows, value);
    }
    page
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

fn plot(page: &mut String, name: &str, rows: &[(String, &Figures)], value: Figure) {
    let rate = |f: &Figures| f.rate.unwrap_or(f.requests_per_s);
    let most = |of: &dyn Fn(&Figures) -> f64| rows.iter().map(|(_, f)| of(f)).fold(0.0, f64::max).max(1e-9);
    let (x_most, y_most) = (most(&rate), most(&value));
    let x = |rate: f64| MARGIN + rate / x_most * (WIDTH - 2.0 * MARGIN);
    let y = |value: f64| HEIGHT - MARGIN - value / y_most * (HEIGHT - 2.0 * MARGIN);
    // Writing to a String cannot fail.
    _ = writeln!(page, "<svg width=\"{WIDTH}\" height=\"{HEIGHT}\" role=\"img\" aria-label=\"{name}\">");
    _ = writeln!(page, "<text x=\"{MARGIN}\" y=\"16\">{name}</text>");
    for part in 0..=4 {
        let (at, label) = (y(y_most * f64::from(part) / 4.0), y_most * f64::from(part) / 4.0);
        let right = WIDTH - MARGIN;
        _ = writeln!(page, "<path d=\"M{MARGIN} {at:.1}H{right}\" stroke=\"#ddd\"/>");
        _ = writeln!(
            page,
            "<text x=\"{:.0}\" y=\"{:.1}\" text-anchor=\"end\">{label:.0}</text>",
            MARGIN - 4.0,
            at + 4.0
        );
    }
    for part in 0..=4 {
        let rate = x_most * f64::from(part) / 4.0;
        let bottom = HEIGHT - MARGIN + 16.0;
        _ = writeln!(
            page,
            "<text x=\"{:.1}\" y=\"{bottom}\" text-anchor=\"middle\">{rate:.1}</text>",
            x(rate)
        );
    }
    _ = writeln!(page, "<text x=\"{}\" y=\"{}\">requests a second</text>", WIDTH / 2.0 - 40.0, HEIGHT - 8.0);
    let mut formats: Vec<&str> = rows.iter().map(|(format, _)| format.as_str()).collect();
    formats.dedup();
    for (place, format) in formats.iter().enumerate() {
        let colour = COLOURS[place % COLOURS.len()];
        let mut points: Vec<(f64, f64)> =
            rows.iter().filter(|(own, _)| own == format).map(|(_, f)| (x(rate(f)), y(value(f)))).collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        let line: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        let line = line.join(" ");
        _ = writeln!(
            page,
            "<polyline points=\"{line}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>"
        );
        for (x, y) in points {
            _ = writeln!(page, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{colour}\"/>");
        }
        let at = 16.0 + 14.0 * (place + 1) as f64;
        let left = MARGIN + 6.0;
        _ = writeln!(
            page,
            "<text x=\"{left}\" y=\"{at}\" style=\"fill:{colour}\">{}</text>",
            escaped(format)
        );
    }
    page.push_str("</svg>\n");
}
