//! `qurl recipe`: the reference of the recipes, a first recipe of one's own, and a look at one without
//! running it.

mod calibration;
mod check;
mod init;
mod init_sft;
mod page;
mod time;

use crate::input::bad;
use crate::output::{self, out};
use qurl_train::recipe::json_schema;
use qurl_train::recipe::reference::{Key, keys, nearest};

/// Options of `qurl recipe`.
#[derive(clap::Args)]
#[command(
    after_help = "Example: qurl recipe rollout.n\n         qurl recipe init --model DIR --data train.jsonl \
                  --out mine.toml"
)]
#[command(args_conflicts_with_subcommands = true)]
pub struct Args {
    #[command(subcommand)]
    command: Option<Command>,
    /// A key such as rollout.n, a section such as rollout, or a name such as lr; without one all keys are
    /// listed
    key: Option<String>,
    /// Print docs/recipe.md
    #[arg(long, conflicts_with_all = ["key", "json"])]
    markdown: bool,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

#[derive(clap::Subcommand)]
enum Command {
    /// Writes a recipe with comments that runs as it is
    Init(init::Args),
    /// Reads recipe, model and data, and says what a run would be; starts nothing and writes nothing
    Check(check::Args),
    /// The JSON schema of recipes, for editors
    Schema(SchemaArgs),
}

/// Options of `qurl recipe schema`.
#[derive(clap::Args)]
#[command(after_help = "Example: qurl recipe schema > recipe.schema.json")]
struct SchemaArgs {
    /// On one line instead of indented
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: Args) -> anyhow::Result<()> {
    match args.command {
        Some(Command::Init(args)) => return init::run(args),
        Some(Command::Check(args)) => return check::run(args),
        Some(Command::Schema(args)) => {
            let schema = json_schema();
            let text = if args.json { schema.to_string() } else { serde_json::to_string_pretty(&schema)? };
            return Ok(out!("{text}")?);
        }
        None => {}
    }
    let all = keys();
    if args.markdown {
        return Ok(output::text(&page::markdown(&all))?);
    }
    let chosen = match &args.key {
        Some(key) => matching(&all, key)?,
        None => all,
    };
    match args.json {
        true => Ok(out!("{}", serde_json::to_string(&chosen)?)?),
        false => Ok(output::text(&page::text(&chosen))?),
    }
}

/// The key of this path, the keys of this section, or all keys of this name.
fn matching(all: &[Key], asked: &str) -> anyhow::Result<Vec<Key>> {
    let asked = asked.trim_matches(['[', ']']);
    let inside = format!("{asked}.");
    let mut found: Vec<Key> =
        all.iter().filter(|key| key.key == asked || key.key.starts_with(&inside)).cloned().collect();
    if found.is_empty() {
        found = all.iter().filter(|key| key.name() == asked).cloned().collect();
    }
    if found.is_empty() {
        let paths = all.iter().map(|key| key.key.as_str());
        let near = nearest(asked, paths.chain(all.iter().map(Key::name)));
        let advice =
            near.map_or("`qurl recipe` lists all".to_string(), |near| format!("did you mean `{near}`?"));
        return Err(bad(format!("there is no key or section `{asked}` in recipes; {advice}")));
    }
    Ok(found)
}
