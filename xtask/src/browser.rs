//! Chromium and its driver, for the tests that open the report and the live page. Where they are missing and
//! this is root on a Debian-like system they are installed; elsewhere those tests skip with a message, so
//! nothing here is an error.

use crate::system::{apt_install, is_root_on_debian, is_there};

/// The programs that the tests need, and the packages that bring them.
const PROGRAMS: &[&str] = &["chromium", "chromedriver"];
const PACKAGES: &[&str] = &["chromium", "chromium-driver"];

/// Installs what is missing, as far as that is possible.
pub fn complete() {
    if PROGRAMS.iter().all(|name| is_there(name)) {
        return;
    }
    if !is_root_on_debian() {
        println!(
            "== no Chromium: the tests of the report and the live page will skip (Debian: {})",
            PACKAGES.join(", ")
        );
        return;
    }
    println!("== installing {} for the tests of the report and the live page", PACKAGES.join(" and "));
    if !apt_install(PACKAGES) || !PROGRAMS.iter().all(|name| is_there(name)) {
        println!("== that did not work: those tests will skip");
    }
}
