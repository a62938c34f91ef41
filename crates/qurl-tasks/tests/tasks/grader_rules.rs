//! The rules of the `equivalence` policy, kind by kind: pairs that are the same and pairs that are not.

mod answers;
mod collections;
mod formulas;
mod numbers;

use qurl_tasks::grader::equivalent;

pub fn check(same: &[(&str, &str)], different: &[(&str, &str)]) {
    let mut wrong = Vec::new();
    for (a, b) in same {
        if !equivalent(a, b) {
            wrong.push(format!("should be the same: {a}   |   {b}"));
        }
        if !equivalent(b, a) {
            wrong.push(format!("should be the same (swapped): {b}   |   {a}"));
        }
    }
    for (a, b) in different {
        if equivalent(a, b) {
            wrong.push(format!("should differ: {a}   |   {b}"));
        }
        if equivalent(b, a) {
            wrong.push(format!("should differ (swapped): {b}   |   {a}"));
        }
    }
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
}
