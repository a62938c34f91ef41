//! Sets of real numbers: intervals, unions, `x > 3`, `-2 ≤ x < 7`, `x ∈ [0, 1]`, `x ≠ 2` in one canonical
//! form.
//!
//! A condition that is not of that simple kind (`1 ≤ |z| ≤ 3/2`) is compared with a set point by point: at
//! the ends of the intervals, close to them, between them and far away.

use super::budget::{MAX_ITEMS, Stop};
use super::compare::{Comparer, subject};
use super::expr::{Bracket, Expr, Func, Join, RelOp, Relation, SetOp};
use super::numeric;
use super::relation::is_label;

/// One end of an interval.
#[derive(Clone, Debug)]
struct End {
    at: f64,
    closed: bool,
    exact: Expr,
}

/// An interval; a point is closed on both sides.
#[derive(Clone, Debug)]
struct Piece {
    low: End,
    high: End,
}

/// A union of intervals, sorted and disjoint.
#[derive(Clone, Debug)]
pub struct RealSet(Vec<Piece>);

fn close(a: f64, b: f64) -> bool {
    a == b || a.is_finite() && b.is_finite() && (a - b).abs() <= 1e-11 * a.abs().max(b.abs())
}

fn infinite(negative: bool) -> End {
    let infinity = Expr::Const(super::expr::Constant::Infinity);
    End {
        at: if negative { f64::NEG_INFINITY } else { f64::INFINITY },
        closed: false,
        exact: if negative { infinity.negated() } else { infinity },
    }
}

impl RealSet {
    fn all() -> RealSet {
        RealSet(vec![Piece { low: infinite(true), high: infinite(false) }])
    }

    fn from_pieces(mut pieces: Vec<Piece>) -> RealSet {
        let valid = |p: &Piece| {
            p.low.at < p.high.at && !close(p.low.at, p.high.at)
                || close(p.low.at, p.high.at) && p.low.closed && p.high.closed
        };
        pieces.retain(valid);
        pieces.sort_by(|a, b| a.low.at.total_cmp(&b.low.at).then(b.low.closed.cmp(&a.low.closed)));
        let mut merged: Vec<Piece> = Vec::with_capacity(pieces.len());
        for piece in pieces {
            match merged.last_mut() {
                Some(last) if touches(&last.high, &piece.low) => {
                    if close(last.high.at, piece.high.at) {
                        last.high.closed |= piece.high.closed;
                    } else if piece.high.at > last.high.at {
                        last.high = piece.high;
                    }
                }
                _ => merged.push(piece),
            }
        }
        RealSet(merged)
    }

    fn union(mut self, other: RealSet) -> RealSet {
        self.0.extend(other.0);
        RealSet::from_pieces(self.0)
    }

    fn intersection(&self, other: &RealSet) -> RealSet {
        let mut pieces = Vec::new();
        for a in &self.0 {
            for b in &other.0 {
                let low = tighter(&a.low, &b.low, |x, y| x > y);
                let high = tighter(&a.high, &b.high, |x, y| x < y);
                pieces.push(Piece { low, high });
            }
        }
        RealSet::from_pieces(pieces)
    }

    fn complement(&self) -> RealSet {
        let flip = |end: &End| End { closed: !end.closed && end.at.is_finite(), ..end.clone() };
        let mut pieces = Vec::new();
        let mut low = infinite(true);
        for piece in &self.0 {
            pieces.push(Piece { low, high: flip(&piece.low) });
            low = flip(&piece.high);
        }
        pieces.push(Piece { low, high: infinite(false) });
        pieces.retain(|p| p.low.at != f64::INFINITY && p.high.at != f64::NEG_INFINITY);
        RealSet::from_pieces(pieces)
    }

    fn contains(&self, x: f64) -> bool {
        self.0.iter().any(|p| {
            let above = x > p.low.at && !close(x, p.low.at) || p.low.closed && close(x, p.low.at);
            let below = x < p.high.at && !close(x, p.high.at) || p.high.closed && close(x, p.high.at);
            above && below
        })
    }
}

fn touches(high: &End, low: &End) -> bool {
    if close(high.at, low.at) { high.closed || low.closed } else { low.at < high.at }
}

fn tighter(a: &End, b: &End, inside: impl Fn(f64, f64) -> bool) -> End {
    if close(a.at, b.at) {
        End { closed: a.closed && b.closed, ..a.clone() }
    } else if inside(a.at, b.at) {
        a.clone()
    } else {
        b.clone()
    }
}

