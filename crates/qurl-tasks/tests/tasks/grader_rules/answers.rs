//! Words and choices, answers inside of responses, and policies.

use super::check;
use qurl_tasks::grader::{Policy, grade};

#[test]
fn words_and_choices() {
    check(
        &[
            ("\\text{odd}", "odd"),
            ("\\text{Even}", "even"),
            ("\\text{two lines}", "Two lines."),
            ("\\mbox{Saturday}", "\\text{Saturday}"),
            ("\\text{ellipse}", "an ellipse"),
            ("\\text{Navin}", "{Navin}"),
            ("\\text{yes}", "Yes"),
            ("\\text{(B)}", "B"),
            ("B", "(B)"),
            ("B", "\\text{B}"),
            ("B", "\\textbf{(B)}"),
            ("B", "B."),
            ("B", "(B) 12"),
            ("B", "B. 12"),
            ("12", "(B) 12"),
            ("12", "\\textbf{(B)}\\ 12"),
            ("\\text{October 30}", "October 30"),
            ("\\mbox{four}", "4"),
            ("\\text{forty-two}", "42"),
        ],
        &[
            ("B", "C"),
            ("B", "(C) 12"),
            ("A", "B"),
            ("\\text{(C)}", "\\text{A,C}"),
            ("odd", "even"),
            ("odd", "oddd"),
            ("\\text{June 20}", "\\text{June 21}"),
            ("E", "\\mathrm{E}*2"),
            ("A", "A+1"),
            ("B", "Because 12"),
            ("yes", "no"),
        ],
    );
}

#[test]
fn extraction() {
    let right = [
        ("7", "So \\boxed{7}."),
        ("7", "First \\boxed{5}, then \\boxed{7}"),
        ("\\frac{1}{2}", "$\\boxed{\\frac{1}{2}}$"),
        ("\\{1,2\\}", "$\\boxed{\\{1, 2\\}}$"),
        ("7", "We get 3 + 4.\n#### 7"),
        ("1234", "#### 1,234"),
        ("7", "Answer: 7"),
        ("7", "**Answer:** 7"),
        ("7", "The answer is 7."),
        ("7", "The final answer is $7$. I hope it is correct."),
        ("7", "**Final Answer**\n\\boxed{7}"),
        ("7", "<think>maybe \\boxed{3}</think> It is \\boxed{7}"),
        ("7", "<think>3</think><answer>7</answer>"),
        ("7", "<answer>\\boxed{7}</answer>"),
        ("7", "I count 3, 4, and in the end there are 7"),
        ("7", "therefore $x = 7$"),
        ("7.5", "It costs $7.50."),
        ("-3", "so it goes to -3."),
        ("7", "the result is 7<|im_end|>"),
        ("x<3", "We find $x < 3$."),
        ("(1,2)", "The point is $(1,2)$."),
        ("1,2", "$\\boxed{1}$ and $\\boxed{2}$"),
        ("7", "答案是7"),
        ("12", "\\boxed 12"),
        ("12", "$\\fbox{12}$"),
        ("5", "\\boxed{5}\n\n\\boxed{5}"),
        ("circle", "The answer is a circle."),
        ("B", "The correct option is B"),
        ("B", "Option B"),
        ("yes", "Yes, it is."),
        ("5", "Therefore, x = 5."),
        ("18", "She makes 9 * 2 = $<<9*2=18>>18 every day.\n#### 18"),
    ];
    let wrong = [
        ("7", "First \\boxed{7}, then \\boxed{5}"),
        ("7", "#### 8"),
        ("7", "Answer: 8"),
        ("7", "\\boxed{}"),
        ("7", "A7Z"),
        ("7", "no idea"),
        ("7", ""),
        ("7", "   \n"),
        ("7", "<think>\\boxed{7}</think> It is \\boxed{3}"),
        ("circle", "there are 7 circles or 3 squares"),
    ];
    for (gold, response) in right {
        let grade = grade(gold, response, Policy::Equivalence);
        assert!(grade.equal, "{gold} in {response:?}: {grade:?}");
    }
    for (gold, response) in wrong {
        let grade = grade(gold, response, Policy::Equivalence);
        assert!(!grade.equal, "{gold} not in {response:?}: {grade:?}");
    }
}

#[test]
fn policies_differ_where_they_should() {
    let cases = [
        (Policy::StrictBox, "5", "the answer is 5", false),
        (Policy::StrictBox, "5", "\\boxed{5}", true),
        (Policy::AnswerLine, "5", "\\boxed{5}", false),
        (Policy::AnswerLine, "5", "so\nAnswer: $5$\n", true),
        (Policy::AnswerLine, "5", "Answer: 4\nAnswer: 5", true),
        (Policy::ThinkSplit, "5", "\\boxed{5}", false),
        (Policy::ThinkSplit, "5", "hm</think>\\boxed{5}", true),
        (Policy::ThinkSplit, "5", "\\boxed{5}</think>", false),
        (Policy::BracketAnswer, "5", "it is [5.0]", true),
        (Policy::BracketAnswer, "5", "it is 5", false),
        (Policy::AnswerTags, "2x", "<answer>x+x</answer>", true),
        (Policy::AnswerTags, "2x", "x+x", false),
        (Policy::PercentAsRatio, "50\\%", "0.5", true),
        (Policy::PercentAsRatio, "50\\%", "50", false),
        (Policy::PercentAsRatio, "50\\%", "50%", true),
        (Policy::ReducedFraction, "\\frac12", "\\frac{2}{4}", false),
        (Policy::ReducedFraction, "\\frac12", "\\frac{1}{2}", true),
        (Policy::ReducedFraction, "\\frac12", "2/4", false),
        (Policy::ReducedFraction, "\\frac12", "0.5", true),
        (Policy::DapoNormalize, "1000", "1,000", true),
        (Policy::DapoNormalize, "\\frac{1}{2}", "0.5", false),
        (Policy::DapoNormalize, "5", "x = 5", true),
    ];
    for (policy, gold, response, expected) in cases {
        let grade = grade(gold, response, policy);
        assert_eq!(grade.equal, expected, "{}: {gold} in {response:?}: {grade:?}", policy.name());
    }
    let far = format!("Answer: 5\n{}", "x".repeat(400));
    assert!(!grade("5", &far, Policy::DapoTail300).equal);
    assert!(grade("5", &format!("{}\nAnswer: 5", "x".repeat(400)), Policy::DapoTail300).equal);
    assert!("nonsense".parse::<Policy>().unwrap_err().to_string().contains("strict_box"));
}
