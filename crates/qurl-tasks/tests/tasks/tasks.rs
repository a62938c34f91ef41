//! Every task's own solutions are right, mutated ones are wrong, and the splits never meet.

use std::collections::HashSet;

use qurl_tasks::data::Row;
use qurl_tasks::grader::Policy;
use qurl_tasks::rng::Rng;
use qurl_tasks::tasks::{DatasetTask, Kind, Synthetic, countdown};
use qurl_tasks::{Problem, Prompt, RewardValues, Split, Task};

fn all_levels() -> impl Iterator<Item = Synthetic> {
    Kind::ALL
        .into_iter()
        .flat_map(|(_, kind)| (1..=kind.max_level()).map(move |level| Synthetic::new(kind, level).unwrap()))
}

fn prompt(problem: &Problem) -> &str {
    match &problem.prompt {
        Prompt::Text(text) => text,
        Prompt::Chat(_) => panic!("generated tasks have text prompts"),
    }
}

#[test]
fn worked_solutions_are_right_and_within_the_alphabet() {
    for task in all_levels() {
        let alphabet: HashSet<char> = task.alphabet().unwrap().chars().collect();
        for index in 0..200 {
            let problem = task.draw(Split::Train, 3, index).unwrap();
            let solution = task.worked_solution(&problem).unwrap();
            let verdict = task.verify(&problem, &solution);
            let name = (task.name(), task.level());
            assert_eq!(verdict.reward, 1.0, "{name:?}: {} {solution:?}", prompt(&problem));
            assert_eq!((verdict.correct, verdict.part("format")), (true, Some(1.0)));
            let text = prompt(&problem).to_string() + &solution;
            let foreign = text.chars().find(|c| !alphabet.contains(c));
            assert_eq!(foreign, None, "{name:?}: {text:?}");
        }
    }
}

#[test]
fn mutated_solutions_are_wrong() {
    let mut rng = Rng::new(&[11]);
    for task in all_levels() {
        for index in 0..100 {
            let problem = task.draw(Split::Train, 4, index).unwrap();
            let solution = task.worked_solution(&problem).unwrap();
            let marker = solution.rfind("####").unwrap();
            // No marker, no answer, another answer.
            assert_eq!(task.verify(&problem, &solution[..marker]).reward, 0.0);
            assert_eq!(task.verify(&problem, "").reward, 0.0);
            assert_eq!(task.verify(&problem, "#### ").reward, 0.0);
            let places: Vec<usize> =
                (marker..solution.len()).filter(|i| solution.as_bytes()[*i].is_ascii_digit()).collect();
            let at = *rng.pick(&places);
            let mut bytes = solution.clone().into_bytes();
            bytes[at] = b'0' + (bytes[at] - b'0' + 1 + rng.below(9) as u8) % 10;
            let mutated = String::from_utf8(bytes).unwrap();
            let verdict = task.verify(&problem, &mutated);
            assert_eq!(verdict.reward, 0.0, "{}: {} {mutated:?}", task.name(), prompt(&problem));
            // Two answers are not an answer.
            let hedged = solution.replace("####", "#### 123456 ####");
            assert_eq!(task.verify(&problem, &hedged).reward, 0.0, "{hedged:?}");
        }
    }
}

#[test]
fn drawing_is_reproducible_and_independent_of_order() {
    for task in all_levels() {
        let forward: Vec<Problem> = (0..20).map(|i| task.draw(Split::Train, 9, i).unwrap()).collect();
        let mut backward: Vec<Problem> =
            (0..20).rev().map(|i| task.draw(Split::Train, 9, i).unwrap()).collect();
        backward.reverse();
        assert_eq!(forward, backward);
        let other = (0..20).map(|i| task.draw(Split::Train, 10, i).unwrap()).collect::<Vec<_>>();
        assert_ne!(forward, other);
    }
}

