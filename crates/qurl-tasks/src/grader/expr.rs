//! The tree that an answer is parsed into.
//!
//! One type for formulas (sums, products, powers, calls) and for what surrounds them in answers (tuples,
//! sets, relations, matrices, units, words). Sums, products and chains are flat vectors: the depth of a tree
//! is bounded by the parser, so walking and dropping it is safe.

use num_bigint::BigInt;
use num_rational::Ratio;
use num_traits::{One, ToPrimitive, Zero};

/// An exact fraction of any size.
pub type Rational = Ratio<BigInt>;

/// The nearest floating-point number, also of fractions whose parts are too large for one.
pub fn to_f64(value: &Rational) -> f64 {
    let excess = value.numer().bits().max(value.denom().bits()).saturating_sub(1000);
    let numer: BigInt = value.numer() >> excess;
    let denom: BigInt = value.denom() >> excess;
    numer.to_f64().unwrap_or(f64::NAN) / denom.to_f64().unwrap_or(f64::NAN)
}

/// A number as written: its exact value, and whether it was written with a decimal point or an exponent.
#[derive(Clone, Debug, PartialEq)]
pub struct Number {
    /// Exact value.
    pub value: Rational,
    /// Written as a decimal, so that it may be a rounded figure.
    pub decimal: bool,
}

/// Constants with a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Constant {
    /// π
    Pi,
    /// Euler's number
    E,
    /// The imaginary unit
    I,
    /// ∞
    Infinity,
}

/// Functions with a meaning of their own. `Apply` is everything else, such as f in f(x).
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs)]
pub enum Func {
    Sin,
    Cos,
    Tan,
    Cot,
    Sec,
    Csc,
    Asin,
    Acos,
    Atan,
    Acot,
    Sinh,
    Cosh,
    Tanh,
    Asinh,
    Acosh,
    Atanh,
    Ln,
    /// Logarithm; the second argument is the base (10 when none was written).
    Log,
    Exp,
    Abs,
    Floor,
    Ceil,
    Factorial,
    Binomial,
    Gcd,
    Lcm,
    Min,
    Max,
    Mod,
    Sign,
    Re,
    Im,
    Det,
    Apply(String),
}

/// Sums, products, integrals and limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum BigKind {
    Sum,
    Product,
    Integral,
    Limit,
}

/// An operator with bounds: Σ, Π, ∫, lim.
#[derive(Clone, Debug, PartialEq)]
pub struct Big {
    /// Which one.
    pub kind: BigKind,
    /// The running variable, where one is written.
    pub var: Option<String>,
    /// Lower bound, or the point a limit goes to.
    pub lower: Option<Expr>,
    /// Upper bound.
    pub upper: Option<Expr>,
    /// What is summed, multiplied or integrated.
    pub body: Expr,
}

/// Relations between two sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum RelOp {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
    Approx,
    Equiv,
    In,
    Subset,
    Divides,
    /// Proportional, similar, parallel, perpendicular and the like: compared by name only.
    Other(char),
}

/// A chain `a < b <= c`: one more side than operators.
#[derive(Clone, Debug, PartialEq)]
pub struct Relation {
    /// The sides in order.
    pub sides: Vec<Expr>,
    /// The operators between them.
    pub ops: Vec<RelOp>,
    /// The modulus of a congruence.
    pub modulus: Option<Box<Expr>>,
}

/// Brackets of tuples and intervals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Bracket {
    Round,
    Square,
}

/// How the items of a bare list were joined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Join {
    Comma,
    And,
    Or,
}

/// Set algebra.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum SetOp {
    Union,
    Intersection,
    Difference,
}

/// An answer or a part of one.
#[derive(Clone, Debug, PartialEq)]
pub enum Expr {
    /// A number.
    Num(Number),
    /// A variable, with its subscript and primes.
    Sym(String),
    /// A named constant.
    Const(Constant),
    /// The unknown sign of ±; `true` for ∓.
    PlusMinus(bool),
    /// Sum.
    Add(Vec<Expr>),
    /// Product; a quotient holds a power with exponent −1.
    Mul(Vec<Expr>),
    /// Power.
    Pow(Box<Expr>, Box<Expr>),
    /// Function call.
    Call(Func, Vec<Expr>),
    /// Σ, Π, ∫, lim.
    Big(Box<Big>),
    /// `x %`
    Percent(Box<Expr>),
    /// `x °`
    Degrees(Box<Expr>),
    /// A value with a unit, the unit in canonical spelling.
    Quantity(Box<Expr>, String),
    /// Equation, inequality, membership.
    Relation(Relation),
    /// `a : b : c`
    Ratio(Vec<Expr>),
    /// Tuple, vector, point or interval.
    Seq(Bracket, Bracket, Vec<Expr>),
    /// `{a, b, c}`
    Set(Vec<Expr>),
    /// `a, b and c`
    List(Join, Vec<Expr>),
    /// `{x | condition}`
    Builder(Box<Expr>),
    /// Set algebra, from left to right; the operator of the first item is ignored.
    SetAlgebra(Vec<(SetOp, Expr)>),
    /// ℝ
    Reals,
    /// ℤ, ℕ, ℚ, ℂ
    NamedSet(char),
    /// ∅
    Empty,
    /// Matrix or column vector.
    Matrix(Vec<Vec<Expr>>),
    /// Words.
    Text(String),
}

impl Expr {
    /// An integer.
    pub fn int(n: i64) -> Expr {
        Expr::rational(Rational::from_integer(n.into()))
    }

    /// An exact fraction.
    pub fn rational(value: Rational) -> Expr {
        Expr::Num(Number { value, decimal: false })
    }

