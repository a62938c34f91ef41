//! Whether the frozen base beside which adapters are trained is the one that a run was begun with.
//!
//! A checkpoint has no weights of the base, only a checksum of each of its leaves, made while they were
//! packed: adapters that continue beside other weights would compute something that nobody trained.

use qurl_model::{ModelConfig, params};
use std::path::{Path, PathBuf};

/// A base that was changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{}: {changed} of {of} weights of the base are not those that the run was begun with, first `{first}`; \
     expected those that its adapters were trained beside: put the files back, or begin a new run from the \
     adapters with `lora.path`",
    dir.display()
)]
pub struct OtherBase {
    /// The directory of the base.
    pub dir: PathBuf,
    /// How many of its leaves are others.
    pub changed: usize,
    /// Of how many.
    pub of: usize,
    /// The first of them, or what there is too many or too few of.
    pub first: String,
}

/// Compares the checksums of a base with those of a checkpoint. Checkpoints of older versions have none: then
/// it says what is not known.
pub(crate) fn check(
    dir: &Path,
    config: &ModelConfig,
    own: &[u64],
    stored: Option<&[u64]>,
) -> Result<Option<String>, OtherBase> {
    let Some(stored) = stored else {
        return Ok(Some(format!(
            "warning: {}: the checkpoint was written by an older version and does not say which weights the \
             base had; that they are still the same is not checked",
            dir.display()
        )));
    };
    let shapes = params::shapes(config, false);
    let names = shapes.iter().map(|info| info.name.as_str());
    let differ = names.enumerate().filter(|(index, _)| own.get(*index) != stored.get(*index));
    let differ: Vec<&str> = differ.map(|(_, name)| name).collect();
    match differ.first() {
        None => Ok(None),
        Some(first) => Err(OtherBase {
            dir: dir.to_path_buf(),
            changed: differ.len(),
            of: own.len(),
            first: first.to_string(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_leaf_is_named_and_what_an_old_checkpoint_does_not_say_is_said() {
        let config = ModelConfig::named("qwen2.5-0.5b").expect("a shape");
        let count = params::shapes(&config, false).iter().count();
        let own: Vec<u64> = (0..count as u64).collect();
        let (dir, check) = (Path::new("models/base"), |own: &[u64], stored| {
            check(Path::new("models/base"), &config, own, stored)
        });
        assert_eq!(check(&own, Some(&own)), Ok(None));
        let warning = check(&own, None).expect("a doubt").expect("a warning");
        assert!(warning.contains("models/base") && warning.contains("older version"), "{warning}");
        let mut other = own.clone();
        (other[3], other[count - 1]) = (77, 78);
        let error = check(&other, Some(&own)).expect_err("changed");
        let name = params::shapes(&config, false).iter().nth(3).expect("a leaf").name.clone();
        assert_eq!(error, OtherBase { dir: dir.to_path_buf(), changed: 2, of: count, first: name.clone() });
        assert!(error.to_string().contains(&name), "{error}");
    }
}