#[test]
fn held_out_problems_are_never_trained_on() {
    for task in all_levels() {
        let drawn = |split| {
            let texts = (0..300).map(|i| prompt(&task.draw(split, 1, i).unwrap()).to_string());
            texts.collect::<HashSet<String>>()
        };
        let (train, test) = (drawn(Split::Train), drawn(Split::Test));
        assert!(!train.is_empty() && test.len() >= 5, "{}: {} held out", task.name(), test.len());
        assert!(train.is_disjoint(&test), "{} level {}", task.name(), task.level());
    }
}

#[test]
fn levels_get_longer() {
    for (_, kind) in Kind::ALL {
        let length = |level| {
            let task = Synthetic::new(kind, level).unwrap();
            let lengths = (0..100)
                .map(|i| task.worked_solution(&task.draw(Split::Train, 2, i).unwrap()).unwrap().len());
            lengths.sum::<usize>()
        };
        assert!(length(1) < length(2) && length(2) < length(kind.max_level()), "{kind:?}");
    }
    let error = Synthetic::new(Kind::Sorting, 0).unwrap_err().to_string();
    assert!(error.contains("sorting") && error.contains("1 to 12"), "{error}");
    assert!("nonsense".parse::<Kind>().unwrap_err().to_string().contains("mod_chain"));
}

#[test]
fn a_share_of_the_reward_can_be_for_form() {
    let task = Synthetic::new(Kind::Addition, 2).unwrap().with_format_weight(0.1);
    let problem = task.draw(Split::Train, 1, 1).unwrap();
    let wrong = task.verify(&problem, "#### 7");
    assert_eq!((wrong.reward, wrong.part("format")), (0.1, Some(1.0)));
    assert_eq!(task.verify(&problem, "no marker").reward, 0.0);
}

#[test]
fn rewards_have_the_values_asked_for_and_rightness_is_another_fact() {
    let values = RewardValues { right: 1.0, wrong: -1.0 };
    let verdicts = |task: &dyn Task, wrong: &str| {
        let problem = task.draw(Split::Train, 1, 1).unwrap();
        let right = task.worked_solution(&problem).unwrap();
        [right.as_str(), wrong, ""].map(|response| {
            let verdict = task.verify(&problem, response);
            (verdict.reward, verdict.correct)
        })
    };
    // The share for the form is a share of the way from wrong to right.
    let expected = [(1.0, true), (-0.5, false), (-1.0, false)];
    let addition = Synthetic::new(Kind::Addition, 2).unwrap().with_format_weight(0.25).with_reward(values);
    assert_eq!(verdicts(&addition, "#### 7"), expected);
    let countdown = Synthetic::new(Kind::Countdown, 1).unwrap().with_format_weight(0.25).with_reward(values);
    let problem = countdown.draw(Split::Train, 1, 1).unwrap();
    let right = countdown.verify(&problem, &countdown.worked_solution(&problem).unwrap());
    assert_eq!((right.reward, right.correct, countdown.verify(&problem, "no").reward), (1.0, true, -1.0));
    let row = Row {
        id: "a".into(),
        problem: Prompt::Text("One and one?".into()),
        answer: "2".into(),
        source: None,
        extra: serde_json::json!({"solution": "#### 2"}),
    };
    let dataset = DatasetTask::new("t", vec![row], qurl_tasks::presets::PLAIN, Policy::default(), 0.0);
    assert_eq!(verdicts(&dataset.with_format_weight(0.25).with_reward(values), "#### 7"), expected);
    // Both ends are exact, whatever the values are.
    let odd = RewardValues { right: 0.3, wrong: 0.1 };
    assert_eq!((odd.of(1.0), odd.of(0.0)), (0.3, 0.1));
}

