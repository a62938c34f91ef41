//! The answer checker: a pure function from (right answer, response) to a verdict.
//!
//! [`extract`] finds the answer in the response, [`lexer`] and [`parser`] turn it into a tree, [`compare`]
//! decides. A verdict is exact wherever the answers are (fractions, roots, polynomials of any size); what has
//! no exact normal form is evaluated at random points. [`policy`] holds the conventions that projects
//! disagree on, [`rule`] what a recipe says of its own answers. [`budget`] bounds the work: a hostile answer
//! is "not equal", never a hang.

pub mod budget;
pub mod compare;
pub mod exact;
pub mod expr;
pub mod extract;
pub mod intervals;
#[allow(missing_docs)]
pub mod lexer;
pub mod matrix;
pub mod normalize;
pub mod numeric;
pub mod parser;
pub mod policy;
pub mod poly;
mod radical;
pub mod relation;
pub mod rule;
pub mod scalar;
pub mod text;
pub mod words;

pub use compare::{Understood, understand};
pub use policy::{Grade, Policy, UnknownPolicy, grade};
pub use rule::{Extract, ExtractRule, grade_by_rule};

/// Whether two bare answers are the same under the default policy.
pub fn equivalent(gold: &str, pred: &str) -> bool {
    let options = compare::Options { number_words: true, ..Default::default() };
    compare::compare(gold, pred, options).equal
}

/// The exact value of an answer that is a single rational number.
pub fn value_of(answer: &str) -> Option<expr::Rational> {
    let tree = parser::parse(answer, lexer::Reading::Usual).ok()?;
    let scalar = match tree {
        expr::Expr::Relation(r) => relation::assignment(&r)?.1.clone(),
        other => other,
    };
    exact::normal(&scalar, &mut budget::Budget::default()).ok()?.as_constant()
}