    /// `-self`
    pub fn negated(self) -> Expr {
        match self {
            Expr::Num(n) => Expr::Num(Number { value: -n.value, decimal: n.decimal }),
            other => Expr::Mul(vec![Expr::int(-1), other]),
        }
    }

    /// `1 / self`
    pub fn inverted(self) -> Expr {
        Expr::Pow(Box::new(self), Box::new(Expr::int(-1)))
    }

    /// `self / denominator`
    pub fn over(self, denominator: Expr) -> Expr {
        match (&self, &denominator) {
            (Expr::Num(a), Expr::Num(b))
                if !a.decimal && !b.decimal && !b.value.is_zero() && a.value.denom().is_one() =>
            {
                Expr::rational(&a.value / &b.value)
            }
            _ => Expr::Mul(vec![self, denominator.inverted()]),
        }
    }

    /// `self - other`
    pub fn minus(self, other: Expr) -> Expr {
        Expr::Add(vec![self, other.negated()])
    }

    /// The value, when this is a plain number.
    pub fn as_number(&self) -> Option<&Rational> {
        match self {
            Expr::Num(n) => Some(&n.value),
            _ => None,
        }
    }

    /// Calls `visit` on every node, parents first.
    pub fn walk(&self, visit: &mut dyn FnMut(&Expr)) {
        visit(self);
        match self {
            Expr::Add(items)
            | Expr::Mul(items)
            | Expr::Call(_, items)
            | Expr::Ratio(items)
            | Expr::Seq(_, _, items)
            | Expr::Set(items)
            | Expr::List(_, items) => items.iter().for_each(|item| item.walk(visit)),
            Expr::Pow(a, b) => {
                a.walk(visit);
                b.walk(visit);
            }
            Expr::Percent(a) | Expr::Degrees(a) | Expr::Quantity(a, _) | Expr::Builder(a) => a.walk(visit),
            Expr::Big(big) => {
                let Big { lower, upper, body, .. } = big.as_ref();
                lower.iter().chain(upper).for_each(|e| e.walk(visit));
                body.walk(visit);
            }
            Expr::Relation(r) => {
                r.sides.iter().for_each(|side| side.walk(visit));
                if let Some(m) = &r.modulus {
                    m.walk(visit);
                }
            }
            Expr::SetAlgebra(parts) => parts.iter().for_each(|(_, part)| part.walk(visit)),
            Expr::Matrix(rows) => rows.iter().flatten().for_each(|cell| cell.walk(visit)),
            Expr::Num(_)
            | Expr::Sym(_)
            | Expr::Const(_)
            | Expr::PlusMinus(_)
            | Expr::Reals
            | Expr::NamedSet(_)
            | Expr::Empty
            | Expr::Text(_) => {}
        }
    }

    /// Rebuilds the tree bottom-up: `change` sees every node after its children were changed.
    pub fn map(&self, change: &dyn Fn(Expr) -> Expr) -> Expr {
        let all = |items: &[Expr]| items.iter().map(|item| item.map(change)).collect::<Vec<_>>();
        let boxed = |item: &Expr| Box::new(item.map(change));
        let rebuilt = match self {
            Expr::Add(items) => Expr::Add(all(items)),
            Expr::Mul(items) => Expr::Mul(all(items)),
            Expr::Call(f, items) => Expr::Call(f.clone(), all(items)),
            Expr::Ratio(items) => Expr::Ratio(all(items)),
            Expr::Seq(open, close, items) => Expr::Seq(*open, *close, all(items)),
            Expr::Set(items) => Expr::Set(all(items)),
            Expr::List(join, items) => Expr::List(*join, all(items)),
            Expr::Pow(a, b) => Expr::Pow(boxed(a), boxed(b)),
            Expr::Percent(a) => Expr::Percent(boxed(a)),
            Expr::Degrees(a) => Expr::Degrees(boxed(a)),
            Expr::Quantity(a, unit) => Expr::Quantity(boxed(a), unit.clone()),
            Expr::Builder(a) => Expr::Builder(boxed(a)),
            Expr::Big(big) => Expr::Big(Box::new(Big {
                kind: big.kind,
                var: big.var.clone(),
                lower: big.lower.as_ref().map(|e| e.map(change)),
                upper: big.upper.as_ref().map(|e| e.map(change)),
                body: big.body.map(change),
            })),
            Expr::Relation(r) => Expr::Relation(Relation {
                sides: all(&r.sides),
                ops: r.ops.clone(),
                modulus: r.modulus.as_ref().map(|m| boxed(m)),
            }),
            Expr::SetAlgebra(parts) => {
                Expr::SetAlgebra(parts.iter().map(|(op, e)| (*op, e.map(change))).collect())
            }
            Expr::Matrix(rows) => Expr::Matrix(rows.iter().map(|row| all(row)).collect()),
            leaf => leaf.clone(),
        };
        change(rebuilt)
    }

    /// Whether any node satisfies `test`.
    pub fn any(&self, test: &dyn Fn(&Expr) -> bool) -> bool {
        let mut found = false;
        self.walk(&mut |e| found = found || test(e));
        found
    }

    /// The names of all variables, sorted, without those bound by Σ, Π, ∫, lim.
    pub fn variables(&self) -> Vec<String> {
        let mut names = Vec::new();
        self.walk(&mut |e| {
            if let Expr::Sym(name) = e {
                names.push(name.clone());
            }
        });
        let mut bound = Vec::new();
        self.walk(&mut |e| {
            if let Expr::Big(big) = e {
                bound.extend(big.var.clone());
            }
        });
        names.sort();
        names.dedup();
        names.retain(|name| !bound.contains(name));
        names
    }
}
