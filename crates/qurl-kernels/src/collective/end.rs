//! The end of a process that cannot go on.

use std::ffi::c_int;
use std::io::Write;

unsafe extern "C" {
    /// Of the C library: ends the process without running anything of it.
    safe fn _exit(status: c_int) -> !;
}

/// Says why and ends the process at once, whatever its threads are waiting in: libraries that wait for a lost
/// rank would wait for it in their own clean-up, too.
pub(super) fn process(message: &str) -> ! {
    say(message);
    silently()
}

/// Says why the process will end.
pub(super) fn say(message: &str) {
    // Where standard error is gone there is nobody to tell.
    let mut stderr = std::io::stderr().lock();
    let _ = writeln!(stderr, "qurl: {message}");
    let _ = stderr.flush();
}

/// Ends the process at once; somebody else says why.
pub(super) fn silently() -> ! {
    _exit(1)
}
