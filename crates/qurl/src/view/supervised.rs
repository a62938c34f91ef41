//! The lines of the terminal view while a model learns from examples.

use super::frame::{Painter, SPARK, phase_shares, sparkline, thousands};
use qurl_train::sft::SftRecord;

/// The rows below the progress bar after a step; `validation` is the newest validation loss.
pub fn block(record: &SftRecord, losses: &[f64], validation: Option<f64>, painter: Painter) -> String {
    let mut rows = vec![String::new()];
    let spark = painter.paint("36", &sparkline(losses, SPARK));
    let validation = validation.map_or(String::new(), |loss| {
        format!("  {} {}", painter.dim("validation"), painter.strong(&format!("{loss:.4}")))
    });
    let loss = painter.strong(&format!("{:.4}", record.loss));
    rows.push(painter.row("loss", &format!("{loss}  {spark}{validation}")));
    rows.push(painter.row("speed", &format!("{} tokens/s", thousands(record.tokens_per_s()))));
    rows.push(painter.row("time", &phase_shares(&record.timing, painter)));
    rows.join("\n")
}

/// A step on one plain line.
pub fn plain(record: &SftRecord) -> String {
    let validation = record.validation_loss.map_or(String::new(), |loss| format!("  validation {loss:.4}"));
    format!("loss {:.4}{validation}  {} tokens/s", record.loss, thousands(record.tokens_per_s()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    #[test]
    fn a_step_says_its_loss_its_speed_and_where_the_time_went() {
        let record = SftRecord {
            step: 3,
            epoch: None,
            loss: 1.25,
            validation_loss: Some(1.5),
            lr: 1e-3,
            grad_norm: 1.0,
            updates: 1,
            skipped_updates: 0,
            tokens: 1200,
            learned_tokens: 600,
            timing: BTreeMap::from(
                [("update", 0.5), ("validation", 0.5), ("total", 1.0)].map(|(k, v)| (k.into(), v)),
            ),
        };
        assert_eq!(plain(&record), "loss 1.2500  validation 1.5000  2.4k tokens/s");
        let text = block(&record, &[2.0, 1.25], Some(1.5), Painter::plain());
        let rows: Vec<&str> = text.lines().collect();
        assert_eq!(rows[1], "loss       1.2500  █▁  validation 1.5000");
        assert_eq!(rows[2], "speed      2.4k tokens/s");
        assert_eq!(rows[3], "time       update 50%  validation 50%");
    }
}
