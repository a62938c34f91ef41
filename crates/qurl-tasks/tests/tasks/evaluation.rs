//! Metrics against hand-computed values, presets, and grading of JSON lines.

use qurl_tasks::Prompt;
use qurl_tasks::grade_lines::{GradeRules, grade_lines};
use qurl_tasks::grader::{Policy, equivalent};
use qurl_tasks::metrics::{Vote, avg_at_k, maj_at_k, mean, mean_over_sets, pass_at_k, pass_at_k_of};
use qurl_tasks::presets::{DAPO, DEEPSCALER, EVAL_PRESETS, EvalPreset, QWEN_MATH, TEMPLATES, Template};
use qurl_tasks::rng::Rng;

fn close(a: f64, b: f64) -> bool {
    (a - b).abs() < 1e-4
}

#[test]
fn the_interval_is_wilsons_for_yes_and_no() {
    let eight_of_ten: Vec<f64> = (0..10).map(|i| if i < 8 { 1.0 } else { 0.0 }).collect();
    let estimate = mean(&eight_of_ten).unwrap();
    assert!(
        close(estimate.value, 0.8) && close(estimate.low, 0.4902) && close(estimate.high, 0.9433),
        "{estimate:?}"
    );
    let none_of_thirty = mean(&[0.0; 30]).unwrap();
    assert!(none_of_thirty.low == 0.0 && close(none_of_thirty.high, 0.1135), "{none_of_thirty:?}");
    assert_eq!(mean(&[]), None);
}

#[test]
fn the_mean_over_sets_joins_their_intervals() {
    let eight_of_ten: Vec<f64> = (0..10).map(|i| if i < 8 { 1.0 } else { 0.0 }).collect();
    let (some, none) = (mean(&eight_of_ten).unwrap(), mean(&[0.0; 30]).unwrap());
    assert_eq!(mean_over_sets(&[some]), Some(some));
    let joined = mean_over_sets(&[some, none]).unwrap();
    // Half of (0.8, 0), less half of the distance 0.3098 below; above half of |(0.1433, 0.1135)|.
    assert!(
        close(joined.value, 0.4) && close(joined.low, 0.4 - 0.1549) && joined.problems == 40,
        "{joined:?}"
    );
    assert!(close(joined.high, 0.4 + (0.1433f64.powi(2) + 0.1135f64.powi(2)).sqrt() / 2.0), "{joined:?}");
    assert_eq!(mean_over_sets(&[]), None);
}

#[test]
fn more_agreement_between_samples_means_a_wider_interval() {
    // The same rewards: once each problem is all or nothing, once every problem is half right.
    let split: Vec<Vec<f64>> = (0..40).map(|i| vec![f64::from(i % 2); 4]).collect();
    let even = vec![vec![1.0, 0.0, 1.0, 0.0]; 40];
    let (split, even) = (avg_at_k(&split).unwrap(), avg_at_k(&even).unwrap());
    assert!(close(split.value, 0.5) && close(even.value, 0.5));
    assert!(split.high - split.low >= even.high - even.low);
}

#[test]
fn pass_at_k_is_unbiased() {
    assert!(close(pass_at_k_of(5, 2, 2).unwrap(), 0.7));
    assert!(close(pass_at_k_of(10, 3, 1).unwrap(), 0.3));
    assert_eq!(pass_at_k_of(4, 0, 4), Some(0.0));
    assert_eq!(pass_at_k_of(4, 1, 4), Some(1.0));
    assert_eq!(pass_at_k_of(4, 1, 5), None);
    assert_eq!(pass_at_k_of(4, 1, 0), None);
    // All subsets of 3 of 6 with 2 right: 1 - C(4,3)/C(6,3) = 0.8, counted one by one.
    let right = [true, false, false, true, false, false];
    let (mut hits, mut all) = (0, 0);
    for a in 0..6 {
        for b in a + 1..6 {
            for c in b + 1..6 {
                all += 1;
                hits += usize::from(right[a] || right[b] || right[c]);
            }
        }
    }
    assert!(close(pass_at_k(&[right.to_vec()], 3).unwrap().value, f64::from(hits as u32) / f64::from(all)));
    assert_eq!(pass_at_k(&[vec![true]], 2), None);
}

