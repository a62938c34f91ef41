//! The published grader cases: at least 97% of the `equivalence` rows right, and never "equal" for different
//! numbers.

use std::collections::BTreeMap;

use qurl_tasks::grader::{Policy, grade, value_of};

#[test]
fn published_cases() {
    let Some(data) = crate::common::shared_data() else { return };
    let mut by_policy: BTreeMap<String, (usize, usize)> = BTreeMap::new();
    let mut false_equal_numbers = Vec::new();
    let cases = std::fs::read_to_string(data.join("grader/cases.jsonl")).unwrap();
    for (line, text) in cases.lines().enumerate() {
        let row: serde_json::Value = serde_json::from_str(text).unwrap();
        let text = |key: &str| row[key].as_str().unwrap();
        let (gold, pred, policy) = (text("gold"), text("pred"), text("policy"));
        let expected = row["equal"].as_bool().unwrap();
        let graded = grade(gold, pred, policy.parse::<Policy>().unwrap());
        let counts = by_policy.entry(policy.into()).or_default();
        counts.1 += 1;
        if graded.equal == expected {
            counts.0 += 1;
            continue;
        }
        println!(
            "miss at line {} ({policy}): expected {expected}, gold {gold:?}, extracted {:?}",
            line + 1,
            graded.extracted
        );
        let numbers = (value_of(gold), graded.extracted.as_deref().and_then(value_of));
        if let (Some(a), Some(b), true) = (numbers.0, numbers.1, graded.equal)
            && a != b
        {
            false_equal_numbers.push(line + 1);
        }
    }
    for (policy, (right, all)) in &by_policy {
        println!("{policy}: {right} of {all}");
    }
    assert_eq!(false_equal_numbers, Vec::<usize>::new());
    let (right, all) = by_policy["equivalence"];
    assert!(right * 100 >= all * 97, "{right} of {all}");
    for (policy, (right, all)) in by_policy {
        assert!(policy == "equivalence" || right == all, "{policy}: {right} of {all}");
    }
}
