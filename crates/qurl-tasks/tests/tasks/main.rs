//! Proof of tasks, data sets and graders.

mod common;
mod datasets;
mod evaluation;
mod external;
mod extract;
mod gold_answers;
mod grader_cases;
mod grader_properties;
mod grader_rules;
mod gsm8k_strict;
mod hostile_files;
mod prompts;
mod rewards;
mod tasks;
