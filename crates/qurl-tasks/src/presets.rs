//! Prompt templates and evaluation settings of published recipes, as plain data with names.

use crate::grader::Policy;
use crate::task::{Message, Prompt};

/// How a problem becomes a prompt: `{problem}` is replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Template {
    /// The name in recipes and on the command line.
    pub name: &'static str,
    /// The system message, if any.
    pub system: Option<&'static str>,
    /// The user's message.
    pub user: &'static str,
    /// Whether the prompt is chat messages rather than text to continue.
    pub chat: bool,
}

/// The problem and nothing else.
pub const PLAIN: Template = Template { name: "plain", system: None, user: "{problem}", chat: false };

/// DAPO: the answer on a last line of its own.
pub const DAPO: Template = Template {
    name: "dapo",
    system: None,
    user: "Solve the following math problem step by step. The last line of your response should be of the \
           form Answer: $Answer \
           (without quotes) where $Answer is the answer to the problem.\n\n{problem}\n\nRemember to put \
           your answer on its own line \
           after \"Answer:\".",
    chat: true,
};

/// DeepScaleR: the answer in a box.
pub const DEEPSCALER: Template = Template {
    name: "deepscaler",
    system: None,
    user: "{problem} Let's think step by step and output the final answer within \\boxed{}.",
    chat: true,
};

/// Qwen's mathematics models: the instruction in the system message.
pub const QWEN_MATH: Template = Template {
    name: "qwen_math",
    system: Some("Please reason step by step, and put your final answer within \\boxed{}."),
    user: "{problem}",
    chat: true,
};

/// GSM8K as verl prepares it: the answer after `####`.
pub const GSM8K: Template = Template {
    name: "gsm8k",
    system: None,
    user: "{problem} Let's think step by step and output the final answer after \"####\".",
    chat: true,
};

/// Countdown: thoughts and answer in tags.
pub const COUNTDOWN: Template = Template {
    name: "countdown",
    system: None,
    user: "{problem} Show your work in <think> </think> tags and return the final expression in <answer> \
           </answer> tags, for example <answer> (1 + 2) / 3 </answer>.",
    chat: true,
};

/// All templates.
pub const TEMPLATES: [Template; 6] = [PLAIN, DAPO, DEEPSCALER, QWEN_MATH, GSM8K, COUNTDOWN];

impl Template {
    /// The prompt of a problem.
    pub fn apply(&self, problem: &str) -> Prompt {
        let text = self.user_text(problem);
        if !self.chat {
            return Prompt::Text(text);
        }
        let message = |role: &str, content: &str| Message { role: role.into(), content: content.into() };
        let system = self.system.map(|content| message("system", content));
        Prompt::Chat(system.into_iter().chain([message("user", &text)]).collect())
    }

    /// What the user says of a problem.
    pub(crate) fn user_text(&self, problem: &str) -> String {
        self.user.replace("{problem}", problem)
    }

    /// A template by name.
    pub fn named(name: &str) -> Result<Template, UnknownPreset> {
        find(name, TEMPLATES, |t| t.name)
    }
}

/// How a model is evaluated.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EvalPreset {
    /// The name on the command line.
    pub name: &'static str,
    /// How problems become prompts.
    pub template: Template,
    /// How responses are graded.
    pub policy: Policy,
    /// Sampling temperature.
    pub temperature: f64,
    /// Nucleus sampling threshold.
    pub top_p: f64,
    /// Samples per problem.
    pub samples: u32,
    /// Longest response in tokens.
    pub max_new_tokens: u32,
}

/// The evaluation settings of published recipes.
pub const EVAL_PRESETS: [EvalPreset; 4] = [
    EvalPreset {
        name: "dapo",
        template: DAPO,
        policy: Policy::AnswerLine,
        temperature: 1.0,
        top_p: 0.7,
        samples: 32,
        max_new_tokens: 8192,
    },
    EvalPreset {
        name: "deepscaler",
        template: DEEPSCALER,
        policy: Policy::ThinkSplit,
        temperature: 0.6,
        top_p: 0.95,
        samples: 32,
        max_new_tokens: 32_768,
    },
    EvalPreset {
        name: "qwen_math",
        template: QWEN_MATH,
        policy: Policy::Equivalence,
        temperature: 0.6,
        top_p: 0.95,
        samples: 16,
        max_new_tokens: 4096,
    },
    EvalPreset {
        name: "gsm8k",
        template: GSM8K,
        policy: Policy::Gsm8kStrict,
        temperature: 1.0,
        top_p: 1.0,
        samples: 1,
        max_new_tokens: 512,
    },
];

impl EvalPreset {
    /// A preset by name.
    pub fn named(name: &str) -> Result<EvalPreset, UnknownPreset> {
        find(name, EVAL_PRESETS, |p| p.name)
    }
}

/// An unknown template or preset.
#[derive(Debug, thiserror::Error)]
#[error("unknown preset {name:?}, expected one of {expected}")]
pub struct UnknownPreset {
    /// The name that was given.
    pub name: String,
    /// The names there are.
    pub expected: String,
}

fn find<T, const N: usize>(
    name: &str,
    all: [T; N],
    name_of: fn(&T) -> &'static str,
) -> Result<T, UnknownPreset> {
    let expected = all.iter().map(name_of).collect::<Vec<_>>().join(", ");
    all.into_iter().find(|item| name_of(item) == name).ok_or(UnknownPreset { name: name.into(), expected })
}
