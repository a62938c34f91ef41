//! The reference as text for a terminal and as the page docs/recipe.md.

use qurl_train::recipe::reference::Key;
use std::fmt::Write;

/// Columns of a terminal.
const COLUMNS: usize = 100;

const HEAD: &str = "# Recipes: every key

A recipe is a TOML file that says what a run does: `qurl train mine.toml`, or `qurl sft mine.toml` for
supervised training ([sft.md](sft.md)). This page is generated from the program
(`qurl recipe --markdown > docs/recipe.md`); `qurl recipe KEY` shows the same of one key or section, and
`qurl recipe schema` prints a JSON schema that editors complete by.

- `qurl recipe init --model DIR --data FILE --out mine.toml` writes a recipe with comments that runs as it is;
  `--algorithm` is grpo, ppo, dapo or sft.
- `qurl recipe check mine.toml` reads recipe, model and data and says what a run would be, without starting
  one.
- `--set KEY=VALUE` overrides any key on the command line, as in `--set trainer.seed=7`, in an entry of a list
  by its number, as in `--set task.rewards[0].weight=2`. The value is TOML; what is not is taken as text.
- Paths in a recipe are relative to the directory of its file, those given with `--set` to the working
  directory. The `recipe.toml` in a run's directory has absolute ones, and the directory that reward commands
  run in, so that a run resumes from anywhere.
- An editor with a TOML language server completes and checks a recipe that begins with
  `#:schema ./recipe.schema.json`, after `qurl recipe schema > recipe.schema.json`.
- Sections may be written as `[actor.optim]` or inline as `optim = { weight_decay = 0.0 }`.
";

/// For a terminal: a key with what it may be, and below it what it means.
pub fn text(keys: &[Key]) -> String {
    let mut page = String::new();
    for key in keys {
        match key.is_section() {
            true => _ = writeln!(page, "[{}]{}{}", key.key, repeated(key), only_with(key)),
            false => {
                _ = writeln!(page, "  {}: {}; {}{}", key.key, value(key), otherwise(key), only_with(key))
            }
        }
        wrap(&mut page, &key.meaning, if key.is_section() { "  " } else { "      " }, "");
        for choice in key.choices.iter().filter(|choice| !choice.meaning.is_empty()) {
            wrap(&mut page, &format!("{}: {}", choice.name, choice.meaning), "      - ", "  ");
        }
    }
    page
}

/// For docs/recipe.md: a table a section.
pub fn markdown(keys: &[Key]) -> String {
    let mut page = HEAD.to_string();
    for section in keys.iter().filter(|key| key.is_section()) {
        let own: Vec<&Key> =
            keys.iter().filter(|key| key.section() == section.key && !key.is_section()).collect();
        let title = if section.kind == "section" {
            format!("[{}]", section.key)
        } else {
            format!("[[{}]]", section.key)
        };
        let required = if section.required { " Required." } else { "" };
        let only = only_with(section);
        let only = only.strip_prefix("; ").map_or(String::new(), |only| format!(" ({only})"));
        let _ = write!(page, "\n## `{title}`\n");
        wrap(&mut page, &format!("{}{required}{only}", cell(&section.meaning)), "", "");
        if !own.is_empty() {
            page.push_str("\n| key | value | default | meaning |\n|---|---|---|---|\n");
        }
        for key in own {
            let mut meaning = cell(&key.meaning);
            for choice in key.choices.iter().filter(|choice| !choice.meaning.is_empty()) {
                let _ = write!(meaning, "<br>`{}`: {}", choice.name, cell(&choice.meaning));
            }
            let default = match &key.default {
                _ if key.required => "required".to_string(),
                Some(default) => format!("`{default}`"),
                None => "not set".to_string(),
            };
            let only = only_with(key);
            let only = only.strip_prefix("; ").map_or(String::new(), |only| format!("<br>({only})"));
            let _ = writeln!(page, "| `{}` | {}{only} | {default} | {meaning} |", key.key, cell(&value(key)));
        }
    }
    page
}

/// A text inside a table.
fn cell(text: &str) -> String {
    text.replace('|', "\\|").replace("\n\n", "<br>").replace('\n', " ")
}

/// What the value may be.
fn value(key: &Key) -> String {
    let names: Vec<&str> = key.choices.iter().map(|choice| choice.name.as_str()).collect();
    match &key.range {
        Some(range) => range.clone(),
        None if !names.is_empty() => format!("one of {}", names.join(", ")),
        None => key.kind.clone(),
    }
}

fn otherwise(key: &Key) -> String {
    match key.default {
        Some(_) if !key.required => format!("default {}", key.otherwise()),
        _ => key.otherwise(),
    }
}

fn only_with(key: &Key) -> String {
    match key.only_with.is_empty() {
        true => String::new(),
        false => format!("; only with type {}", key.only_with.join(", ")),
    }
}

fn repeated(key: &Key) -> &'static str {
    if key.kind == "section" { "" } else { ", any number of times" }
}

/// A paragraph in lines that begin with `first`, and with as many spaces and `more` from the second on.
fn wrap(page: &mut String, text: &str, first: &str, more: &str) {
    let indent = format!("{}{more}", " ".repeat(first.chars().count()));
    let (mut line, mut begun) = (first.to_string(), false);
    for word in text.split_whitespace() {
        if begun && line.chars().count() + 1 + word.chars().count() > COLUMNS {
            let _ = writeln!(page, "{line}");
            (line, begun) = (indent.clone(), false);
        }
        if begun {
            line.push(' ');
        }
        line.push_str(word);
        begun = true;
    }
    let _ = writeln!(page, "{line}");
}
