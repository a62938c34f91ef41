//! `qurl grade`.

use crate::common::{directory, qurl, qurl_in, shared_data};
use serde_json::{Value, json};

fn lines(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

#[test]
fn the_example_of_the_help_is_right() {
    let help = qurl(&["grade", "--help"], "").stdout;
    let (_, example) = help.split_once("Example: echo '").expect("an example");
    let (line, _) = example.split_once('\'').expect("a line");
    // JSON reads a single backslash and a `b` as a backspace.
    assert_eq!(lines(line)[0]["pred"], r"The answer is \boxed{0.5}");
    assert_eq!(
        lines(&qurl(&["grade", "--extracted"], line).stdout),
        [json!({"equal": true, "extracted": "0.5"})]
    );
}

#[test]
fn one_verdict_a_line_in_order() {
    let cases = concat!(
        r#"{"gold":"1/2","pred":"so it is \\boxed{0.5}"}"#,
        "\n",
        r#"{"gold":"3","pred":"#,
        r#""4"}"#,
        "\n\n",
        r#"{"gold":"1,000","pred":"Answer: 1000","other":[1,2]}"#,
    );
    let run = qurl(&["grade"], cases);
    assert_eq!(run.status, 0, "{}", run.stderr);
    assert_eq!(run.stdout, "{\"equal\":true}\n{\"equal\":false}\n{\"equal\":true}\n");
    assert_eq!(qurl(&["grade", "--json"], cases).stdout, run.stdout);
    let shown = lines(&qurl(&["grade", "--extracted"], cases).stdout);
    assert_eq!(shown[0], json!({"equal": true, "extracted": "0.5"}));
    assert_eq!(qurl(&["grade"], "").stdout, "");
}

#[test]
fn a_recipe_says_what_counts_as_the_answer() {
    let dir = directory("grade-recipe");
    let recipe = "[model]\npath = \"m\"\n[task]\ntype = \"dataset\"\nfiles = [\"x.jsonl\"]\n\
                  extract = { type = \"tag\", tag = \"out\" }\n";
    std::fs::write(dir.join("mine.toml"), recipe).expect("written");
    let case = r#"{"gold":"7","pred":"<out>7</out> and not \\boxed{8}"}"#;
    let graded = qurl_in(&dir, &["grade", "--recipe", "mine.toml", "--extracted"], case);
    assert_eq!(lines(&graded.stdout), [json!({"equal": true, "extracted": "7"})], "{}", graded.stderr);
    assert_eq!(lines(&qurl_in(&dir, &["grade"], case).stdout), [json!({"equal": false})]);
    qurl_in(&dir, &["grade", "--recipe", "mine.toml", "--policy", "strict_box"], case)
        .assert_bad(&["--policy"]);
}

#[test]
fn policies() {
    let unboxed = r#"{"gold":"7","pred":"Answer: 7"}"#;
    let equal = |args: &[&str], case: &str| lines(&qurl(args, case).stdout)[0]["equal"].clone();
    assert_eq!(equal(&["grade"], unboxed), true);
    assert_eq!(equal(&["grade", "--policy", "strict_box"], unboxed), false);
    assert_eq!(equal(&["grade", "--policy", "answer_line"], unboxed), true);
    let marked = |pred: &str| {
        equal(&["grade", "--policy", "gsm8k_strict"], &format!(r#"{{"gold":"72","pred":"{pred}"}}"#))
    };
    assert_eq!((marked("so #### 72"), marked("72 clips altogether.")), (true.into(), false.into()));
    let named = r#"{"gold":"7","pred":"Answer: 7","policy":"strict_box"}"#;
    assert_eq!(equal(&["grade"], named), false, "the line's own policy");
    assert_eq!(equal(&["grade", "--policy", "equivalence"], named), true, "the command line rules");
}

#[test]
fn bad_lines_are_named() {
    let good = r#"{"gold":"1","pred":"1"}"#;
    for (bad, expected) in [
        ("not json", "column"),
        (r#"{"gold":"1"}"#, "missing field `pred`"),
        (r#"{"gold":1,"pred":"1"}"#, "`gold` and `pred`"),
        (r#"{"gold":"1","pred":"1","policy":"mood"}"#, "mood"),
    ] {
        let run = qurl(&["grade"], &format!("{good}\n{good}\n{bad}\n{good}\n"));
        run.assert_bad(&["line 3", expected]);
        assert_eq!(run.stdout, "{\"equal\":true}\n".repeat(2), "the lines before are answered");
    }
    qurl(&["grade", "--policy", "mood"], good).assert_bad(&["mood", "strict_box"]);
    qurl(&["grade", "--polcy", "mood"], good).assert_bad(&["--polcy"]);
}

#[test]
fn shared_cases() {
    let Some(file) = shared_data("grader/cases.jsonl") else { return };
    let cases = std::fs::read_to_string(file).expect("readable");
    let (expected, found) = (lines(&cases), lines(&qurl(&["grade"], &cases).stdout));
    assert_eq!(expected.len(), found.len());
    let right = expected.iter().zip(&found).filter(|(e, f)| e["equal"] == f["equal"]).count();
    println!("{right} of {} verdicts as expected", expected.len());
    assert!(right * 100 >= expected.len() * 97, "{right} of {}", expected.len());
}
