//! Are two answers the same? The shapes (lists, sets, tuples, intervals, matrices, relations, words) are
//! handled here, formulas by [`super::scalar`], relations by [`super::relation`], sets of reals by
//! [`super::intervals`].
//!
//! Whatever cannot be decided within the budget is "not the same".

use super::budget::{Budget, MAX_ANSWER_BYTES, MAX_ITEMS, Stop};
use super::expr::{Bracket, Constant, Expr, Join, Relation};
use super::intervals::{RealSet, is_set_like};
use super::lexer::Reading;
use super::parser::parse;
use super::relation::{assignment, is_label};
use super::{text, words};

/// What a percent sign means.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PercentRule {
    /// 28% is 28 and 0.28 alike, when only one side has the sign.
    #[default]
    Ignored,
    /// 28% is 0.28 and nothing else.
    IsRatio,
}

/// Conventions that differ between policies.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// What a percent sign means.
    pub percent: PercentRule,
    /// Whether "four" is 4.
    pub number_words: bool,
}

/// Compares answers with one budget.
pub struct Comparer {
    pub(super) budget: Budget,
    pub(super) options: Options,
}

/// The result of a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Comparison {
    /// Whether the answers are the same.
    pub equal: bool,
    /// Fuel that it took.
    pub fuel: u64,
}

/// Compares two bare answers.
pub fn compare(gold: &str, pred: &str, options: Options) -> Comparison {
    let mut comparer = Comparer { budget: Budget::default(), options };
    let equal = comparer.answers(gold, pred).unwrap_or(false);
    Comparison { equal, fuel: comparer.budget.used() }
}

/// How an answer is understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Understood {
    /// As mathematics.
    Formula,
    /// As words.
    Words,
    /// Not at all: it only equals itself.
    Raw,
}

/// Says how a bare answer is understood.
pub fn understand(answer: &str) -> Understood {
    match parse(answer, Reading::Usual) {
        Ok(Expr::Text(_)) => Understood::Words,
        Ok(_) => Understood::Formula,
        Err(Stop) if !text::words(answer).is_empty() => Understood::Words,
        Err(Stop) => Understood::Raw,
    }
}

/// The readings of an answer that may differ from the usual one.
fn readings(answer: &str) -> Vec<Reading> {
    let bytes = answer.as_bytes();
    let near = |test: fn(u8) -> bool| {
        bytes
            .windows(3)
            .any(|w| w[0].is_ascii_digit() && test(w[1]) && (w[2].is_ascii_digit() || w[2] == b'-'))
    };
    let mut all = vec![Reading::Usual];
    if near(|c| c == b',') {
        all.push(Reading::CommaSeparates);
        let plain = answer.trim_matches(|c: char| !c.is_ascii_digit());
        // "1,234" is a whole number, "0,111" and "1,22" may be decimals.
        let decimal = plain.split_once(',').is_some_and(|(whole, rest)| {
            let digits = |text: &str| !text.is_empty() && text.bytes().all(|c| c.is_ascii_digit());
            digits(whole) && digits(rest) && (rest.len() != 3 || whole == "0")
        });
        let bare = !answer.contains(['(', '[', '{']);
        if bare && decimal {
            all.push(Reading::CommaIsPoint);
        }
    }
    if near(|c| c == b'e') {
        all.push(Reading::NoExponent);
    }
    all
}

/// Whether a decimal point is written: only then can a comma elsewhere be one too.
fn has_decimal_point(answer: &str) -> bool {
    answer.as_bytes().windows(2).any(|w| w[0] == b'.' && w[1].is_ascii_digit())
}

/// Sign and significant digits of a plain whole number.
pub(super) fn whole_number(text: &str) -> Option<(bool, &str)> {
    let (negative, digits) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text),
    };
    if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let significant = digits.trim_start_matches('0');
    Some((negative && !significant.is_empty(), significant))
}