/// Whether this stands for any real number: `x`, `f(x)`, but not `|x|`.
fn is_subject(e: &Expr) -> bool {
    is_label(e) && !matches!(e, Expr::Call(f, _) if !matches!(f, Func::Apply(_)))
}

/// Whether this is a set of reals by its form alone. A pair in brackets may be a point as well.
pub fn is_set_like(e: &Expr) -> bool {
    match e {
        Expr::SetAlgebra(_) | Expr::Reals | Expr::Builder(_) => true,
        Expr::Relation(r) => r
            .ops
            .iter()
            .any(|op| matches!(op, RelOp::Lt | RelOp::Le | RelOp::Gt | RelOp::Ge | RelOp::Ne | RelOp::In)),
        Expr::List(_, items) => items.iter().all(is_set_like),
        Expr::Seq(open, close, items) => items.len() == 2 && open != close,
        _ => false,
    }
}

impl Comparer {
    fn end(&mut self, exact: &Expr, closed: bool) -> Result<Option<End>, Stop> {
        let at = numeric::real_constant(exact, &mut self.budget)?;
        Ok(at.map(|at| End { at, closed: closed && at.is_finite(), exact: exact.clone() }))
    }

    fn point(&mut self, exact: &Expr) -> Result<Option<Piece>, Stop> {
        let end = self.end(exact, true)?;
        Ok(end.filter(|e| e.at.is_finite()).map(|end| Piece { low: end.clone(), high: end }))
    }

    /// Reads an expression as a set of reals.
    pub(super) fn real_set(&mut self, e: &Expr) -> Result<Option<RealSet>, Stop> {
        self.budget.charge(10)?;
        match e {
            Expr::Reals => Ok(Some(RealSet::all())),
            Expr::Empty => Ok(Some(RealSet(Vec::new()))),
            Expr::Seq(open, close, items) => {
                let [low, high] = &items[..] else { return Ok(None) };
                let low = self.end(low, *open == Bracket::Square)?;
                let high = self.end(high, *close == Bracket::Square)?;
                Ok(match (low, high) {
                    (Some(low), Some(high)) if low.at <= high.at => {
                        Some(RealSet::from_pieces(vec![Piece { low, high }]))
                    }
                    _ => None,
                })
            }
            Expr::Set(items) => {
                let mut pieces = Vec::new();
                for item in items {
                    let Some(piece) = self.point(item)? else { return Ok(None) };
                    pieces.push(piece);
                }
                Ok(Some(RealSet::from_pieces(pieces)))
            }
            Expr::SetAlgebra(parts) => {
                let mut whole: Option<RealSet> = None;
                for (op, part) in parts.iter().take(MAX_ITEMS) {
                    let Some(set) = self.real_set(part)? else { return Ok(None) };
                    let left = whole.take();
                    whole = Some(match (left, op) {
                        (None, _) => set,
                        (Some(left), SetOp::Union) => left.union(set),
                        (Some(left), SetOp::Intersection) => left.intersection(&set),
                        (Some(left), SetOp::Difference) => left.intersection(&set.complement()),
                    });
                    self.budget.charge(whole.as_ref().map_or(0, |s| s.0.len() as u64) * 4)?;
                }
                Ok(whole)
            }
            Expr::Builder(condition) => match condition.as_ref() {
                Expr::List(_, items) => self.joined_sets(items, false),
                one => self.real_set(one),
            },
            Expr::List(join, items) => self.joined_sets(items, *join != Join::And),
            Expr::Relation(relation) => self.set_of_relation(relation),
            _ => Ok(None),
        }
    }

    fn joined_sets(&mut self, items: &[Expr], unite: bool) -> Result<Option<RealSet>, Stop> {
        let mut whole: Option<RealSet> = None;
        let mut names: Vec<String> = items.iter().filter_map(subject).collect();
        names.dedup();
        if names.len() > 1 {
            return Ok(None);
        }
        for item in items {
            let Some(set) = self.real_set(item)? else { return Ok(None) };
            whole = Some(match whole.take() {
                None => set,
                Some(left) if unite => left.union(set),
                Some(left) => left.intersection(&set),
            });
        }
        Ok(whole)
    }

    /// `name op constant`, `constant op name op constant`, `name ∈ set`.
    fn set_of_relation(&mut self, relation: &Relation) -> Result<Option<RealSet>, Stop> {
        if let ([name, set], [RelOp::In]) = (&relation.sides[..], &relation.ops[..]) {
            return if is_label(name) { self.real_set(set) } else { Ok(None) };
        }
        let mut whole = RealSet::all();
        let names: Vec<&Expr> = relation.sides.iter().filter(|side| is_subject(side)).collect();
        let [name] = names[..] else { return Ok(None) };
        for (pair, op) in relation.sides.windows(2).zip(&relation.ops) {
            let (bound, name_first) = if &pair[0] == name {
                (&pair[1], true)
            } else if &pair[1] == name {
                (&pair[0], false)
            } else {
                return Ok(None);
            };
            let Some(piece) = self.half_line(bound, *op, name_first)? else { return Ok(None) };
            whole = whole.intersection(&piece);
        }
        Ok(Some(whole))
    }