#[test]
fn countdown_needs_a_real_expression_over_the_given_numbers() {
    let problem = Problem {
        id: "c".into(),
        prompt: Prompt::Text("Using the numbers [6, 81, 97, 52], create an equation that equals 74.".into()),
        answer: "74".into(),
        extra: serde_json::json!({"nums": [6, 81, 97, 52], "target": 74}),
    };
    let reward = |response: &str| countdown::verify(&problem, response, 0.1).reward;
    // (97 - 81) + 52 + 6 = 74
    assert_eq!(reward("<answer>(97 - 81) + 52 + 6</answer>"), 1.0);
    assert_eq!(reward("<think>6*81</think> <answer>97-81+52+6 = 74</answer>"), 1.0);
    assert_eq!(reward("#### 97-81+52+6"), 1.0);
    assert_eq!(reward("\\boxed{97 - 81 + 52 + 6}"), 1.0);
    assert_eq!(reward("<answer>97 − 81 + 52 + 6</answer>"), 1.0);
    // Well formed, wrong value.
    assert_eq!(reward("<answer>97+81-52-6</answer>"), 0.1);
    // Wrong numbers, no expression, tricks.
    for wrong in [
        "<answer>74</answer>",
        "<answer>97-81+52</answer>",
        "<answer>97-81+52+6+0</answer>",
        "<answer>97-81+52+6+6-6</answer>",
        "<answer>(97-81+52+6</answer>",
        "<answer>97-81+52+6)</answer>",
        "<answer>__import__('os')</answer>",
        "<answer>97//81</answer>",
        "<answer></answer>",
        "97-81+52+6",
        "",
    ] {
        assert_eq!(reward(wrong), 0.0, "{wrong:?}");
    }
    assert!(countdown::evaluate("1/0").is_none());
    assert!(countdown::evaluate(&"(".repeat(100)).is_none());
    assert!(countdown::evaluate(&"9".repeat(1000)).is_none());
    let (value, used) = countdown::evaluate("8/(3-8/3)").unwrap();
    assert_eq!((value.to_string(), used.len()), ("24".into(), 4));
}

#[test]
fn a_careless_teacher_forgets_carries_and_nothing_else() {
    let careful = Synthetic::new(Kind::Addition, 3).unwrap();
    let careless = careful.clone().with_teacher_slips(1.0);
    let (mut wrong, mut without_carry) = (0, 0);
    for i in 0..200 {
        let (right, slipped) =
            (careful.draw(Split::Train, 1, i).unwrap(), careless.draw(Split::Train, 1, i).unwrap());
        assert_eq!((&right.prompt, &right.answer), (&slipped.prompt, &slipped.answer));
        let solution = careless.worked_solution(&slipped).unwrap();
        assert!(!solution.contains("+1="), "a carry was not forgotten: {solution}");
        let verdict = careless.verify(&slipped, &solution);
        let needs_carry = careful.worked_solution(&right).unwrap().contains("+1=");
        assert_eq!(verdict.reward < 0.5, needs_carry, "{solution}");
        wrong += usize::from(needs_carry);
        without_carry += usize::from(!needs_carry);
    }
    assert!(wrong > 50 && without_carry > 20, "{wrong} and {without_carry}");
}

#[test]
fn a_careless_teacher_of_word_problems_is_off_by_ten() {
    let careful = Synthetic::new(Kind::WordProblems, 4).unwrap();
    let careless = careful.clone().with_teacher_slips(1.0);
    let (mut wrong, mut equal) = (0, 0);
    for i in 0..300 {
        let (right, slipped) =
            (careful.draw(Split::Train, 1, i).unwrap(), careless.draw(Split::Train, 1, i).unwrap());
        assert_eq!((&right.prompt, &right.answer), (&slipped.prompt, &slipped.answer));
        let (exact, solution) =
            (careful.worked_solution(&right).unwrap(), careless.worked_solution(&slipped).unwrap());
        assert!(careful.verify(&right, &exact).reward > 0.5, "{exact}");
        let first = exact.lines().zip(solution.lines()).find(|(a, b)| a != b);
        let Some((exact, solution)) = first else {
            equal += 1;
            continue;
        };
        wrong += 1;
        let result = |line: &str| line.rsplit('=').next().unwrap().parse::<i64>().unwrap();
        assert!(exact.contains(['+', '-']), "only sums and differences have carries: {exact}");
        assert_eq!((result(exact) - result(solution)).abs(), 10, "{exact} and {solution}");
    }
    assert!(wrong > 100 && equal > 50, "{wrong} and {equal}");
}