impl Comparer {
    fn answers(&mut self, gold: &str, pred: &str) -> Result<bool, Stop> {
        let (gold, pred) = (gold.trim(), pred.trim());
        if gold.is_empty() || pred.is_empty() {
            return Ok(false);
        }
        if let (Some(g), Some(p)) = (whole_number(gold), whole_number(pred)) {
            return Ok(g == p);
        }
        if text::appearance(gold) == text::appearance(pred) {
            return Ok(true);
        }
        if gold.len() > MAX_ANSWER_BYTES || pred.len() > MAX_ANSWER_BYTES {
            return Ok(false);
        }
        let (gold_words, pred_words) = (text::words(gold), text::words(pred));
        if !gold_words.is_empty() && gold_words == pred_words {
            return Ok(true);
        }
        if text::verdict(&gold_words).is_some_and(|v| v == gold_words && text::verdict(pred) == Some(v)) {
            return Ok(true);
        }
        if self.same_choice(gold, pred)? {
            return Ok(true);
        }
        for gold_reading in readings(gold) {
            let Ok(g) = parse(gold, gold_reading) else { continue };
            for pred_reading in readings(pred) {
                let point_reading =
                    (gold_reading == Reading::CommaIsPoint, pred_reading == Reading::CommaIsPoint);
                if point_reading.0 && !has_decimal_point(pred) || point_reading.1 && !has_decimal_point(gold)
                {
                    continue;
                }
                let Ok(p) = parse(pred, pred_reading) else { continue };
                if self.same_answer(&g, &p)? {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    /// A choice with its text (`(C) 12`) equals the letter and equals the text.
    fn same_choice(&mut self, gold: &str, pred: &str) -> Result<bool, Stop> {
        match (text::choice(gold), text::choice(pred)) {
            (Some((g, gold_rest)), Some((p, pred_rest))) if gold_rest.is_empty() || pred_rest.is_empty() => {
                Ok(g == p)
            }
            (Some((_, rest)), None) if !rest.is_empty() => self.same_choice_text(&rest, pred),
            (None, Some((_, rest))) if !rest.is_empty() => self.same_choice_text(gold, &rest),
            _ => Ok(false),
        }
    }

    fn same_choice_text(&mut self, gold: &str, pred: &str) -> Result<bool, Stop> {
        match (parse(gold, Reading::Usual), parse(pred, Reading::Usual)) {
            (Ok(g), Ok(p)) => self.same_answer(&g, &p),
            _ => Ok(text::words(gold) == text::words(pred) && !text::words(gold).is_empty()),
        }
    }

    fn same_answer(&mut self, gold: &Expr, pred: &Expr) -> Result<bool, Stop> {
        let (gold, pred) = (expanded(gold), expanded(pred));
        if self.same(&gold, &pred)? {
            return Ok(true);
        }
        // A capital I is a variable, unless only one side has it.
        let has = |e: &Expr| e.any(&|n| matches!(n, Expr::Sym(s) if s == "I"));
        if has(&gold) == has(&pred) {
            return Ok(false);
        }
        let imaginary = |e: &Expr| {
            e.map(&|n| match n {
                Expr::Sym(s) if s == "I" => Expr::Const(Constant::I),
                other => other,
            })
        };
        self.same(&imaginary(&gold), &imaginary(&pred))
    }

    /// Whether two parsed answers are the same.
    pub(super) fn same(&mut self, gold: &Expr, pred: &Expr) -> Result<bool, Stop> {
        self.budget.charge(10)?;
        if gold == pred {
            return Ok(true);
        }
        let (gold, pred) = (unwrapped(gold), unwrapped(pred));
        if let (Expr::Text(_), _) | (_, Expr::Text(_)) = (gold, pred) {
            return Ok(self.same_words(gold, pred));
        }
        if (is_set_like(gold) || is_set_like(pred))
            && let Some(verdict) = self.same_real_sets(gold, pred)?
        {
            return Ok(verdict);
        }
        match (gold, pred) {
            (Expr::Relation(g), Expr::Relation(p)) => self.same_relation(g, p),
            (Expr::Relation(r), other) => self.relation_and_value(r, other, true),
            (other, Expr::Relation(r)) => self.relation_and_value(r, other, false),
            (Expr::Seq(o1, c1, a), Expr::Seq(o2, c2, b)) => {
                let brackets_matter = a.len() == 2;
                if brackets_matter && (o1 != o2 || c1 != c2) {
                    return Ok(false);
                }
                self.same_in_order(a, b)
            }
            (Expr::Seq(Bracket::Round, Bracket::Round, a), Expr::List(_, b))
            | (Expr::List(_, b), Expr::Seq(Bracket::Round, Bracket::Round, a)) => self.same_in_order(a, b),
            (Expr::Seq(_, _, items), Expr::Matrix(rows)) | (Expr::Matrix(rows), Expr::Seq(_, _, items)) => {
                let flat = rows.len() == 1 || rows.iter().all(|row| row.len() == 1);
                let cells: Vec<Expr> = rows.iter().flatten().cloned().collect();
                Ok(flat && self.same_in_order(items, &cells)?)
            }
            (Expr::Matrix(a), Expr::Matrix(b)) => self.same_matrix(a, b),
            (Expr::Set(a) | Expr::List(_, a), Expr::Set(b) | Expr::List(_, b)) => {
                self.same_in_any_order(a, b)
            }
            (Expr::Set(many) | Expr::List(_, many), one) | (one, Expr::Set(many) | Expr::List(_, many)) => {
                let one = std::slice::from_ref(one);
                self.same_in_any_order(many, one)
            }
            (Expr::Ratio(a), Expr::Ratio(b)) => self.same_ratio(a, b),
            // `4:30 p.m.` is not a number.
            (Expr::Ratio(parts), _) | (_, Expr::Ratio(parts))
                if parts.iter().any(|part| matches!(part, Expr::Quantity(..))) =>
            {
                Ok(false)
            }
            _ if is_structure(gold) || is_structure(pred) => Ok(false),
            _ => self.same_scalar(gold, pred),
        }
    }

    fn same_words(&self, gold: &Expr, pred: &Expr) -> bool {
        match (gold, pred) {
            (Expr::Text(a), Expr::Text(b)) => {
                let (a, b) = (text::words(a), text::words(b));
                !a.is_empty() && a == b
            }
            (Expr::Text(words), Expr::Num(n)) | (Expr::Num(n), Expr::Text(words))
                if self.options.number_words =>
            {
                words::number_word(words)
                    .is_some_and(|w| n.value == super::expr::Rational::from_integer(w.into()))
            }
            _ => false,
        }
    }

    /// Compares two sets of reals, or a condition with one; `None` when these are not such sets.
    fn same_real_sets(&mut self, gold: &Expr, pred: &Expr) -> Result<Option<bool>, Stop> {
        let g = self.real_set(gold)?;
        let p = self.real_set(pred)?;
        match (&g, &p) {
            (Some(a), Some(b)) => {
                let names = (subject(gold), subject(pred));
                let differ = matches!(&names, (Some(x), Some(y)) if x != y);
                Ok(Some(!differ && self.same_set(a, b)?))
            }
            (Some(set), None) => self.condition_matches(pred, set, gold),
            (None, Some(set)) => self.condition_matches(gold, set, pred),
            _ => Ok(None),
        }
    }

    /// Whether a condition holds exactly on a set that `other` describes; `None` leaves the decision to other
    /// rules.
    fn condition_matches(
        &mut self,
        condition: &Expr,
        set: &RealSet,
        other: &Expr,
    ) -> Result<Option<bool>, Stop> {
        let names = condition.variables();
        let about_other = subject(other).is_some_and(|name| !names.contains(&name));
        Ok((!about_other && self.condition_is_set(condition, set)?).then_some(true))
    }

    /// `name = value` against a value.
    fn relation_and_value(
        &mut self,
        relation: &Relation,
        other: &Expr,
        relation_is_gold: bool,
    ) -> Result<bool, Stop> {
        let Some((name, value)) = assignment(relation) else { return Ok(false) };
        if let (Expr::Seq(_, _, names), Expr::Seq(_, _, values), Expr::List(_, items)) = (name, value, other)
            && names.len() == values.len()
            && items.iter().all(|item| matches!(item, Expr::Relation(_)))
        {
            let spelled: Vec<Expr> = names
                .iter()
                .zip(values)
                .map(|(n, v)| {
                    Expr::Relation(Relation {
                        sides: vec![n.clone(), v.clone()],
                        ops: vec![super::expr::RelOp::Eq],
                        modulus: None,
                    })
                })
                .collect();
            return self.same_in_any_order(&spelled, items);
        }
        if relation_is_gold { self.same(value, other) } else { self.same(other, value) }
    }

    fn same_in_order(&mut self, a: &[Expr], b: &[Expr]) -> Result<bool, Stop> {
        if a.len() != b.len() {
            return Ok(false);
        }
        for (x, y) in a.iter().zip(b) {
            if !self.same(x, y)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Sets: every item of one is in the other; repetitions do not matter.
    fn same_in_any_order(&mut self, a: &[Expr], b: &[Expr]) -> Result<bool, Stop> {
        if a.len() > MAX_ITEMS || b.len() > MAX_ITEMS {
            return Ok(false);
        }
        Ok(self.covers(a, b, false)? && self.covers(b, a, true)?)
    }

    fn covers(&mut self, items: &[Expr], others: &[Expr], swapped: bool) -> Result<bool, Stop> {
        for item in items {
            let mut found = false;
            for other in others {
                let (gold, pred) = if swapped { (other, item) } else { (item, other) };
                if self.same(gold, pred)? {
                    found = true;
                    break;
                }
            }
            if !found {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn same_matrix(&mut self, a: &[Vec<Expr>], b: &[Vec<Expr>]) -> Result<bool, Stop> {
        if a.len() != b.len() {
            return Ok(false);
        }
        for (x, y) in a.iter().zip(b) {
            if !self.same_in_order(x, y)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Ratios are the same when proportional; with a zero in them (12:00) they are clock times.
    fn same_ratio(&mut self, a: &[Expr], b: &[Expr]) -> Result<bool, Stop> {
        if a.len() != b.len() {
            return Ok(false);
        }
        if self.same_in_order(a, b)? {
            return Ok(true);
        }
        for part in a.iter().chain(b) {
            if self.is_zero(part)? {
                return Ok(false);
            }
        }
        for i in 1..a.len() {
            let left = Expr::Mul(vec![a[0].clone(), b[i].clone()]);
            let right = Expr::Mul(vec![b[0].clone(), a[i].clone()]);
            if !self.same_formula(&left, &right)? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// The variable a condition is about; different variables describe different sets.
pub(super) fn subject(e: &Expr) -> Option<String> {
    let Expr::Relation(r) = e else { return None };
    r.sides.iter().find(|side| is_label(side)).and_then(|side| match side {
        Expr::Sym(name) => Some(name.clone()),
        _ => None,
    })
}

/// Shapes that are never equal to a scalar.
fn is_structure(e: &Expr) -> bool {
    matches!(
        e,
        Expr::Seq(..) | Expr::Matrix(_) | Expr::SetAlgebra(_) | Expr::Builder(_) | Expr::Reals | Expr::Empty
    ) || matches!(e, Expr::NamedSet(_))
}

/// A list or set of one item is the item.
fn unwrapped(e: &Expr) -> &Expr {
    match e {
        Expr::List(_, items) | Expr::Set(items) if items.len() == 1 => unwrapped(&items[0]),
        other => other,
    }
}

/// Writes `a ± b` as the list of both values, also inside of lists and sets.
fn expanded(e: &Expr) -> Expr {
    let uncertain = |e: &Expr| e.any(&|n| matches!(n, Expr::PlusMinus(_)));
    if !uncertain(e) {
        return e.clone();
    }
    let both = |e: &Expr| {
        [1i64, -1].map(|sign| {
            e.map(&|n| match n {
                Expr::PlusMinus(flipped) => Expr::int(if flipped { -sign } else { sign }),
                other => other,
            })
        })
    };
    let all = |items: &[Expr]| {
        let each = items
            .iter()
            .flat_map(|item| if uncertain(item) { both(item).to_vec() } else { vec![item.clone()] });
        each.collect::<Vec<_>>()
    };
    match e {
        Expr::List(join, items) => Expr::List(*join, all(items)),
        Expr::Set(items) => Expr::Set(all(items)),
        other => Expr::List(Join::Or, both(other).to_vec()),
    }
}