    fn half_line(&mut self, bound: &Expr, op: RelOp, name_first: bool) -> Result<Option<RealSet>, Stop> {
        let closed = matches!(op, RelOp::Le | RelOp::Ge | RelOp::Eq);
        let Some(end) = self.end(bound, closed)? else { return Ok(None) };
        let below = RealSet(vec![Piece { low: infinite(true), high: end.clone() }]);
        let above = RealSet(vec![Piece { low: end.clone(), high: infinite(false) }]);
        Ok(match (op, name_first) {
            (RelOp::Lt | RelOp::Le, true) | (RelOp::Gt | RelOp::Ge, false) => Some(below),
            (RelOp::Gt | RelOp::Ge, true) | (RelOp::Lt | RelOp::Le, false) => Some(above),
            (RelOp::Eq, _) => Some(below.intersection(&above)),
            (RelOp::Ne, _) => Some(below.union(above)),
            _ => None,
        })
    }

    /// Whether two canonical sets have the same ends.
    pub(super) fn same_set(&mut self, a: &RealSet, b: &RealSet) -> Result<bool, Stop> {
        if a.0.len() != b.0.len() {
            return Ok(false);
        }
        for (x, y) in a.0.iter().zip(&b.0) {
            for (p, q) in [(&x.low, &y.low), (&x.high, &y.high)] {
                let same = if p.at.is_finite() && q.at.is_finite() {
                    p.closed == q.closed && self.same_formula(&p.exact, &q.exact)?
                } else {
                    p.at == q.at
                };
                if !same {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    /// Whether a condition on one variable holds exactly on a set, by trying points.
    pub(super) fn condition_is_set(&mut self, condition: &Expr, set: &RealSet) -> Result<bool, Stop> {
        let relations: Vec<&Relation> = match condition {
            Expr::Relation(r) => vec![r],
            _ => return Ok(false),
        };
        let names = condition.variables();
        let [name] = &names[..] else { return Ok(false) };
        let mut points = vec![0.0, 1.0, -1.0, 7.3, -7.3, 1234.5, -1234.5, 1e6, -1e6, 0.37, -0.37];
        for piece in &set.0 {
            let ends = [piece.low.at, piece.high.at];
            for end in ends.into_iter().filter(|e| e.is_finite()) {
                for step in [0.0, 1e-4, 1e-2, 0.4] {
                    points.extend([end - step, end + step, -end - step, -end + step]);
                }
            }
            if ends.iter().all(|e| e.is_finite()) {
                points.push((ends[0] + ends[1]) / 2.0);
            }
        }
        for x in points {
            let values = [(name.clone(), x)];
            for relation in &relations {
                match self.holds(relation, &values)? {
                    Some(holds) if holds == set.contains(x) => {}
                    None if !set.contains(x) => {}
                    _ => return Ok(false),
                }
            }
        }
        Ok(true)
    }

    /// Whether a relation holds at a point; `None` where a side has no real value.
    fn holds(&mut self, relation: &Relation, values: &[(String, f64)]) -> Result<Option<bool>, Stop> {
        let mut sides = Vec::with_capacity(relation.sides.len());
        for side in &relation.sides {
            match numeric::evaluate(side, values, &mut self.budget)? {
                Some(v) if v.value.im.abs() < 1e-12 => sides.push(v.value.re),
                _ => return Ok(None),
            }
        }
        let all = sides.windows(2).zip(&relation.ops).map(|(pair, op)| {
            let equal = (pair[0] - pair[1]).abs() <= 1e-9 * pair[0].abs().max(pair[1].abs()).max(1.0);
            match op {
                RelOp::Lt => Some(!equal && pair[0] < pair[1]),
                RelOp::Le => Some(equal || pair[0] < pair[1]),
                RelOp::Gt => Some(!equal && pair[0] > pair[1]),
                RelOp::Ge => Some(equal || pair[0] > pair[1]),
                RelOp::Ne => Some(!equal),
                RelOp::Eq => Some(equal),
                _ => None,
            }
        });
        Ok(all.collect::<Option<Vec<bool>>>().map(|all| all.iter().all(|x| *x)))
    }
}
