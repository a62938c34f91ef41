//! A Python for tests against other programs.

use std::process::Command;

/// Says which of some modules are missing, without importing more of them than it has to.
const MISSING: &str = "
import importlib.util, sys
def is_there(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False
print(' '.join(name for name in sys.argv[1:] if not is_there(name)))
";

/// A Python that has these modules: the one that QURL_PYTHON names, or else the `python3` that is found.
/// Where they are missing it says so, and the test is skipped.
pub fn python(modules: &[&str]) -> Option<String> {
    let (python, named) = match std::env::var("QURL_PYTHON") {
        Ok(python) => (python, " (QURL_PYTHON)"),
        Err(_) => ("python3".to_string(), ", and QURL_PYTHON names none"),
    };
    let missing = match Command::new(&python).args(["-c", MISSING]).args(modules).output() {
        Ok(output) if output.status.success() => String::from_utf8_lossy(&output.stdout).trim().to_string(),
        _ => modules.join(" "),
    };
    if missing.is_empty() {
        return Some(python);
    }
    println!("skipped: {python}{named} has not: {missing}");
    None
}