#[test]
fn the_majority_votes_by_equivalence() {
    let vote =
        |answer: &str, correct| Vote { answer: (!answer.is_empty()).then(|| answer.to_string()), correct };
    let votes = vec![
        // 1/2 and 0.5 are one answer and outvote 3.
        vec![vote("1/2", true), vote("3", false), vote("0.5", true), vote("", false)],
        // Outvoted.
        vec![vote("1", true), vote("2", false), vote("2", false), vote("7", false)],
        // A tie of two, one of them right.
        vec![vote("1", true), vote("1", true), vote("2", false), vote("2", false)],
    ];
    assert!(close(maj_at_k(&votes, 4, equivalent).unwrap().value, 0.5));
    assert!(close(maj_at_k(&votes, 1, equivalent).unwrap().value, (0.5 + 0.25 + 0.5) / 3.0));
    assert_eq!(maj_at_k(&votes, 5, equivalent), None);
    assert_eq!(maj_at_k(&votes, 0, equivalent), None);
}

#[test]
fn intervals_hold_the_truth_about_as_often_as_they_say() {
    let mut rng = Rng::new(&[3]);
    let mut covered = 0;
    for _ in 0..400 {
        // Problems of different difficulty, mean 0.5; 8 samples each.
        let rewards: Vec<Vec<f64>> = (0..60)
            .map(|_| {
                let p = rng.below(1001);
                (0..8).map(|_| if rng.below(1000) < p { 1.0 } else { 0.0 }).collect()
            })
            .collect();
        let estimate = avg_at_k(&rewards).unwrap();
        covered += usize::from(estimate.low <= 0.5 && 0.5 <= estimate.high);
    }
    assert!((365..=395).contains(&covered), "{covered} of 400");
}

#[test]
fn presets_have_unique_names_and_build_prompts() {
    for template in TEMPLATES {
        assert_eq!(Template::named(template.name).unwrap(), template);
        assert!(template.apply("What is 2+2?").plain().contains("What is 2+2?"));
    }
    for preset in EVAL_PRESETS {
        assert_eq!(EvalPreset::named(preset.name).unwrap().name, preset.name);
    }
    let dapo = EvalPreset::named("dapo").unwrap();
    assert_eq!((dapo.temperature, dapo.top_p, dapo.policy), (1.0, 0.7, Policy::AnswerLine));
    assert_eq!((dapo.samples, dapo.max_new_tokens), (32, 8192));
    let deepscaler = EvalPreset::named("deepscaler").unwrap();
    assert_eq!((deepscaler.temperature, deepscaler.samples), (0.6, 32));
    assert!(DAPO.apply("P").plain().ends_with("after \"Answer:\"."));
    assert!(DEEPSCALER.apply("P").plain().contains("\\boxed{}"));
    let Prompt::Chat(messages) = QWEN_MATH.apply("P") else { panic!("not a chat") };
    assert_eq!(messages.iter().map(|m| m.role.as_str()).collect::<Vec<_>>(), ["system", "user"]);
    assert!(EvalPreset::named("x").unwrap_err().to_string().contains("deepscaler"));
}

#[test]
fn lines_are_graded_and_errors_have_their_number() {
    let input = concat!(
        "{\"gold\": \"1/2\", \"pred\": \"\\\\boxed{0.5}\"}\n",
        "{\"gold\": \"1/2\", \"pred\": \"0.5\", \"policy\": \"strict_box\", \"note\": 1}\n",
        "{\"gold\": \"1/2\"}\n",
        "not json\n",
        "{\"gold\": \"1\", \"pred\": \"1\", \"policy\": \"nope\"}\n",
    );
    let graded: Vec<_> = grade_lines(input.as_bytes(), GradeRules::default()).collect();
    assert!(graded[0].as_ref().unwrap().equal);
    assert_eq!(graded[0].as_ref().unwrap().extracted.as_deref(), Some("0.5"));
    assert!(!graded[1].as_ref().unwrap().equal);
    for (index, part) in [(2, "line 3"), (3, "line 4"), (4, "line 5")] {
        let error = graded[index].as_ref().unwrap_err().to_string();
        assert!(error.starts_with(part), "{error}");
    }
    let equivalence = GradeRules { policy: Some(Policy::Equivalence), extract: None };
    let ruled: Vec<_> = grade_lines(input.as_bytes(), equivalence).collect();
    assert!(ruled[1].as_ref().unwrap().equal && ruled[4].as_ref().unwrap().equal);
}
