//! Models of the Hugging Face hub by their ids, as far as the local cache has them. Nothing is downloaded.

use std::env;
use std::path::{Path, PathBuf};

/// The id `owner/name`, where a path looks like one.
pub fn id(path: &Path) -> Option<&str> {
    let text = path.to_str()?;
    let (owner, name) = text.split_once('/')?;
    let word = |part: &str| {
        let letters = part.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'));
        letters && !part.is_empty() && !part.starts_with('.')
    };
    (word(owner) && word(name)).then_some(text)
}

/// Where the cache is, as the hub's own programs look for it.
pub fn cache() -> Option<PathBuf> {
    let variable = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let home = || variable("XDG_CACHE_HOME").or_else(|| Some(variable("HOME")?.join(".cache")));
    variable("HF_HUB_CACHE")
        .or_else(|| Some(variable("HF_HOME")?.join("hub")))
        .or_else(|| Some(home()?.join("huggingface/hub")))
}

/// The directory of an id's newest snapshot in the cache.
pub fn cached(id: &str) -> Option<PathBuf> {
    cached_in(&cache()?, id)
}

fn cached_in(cache: &Path, id: &str) -> Option<PathBuf> {
    let model = cache.join(format!("models--{}", id.replace('/', "--")));
    let commit = qurl_files::read_text(&model.join("refs/main"), qurl_files::MIB).ok()?;
    let snapshot = model.join("snapshots").join(commit.trim());
    snapshot.join("config.json").exists().then_some(snapshot)
}

/// The id and the revision of a directory that is a snapshot in a cache of the hub.
pub fn of_snapshot(dir: &Path) -> Option<(String, String)> {
    let revision = dir.file_name()?.to_str()?;
    let snapshots = dir.parent().filter(|parent| parent.ends_with("snapshots"))?;
    let id = snapshots.parent()?.file_name()?.to_str()?.strip_prefix("models--")?;
    Some((id.replacen("--", "/", 1), revision.to_string()))
}

/// How to get the model of an id that is not in the cache.
pub fn how_to_get(id: &str) -> String {
    let cache = cache().map_or("not to be found".to_string(), |dir| dir.display().to_string());
    format!(
        "there is no such directory, and no such model in the local Hugging Face cache ({cache}); `hf \
         download {id}` puts it there, and `hf download {id} --local-dir DIR` makes a directory to name \
         instead"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_told_from_paths() {
        assert_eq!(id(Path::new("Qwen/Qwen2.5-0.5B")), Some("Qwen/Qwen2.5-0.5B"));
        for path in [
            "Qwen2.5-0.5B",
            "/models/qwen",
            "./models/qwen",
            "../qwen",
            "models/qwen/base",
            "models/",
            "a b/c",
        ] {
            assert_eq!(id(Path::new(path)), None, "{path}");
        }
    }

    #[test]
    fn the_snapshot_of_the_main_branch_is_taken() {
        let cache = env::temp_dir().join(format!("qurl-hub-{}", std::process::id()));
        let model = cache.join("models--Qwen--Tiny");
        std::fs::create_dir_all(model.join("refs")).expect("made");
        std::fs::create_dir_all(model.join("snapshots/abc")).expect("made");
        std::fs::write(model.join("refs/main"), "abc\n").expect("written");
        assert_eq!(cached_in(&cache, "Qwen/Tiny"), None, "a snapshot without a model");
        std::fs::write(model.join("snapshots/abc/config.json"), "{}").expect("written");
        let snapshot = cached_in(&cache, "Qwen/Tiny").expect("a snapshot");
        assert_eq!(snapshot, model.join("snapshots/abc"));
        let of = |dir: &Path| of_snapshot(dir).map(|(id, revision)| format!("{id}@{revision}"));
        assert_eq!(of(&snapshot).as_deref(), Some("Qwen/Tiny@abc"));
        for other in
            [model.as_path(), &model.join("snapshots"), Path::new("snapshots/abc"), Path::new("/models/qwen")]
        {
            assert_eq!(of(other), None, "{}", other.display());
        }
        assert_eq!(cached_in(&cache, "Qwen/Other"), None);
        std::fs::remove_dir_all(&cache).expect("removed");
    }
}
